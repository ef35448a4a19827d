"""What the lean pass has compiled by numba, in float32 and on the CPU: norms, heads
on their way into attention, gates; attention and the codes of int8 targets. Tensor
operations take several times as many calls, each of which costs more than what it
computes for few positions. Arguments of compiled loops are words in memory,
addresses and sizes, as the loops are called hundreds of times in a pass, by all
threads of a team: each takes the next part, until none is left.

N positions of B rows, Q each, D hidden size, H query heads, K key heads, G = H / K, E head size, R of
its features rotated, S places in a cache. A position's numbers do not depend on what is computed beside
it.
"""

import ctypes
from collections.abc import Callable
from functools import cache, partial
from itertools import chain, product
from typing import NamedTuple

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from infer.attention.kv_cache import LayerWindow
from infer.attention.masks import Mask
from infer.trees import compiled
from infer.utils.jit import IN_ORDER, REORDERS, address_of, njit

LOG2, LN2_HIGH, LN2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
# e^x about 0: coefficients of x^2 .. x^7 of its Taylor series
EXP = tuple(np.float32(1 / n) for n in (2, 6, 24, 120, 720, 5040))
SHIFT = np.float32(1.5 * 2**23)  # a number plus this is rounded to a whole number
SOME = 1024  # numbers of a row that fit into the nearest cache
LEAST = np.float32(-87)  # e^x of less is 0
FUNCTION = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
Bend = tuple[np.float32, np.float32]  # of an activation x sigmoid(a x + b x^3)
SILU = np.float32(1), np.float32(0)
GELU = np.float32(1.59576912), np.float32(1.59576912 * 0.044715)  # by tanh
SECOND = 254  # how much finer the second digit of an activation is than the first
# numbers that attention computes at once: its sums fill 16 registers of AVX2, or of AVX-512
WIDTH = 16 if torch.cpu.get_capabilities().get("avx512_f") else 8
BYTES, STEP = 4 * WIDTH, 2 * WIDTH
QUERIES, PLACES = 16, 128  # of a row that attention takes together, and places at a time: near enough to be read again
WORTH = 6 * 10**4  # cycles, about, that other threads are called for
CODES, PACE = 16, 24  # codes of an AVX2 register, and products of them in a cycle
OUTPUTS, OTHERS, PART = 4, 2, 32  # outputs and rows whose sums are in registers; outputs that a thread takes


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


