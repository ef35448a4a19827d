"""What the lean pass has compiled by numba, in float32 and on the CPU: norms, heads on their way into
attention, gates; attention and the codes of int8 targets. Tensor operations take several times as many
calls, each of which costs more than what it computes for few positions. Arguments of compiled loops are
addresses and sizes, as the loops are called hundreds of times in a pass.

N positions of B rows, Q each, D hidden size, H query heads, K key heads, G = H / K, E head size, R of
its features rotated, S places in a cache. A position's numbers do not depend on what is computed beside
it.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
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
STEP = 16  # places that attention scores at once
QUERIES, PLACES = 16, 128  # of a row that attention takes together, and places at a time: near enough to be read again
WORTH = 3 * 10**5  # cycles, about, that other threads are called for


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
def _gate(begin, step, both, out, rows, size, first, third):
    """Fill out (N, I) with gate * up * sigmoid(first * gate + third * gate^3) of both (N, 2 I)."""
    both, out = carray(floats(both), (rows, 2 * size)), carray(floats(out), (rows, size))
    for n in range(begin, rows, step):
        gates, ups, to = both[n, :size], both[n, size:], out[n]
        for i in range(size):
            x = gates[i]
            y = min(max(x * (first + third * x * x), LEAST), -LEAST)
            to[i] = x / (np.float32(1) + exp(-y)) * ups[i]


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


@njit
def _codes(begin, step, states, weight, eps, smooth, out, scales, rows, size, digits):
    """Fill scales (N,) and out (digits N, D) with whole numbers from -127 to 127: states (N, D), behind
    an RMS norm by a weight (D,) unless its address is 0, times smooth (D,) are scales * (out + the second
    digit / SECOND)."""
    inputs, smooth = carray(floats(states), (rows, size)), carray(floats(smooth), size)
    codes, scales = carray(floats(out), (digits * rows, size)), carray(floats(scales), rows)
    bits = carray(ints(out), (digits * rows, size))
    for n in range(begin, rows, step):
        most = np.int32(0)  # of absolute values as bits, which are in the same order
        if weight != 0:
            _norm(states + 4 * n * size, weight, eps, out + 4 * n * size, 1, size)
            for d in range(size):
                codes[n, d] *= smooth[d]
        else:
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


@njit
def _finish(begin, step, sums, scales, bias, before, factor, rows, size, digits):
    """Put in the first N of sums (digits N, O) of codes: before (N, O) + factor * scales (N,) * sums +
    bias (O,). An address of 0 says that there is no bias or nothing before."""
    whole, scales = carray(floats(sums), (digits * rows, size)), carray(floats(scales), rows)
    biases, others = carray(floats(bias), size), carray(floats(before), (rows, size))
    for n in range(begin, rows, step):
        out, scale = whole[n], scales[n] * factor
        if digits == 2:
            second = whole[rows + n]
            for o in range(size):
                out[o] = second[o] / np.float32(SECOND) + out[o]
        for o in range(size):
            out[o] *= scale
        if bias != 0:
            for o in range(size):
                out[o] += biases[o]
        if before != 0:
            for o in range(size):
                out[o] = others[n, o] + out[o]


@njit(fast=IN_ORDER)
def _score(query, turned, scores):
    """Fill scores (n,) of a query (E,) with keys (E, n), n a multiple of STEP."""
    for j in range(len(scores)):
        scores[j] = 0
    for e in range(0, len(query), 4):
        x0, x1, x2, x3 = query[e], query[e + 1], query[e + 2], query[e + 3]
        t0, t1, t2, t3 = turned[e], turned[e + 1], turned[e + 2], turned[e + 3]
        for j in range(len(scores)):
            scores[j] = scores[j] + x0 * t0[j] + x1 * t1[j] + x2 * t2[j] + x3 * t3[j]


@njit(fast=IN_ORDER)
def _soften(weights, hides, whole, scale, count):
    """Put e^(score - greatest) in the place of the first `count` scores (S,), scaled and under an additive
    mask (S,), unless the query sees the whole of them, and 0 behind them."""
    for j in range(len(weights)):
        weights[j] *= scale
    if not whole:
        for j in range(count):
            weights[j] += hides[j]
    top = np.float32(-3e38)
    for j in range(count):
        top = max(top, weights[j])
    for j in range(len(weights)):
        weights[j] = exp(weights[j] - top)
    for j in range(count, len(weights)):
        weights[j] = 0


@njit(fast=IN_ORDER)
def _mix(weights, values, h, begin, end, count, total, out):
    """Add to out (E,) the values (S, K, E) of key head h at places `begin` to `end` of `count` by their
    weights (S,), one by one; return the total of weights that far. At the end out is their mean. Behind
    `count` weights are 0 up to a multiple of 4."""
    if begin == 0:
        total = np.float32(0)
        for e in range(len(out)):
            out[e] = 0
    for j in range(begin, end, 4):
        w0, w1, w2, w3 = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
        v0, v1 = values[j, h], values[min(j + 1, end - 1), h]
        v2, v3 = values[min(j + 2, end - 1), h], values[min(j + 3, end - 1), h]
        total = total + w0 + w1 + w2 + w3
        for e in range(len(out)):
            out[e] = out[e] + w0 * v0[e] + w1 * v1[e] + w2 * v2[e] + w3 * v3[e]
    if end == count:
        for e in range(len(out)):
            out[e] /= total
    return total


@njit(fast=IN_ORDER)
def _attend(
    first, step, queries, keys, values, mask, scale, out, rows, capacity, seen, width, shared, groups, size
):  # fmt: skip
    """Fill out (B, Q, K, G, E) with the attention of queries (B, K, G, Q, E) over the first S = `seen`
    places of keys and values (B, capacity, K E), under an additive mask (B, Q, S), unless its address
    is 0. Sums go from the first place to the last, one by one, and a hidden place adds 0: so a query's
    numbers follow from what it sees alone, wherever that lies and whatever lies between.

    Some queries of a row and a key head go together over some places, which stay near."""
    whole, many, hidden = mask == 0, min(width, QUERIES), carray(floats(mask), (rows, width, seen))
    q, to = carray(floats(queries), (rows, shared, groups, width, size)), carray(
        floats(out), (rows, width, shared, groups, size)
    )  # fmt: skip
    k, v = carray(floats(keys), (rows, capacity, shared, size)), carray(floats(values), (rows, capacity, shared, size))
    turned = np.zeros((size, PLACES + STEP), np.float32)  # a STEP more: rows begin in other lines of a cache
    weights = np.empty((groups, many, (seen + STEP - 1) // STEP * STEP), np.float32)
    last, totals = np.empty(many, np.int64), np.empty((groups, many), np.float32)
    parts = (width + many - 1) // many
    for unit in range(first, rows * shared * parts, step):
        b, h, begin = unit // (shared * parts), unit // parts % shared, unit % parts * many
        count, most = min(many, width - begin), 0
        for i in range(count):
            last[i] = seen
            while not whole and last[i] > 1 and hidden[b, begin + i, last[i] - 1] < 0:
                last[i] -= 1
            most = max(most, last[i])
        for place in range(0, most, PLACES):
            near = min(PLACES, most - place)
            for j in range(near):
                for e in range(size):
                    turned[e, j] = k[b, place + j, h, e]
            up = place + (near + STEP - 1) // STEP * STEP
            for i in range(count):
                for g in range(groups if last[i] > place else 0):
                    _score(q[b, h, g, begin + i], turned, weights[g, i, place:up])
        for i in range(count):
            up = (last[i] + STEP - 1) // STEP * STEP
            for g in range(groups):
                hides = turned[0] if whole else hidden[b, begin + i]
                _soften(weights[g, i, :up], hides, whole, scale, last[i])
        for place in range(0, most, PLACES):
            for i in range(count):
                for g in range(groups if last[i] > place else 0):
                    end, mixed = min(place + PLACES, last[i]), to[b, begin + i, h, g]
                    totals[g, i] = _mix(weights[g, i], v[b], h, place, end, last[i], totals[g, i], mixed)


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
    on_threads(_gate, rows, 3 * out.numel(), both.data_ptr(), out.data_ptr(), rows, size // 2, *bend)
    return out


def codes(
    states: torch.Tensor, smooth: torch.Tensor, digits: int, norm: Scale | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whole numbers from -127 to 127 as float32, (digits N, D), and scales (N,), that stand for
    states (N, D), behind a norm if there is one, times smooth (D,): scale * (first digit + second digit /
    SECOND)."""
    states, (rows, size) = states.contiguous(), states.shape
    out, scales = states.new_empty(digits * rows, size), states.new_empty(rows)
    weight, eps = (0, 0.0) if norm is None else (norm.wide.data_ptr(), norm.eps)
    on_threads(
        _codes, rows, rows * size, states.data_ptr(), weight, eps, smooth.data_ptr(), out.data_ptr(),
        scales.data_ptr(), rows, size, digits,
    )  # fmt: skip
    return out, scales


