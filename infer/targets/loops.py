"""What the lean pass has compiled by numba, in float32 and on the CPU: norms, heads on their way into
attention, gates; attention and the codes of int8 targets. Tensor operations take several times as many
calls, each of which costs more than what it computes for few positions. Arguments of compiled loops are
words in memory, addresses and sizes, as the loops are called hundreds of times in a pass, by all threads
of a team: each takes the next part, until none is left.

N positions of B rows, Q each, D hidden size, H query heads, K key heads, G = H / K, E head size, R of
its features rotated, S places in a cache. A position's numbers do not depend on what is computed beside
it.
"""

import ctypes
from functools import cache
from typing import NamedTuple

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from infer.attention.kv_cache import LayerWindow
from infer.attention.masks import Mask
from infer.trees import compiled
from infer.utils.jit import IN_ORDER, REORDERS, address_of, njit

LOG2, LN2_HIGH, LN2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
# e^x about 0: coefficients of x^2 .. x^7 of its Taylor series
EXP = tuple(np.float32(1 / n) for n in (2, 6, 24, 120, 720, 5040))
SHIFT = np.float32(1.5 * 2**23)  # a number plus this is rounded to a whole number
LEAST = np.float32(-87)  # e^x of less is 0
Bend = tuple[np.float32, np.float32]  # of an activation x sigmoid(a x + b x^3)
SILU = np.float32(1), np.float32(0)
GELU = np.float32(1.59576912), np.float32(1.59576912 * 0.044715)  # by tanh
SECOND = 254  # how much finer the second digit of an activation is than the first
WIDTH = 16  # numbers that attention computes at once, of an AVX-512 register; others take several
BYTES, STEP = 4 * WIDTH, 2 * WIDTH
QUERIES, PLACES = 32, 128  # of a row that attention takes together, and places at a time: near enough to be read again
WORTH = 3 * 10**5  # cycles, about, that other threads are called for


def pointer(kind: types.Type):
    """Return a function of compiled code that makes an address a pointer to numbers of a kind."""

    @intrinsic
    def point(typing, address):
        def generate(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(kind).as_pointer())

        return types.CPointer(kind)(types.intp), generate

    return point


floats, longs, ints, bytes_ = (pointer(kind) for kind in (types.float32, types.int64, types.int32, types.int8))


@intrinsic
def take(typing, at):
    """Return the word at an address, which counts on: threads that share it take the parts of a loop."""

    def generate(context, builder, signature, arguments):
        word = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", word, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.intp), generate


@intrinsic(prefer_literal=True)
def words(typing, at, count):
    """Return as many words from memory, behind the one that counts parts."""
    kind = types.UniTuple(types.int64, count.literal_value)

    def generate(context, builder, signature, arguments):
        first = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        places = (builder.gep(first, [ir.Constant(ir.IntType(64), 1 + n)]) for n in range(kind.count))
        return context.make_tuple(builder, kind, [builder.load(place) for place in places])

    return kind(types.intp, count), generate


def cast(source: types.Type, to: types.Type):
    """Return a function of compiled code that reads the bits of a number as one of another kind."""

    @intrinsic
    def turn(typing, value):
        def generate(context, builder, signature, arguments):
            return builder.bitcast(arguments[0], context.get_value_type(to))

        return to(source), generate

    return turn


as_float, as_bits = cast(types.int32, types.float32), cast(types.float32, types.int32)


@numba.njit(inline="always")
def number(word):
    """Return the float32 that a word holds (`bits`)."""
    return as_float(np.int32(word))


class Lanes(types.Type):
    """WIDTH numbers in a register."""

    def __init__(self) -> None:
        super().__init__("Lanes")


LANES, VECTOR = Lanes(), ir.VectorType(ir.FloatType(), WIDTH)


@register_model(Lanes)
class LanesModel(models.PrimitiveModel):
    def __init__(self, manager, kind) -> None:
        super().__init__(manager, kind, VECTOR)


@intrinsic
def load(typing, at):
    """Return the lanes at an address."""

    def generate(context, builder, signature, arguments):
        return builder.load(builder.inttoptr(arguments[0], VECTOR.as_pointer()), align=4)

    return LANES(types.intp), generate


@intrinsic
def store(typing, at, lanes):
    """Put lanes to an address."""

    def generate(context, builder, signature, arguments):
        builder.store(arguments[1], builder.inttoptr(arguments[0], VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.none(types.intp, LANES), generate


@intrinsic
def fma(typing, total, factor, lanes):
    """Return total + factor * lanes, rounded once."""

    def generate(context, builder, signature, arguments):
        total, factor, lanes = arguments
        one = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), factor, ir.Constant(ir.IntType(32), 0))
        all_of_it = builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), None))
        kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
        function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{WIDTH}f32")
        return builder.call(function, [all_of_it, lanes, total])

    return LANES(LANES, types.float32, LANES), generate