@intrinsic
def invoke(typing, function, a, b, c, d):
    """Call the C function at an address with four words, or fewer: those that it does not have are lost."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 4)
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.none(*[types.int64] * 5), generate


@numba.njit(inline="always")
def in_order(bits):
    """Return bits of a float as a whole number in the same order, or back."""
    return np.int32(bits ^ (np.int32(bits >> 31) & np.int32(0x7FFFFFFF)))


@numba.njit(inline="always")
def number(word):
    """Return the float32 that a word holds (`bits`)."""
    return as_float(np.int32(word))


VECTOR = ir.VectorType(ir.FloatType(), WIDTH)


def const(number: int) -> ir.Constant:
    return ir.Constant(ir.IntType(64), number)


def read(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


@intrinsic
def add_products(typing, factors, count, rows, step, sums):
    """Add to the STEP numbers at each address of `sums` those of so many `rows`, `step` bytes apart,
    times the numbers at its address of `factors`: one by one, each rounded once."""

    def generate(context, builder, signature, arguments):
        count, rows, step = arguments[1:4]
        factors, sums = (cgutils.unpack_tuple(builder, arguments[n]) for n in (0, 4))
        shifts = [const(shift) for shift in range(0, 4 * STEP, BYTES)]
        places = [[builder.add(address, shift) for shift in shifts] for address in sums]
        totals = [[cgutils.alloca_once_value(builder, read(builder, x, VECTOR)) for x in of] for of in places]
        kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
        fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{WIDTH}f32")
        with cgutils.for_range(builder, count) as loop:
            row = builder.add(rows, builder.mul(loop.index, step))
            lanes = [read(builder, builder.add(row, shift), VECTOR) for shift in shifts]
            for address, of_row in zip(factors, totals, strict=True):
                one = read(builder, builder.add(address, builder.mul(loop.index, const(4))), ir.FloatType())
                one = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), one, const(0))
                factor = builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), None))
                for total, numbers in zip(of_row, lanes, strict=True):
                    builder.store(builder.call(fma, [factor, numbers, builder.load(total)]), total)
        for place, total in zip(chain(*places), chain(*totals), strict=True):
            builder.store(builder.load(total), builder.inttoptr(place, VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    addresses = types.UniTuple(types.intp, len(factors))
    return types.none(addresses, types.intp, types.intp, types.intp, addresses), generate


@intrinsic
def turn(typing, at, step, to, to_step):
    """Write WIDTH rows of WIDTH numbers, `step` bytes apart, to other rows so that row i is column i:
    blocks of half the size change places, then those of a quarter, and so on."""

    def generate(context, builder, signature, arguments):
        at, step, to, to_step = arguments
        places = [const(n) for n in range(WIDTH)]
        addresses = [builder.add(at, builder.mul(step, n)) for n in places]
        rows = [read(builder, address, VECTOR) for address in addresses]
        block = WIDTH // 2
        while block:
            for i in (i for i in range(WIDTH) if not i & block):
                low = [n + WIDTH - block if n & block else n for n in range(WIDTH)]
                high = [n + WIDTH if n & block else n + block for n in range(WIDTH)]
                pair = rows[i], rows[i + block]
                kind = ir.VectorType(ir.IntType(32), WIDTH)
                rows[i], rows[i + block] = (
                    builder.shuffle_vector(*pair, ir.Constant(kind, which)) for which in (low, high)
                )
            block //= 2
        for row, n in zip(rows, places, strict=True):
            address = builder.add(to, builder.mul(to_step, n))
            builder.store(row, builder.inttoptr(address, VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.none(types.intp, types.intp, types.intp, types.intp), generate


@intrinsic
def dots(typing, left, right, count, ahead):
    """Return the sums of products of codes at each address of `left` with those at each of `right`.

    There are `count` times CODES of them: AVX2's products of 16 bits, added two by two in 32, which are
    exact. What lies `ahead` bytes behind those at `left` is fetched meanwhile."""
    kind = types.UniTuple(types.int32, left.count * right.count)

    def generate(context, builder, signature, arguments):
        byte, short, word = (ir.IntType(bits) for bits in (8, 16, 32))
        codes, wide, sums = ir.VectorType(byte, CODES), ir.VectorType(short, CODES), ir.VectorType(word, CODES // 2)
        called = partial(cgutils.get_or_insert_function, builder.module)
        multiply = called(ir.FunctionType(sums, [wide] * 2), "llvm.x86.avx2.pmadd.wd")
        total = called(ir.FunctionType(word, [sums]), f"llvm.vector.reduce.add.v{CODES // 2}i32")
        fetch = called(ir.FunctionType(ir.VoidType(), [byte.as_pointer(), *[word] * 3]), "llvm.prefetch.p0")
        totals = [cgutils.alloca_once_value(builder, ir.Constant(sums, None)) for _ in range(kind.count)]
        sides = [cgutils.unpack_tuple(builder, side) for side in arguments[:2]]
        with cgutils.for_range(builder, arguments[2]) as loop:
            here = builder.mul(loop.index, const(CODES))
            places = [[builder.add(address, here) for address in side] for side in sides]
            for place in places[0]:
                to_come = builder.inttoptr(builder.add(place, arguments[3]), byte.as_pointer())
                builder.call(fetch, [to_come, *(ir.Constant(word, n) for n in (0, 3, 1))])  # to be read, and kept near
            numbers = [[builder.sext(read(builder, place, codes), wide) for place in side] for side in places]
            for at, pair in zip(totals, product(*numbers), strict=True):
                builder.store(builder.add(builder.load(at), builder.call(multiply, pair)), at)
        return context.make_tuple(builder, kind, [builder.call(total, [builder.load(at)]) for at in totals])

    return kind(left, right, count, ahead), generate


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


@njit(fast=REORDERS)
def _norm_row(x, weight, eps):
    """Put the RMS norm of x (D,) by a weight (D,) in its place."""
    total = np.float32(len(x) * eps)
    for d in range(len(x)):
        total += x[d] * x[d]
    factor = np.sqrt(np.float32(len(x)) / total)
    for d in range(len(x)):
        x[d] = x[d] * factor * weight[d]


@njit
def _copy(source, to, count):
    """Copy floats from one address to another."""
    source, to = carray(floats(source), count), carray(floats(to), count)
    for n in range(count):
        to[n] = source[n]


@njit
def _read_row(first, second, scale, each, bias, out):
    """Fill out (O,) with the floats at `first`, or, unless the address `each` is 0, with what sums of
    codes stand for, int32 at `first` and, of second digits, at `second`: scale * each (O,) * sums +
    bias (O,)."""
    size = len(out)
    if each == 0:
        _copy(first, out.ctypes.data, size)
        return
    sums, factors = carray(ints(first), size), carray(floats(each), size)
    for o in range(size):
        out[o] = np.float32(sums[o])
    if second != 0:
        finer = carray(ints(second), size)
        for o in range(size):
            out[o] += np.float32(finer[o]) / np.float32(SECOND)
    for o in range(size):
        out[o] *= scale * factors[o]
    if bias != 0:
        biases = carray(floats(bias), size)
        for o in range(size):
            out[o] += biases[o]


@njit(fast=IN_ORDER)
def _gate_row(both, first, third):
    """Put gate * up * sigmoid(first * gate + third * gate^3) in the place of the gates of both (2 I,)."""
    half = len(both) // 2
    gates, ups = both[:half], both[half:]
    for i in range(half):
        x = gates[i]
        y = min(max(x * (first + third * x * x), LEAST), -LEAST)
        gates[i] = x / (np.float32(1) + exp(-y)) * ups[i]


@njit
def _code_row(row, first, second):
    """Write whole numbers from -127 to 127 for a row (D,) to the address `first`, and what is left over
    in numbers SECOND times finer to `second`, unless that is 0; return their scale. The row is lost."""
    size, most = len(row), np.int32(0)
    for d in range(size):
        value = np.int32(as_bits(row[d]) & np.int32(0x7FFFFFFF))  # absolute, in the same order as the floats
        most = value if value > most else most
    top = max(as_float(most), np.float32(1e-30))
    factor, codes = np.float32(127) / top, carray(bytes_(first), size)
    for d in range(size):
        row[d] *= factor
        codes[d] = np.int8(as_bits(row[d] + SHIFT))
    if second != 0:
        finer = carray(bytes_(second), size)
        for d in range(size):
            left = (row[d] - ((row[d] + SHIFT) - SHIFT)) * np.float32(SECOND)
            finer[d] = np.int8(as_bits(left + SHIFT))
    return top / np.float32(127)


@njit
def _rows(at):
    """Take every row through its stages (`Stages`)."""
    (
        source, rows, width, scales, each, bias, digits, factor, first, third, before, kept, weight, eps, out,
        smooth, codes, steps, finer,
    ) = words(at, 19)  # fmt: skip
    whole, size = np.empty(width, np.float32), width // 2 if first != 0 else width
    row = whole[:size]
    n = take(at)
    while n < rows:
        second = source + 4 * (rows + n) * width if digits == 2 else 0
        scale = floats(scales)[n] * number(factor) if each != 0 else np.float32(0)
        _read_row(source + 4 * n * width, second, scale, each, bias, whole)
        if first != 0:
            _gate_row(whole, number(first), number(third))
        if before != 0:
            others = carray(floats(before + 4 * n * size), size)
            for d in range(size):
                row[d] = others[d] + row[d]
        if kept != 0:
            _copy(row.ctypes.data, kept + 4 * n * size, size)
        if weight != 0:
            _norm_row(row, carray(floats(weight), size), number(eps))
        if out != 0:
            _copy(row.ctypes.data, out + 4 * n * size, size)
        if codes != 0:
            factors = carray(floats(smooth), size)
            for d in range(size):
                row[d] *= factors[d]
            floats(steps)[n] = _code_row(row, codes + n * size, codes + (rows + n) * size if finer == 2 else 0)
        n = take(at)


@njit
def _best(at):
    """Fill out (N,) with the first of the greatest numbers that rows of sums (digits N, O) stand for
    (`_read_row`), some of them at a time."""
    sums, rows, size, scales, each, bias, digits, out = words(at, 8)
    some, n = np.empty(SOME, np.float32), take(at)
    while n < rows:
        best, top = np.int64(0), np.int32(-(2**31))
        for begin in range(0, size, SOME):
            part, here = some[: min(SOME, size - begin)], 4 * (n * size + begin)
            second = sums + 4 * rows * size + here if digits == 2 else 0
            more = bias + 4 * begin if bias != 0 else 0
            _read_row(sums + here, second, floats(scales)[n], each + 4 * begin, more, part)
            before = top
            for o in range(len(part)):
                value = in_order(as_bits(part[o]))
                top = value if value > top else top
            if top > before:
                o = 0
                while in_order(as_bits(part[o])) != top:
                    o += 1
                best = begin + o
        longs(out)[n] = best
        n = take(at)


@njit
def _product(a, a_step, rows, count, b, b_step, columns, c, c_step):
    """Add the product of matrices at a (rows, count) and b (count, columns) to c, whose rows are `_step`
    bytes apart. Sums go from the first number to the last. Columns are taken by STEP, rows by fours, the
    last one again where there are less."""
    for r in range(0, rows, 4):
        r1, r2, r3 = min(r + 1, rows - 1), min(r + 2, rows - 1), min(r + 3, rows - 1)
        four = a + r * a_step, a + r1 * a_step, a + r2 * a_step, a + r3 * a_step
        for at in range(0, 4 * columns, 4 * STEP):
            sums = c + at + r * c_step, c + at + r1 * c_step, c + at + r2 * c_step, c + at + r3 * c_step
            add_products(four, count, b + at, b_step, sums)


@njit(fast=IN_ORDER)
def _soften(weights, hides, whole, scale, count):
    """Put e^(score - greatest) in the place of the first `count` scores (S,), scaled and under an additive
    mask (S,), unless the query sees the whole of them, and 0 behind them."""
    most = np.int32(-(2**31))
    for j in range(count):
        weights[j] *= scale
    if not whole:
        for j in range(count):
            weights[j] += hides[j]
    for j in range(count):
        value = in_order(as_bits(weights[j]))
        most = value if value > most else most
    top = as_float(in_order(most))
    for j in range(count):
        weights[j] = exp(weights[j] - top)
    for j in range(count, len(weights)):
        weights[j] = 0


@njit
def _turn(rows, step, count, size, turned, turned_step):
    """Write `count` rows of `size` numbers, `step` bytes apart, as columns."""
    for n in range(0, count, WIDTH):
        squares = size // WIDTH * WIDTH if n + WIDTH <= count else 0
        for e in range(0, squares, WIDTH):
            turn(rows + n * step + 4 * e, step, turned + e * turned_step + 4 * n, turned_step)
        for m in range(n, min(n + WIDTH, count)):
            for e in range(squares, size):
                floats(turned + e * turned_step)[m] = floats(rows + m * step)[e]


@njit
def _turn_back(at):
    """Write sums (O, N) as (N, O), some of the outputs O at a time."""
    sums, outputs, wide, to = words(at, 4)
    part = take(at)
    while part * SOME < outputs:
        begin = part * SOME
        _turn(sums + 4 * begin * wide, 4 * wide, min(SOME, outputs - begin), wide, to + 4 * begin, 4 * outputs)
        part = take(at)


@njit
def _multiply(at):
    """Fill sums (N, O) int32 with the products of whole numbers (N, D) and codes (O, D), PART outputs
    at a time: OUTPUTS of them with OTHERS rows, the last ones again where there are less."""
    whole, rows, codes, outputs, inputs, sums = words(at, 6)
    part = take(at)
    while part * PART < outputs:
        for o in range(part * PART, min(outputs, (part + 1) * PART), OUTPUTS):
            o1, o2, o3 = min(o + 1, outputs - 1), min(o + 2, outputs - 1), min(o + 3, outputs - 1)
            four = codes + o * inputs, codes + o1 * inputs, codes + o2 * inputs, codes + o3 * inputs
            for n in range(0, rows, OTHERS):
                n1 = min(n + 1, rows - 1)
                found = dots(four, (whole + n * inputs, whole + n1 * inputs), inputs // CODES, OUTPUTS * inputs)
                one, other = ints(sums + 4 * n * outputs), ints(sums + 4 * n1 * outputs)
                one[o], one[o1], one[o2], one[o3] = found[::2]
                other[o], other[o1], other[o2], other[o3] = found[1::2]
        part = take(at)


@njit(fast=IN_ORDER)
def _attend(at):
    """Fill out (N, K, G, E) with the attention of queries (N, K, G, E) over the
    first S = `seen` places of keys and values (B, capacity, K E), under an additive
    mask (B, Q, S), unless its address is 0: of Q in every row, or, unless their
    address is 0, of those up to stops (B,). Sums go from the first place to the
    last, one by one, and a hidden place adds 0: so a query's numbers follow from
    what it sees alone, wherever that lies and whatever lies between.

    Some queries of a row and a key head go together over some places, which stay near."""
    queries, scale, out, rows, shared, groups, size, keys, values, mask, capacity, seen, width, stops = words(at, 14)
    parts, whole, hidden = (width + QUERIES - 1) // QUERIES, mask == 0, carray(floats(mask), (rows, width, seen))
    many = (width + parts - 1) // parts
    wide, up = (size + STEP - 1) // STEP * STEP, (seen + STEP - 1) // STEP * STEP
    to = carray(floats(out), (rows * width, shared, groups, size))
    turned = np.zeros((size, PLACES + WIDTH), np.float32)  # WIDTH more: rows begin in other lines of a cache
    padded, asked = np.zeros((PLACES, wide), np.float32), np.empty((groups * many, size), np.float32)
    weights, mixed = np.empty((groups * many, up), np.float32), np.empty((groups * many, wide), np.float32)
    totals, ones = np.empty((groups * many, STEP), np.float32), np.ones(STEP, np.float32)
    last, w_at, asked_at = np.empty(many, np.int64), weights.ctypes.data, asked.ctypes.data
    turned_at, t_step = turned.ctypes.data, 4 * (PLACES + WIDTH)
    unit = take(at)
    while unit < rows * shared * parts:
        b, h, begin = unit // (shared * parts), unit // parts % shared, unit % parts * many
        first = b * width if stops == 0 else longs(stops)[b - 1] if b > 0 else 0
        end = width if stops == 0 else longs(stops)[b] - first
        count, most = max(0, min(many, end - begin)) * groups, 0
        for i in range(count // groups):
            last[i] = seen
            while not whole and last[i] > 1 and hidden[b, begin + i, last[i] - 1] < 0:
                last[i] -= 1
            most = max(most, last[i])
            for g in range(groups):
                q_at = queries + 4 * size * (((first + begin + i) * shared + h) * groups + g)
                _copy(q_at, asked_at + 4 * size * (i * groups + g), size)
        weights[:count], mixed[:count], totals[:count] = 0, 0, 0
        for place in range(0, most, PLACES):
            near = min(PLACES, most - place)
            k_at = keys + 4 * ((b * capacity + place) * shared + h) * size
            _turn(k_at, 4 * shared * size, near, size, turned_at, t_step)
            _product(asked_at, 4 * size, count, size, turned_at, t_step, near, w_at + 4 * place, 4 * up)
        for r in range(count):
            hides = asked[0] if whole else hidden[b, begin + r // groups]
            line = weights[r, : (most + WIDTH - 1) // WIDTH * WIDTH]
            _soften(line, hides, whole, number(scale), last[r // groups])
        _product(w_at, 4 * up, count, most, ones.ctypes.data, 0, STEP, totals.ctypes.data, 4 * STEP)
        for place in range(0, most, PLACES):
            near, v_at, v_step = min(PLACES, most - place), padded.ctypes.data, 4 * wide
            if wide == size:
                v_at, v_step = values + 4 * ((b * capacity + place) * shared + h) * size, 4 * shared * size
            else:
                for j in range(near):
                    _copy(values + 4 * ((b * capacity + place + j) * shared + h) * size, v_at + j * v_step, size)
            _product(w_at + 4 * place, 4 * up, count, near, v_at, v_step, wide, mixed.ctypes.data, 4 * wide)
        for r in range(count):
            for e in range(size):
                to[first + begin + r // groups, h, r % groups, e] = mixed[r, e] / totals[r, 0]
        unit = take(at)


@njit(fast=REORDERS)
def _place_heads(at):
    """Take heads parts (N, H + 2 K, E) of N = `rows` positions, `stride` numbers apart, to where
    attention reads them: queries (N, H, E), keys and values (S, K E) at slots
    (N,). Queries and keys are normed by weight (H + K, E), unless its address is 0, and their first R
    features are turned by cos and sin (N, R). Parts are floats, or sums (`_read_row`)."""
    (
        parts, stride, scales, each, bias, digits, weight, eps, queries, rows, heads, shared, size, rotated, cos,
        sin, slots, keys, values,
    ) = words(at, 19)  # fmt: skip
    normed, half, eps = weight != 0, rotated // 2, number(eps)
    weight = carray(floats(weight), (heads + shared, size))
    cos, sin = carray(floats(cos), (rows, rotated)), carray(floats(sin), (rows, rotated))
    slots = carray(longs(slots), rows)
    of_position = np.empty((heads + 2 * shared, size), np.float32)
    n = take(at)
    while n < rows:
        second = parts + 4 * (rows + n) * stride if digits == 2 else 0
        scale = floats(scales)[n] if each != 0 else np.float32(0)
        _read_row(parts + 4 * n * stride, second, scale, each, bias, of_position.reshape(-1))
        slot = 4 * slots[n] * shared * size
        for h in range(heads + shared):
            x = of_position[h]
            if normed:
                _norm_row(x, weight[h], eps)
            to = queries + 4 * (n * heads + h) * size if h < heads else keys + slot + 4 * (h - heads) * size
            to = carray(floats(to), size)
            for e in range(half):
                to[e] = x[e] * cos[n, e] + x[e + half] * sin[n, e]
            for e in range(half):
                to[e + half] = x[e + half] * cos[n, e + half] + x[e] * sin[n, e + half]
            for e in range(rotated, size):
                to[e] = x[e]
        _copy(of_position[heads + shared :].ctypes.data, values + slot, shared * size)
        n = take(at)


@njit
def _play(at):
    """Make calls (C, 5) one after the other, each a function and its arguments (`call`)."""
    calls, count = words(at, 2)
    of_each = carray(longs(calls), (count, 5))
    for c in range(count):
        invoke(of_each[c, 0], of_each[c, 1], of_each[c, 2], of_each[c, 3], of_each[c, 4])


class Scale(NamedTuple):
    """What is read of a norm, of a `lean.Norm` too."""

    wide: torch.Tensor  # its weight
    eps: float


class Stages(NamedTuple):
    """What is done with every row of (N, width) numbers, in this order. What is 0 is left out; what is
    written lies in memory of N rows."""

    source: int  # address of floats, or of sums of codes (digits N, width), int32
    rows: int  # N
    width: int
    scales: int = 0  # of the codes (N,): factor * scales * each * sums + bias is read
    each: int = 0  # (width,)
    bias: int = 0  # (width,)
    digits: int = 1  # of the codes
    factor: int = 1065353216  # the bits of 1.0
    first: int = 0  # gate * up * sigmoid(first * gate + third * gate^3) of the row's halves: half as many numbers
    third: int = 0
    before: int = 0  # (N, size), to be added to
    kept: int = 0  # where the row is written now
    weight: int = 0  # (size,) of an RMS norm
    eps: int = 0
    out: int = 0  # where the row is written behind the norm
    smooth: int = 0  # (size,) that codes are made behind
    codes: int = 0  # where they are written, (finer N, size) int8: the row is steps * (codes + second codes / SECOND)
    steps: int = 0  # (N,)
    finer: int = 1  # digits of these codes

    def run(self) -> None:
        run(_rows, self.rows, self.rows * self.width, *self)


def serve(states: torch.Tensor) -> bool:
    """Return whether the loops of this module serve for states."""
    return states.dtype == torch.float32 and compiled.available(states) and not states.requires_grad


def norm(states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return states (..., D) behind an RMS norm with a weight (D,)."""
    states, size = states.contiguous(), weight.shape[0]
    out, rows = torch.empty_like(states), states.numel() // size
    Stages(states.data_ptr(), rows, size, weight=weight.data_ptr(), eps=bits(eps), out=out.data_ptr()).run()
    return out


