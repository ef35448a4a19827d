"""The table of conditional heads. No torch here: options are checked against it before anything is
loaded.

A new head is a subclass of `infer.drafters.heads.base.Head` in a file of this folder, a row here,
and a file in conf/head.
"""

from dataclasses import dataclass
from pkgutil import resolve_name
from typing import NamedTuple

NONE = "none"
RECURRENT_KINDS = ("vanilla", "gated", "rnn")  # of the Markov head


class HeadKey(NamedTuple):
    """A key that a head has in the family's part of config.json: a whole number, or one of
    `choices`. Where the key of a head is 0, a drafter has none."""

    name: str
    option: str | None = None  # the field of `infer.config.HeadConfig` that it holds
    default: object = (
        None  # where a config.json says nothing; None: it must, unless the key is optional
    )
    new: object = None  # of a new drafter whose options say nothing
    least: int = 1
    choices: tuple = ()
    optional: bool = False  # left out where nothing says it


@dataclass(frozen=True)
class HeadRow:
    """A row of the table: what options and readers of a config.json need to know of a head without
    loading it."""

    name: str  # of `drafter.head.name`
    title: str  # for people
    head: str  # "module:class"; imported when a drafter has one
    attribute: str  # the drafter's submodule; the head's tensors begin with it
    key: str  # of the family's part of config.json: a drafter where it is set has this head
    keys: tuple[HeadKey, ...]  # all that it has there
    corrects: bool = True  # it adds to logits that there are without it
    # its tensors that are a vector for each token: AdamW's, where matrices are Muon's
    tables: tuple[str, ...] = ()

    @property
    def options(self) -> set[str]:
        """The fields of `infer.config.HeadConfig` that it reads, beside its name."""
        return {key.option for key in self.keys if key.option}

    def load(self) -> type:
        """Return its class, a subclass of `infer.drafters.heads.base.Head`."""
        return resolve_name(self.head)


_ROWS = (
    HeadRow(
        "markov",
        "Markov (DSpark)",
        "infer.drafters.heads.markov:Markov",
        attribute="markov_head",
        key="markov_rank",
        keys=(
            HeadKey("markov_rank", "rank", least=0),
            HeadKey("markov_head_type", "kind", "vanilla", choices=RECURRENT_KINDS),
            HeadKey(
                "enable_confidence_head",
                "confidence_head",
                False,
                choices=(True, False),
                optional=True,
            ),
            HeadKey(
                "confidence_head_with_markov",
                "confidence_head",
                False,
                choices=(True, False),
                optional=True,
            ),
        ),
        tables=("markov_w1.weight", "markov_w2.weight"),
    ),
    HeadRow(
        "selector",
        "candidate selector (DFlash 2)",
        "infer.drafters.heads.selector:Selector",
        attribute="candidate_selector",
        key="selector_rank",
        keys=(
            HeadKey("selector_rank", "rank", least=0),
            HeadKey("selector_top_k", "top_k", 16, least=0),
        ),
        tables=("predecessor_codebook", "successor_codebook"),
    ),
    HeadRow(
        "swiglu",
        "SwiGLU (TreeFlash)",
        "infer.drafters.heads.swiglu:SwiGLU",
        attribute="ar_approximation",
        key="ar_approximation",
        keys=(
            HeadKey("ar_approximation", new="swiglu", choices=("swiglu",)),
            HeadKey("ar_hidden_size", "hidden_size", optional=True),
        ),
        corrects=False,
    ),
    HeadRow(
        "gru",
        "GRU (Domino)",
        "infer.drafters.heads.gru:GRU",
        attribute="domino_head",
        key="gru_hidden_dim",
        keys=(
            HeadKey("emb_dim", "rank", 256),
            HeadKey("gru_hidden_dim", "hidden_size", 1024, new=1024, least=0),
            HeadKey("pure_draft_prefix_len", default=0, new=1, least=0),
        ),
        tables=("embed_proj.2.weight",),
    ),
    HeadRow(
        "xpress",
        "causal refiner (XPress)",
        "infer.drafters.heads.xpress:XPress",
        attribute="refiner_head",
        key="xpress_rank",
        keys=(
            HeadKey("xpress_rank", "rank", 256, least=0),
            HeadKey("xpress_mlp_ratio", default=2, new=2),
            # of engines: what they approach is our chain
            HeadKey("num_jacobi_passes", default=6, new=6, least=0),
        ),
        tables=("token_embed.weight", "readout.weight"),
    ),
)
HEADS = {row.name: row for row in _ROWS}
TABLES = tuple(name for row in _ROWS for name in row.tables)


def head_of(own: dict) -> HeadRow | None:
    """Return the row of the head that a drafter has, from the family's part of its config.json."""
    return next((row for row in _ROWS if own.get(row.key)), None)


def new_head(options) -> dict:
    """Return the keys of a new drafter's conditional head, from its options
    (`infer.config.HeadConfig`); none for a drafter without one."""
    own = {}
    for key in HEADS[options.name].keys if options.name in HEADS else ():
        value = vars(options)[key.option] if key.option else None
        value = key.new if value is None else value
        if value is not None and value is not False:
            own[key.name] = value
    return own


def head_options(own: dict) -> dict:
    """Return the options that lead to the conditional head of a drafter, from the family's part of
    its config.json."""
    row = head_of(own)
    if row is None:
        return {}
    return {"name": row.name} | {
        key.option: own.get(key.name, key.default) for key in row.keys[::-1] if key.option
    }


def read_head(keys: dict) -> dict:
    """Return the keys of the conditional head that a config.json describes, whose keys are checked
    (`infer.drafters.config_keys.Keys`); none where it has none."""
    row = head_of(keys)
    wanted = [key for key in row.keys if key.name in keys or not key.optional] if row else []
    return {key.name: keys.get(key.name, key.default) for key in wanted}


def check_head(head) -> None:
    """Raise ValueError for options (`infer.config.HeadConfig`) of a head that does not exist, or
    that it does not read."""
    row = HEADS.get(head.name)
    if row is None and head.name != NONE:
        raise ValueError(f"drafter.head.name={head.name}: use {NONE} or {' or '.join(HEADS)}")
    read = ("name", *(row.options if row else ()))
    plain = type(head)()
    for name, value in vars(head).items():
        if name not in read and value != vars(plain)[name]:
            takers = " or ".join(f"head={row.name}" for row in _ROWS if name in row.options)
            raise ValueError(
                f"drafter.head.{name}={value} is an option of {takers}, not of head={head.name}"
            )
    if head.kind not in RECURRENT_KINDS:
        raise ValueError(f"drafter.head.kind={head.kind}: use {' or '.join(RECURRENT_KINDS)}")
