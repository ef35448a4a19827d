"""Check and translate a drafter's config.json, and write it.

The functions `read_config` of the drafter families use the classes in this module.

A drafter whose config.json has a problem is not loaded. There are three kinds of problems:

- a required key is missing or has a wrong value;
- a key asks for a computation that this project's drafters do not support
(`ONLY_SUPPORTED_VALUE_BY_CONFIG_KEY` in
  key_rules.py);
- a key is unknown, because an unknown key may also change the computation.

An unknown key gives a warning instead of a problem if the name of the key shows that it records how
the drafter was made, or if its value is empty or false.
"""

import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Qwen3Config

from infer.drafters.families import DRAFTER_FAMILIES, Family
from infer.drafters.key_rules import (
    DRAFTER_CONFIG_KEY_RULES,
    IGNORED_DRAFTER_CONFIG_KEYS,
    IMAGE_ROPE_KEYS,
    ONLY_SUPPORTED_VALUE_BY_CONFIG_KEY,
    OPTIONAL_ROPE_KEYS,
    REQUIRED_ROPE_KEYS,
    REQUIRED_SIZE_KEYS,
    WORDS_IN_IGNORED_CONFIG_KEYS,
)

# The keys of the public layout, in the order in which they are written.
WRITTEN_DRAFTER_CONFIG_KEYS = (
    *("architectures", "model_type", "block_size"),
    *(family.config_key for family in DRAFTER_FAMILIES.values()),
    *("num_target_layers", "num_hidden_layers", "layer_types", "use_sliding_window"),
    *("sliding_window", "hidden_size", "intermediate_size", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "rope_scaling"),
    *("max_position_embeddings", "vocab_size", "draft_vocab_size", "tie_word_embeddings"),
    "chat_template_kwargs",
)


@dataclass
class ParsedConfig:
    """A config.json of any layout, translated to this project's keys."""

    # The name of the layout: `CheckpointLayout.name` of dflash/layouts.py, "DART" for the layouts
    # of DART drafters, or "none" for an unknown layout.
    layout: str
    family: Family | None  # None for an unknown layout
    options: dict[str, Any]  # arguments of Qwen3Config; {} if there are problems
    problems: list[str]  # sentences that describe missing, wrong and unknown keys
    # names of stored tensors that belong to the layout but that this project does not need
    unused_tensors: set[str] = field(default_factory=set)
    warnings: list[str] = field(default_factory=list)  # sentences to show to the user as warnings
    # Tensors that have another name in this project. Key: the stored name; value: the new name.
    renamed_tensors: dict[str, str] = field(default_factory=dict)
    # `draft_vocab_size` if it is larger than the vocabulary, else None. Tensors with a row for each
    # token then have `padded_rows` rows, of which those beyond the vocabulary are padding.
    padded_rows: int | None = None

    @property
    def family_config(self) -> dict[str, Any]:
        """The object in config.json that holds the family's keys; {} for an unknown layout."""
        if self.family is None:
            return {}
        return self.options.get(self.family.config_key, {})

    def build_drafter(self, device: str = "meta") -> Any:
        """Return a `Drafter` with uninitialised weights on `device`. `problems` must be empty."""
        assert self.family is not None
        with torch.device(device):
            return self.family.load()(Qwen3Config(**self.options))


