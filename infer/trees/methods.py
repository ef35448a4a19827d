"""The table of tree methods. This module does not import torch, since options, reports and help
texts need the table before anything is loaded.

A tree method consists of a function `Proposal -> DraftTree` (infer/trees/tree.py) in a file of its
own, and of a row in `TREE_METHODS`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name

from infer.utils.optional import is_installed, require_installed


@dataclass(frozen=True)
class TreeMethod:
    """A tree method: the function that builds the trees, what it needs, and how reports show it."""

    name: str  # the value of the option decoding.method
    label: str  # the name in tables and figures
    # "module:function" of the function Proposal -> DraftTree. It is imported when an engine is
    # made.
    builder: str
    # The colour in figures. Colour-blind readers can tell the colours of the table apart.
    colour: str = "#777777"
    needs_drafter: bool = True
    # Takes the drafter's block size. Returns the maximum number of nodes that the method can use.
    # None: the method can use any node budget.
    max_nodes_for_block: Callable[[int], int] | None = None
    # Whether nodes are sorted by probability, so that budget=auto can prune the tree to any size.
    ranked: bool = False
    needs_ngrams: bool = False  # whether the method needs an n-gram model
    # Whether the method also uses the n-grams of the sequence itself. If so, it works without an
    # n-gram file.
    uses_sequence_ngrams: bool = False
    ngram_variant: str | None = None  # the method that is used instead if an n-gram file is given
    # Whether every evaluation measures the method. If the method needs n-grams, an evaluation
    # measures it only if there is an n-gram file.
    in_evaluations: bool = True

    @property
    def scales_with_budget(self) -> bool:
        """Whether the tree grows with the node budget. If so, evaluations measure the method with
        several budgets."""
        return self.max_nodes_for_block is None

    def load_builder(self) -> Callable:
        """Import and return the function that builds the trees."""
        return resolve_name(self.builder)


_TREE_METHOD_ROWS = (
    TreeMethod(
        "plain",
        "plain",
        "infer.trees.tree:build_undrafted_trees",
        needs_drafter=False,
        max_nodes_for_block=lambda block_size: 0,
    ),
    TreeMethod(
        "chain",
        "chain",
        "infer.trees.chain:build_chain",
        "#d55e00",
        max_nodes_for_block=lambda block_size: block_size - 1,
        ranked=True,
    ),
    TreeMethod(
        "ddtree",
        "DDTree",
        "infer.trees.ddtree:build_ddtree",
        "#0072b2",
        ranked=True,
        ngram_variant="ddtree+ngrams",
    ),
    TreeMethod(
        "continuity",
        "continuity",
        "infer.trees.continuity:build_continuity_tree",
        "#009e73",
        needs_ngrams=True,
    ),
    TreeMethod(
        "ddtree+ngrams",
        "DDTree + n-grams",
        "infer.trees.guided:build_guided_ddtree",
        "#9b4f96",
        ranked=True,
        needs_ngrams=True,
        uses_sequence_ngrams=True,
    ),
    TreeMethod("static", "static", "infer.trees.static:build_static_tree", in_evaluations=False),
)
# Key: the method's name. Methods without a drafter come first, since evaluations compare all other
# methods with the first one.
TREE_METHODS = {
    row.name: row
    for row in sorted(_TREE_METHOD_ROWS, key=lambda row: row.needs_drafter)
    if is_installed(row.builder)
}
# An additional method of evaluations: DDTree with n-grams, where prompt lookup replaces the
# drafter.
NGRAMS_WITHOUT_DRAFTER_METHOD = TreeMethod(
    "n-grams alone", "n-grams alone", "", "#56b4e9", needs_ngrams=True
)


def require_method(name: str) -> None:
    """Raise ValueError if the module of the tree method `name` is not installed."""
    for row in _TREE_METHOD_ROWS:
        if row.name == name:
            require_installed(row.builder, f"method={name}")
