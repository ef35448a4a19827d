"""Read a drafter's config.json without trusting it, and write it: what the families' layouts are made of.

Whatever is missing, wrong or unknown is noted, all of it. A key is used (a reader asks for it), plain (`PLAIN`: only
the values with which it changes nothing), harmless (`HARMLESS`), or a fault. V vocabulary.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Qwen3Config

from infer.drafters.families import FAMILIES, Family

_LENGTH = "original_max_position_embeddings"
# by kind of rotary positions: the keys that it needs beside its base, and those that transformers' code for it reads
ROPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), (_LENGTH,)),
    "linear": (("factor",), (_LENGTH,)),
    "yarn": (
        ("factor",),
        (_LENGTH, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", _LENGTH), ()),
}
# keys that change what a drafter computes, and the values with which it computes what we do
PLAIN: dict[str, tuple] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "add_swa_attention_sink_bias": (False,),
    "attention_sink_bias": (False,),
    "attention_value_scale": (1.0,),
    "output_multiplier": (1.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (1.0,),
    "input_embedding_scale": (1.0,),
    "partial_rotary_factor": (1.0,),
    "is_encoder_decoder": (False,),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "norm_before_residual": (False,),
    "is_neox_style": (True,),
    "rope_is_neox_style": (True,),
    "use_aux_hidden_state": (True,),
    "projector_type": ("dflash",),
    "attention_mode": ("gqa", "mha"),  # which of the two, the numbers of heads say
    "shift_label": (False,),
    "conv_kernel_size": (0,),
    "selector_rank": (0,),
    "markov_rank": (0,),
    "enable_confidence_head": (False,),
    "quantization_config": (),
}
# the same, in layouts that may have a conditional head and convolutions; None: these read it
OF_HEADS = {
    "projector_type": ("dflash", "dspark", "domino"),
    "shift_label": None,
    "selector_rank": None,
    "markov_rank": None,
    "enable_confidence_head": None,
    "conv_kernel_size": None,
}

# keys that say nothing about what a drafter computes, by the reason
HARMLESS = {
    "who wrote the file, and with what": (
        *("_name_or_path", "_commit_hash", "name_or_path", "transformers_version", "speculators_version", "model_type"),
        *("dtype", "torch_dtype", "license"),
    ),
    "how a framework runs it": (
        *("_attn_implementation", "attn_implementation", "auto_map", "use_cache", "pretraining_tp", "torchscript"),
        *("output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward", "use_bfloat16"),
    ),
    "how it was trained": (
        *("attention_dropout", "hidden_dropout", "initializer_range", "max_anchors", "num_anchors", "loss_decay_gamma"),
        *("confidence_head_alpha", "ce_loss_alpha", "l1_loss_alpha", "selector_loss_alpha", "selector_loss_weight"),
    ),
    "where the target's texts begin and end": ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id"),
    "what transformers writes for classifiers and text generation": (
        *("id2label", "label2id", "problem_type", "task_specific_params", "finetuning_task", "tokenizer_class"),
        *("tf_legacy_loss", "pruned_heads", "tie_encoder_decoder", "cross_attention_hidden_size", "prefix"),
        *("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "begin_suppress_tokens"),
        *("suppress_tokens", "bad_words_ids", "do_sample", "early_stopping", "temperature", "top_k", "top_p"),
        *("typical_p", "min_length", "max_length", "length_penalty", "repetition_penalty", "no_repeat_ngram_size"),
        *("encoder_no_repeat_ngram_size", "num_beams", "num_beam_groups", "num_return_sequences", "output_scores"),
        *("diversity_penalty", "exponential_decay_length_penalty", "return_dict_in_generate", "remove_invalid_values"),
    ),
    "said by the tensors, or where it counts": ("tie_word_embeddings", "max_window_layers", "sliding_window"),
}
_HARMLESS = {key for keys in HARMLESS.values() for key in keys}
# Larger values are refused at once: the model would be built before any tensor shows that they are wrong.
MOST = {"num_hidden_layers": 1024, "block_size": 4096, "draft_length": 4096}


WRITTEN = (  # keys of the public layout, in this order
    "architectures",
    "model_type",
    "block_size",
    *(family.config_key for family in FAMILIES.values()),
    "num_target_layers",
    "num_hidden_layers",
    "layer_types",
    "use_sliding_window",
    "sliding_window",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "max_position_embeddings",
    "vocab_size",
    "draft_vocab_size",
    "tie_word_embeddings",
    "chat_template_kwargs",
)


@dataclass
class ConfigReading:
    """A config.json in our terms."""

    layout: str  # dflash, dflash2, DeepSpec, SpecForge, treeflash, speculators, transformers, DART; none: unknown
    family: Family | None
    options: dict[str, Any]  # of the Qwen3Config
    problems: list[str]
    unused: set[str] = field(default_factory=set)  # tensors that belong to the layout, and that we do not need
    guessed_tap: str | None = None  # a sentence on a tap of the target's last layer that the config leaves open
    renamed: dict[str, str] = field(default_factory=dict)  # tensors with other names in the layout: theirs to ours

    @property
    def own(self) -> dict[str, Any]:
        """The family's own part of the config."""
        return self.options.get(self.family.config_key, {}) if self.family else {}

    def config(self) -> Qwen3Config:
        return Qwen3Config(**self.options)


