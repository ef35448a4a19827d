"""Rules for the keys of a drafter's config.json: the allowed values of the keys that are read, the
keys that may be ignored, and the keys for which this project supports a single value."""

from collections.abc import Callable
from typing import Any, NamedTuple

from transformers import Qwen3Config

from infer.drafters.heads.table import CONDITIONAL_HEADS


def is_positive_number(value: Any) -> bool:
    """Return whether `value` is an int or a float above 0. A boolean does not count as an int."""
    return type(value) in (int, float) and value > 0


def is_integer_list(value: Any) -> bool:
    """Return whether `value` is a non-empty list of integers. Booleans do not count as integers."""
    return type(value) is list and {type(element) for element in value} == {int}


def is_layer_type_list(value: Any) -> bool:
    """Return whether `value` is a list of the attention types that drafters support, full_attention
    and sliding_attention."""
    allowed = ("full_attention", "sliding_attention")
    return type(value) is list and all(element in allowed for element in value)


# Key: a kind of config.json value (`KeyRule.kind`). Value: a function that returns whether a value
# is allowed, and a description of the allowed values for messages.
CONFIG_VALUE_CHECKS_BY_KIND: dict[str, tuple[Callable[[Any], bool], str]] = {
    "number": (is_positive_number, "a number above 0"),
    "flag": (lambda value: type(value) is bool, "true or false"),
    "object": (lambda value: type(value) is dict, "an object"),
    "list": (is_integer_list, "a list of integers"),
    "layers": (is_layer_type_list, "a list of full_attention and sliding_attention"),
}


class KeyRule(NamedTuple):
    """The allowed values of a key of config.json.

    If `choices` is not empty, it holds the allowed values. Otherwise, `kind` decides: "integer"
    allows integers from `minimum` to `maximum`, and the other kinds are explained in
    `CONFIG_VALUE_CHECKS_BY_KIND`.
    """

    kind: str = "integer"
    minimum: int = 1
    maximum: int = 2**31 - 1
    choices: tuple = ()

    def find_problem(self, value: Any) -> str | None:
        """Return why a value is not allowed, for example "is 0, expected an integer of at least 1";
        None if it is allowed."""
        if self.choices:
            allowed = value in self.choices
            expected = " or ".join(map(str, self.choices))
        elif self.kind == "integer":
            allowed = type(value) is int and value >= self.minimum
            expected = f"an integer of at least {self.minimum}"
            if allowed and value > self.maximum:
                return f"exceeds the limit of {self.maximum}"
        else:
            check, expected = CONFIG_VALUE_CHECKS_BY_KIND[self.kind]
            allowed = check(value)
        return None if allowed else f"is {value!r}, expected {expected}"