def place(
    parts: torch.Tensor, norm: Scale | None, rotation: tuple[torch.Tensor, torch.Tensor] | None, memory: LayerWindow
) -> torch.Tensor:
    """Norm all of heads (N, H + 2 K, E) but values, by weights (H + K, E), if there are any, rotate
    them by cos and sin (N, 1, R), if they are given, write keys and values to `memory`, and return the
    queries, (N, H, E). Only the first dimension of heads may have gaps."""
    (count, heads, size), shared = parts.shape, memory.keys.shape[1]
    heads -= 2 * shared
    queries = parts.new_empty(count, heads, size)
    angles = (0, 0, 0) if rotation is None else (rotation[0].shape[-1], *(x.data_ptr() for x in rotation))
    plane = 4 * memory.buffer.stride(0)
    keys = memory.buffer.data_ptr() + 2 * memory.index * plane
    run(
        _place_heads, count, 2 * count * (heads + 2 * shared) * size, parts.data_ptr(), parts.stride(0), 0, 0, 0, 1,
        *scale_words(norm), queries.data_ptr(), count, heads, shared, size, *angles, memory.slots.data_ptr(), keys,
        keys + plane,
    )  # fmt: skip
    return queries


def gate(both: torch.Tensor, bend: Bend) -> torch.Tensor:
    """Return activation(gate) * up, (N, I), of both (N, 2 I)."""
    both, (rows, size) = both.contiguous(), both.shape
    out, (first, third) = both.new_empty(rows, size // 2), bend
    Stages(both.data_ptr(), rows, size, first=bits(first), third=bits(third), out=out.data_ptr()).run()
    return out


def codes(
    states: torch.Tensor, smooth: torch.Tensor, digits: int, norm: Scale | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whole numbers from -127 to 127, (digits N, D) int8, and scales (N,), that stand for states
    (N, D), behind a norm if there is one, times smooth (D,): scale * (first digit + second digit /
    SECOND)."""
    states, (rows, size) = states.contiguous(), states.shape
    out, scales = states.new_empty((digits * rows, size), dtype=torch.int8), states.new_empty(rows)
    weight, eps = scale_words(norm)
    made = Stages(
        states.data_ptr(), rows, size, weight=weight, eps=eps, smooth=smooth.data_ptr(), codes=out.data_ptr(),
        steps=scales.data_ptr(), finer=digits,
    )  # fmt: skip
    made.run()
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
    addresses = (0 if x is None else x.data_ptr() for x in (scales, each, bias))
    others = 0 if before is None else before.data_ptr()
    Stages(sums.data_ptr(), rows, size, *addresses, digits, bits(factor), before=others, kept=sums.data_ptr()).run()
    return sums.view(torch.float32)[:rows]


def multiply(whole: torch.Tensor, codes: torch.Tensor, sums: torch.Tensor, run: Callable[..., None]) -> None:
    """Have `run`, this module's or a tape's, fill sums (N, O) int32 with the product of whole numbers
    (N, D) and codes (O, D), int8; D is a multiple of CODES."""
    (rows, inputs), outputs = whole.shape, len(codes)
    work = (rows + OTHERS) * inputs * outputs // PACE  # one row is read as long as others are multiplied
    memory = whole.data_ptr(), rows, codes.data_ptr(), outputs, inputs, sums.data_ptr()
    run(_multiply, -(-outputs // PART), work, *memory)


def turned(sums: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the first rows (rows, O) of sums (O, N), turned."""
    outputs, wide = sums.shape
    if wide == 1:
        return sums.view(1, -1)
    out = sums.new_empty(wide, outputs)
    run(_turn_back, -(-outputs // SOME), sums.numel(), sums.data_ptr(), outputs, wide, out.data_ptr())
    return out[:rows]


def best(sums: torch.Tensor, scales: torch.Tensor, each: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return where the greatest number of every row is, (N,) int64, of what sums stand for
    (`finish`)."""
    rows, size = scales.shape[0], sums.shape[1]
    out, digits = scales.new_empty(rows, dtype=torch.long), sums.shape[0] // rows
    addresses = (0 if x is None else x.data_ptr() for x in (scales, each, bias))
    run(_best, rows, sums.numel(), sums.data_ptr(), rows, size, *addresses, digits, out.data_ptr())
    return out


def attend_in_order(queries: torch.Tensor, memory: LayerWindow, mask: Mask, scale: float) -> torch.Tensor:
    """Return the attention (N, H E) of queries (N, H, E) over a layer of a cache, each query's sums in the
    order of the places: its numbers do not depend on what is beside it."""
    (rows, shared, seen, size), width, keys = memory.keys.shape, memory.width, memory.keys
    additive, groups, queries = mask.for_packed(1, queries.dtype), queries.shape[1] // shared, queries.contiguous()
    out = torch.empty_like(queries)
    hidden, stops = (0 if x is None else x.data_ptr() for x in (additive, memory.stops))
    run(
        _attend, rows * shared * -(-width // QUERIES), queries.numel() * seen // 2, queries.data_ptr(), bits(scale),
        out.data_ptr(), rows, shared, groups, size, keys.data_ptr(), memory.values.data_ptr(), hidden,
        keys.stride(0) // keys.stride(2), seen, width, stops,
    )  # fmt: skip
    return out.flatten(1)


@cache
def bits(value: float) -> int:
    """Return the word that holds a float32 (`number`)."""
    return int(np.float32(value).view(np.int32))


def scale_words(norm: Scale | None) -> tuple[int, int]:
    """Return the words of a norm, 0 where there is none."""
    return (0, 0) if norm is None else (norm.wide.data_ptr(), bits(norm.eps))


@cache
def team() -> int:
    """Return the address of what calls a function from several threads, those of torch's products:
    libgomp's entry for `omp parallel`. 0 where torch comes with another library."""
    found = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    return 0 if found is None else ctypes.cast(found, ctypes.c_void_p).value


entry = cache(address_of)  # of a compiled loop


def call(loop: object, memory: int, parts: int, work: int) -> tuple[int, ...]:
    """Return a function and its arguments, which run a loop over its parts, whose words lie at an
    address, on as many threads as torch has where the work, in cycles, is worth it. What is computed
    for a part does not depend on who takes it."""
    threads = min(torch.get_num_threads(), parts) if work > WORTH and team() else 1
    return (team(), entry(loop), memory, threads, 0) if threads > 1 else (entry(loop), memory, 0, 0, 0)


def run(loop: object, parts: int, work: int, *arguments: int) -> None:
    """Run a loop over its parts now (`call`)."""
    memory = (ctypes.c_int64 * (len(arguments) + 1))(0, *arguments)
    function, *given = call(loop, ctypes.addressof(memory), parts, work)
    FUNCTION(function)(*given)