@dataclass
class Keys:
    """One level of a config.json; null counts as missing. Faults are added to `problems`. What is asked for is noted in
    `used`, so that `note_unknown` can name the rest."""

    raw: dict
    problems: list[str]
    prefix: str = ""
    used: set[str] = field(default_factory=set)
    heads: bool = False  # the layout may have a conditional head
    parts: dict[str, "Keys"] = field(default_factory=dict)  # the levels below that were asked for

    def get(self, *keys: str) -> Any:
        """Return the value of the first of the keys that is not missing, None if all are."""
        self.used.update(keys)
        return next((self.raw[key] for key in keys if self.raw.get(key) is not None), None)

    def note_unknown(self) -> None:
        """Note every key of this level, and of the levels below, that is neither used nor harmless."""
        for key, value in self.raw.items():
            if value is not None and key not in self.used and key not in _HARMLESS:
                self.note(key, "is a key that this project does not know: it may make it another drafter")
        for part in self.parts.values():
            part.note_unknown()

    def note(self, key: str, what: str) -> None:
        self.problems.append(f"config.json: {self.prefix}{key} {what}")

    def take(self, key: str, fits: Callable[[Any], bool], expected: str, default: Any = None) -> Any:
        """Return what stands under a key, `default` where nothing does; note what does not fit, and return None."""
        value = self.get(key)
        if value is None or fits(value):
            return default if value is None else value
        self.note(key, f"is {value!r}, expected {expected}")
        return None

    def number(self, key: str, default: int | None = None, least: int = 1) -> int | None:
        """Return a whole number of at least `least`; without a default the key must be there."""
        if self.get(key) is None and default is None:
            self.note(key, "is missing")
        most, expected = MOST.get(key, 2**31 - 1), f"a whole number of at least {least}"
        value = self.take(key, lambda value: type(value) is int and value >= least, expected, default)
        if value is not None and value > most:
            self.note(key, f"exceeds the limit of {most}")
            return None
        return value

    def real(self, key: str, default: float) -> float:
        """Return a number above 0."""
        value = self.take(key, lambda value: type(value) in (int, float) and value > 0, "a number above 0")
        return default if value is None else float(value)

    def flag(self, key: str) -> bool | None:
        """Return true or false, None where the key is missing."""
        return self.take(key, lambda value: type(value) is bool, "true or false")

    def numbers(self, key: str) -> list[int] | None:
        """Return a list of at least one whole number, or None."""

        def fits(value: Any) -> bool:
            return type(value) is list and {type(one) for one in value} == {int}

        return self.take(key, fits, "a list of whole numbers")

    def inherit(self, keys: "Keys", names: Collection[str]) -> None:
        """Take over what `keys`, the level above, says of `names` and this level does not; note where they differ."""
        for name in names:
            if keys.raw.get(name) is not None:
                above, own = keys.get(name), self.raw.get(name)
                if own not in (None, above):
                    self.note(name, f"is {own!r}, and {above!r} outside")
                self.raw = self.raw | {name: above}

    def part(self, key: str) -> "Keys":
        """Return the object under a key, empty where there is none."""
        if key not in self.parts:
            found = self.take(key, lambda value: type(value) is dict, "an object") or {}
            self.parts[key] = Keys(found, self.problems, f"{self.prefix}{key}.", heads=self.heads)
        return self.parts[key]

    def plain(self) -> None:
        """Note every key with which the model would compute something that ours does not."""
        for key, values in PLAIN.items():
            value, values = self.get(key), OF_HEADS.get(key, values) if self.heads else values
            if value is not None and values is not None and value not in values:
                self.note(key, f"is {value!r}, which this project's drafters do not have")

    def transformer(self, layers: int | None) -> dict[str, Any]:
        """Return the Qwen3 part of a config, checked; `layers`: the default of num_hidden_layers."""
        self.plain()
        self.get("architectures")
        hidden, heads = self.number("hidden_size"), self.number("num_attention_heads")
        if self.get("target_hidden_size") not in (None, hidden):
            self.note("target_hidden_size", f"is {self.raw['target_hidden_size']}, expected hidden_size, {hidden}")
        if self.get("head_dim") is None and hidden and heads and hidden % heads:
            self.note("head_dim", f"is missing, and hidden_size {hidden} is no multiple of {heads} heads")
        groups = self.number("num_key_value_heads", heads or 1)
        if heads and groups and heads % groups:
            self.note("num_key_value_heads", f"is {groups}, which does not divide num_attention_heads, {heads}")
        options = {
            "hidden_size": hidden,
            "intermediate_size": self.number("intermediate_size"),
            "num_hidden_layers": self.number("num_hidden_layers", layers),
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "head_dim": self.number("head_dim", (hidden or 1) // (heads or 1) or 1),
            "vocab_size": self.number("vocab_size"),
            "max_position_embeddings": self.number("max_position_embeddings", 32768),
            "rms_norm_eps": self.real("rms_norm_eps", 1e-6),
            "rope_parameters": self.rope(),
            "tie_word_embeddings": False,
        }
        if told := self.take("chat_template_kwargs", lambda value: type(value) is dict, "an object"):
            options["chat_template_kwargs"] = told  # how the target was asked when the drafter was trained
        if options["head_dim"] and options["head_dim"] % 2:
            self.note("head_dim", f"is {options['head_dim']}, expected an even number")
        return options | self.sliding(options["num_hidden_layers"])

    def rope(self) -> dict[str, Any]:
        """Return the rotary positions from `rope_parameters`, as transformers 5 writes them, or from `rope_theta` and
        `rope_scaling`."""
        new, old = self.part("rope_parameters"), self.part("rope_scaling")
        part = new if new.raw else old
        theta = part.real("rope_theta", self.real("rope_theta", 10000.0))
        kind = part.get("rope_type", "type") or "default"
        if kind not in ROPES:
            part.note("rope_type", f"is {kind!r}, expected one of {', '.join(ROPES)}")
            return {"rope_type": "default", "rope_theta": theta}
        needed, read = ROPES[kind]
        for key in needed:
            if part.get(key) is None:
                part.note(key, f"is missing, which {kind} needs")
            part.real(key, 1.0)
        if part.get("partial_rotary_factor") not in (None, 1):
            part.note("partial_rotary_factor", f"is {part.raw['partial_rotary_factor']!r}, expected 1")
        given = {key: part.get(key) for key in needed + read}
        if part is new and old.raw:
            same = {"type", "rope_type", "rope_theta"} | {key for key, value in given.items() if old.get(key) == value}
            old.used |= {key for key in old.raw if key in same}
        given = {key: value for key, value in given.items() if value is not None} if kind != "default" else {}
        return {"rope_type": kind, "rope_theta": theta} | given

    def sliding(self, layers: int | None) -> dict[str, Any]:
        """Return which layers slide, and their window. Qwen3 forgets the window unless `use_sliding_window` is true."""
        types, on = self.get("layer_types"), self.flag("use_sliding_window")
        if layers is None:  # noted already
            layers = len(types) if type(types) is list else 1
        if types is None:
            first = self.number("max_window_layers", layers, 0) or 0
            types = ["sliding_attention" if on and i >= first else "full_attention" for i in range(layers)]
        known = ("full_attention", "sliding_attention")
        if type(types) is not list or any(kind not in known for kind in types) or len(types) != layers:
            self.note("layer_types", f"is {types!r}, expected {' or '.join(known)} for each of {layers} layers")
            types = ["full_attention"] * layers
        options: dict[str, Any] = {"layer_types": types}
        if "sliding_attention" in types:
            options |= {"use_sliding_window": True, "sliding_window": self.number("sliding_window")}
        return options

    @property
    def architecture(self) -> str | None:
        """The first name in `architectures`."""
        named = self.get("architectures")
        return named[0] if named and type(named) is list else None

    def draft_vocabulary(self, tensors: Collection[str], options: dict[str, Any]) -> set[str]:
        """Note in `options` how many tokens the drafter's own head knows, if not all; return the tensors that say
        nothing new: `t2d` follows from `d2t`, which is not needed for a whole vocabulary."""
        vocabulary = options["vocab_size"]
        rows = self.number("draft_vocab_size", vocabulary or 1)
        if vocabulary is None or rows == vocabulary:
            return {"t2d", "d2t"}
        if rows and rows > vocabulary:
            self.note("draft_vocab_size", f"is {rows}, more than vocab_size, {vocabulary}")
        options["draft_vocab_size"] = rows
        return {"t2d"}

    def target_layers(self, target_layers: int | None) -> int | None:
        """Return how many layers the target has, if the config says so, or the caller."""
        return target_layers if self.get("num_target_layers") is None else self.number("num_target_layers")

    def tapped(self, key: str, layers: int | None, first: int = 0) -> list[int]:
        """Return the target's layers under a key, where they are counted from `first`, counted from 0; `layers`: how
        many the target has, if that is known."""
        ids = self.numbers(key)
        if ids is None:
            if self.raw.get(key) is None:
                self.note(key, "is missing")
            return [0]
        if min(ids) < first or (layers and max(ids) >= layers + first):
            last = f" to {layers - 1 + first}" if layers else " on"
            self.note(key, f"is {ids}: the target has layers {first}{last}")
        return [i - first for i in ids]

    def last_tap(self, ids: list[int], layers: int | None, default: str) -> dict[str, str]:
        """Return `last_tap` of the family's part: where a tap of the target's last layer reads its states, `raw`, as
        the layer puts them out, or `normed`, behind the target's last norm; nothing if that layer is not tapped.
        default: what the layout's own code reads."""
        value = self.get("last_tap")
        if value not in (None, "raw", "normed"):
            self.note("last_tap", f"is {value!r}, expected 'raw' or 'normed'")
        return {"last_tap": value or default} if layers is None or layers - 1 in ids else {}

    def mask_token(self, vocabulary: int | None) -> int:
        """Return the id of the mask token, which must be in the vocabulary."""
        mask = self.number("mask_token_id", least=0)
        if mask is not None and vocabulary and mask >= vocabulary:
            self.note("mask_token_id", f"is {mask}, the vocabulary has ids 0 to {vocabulary - 1}")
        return mask or 0


def check_proposal(part: Keys) -> None:
    """Take note of the keys of `speculators_config`, which says how an engine drafts with it."""
    part.get("algorithm", "default_proposal_method")
    part.part("verifier").get("name_or_path", "architectures")
    methods = part.get("proposal_methods")
    for number, method in enumerate(methods if type(methods) is list else ()):
        if type(method) is dict:
            level = Keys(method, part.problems, f"{part.prefix}proposal_methods[{number}].")
            level.get("proposal_type", "verifier_accept_k", "accept_tolerance")
            level.number("speculative_tokens", 1)
            part.parts[f"proposal_methods[{number}]"] = level


def config_dict(config: Qwen3Config) -> dict:
    """Return config.json with exactly the keys of the public layout; what the dataclass adds would only confuse its
    readers."""
    rope = dict(config.rope_parameters)
    everything = config.to_dict() | {"model_type": "qwen3", "rope_theta": rope.pop("rope_theta")}
    everything["architectures"] = config.architectures
    everything["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    if "sliding_attention" not in config.layer_types:
        for key in ("use_sliding_window", "sliding_window"):
            everything[key] = None
    return {key: everything[key] for key in WRITTEN if everything.get(key) is not None}


def known_tokens(d2t: torch.Tensor | None, vocabulary: int) -> torch.Tensor:
    """Return t2d, (V,) bool: the tokens that a head has rows for; d2t (rows,) offsets, None for a whole vocabulary."""
    if d2t is None:
        return torch.ones(vocabulary, dtype=torch.bool)
    tokens = d2t.cpu() + torch.arange(len(d2t))
    return torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, tokens, True)
