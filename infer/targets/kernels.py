"""Compiled loops of the lean pass, by numba, for float32: products of a few rows, norms, heads on their way into
attention. Arguments are addresses and sizes, as the loops are called hundreds of times in a pass.

A library's products are made for many rows: for one it waits for memory, for ten it computes at a third of the
processor's speed. Here a weight lies in panels of as many columns as one tile has, in the order in which it is read,
and a tile of the result, up to eight rows of a panel, stays in registers until it is done. A row's result does not
depend on what is computed beside it.

N rows, D inputs or hidden size, P panels of C columns each; H query heads, K key heads, G = H / K, E head size, R of
its features rotated, Q positions of a row.
"""

import numpy as np
from llvmlite import binding, ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from infer.utils.jit import njit

WORD, FLOAT = ir.IntType(64), ir.FloatType()
WIDE = binding.get_host_cpu_features().get("avx512f")  # with twice as many registers, each of twice as many numbers
LANES, VECTORS, MOST = (16 if WIDE else 8), 2, (8 if WIDE else 4)  # of a tile: C columns in two vectors, most rows
COLUMNS = LANES * VECTORS
VECTOR = ir.VectorType(FLOAT, LANES)


def pointer(kind: types.Type):
    """Return a function of compiled code that makes an address a pointer to numbers of a kind."""

    @intrinsic
    def point(typing, address):
        def generate(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(kind).as_pointer())

        return types.CPointer(kind)(types.intp), generate

    return point


floats, longs = pointer(types.float32), pointer(types.int64)


def tile(rows: int):
    """Return a function of compiled code that adds to so many rows of out the product of as many rows of states with a
    panel: `(states, panel, out, D, M)`, the addresses of the first numbers, and the lengths of rows."""

    @intrinsic
    def add_tile(typing, states, panel, out, inputs, columns):
        def generate(context, builder, signature, arguments):
            states, panel, out, inputs, columns = arguments
            name = f"llvm.fma.v{LANES}f32"
            join = ir.FunctionType(VECTOR, [VECTOR] * 3)
            multiply_add = builder.module.globals.get(name) or ir.Function(builder.module, join, name)

            def at(address, index, kind):  # a pointer to numbers
                return builder.inttoptr(builder.add(address, builder.mul(index, WORD(4))), kind.as_pointer())

            def place(row, vector):  # in out
                return at(out, builder.add(builder.mul(columns, WORD(row)), WORD(vector * LANES)), VECTOR)

            cells = [(row, vector) for row in range(rows) for vector in range(VECTORS)]
            sums = {cell: cgutils.alloca_once_value(builder, builder.load(place(*cell), align=4)) for cell in cells}
            with cgutils.for_range(builder, inputs) as loop:
                begin = builder.mul(loop.index, WORD(COLUMNS))
                starts = [at(panel, builder.add(begin, WORD(vector * LANES)), VECTOR) for vector in range(VECTORS)]
                weights = [builder.load(start, align=4) for start in starts]
                for row in range(rows):
                    state = builder.load(at(states, builder.add(builder.mul(inputs, WORD(row)), loop.index), FLOAT))
                    alone = builder.insert_element(VECTOR(ir.Undefined), state, ir.IntType(32)(0))
                    first = ir.VectorType(ir.IntType(32), LANES)([0] * LANES)
                    everywhere = builder.shuffle_vector(alone, VECTOR(ir.Undefined), first)
                    for vector, weight in enumerate(weights):
                        total = sums[row, vector]
                        builder.store(builder.call(multiply_add, [everywhere, weight, builder.load(total)]), total)
            for cell in cells:
                builder.store(builder.load(sums[cell]), place(*cell), align=4)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 5), generate

    return add_tile


add_most, add_four, add_two, add_one = (tile(rows) for rows in (MOST, 4, 2, 1))


@njit
def add_product(states, weight, out, rows, inputs, columns):
    """Add the product of states (N, D) and a weight in panels (P, D, C) to out (N, P C)."""
    for first in range(0, columns, COLUMNS):
        panel = weight + 4 * first * inputs
        row = 0
        while row < rows:
            left = rows - row
            here, there = states + 4 * row * inputs, out + 4 * (row * columns + first)
            if left >= MOST:
                add_most(here, panel, there, inputs, columns)
                row += MOST
            elif left >= 4:
                add_four(here, panel, there, inputs, columns)
                row += 4
            elif left >= 2:
                add_two(here, panel, there, inputs, columns)
                row += 2
            else:
                add_one(here, panel, there, inputs, columns)
                row += 1


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
