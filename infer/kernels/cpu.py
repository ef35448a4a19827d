"""CPU operations in float32, compiled by numba. Each one fuses several PyTorch operations.

For a forward pass of few positions, the overhead of PyTorch calls takes longer than the
computation, so fused operations are faster. The result for one position does not depend on the
other positions. Each kernel divides its work into work items, and several threads share the work
items (launch.py).
"""

from collections.abc import Callable

import numba
import numpy as np
import torch
from numba import carray, types

from infer.attention.kv_cache import LayerCacheView, PackedLayerView
from infer.kernels import cpu_search, reference
from infer.kernels.launch import (
    KERNEL_ARGUMENT_ADDRESS_TYPE,
    KERNEL_ARGUMENT_FLOAT_TYPE,
    KERNEL_ARGUMENT_INTEGER_TYPE,
    KernelArguments,
    allocate_tensor,
    claim_work_item,
    float_pointer,
    int64_pointer,
    launch_kernel,
    llvm_intrinsic,
    make_argument_reader,
)
from infer.kernels.operands import Activation, RMSNormWeights
from infer.kernels.reference import Rotation
from infer.kernels.table import FastKernels
from infer.utils.jit import FASTMATH_KEEP_ORDER, FASTMATH_REASSOCIATE, njit

LOG2_E = np.float32(1.44269504)
# ln 2 is LN2_HIGH + LN2_LOW. LN2_HIGH has few significant bits, so LN2_HIGH times a small integer
# has no rounding error.
LN2_HIGH = np.float32(0.693359375)
LN2_LOW = np.float32(-2.12194440e-4)
# The coefficients of x^2 .. x^7 in the Taylor series of e^x about 0.
EXP_COEFFICIENTS = tuple(np.float32(1 / factorial) for factorial in (2, 6, 24, 120, 720, 5040))
# Adding this number to a small float32 rounds it to an integer. The integer is then in the lowest
# bits of the sum.
FLOAT32_ROUND_TO_INTEGER_ADDEND = np.float32(1.5 * 2**23)
EXP_UNDERFLOW = np.float32(-87)  # for x below this, `exp` returns 0


def make_bitcast(source_type: types.Type, result_type: types.Type) -> Callable:
    """Return a function for compiled code that reinterprets a number's bits as another type."""

    @llvm_intrinsic
    def bitcast(typing, value):
        def generate(context, builder, signature, values):
            return builder.bitcast(values[0], context.get_value_type(result_type))

        return result_type(source_type), generate

    return bitcast


bits_to_float = make_bitcast(types.int32, types.float32)
float_to_bits = make_bitcast(types.float32, types.int32)


@numba.njit(inline="always")
def order_preserving_bits(bits: np.int32) -> np.int32:
    """Map the bits of a float32 to an int32, so that the int32s have the same order as the floats.

    The function is its own inverse: applied to the result, it returns the bits of the float32.
    """
    return np.int32(bits ^ (np.int32(bits >> 31) & np.int32(0x7FFFFFFF)))


@numba.njit(inline="always")
def exp(x: np.float32) -> np.float32:
    """Return e^x for x from -87 to 88, with an error of one or two units in the last place.

    For x below -87 it returns 0. The compiler can vectorise this function, unlike numpy's exp.

    The caller must not be compiled with FASTMATH_REASSOCIATE. With this option the compiler would
    simplify x + FLOAT32_ROUND_TO_INTEGER_ADDEND - FLOAT32_ROUND_TO_INTEGER_ADDEND to x.
    """
    shifted = max(x, EXP_UNDERFLOW) * LOG2_E + FLOAT32_ROUND_TO_INTEGER_ADDEND
    n = shifted - FLOAT32_ROUND_TO_INTEGER_ADDEND  # x / ln 2, rounded to an integer
    r = (max(x, EXP_UNDERFLOW) - n * LN2_HIGH) - n * LN2_LOW
    # The lowest bits of `shifted` are n. Moved to the exponent bits of a float32, they give 2^n.
    power = bits_to_float(np.int32(float_to_bits(shifted) << 23) + np.int32(127 << 23))
    c = EXP_COEFFICIENTS
    tail = c[0] + r * (c[1] + r * (c[2] + r * (c[3] + r * (c[4] + r * c[5]))))
    value = (np.float32(1) + (r + r * r * tail)) * power
    return value if x >= EXP_UNDERFLOW else np.float32(0)


@njit
def copy_floats(source: int, destination: int, count: int) -> None:
    """Copy `count` float32 values from one address to another."""
    source_values = carray(float_pointer(source), count)
    values = carray(float_pointer(destination), count)
    for i in range(count):
        values[i] = source_values[i]


