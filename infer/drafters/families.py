"""The table of drafter families. No torch here: options are checked against the table before
anything is loaded, and a family's own code is imported when it is first used.

A new family is a subclass of `infer.drafters.base.Drafter` in a file or folder of this package, a
row here, and a file in conf/drafter.
"""

from dataclasses import dataclass, field
from pkgutil import resolve_name

from infer.utils.optional import is_installed, require_installed


@dataclass(frozen=True)
class ExportFormat:
    """A layout that drafters of a family are exported in, and what it has words for."""

    target: bool = False  # it stores the target's embedding and head
    heads: tuple[str, ...] = ()  # conditional heads, rows of `infer.drafters.heads.table`
    headless: bool = True  # a drafter without a conditional head
    convolutions: bool = False  # beside a selector
    refuses: tuple[str, ...] = ()  # names in `infer.formats.export.faults`

    def fits(self, head, convolutions: bool) -> bool:
        """Return whether it has words for a drafter's conditional head, or for none, and for its
        convolutions."""
        worded = self.headless if head is None else head.name in self.heads
        return worded and (
            not convolutions or (self.convolutions and head is not None and head.name == "selector")
        )


@dataclass(frozen=True)
class Family:
    """A row of the table: what options and readers of a config.json need to know of a family
    without loading it."""

    name: str  # of `drafter.family`
    title: str  # for people
    drafter: str  # "module:class" of its drafters; imported when the first one is made
    architecture: str = ""  # what `architectures` in config.json names
    config_key: str = ""  # the object in config.json that holds what only this family has
    layers: int | None = None  # the only number of layers that it can have; None: any
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)  # ZeRO stages that it can be trained with
    formats: dict[str, ExportFormat] = field(
        default_factory=dict
    )  # what its drafters are exported in
    options: tuple[str, ...] = ()  # of OWN_OPTIONS, those that it reads
    mask_token: bool = False  # its slots hold a token that no text has
    own_head: bool = False  # its drafters have a head of their own, which begins as the target's
    on_device: bool = (
        True  # drafting asks the host for nothing, so that it can be part of a CUDA graph
    )

    def load(self) -> type:
        """Return the class of its drafters, a subclass of `infer.drafters.base.Drafter`."""
        return resolve_name(self.drafter)

    def config_part(self, own: dict) -> dict:
        """Return the keys of a config.json that belong to the family; `own`: the content of
        `config_key`."""
        return {"architectures": [self.architecture], self.config_key: own}


_DSPARK = ("not from anchor", "causal", "sliding", "normed", "part", "fusion")
_ROWS = (
    Family(
        name="dflash",
        title="DFlash",
        drafter="infer.drafters.dflash.model:DFlash",
        architecture="DFlashDraftModel",
        config_key="dflash_config",
        formats={
            "dflash": ExportFormat(refuses=("from anchor", "part", "fusion")),
            "dflash2": ExportFormat(
                heads=("selector",),
                headless=False,
                convolutions=True,
                refuses=("from anchor", "choice", "part", "fusion"),
            ),
            "dspark": ExportFormat(target=True, heads=("markov",), refuses=_DSPARK),
            "specforge": ExportFormat(heads=("markov", "gru"), headless=False, refuses=_DSPARK),
            "speculators": ExportFormat(
                target=True,
                heads=("markov", "selector", "xpress"),
                convolutions=True,
                refuses=(
                    "full and causal",
                    "recurrent",
                    "normed",
                    "choice",
                    "part of the choice",
                    "fusion",
                ),
            ),
            "transformers": ExportFormat(
                refuses=("from anchor", "causal", "raw", "window of 1", "part", "fusion")
            ),
            "gguf": ExportFormat(
                target=True,
                heads=("selector", "markov"),
                convolutions=True,
                refuses=("room", "choice from anchor", "llama3", "part", "fusion"),
            ),
        },
        options=(
            "sample_from_anchor",
            "causal",
            "sliding_window",
            "layer_fusion",
            "conv_kernel_size",
            "head",
        ),
        mask_token=True,
    ),
    Family(
        name="dart",
        title="DART",
        drafter="infer.drafters.dart.model:DART",
        architecture="DARTDraftModel",
        config_key="dart_config",
        layers=1,
        zero_stages=(0, 1, 2),  # training reads the head's whole weight
        own_head=True,
        options=("head",),
    ),
)
FAMILIES = {row.name: row for row in _ROWS if is_installed(row.drafter)}
# without a network, and so without a config.json
LOOKUP = Family("lookup", "prompt lookup", "infer.drafters.lookup:Lookup", on_device=False)
FORMATS = {name: format for row in FAMILIES.values() for name, format in row.formats.items()}
MISSING_FAMILIES = [
    row for row in _ROWS if row.name not in FAMILIES
]  # their code is not in this installation
OWN_OPTIONS = tuple(
    dict.fromkeys(option for row in _ROWS for option in row.options)
)  # of any family


def require_family(name: str) -> None:
    """Raise ValueError for a family whose module is not in this installation."""
    for row in _ROWS:
        if row.name == name:
            require_installed(row.drafter, f"drafter.family={name}")


def check_options(family: str, layers: int) -> None:
    """Raise ValueError for a family that does not exist, or a number of layers that it cannot
    have."""
    require_family(family)
    row = FAMILIES.get(family)
    if row is None:
        raise ValueError(f"drafter.family={family}: use {' or '.join(FAMILIES)}")
    if row.layers not in (None, layers):
        allowed = f"{row.layers} layer" + "s" * (row.layers > 1)
        raise ValueError(
            f"drafter.layers={layers}: a {row.title} drafter has {allowed} (drafter={family} sets it)"
        )


def check_blocks(options) -> None:
    """Raise ValueError for options (`infer.config.DrafterConfig`) that its family does not read."""
    row = FAMILIES[options.family]
    plain = vars(type(options)())
    for name in OWN_OPTIONS:
        value = vars(options)[name]
        if name not in row.options and value != plain[name]:
            given = (
                f"drafter.head.name={value.name}" if name == "head" else f"drafter.{name}={value}"
            )
            raise ValueError(f"{given}: drafter={options.family} has no such thing")


def check_format(family: Family, name: str, head, convolutions: bool) -> None:
    """Raise ValueError where a drafter of a family, with a conditional head
    (`infer.drafters.heads.table.HeadRow`) or None, and with or without convolutions, cannot be
    exported in a format."""
    format = family.formats.get(name)
    if format is None or not format.fits(head, convolutions):
        what = f"{family.title} drafter {'without a' if head is None else 'with a ' + head.title} conditional head"
        what += " and with convolutions" * convolutions
        takers = [other for other, row in family.formats.items() if row.fits(head, convolutions)]
        advice = f"use format={' or '.join(takers)}" if takers else "no format has"
        raise ValueError(f"format={name} has no words for a {what}: {advice}")


def check_stage(family: str, stage: int) -> None:
    """Raise ValueError for a ZeRO stage that a family cannot be trained with."""
    stages = FAMILIES[family].zero_stages
    if stage not in stages:
        allowed = ", ".join(map(str, stages))
        raise ValueError(
            f"drafter={family} needs weights whole that deepspeed.stage={stage} cuts up: use {allowed}"
        )