REQUIRED_SIZE_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)
OPTIONAL_INTEGER_DRAFTER_CONFIG_KEYS = (
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window"),
    *("draft_vocab_size", "num_target_layers", "target_num_hidden_layers", "target_hidden_size"),
    *("conv_group_size", "xpress_mlp_hidden"),
)
# Three config.json keys for the same flag, which makes all layers causal within the block. vLLM and
# the DFlash authors use is_causal, vLLM also uses causal, and JetSpec uses causal_head.
CAUSAL_KEYS = ("is_causal", "causal", "causal_head")
BOOLEAN_DRAFTER_CONFIG_KEYS = (
    *("sliding_window_non_causal", "use_sliding_window", "sample_from_anchor", "shift_label"),
    *("shifted", "qk_norm", "norm_twice", "layer_fusion"),
)
DRAFTER_CONFIG_KEY_RULES = {
    **dict.fromkeys((*REQUIRED_SIZE_KEYS, *OPTIONAL_INTEGER_DRAFTER_CONFIG_KEYS), KeyRule()),
    # Without the maxima below, a wrong value in config.json could create a huge model before the
    # checkpoint's tensors show that the value is wrong.
    "num_hidden_layers": KeyRule(maximum=1024),
    **dict.fromkeys(("block_size", "draft_length"), KeyRule(maximum=4096)),
    **dict.fromkeys(("mask_token_id", "max_window_layers", "conv_kernel_size"), KeyRule(minimum=0)),
    **dict.fromkeys(("rms_norm_eps", "rope_theta"), KeyRule("number")),
    **dict.fromkeys((*CAUSAL_KEYS, *BOOLEAN_DRAFTER_CONFIG_KEYS), KeyRule("flag")),
    **dict.fromkeys(("rope_parameters", "rope_scaling", "chat_template_kwargs"), KeyRule("object")),
    "target_layer_ids": KeyRule("list"),
    "layer_types": KeyRule("layers"),
    "last_tap": KeyRule(choices=("raw", "normed")),
    "projector_type": KeyRule(choices=("dflash", "dspark", "domino")),
    **{
        key.name: KeyRule(minimum=key.minimum, choices=key.choices)
        for spec in CONDITIONAL_HEADS.values()
        for key in spec.config_keys
    },
}
# Keys of config.json that change what a drafter computes. Value: the only supported value of the
# key.
ONLY_SUPPORTED_VALUE_BY_CONFIG_KEY: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "add_swa_attention_sink_bias": False,
    "attention_sink_bias": False,
    "attention_value_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": 0.0,
    "logit_scale": 1.0,
    "input_embedding_scale": 1.0,
    "partial_rotary_factor": 1.0,
    "norm_before_residual": False,
    "is_neox_style": True,
    "rope_is_neox_style": True,
    "rope_interleave": False,
    "rotary_pct": 1.0,
    "use_rope": True,
    "use_qk_norm": True,
    "hidden_activation": "silu",
    "residual_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "lm_head_multiplier": 1.0,
    "norm_before_fc": False,
    "use_aux_hidden_state": True,
    "use_swa": False,  # true would mean a sliding window in layers that are not causal
    "fusion_type": "concat_fc",
    "quantization_config": None,
}
# Keys of `rope_parameters` that are allowed but not required.
OPTIONAL_ROPE_KEYS = {
    *("attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"),
    *("factor", "original_max_position_embeddings"),
}
# Keys of `rope_parameters` that give image tokens a different position in each section of a head.
# They are ignored, because text tokens have the same position in all sections.
IMAGE_ROPE_KEYS = ("mrope_section", "mrope_interleaved")
# Key: an allowed value of rope_type. Value: the keys of `rope_parameters` that this value requires.
REQUIRED_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
# Keys of config.json that do not change what a drafter computes. They occur in published drafters,
# or transformers writes them into every config.json (some only before release 5).
IGNORED_DRAFTER_CONFIG_KEYS = {
    *("auto_map", "attention_mode", "attention_backend", "candidate_tokens", "num_anchors"),
    *("max_anchors", "loss_decay_gamma", "torch_dtype", "confidence_head_alpha"),
    *("selector_loss_weight", "speculators_config", "speculators_model_type"),
    *("speculators_version", "_torchspec_version", "model_arch", "gate_temperature"),
    *("xpress_block_size", "attn_implementation", "_attn_implementation", "use_return_dict"),
    *("pruned_heads", "torchscript", "use_bfloat16", "is_decoder", "add_cross_attention"),
    *("tie_encoder_decoder", "pretraining_tp", "tokenizer_class", "prefix", "sep_token_id"),
    *("decoder_start_token_id", "cache_implementation", "max_length", "min_length", "do_sample"),
    *("early_stopping", "num_beams", "num_beam_groups", "temperature", "top_k", "top_p"),
    *("typical_p", "repetition_penalty", "length_penalty", "diversity_penalty"),
    *("no_repeat_ngram_size", "num_return_sequences", "output_scores", "return_dict_in_generate"),
    *("forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values"),
    *("encoder_no_repeat_ngram_size", "tf_legacy_loss"),
} | Qwen3Config().to_dict().keys()
# An unknown config.json key whose name contains one of these words is ignored with a warning: it
# probably records how, or by whom, the drafter was made.
WORDS_IN_IGNORED_CONFIG_KEYS = {
    *("train", "training", "trained", "trainer", "loss", "lr", "epoch", "epochs", "seed"),
    *("optimizer", "dataset", "datasets", "version", "commit", "date", "author", "authors"),
    *("license", "url"),
}
