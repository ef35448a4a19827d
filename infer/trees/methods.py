"""The table of tree methods. No torch here: options, reports and help read it before anything is
loaded.

A tree method is a function `Proposal -> DraftTree` (infer/trees/tree.py) in a file of its own, and
a row of `TREES`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name

from infer.utils.optional import is_installed, require_installed


@dataclass(frozen=True)
class TreeMethod:
    """One tree method: where its function is, what it needs, and how reports show it."""

    name: str  # decoding.method=<name>; a name has no parts
    label: str  # in tables and figures
    builder: str  # "module:function", Proposal -> DraftTree; imported when an engine is made
    colour: str = (
        "#777777"  # in figures; those of the table can be told apart by colour-blind readers
    )
    drafts: bool = True  # false: needs no drafter
    # block size -> nodes it can use at most; None: any node budget
    most_nodes: Callable[[int], int] | None = None
    ranked: bool = (
        False  # nodes are sorted by probability, so that budget=auto can cut the tree anywhere
    )
    ngrams: bool = False  # needs an n-gram file
    recalls: bool = (
        False  # asks the text's own n-grams too, which are enough where there is no file
    )
    with_ngrams: str | None = None  # the method that takes its place where an n-gram file is given
    evaluated: bool = (
        True  # measured by every evaluation that can (with an n-gram file, if it needs one)
    )

    @property
    def by_budget(self) -> bool:
        """Whether the node budget decides the size: an evaluation then measures every budget."""
        return self.most_nodes is None

    def load(self) -> Callable:
        """Return the function that builds the trees."""
        return resolve_name(self.builder)


_ROWS = (
    TreeMethod(
        "plain", "plain", "infer.trees.tree:plain", drafts=False, most_nodes=lambda block_size: 0
    ),
    TreeMethod(
        "chain",
        "chain",
        "infer.trees.chain:chain",
        "#d55e00",
        most_nodes=lambda block_size: block_size - 1,
        ranked=True,
    ),
    TreeMethod(
        "ddtree",
        "DDTree",
        "infer.trees.ddtree:ddtree",
        "#0072b2",
        ranked=True,
        with_ngrams="ddtree+ngrams",
    ),
    TreeMethod(
        "continuity", "continuity", "infer.trees.continuity:continuity", "#009e73", ngrams=True
    ),
    TreeMethod(
        "ddtree+ngrams",
        "DDTree + n-grams",
        "infer.trees.guided:guided_ddtree",
        "#9b4f96",
        ranked=True,
        ngrams=True,
        recalls=True,
    ),
    TreeMethod("static", "static", "infer.trees.fixed:static", evaluated=False),
)
# plain decoding first, wherever a row is added: evaluations compare with the first
TREES = {
    row.name: row for row in sorted(_ROWS, key=lambda row: row.drafts) if is_installed(row.builder)
}
# in evaluations, beside the drafter that is measured: DDTree over n-grams, prompt lookup in the
# drafter's place
ALONE = TreeMethod("n-grams alone", "n-grams alone", "", "#56b4e9", ngrams=True)


def require_method(name: str) -> None:
    """Raise ValueError for a method whose module is not in this installation."""
    for row in _ROWS:
        if row.name == name:
            require_installed(row.builder, f"method={name}")
