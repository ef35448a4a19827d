"""Properties of a target that follow from its config.json: the attention windows of its layers, the
scale of its logits, and whether draft trees can be verified with it.

These properties are known before weights are loaded. docs/targets.md lists the supported model
families.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import nn

from infer.targets.recurrent_modules import find_unsupported_recurrent_class_name

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Value of a config's `layer_types` for layers in which a query attends only to positions of its own
# chunk (Llama 4).
CHUNKED_ATTENTION_LAYER_TYPE = "chunked_attention"
# Values of a config's `layer_types` for attention layers. Attention of these types can be computed
# with a mask over all cached positions.
ATTENTION_LAYER_TYPES = {"full_attention", "sliding_attention", CHUNKED_ATTENTION_LAYER_TYPE}
# Values of a config's `layer_types` for layers that keep a recurrent or convolution state.
RECURRENT_LAYER_TYPES = ("linear_attention", "conv", "hybrid", "mamba", "recurrent")
# Prefixes of config.json keys that only models with recurrent layers have.
RECURRENT_CONFIG_PREFIXES = ("mamba_", "ssm_", "lru_", "linear_key_head_dim", "conv_L_cache")
# Values of `model_type` for models with recurrent layers with which draft trees can be verified
# (infer/targets/recurrent.py).
SUPPORTED_RECURRENT_MODELS = {
    # models with Gated DeltaNet
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"),
    *("kimi_linear", "bailing_hybrid"),  # models with KDA
    *("nemotron_h", "falcon_h1", "bamba", "granitemoehybrid", "zamba2"),  # models with Mamba-2
    *("lfm2", "lfm2_moe", "lfm3"),  # models with short convolutions
}
# Features that our KV cache, attention masks or language model head do not support. Keys are keys
# of config.json. Values describe the feature in error messages.
UNSUPPORTED_FEATURE_BY_CONFIG_KEY = {
    "cross_attention_layers": "layers that attend to images",
    "use_bidirectional_attention": "layers that attend to later positions",
    "output_logit_soft_cap": "a scale of the logits that is not supported",
    "depth_decoder_config": "a second decoder for audio",
}


@dataclass(frozen=True)
class LogitScale:
    """How a target scales its logits. The outputs of the language model head are divided by
    `divisor` (Cohere, Granite, Falcon-H1), and then limited to the range from -cap to cap by a tanh
    (Gemma)."""

    divisor: float = 1.0
    cap: float | None = None

    def __call__(self, raw_logits: torch.Tensor) -> torch.Tensor:
        """Scale the outputs of the language model head. `raw_logits` may have any shape; it is
        returned unchanged if the target does not scale logits."""
        if self.divisor != 1:
            raw_logits = raw_logits / self.divisor
        if self.cap is None:
            return raw_logits
        return torch.tanh(raw_logits / self.cap) * self.cap

    def derivative(self, logits: torch.Tensor) -> torch.Tensor | float | None:
        """Return the derivative of the scaled logits with respect to the unscaled outputs of the
        language model head, or None if the derivative is 1.

        logits: the scaled logits
        """
        if self.cap is not None:
            return (1 - (logits / self.cap).square()) / self.divisor
        if self.divisor == 1:
            return None
        return 1 / self.divisor


IDENTITY_LOGIT_SCALE = LogitScale()


def get_first_truthy_setting(config: "PretrainedConfig", *names: str) -> Any:
    """Return the first truthy value among the attributes `names` of a config, or None if there is
    none. The values 0 and false and empty values therefore count as missing."""
    for name in names:
        value = getattr(config, name, None)
        if value:
            return value
    return None


def get_logit_scale(config: "PretrainedConfig") -> LogitScale:
    """Return how a target scales its logits."""
    factor = get_first_truthy_setting(config, "logit_scale", "lm_head_multiplier") or 1
    divisor = get_first_truthy_setting(config, "logits_scaling") or 1 / factor
    return LogitScale(float(divisor), get_first_truthy_setting(config, "final_logit_softcapping"))


def get_attention_windows(config: "PretrainedConfig") -> dict[str, int | None]:
    """Return the size of the sliding window or attention chunk of each layer type of a target. The
    size is a number of positions, including the query's own. None means that a query attends to all
    earlier positions.

    The keys are the layer types in the config. If the config's class has no `layer_types` (Mistral,
    Phi-3), all layers use the same attention mask, and the only key is "all".
    """
    window = get_first_truthy_setting(config, "sliding_window")
    layer_types = get_first_truthy_setting(config, "layer_types") or []
    if config.model_type in SUPPORTED_RECURRENT_MODELS:
        types = {"full_attention", *layer_types} & ATTENTION_LAYER_TYPES
        windows = dict.fromkeys(sorted(types))
        if "sliding_attention" in windows:
            windows["sliding_attention"] = window
        return windows
    class_attributes = dir(type(config))
    if "layer_types" not in class_attributes or not config.layer_types:
        return {"all": window if "sliding_window" in class_attributes else None}
    windows_by_type = {
        "sliding_attention": window,
        CHUNKED_ATTENTION_LAYER_TYPE: get_first_truthy_setting(config, "attention_chunk_size"),
    }
    types = sorted(set(config.layer_types))
    return {layer_type: windows_by_type.get(layer_type) for layer_type in types}


def get_attention_layer_ids(config: "PretrainedConfig") -> list[int]:
    """Return the indices of a target's attention layers. These are all layers that are not
    recurrent."""
    default_types = ["full_attention"] * config.num_hidden_layers
    layer_types = get_first_truthy_setting(config, "layer_types") or default_types
    return [
        layer
        for layer, layer_type in enumerate(layer_types)
        if layer_type not in RECURRENT_LAYER_TYPES
    ]


def get_norm_eps(config: "PretrainedConfig") -> float:
    """Return the epsilon of a target's norms. Model families use different names for this setting.
    The default is 1e-6."""
    names = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon")
    return get_first_truthy_setting(config, *names) or 1e-6


def get_rope_parameters(config: "PretrainedConfig") -> dict[str, Any]:
    """Return a target's rotary parameters. If they differ between layer types (Gemma 3), return
    those of the full-attention layers."""
    parameters = get_first_truthy_setting(config, "rope_parameters") or {}
    return parameters.get("full_attention") or parameters


def get_max_length_with_fixed_rope(config: "PretrainedConfig") -> int | None:
    """Return the largest supported sequence length of a target whose rotary angles or query scales
    change beyond some length. None means that they never change.

    With the rope types longrope and dynamic, the rotary angles of all positions change when the
    sequence becomes longer. Llama 4 multiplies queries by a factor that depends on the position.
    transformers uses the index in the cache as the position, which is wrong for draft trees and
    packed sequences. Therefore only lengths up to which the factor is 1 are supported.
    """
    if get_first_truthy_setting(config, "attn_temperature_tuning") and not all(
        config.no_rope_layers
    ):
        return config.floor_scale - 1
    parameters = get_rope_parameters(config)
    if parameters.get("rope_type") not in ("longrope", "dynamic"):
        return None
    return parameters.get("original_max_position_embeddings") or config.max_position_embeddings


def refuse_length_dependent_rope(config: "PretrainedConfig", length: int, remedy: str) -> None:
    """Raise ValueError if a target's rotary angles or query scales would change for sequences of
    `length` positions, see `get_max_length_with_fixed_rope`. The message ends with `remedy`."""
    max_length = get_max_length_with_fixed_rope(config)
    if max_length is not None and length > max_length:
        raise ValueError(
            f"{length} positions are needed, but this target's rotary angles or its "
            f"position-dependent query scales change beyond {max_length} positions, which is not "
            f"supported; {remedy}"
        )


def choose_drafter_mlp_size(config: "PretrainedConfig") -> int:
    """Return the inner size for the MLP of a target's drafter. If all layers of the target have an
    MLP of the same size, it is this size. Otherwise, as with a mixture of experts, it is three
    times the hidden size."""
    size = get_first_truthy_setting(config, "intermediate_size")
    return size if type(size) is int else 3 * config.hidden_size


def get_first_layer_config(config: "PretrainedConfig") -> "PretrainedConfig":
    """Return the configuration of the first layer if layers have different sizes (Gemma 4),
    otherwise `config` itself."""
    if get_first_truthy_setting(config, "is_heterogeneous"):
        return config.per_layer_config[0]
    return config


def get_head_size(config: "PretrainedConfig") -> int:
    """Return the size of the attention heads in a target's first layer."""
    layer_config = get_first_layer_config(config)
    head_size = get_first_truthy_setting(layer_config, "head_dim")
    return head_size or layer_config.hidden_size // layer_config.num_attention_heads