@njit(fastmath=FASTMATH_REASSOCIATE)
def rms_norm_row(x: np.ndarray, weight: np.ndarray, eps: float, out: np.ndarray) -> None:
    """Write the RMS norm of `x`, times `weight`, to `out`. `out` may be `x` itself."""
    total = np.float32(len(x) * eps)
    for d in range(len(x)):
        total += x[d] * x[d]
    factor = np.sqrt(np.float32(len(x)) / total)
    for d in range(len(x)):
        out[d] = x[d] * factor * weight[d]


@njit(fastmath=FASTMATH_KEEP_ORDER)
def gated_activation_row(gate_up: np.ndarray, linear: float, cubic: float, out: np.ndarray) -> None:
    """Write up * gate * sigmoid(linear * gate + cubic * gate^3) to the vector `out`.

    gate_up: (2 * MLP size,), the vector `gate` followed by the vector `up`
    """
    size = len(gate_up) // 2
    gate = gate_up[:size]
    up = gate_up[size:]
    for i in range(size):
        x = gate[i]
        y = min(max(x * (linear + cubic * x * x), EXP_UNDERFLOW), -EXP_UNDERFLOW)
        out[i] = x / (np.float32(1) + exp(-y)) * up[i]


class AddRMSNormArguments(KernelArguments):
    """Arguments of `add_rms_norm_kernel`."""

    _fields_ = [
        ("states", KERNEL_ARGUMENT_ADDRESS_TYPE),  # hidden states (num_rows, row_size)
        # (num_rows, row_size), multiplied by `scale` and added to the hidden states. The address 0
        # means that nothing is added.
        ("sublayer_output", KERNEL_ARGUMENT_ADDRESS_TYPE),
        ("weight", KERNEL_ARGUMENT_ADDRESS_TYPE),  # (row_size,) weight of the norm
        ("summed", KERNEL_ARGUMENT_ADDRESS_TYPE),  # output: states + scale * sublayer_output
        ("normed", KERNEL_ARGUMENT_ADDRESS_TYPE),  # output: the RMS norm of `summed`
        ("num_rows", KERNEL_ARGUMENT_INTEGER_TYPE),  # number of positions
        ("row_size", KERNEL_ARGUMENT_INTEGER_TYPE),  # hidden size
        ("scale", KERNEL_ARGUMENT_FLOAT_TYPE),
        ("eps", KERNEL_ARGUMENT_FLOAT_TYPE),
    ]


read_add_rms_norm_arguments = make_argument_reader(AddRMSNormArguments)


@njit
def add_rms_norm_kernel(address: int) -> None:
    """Add the output of a sublayer (attention or MLP) to hidden states; write the sum and the RMS
    norm of the sum.

    Without a sublayer output, only the RMS norm of the hidden states is written. Each work item is
    the row of one position.
    """
    args = read_add_rms_norm_arguments(address)
    row_size = args.row_size
    scale = args.scale
    weight = carray(float_pointer(args.weight), row_size)
    n = claim_work_item(address)
    while n < args.num_rows:
        row_offset = 4 * n * row_size  # offset in bytes, for float32
        states = carray(float_pointer(args.states + row_offset), row_size)
        if args.sublayer_output != 0:
            sublayer_output = carray(float_pointer(args.sublayer_output + row_offset), row_size)
            summed = carray(float_pointer(args.summed + row_offset), row_size)
            for d in range(row_size):
                summed[d] = states[d] + sublayer_output[d] * scale
            states = summed
        rms_norm_row(
            states, weight, args.eps, carray(float_pointer(args.normed + row_offset), row_size)
        )
        n = claim_work_item(address)


class GatedActivationArguments(KernelArguments):
    """Arguments of `gated_activation_kernel`."""

    _fields_ = [
        # (num_rows, row_size). The first half of each row is the gate, the second half is `up`.
        ("gate_up", KERNEL_ARGUMENT_ADDRESS_TYPE),
        ("out", KERNEL_ARGUMENT_ADDRESS_TYPE),  # (num_rows, row_size / 2)
        ("num_rows", KERNEL_ARGUMENT_INTEGER_TYPE),  # number of positions
        ("row_size", KERNEL_ARGUMENT_INTEGER_TYPE),  # 2 * MLP size
        # The activation function is x * sigmoid(linear * x + cubic * x^3).
        ("linear", KERNEL_ARGUMENT_FLOAT_TYPE),
        ("cubic", KERNEL_ARGUMENT_FLOAT_TYPE),
    ]


read_gated_activation_arguments = make_argument_reader(GatedActivationArguments)


