"""The table of conditional heads, which make a drafted token's score depend on the drafted tokens
before it.

This module does not import torch, because options are checked against the table before any model is
loaded.

To add a head, write a subclass of `infer.drafters.heads.base.ConditionalHead` in a file of this
folder, add an entry to `_HEAD_SPECS`, and add a file to conf/head.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, NamedTuple

NO_HEAD = "none"  # the value of `drafter.head.name` for a drafter without a conditional head
MARKOV_HEAD_KINDS = ("vanilla", "gated", "rnn")  # the values of `drafter.head.kind`


class HeadConfigKey(NamedTuple):
    """A config.json key that describes a conditional head, with its default and allowed values.

    In config.json, the key is in the object that holds the drafter family's keys, for example
    `dflash_config`. If `choices` is not empty, it holds the allowed values; otherwise all integers
    of at least `minimum` are allowed.
    """

    name: str
    # field of `infer.config.HeadConfig` that sets this key; None if no option sets it
    option_name: str | None = None
    # value that is assumed if config.json lacks the key
    default: Any = None
    # value in the config.json of a new drafter if no option sets the key
    new_drafter_value: Any = None
    minimum: int = 1
    choices: tuple = ()
    optional: bool = False  # if true, `default` is not filled in when config.json lacks the key


@dataclass(frozen=True)
class HeadSpec:
    """The properties of a conditional head that are needed before its class is imported: to check
    options and to read config.json."""

    name: str  # the value of the option `drafter.head.name`
    title: str  # the head's name in messages
    class_path: str  # "module:class" of the head, which is imported when it is first needed
    module_name: str  # name of the head as a submodule of the drafter
    # A drafter has this head if config.json contains this key with a value other than 0 or false.
    presence_key: str
    config_keys: tuple[HeadConfigKey, ...]  # all config.json keys that describe the head
    # whether the head adds a correction to the logits; false if it changes their input instead
    adds_to_logits: bool = True
    # Names of tensors with one row per token. AdamW trains these tensors even if the optimizer Muon
    # is used for the other matrices.
    token_table_names: tuple[str, ...] = ()

    @property
    def option_names(self) -> set[str]:
        """Names of the fields of `infer.config.HeadConfig` that the head reads, except `name`."""
        return {key.option_name for key in self.config_keys if key.option_name}

    def load(self) -> Any:
        """Import and return the head's class, a subclass of
        `infer.drafters.heads.base.ConditionalHead`."""
        return resolve_name(self.class_path)


_HEAD_SPECS = (
    HeadSpec(
        "markov",
        "Markov (DSpark)",
        "infer.drafters.heads.markov:MarkovHead",
        module_name="markov_head",
        presence_key="markov_rank",
        config_keys=(
            HeadConfigKey("markov_rank", "rank", minimum=0),
            HeadConfigKey("markov_head_type", "kind", "vanilla", choices=MARKOV_HEAD_KINDS),
            HeadConfigKey(
                "enable_confidence_head",
                "confidence_head",
                False,
                choices=(True, False),
                optional=True,
            ),
            HeadConfigKey(
                "confidence_head_with_markov",
                "confidence_head",
                False,
                choices=(True, False),
                optional=True,
            ),
        ),
        token_table_names=("markov_w1.weight", "markov_w2.weight"),
    ),
    HeadSpec(
        "selector",
        "candidate selector (DFlash 2)",
        "infer.drafters.heads.selector:SelectorHead",
        module_name="candidate_selector",
        presence_key="selector_rank",
        config_keys=(
            HeadConfigKey("selector_rank", "rank", minimum=0),
            HeadConfigKey("selector_top_k", "top_k", 16, minimum=0),
        ),
        token_table_names=("predecessor_codebook", "successor_codebook"),
    ),
    HeadSpec(
        "swiglu",
        "SwiGLU (TreeFlash)",
        "infer.drafters.heads.swiglu:SwiGLUHead",
        module_name="ar_approximation",
        presence_key="ar_approximation",
        config_keys=(
            HeadConfigKey("ar_approximation", new_drafter_value="swiglu", choices=("swiglu",)),
            HeadConfigKey("ar_hidden_size", "hidden_size", optional=True),
        ),
        adds_to_logits=False,
    ),
    HeadSpec(
        "gru",
        "GRU (Domino)",
        "infer.drafters.heads.gru:GRUHead",
        module_name="domino_head",
        presence_key="gru_hidden_dim",
        config_keys=(
            HeadConfigKey("emb_dim", "rank", 256),
            HeadConfigKey("gru_hidden_dim", "hidden_size", 1024, new_drafter_value=1024, minimum=0),
            HeadConfigKey("pure_draft_prefix_len", default=0, new_drafter_value=1, minimum=0),
        ),
        token_table_names=("embed_proj.2.weight",),
    ),
    HeadSpec(
        "xpress",
        "causal refiner (XPress)",
        "infer.drafters.heads.xpress:XPressHead",
        module_name="refiner_head",
        presence_key="xpress_rank",
        config_keys=(
            HeadConfigKey("xpress_rank", "rank", 256, minimum=0),
            HeadConfigKey("xpress_mlp_ratio", default=2, new_drafter_value=2),
            # Number of passes in which serving engines refine a block. This project does not use
            # it: it drafts the tokens to which these passes converge, one after the other.
            HeadConfigKey("num_jacobi_passes", default=6, new_drafter_value=6, minimum=0),
        ),
        token_table_names=("token_embed.weight", "readout.weight"),
    ),
)
CONDITIONAL_HEADS = {spec.name: spec for spec in _HEAD_SPECS}
HEAD_TOKEN_TABLE_WEIGHT_NAMES = tuple(
    name for spec in _HEAD_SPECS for name in spec.token_table_names
)


def find_head_spec(family_config: Mapping[str, Any]) -> HeadSpec | None:
    """Return the properties of the conditional head that a config.json describes; None if it
    describes none.

    `family_config` is the object in config.json that holds the drafter family's keys. A head is
    recognised by the key `HeadSpec.presence_key`.
    """
    for spec in _HEAD_SPECS:
        if family_config.get(spec.presence_key):
            return spec
    return None


def build_head_config(options: Any) -> dict[str, Any]:
    """Return the config.json entries that describe the conditional head of a new drafter; {} for no
    head.

    `options` is an `infer.config.HeadConfig`. The type is not in the signature because
    infer/config.py imports this module.
    """
    spec = CONDITIONAL_HEADS.get(options.name)
    if spec is None:
        return {}

    family_config = {}
    for key in spec.config_keys:
        value = None
        if key.option_name is not None:
            value = vars(options)[key.option_name]
        if value is None:
            value = key.new_drafter_value
        if value is not None and value is not False:
            family_config[key.name] = value
    return family_config


def read_head_options(family_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the conditional head of an existing drafter, as a dict of fields of
    `infer.config.HeadConfig`; {} if there is no head.

    `family_config` is the object in config.json that holds the drafter family's keys.
    """
    spec = find_head_spec(family_config)
    if spec is None:
        return {}

    options: dict[str, Any] = {"name": spec.name}
    # If two keys belong to the same option, the first one in `config_keys` decides the option's
    # value.
    for key in reversed(spec.config_keys):
        if key.option_name is not None:
            options[key.option_name] = family_config.get(key.name, key.default)
    return options


