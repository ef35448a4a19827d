"""The table of drafter families (drafters with the same architecture, such as DFlash).

This module does not import torch, because options are checked against the table before any model is
loaded. The module of a family is imported when the family is first used.

To add a family, write a subclass of `infer.drafters.base.Drafter` in a file or folder of this
package, add an entry to `_FAMILIES`, and add a file to conf/drafter.
"""

from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any

from infer.drafters.heads.table import HeadSpec
from infer.utils.optional import is_installed, require_installed


@dataclass(frozen=True)
class ExportFormat:
    """A checkpoint format that drafters of a family can be exported to, and the kinds of drafters
    that it can store."""

    # whether checkpoints contain copies of the target's embedding and language model head
    stores_embedding_and_head: bool = False
    supported_head_names: tuple[
        str, ...
    ] = ()  # names (`HeadSpec.name`) of the supported conditional heads
    allows_no_head: bool = True  # whether drafters without a conditional head can be exported
    # whether drafters with convolutions can be exported; they must also have a selector head
    allows_convolutions: bool = False
    # Names of properties; drafters with one of them cannot be exported. The names are the keys of
    # the dict that `infer.formats.export.find_export_limits` returns.
    refused_features: tuple[str, ...] = ()

    def supports(self, head: HeadSpec | None, convolutions: bool) -> bool:
        """Return whether this format can store a drafter with the conditional head `head` (None: no
        head).

        `convolutions` tells whether the drafter has convolutions.
        """
        if head is None:
            return self.allows_no_head and not convolutions
        if head.name not in self.supported_head_names:
            return False
        return not convolutions or (self.allows_convolutions and head.name == "selector")


@dataclass(frozen=True)
class Family:
    """The properties of a drafter family that are needed before its drafter class is imported: to
    check options and to read config.json."""

    name: str  # the value of the option `drafter.family`
    title: str  # the family's name in messages and reports
    # "module:class" of the drafter class, which is imported when it is first needed
    class_path: str
    architecture: str = ""  # the class name under `architectures` in config.json
    config_key: str = ""  # key of the object in config.json that holds this family's own keys
    required_layers: int | None = None  # the only allowed number of layers; None allows any number
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)  # ZeRO stages of DeepSpeed that training supports
    # Key: name of an export format (the export command's option `format`). Value: its limits.
    formats: dict[str, ExportFormat] = field(default_factory=dict)
    # names of options of `drafter` that this family reads but some other family ignores
    specific_option_names: tuple[str, ...] = ()
    # whether drafted positions have a mask token as input, a token id that never occurs in text
    uses_mask_token: bool = False
    # whether the drafter has its own language model head, which starts as a copy of the target's
    includes_lm_head: bool = False
    # whether drafting runs entirely on the GPU, so that it can be recorded as a CUDA graph
    drafts_on_device: bool = True

    def load(self) -> Any:
        """Import and return the drafter class, a subclass of `infer.drafters.base.Drafter`."""
        return resolve_name(self.class_path)

    def build_config_entries(self, family_config: dict) -> dict:
        """Return the config.json entries that identify the family: `architectures`, and the object
        `family_config` under the key `config_key`."""
        return {"architectures": [self.architecture], self.config_key: family_config}


