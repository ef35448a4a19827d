"""Draft trees: pure functions from marginals to trees, no model in sight."""

from infer.trees.chain import chain
from infer.trees.continuity import continuity, guided_ddtree
from infer.trees.ddtree import ddtree
from infer.trees.fixed import static, static_depth
from infer.trees.tree import DraftTree, root_only

__all__ = [
    "DraftTree",
    "chain",
    "continuity",
    "ddtree",
    "guided_ddtree",
    "root_only",
    "static",
    "static_depth",
]
