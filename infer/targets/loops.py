"""What the lean pass has compiled by numba for few positions, in float32 and on the CPU: norms, heads
on their way into attention. There tensor operations take several times as many calls, each of which
costs more than what it computes. Arguments of compiled loops are addresses and sizes, as the loops are
called hundreds of times in a pass.

N positions of B rows, Q each, D hidden size, H query heads, K key heads, G = H / K, E head size, R of
its features rotated. A position's numbers do not depend on what is computed beside it.
"""

from typing import NamedTuple

import numpy as np
import torch
from numba import carray, types
from numba.extending import intrinsic

from infer.attention.kv_cache import LayerWindow
from infer.trees import compiled
from infer.utils.jit import njit

FEW = 1 << 17  # numbers of a state that a loop, which has one thread, goes through sooner than torch, which has all


def pointer(kind: types.Type):
    """Return a function of compiled code that makes an address a pointer to numbers of a kind."""

    @intrinsic
    def point(typing, address):
        def generate(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(kind).as_pointer())

        return types.CPointer(kind)(types.intp), generate

    return point


floats, longs = pointer(types.float32), pointer(types.int64)


@njit(reorders=True)
def _norm(states, weight, eps, out, rows, size):
    """Fill out (N, D) with the RMS norm of states (N, D) by a weight (D,)."""
    states, weight, out = (
        carray(floats(states), (rows, size)), carray(floats(weight), size), carray(floats(out), (rows, size))
    )  # fmt: skip
    for n in range(rows):
        total = np.float32(size * eps)
        for d in range(size):
            total += states[n, d] * states[n, d]
        factor = np.sqrt(np.float32(size) / total)
        for d in range(size):
            out[n, d] = states[n, d] * factor * weight[d]


@njit(reorders=True)
def _place_heads(
    parts, stride, weight, eps, cos, sin, slots, keys, values, queries, rows, width, heads, shared, size, rotated
):
    """Take heads parts (N, H + 2 K, E) of N = `rows` positions, `stride` numbers apart, `width` = Q of
    each text, to where attention reads them: queries (B, H, Q, E), keys and values (S, K E) at slots
    (N,). Queries and keys are normed by weight (H + K, E), unless its address is 0, and their first R
    features are turned by cos and sin (N, R). Norms change parts."""
    normed, half = weight != 0, rotated // 2
    weight = carray(floats(weight), (heads + shared, size))
    cos, sin = carray(floats(cos), (rows, rotated)), carray(floats(sin), (rows, rotated))
    slots = carray(longs(slots), rows)
    for n in range(rows):
        begin, at, slot = n // width * heads * width, n % width, 4 * slots[n] * shared * size
        of_position = carray(floats(parts + 4 * n * stride), (heads + 2 * shared, size))
        for h in range(heads + shared):
            x = of_position[h]
            if normed:
                total = np.float32(size * eps)
                for e in range(size):
                    total += x[e] * x[e]
                factor = np.sqrt(np.float32(size) / total)
                for e in range(size):
                    x[e] *= factor * weight[h, e]
            to = queries + 4 * (begin + h * width + at) * size if h < heads else keys + slot + 4 * (h - heads) * size
            to = carray(floats(to), size)
            for e in range(half):
                to[e] = x[e] * cos[n, e] + x[e + half] * sin[n, e]
            for e in range(half):
                to[e + half] = x[e + half] * cos[n, e + half] + x[e] * sin[n, e + half]
            for e in range(rotated, size):
                to[e] = x[e]
        to = carray(floats(values + slot), (shared, size))
        for h in range(shared):
            for e in range(size):
                to[h, e] = of_position[heads + shared + h, e]


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
    _norm(states.data_ptr(), weight.data_ptr(), eps, out.data_ptr(), states.numel() // size, size)
    return out


def place(
    parts: torch.Tensor,
    norm: Scale | None,
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
    memory: LayerWindow,
) -> torch.Tensor:
    """Norm all of heads (N, H + 2 K, E) but values, by weights (H + K, E), if there are any, rotate
    them by cos and sin (N, 1, R), if they are given, write keys and values to `memory`, and return the
    queries, packed by the key head they share, (B, K, G Q, E). Heads are not what they were. Only the
    first dimension of heads may have gaps."""
    (rows, shared, _, size), (count, heads, _), width = memory.keys.shape, parts.shape, memory.width
    heads -= 2 * shared
    queries = parts.new_empty(rows, shared, heads // shared * width, size)
    weight, eps = (0, 0.0) if norm is None else (norm.wide.data_ptr(), norm.eps)
    cos, sin, rotated = (0, 0, 0) if rotation is None else (*(x.data_ptr() for x in rotation), rotation[0].shape[-1])
    plane = 4 * memory.buffer.stride(0)
    keys = memory.buffer.data_ptr() + 2 * memory.index * plane
    _place_heads(
        parts.data_ptr(), parts.stride(0), weight, eps, cos, sin, memory.slots.data_ptr(), keys, keys + plane,
        queries.data_ptr(), count, width, heads, shared, size, rotated,
    )  # fmt: skip
    return queries