@njit
def gated_activation_kernel(address: int) -> None:
    """Compute activation(gate) * up of a gated MLP. Each work item is the row of one position."""
    args = read_gated_activation_arguments(address)
    row_size = args.row_size
    n = claim_work_item(address)
    while n < args.num_rows:
        gate_up = carray(float_pointer(args.gate_up + 4 * n * row_size), row_size)
        out = carray(float_pointer(args.out + 2 * n * row_size), row_size // 2)
        gated_activation_row(gate_up, args.linear, args.cubic, out)
        n = claim_work_item(address)


class QKNormRopeWriteArguments(KernelArguments):
    """Arguments of `qk_norm_rope_write_kernel`."""

    _fields_ = [
        # (num_rows, layers, query_heads + 2 * key_heads, head_size): queries, keys and values.
        ("projected", KERNEL_ARGUMENT_ADDRESS_TYPE),
        # Output: normalised and rotated queries, (num_rows, layers, query_heads, head_size).
        ("queries", KERNEL_ARGUMENT_ADDRESS_TYPE),
        # (layers, query_heads + key_heads, head_size): weight of the norm of queries and keys. The
        # address 0 means no norm.
        ("weight", KERNEL_ARGUMENT_ADDRESS_TYPE),
        ("cosines", KERNEL_ARGUMENT_ADDRESS_TYPE),  # (num_rows, rotated_size)
        ("sines", KERNEL_ARGUMENT_ADDRESS_TYPE),  # (num_rows, rotated_size)
        # (num_rows,) int64: for each position, the index in the cache (slot) to which its key and
        # value are written.
        ("cache_slots", KERNEL_ARGUMENT_ADDRESS_TYPE),
        # (cache slots, key_heads * head_size): the cached keys of the first layer. The cache is an
        # array of such matrices: keys of layer 0, values of layer 0, keys of layer 1, and so on.
        ("keys", KERNEL_ARGUMENT_ADDRESS_TYPE),
        ("plane_bytes", KERNEL_ARGUMENT_INTEGER_TYPE),  # distance in bytes between keys and values
        ("num_rows", KERNEL_ARGUMENT_INTEGER_TYPE),  # number of positions
        ("layers", KERNEL_ARGUMENT_INTEGER_TYPE),  # number of layers
        ("query_heads", KERNEL_ARGUMENT_INTEGER_TYPE),  # number of query heads per layer
        ("key_heads", KERNEL_ARGUMENT_INTEGER_TYPE),  # number of key/value heads per layer
        ("head_size", KERNEL_ARGUMENT_INTEGER_TYPE),  # number of features of a head
        ("rotated_size", KERNEL_ARGUMENT_INTEGER_TYPE),  # features of a head that RoPE rotates
        ("eps", KERNEL_ARGUMENT_FLOAT_TYPE),
    ]


read_qk_norm_rope_write_arguments = make_argument_reader(QKNormRopeWriteArguments)


@njit(fastmath=FASTMATH_REASSOCIATE)
def qk_norm_rope_write_kernel(address: int) -> None:
    """Normalise and rotate (RoPE) queries and keys; write keys and values to the KV cache.

    The queries are written to a tensor. Each work item is a position.
    """
    args = read_qk_norm_rope_write_arguments(address)
    # The fields are copied to variables. Otherwise the compiler would read them again after every
    # write to memory, because it cannot exclude that the write changes the structure.
    num_rows = args.num_rows
    layers = args.layers
    rotated_size = args.rotated_size
    eps = args.eps
    query_heads = args.query_heads
    key_heads = args.key_heads
    head_size = args.head_size
    has_norm = args.weight != 0
    half = rotated_size // 2
    weight = carray(float_pointer(args.weight), (layers, query_heads + key_heads, head_size))
    cosines = carray(float_pointer(args.cosines), (num_rows, rotated_size))
    sines = carray(float_pointer(args.sines), (num_rows, rotated_size))
    cache_slots = carray(int64_pointer(args.cache_slots), num_rows)
    heads = np.empty((query_heads + 2 * key_heads, head_size), np.float32)
    n = claim_work_item(address)
    while n < num_rows:
        slot_offset = 4 * cache_slots[n] * key_heads * head_size  # offset in bytes, for float32
        for layer in range(layers):
            row = n * layers + layer
            keys = args.keys + 2 * layer * args.plane_bytes + slot_offset
            copy_floats(args.projected + 4 * row * heads.size, heads.ctypes.data, heads.size)
            for head in range(query_heads + key_heads):
                x = heads[head]
                if has_norm:
                    rms_norm_row(x, weight[layer, head], eps, x)
                destination = args.queries + 4 * (row * query_heads + head) * head_size
                if head >= query_heads:
                    destination = keys + 4 * (head - query_heads) * head_size
                out = carray(float_pointer(destination), head_size)
                for e in range(half):
                    out[e] = x[e] * cosines[n, e] + x[e + half] * sines[n, e]
                for e in range(half):
                    out[e + half] = x[e + half] * cosines[n, e + half] + x[e] * sines[n, e + half]
                for e in range(rotated_size, head_size):
                    out[e] = x[e]
            values = heads[query_heads + key_heads :]
            copy_floats(values.ctypes.data, keys + args.plane_bytes, key_heads * head_size)
        n = claim_work_item(address)


def rms_norm(states: torch.Tensor, norm: RMSNormWeights) -> torch.Tensor:
    """Implement `infer.kernels.reference.rms_norm` with a compiled kernel."""
    states = states.contiguous()
    row_size = states.shape[-1]
    num_rows = states.numel() // row_size
    out = allocate_tensor(tuple(states.shape))
    arguments = AddRMSNormArguments(
        states=states,
        weight=norm.float32_weight,
        normed=out,
        num_rows=num_rows,
        row_size=row_size,
        eps=norm.eps,
    )
    launch_kernel(add_rms_norm_kernel, arguments, num_rows, num_rows * row_size)
    return out


def add_rms_norm(
    states: torch.Tensor, sublayer_output: torch.Tensor, norm: RMSNormWeights, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement `infer.kernels.reference.add_rms_norm` with a compiled kernel."""
    states = states.contiguous()
    sublayer_output = sublayer_output.contiguous()
    num_rows, row_size = states.shape
    summed = allocate_tensor(tuple(states.shape))
    normed = allocate_tensor(tuple(states.shape))
    arguments = AddRMSNormArguments(
        states=states,
        sublayer_output=sublayer_output,
        weight=norm.float32_weight,
        summed=summed,
        normed=normed,
        num_rows=num_rows,
        row_size=row_size,
        scale=scale,
        eps=norm.eps,
    )
    launch_kernel(add_rms_norm_kernel, arguments, num_rows, num_rows * row_size)
    return summed, normed


def gated_activation(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Implement `infer.kernels.reference.gated_activation` with a compiled kernel."""
    if activation.coefficients is None:
        return reference.gated_activation(gate_up, activation)
    gate_up = gate_up.contiguous()
    num_rows, row_size = gate_up.shape
    out = allocate_tensor((num_rows, row_size // 2))
    linear, cubic = activation.coefficients
    arguments = GatedActivationArguments(
        gate_up=gate_up, out=out, num_rows=num_rows, row_size=row_size, linear=linear, cubic=cubic
    )
    launch_kernel(gated_activation_kernel, arguments, num_rows, num_rows * row_size)
    return out


def qk_norm_rope_write(
    projected: torch.Tensor,
    key_heads: int,
    qk_norm: RMSNormWeights | None,
    rotation: Rotation | None,
    layer_cache: LayerCacheView | PackedLayerView,
) -> torch.Tensor:
    """Implement `infer.kernels.reference.qk_norm_rope_write` with a compiled kernel."""
    if not isinstance(layer_cache, LayerCacheView):
        return reference.qk_norm_rope_write(projected, key_heads, qk_norm, rotation, layer_cache)
    projected = projected.contiguous()
    num_rows, layers, all_heads, head_size = projected.shape
    query_heads = all_heads - 2 * key_heads
    queries = allocate_tensor((num_rows, layers, query_heads, head_size))
    arguments = QKNormRopeWriteArguments(
        projected=projected,
        queries=queries,
        weight=None if qk_norm is None else qk_norm.float32_weight,
        num_rows=num_rows,
        layers=layers,
        query_heads=query_heads,
        key_heads=key_heads,
        head_size=head_size,
        eps=0.0 if qk_norm is None else qk_norm.eps,
    )

    def bind(rotation: Rotation | None, layer_cache: LayerCacheView) -> None:
        if rotation is not None:
            cosines, sines = rotation
            arguments.cosines = cosines.data_ptr()
            arguments.sines = sines.data_ptr()
            arguments.rotated_size = cosines.shape[-1]
        buffer = layer_cache.buffer
        arguments.cache_slots = layer_cache.slot_mapping.data_ptr()
        arguments.plane_bytes = 4 * buffer.stride(0)
        arguments.keys = buffer.data_ptr() + 2 * layer_cache.layer_index * arguments.plane_bytes

    bind(rotation, layer_cache)
    cycles = 2 * projected.numel()
    inputs = (rotation, layer_cache)
    launch_kernel(qk_norm_rope_write_kernel, arguments, num_rows, cycles, bind, inputs)
    return queries.flatten(1, 2)


CPU_FUNCTIONS_BY_OPERATION = {
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "gated_activation": gated_activation,
    "qk_norm_rope_write": qk_norm_rope_write,
    "best_first_search": cpu_search.best_first_search,
}
CPU_FAST_KERNELS = FastKernels(CPU_FUNCTIONS_BY_OPERATION)