@numba.njit(inline="always")
def exp(x):
    """Return e^x to the last bit or two, 0 for x below -87, for x up to 88: numpy's is not computed in
    vectors. Its caller must not be compiled with REORDERS."""
    shifted = max(x, LEAST) * LOG2 + SHIFT
    n = shifted - SHIFT  # a whole number
    r = (max(x, LEAST) - n * LN2_HIGH) - n * LN2_LOW
    power = as_float(np.int32(as_bits(shifted) << 23) + np.int32(127 << 23))  # 2^n: the last bits of n + SHIFT are n
    tail = EXP[0] + r * (EXP[1] + r * (EXP[2] + r * (EXP[3] + r * (EXP[4] + r * EXP[5]))))
    value = (np.float32(1) + (r + r * r * tail)) * power
    return value if x >= LEAST else np.float32(0)


@njit(fast=IN_ORDER)
def _gate(at):
    """Fill out (N, I) with gate * up * sigmoid(first * gate + third * gate^3) of both (N, 2 I)."""
    both, out, rows, size, first, third = words(at, 6)
    both, out = carray(floats(both), (rows, 2 * size)), carray(floats(out), (rows, size))
    first, third = number(first), number(third)
    n = take(at)
    while n < rows:
        gates, ups, to = both[n, :size], both[n, size:], out[n]
        for i in range(size):
            x = gates[i]
            y = min(max(x * (first + third * x * x), LEAST), -LEAST)
            to[i] = x / (np.float32(1) + exp(-y)) * ups[i]
        n = take(at)


@njit(fast=REORDERS)
def _norm_row(x, weight, eps, out):
    """Fill out (D,) with the RMS norm of x (D,) by a weight (D,)."""
    total = np.float32(len(x) * eps)
    for d in range(len(x)):
        total += x[d] * x[d]
    factor = np.sqrt(np.float32(len(x)) / total)
    for d in range(len(x)):
        out[d] = x[d] * factor * weight[d]


@njit
def _norm(at):
    """Fill out (N, D) with the RMS norm of states (N, D) by a weight (D,)."""
    states, weight, eps, out, rows, size = words(at, 6)
    states, out = carray(floats(states), (rows, size)), carray(floats(out), (rows, size))
    n = take(at)
    while n < rows:
        _norm_row(states[n], carray(floats(weight), size), number(eps), out[n])
        n = take(at)


@njit
def _codes(at):
    """Fill scales (N,) and out (digits N, D) with whole numbers from -127 to 127: states (N, D), behind
    an RMS norm by a weight (D,) unless its address is 0, times smooth (D,) are scales * (out + the second
    digit / SECOND)."""
    states, weight, eps, smooth, out, scales, rows, size, digits = words(at, 9)
    inputs, smooth = carray(floats(states), (rows, size)), carray(floats(smooth), size)
    codes, scales = carray(bytes_(out), (digits * rows, size)), carray(floats(scales), rows)
    row = np.empty(size, np.float32)
    n = take(at)
    while n < rows:
        if weight != 0:
            _norm_row(inputs[n], carray(floats(weight), size), number(eps), row)
            for d in range(size):
                row[d] *= smooth[d]
        else:
            for d in range(size):
                row[d] = inputs[n, d] * smooth[d]
        top = max(_most(row), np.float32(1e-30))
        scales[n], factor = top / np.float32(127), np.float32(127) / top
        for d in range(size):
            row[d] *= factor
        for digit in range(digits):
            to = n + digit * rows
            for d in range(size):
                codes[to, d] = np.int8(as_bits(row[d] + SHIFT))
                row[d] = (row[d] - ((row[d] + SHIFT) - SHIFT)) * np.float32(SECOND)
        n = take(at)


@njit
def _most(row):
    """Return the greatest absolute value of a row (D,)."""
    bits, most = row.view(np.int32), np.int32(0)  # of absolute values, which are in the same order
    for d in range(len(row)):
        most = max(most, bits[d] & np.int32(0x7FFFFFFF))
    return as_float(most)


