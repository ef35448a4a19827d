"""Record the kernel calls of a forward pass, and replay them, as CUDA graphs do on a GPU.

In a forward pass of few positions through the int8 layers of a decoder, the Python code between the
kernel calls takes about as long as the kernels. A recording stores all kernel calls of a forward
pass. Later forward passes with the same shapes replay these calls, with new hidden states, cache
positions, masks and rotary angles.
"""

import ctypes
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import cast

import torch
from llvmlite import ir
from numba import carray, types

from infer.attention.kv_cache import LayerCacheView, PackedLayerView
from infer.kernels.launch import (
    ACTIVE_KERNEL_CALL_RECORDER,
    KERNEL_ARGUMENT_ADDRESS_TYPE,
    KERNEL_ARGUMENT_INTEGER_TYPE,
    KernelArguments,
    KernelCall,
    get_kernel_address,
    int64_pointer,
    llvm_intrinsic,
    make_argument_reader,
    run_and_record,
)
from infer.targets.kernel_decoder import KernelDecoder, MasksByLayerType, RotationsByLayerType
from infer.utils.jit import njit

MAX_INT8_CPU_CALL_RECORDINGS = 32  # maximum number of recordings that a decoder keeps
# maximum total size of the buffers in all recordings of a decoder
MAX_INT8_CPU_RECORDING_BYTES = 2**25
# Forward passes of more positions are not recorded, because their kernels take much longer than the
# Python code between the kernels.
MAX_RECORDED_INT8_CPU_POSITIONS = 128
INT64_FIELDS_PER_RECORDED_CALL = 6  # number of columns of `CallListArguments.calls`


