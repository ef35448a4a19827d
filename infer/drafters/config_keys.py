"""Read a drafter's config.json without trusting it, and write it: what the families' layouts are
made of.

A key that is missing or wrong is a fault, and so is one that makes it another drafter than ours
(`PLAIN`). A key that nobody here knows is a fault too, as it may do that; unless its name says that
it is bookkeeping, or its value that nothing is asked for: then it is a doubt, which is said and
stops nothing. V vocabulary.
"""

import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import Qwen3Config

from infer.drafters.families import FAMILIES, Family
from infer.drafters.heads.table import HEADS

TYPES = {  # by kind: which values fit, in words
    "number": (lambda value: type(value) in (int, float) and value > 0, "a number above 0"),
    "flag": (lambda value: type(value) is bool, "true or false"),
    "object": (lambda value: type(value) is dict, "an object"),
    "list": (
        lambda value: type(value) is list and {type(one) for one in value} == {int},
        "a list of whole numbers",
    ),
    "layers": (
        lambda value: (
            type(value) is list
            and all(kind in ("full_attention", "sliding_attention") for kind in value)
        ),
        "a list of full_attention and sliding_attention",
    ),
}


class KeyRule(NamedTuple):
    """What must stand under a key: a whole number, one of `choices`, or a value of a kind of
    `TYPES`."""

    kind: str = "whole"
    least: int = 1
    most: int = 2**31 - 1
    choices: tuple = ()

    def fault(self, value: Any) -> str | None:
        """Return what is wrong with a value."""
        if not self.choices and self.kind == "whole":
            fits = type(value) is int and value >= self.least
            expected = f"a whole number of at least {self.least}"
            if fits and value > self.most:
                return f"exceeds the limit of {self.most}"
        elif self.choices:
            fits = value in self.choices
            expected = " or ".join(map(str, self.choices))
        else:
            fits = TYPES[self.kind][0](value)
            expected = TYPES[self.kind][1]
        return None if fits else f"is {value!r}, expected {expected}"


SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)
WHOLES = (
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window"),
    *("draft_vocab_size", "num_target_layers", "target_num_hidden_layers", "target_hidden_size"),
    *("conv_group_size", "xpress_mlp_hidden"),
)
CAUSAL = ("is_causal", "causal", "causal_head")  # vLLM's and the authors', vLLM's, JetSpec's
FLAGS = (
    *("sliding_window_non_causal", "use_sliding_window", "sample_from_anchor", "shift_label"),
    *("shifted", "qk_norm", "norm_twice", "layer_fusion"),
)
KEYS = {
    **dict.fromkeys((*SIZES, *WHOLES), KeyRule()),
    # larger models would be built before any tensor shows that they are wrong
    "num_hidden_layers": KeyRule(most=1024),
    **dict.fromkeys(("block_size", "draft_length"), KeyRule(most=4096)),
    **dict.fromkeys(("mask_token_id", "max_window_layers", "conv_kernel_size"), KeyRule(least=0)),
    **dict.fromkeys(("rms_norm_eps", "rope_theta"), KeyRule("number")),
    **dict.fromkeys((*CAUSAL, *FLAGS), KeyRule("flag")),
    **dict.fromkeys(("rope_parameters", "rope_scaling", "chat_template_kwargs"), KeyRule("object")),
    "target_layer_ids": KeyRule("list"),
    "layer_types": KeyRule("layers"),
    "last_tap": KeyRule(choices=("raw", "normed")),
    "projector_type": KeyRule(choices=("dflash", "dspark", "domino")),
    **{
        key.name: KeyRule(least=key.least, choices=key.choices)
        for row in HEADS.values()
        for key in row.keys
    },
}
# keys that change what a drafter computes, and the value with which it computes what ours do
PLAIN = {
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
    "use_swa": False,  # a window of all layers without causality
    "fusion_type": "concat_fc",
    "quantization_config": None,
}
OPTIONAL_ROPE_KEYS = {  # beside those that a kind needs
    *("attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"),
    *("factor", "original_max_position_embeddings"),
}
IMAGE_ROPE_KEYS = ("mrope_section", "mrope_interleaved")  # text has one position in all sections
ROPES = {  # kinds of rotary positions, and the keys that each needs
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
# what else published drafters have, beside what transformers writes into every config.json, or did
# until release 5: none of it is computed
HARMLESS = {
    *(
        "auto_map",
        "attention_mode",
        "attention_backend",
        "candidate_tokens",
        "num_anchors",
        "max_anchors",
    ),
    *("loss_decay_gamma", "torch_dtype", "confidence_head_alpha", "selector_loss_weight"),
    *("speculators_config", "speculators_model_type", "speculators_version", "_torchspec_version"),
    *("model_arch", "gate_temperature", "xpress_block_size"),
    *(
        "attn_implementation",
        "_attn_implementation",
        "use_return_dict",
        "pruned_heads",
        "torchscript",
    ),
    *("use_bfloat16", "is_decoder", "add_cross_attention", "tie_encoder_decoder", "pretraining_tp"),
    *(
        "tokenizer_class",
        "prefix",
        "sep_token_id",
        "decoder_start_token_id",
        "cache_implementation",
    ),
    *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups"),
    *("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty"),
    *("diversity_penalty", "no_repeat_ngram_size", "num_return_sequences", "output_scores"),
    *(
        "return_dict_in_generate",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
    ),
    *("encoder_no_repeat_ngram_size", "tf_legacy_loss"),
} | Qwen3Config().to_dict().keys()
# words in the names of keys that say how a drafter was made, and by whom
BOOKKEEPING = {
    *(
        "train",
        "training",
        "trained",
        "trainer",
        "loss",
        "lr",
        "epoch",
        "epochs",
        "seed",
        "optimizer",
    ),
    *("dataset", "datasets", "version", "commit", "date", "author", "authors", "license", "url"),
}


WRITTEN = (  # keys of the public layout, in this order
    *("architectures", "model_type", "block_size"),
    *(family.config_key for family in FAMILIES.values()),
    *(
        "num_target_layers",
        "num_hidden_layers",
        "layer_types",
        "use_sliding_window",
        "sliding_window",
    ),
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("rms_norm_eps", "rope_theta", "rope_scaling", "max_position_embeddings"),
    *("vocab_size", "draft_vocab_size", "tie_word_embeddings", "chat_template_kwargs"),
)


@dataclass
class ConfigReading:
    """A config.json in our terms."""

    layout: str  # `Layout.name` of dflash/layouts.py, or DART; none: unknown
    family: Family | None
    options: dict[str, Any]  # of the Qwen3Config; none where a key is missing or wrong
    problems: list[str]
    unused: set[str] = field(
        default_factory=set
    )  # tensors that belong to the layout, and that we do not need
    doubts: list[str] = field(default_factory=list)  # sentences on what the config leaves open
    # tensors with other names in the layout: theirs to ours
    renamed: dict[str, str] = field(default_factory=dict)

    # `draft_vocab_size`, where that is more than the vocabulary has: its tensors with a row for
    # each token have so many, and those behind the vocabulary's stand for no token
    padded_rows: int | None = None

    @property
    def own(self) -> dict[str, Any]:
        """The family's own part of the config."""
        return self.options.get(self.family.config_key, {}) if self.family else {}

    def drafter(self, device: str = "meta") -> torch.nn.Module:
        """Return the drafter, without weights yet. The config has no problems."""
        with torch.device(device):
            return self.family.load()(Qwen3Config(**self.options))


class Keys(dict):
    """What `KEYS` knows of a config.json and of the objects in it that are named `parts`, as one
    level, checked. null counts as missing. What is wrong is left out and noted in `problems`, what
    nobody knows in `doubts`; `defaults` stand for what is missing, `renames` are keys: theirs to
    ours."""

    def __init__(
        self, raw: dict, parts: Collection[str], defaults: Mapping = {}, renames: Mapping = {}
    ) -> None:
        super().__init__()
        self.problems: list[str] = []
        self.theirs = {ours: theirs for theirs, ours in renames.items()}
        inner = {key: raw[key] for key in parts if raw.get(key) is not None}
        for key in [key for key, part in inner.items() if type(part) is not dict]:
            self.note(key, f"is {inner.pop(key)!r}, expected an object")
        found: dict[str, Any] = {}
        for level in (
            *inner.values(),
            {key: value for key, value in raw.items() if key not in parts},
        ):
            for name, value in level.items():
                key = renames.get(name, name)
                if value is not None and key in KEYS and found.get(key, value) != value:
                    self.note(key, f"is {found[key]!r}, and {value!r} outside")
                found |= {} if value is None else {key: value}
        found = {**defaults, **found}
        for key, value in found.items():
            if PLAIN.get(key, value) != value:
                self.note(key, f"is {value!r}, which this project's drafters do not have")
            fault = KEYS[key].fault(value) if key in KEYS else None
            if fault:
                self.note(key, fault)
            elif key in KEYS:
                self[key] = value
        self.given = found.keys()
        self.tied = found.get("tie_word_embeddings") is True
        self.doubts: list[str] = []
        for key in sorted(found.keys() - KEYS.keys() - PLAIN.keys() - HARMLESS):
            self.judge_unknown(key, found[key])

    def judge_unknown(self, key: str, value: Any) -> None:
        """Note a key that nobody here knows: as a doubt if it is bookkeeping or asks for nothing,
        else as a fault."""
        if not value or BOOKKEEPING & set(key.lower().split("_")):
            self.doubts.append(
                f"config.json: nobody here knows the key {key}, which is left out of account"
            )
        else:
            said = "nobody here knows what the drafter computes with it; remove the key if that is nothing"
            self.note(key, f"is {reprlib.repr(value)}, and {said}")

    def note(self, key: str, what: str) -> None:
        self.problems.append(f"config.json: {self.theirs.get(key, key)} {what}")

    def need(self, *keys: str) -> None:
        """Note the keys that are missing."""
        for key in keys:
            if key not in self and key not in self.given:
                self.note(key, "is missing")

    def transformer(self) -> dict[str, Any]:
        """Return the Qwen3 part of a config, whose `SIZES` are there."""
        hidden = self["hidden_size"]
        heads = self["num_attention_heads"]
        vocabulary = self["vocab_size"]
        groups = self.get("num_key_value_heads", heads)
        size = self.get("head_dim", hidden // heads)
        if self.get("target_hidden_size", hidden) != hidden:
            self.note(
                "target_hidden_size",
                f"is {self['target_hidden_size']}, expected hidden_size, {hidden}",
            )
        if "head_dim" not in self and hidden % heads:
            self.note(
                "head_dim", f"is missing, and hidden_size {hidden} is no multiple of {heads} heads"
            )
        if heads % groups:
            self.note(
                "num_key_value_heads",
                f"is {groups}, which does not divide num_attention_heads, {heads}",
            )
        if size % 2:
            self.note("head_dim", f"is {size}, expected an even number")
        if self.get("mask_token_id", 0) >= vocabulary:
            self.note(
                "mask_token_id",
                f"is {self['mask_token_id']}, the vocabulary has ids 0 to {vocabulary - 1}",
            )
        options = {key: self[key] for key in SIZES} | {
            "num_key_value_heads": groups,
            "head_dim": size,
            "max_position_embeddings": self.get("max_position_embeddings", 32768),
            "rms_norm_eps": float(self.get("rms_norm_eps", 1e-6)),
            "rope_parameters": self.rope(),
            "tie_word_embeddings": False,
        }
        if self.get(
            "chat_template_kwargs"
        ):  # how the target was asked when the drafter was trained
            options["chat_template_kwargs"] = self["chat_template_kwargs"]
        if self.get("draft_vocab_size", vocabulary) < vocabulary:  # more: the whole one, padded
            options["draft_vocab_size"] = self["draft_vocab_size"]
        return options | self.sliding(options["num_hidden_layers"])

    @property
    def padded_rows(self) -> int | None:
        """`draft_vocab_size`, where that is more than the vocabulary has."""
        rows = self.get("draft_vocab_size", 0)
        return rows if rows > self["vocab_size"] else None

    def rope(self) -> dict[str, Any]:
        """Return the rotary positions from `rope_parameters`, as transformers 5 writes them, or
        from `rope_theta` and `rope_scaling`."""
        given = self.get("rope_parameters") or self.get("rope_scaling") or {}
        given = {
            key: value
            for key, value in given.items()
            if value is not None and key not in IMAGE_ROPE_KEYS
        }
        kind = given.pop("type", "default")
        kind = given.pop("rope_type", kind)
        theta = given.pop("rope_theta", self.get("rope_theta", 10000.0))
        if type(kind) is not str or kind not in ROPES:
            self.note("rope_type", f"is {kind!r}, expected one of {', '.join(ROPES)}")
            return {}
        for key in given.keys() & PLAIN.keys():
            if (value := given.pop(key)) != PLAIN[key]:
                self.note(key, f"is {value!r}, which this project's drafters do not have")
        for key in sorted(given.keys() - OPTIONAL_ROPE_KEYS - {*ROPES[kind]}):
            self.judge_unknown(key, given.pop(key))
        given = given if kind != "default" else {}
        for key in ROPES[kind]:
            if key not in given:
                self.note(key, f"is missing, which {kind} needs")
        for key, value in ({"rope_theta": theta} | given).items():
            if type(value) is not bool and (fault := KEYS["rope_theta"].fault(value)):
                self.note(key, fault)
        return {"rope_type": kind, "rope_theta": theta} | given

    def sliding(self, layers: int) -> dict[str, Any]:
        """Return which layers slide, and their window. Qwen3 forgets the window unless
        `use_sliding_window` is true."""
        first = (
            min(self.get("max_window_layers", layers), layers)
            if self.get("use_sliding_window")
            else layers
        )
        kinds = self.get(
            "layer_types", ["full_attention"] * first + ["sliding_attention"] * (layers - first)
        )
        if len(kinds) != layers:
            self.note("layer_types", f"is {kinds!r}, expected one for each of {layers} layers")
        if "sliding_attention" not in kinds:
            return {"layer_types": kinds}
        self.need("sliding_window")
        return {
            "layer_types": kinds,
            "use_sliding_window": True,
            "sliding_window": self.get("sliding_window"),
        }

    def tapped(self, layers: int | None, first: int, last_tap: str) -> dict[str, Any]:
        """Return the tapped layers, which the layout counts from `first`, and where a tap of the
        target's last one reads: `raw`, as the layer puts states out, or `normed`, behind the
        target's last norm. layers: how many the target has, if that is known; last_tap: what the
        layout's own code reads."""
        ids = self["target_layer_ids"]
        if min(ids) < first or (layers and max(ids) >= layers + first):
            last = f" to {layers - 1 + first}" if layers else " on"
            self.note("target_layer_ids", f"is {ids}: the target has layers {first}{last}")
        ids = [i - first for i in ids]
        last = (
            {"last_tap": self.get("last_tap", last_tap)}
            if layers is None or layers - 1 in ids
            else {}
        )
        return {"target_layer_ids": ids} | last


def named_class(raw: dict) -> str | None:
    """Return the first name in `architectures`."""
    named = raw.get("architectures")
    return str(named[0]) if named and type(named) is list else None


def config_dict(config: Qwen3Config) -> dict:
    """Return config.json with exactly the keys of the public layout; what the dataclass adds would
    only confuse its readers."""
    rope = dict(config.rope_parameters)
    everything = config.to_dict() | {"model_type": "qwen3", "rope_theta": rope.pop("rope_theta")}
    everything["architectures"] = config.architectures
    everything["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    if "sliding_attention" not in config.layer_types:
        for key in ("use_sliding_window", "sliding_window"):
            everything[key] = None
    return {key: everything[key] for key in WRITTEN if everything.get(key) is not None}
