"""Operations on the CPU in float32, compiled by numba: several tensor operations in one call each.
For few positions calls cost more than what they compute. A position's result does not depend on the
others.

N positions, D hidden size, I inner size, L layers, H query heads, K key heads, E head size, R of
its features rotated.
"""

import numba
import numpy as np
import torch
from numba import carray, types
from numba.extending import intrinsic

from infer.attention.kv_cache import LayerWindow, PackedLayer
from infer.kernels import cpu_search, reference
from infer.kernels.launch import (
    ADDRESS,
    FLOAT,
    INTEGER,
    Arguments,
    claim_part,
    empty,
    float_pointer,
    int64_pointer,
    launch,
    reader,
)
from infer.kernels.operands import Activation, Norm
from infer.utils.jit import IN_ORDER, REORDERS, njit

LOG2_E = np.float32(1.44269504)
LN2_HIGH = np.float32(0.693359375)  # ln 2 in two parts, of which the first has few bits
LN2_LOW = np.float32(-2.12194440e-4)
# coefficients of x^2 .. x^7 in the Taylor series of e^x about 0
EXP_COEFFICIENTS = tuple(np.float32(1 / factorial) for factorial in (2, 6, 24, 120, 720, 5040))
ROUNDING_SHIFT = np.float32(1.5 * 2**23)  # a float32 plus this is rounded to a whole number
EXP_UNDERFLOW = np.float32(-87)  # e^x of less is 0
Rotation = tuple[torch.Tensor, torch.Tensor]


def bitcast(source: types.Type, to: types.Type):
    """Return a function for compiled code that reads the bits of a number as one of another
    kind."""

    @intrinsic
    def cast(typing, value):
        def generate(context, builder, signature, values):
            return builder.bitcast(values[0], context.get_value_type(to))

        return to(source), generate

    return cast


as_float = bitcast(types.int32, types.float32)
as_bits = bitcast(types.float32, types.int32)


@numba.njit(inline="always")
def exp(x):
    """Return e^x to the last bit or two, 0 for x below -87, for x up to 88: numpy's is not computed
    in vectors. Its caller must not be compiled with REORDERS."""
    shifted = max(x, EXP_UNDERFLOW) * LOG2_E + ROUNDING_SHIFT
    n = shifted - ROUNDING_SHIFT  # a whole number
    r = (max(x, EXP_UNDERFLOW) - n * LN2_HIGH) - n * LN2_LOW
    # 2^n: the last bits of `shifted` are n
    power = as_float(np.int32(as_bits(shifted) << 23) + np.int32(127 << 23))
    c = EXP_COEFFICIENTS
    tail = c[0] + r * (c[1] + r * (c[2] + r * (c[3] + r * (c[4] + r * c[5]))))
    value = (np.float32(1) + (r + r * r * tail)) * power
    return value if x >= EXP_UNDERFLOW else np.float32(0)


@njit
def copy_floats(source, to, count):
    """Copy float32 numbers from one address to another."""
    source_values = carray(float_pointer(source), count)
    values = carray(float_pointer(to), count)
    for i in range(count):
        values[i] = source_values[i]


@njit(fast=REORDERS)
def norm_row(x, weight, eps, out):
    """Write the RMS norm of x (D,) with a weight (D,) to out, which may be x."""
    total = np.float32(len(x) * eps)
    for d in range(len(x)):
        total += x[d] * x[d]
    factor = np.sqrt(np.float32(len(x)) / total)
    for d in range(len(x)):
        out[d] = x[d] * factor * weight[d]


@njit(fast=IN_ORDER)
def gate_row(both, linear, cubic, out):
    """Write gate * up * sigmoid(linear * gate + cubic * gate^3), (I,), of gates and ups side by
    side (2 I,), to out."""
    half = len(both) // 2
    gates = both[:half]
    ups = both[half:]
    for i in range(half):
        x = gates[i]
        y = min(max(x * (linear + cubic * x * x), EXP_UNDERFLOW), -EXP_UNDERFLOW)
        out[i] = x / (np.float32(1) + exp(-y)) * ups[i]


