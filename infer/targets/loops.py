"""What the lean pass has compiled by numba, in float32 and on the CPU: norms, heads on their way into
attention, gates; attention and the codes of int8 targets. Tensor operations take several times as many
calls, each of which costs more than what it computes for few positions. Arguments of compiled loops are
addresses and sizes, as the loops are called hundreds of times in a pass.

N positions of B rows, Q each, D hidden size, H query heads, K key heads, G = H / K, E head size, R of
its features rotated, S places in a cache. A position's numbers do not depend on what is computed beside
it.
"""

from typing import NamedTuple

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from infer.attention.kv_cache import LayerWindow
from infer.attention.masks import Mask
from infer.trees import compiled
from infer.utils.jit import IN_ORDER, REORDERS, njit

LOG2, LN2_HIGH, LN2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
# e^x about 0: coefficients of x^2 .. x^7 of its Taylor series
EXP = tuple(np.float32(1 / n) for n in (2, 6, 24, 120, 720, 5040))
SHIFT = np.float32(1.5 * 2**23)  # a number plus this is rounded to a whole number
LEAST = np.float32(-87)  # e^x of less is 0
Bend = tuple[np.float32, np.float32]  # of an activation x sigmoid(a x + b x^3)
SILU = np.float32(1), np.float32(0)
GELU = np.float32(1.59576912), np.float32(1.59576912 * 0.044715)  # by tanh
SECOND = 254  # how much finer the second digit of an activation is than the first
STEP = 16  # places that attention goes through at once


def pointer(kind: types.Type):
    """Return a function of compiled code that makes an address a pointer to numbers of a kind."""

    @intrinsic
    def point(typing, address):
        def generate(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(kind).as_pointer())

        return types.CPointer(kind)(types.intp), generate

    return point


floats, longs, ints = pointer(types.float32), pointer(types.int64), pointer(types.int32)


