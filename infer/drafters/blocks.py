"""Compute the states of many drafted blocks of packed sequences in one pass, as in training.

B batch rows, T tokens of a packed sequence, N anchors (positions of the bonus tokens after which
blocks are drafted), W slots of a block, D hidden size, F features of a position.
"""

from collections.abc import Callable

import torch

from infer.attention.masks import build_training_mask
from infer.drafters.base import Drafter
from infer.targets.target import Target


def compute_packed_block_states(
    drafter: Drafter,
    target: Target,
    packed_sequences: dict[str, torch.Tensor],
    anchors: torch.Tensor,
    context: torch.Tensor,
    forward: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Compute the states (B, N, W, D) of all slots of all blocks in packed sequences, in one pass.

    `packed_sequences` holds "ids", "positions" and "documents", (B, T) each. `anchors` (B, N) are
    the indices of the blocks' bonus tokens. `context` (B, T, F) are the features. `forward` is the
    drafter, or a training engine that wraps the drafter. `Drafter.normalize_for_head` was already
    applied to the returned states.
    """
    ids = packed_sequences["ids"]
    positions = packed_sequences["positions"]
    inputs = drafter.prepare_inputs(target, ids, positions, anchors)
    block_starts = (anchors - drafter.anchor_offset).clamp(min=0)
    masks = [
        build_training_mask(
            block_starts, packed_sequences["documents"], drafter.num_queries, *pattern
        )
        for pattern in drafter.attention_patterns
    ]
    features = context.to(drafter.norm.weight.dtype)
    states = forward(features, positions, *inputs, *masks)  # (B, N * W, D)
    return states.unflatten(1, (-1, drafter.num_queries))