class NormArguments(Arguments):
    """Arguments of `norm_rows`."""

    _fields_ = [
        ("states", ADDRESS),  # (N, D)
        ("change", ADDRESS),  # (N, D) to be added, times `scale`; 0: none
        ("weight", ADDRESS),  # (D,)
        ("summed", ADDRESS),  # (N, D) where the sum goes
        ("normed", ADDRESS),  # (N, D) where its norm goes
        ("rows", INTEGER),  # N
        ("width", INTEGER),  # D
        ("scale", FLOAT),
        ("eps", FLOAT),
    ]


norm_arguments = reader(NormArguments)


@njit
def norm_rows(address):
    """Add a change to every row, if there is one, and norm the sum."""
    a = norm_arguments(address)
    width = a.width
    scale = a.scale
    weight = carray(float_pointer(a.weight), width)
    n = claim_part(address)
    while n < a.rows:
        offset = 4 * n * width
        states = carray(float_pointer(a.states + offset), width)
        if a.change != 0:
            change = carray(float_pointer(a.change + offset), width)
            summed = carray(float_pointer(a.summed + offset), width)
            for d in range(width):
                summed[d] = states[d] + change[d] * scale
            states = summed
        norm_row(states, weight, a.eps, carray(float_pointer(a.normed + offset), width))
        n = claim_part(address)


class GateArguments(Arguments):
    """Arguments of `gate_rows`."""

    _fields_ = [
        ("both", ADDRESS),  # (N, 2 I): gates, then ups
        ("out", ADDRESS),  # (N, I)
        ("rows", INTEGER),  # N
        ("width", INTEGER),  # 2 I
        ("linear", FLOAT),  # of the activation x * sigmoid(linear * x + cubic * x^3)
        ("cubic", FLOAT),
    ]


gate_arguments = reader(GateArguments)