def get_num_key_heads(config: "PretrainedConfig") -> int:
    """Return the number of key/value heads in a target's first layer."""
    layer_config = get_first_layer_config(config)
    return (
        get_first_truthy_setting(layer_config, "num_key_value_heads")
        or layer_config.num_attention_heads
    )


def refuse_unsupported(config: "PretrainedConfig") -> None:
    """Raise ValueError if a target's config.json shows that draft trees cannot be verified with
    it."""

    def refuse(feature: str) -> NoReturn:
        raise ValueError(
            f"this target ({config.model_type}) has {feature}, so that draft trees cannot be "
            "verified with it; use another target"
        )

    if get_first_truthy_setting(config, "is_encoder_decoder"):
        refuse("an encoder besides its decoder")
    if get_first_truthy_setting(config, "masked_diffusion"):
        refuse("no left-to-right order, since it is a masked diffusion model (masked_diffusion)")
    text_config = config.get_text_config()
    values = text_config.to_dict()
    names = {name for name, value in values.items() if value not in (None, False, 0, [])}
    layer_types = set(get_first_truthy_setting(text_config, "layer_types") or [])
    if text_config.model_type not in SUPPORTED_RECURRENT_MODELS:
        has_recurrent_type = bool(layer_types & {*RECURRENT_LAYER_TYPES})
        if has_recurrent_type or any(name.startswith(RECURRENT_CONFIG_PREFIXES) for name in names):
            refuse("recurrent layers of an unsupported form")
        unknown_types = layer_types - ATTENTION_LAYER_TYPES
        if unknown_types:
            refuse(f"layers of unsupported types ({', '.join(sorted(unknown_types))})")
        if not names & {"rope_parameters", "rope_theta"}:
            refuse("ALiBi, learned positions or no attention in place of rotary positions")
    if get_first_truthy_setting(text_config, "alibi"):
        refuse("ALiBi in place of rotary positions")
    try:
        get_head_size(text_config)
        get_num_key_heads(text_config)
    except AttributeError:
        refuse("no attention heads")
    for name in sorted(names & UNSUPPORTED_FEATURE_BY_CONFIG_KEY.keys()):
        refuse(f"{UNSUPPORTED_FEATURE_BY_CONFIG_KEY[name]} ({name})")