@llvm_intrinsic
def call_function_address(typing, function, a, b, c, d):
    """Call the compiled function at the address `function` with the int64 arguments a, b, c, d."""

    def generate(context, builder, signature, values):
        function_type = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 4)
        builder.call(builder.inttoptr(values[0], function_type.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.none(*[types.int64] * 5), generate


class CallListArguments(KernelArguments):
    """Arguments of `call_list_kernel`."""

    _fields_ = [
        # (count, INT64_FIELDS_PER_RECORDED_CALL) int64, with a row for each call. The columns are
        # the address of the function, its four arguments, and the address of its work item counter.
        ("calls", KERNEL_ARGUMENT_ADDRESS_TYPE),
        ("count", KERNEL_ARGUMENT_INTEGER_TYPE),  # number of calls
    ]


read_call_list_arguments = make_argument_reader(CallListArguments)


@njit
def call_list_kernel(address: int) -> None:
    """Call compiled kernels one after the other, without Python code between the calls."""
    args = read_call_list_arguments(address)
    calls = carray(int64_pointer(args.calls), (args.count, INT64_FIELDS_PER_RECORDED_CALL))
    for i in range(args.count):
        int64_pointer(calls[i, 5])[0] = 0
        call_function_address(calls[i, 0], calls[i, 1], calls[i, 2], calls[i, 3], calls[i, 4])


def merge_kernel_calls(calls: list[Callable[[], object]]) -> list[Callable[[], object]]:
    """Merge consecutive calls of compiled kernels into single calls of `call_list_kernel`.

    Calls of other functions are returned unchanged, and the order of all calls is kept.
    """
    merged: list[Callable[[], object]] = []
    for is_kernel, group in groupby(calls, lambda call: isinstance(call, KernelCall)):
        if not is_kernel:
            merged.extend(group)
            continue
        kernel_calls = [cast(KernelCall, call) for call in group]
        table_rows = [
            (call.function_address, *call.call_arguments, ctypes.addressof(call.kernel_arguments))
            for call in kernel_calls
        ]
        table = torch.tensor(table_rows, dtype=torch.int64)
        arguments = CallListArguments(calls=table, count=len(table_rows))
        arguments.kernel_calls = kernel_calls  # keeps the memory to which the table points
        call_arguments = (ctypes.addressof(arguments), 0, 0, 0)
        merged.append(KernelCall(get_kernel_address(call_list_kernel), call_arguments, arguments))
    return merged


class Recording:
    """The kernel calls of a forward pass, and the memory that these calls read and write.

    A recording keeps references to all tensors whose addresses are stored in its calls. It must not
    be replayed after one of these tensors has moved to another address (`has_moved_tensors`).
    """

    def __init__(self, states: torch.Tensor, inputs: list[object]) -> None:
        """Prepare to record a forward pass.

        states: hidden states that the first layer reads
        inputs: the other inputs that differ between forward passes: rotary angles, masks, and views
            of the cache's layers
        """
        # A tensor that is cloned in inference mode could not be written outside inference mode.
        with torch.inference_mode(False):
            self.states = states.clone()
        self.inputs = inputs
        self.calls: list[Callable[[], object]] = []
        # Pairs (function that sets the arguments of a call before a replay, indices in `inputs` of
        # the function's arguments).
        self.bindings: list[tuple[Callable, list[int]]] = []
        # Key: id of a storage. Value: a tensor in this storage whose address is stored in a call.
        self.referenced_tensors: dict[int, torch.Tensor] = {}
        self.outputs: dict[int, torch.Tensor] = {}
        # Buffers for the results of the operations of a layer. The keys number the buffers in the
        # order of their use. Layers with even numbers use the first dict and layers with odd
        # numbers the second, because a layer reads the results of the layer before it.
        self.layer_buffers: tuple[dict, dict] = ({}, {})
        # Key: name of the scratch memory, see `infer.kernels.launch.allocate_tensor`.
        self.scratch_buffers: dict[str, torch.Tensor] = {}
        self.used_buffers = 0
        self.layer = 0

    @contextmanager
    def activate(self) -> Generator[None]:
        """Return a context manager. It records the kernel calls that this thread makes in the
        `with` block."""
        ACTIVE_KERNEL_CALL_RECORDER.recorder = self
        try:
            with torch.inference_mode(False), torch.no_grad():
                yield
        finally:
            ACTIVE_KERNEL_CALL_RECORDER.recorder = None
        self.inputs = []
        self.calls = merge_kernel_calls(self.calls)
        self.addresses = self.read_addresses()

    def allocate_tensor(
        self, shape: tuple[int, ...], dtype: torch.dtype, scratch: str | None
    ) -> torch.Tensor:
        """Implement `infer.kernels.launch.Recorder.allocate_tensor`."""
        size_bytes = torch.Size(shape).numel() * dtype.itemsize
        buffers: dict = self.scratch_buffers
        key: str | int | None = scratch
        if scratch is None:
            buffers = self.layer_buffers[self.layer % 2]
            key = self.used_buffers
            self.used_buffers += 1
        if key not in buffers or len(buffers[key]) < size_bytes:
            buffers[key] = torch.empty(size_bytes, dtype=torch.uint8)
        return buffers[key][:size_bytes].view(dtype).view(shape)

    def record_call(
        self,
        call: Callable[[], object],
        tensors: list[torch.Tensor],
        bind: Callable | None,
        inputs: tuple,
    ) -> None:
        """Implement `infer.kernels.launch.Recorder.record_call`."""
        self.calls.append(call)
        for tensor in tensors:
            # The alias always refers to the recorded memory. The tensor itself may be a parameter,
            # which refers to other memory after an assignment to its `.data`.
            alias = tensor.detach()
            self.referenced_tensors.setdefault(alias.untyped_storage()._cdata, alias)
        if bind is None:
            return
        self.bindings.append((bind, [self.find_input_index(value) for value in inputs]))
        for value in inputs:
            if isinstance(value, LayerCacheView) and value.layer_index != self.layer:
                self.layer = value.layer_index
                self.used_buffers = 0

    def find_input_index(self, value: object) -> int:
        """Return the index of `value` in `self.inputs`, compared by identity."""
        return next(index for index, item in enumerate(self.inputs) if item is value)

    def copy_output(self, states: torch.Tensor) -> torch.Tensor:
        """Copy the output of a layer to memory that later layers do not overwrite."""
        copy = torch.empty_like(states)
        run_and_record(lambda: copy.copy_(states), [copy, states])
        return copy

    def replay(self, states: torch.Tensor, inputs: list[object]) -> dict[int, torch.Tensor]:
        """Repeat the recorded forward pass with new hidden states and inputs.

        states, inputs: as for `__init__`, with the same shapes

        Returns a dict whose keys are layer indices and whose values are copies of the outputs.
        """
        self.states.copy_(states)
        for bind, indices in self.bindings:
            bind(*[inputs[index] for index in indices])
        for call in self.calls:
            call()
        return {index: out.clone() for index, out in self.outputs.items()}

    def read_addresses(self) -> list[int]:
        """Return the current addresses of the tensors whose addresses are stored in calls."""
        return [tensor.data_ptr() for tensor in self.referenced_tensors.values()]

    def has_moved_tensors(self) -> bool:
        """Return whether the address of a tensor that the calls use has changed since the
        recording.

        For example, `share_memory` moves tensors to other memory.
        """
        return self.read_addresses() != self.addresses

    @property
    def buffer_bytes(self) -> int:
        """The size of all buffers of this recording, in bytes."""
        total = 0
        for buffers in (*self.layer_buffers, self.scratch_buffers):
            total += sum(len(buffer) for buffer in buffers.values())
        return total


def collect_inputs(
    rotations: RotationsByLayerType, masks: MasksByLayerType, layer_views: list[LayerCacheView]
) -> list[object]:
    """Return those inputs of a forward pass that differ between the recording and a replay.

    These are all inputs except hidden states and weights. The first input is None, which is the
    rotation of layers without rotary embeddings.
    """
    return [None, *rotations.values(), *masks.values(), *layer_views]


@dataclass(frozen=True)
class RecordingDecoder(KernelDecoder):
    """A decoder that records forward passes of few positions. It replays a recording when a forward
    pass has the same shapes."""

    # Key: shapes and settings of a forward pass. Value: its recording. The keys are in the order of
    # their last use.
    recordings: dict[tuple, Recording] = field(default_factory=dict)

    def run(
        self,
        states: torch.Tensor,
        rotations: RotationsByLayerType,
        masks: MasksByLayerType,
        layer_views: Iterable[LayerCacheView | PackedLayerView],
        output_layer_ids: tuple[int, ...],
        keep_output: Callable[[torch.Tensor], torch.Tensor] = lambda states: states,
    ) -> dict[int, torch.Tensor]:
        """Implement `KernelDecoder.run`: record a forward pass, or replay the recording of a
        forward pass with the same shapes.

        Some forward passes are not recorded: those of many positions, of packed sequences, and
        those that do not write each new position to one cache slot. The outputs of recorded forward
        passes are copies, which later forward passes do not overwrite.
        """
        positions = len(states)
        # For packed sequences, layer_views is an iterator and not a list. Such forward passes are
        # not recorded.
        if not isinstance(layer_views, list) or positions > MAX_RECORDED_INT8_CPU_POSITIONS:
            return super().run(states, rotations, masks, layer_views, output_layer_ids, keep_output)
        layer_views = cast(list[LayerCacheView], layer_views)
        first = layer_views[0]
        if len(first.slot_mapping) != positions:
            return super().run(states, rotations, masks, layer_views, output_layer_ids, keep_output)

        key = (
            first.batch_size,
            positions,
            output_layer_ids,
            first.cu_seqlens is None,
            torch.get_num_threads(),
        )
        inputs = collect_inputs(rotations, masks, layer_views)
        # The recording is removed from the dict during its use, so that no other thread uses it.
        recording = self.recordings.pop(key, None)
        if recording is None or recording.has_moved_tensors():
            recording = Recording(states, inputs)
            with recording.activate():
                arguments = recording.states, rotations, masks, layer_views, output_layer_ids
                recording.outputs = super().run(*arguments, recording.copy_output)
            outputs = {index: out.clone() for index, out in recording.outputs.items()}
        else:
            outputs = recording.replay(states, inputs)
        self.recordings[key] = recording
        self.drop_old_recordings()
        return outputs

    def drop_old_recordings(self) -> None:
        """Drop the least recently used recordings until the remaining ones are within the limits.

        The limits are MAX_INT8_CPU_CALL_RECORDINGS recordings, and MAX_INT8_CPU_RECORDING_BYTES for
        all of them. Other threads may remove recordings from the dict at the same time.
        """
        total_bytes = 0
        most_recent_first = reversed(list(self.recordings.items()))
        for number, (key, recording) in enumerate(most_recent_first):
            total_bytes += recording.buffer_bytes
            if number >= MAX_INT8_CPU_CALL_RECORDINGS or total_bytes > MAX_INT8_CPU_RECORDING_BYTES:
                self.recordings.pop(key, None)