def read_head_config(config_entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json entries that describe the conditional head; {} if there is no head.
    Missing entries have their default values.

    `config_entries` are all valid entries of config.json, an
    `infer.drafters.config_keys.ValidConfigEntries`.
    """
    spec = find_head_spec(config_entries)
    if spec is None:
        return {}
    return {
        key.name: config_entries.get(key.name, key.default)
        for key in spec.config_keys
        if key.name in config_entries or not key.optional
    }


def check_head_options(options: Any) -> None:
    """Raise ValueError if the conditional head does not exist, or if an option was changed from its
    default although the head ignores this option.

    `options` is an `infer.config.HeadConfig`.
    """
    spec = CONDITIONAL_HEADS.get(options.name)
    if spec is None and options.name != NO_HEAD:
        raise ValueError(
            f"drafter.head.name={options.name}: use {NO_HEAD} or {' or '.join(CONDITIONAL_HEADS)}"
        )

    read_options = {"name"}
    if spec is not None:
        read_options |= spec.option_names
    defaults = vars(type(options)())
    for name, value in vars(options).items():
        if name in read_options or value == defaults[name]:
            continue
        heads = " or ".join(
            f"head={other.name}" for other in _HEAD_SPECS if name in other.option_names
        )
        raise ValueError(
            f"drafter.head.{name}={value} is an option of {heads}, not of head={options.name}; "
            "remove it"
        )

    if options.kind not in MARKOV_HEAD_KINDS:
        raise ValueError(f"drafter.head.kind={options.kind}: use {' or '.join(MARKOV_HEAD_KINDS)}")
