"""The walk: the drafted path that the target accepts, and the bonus token after it (DDTree section 4.4).

B rows, M tree nodes, W = max depth + 1.
"""

from dataclasses import dataclass

import torch

from infer.trees import compiled
from infer.trees.tree import DraftTree


@dataclass(frozen=True)
class Accepted:
    """What a round commits."""

    path: torch.Tensor  # (B, W) node indices from the root down, padded by repeating the last accepted one
    lengths: torch.Tensor  # (B,) committed nodes, the root included: 1 .. W
    bonus: torch.Tensor  # (B,) the target's token after the path: the next round's root


def walk(tree: DraftTree, chosen: torch.Tensor, ancestors: torch.Tensor | None = None) -> Accepted:
    """Go from the root to a child as long as a child carries the token that the target chose at the node.

    chosen (B, M): the target's token after every node, greedy or sampled: the same rule makes both lossless. Stays on
    the device: a node is reached if it and all its ancestors carry what was chosen at their parents, and the
    deepest of these ends the path. On the CPU a compiled loop finds the same.
    """
    if tree.max_depth == 0:
        return Accepted(tree.parents, torch.ones_like(tree.parents[:, 0]), chosen[:, 0])
    if compiled.available(chosen):
        accepted = chosen.new_empty(len(chosen), tree.max_depth + 3)
        columns = tree.tokens, tree.parents, tree.depths, chosen
        compiled.walk(*(column.contiguous().numpy() for column in columns), accepted.numpy())
        return Accepted(accepted[:, 2:], *accepted[:, :2].unbind(1))
    ancestors = tree.ancestors() if ancestors is None else ancestors
    match = tree.tokens == chosen.gather(1, tree.parents)  # (B, M)
    match[:, 0] = True
    reached = (match[:, None] | ~ancestors).all(-1)  # (B, M)
    last = (reached * (tree.depths + 1)).argmax(1, keepdim=True)  # (B, 1)
    on_path = ancestors.gather(1, last[..., None].expand(-1, -1, ancestors.shape[-1]))[:, 0]  # (B, M)
    depths = torch.where(on_path, tree.depths, tree.max_depth + 1)
    nodes = torch.arange(depths.shape[1], device=depths.device).expand_as(depths)
    # node i goes to column depths[i], nodes off the path to a last column, which is dropped
    path = last.expand(-1, tree.max_depth + 2).clone().scatter_(1, depths, nodes)[:, :-1]
    return Accepted(path, tree.depths.gather(1, last)[:, 0] + 1, chosen.gather(1, last)[:, 0])
