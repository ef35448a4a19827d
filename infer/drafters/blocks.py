"""Compute the hidden states of many drafted blocks of packed sequences in one pass, as in training.

B batch rows (one packed sequence each), T tokens of a packed sequence, N blocks per packed
sequence, W slots (input positions) of a block, D hidden size, F size of a position's features
(hidden states of several target layers, concatenated).
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
    """Compute the hidden states of all blocks of packed sequences in one pass.

    `packed_sequences` holds "ids", "positions" and "documents" (document numbers), (B, T) each, for
    B packed sequences of T tokens. `anchors` (B, num_blocks) are the indices of the bonus tokens
    after which blocks are drafted. `context` (B, T, num_features) are the target's hidden states
    that the drafter reads. `forward` is the drafter, or an object of a training framework that
    wraps the drafter.

    Returns the hidden states (B, num_blocks, num_slots, hidden_size) of the blocks' slots (input
    positions), to which `Drafter.normalize_for_head` was applied.
    """
    ids = packed_sequences["ids"]
    positions = packed_sequences["positions"]
    inputs = drafter.prepare_training_inputs(target, ids, positions, anchors)
    block_starts = (anchors - drafter.anchor_offset).clamp(min=0)
    masks = [
        build_training_mask(
            block_starts, packed_sequences["documents"], drafter.num_queries, *pattern
        )
        for pattern in drafter.attention_patterns
    ]
    features = context.to(drafter.norm.weight.dtype)
    states = forward(features, positions, *inputs, *masks)  # (B, slots of all blocks, hidden size)
    return states.unflatten(1, (-1, drafter.num_queries))