_FEATURES_REFUSED_BY_DSPARK_FORMATS = (
    "not from anchor",
    "causal",
    "sliding",
    "normed",
    "reduced vocabulary",
    "layer fusion",
)
_FEATURES_REFUSED_BY_SPECULATORS_FORMAT = (
    "full and causal",
    "recurrent",
    "normed",
    "selector size",
    "reduced selector vocabulary",
    "layer fusion",
)
_FEATURES_REFUSED_BY_TRANSFORMERS_FORMAT = (
    "from anchor",
    "causal",
    "raw",
    "window of 1",
    "reduced vocabulary",
    "layer fusion",
)
_FAMILIES = (
    Family(
        name="dflash",
        title="DFlash",
        class_path="infer.drafters.dflash.model:DFlash",
        architecture="DFlashDraftModel",
        config_key="dflash_config",
        formats={
            "dflash": ExportFormat(
                refused_features=("from anchor", "reduced vocabulary", "layer fusion")
            ),
            "dflash2": ExportFormat(
                supported_head_names=("selector",),
                allows_no_head=False,
                allows_convolutions=True,
                refused_features=(
                    "from anchor",
                    "selector size",
                    "reduced vocabulary",
                    "layer fusion",
                ),
            ),
            "dspark": ExportFormat(
                stores_embedding_and_head=True,
                supported_head_names=("markov",),
                refused_features=_FEATURES_REFUSED_BY_DSPARK_FORMATS,
            ),
            "specforge": ExportFormat(
                supported_head_names=("markov", "gru"),
                allows_no_head=False,
                refused_features=_FEATURES_REFUSED_BY_DSPARK_FORMATS,
            ),
            "speculators": ExportFormat(
                stores_embedding_and_head=True,
                supported_head_names=("markov", "selector", "xpress"),
                allows_convolutions=True,
                refused_features=_FEATURES_REFUSED_BY_SPECULATORS_FORMAT,
            ),
            "transformers": ExportFormat(refused_features=_FEATURES_REFUSED_BY_TRANSFORMERS_FORMAT),
            "gguf": ExportFormat(
                stores_embedding_and_head=True,
                supported_head_names=("selector", "markov"),
                allows_convolutions=True,
                refused_features=(
                    "selector pairs",
                    "selector from anchor",
                    "llama3",
                    "reduced vocabulary",
                    "layer fusion",
                ),
            ),
        },
        specific_option_names=(
            "sample_from_anchor",
            "causal",
            "sliding_window",
            "layer_fusion",
            "conv_kernel_size",
            "head",
        ),
        uses_mask_token=True,
    ),
    Family(
        name="dart",
        title="DART",
        class_path="infer.drafters.dart.model:DART",
        architecture="DARTDraftModel",
        config_key="dart_config",
        required_layers=1,
        # Training reads the whole weight of the language model head, which ZeRO stage 3 shards.
        zero_stages=(0, 1, 2),
        includes_lm_head=True,
        specific_option_names=("head",),
    ),
)
DRAFTER_FAMILIES = {family.name: family for family in _FAMILIES if is_installed(family.class_path)}
# Prompt lookup has neither weights nor a config.json, so it is not in DRAFTER_FAMILIES.
PROMPT_LOOKUP_FAMILY = Family(
    "lookup", "prompt lookup", "infer.drafters.lookup:PromptLookup", drafts_on_device=False
)
EXPORT_FORMATS = {
    name: export_format
    for family in DRAFTER_FAMILIES.values()
    for name, export_format in family.formats.items()
}
# Families whose module is missing from this installation.
MISSING_FAMILIES = [family for family in _FAMILIES if family.name not in DRAFTER_FAMILIES]
# Names of options of `drafter` that some families read and others ignore.
FAMILY_SPECIFIC_OPTIONS = tuple(
    dict.fromkeys(option for family in _FAMILIES for option in family.specific_option_names)
)


def require_family_installed(name: str) -> None:
    """Raise ValueError if the family `name` exists but its module is missing from this
    installation."""
    for family in _FAMILIES:
        if family.name == name:
            require_installed(family.class_path, f"drafter.family={name}")


def check_family_and_layers(family_name: str, layers: int) -> None:
    """Raise ValueError in three cases: the drafter family does not exist, it is not installed, or
    its drafters cannot have `layers` layers."""
    require_family_installed(family_name)
    family = DRAFTER_FAMILIES.get(family_name)
    if family is None:
        raise ValueError(f"drafter.family={family_name}: use {' or '.join(DRAFTER_FAMILIES)}")
    if family.required_layers not in (None, layers):
        plural = "s" if family.required_layers > 1 else ""
        raise ValueError(
            f"drafter.layers={layers}: a {family.title} drafter has {family.required_layers} "
            f"layer{plural}; drafter={family_name} sets this number, so remove drafter.layers"
        )


def check_family_options(options: Any) -> None:
    """Raise ValueError if an option was changed from its default although the drafter family
    ignores this option.

    `options` is an `infer.config.DrafterConfig`. The type is not in the signature because
    infer/config.py imports this module.
    """
    family = DRAFTER_FAMILIES[options.family]
    defaults = vars(type(options)())
    for name in FAMILY_SPECIFIC_OPTIONS:
        value = vars(options)[name]
        if name in family.specific_option_names or value == defaults[name]:
            continue
        option = f"drafter.{name}={value}"
        if name == "head":
            option = f"drafter.head.name={value.name}"
        raise ValueError(f"{option}: drafter={options.family} does not have this option; remove it")


def check_export_format(
    family: Family, format_name: str, head: HeadSpec | None, convolutions: bool
) -> None:
    """Raise ValueError if the export format `format_name` cannot store the drafter. The message
    names the formats that can store it.

    The drafter belongs to `family` and has the conditional head `head` (None: no head).
    `convolutions` tells whether the drafter has convolutions.
    """
    export_format = family.formats.get(format_name)
    if export_format is not None and export_format.supports(head, convolutions):
        return

    drafter = f"{family.title} drafter without a conditional head"
    if head is not None:
        drafter = f"{family.title} drafter with a {head.title} conditional head"
    if convolutions:
        drafter += " and with convolutions"

    supporting = [
        name for name, other in family.formats.items() if other.supports(head, convolutions)
    ]
    advice = "no format supports it"
    if supporting:
        advice = f"use format={' or '.join(supporting)}"
    raise ValueError(f"format={format_name} does not support a {drafter}: {advice}")


def check_zero_stage(family_name: str, stage: int) -> None:
    """Raise ValueError if drafters of the family cannot be trained with this ZeRO stage of
    DeepSpeed."""
    allowed_stages = DRAFTER_FAMILIES[family_name].zero_stages
    if stage not in allowed_stages:
        allowed = ", ".join(map(str, allowed_stages))
        raise ValueError(
            f"deepspeed.stage={stage} shards the parameters, which drafter={family_name} does not "
            f"support; allowed values of deepspeed.stage: {allowed}"
        )