@njit
def _finish(at):
    """Put in the place of the first N of sums (digits N, O) of codes, int32: before (N, O) + factor *
    scales (N,) * each (O,) * sums + bias (O,). An address of 0 says that there is no bias or nothing
    before."""
    sums, scales, each, bias, before, factor, rows, size, digits = words(at, 9)
    out, whole = carray(floats(sums), (digits * rows, size)), carray(ints(sums), (digits * rows, size))
    scales, each = carray(floats(scales), rows), carray(floats(each), size)
    biases, others = carray(floats(bias), size), carray(floats(before), (rows, size))
    n = take(at)
    while n < rows:
        to, counts, last, scale = out[n], whole[n], n + (digits - 1) * rows, scales[n] * number(factor)
        for o in range(size):
            to[o] = np.float32(counts[o])
        if digits == 2:
            for o in range(size):
                to[o] += np.float32(whole[last, o]) / np.float32(SECOND)
        for o in range(size):
            to[o] *= scale * each[o]
        if bias != 0:
            for o in range(size):
                to[o] += biases[o]
        if before != 0:
            for o in range(size):
                to[o] = others[n, o] + to[o]
        n = take(at)


@njit
def _four_rows(a0, a1, a2, a3, count, b, b_step, c0, c1, c2, c3):
    """`_product` of four rows with STEP columns."""
    x0, x1, x2, x3 = load(c0), load(c1), load(c2), load(c3)
    y0, y1, y2, y3 = load(c0 + BYTES), load(c1 + BYTES), load(c2 + BYTES), load(c3 + BYTES)
    for n in range(count):
        low, high = load(b + n * b_step), load(b + n * b_step + BYTES)
        f0, f1, f2, f3 = floats(a0)[n], floats(a1)[n], floats(a2)[n], floats(a3)[n]
        x0, x1, x2, x3 = fma(x0, f0, low), fma(x1, f1, low), fma(x2, f2, low), fma(x3, f3, low)
        y0, y1, y2, y3 = fma(y0, f0, high), fma(y1, f1, high), fma(y2, f2, high), fma(y3, f3, high)
    store(c0, x0), store(c1, x1), store(c2, x2), store(c3, x3)
    store(c0 + BYTES, y0), store(c1 + BYTES, y1), store(c2 + BYTES, y2), store(c3 + BYTES, y3)


@njit
def _product(a, a_step, rows, count, b, b_step, columns, c, c_step):
    """Add the product of matrices at a (rows, count) and b (count, columns) to c, whose rows are `_step`
    bytes apart. Sums go from the first number to the last. Columns are taken by STEP, rows by fours, the
    last one again where there are less."""
    for r in range(0, rows, 4):
        r1, r2, r3 = min(r + 1, rows - 1), min(r + 2, rows - 1), min(r + 3, rows - 1)
        for at in range(0, 4 * columns, 4 * STEP):
            _four_rows(
                a + r * a_step, a + r1 * a_step, a + r2 * a_step, a + r3 * a_step, count, b + at, b_step,
                c + at + r * c_step, c + at + r1 * c_step, c + at + r2 * c_step, c + at + r3 * c_step,
            )  # fmt: skip


@njit(fast=IN_ORDER)
def _soften(weights, hides, whole, scale, count):
    """Put e^(score - greatest) in the place of the first `count` scores (S,), scaled and under an additive
    mask (S,), unless the query sees the whole of them, and 0 behind them; return their sum, one by one."""
    tops, total = np.full(WIDTH, np.float32(-3e38)), np.float32(0)
    for j in range(count):
        weights[j] *= scale
    for j in range(count, len(weights)):
        weights[j] = np.float32(-3e38)
    if not whole:
        for j in range(count):
            weights[j] += hides[j]
    for j in range(0, len(weights), WIDTH):
        for n in range(WIDTH):
            tops[n] = max(tops[n], weights[j + n])
    top = tops.max()
    for j in range(len(weights)):
        weights[j] = exp(weights[j] - top)
    for j in range(count):
        total += weights[j]
    return total


