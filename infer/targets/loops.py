"""What the lean pass has compiled for few positions, in float32 and on the CPU (kernels.py): norms, heads on their way
into attention. There tensor operations take several times as many calls, each of which costs more than what it
computes.

N positions of B rows, Q each, D hidden size, H query heads, K key heads, G = H / K, E head size, R of its
features rotated. A position's numbers do not depend on what is computed beside it.
"""

from typing import NamedTuple

import torch

from infer.attention.kv_cache import LayerWindow
from infer.targets import kernels
from infer.trees import compiled

FEW = 1 << 17  # numbers of a state that a loop, which has one thread, goes through sooner than torch, which has all


class Scale(NamedTuple):
    """What is read of a norm, of a `lean.Norm` too."""

    wide: torch.Tensor  # its weight
    eps: float


def few(states: torch.Tensor) -> bool:
    """Return whether the loops of this module serve for states, and take less time than torch does."""
    usable = states.dtype == torch.float32 and compiled.available(states) and not states.requires_grad
    return usable and states.numel() <= FEW


def norm(states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return states (..., D) behind an RMS norm with a weight (D,)."""
    states, size = states.contiguous(), weight.shape[0]
    out = torch.empty_like(states)
    kernels.norm(states.data_ptr(), weight.data_ptr(), eps, out.data_ptr(), states.numel() // size, size)
    return out


def place(
    parts: torch.Tensor,
    norm: Scale | None,
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
    memory: LayerWindow,
) -> torch.Tensor:
    """Norm all of heads (N, H + 2 K, E) but values, by weights (H + K, E), if there are any, rotate them by cos and sin
    (N, 1, R), if they are given, write keys and values to `memory`, and return the queries, packed by the key head they
    share, (B, K, G Q, E). Heads are not what they were. Only the first dimension of heads may have gaps."""
    (rows, shared, _, size), (count, heads, _), width = memory.keys.shape, parts.shape, memory.width
    heads -= 2 * shared
    queries = parts.new_empty(rows, shared, heads // shared * width, size)
    weight, eps = (0, 0.0) if norm is None else (norm.wide.data_ptr(), norm.eps)
    cos, sin, rotated = (0, 0, 0) if rotation is None else (*(x.data_ptr() for x in rotation), rotation[0].shape[-1])
    plane = 4 * memory.buffer.stride(0)
    keys = memory.buffer.data_ptr() + 2 * memory.index * plane
    kernels.place_heads(
        parts.data_ptr(), parts.stride(0), weight, eps, cos, sin, memory.slots.data_ptr(), keys, keys + plane,
        queries.data_ptr(), count, width, heads, shared, size, rotated,
    )  # fmt: skip
    return queries
