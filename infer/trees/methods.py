"""The table of tree methods, the ways to build draft trees.

To add a tree method, write a function `Proposal -> DraftTree` (infer/trees/tree.py) in a new file,
and add a row to the table. This module does not import torch, because options, reports and help
texts read the table before torch is loaded.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name

from infer.utils.optional import is_installed, require_installed


@dataclass(frozen=True)
class TreeMethod:
    """A way to build draft trees: the function, its requirements, and how reports show it."""

    name: str  # the value of the option decoding.method
    label: str  # the name in tables and figures
    # The function Proposal -> DraftTree that builds the trees, as "module:function". The module is
    # imported when an engine is created.
    builder_path: str
    # The colour in figures. All methods have colours that colour-blind readers can tell apart.
    colour: str = "#777777"
    needs_drafter: bool = True
    # A function that returns the maximum number of drafted nodes of a tree, given the drafter's
    # block size. None if the method can use any node budget.
    max_nodes_for_block: Callable[[int], int] | None = None
    # Whether the nodes of a tree are sorted by probability, so that the first n nodes are the best
    # tree of n nodes. The option budget=auto requires this.
    sorts_nodes_by_probability: bool = False
    needs_ngrams: bool = False  # whether the method needs an n-gram model
    # Whether the method also uses the n-grams of the sequence itself. Such a method works without
    # an n-gram file.
    uses_sequence_ngrams: bool = False
    # Name of the tree method that replaces this method if an n-gram file is given.
    ngram_variant: str | None = None
    # Whether evaluations measure the method. A method that needs n-grams is only measured if there
    # is an n-gram file.
    in_evaluations: bool = True

    @property
    def scales_with_budget(self) -> bool:
        """Whether the method can use any node budget. If so, evaluations try several budgets."""
        return self.max_nodes_for_block is None

    def load_builder(self) -> Callable:
        """Import and return the function that builds the trees."""
        return resolve_name(self.builder_path)


_TREE_METHOD_ROWS = (
    TreeMethod(
        "plain",
        "plain",
        "infer.trees.tree:build_root_only_trees",
        needs_drafter=False,
        max_nodes_for_block=lambda block_size: 0,
    ),
    TreeMethod(
        "chain",
        "chain",
        "infer.trees.chain:build_chain",
        "#d55e00",
        max_nodes_for_block=lambda block_size: block_size - 1,
        sorts_nodes_by_probability=True,
    ),
    TreeMethod(
        "ddtree",
        "DDTree",
        "infer.trees.ddtree:build_ddtree",
        "#0072b2",
        sorts_nodes_by_probability=True,
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
        sorts_nodes_by_probability=True,
        needs_ngrams=True,
        uses_sequence_ngrams=True,
    ),
    TreeMethod("static", "static", "infer.trees.static:build_static_tree", in_evaluations=False),
)
# Key: name of the method. Methods that need no drafter come first, because evaluations compare all
# methods with the first one.
TREE_METHODS = {
    row.name: row
    for row in sorted(_TREE_METHOD_ROWS, key=lambda row: row.needs_drafter)
    if is_installed(row.builder_path)
}
# An additional method that evaluations measure: the tree method "ddtree+ngrams" with prompt lookup
# as the drafter.
NGRAMS_ALONE_TREE_METHOD = TreeMethod(
    "n-grams alone", "n-grams alone", "", "#56b4e9", needs_ngrams=True
)


def require_method_installed(name: str) -> None:
    """Raise ValueError if the module of the tree method `name` is not installed."""
    for row in _TREE_METHOD_ROWS:
        if row.name == name:
            require_installed(row.builder_path, f"method={name}")