def finish(
    sums: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    before: torch.Tensor | None = None,
    factor: float = 1.0,
) -> torch.Tensor:
    """Return what sums (digits N, O) of codes with scales (N,) stand for, times a factor, plus bias (O,),
    added to others (N, O), in place of the first N."""
    rows, size = scales.shape[0], sums.shape[1]
    digits = sums.shape[0] // rows
    before = None if before is None else before.contiguous()
    on_threads(
        _finish, rows, sums.numel(), sums.data_ptr(), scales.data_ptr(), 0 if bias is None else bias.data_ptr(),
        0 if before is None else before.data_ptr(), np.float32(factor), rows, size, digits,
    )  # fmt: skip
    return sums if digits == 1 else sums[:rows]


def attend_in_order(queries: torch.Tensor, memory: LayerWindow, mask: Mask, scale: float) -> torch.Tensor:
    """Return the attention (B Q, H E) of packed queries (B, K, G Q, E) over a layer of a cache, each
    query's sums in the order of the places: its numbers do not depend on what is beside it."""
    (rows, shared, seen, size), width, keys = memory.keys.shape, memory.width, memory.keys
    additive, groups = mask.for_packed(1, queries.dtype), queries.shape[2] // width
    out = queries.new_empty(rows * width, shared * groups * size)
    hidden = 0 if additive is None else additive.data_ptr()
    on_threads(
        _attend, rows * shared * -(-width // QUERIES), queries.numel() * seen // 2, queries.data_ptr(),
        keys.data_ptr(), memory.values.data_ptr(), hidden, np.float32(scale), out.data_ptr(), rows,
        keys.stride(0) // keys.stride(2), seen, width, shared, groups, size,
    )  # fmt: skip
    return out


@cache
def pool(process: int) -> ThreadPoolExecutor:
    """Return the other threads of a process, which a fork of it does not have."""
    return ThreadPoolExecutor(thread_name_prefix="loops")


def on_threads(loop: Callable[..., None], parts: int, work: int, *arguments: float) -> None:
    """Run a loop over its parts `begin`, `begin + step` .., on as many threads as torch has where the work,
    in cycles, is worth it. What is computed for a part does not depend on it."""
    step = min(torch.get_num_threads(), parts) if work > WORTH else 1
    others = [pool(os.getpid()).submit(loop, begin, step, *arguments) for begin in range(1, step)]
    loop(0, step, *arguments)
    for other in others:
        other.result()