@njit(fast=IN_ORDER)
def _attend(at):
    """Fill out (B, Q, K, G, E) with the attention of queries (B, K, G, Q, E) over the first S = `seen`
    places of keys and values (B, capacity, K E), under an additive mask (B, Q, S), unless its address
    is 0. Sums go from the first place to the last, one by one, and a hidden place adds 0: so a query's
    numbers follow from what it sees alone, wherever that lies and whatever lies between.

    Some queries of a row and a key head go together over some places, which stay near."""
    queries, keys, values, mask, scale, out, rows, capacity, seen, width, shared, groups, size = words(at, 13)
    whole, many, hidden = mask == 0, min(width, QUERIES), carray(floats(mask), (rows, width, seen))
    wide, up = (size + STEP - 1) // STEP * STEP, (seen + STEP - 1) // STEP * STEP
    q = carray(floats(queries), (rows, shared, groups, width, size))
    to = carray(floats(out), (rows, width, shared, groups, size))
    k, v = carray(floats(keys), (rows, capacity, shared, size)), carray(floats(values), (rows, capacity, shared, size))
    turned = np.zeros((size, PLACES + WIDTH), np.float32)  # WIDTH more: rows begin in other lines of a cache
    padded, asked = np.zeros((PLACES, wide), np.float32), np.empty((groups * many, size), np.float32)
    weights, mixed = np.empty((groups * many, up), np.float32), np.empty((groups * many, wide), np.float32)
    last, totals = np.empty(many, np.int64), np.empty(groups * many, np.float32)
    parts, w_at = (width + many - 1) // many, weights.ctypes.data
    unit = take(at)
    while unit < rows * shared * parts:
        b, h, begin = unit // (shared * parts), unit // parts % shared, unit % parts * many
        count, most = min(many, width - begin) * groups, 0
        for i in range(count // groups):
            last[i] = seen
            while not whole and last[i] > 1 and hidden[b, begin + i, last[i] - 1] < 0:
                last[i] -= 1
            most = max(most, last[i])
            for g in range(groups):
                asked[i * groups + g] = q[b, h, g, begin + i]
        weights[:count, : (most + STEP - 1) // STEP * STEP], mixed[:count] = 0, 0
        for place in range(0, most, PLACES):
            near = min(PLACES, most - place)
            for j in range(near):
                for e in range(size):
                    turned[e, j] = k[b, place + j, h, e]
            _product(
                asked.ctypes.data, 4 * size, count, size, turned.ctypes.data, 4 * (PLACES + WIDTH), near,
                w_at + 4 * place, 4 * up,
            )  # fmt: skip
        for r in range(count):
            hides = asked[0] if whole else hidden[b, begin + r // groups]
            line = weights[r, : (most + WIDTH - 1) // WIDTH * WIDTH]
            totals[r] = _soften(line, hides, whole, number(scale), last[r // groups])
        for place in range(0, most, PLACES):
            near, v_at, v_step = min(PLACES, most - place), padded.ctypes.data, 4 * wide
            if wide == size:
                v_at, v_step = values + 4 * ((b * capacity + place) * shared + h) * size, 4 * shared * size
            else:
                for j in range(near):
                    padded[j, :size] = v[b, place + j, h]
            _product(w_at + 4 * place, 4 * up, count, near, v_at, v_step, wide, mixed.ctypes.data, 4 * wide)
        for r in range(count):
            for e in range(size):
                to[b, begin + r // groups, h, r % groups, e] = mixed[r, e] / totals[r]
        unit = take(at)


@njit(fast=REORDERS)
def _place_heads(at):
    """Take heads parts (N, H + 2 K, E) of N = `rows` positions, `stride` numbers apart, `width` = Q of
    each text, to where attention reads them: queries (B, H, Q, E), keys and values (S, K E) at slots
    (N,). Queries and keys are normed by weight (H + K, E), unless its address is 0, and their first R
    features are turned by cos and sin (N, R). Norms change parts."""
    (
        parts, stride, weight, eps, cos, sin, slots, keys, values, queries, rows, width, heads, shared, size, rotated
    ) = words(at, 16)  # fmt: skip
    normed, half, eps = weight != 0, rotated // 2, number(eps)
    weight = carray(floats(weight), (heads + shared, size))
    cos, sin = carray(floats(cos), (rows, rotated)), carray(floats(sin), (rows, rotated))
    slots = carray(longs(slots), rows)
    n = take(at)
    while n < rows:
        begin, place, slot = n // width * heads * width, n % width, 4 * slots[n] * shared * size
        of_position = carray(floats(parts + 4 * n * stride), (heads + 2 * shared, size))
        for h in range(heads + shared):
            x = of_position[h]
            if normed:
                _norm_row(x, weight[h], eps, x)
            to = queries + 4 * (begin + h * width + place) * size if h < heads else keys + slot + 4 * (h - heads) * size
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
        n = take(at)


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
    out, rows = torch.empty_like(states), states.numel() // size
    run(_norm, rows, rows * size, states.data_ptr(), weight.data_ptr(), bits(eps), out.data_ptr(), rows, size)
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
    weight, eps = (0, 0) if norm is None else (norm.wide.data_ptr(), bits(norm.eps))
    cos, sin, rotated = (0, 0, 0) if rotation is None else (*(x.data_ptr() for x in rotation), rotation[0].shape[-1])
    plane = 4 * memory.buffer.stride(0)
    keys = memory.buffer.data_ptr() + 2 * memory.index * plane
    run(
        _place_heads, count, 2 * count * (heads + 2 * shared) * size, parts.data_ptr(), parts.stride(0), weight, eps,
        cos, sin, memory.slots.data_ptr(), keys, keys + plane, queries.data_ptr(), count, width, heads, shared, size,
        rotated,
    )  # fmt: skip
    return queries


def gate(both: torch.Tensor, bend: Bend) -> torch.Tensor:
    """Return activation(gate) * up, (N, I), of both (N, 2 I)."""
    both, (rows, size) = both.contiguous(), both.shape
    out = both.new_empty(rows, size // 2)
    first, third = bend
    run(_gate, rows, 3 * out.numel(), both.data_ptr(), out.data_ptr(), rows, size // 2, bits(first), bits(third))
    return out


def codes(
    states: torch.Tensor, smooth: torch.Tensor, digits: int, norm: Scale | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whole numbers from -127 to 127, (digits N, D) int8, and scales (N,), that stand for states
    (N, D), behind a norm if there is one, times smooth (D,): scale * (first digit + second digit /
    SECOND)."""
    states, (rows, size) = states.contiguous(), states.shape
    out, scales = states.new_empty((digits * rows, size), dtype=torch.int8), states.new_empty(rows)
    weight, eps = (0, 0) if norm is None else (norm.wide.data_ptr(), bits(norm.eps))
    run(
        _codes, rows, rows * size, states.data_ptr(), weight, eps, smooth.data_ptr(), out.data_ptr(),
        scales.data_ptr(), rows, size, digits,
    )  # fmt: skip
    return out, scales


def finish(
    sums: torch.Tensor,
    scales: torch.Tensor,
    each: torch.Tensor,
    bias: torch.Tensor | None,
    before: torch.Tensor | None = None,
    factor: float = 1.0,
) -> torch.Tensor:
    """Return what sums (digits N, O) int32 of codes with scales (N,) and weights' scales `each` (O,)
    stand for, times a factor, plus bias (O,), added to others (N, O): float32, in place of the first
    N."""
    rows, size = scales.shape[0], sums.shape[1]
    digits = sums.shape[0] // rows
    before = None if before is None else before.contiguous()
    run(
        _finish, rows, sums.numel(), sums.data_ptr(), scales.data_ptr(), each.data_ptr(),
        0 if bias is None else bias.data_ptr(), 0 if before is None else before.data_ptr(), bits(factor), rows, size,
        digits,
    )  # fmt: skip
    return sums.view(torch.float32)[:rows]


def attend_in_order(queries: torch.Tensor, memory: LayerWindow, mask: Mask, scale: float) -> torch.Tensor:
    """Return the attention (B Q, H E) of packed queries (B, K, G Q, E) over a layer of a cache, each
    query's sums in the order of the places: its numbers do not depend on what is beside it."""
    (rows, shared, seen, size), width, keys = memory.keys.shape, memory.width, memory.keys
    additive, groups = mask.for_packed(1, queries.dtype), queries.shape[2] // width
    out = queries.new_empty(rows * width, shared * groups * size)
    hidden = 0 if additive is None else additive.data_ptr()
    run(
        _attend, rows * shared * -(-width // QUERIES), queries.numel() * seen // 2, queries.data_ptr(),
        keys.data_ptr(), memory.values.data_ptr(), hidden, bits(scale), out.data_ptr(), rows,
        keys.stride(0) // keys.stride(2), seen, width, shared, groups, size,
    )  # fmt: skip
    return out


@cache
def bits(value: float) -> int:
    """Return the word that holds a float32 (`number`)."""
    return int(np.float32(value).view(np.int32))


@cache
def team() -> "ctypes._CFuncPtr | None":
    """Return what calls a function from several threads, those of torch's products: libgomp's entry for
    `omp parallel`. None where torch comes with another library."""
    found = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    if found is not None:
        found.argtypes, found.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return found


@cache
def entry(loop: object) -> "ctypes._CFuncPtr":
    """Return a compiled loop as a function of an address."""
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address_of(loop))


def run(loop: object, parts: int, work: int, *arguments: int) -> None:
    """Run a loop over its parts, on as many threads as torch has where the work, in cycles, is worth it.
    What is computed for a part does not depend on who takes it."""
    memory = (ctypes.c_int64 * (len(arguments) + 1))(0, *arguments)
    threads = min(torch.get_num_threads(), parts) if work > WORTH and team() else 1
    if threads > 1:
        team()(entry(loop), ctypes.byref(memory), threads, 0)
    else:
        entry(loop)(ctypes.byref(memory))
