"""The table of conditional heads. No torch here: options are checked against it before anything is loaded.

A new head is a subclass of `infer.drafters.heads.base.Head` in a file of this folder, a row here, and a file in
conf/head.
"""

from dataclasses import dataclass
from importlib import import_module

NONE = "none"
RECURRENT_KINDS = ("vanilla", "gated", "rnn")  # of the Markov head


@dataclass(frozen=True)
class HeadRow:
    """A row of the table: what options and readers of a config.json need to know of a head without loading it."""

    name: str  # of `drafter.head.name`
    title: str  # for people
    head: str  # "module:class"; imported when a drafter has one
    attribute: str  # the drafter's submodule; the head's tensors begin with it
    key: str  # of the family's part of config.json: a drafter where it is set has this head
    options: tuple[str, ...]  # fields of `infer.config.HeadConfig` that it reads, beside its name
    corrects: bool = True  # it adds to logits that there are without it
    tables: tuple[str, ...] = ()  # its tensors that are a vector for each token: AdamW's, where matrices are Muon's

    def load(self) -> type:
        """Return its class, a subclass of `infer.drafters.heads.base.Head`."""
        module, name = self.head.split(":")
        return getattr(import_module(module), name)


_ROWS = (
    HeadRow(
        "markov",
        "Markov (DSpark)",
        "infer.drafters.heads.markov:Markov",
        attribute="markov_head",
        key="markov_rank",
        options=("kind", "rank", "confidence"),
        tables=("markov_w1.weight", "markov_w2.weight"),
    ),
    HeadRow(
        "selector",
        "candidate selector (DFlash 2)",
        "infer.drafters.heads.selector:Selector",
        attribute="candidate_selector",
        key="selector_rank",
        options=("rank", "top_k"),
        tables=("predecessor_codebook", "successor_codebook"),
    ),
    HeadRow(
        "swiglu",
        "SwiGLU (TreeFlash)",
        "infer.drafters.heads.swiglu:SwiGLU",
        attribute="ar_approximation",
        key="ar_approximation",
        options=("hidden",),
        corrects=False,
    ),
    HeadRow(
        "gru",
        "GRU (Domino)",
        "infer.drafters.heads.gru:GRU",
        attribute="domino_head",
        key="gru_hidden_dim",
        options=("rank", "hidden"),
        tables=("embed_proj.2.weight",),
    ),
)
HEADS = {row.name: row for row in _ROWS}
TABLES = tuple(name for row in _ROWS for name in row.tables)


def head_of(own: dict) -> HeadRow | None:
    """Return the row of the head that a drafter has, from the family's part of its config.json."""
    return next((row for row in _ROWS if own.get(row.key)), None)


def check_head(head) -> None:
    """Raise ValueError for options (`infer.config.HeadConfig`) of a head that does not exist, or that it does not
    read."""
    row = HEADS.get(head.name)
    if row is None and head.name != NONE:
        raise ValueError(f"drafter.head.name={head.name}: use {NONE} or {' or '.join(HEADS)}")
    read, plain = ("name", *(row.options if row else ())), type(head)()
    for name, value in vars(head).items():
        if name not in read and value != getattr(plain, name):
            takers = " or ".join(f"head={row.name}" for row in _ROWS if name in row.options)
            raise ValueError(f"drafter.head.{name}={value} is an option of {takers}, not of head={head.name}")
    if head.kind not in RECURRENT_KINDS:
        raise ValueError(f"drafter.head.kind={head.kind}: use {' or '.join(RECURRENT_KINDS)}")