@intrinsic
def as_float(typing, bits):
    """The number that 32 bits are."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.int32), generate


@intrinsic
def power_of_two(typing, shifted):
    """2^n of a float32 n + SHIFT, whose last bits are n."""

    def generate(context, builder, signature, arguments):
        bits = builder.bitcast(arguments[0], ir.IntType(32))
        exponent = builder.add(builder.shl(bits, bits.type(23)), bits.type(127 << 23))
        return builder.bitcast(exponent, context.get_value_type(types.float32))

    return types.float32(types.float32), generate


@numba.njit(inline="always")
def exp(x):
    """Return e^x to the last bit or two, 0 for x below -87, for x up to 88: numpy's is not computed in
    vectors. Its caller must not be compiled with REORDERS."""
    shifted = max(x, LEAST) * LOG2 + SHIFT
    n = shifted - SHIFT  # a whole number
    r = (max(x, LEAST) - n * LN2_HIGH) - n * LN2_LOW
    tail = EXP[0] + r * (EXP[1] + r * (EXP[2] + r * (EXP[3] + r * (EXP[4] + r * EXP[5]))))
    value = (np.float32(1) + (r + r * r * tail)) * power_of_two(shifted)
    return value if x >= LEAST else np.float32(0)


@njit(fast=IN_ORDER)
def _gate(both, out, rows, size, first, third):
    """Fill out (N, I) with gate * up * sigmoid(first * gate + third * gate^3) of both (N, 2 I)."""
    both, out = carray(floats(both), (rows, 2 * size)), carray(floats(out), (rows, size))
    for n in range(rows):
        gates, ups, to = both[n, :size], both[n, size:], out[n]
        for i in range(size):
            x = gates[i]
            y = min(max(x * (first + third * x * x), LEAST), -LEAST)
            to[i] = x / (np.float32(1) + exp(-y)) * ups[i]


@njit
def _codes(states, smooth, out, scales, rows, size, digits):
    """Fill scales (N,) and out (digits N, D) with whole numbers from -127 to 127: states (N, D) times
    smooth (D,) are scales * (out + the second digit / SECOND)."""
    inputs, smooth = carray(floats(states), (rows, size)), carray(floats(smooth), size)
    codes, scales = carray(floats(out), (digits * rows, size)), carray(floats(scales), rows)
    bits = carray(ints(out), (digits * rows, size))
    for n in range(rows):
        most = np.int32(0)  # of absolute values as bits, which are in the same order
        for d in range(size):
            codes[n, d] = inputs[n, d] * smooth[d]
        for d in range(size):
            most = max(most, bits[n, d] & np.int32(0x7FFFFFFF))
        top = max(as_float(most), np.float32(1e-30))
        scales[n], factor = top / np.float32(127), np.float32(127) / top
        for d in range(size):
            exact = codes[n, d] * factor
            codes[n, d] = np.rint(exact)
            if digits == 2:
                codes[rows + n, d] = np.rint((exact - codes[n, d]) * np.float32(SECOND))


@njit(fast=IN_ORDER)
def _weigh(query, turned, hides, whole, scale, weights, count):
    """Fill the first `count` weights (S,) with e^(score - greatest) of a query (E,) and keys (E, S) under
    an additive mask (S,), unless the query sees the whole of them; and the next up to a STEP with 0."""
    up = (count + STEP - 1) // STEP * STEP
    for j in range(up):
        weights[j] = 0
    for e in range(0, len(query), 4):
        x0, x1, x2, x3 = query[e], query[e + 1], query[e + 2], query[e + 3]
        t0, t1, t2, t3 = turned[e], turned[e + 1], turned[e + 2], turned[e + 3]
        for j in range(up):
            weights[j] = weights[j] + x0 * t0[j] + x1 * t1[j] + x2 * t2[j] + x3 * t3[j]
    for j in range(up):
        weights[j] *= scale
    if not whole:
        for j in range(count):
            weights[j] += hides[j]
    top = np.float32(-3e38)
    for j in range(count):
        top = max(top, weights[j])
    for j in range(up):
        weights[j] = exp(weights[j] - top)
    for j in range(count, up):
        weights[j] = 0


@njit(fast=IN_ORDER)
def _mix(weights, values, h, count, out):
    """Fill out (E,) with the mean of values (S, K, E) of key head h by the first `count`
    weights (S,), and 0 behind them, summed one by one."""
    total = np.float32(0)
    for e in range(len(out)):
        out[e] = 0
    for j in range(0, count, 4):
        w0, w1, w2, w3 = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
        v0, v1 = values[j, h], values[min(j + 1, count - 1), h]
        v2, v3 = values[min(j + 2, count - 1), h], values[min(j + 3, count - 1), h]
        total = total + w0 + w1 + w2 + w3
        for e in range(len(out)):
            out[e] = out[e] + w0 * v0[e] + w1 * v1[e] + w2 * v2[e] + w3 * v3[e]
    for e in range(len(out)):
        out[e] /= total


@njit(fast=IN_ORDER)
def _attend(queries, keys, values, mask, scale, out, rows, capacity, seen, width, shared, groups, size):
    """Fill out (B, K, G Q, E) with the attention of queries (B, K, G Q, E) over the first S = `seen`
    places of keys and values (B, capacity, K E), under an additive mask (B, Q, S), unless its address
    is 0. Sums go from the first place to the last, one by one, and a hidden place adds 0: so a query's
    numbers follow from what it sees alone, wherever that lies and whatever lies between."""
    whole, padded = mask == 0, ((seen + STEP - 1) // STEP | 1) * STEP  # odd: rows begin in other lines of a cache
    hidden = carray(floats(mask), (rows, width, seen))
    q, to = carray(floats(queries), (rows, shared, groups, width, size)), carray(
        floats(out), (rows, shared, groups, width, size)
    )  # fmt: skip
    k, v = carray(floats(keys), (rows, capacity, shared, size)), carray(floats(values), (rows, capacity, shared, size))
    turned, weights, last = (
        np.zeros((size, padded), np.float32),
        np.empty(padded, np.float32),
        np.empty(width, np.int64),
    )
    for b in range(rows):
        most = 0
        for i in range(width):
            last[i] = seen
            while not whole and last[i] > 1 and hidden[b, i, last[i] - 1] < 0:
                last[i] -= 1
            most = max(most, last[i])
        for h in range(shared):
            for j in range(most):
                for e in range(size):
                    turned[e, j] = k[b, j, h, e]
            for i in range(width):
                for g in range(groups):
                    hides = turned[0] if whole else hidden[b, i]
                    _weigh(q[b, h, g, i], turned, hides, whole, scale, weights, last[i])
                    _mix(weights, v[b], h, last[i], to[b, h, g, i])


@njit(fast=REORDERS)
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


@njit(fast=REORDERS)
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


def serve(states: torch.Tensor) -> bool:
    """Return whether the loops of this module serve for states."""
    return states.dtype == torch.float32 and compiled.available(states) and not states.requires_grad


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


def gate(both: torch.Tensor, bend: Bend) -> torch.Tensor:
    """Return activation(gate) * up, (N, I), of both (N, 2 I)."""
    both, (rows, size) = both.contiguous(), both.shape
    out = both.new_empty(rows, size // 2)
    _gate(both.data_ptr(), out.data_ptr(), rows, size // 2, *bend)
    return out


def codes(states: torch.Tensor, smooth: torch.Tensor, digits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whole numbers from -127 to 127 as float32, (digits N, D), and scales (N, 1), that stand for
    states (N, D) times smooth (D,): scale * (first digit + second digit / SECOND)."""
    states, (rows, size) = states.contiguous(), states.shape
    out, scales = states.new_empty(digits * rows, size), states.new_empty(rows, 1)
    _codes(states.data_ptr(), smooth.data_ptr(), out.data_ptr(), scales.data_ptr(), rows, size, digits)
    return out, scales


def attend_in_order(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: Mask, scale: float
) -> torch.Tensor:
    """`infer.attention.attend.attend` of packed queries (B, K, G Q, E) over views of a cache (B, K, S,
    E), each query's sums in the order of the places: its numbers do not depend on what is beside it."""
    (rows, shared, seen, size), width = keys.shape, mask.inside.shape[-1]
    additive, out = mask.for_packed(1, queries.dtype), torch.empty_like(queries)
    hidden = 0 if additive is None else additive.data_ptr()
    _attend(
        queries.data_ptr(), keys.data_ptr(), values.data_ptr(), hidden, np.float32(scale), out.data_ptr(), rows,
        keys.stride(0) // keys.stride(2), seen, width, shared, queries.shape[2] // width, size,
    )  # fmt: skip
    return out