class CheckedKeys(dict[str, Any]):
    """A flat dictionary of the keys of a config.json that have a rule in `DRAFTER_CONFIG_KEY_RULES`
    and a value that the rule allows.

    `raw` is the config.json. `objects` are the names of nested objects whose keys are read as if
    they were at the top level. `defaults` are the values of missing keys; a key whose value is null
    counts as missing. `key_names` maps a key's name in the layout to its name in this project. A
    key with a wrong value is left out and described in `problems`. An unknown key is described in
    `problems` or `warnings`.
    """

    def __init__(
        self,
        raw: dict[str, Any],
        objects: Collection[str],
        defaults: Mapping[str, Any] = {},
        key_names: Mapping[str, str] = {},
    ) -> None:
        super().__init__()
        self.problems: list[str] = []
        self.warnings: list[str] = []
        self.layout_names = {name: layout_name for layout_name, name in key_names.items()}

        values = dict(defaults) | self._flatten(raw, objects, key_names)
        for key, value in values.items():
            if ONLY_SUPPORTED_VALUE_BY_CONFIG_KEY.get(key, value) != value:
                self.add_problem(key, f"is {value!r}, which this project's drafters do not support")
            if key not in DRAFTER_CONFIG_KEY_RULES:
                continue
            problem = DRAFTER_CONFIG_KEY_RULES[key].find_problem(value)
            if problem is None:
                self[key] = value
            else:
                self.add_problem(key, problem)

        self.present_keys = values.keys()
        self.ties_embeddings = values.get("tie_word_embeddings") is True
        allowed_keys = (
            DRAFTER_CONFIG_KEY_RULES.keys()
            | ONLY_SUPPORTED_VALUE_BY_CONFIG_KEY.keys()
            | IGNORED_DRAFTER_CONFIG_KEYS
        )
        for key in sorted(values.keys() - allowed_keys):
            self.report_unknown_key(key, values[key])

    def _flatten(
        self, raw: dict[str, Any], objects: Collection[str], key_names: Mapping[str, str]
    ) -> dict[str, Any]:
        """Merge the top level of `raw` and its nested objects into one dictionary, under this
        project's names and without null values.

        A key at the top level overrides the same key in a nested object. Different values of a
        known key are a problem.
        """
        levels = []
        for name in objects:
            level = raw.get(name)
            if type(level) is dict:
                levels.append(level)
            elif level is not None:
                self.add_problem(name, f"is {level!r}, expected an object")
        levels.append({key: value for key, value in raw.items() if key not in objects})

        values: dict[str, Any] = {}
        for level in levels:
            for layout_name, value in level.items():
                key = key_names.get(layout_name, layout_name)
                if value is None:
                    continue
                if key in DRAFTER_CONFIG_KEY_RULES and values.get(key, value) != value:
                    self.add_problem(key, f"is given twice, as {values[key]!r} and as {value!r}")
                values[key] = value
        return values

    def report_unknown_key(self, key: str, value: Any) -> None:
        """Report an unknown key. This is a warning if the value is empty or false, or if the name
        contains a word of WORDS_IN_IGNORED_CONFIG_KEYS; otherwise it is a problem."""
        if not value or WORDS_IN_IGNORED_CONFIG_KEYS & set(key.lower().split("_")):
            self.warnings.append(f"config.json: the key {key} is unknown and ignored")
            return
        self.add_problem(
            key,
            f"is {reprlib.repr(value)}, but this key is unknown and may change what the drafter "
            "computes; remove the key if it does not",
        )

    def add_problem(self, key: str, description: str) -> None:
        """Add a sentence to `problems`: the key's name in the layout, followed by
        `description`."""
        self.problems.append(f"config.json: {self.layout_names.get(key, key)} {description}")

    def require(self, *keys: str) -> None:
        """Add a problem for each key that is missing."""
        for key in keys:
            if key not in self and key not in self.present_keys:
                self.add_problem(key, "is missing")

    def read_transformer_config(self) -> dict[str, Any]:
        """Return the arguments of Qwen3Config that do not depend on the drafter family.

        The keys in REQUIRED_SIZE_KEYS must be present.
        """
        hidden_size = self["hidden_size"]
        heads = self["num_attention_heads"]
        vocab_size = self["vocab_size"]
        key_heads = self.get("num_key_value_heads", heads)
        head_dim = self.get("head_dim", hidden_size // heads)
        self._check_sizes(hidden_size, heads, key_heads, head_dim)
        if self.get("mask_token_id", 0) >= vocab_size:
            self.add_problem(
                "mask_token_id",
                f"is {self['mask_token_id']}, expected a token id from 0 to {vocab_size - 1}",
            )

        options = {key: self[key] for key in REQUIRED_SIZE_KEYS}
        options |= {
            "num_key_value_heads": key_heads,
            "head_dim": head_dim,
            "max_position_embeddings": self.get("max_position_embeddings", 32768),
            "rms_norm_eps": float(self.get("rms_norm_eps", 1e-6)),
            "rope_parameters": self.read_rope_parameters(),
            "tie_word_embeddings": False,
        }
        # These are the arguments of the chat template with which the drafter was trained.
        if self.get("chat_template_kwargs"):
            options["chat_template_kwargs"] = self["chat_template_kwargs"]
        # A `draft_vocab_size` above `vocab_size` means the whole vocabulary with padding rows, see
        # `padded_rows`.
        if self.get("draft_vocab_size", vocab_size) < vocab_size:
            options["draft_vocab_size"] = self["draft_vocab_size"]
        return options | self.read_layer_types(self["num_hidden_layers"])

    def _check_sizes(self, hidden_size: int, heads: int, key_heads: int, head_dim: int) -> None:
        """Add a problem for each size that contradicts the other sizes."""
        target_hidden_size = self.get("target_hidden_size", hidden_size)
        if target_hidden_size != hidden_size:
            self.add_problem(
                "target_hidden_size",
                f"is {target_hidden_size}, expected the value of hidden_size, {hidden_size}",
            )
        if "head_dim" not in self and hidden_size % heads:
            self.add_problem(
                "head_dim",
                f"is missing; without it, hidden_size ({hidden_size}) must be a multiple of "
                f"num_attention_heads ({heads})",
            )
        if heads % key_heads:
            self.add_problem(
                "num_key_value_heads",
                f"is {key_heads}, expected a divisor of num_attention_heads, {heads}",
            )
        if head_dim % 2:
            self.add_problem("head_dim", f"is {head_dim}, expected an even number")

    @property
    def padded_rows(self) -> int | None:
        """`draft_vocab_size` if it is larger than the vocabulary, else None."""
        rows = self.get("draft_vocab_size", 0)
        return rows if rows > self["vocab_size"] else None

    def read_rope_parameters(self) -> dict[str, Any]:
        """Return the parameters of the rotary embeddings, in the form of `rope_parameters` of
        transformers 5.

        They are read from the key `rope_parameters` or from the older keys `rope_theta` and
        `rope_scaling`. An unknown rope_type is a problem, and {} is returned.
        """
        stored = self.get("rope_parameters") or self.get("rope_scaling") or {}
        parameters = {
            key: value
            for key, value in stored.items()
            if value is not None and key not in IMAGE_ROPE_KEYS
        }
        old_rope_type = parameters.pop("type", "default")
        rope_type = parameters.pop("rope_type", old_rope_type)
        rope_theta = parameters.pop("rope_theta", self.get("rope_theta", 10000.0))
        if type(rope_type) is not str or rope_type not in REQUIRED_ROPE_KEYS:
            allowed = ", ".join(REQUIRED_ROPE_KEYS)
            self.add_problem("rope_type", f"is {rope_type!r}, expected one of {allowed}")
            return {}

        required_keys = REQUIRED_ROPE_KEYS[rope_type]
        for key in parameters.keys() & ONLY_SUPPORTED_VALUE_BY_CONFIG_KEY.keys():
            value = parameters.pop(key)
            if value != ONLY_SUPPORTED_VALUE_BY_CONFIG_KEY[key]:
                self.add_problem(key, f"is {value!r}, which this project's drafters do not support")
        for key in sorted(parameters.keys() - OPTIONAL_ROPE_KEYS - {*required_keys}):
            self.report_unknown_key(key, parameters.pop(key))
        if rope_type == "default":
            parameters = {}
        for key in required_keys:
            if key not in parameters:
                self.add_problem(key, f"is missing, which rope_type {rope_type} requires")

        parameters = {"rope_theta": rope_theta} | parameters
        for key, value in parameters.items():
            problem = DRAFTER_CONFIG_KEY_RULES["rope_theta"].find_problem(value)
            if problem is not None and type(value) is not bool:
                self.add_problem(key, problem)
        return {"rope_type": rope_type} | parameters

    def read_layer_types(self, layers: int) -> dict[str, Any]:
        """Return the arguments of Qwen3Config that describe the attention type of each of `layers`
        layers, and the sliding window if a layer has one.

        `use_sliding_window` is included because Qwen3Config ignores the window without it.
        """
        full_layers = layers
        if self.get("use_sliding_window"):
            full_layers = min(self.get("max_window_layers", layers), layers)
        sliding_layers = layers - full_layers
        default = ["full_attention"] * full_layers + ["sliding_attention"] * sliding_layers
        layer_types = self.get("layer_types", default)
        if len(layer_types) != layers:
            self.add_problem(
                "layer_types", f"is {layer_types!r}, expected one type for each of {layers} layers"
            )
        if "sliding_attention" not in layer_types:
            return {"layer_types": layer_types}

        self.require("sliding_window")
        return {
            "layer_types": layer_types,
            "use_sliding_window": True,
            "sliding_window": self.get("sliding_window"),
        }

    def read_feature_layers(
        self, layers: int | None, first_layer_id: int, last_tap: str
    ) -> dict[str, Any]:
        """Return the key `target_layer_ids`, the target layers that the drafter reads, counted from
        0. Return the key `last_tap` as well if the target's last layer is or may be among them.

        `layers` is the target's number of layers, None if it is unknown. `first_layer_id` is the
        number that the layout gives to the target's first layer. `last_tap` is the default value of
        the key `last_tap`. The value "raw" means the last layer's output, and "normed" means the
        last layer's output after the target's final norm.
        """
        layer_ids = self["target_layer_ids"]
        too_high = layers is not None and max(layer_ids) >= layers + first_layer_id
        if min(layer_ids) < first_layer_id or too_high:
            allowed = f"{first_layer_id} upwards"
            if layers:
                allowed = f"{first_layer_id} to {layers - 1 + first_layer_id}"
            self.add_problem("target_layer_ids", f"is {layer_ids}, expected layers from {allowed}")

        layer_ids = [layer - first_layer_id for layer in layer_ids]
        if layers is None or layers - 1 in layer_ids:
            last_tap = self.get("last_tap", last_tap)
            return {"target_layer_ids": layer_ids, "last_tap": last_tap}
        return {"target_layer_ids": layer_ids}


def first_architecture(raw: dict[str, Any]) -> str | None:
    """Return the first name under `architectures` in the config.json `raw`; None if there is
    none."""
    names = raw.get("architectures")
    if type(names) is list and names:
        return str(names[0])
    return None


def build_public_config(config: Qwen3Config) -> dict[str, Any]:
    """Convert a drafter's config to the content of a config.json in the public layout.

    Only the keys of that layout are written. Qwen3Config has many other keys, which programs that
    read the file could misinterpret.
    """
    assert config.rope_parameters is not None and config.layer_types is not None
    rope_parameters = dict(config.rope_parameters)
    keys = config.to_dict()
    keys["model_type"] = "qwen3"
    keys["rope_theta"] = rope_parameters.pop("rope_theta")
    keys["architectures"] = config.architectures
    keys["rope_scaling"] = None
    if rope_parameters["rope_type"] != "default":
        keys["rope_scaling"] = rope_parameters
    if "sliding_attention" not in config.layer_types:
        keys["use_sliding_window"] = None
        keys["sliding_window"] = None
    return {key: keys[key] for key in WRITTEN_DRAFTER_CONFIG_KEYS if keys.get(key) is not None}
