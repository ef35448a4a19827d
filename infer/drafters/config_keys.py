"""Check and translate a drafter's config.json, and write it.

The functions `read_config` of the drafter families use the classes in this module.

A drafter whose config.json has a problem is not loaded. There are three kinds of problems:

- A required key is missing or has a wrong value.
- A key asks for a computation that this project's drafters do not support.
  `ONLY_SUPPORTED_VALUE_BY_CONFIG_KEY` in key_rules.py lists such keys.
- A key is unknown. An unknown key may also change the computation.

An unknown key gives only a warning in two cases: the name of the key shows that the key records how
the drafter was made, or the value is empty or false.
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

# The keys of config.json in the format of the public checkpoints, in the order of the file.
PUBLIC_LAYOUT_CONFIG_KEYS = (
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
    """The content of a drafter's config.json, translated to this project's keys."""

    # The name of the checkpoint format ("layout"): `CheckpointLayout.name` of dflash/layouts.py,
    # "DART" for DART drafters, or "none" for an unknown format.
    layout_name: str
    family: Family | None  # the drafter family; None if unknown
    config_kwargs: dict[str, Any]  # arguments of Qwen3Config; {} if there are problems
    problems: list[str]  # sentences that describe missing, wrong and unknown keys
    # names of tensors in the checkpoint that are valid but that this project does not need
    unused_tensors: set[str] = field(default_factory=set)
    warnings: list[str] = field(default_factory=list)  # sentences to show to the user as warnings
    # Tensors that have another name in this project. Key: name in the checkpoint. Value: name in
    # this project.
    renamed_tensors: dict[str, str] = field(default_factory=dict)
    # Number of rows, with padding rows, of the tensors that have one row for each token. None if
    # these tensors have no padding rows.
    padded_vocab_size: int | None = None

    @property
    def family_config(self) -> dict[str, Any]:
        """The object in config.json that holds the drafter family's keys; {} if the family is
        unknown."""
        if self.family is None:
            return {}
        return self.config_kwargs.get(self.family.config_key, {})

    def build_drafter(self, device: str = "meta") -> Any:
        """Return a `Drafter` with this config and uninitialised weights on `device`. The list
        `problems` must be empty."""
        assert self.family is not None
        with torch.device(device):
            return self.family.load()(Qwen3Config(**self.config_kwargs))


class ValidConfigEntries(dict[str, Any]):
    """The valid entries of a drafter's config.json, as a flat dictionary.

    The dictionary has the keys that have a rule in `DRAFTER_CONFIG_KEY_RULES` and whose value the
    rule allows. The lists `problems` and `warnings` hold sentences about all other keys.

    `raw` is the content of config.json. `objects` names the nested objects that are merged into the
    top level. `defaults` are the values of keys that are missing or null. `key_names` maps the
    names of keys in config.json to their names in this project.
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
        """Merge the top level of `raw` and its nested objects named in `objects` into one
        dictionary without null values.

        The keys of the result are this project's names, see `key_names` of the class. If a key is
        both at the top level and in a nested object, the value at the top level is used. If the two
        values differ and the key has a rule, a sentence is added to `problems`.
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
        """Add a sentence about an unknown key to `warnings` or `problems`.

        The sentence is added to `warnings` if the value is empty or false, or if the key's name
        contains a word of WORDS_IN_IGNORED_CONFIG_KEYS.
        """
        if not value or WORDS_IN_IGNORED_CONFIG_KEYS & set(key.lower().split("_")):
            self.warnings.append(f"config.json: the key {key} is unknown and ignored")
            return
        self.add_problem(
            key,
            f"is {reprlib.repr(value)}, but this key is unknown and may change what the drafter "
            "computes; remove the key if it does not",
        )

    def add_problem(self, key: str, description: str) -> None:
        """Add a sentence to `problems`: the key as it is named in config.json, then
        `description`."""
        self.problems.append(f"config.json: {self.layout_names.get(key, key)} {description}")

    def require(self, *keys: str) -> None:
        """Add a sentence to `problems` for each of `keys` that is missing."""
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
        # These arguments of the chat template were used for the drafter's training data.
        if self.get("chat_template_kwargs"):
            options["chat_template_kwargs"] = self["chat_template_kwargs"]
        # A `draft_vocab_size` above `vocab_size` means that the drafter can propose all tokens and
        # that the tensors have padding rows (`padded_vocab_size`).
        if self.get("draft_vocab_size", vocab_size) < vocab_size:
            options["draft_vocab_size"] = self["draft_vocab_size"]
        return options | self.read_layer_types(self["num_hidden_layers"])

    def _check_sizes(self, hidden_size: int, heads: int, key_heads: int, head_dim: int) -> None:
        """Check the given sizes of the drafter. Add a sentence to `problems` for each size that
        contradicts another one."""
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
    def padded_vocab_rows(self) -> int | None:
        """The value of `draft_vocab_size` if it is larger than the vocabulary, else None. In a
        checkpoint with such a value, tensors with one row for each token have padding rows after
        the last token."""
        rows = self.get("draft_vocab_size", 0)
        return rows if rows > self["vocab_size"] else None

    def read_rope_parameters(self) -> dict[str, Any]:
        """Return the parameters of the rotary embeddings, in the format of `rope_parameters` in
        transformers 5.

        The parameters are read from the key `rope_parameters`, or from the older keys `rope_theta`
        and `rope_scaling`. If rope_type is unknown, a sentence is added to `problems`, and {} is
        returned.
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
        """Return the arguments of Qwen3Config that choose full attention or a sliding window for
        each layer of the drafter. `layers` is the number of layers.

        If a layer has a sliding window, the arguments also contain the window's length and
        `use_sliding_window`, because Qwen3Config ignores the length without `use_sliding_window`.
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
        self, layers: int | None, first_layer_id: int, default_last_tap: str
    ) -> dict[str, Any]:
        """Return the config.json entries that describe which target layers the drafter reads.

        The entry `target_layer_ids` is the list of these layers, counted from 0. The entry
        `last_tap` is "raw" if the drafter reads the output of the target's last layer before the
        target's final norm, and "normed" if it reads this output after the norm. The entry
        `last_tap` is left out if the drafter is known not to read the target's last layer.

        `layers` is the target's number of layers, None if unknown. `first_layer_id` is the number
        that this config.json uses for the target's first layer. `default_last_tap` is the value of
        `last_tap` if config.json has none.
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
            default_last_tap = self.get("last_tap", default_last_tap)
            return {"target_layer_ids": layer_ids, "last_tap": default_last_tap}
        return {"target_layer_ids": layer_ids}


def first_architecture(raw: dict[str, Any]) -> str | None:
    """Return the first name in the list `architectures` of a config.json, given as `raw`; None if
    there is none."""
    names = raw.get("architectures")
    if type(names) is list and names:
        return str(names[0])
    return None


def build_public_config(config: Qwen3Config) -> dict[str, Any]:
    """Convert a drafter's config to the content of config.json in the format of the family's public
    checkpoints.

    Only the keys of that format are written, because Qwen3Config has many other keys, which other
    programs could misinterpret.
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
    return {key: keys[key] for key in PUBLIC_LAYOUT_CONFIG_KEYS if keys.get(key) is not None}
