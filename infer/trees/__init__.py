"""Draft trees: pure functions from marginals to trees, no model in sight."""

from infer.trees.chain import chain
from infer.trees.ddtree import ddtree
from infer.trees.tree import DraftTree, root_only

TREES = {"chain": chain, "ddtree": ddtree}

__all__ = ["TREES", "DraftTree", "chain", "ddtree", "root_only"]