@njit
def gate_rows(address):
    """Multiply the activation of gates with ups."""
    a = gate_arguments(address)
    width = a.width
    n = claim_part(address)
    while n < a.rows:
        both = carray(float_pointer(a.both + 4 * n * width), width)
        gate_row(both, a.linear, a.cubic, carray(float_pointer(a.out + 2 * n * width), width // 2))
        n = claim_part(address)


class HeadArguments(Arguments):
    """Arguments of `norm_rotate_write_heads`."""

    _fields_ = [
        ("projected", ADDRESS),  # (N, L, H + 2 K, E)
        ("queries", ADDRESS),  # (N, L, H, E)
        ("weight", ADDRESS),  # (L, H + K, E) of the norm; 0: no norm
        ("cosines", ADDRESS),  # (N, R)
        ("sines", ADDRESS),  # (N, R)
        ("slots", ADDRESS),  # (N,) int64
        (
            "keys",
            ADDRESS,
        ),  # (slots, K E) of the first layer; its values and the other layers' keys and values follow
        (
            "plane_bytes",
            INTEGER,
        ),  # from a layer's keys to its values, and from these to the next layer's keys
        ("rows", INTEGER),  # N
        ("layers", INTEGER),  # L
        ("heads", INTEGER),  # H
        ("key_heads", INTEGER),  # K
        ("head_size", INTEGER),  # E
        ("rotated", INTEGER),  # R
        ("eps", FLOAT),
    ]


head_arguments = reader(HeadArguments)


@njit(fast=REORDERS)
def norm_rotate_write_heads(address):
    """Norm and rotate queries and keys; write queries to their memory, keys and values to the
    cache."""
    a = head_arguments(address)
    # locals: the compiler must assume that what is written to memory changes the structure's fields
    rows = a.rows
    layers = a.layers
    rotated = a.rotated
    eps = a.eps
    heads = a.heads
    key_heads = a.key_heads
    size = a.head_size
    normed = a.weight != 0
    half = rotated // 2
    weight = carray(float_pointer(a.weight), (layers, heads + key_heads, size))
    cosines = carray(float_pointer(a.cosines), (rows, rotated))
    sines = carray(float_pointer(a.sines), (rows, rotated))
    slots = carray(int64_pointer(a.slots), rows)
    position = np.empty((heads + 2 * key_heads, size), np.float32)
    n = claim_part(address)
    while n < rows:
        slot = 4 * slots[n] * key_heads * size
        for layer in range(layers):
            part = n * layers + layer
            keys = a.keys + 2 * layer * a.plane_bytes + slot
            copy_floats(a.projected + 4 * part * position.size, position.ctypes.data, position.size)
            for head in range(heads + key_heads):
                x = position[head]
                if normed:
                    norm_row(x, weight[layer, head], eps, x)
                to = a.queries + 4 * (part * heads + head) * size
                if head >= heads:
                    to = keys + 4 * (head - heads) * size
                out = carray(float_pointer(to), size)
                for e in range(half):
                    out[e] = x[e] * cosines[n, e] + x[e + half] * sines[n, e]
                for e in range(half):
                    out[e + half] = x[e + half] * cosines[n, e + half] + x[e] * sines[n, e + half]
                for e in range(rotated, size):
                    out[e] = x[e]
            copy_floats(
                position[heads + key_heads :].ctypes.data, keys + a.plane_bytes, key_heads * size
            )
        n = claim_part(address)


def rms_norm(states: torch.Tensor, norm: Norm) -> torch.Tensor:
    """See `infer.kernels.reference.rms_norm`."""
    states = states.contiguous()
    width = states.shape[-1]
    out = empty(states.shape)
    rows = states.numel() // width
    arguments = NormArguments(
        states=states, weight=norm.float32_weight, normed=out, rows=rows, width=width, eps=norm.eps
    )
    launch(norm_rows, arguments, rows, rows * width)
    return out


def add_rms_norm(
    states: torch.Tensor, change: torch.Tensor, norm: Norm, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `infer.kernels.reference.add_rms_norm`."""
    states = states.contiguous()
    change = change.contiguous()
    rows, width = states.shape
    summed = empty(states.shape)
    normed = empty(states.shape)
    arguments = NormArguments(
        states=states,
        change=change,
        weight=norm.float32_weight,
        summed=summed,
        normed=normed,
        rows=rows,
        width=width,
        scale=scale,
        eps=norm.eps,
    )
    launch(norm_rows, arguments, rows, rows * width)
    return summed, normed


def gated_activation(both: torch.Tensor, activation: Activation) -> torch.Tensor:
    """See `infer.kernels.reference.gated_activation`."""
    if activation.coefficients is None:
        return reference.gated_activation(both, activation)
    both = both.contiguous()
    rows, width = both.shape
    out = empty((rows, width // 2))
    linear, cubic = activation.coefficients
    arguments = GateArguments(
        both=both, out=out, rows=rows, width=width, linear=linear, cubic=cubic
    )
    launch(gate_rows, arguments, rows, rows * width)
    return out


def qk_norm_rope_write(
    projected: torch.Tensor,
    key_heads: int,
    qk_norm: Norm | None,
    rotation: Rotation | None,
    memory: LayerWindow | PackedLayer,
) -> torch.Tensor:
    """See `infer.kernels.reference.qk_norm_rope_write`."""
    if not isinstance(memory, LayerWindow):
        return reference.qk_norm_rope_write(projected, key_heads, qk_norm, rotation, memory)
    projected = projected.contiguous()
    rows, layers, count, size = projected.shape
    heads = count - 2 * key_heads
    queries = empty((rows, layers, heads, size))
    arguments = HeadArguments(
        projected=projected,
        queries=queries,
        weight=None if qk_norm is None else qk_norm.float32_weight,
        rows=rows,
        layers=layers,
        heads=heads,
        key_heads=key_heads,
        head_size=size,
        eps=0.0 if qk_norm is None else qk_norm.eps,
    )

    def bind(rotation: Rotation | None, memory: LayerWindow) -> None:
        if rotation is not None:
            cosines, sines = rotation
            arguments.cosines = cosines.data_ptr()
            arguments.sines = sines.data_ptr()
            arguments.rotated = cosines.shape[-1]
        arguments.slots = memory.slots.data_ptr()
        arguments.plane_bytes = 4 * memory.buffer.stride(0)
        arguments.keys = memory.buffer.data_ptr() + 2 * memory.index * arguments.plane_bytes

    bind(rotation, memory)
    launch(
        norm_rotate_write_heads, arguments, rows, 2 * projected.numel(), bind, (rotation, memory)
    )
    return queries.flatten(1, 2)


OPERATIONS = {
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "gated_activation": gated_activation,
    "qk_norm_rope_write": qk_norm_rope_write,
    "best_first_search": cpu_search.best_first_search,
}