def find_decoder(model: "PreTrainedModel") -> nn.Module:
    """Return the decoder of a causal language model. This module contains everything from the
    embedding to the final norm, but not the head."""
    decoder = model.get_decoder()
    if decoder is model:  # Llama 4's `get_decoder` returns the model itself
        decoder = getattr(model, "model", model)
    return cast(nn.Module, decoder)


def get_decoder_layers(decoder: nn.Module) -> nn.ModuleList:
    """Return the list of layers of a decoder."""
    return cast(nn.ModuleList, decoder.layers)


def refuse_unsupported_modules(model: "PreTrainedModel") -> None:
    """Raise ValueError if a model has modules that this project does not support, such as a head
    with a bias. The model may be on the meta device."""
    config = model.config.get_text_config()
    decoder = find_decoder(model)
    layers = dict(decoder.named_children()).get("layers")
    num_layers = 0 if layers is None else len(cast(nn.ModuleList, layers))
    if num_layers != config.num_hidden_layers:
        raise ValueError(
            f"this target ({config.model_type}) has no single list of decoder layers, so their "
            "hidden states cannot be read; use another target"
        )
    class_name = find_unsupported_recurrent_class_name(decoder)
    if class_name is not None:
        raise ValueError(
            f"this target ({config.model_type}) has recurrent layers of an unsupported form "
            f"({class_name}), so that draft trees cannot be verified with it; use another target"
        )
    head = model.get_output_embeddings()
    if head is None or "bias" in dict(head.named_parameters()):
        raise ValueError(
            f"this target ({config.model_type}) has no language model head, or a head with a "
            "bias, which is not supported; use another target"
        )
    if config._attn_implementation not in ("eager", "sdpa"):
        raise ValueError(
            f"attention implementation {config._attn_implementation} does not support the masks "
            "of draft trees; load the target with attn_implementation='eager' or 'sdpa'"
        )
