"""Compiled loops of the lean pass, by numba, for float32: norms, heads on their way into attention. Arguments are
addresses and sizes, as the loops are called hundreds of times in a pass.

N rows, D hidden size; H query heads, K key heads, G = H / K, E head size, R of its features rotated, Q positions of a
row.
"""

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from infer.utils.jit import njit


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
def norm(states, weight, eps, out, rows, size):
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
def place_heads(
    parts, stride, weight, eps, cos, sin, slots, keys, values, queries, rows, width, heads, shared, size, rotated
):
    """Take heads parts (N, H + 2 K, E) of N = `rows` positions, `stride` numbers apart, `width` = Q of each text, to
    where attention reads them: queries (B, H, Q, E), keys and values (S, K E) at slots (N,). Queries and keys are
    normed by weight (H + K, E), unless its address is 0, and their first R features are turned by cos and sin (N, R).
    Norms change parts."""
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
