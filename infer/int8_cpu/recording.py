"""Recordings of passes over int8 layers: what a CUDA graph is on a GPU.

For few positions Python between twenty calls a layer takes as long as all that they compute. A
recording notes the calls of a pass once; other passes of the same shape then repeat them with their
own cache, masks and angles.
"""

import ctypes
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby

import torch
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from infer.attention.kv_cache import LayerWindow
from infer.kernels.launch import (
    ACTIVE,
    ADDRESS,
    INTEGER,
    Arguments,
    LoopCall,
    int64_pointer,
    loop_address,
    reader,
    run_and_record,
)
from infer.targets.lean import LeanDecoder, Masks, Rotations
from infer.utils.jit import njit

MAX_RECORDINGS = 32  # of a decoder
MAX_RECORDING_BYTES = 2**25  # of the memory of all of them
MAX_RECORDED_POSITIONS = (
    128  # of a pass that is recorded: longer ones take much longer than their calls
)


@intrinsic
def invoke(typing, function, a, b, c, d):
    """Call the function at an address with four words."""

    def generate(context, builder, signature, values):
        function_type = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 4)
        builder.call(builder.inttoptr(values[0], function_type.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.none(*[types.int64] * 5), generate


class CallListArguments(Arguments):
    """Arguments of `run_calls`."""

    _fields_ = [
        (
            "calls",
            ADDRESS,
        ),  # (count, 6) int64: of each a function, its words, and the address of its part counter
        ("count", INTEGER),
    ]


call_list_arguments = reader(CallListArguments)


@njit
def run_calls(address):
    """Call compiled loops one after the other, without Python between them."""
    a = call_list_arguments(address)
    calls = carray(int64_pointer(a.calls), (a.count, 6))
    for i in range(a.count):
        int64_pointer(calls[i, 5])[0] = 0
        invoke(calls[i, 0], calls[i, 1], calls[i, 2], calls[i, 3], calls[i, 4])


def merge_loop_calls(calls: list[Callable]) -> list[Callable]:
    """Return calls that do the same, of which each makes as many calls of compiled loops as follow
    each other."""
    merged = []
    for is_loop, group in groupby(calls, lambda call: isinstance(call, LoopCall)):
        if not is_loop:
            merged.extend(group)
            continue
        loops = list(group)
        rows = [(call.function, *call.words, ctypes.addressof(call.arguments)) for call in loops]
        table = torch.tensor(rows, dtype=torch.int64)
        arguments = CallListArguments(calls=table, count=len(rows))
        arguments.loops = loops  # their memory lasts as long as the table
        merged.append(
            LoopCall(loop_address(run_calls), (ctypes.addressof(arguments), 0, 0, 0), arguments)
        )
    return merged


class Recording:
    """The calls of a pass, and the memory that they work in.

    It holds every tensor whose address a call stores, and is of no use any more once one of these
    has moved (`moved`)."""

    def __init__(self, states: torch.Tensor, inputs: list[object]) -> None:
        """states: the input of the first layer. inputs: what other passes replace: rotations,
        masks, and a cache's layers."""
        with torch.inference_mode(False):  # written to by passes outside of inference mode too
            self.states = states.clone()
        self.inputs = inputs
        self.calls: list[Callable[[], object]] = []
        self.bindings: list[
            tuple[Callable, list[int]]
        ] = []  # what sets a call's arguments from which inputs
        self.held: dict[int, torch.Tensor] = {}  # one tensor of every storage
        self.outputs: dict[int, torch.Tensor] = {}
        # Memory for the results of a layer's calls, numbered in their order. Layers take turns with
        # two sets of buffers, because a layer reads what the one before it has written.
        self.layer_buffers: tuple[dict, dict] = {}, {}
        self.scratch: dict[str, torch.Tensor] = {}  # memory within operations, by name
        self.used_buffers = 0
        self.layer = 0

    @contextmanager
    def active(self):
        """Within the block, note all calls of this thread."""
        ACTIVE.recorder = self
        try:
            with torch.inference_mode(False), torch.no_grad():
                yield
        finally:
            ACTIVE.recorder = None
        self.inputs = []
        self.calls = merge_loop_calls(self.calls)
        self.addresses = self.current_addresses()

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, scratch: str | None
    ) -> torch.Tensor:
        """See `infer.kernels.launch.empty`."""
        size = torch.Size(shape).numel() * dtype.itemsize
        buffers = self.scratch
        key = scratch
        if scratch is None:
            buffers = self.layer_buffers[self.layer % 2]
            key = self.used_buffers
            self.used_buffers += 1
        if key not in buffers or len(buffers[key]) < size:
            buffers[key] = torch.empty(size, dtype=torch.uint8)
        return buffers[key][:size].view(dtype).view(shape)

    def note(
        self,
        call: Callable[[], object],
        tensors: list[torch.Tensor],
        bind: Callable | None,
        inputs: tuple,
    ) -> None:
        """See `infer.kernels.launch.Recorder`."""
        self.calls.append(call)
        for tensor in tensors:
            alias = tensor.detach()  # a parameter's own memory may be replaced through `.data`
            self.held.setdefault(alias.untyped_storage()._cdata, alias)
        if bind is None:
            return
        self.bindings.append((bind, [self.index_of(value) for value in inputs]))
        for value in inputs:
            if isinstance(value, LayerWindow) and value.index != self.layer:
                self.layer = value.index
                self.used_buffers = 0

    def index_of(self, value: object) -> int:
        """Return which of the inputs a value is."""
        return next(index for index, one in enumerate(self.inputs) if one is value)

    def keep(self, states: torch.Tensor) -> torch.Tensor:
        """Return a copy of a layer's output that later layers do not overwrite."""
        copy = torch.empty_like(states)
        run_and_record(lambda: copy.copy_(states), [copy, states])
        return copy

    def replay(self, states: torch.Tensor, inputs: list[object]) -> dict[int, torch.Tensor]:
        """Repeat the pass over other states and inputs; return copies of its outputs."""
        self.states.copy_(states)
        for bind, indices in self.bindings:
            bind(*[inputs[index] for index in indices])
        for call in self.calls:
            call()
        return {index: out.clone() for index, out in self.outputs.items()}

    def current_addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self.held.values()]

    def moved(self) -> bool:
        """Return whether a tensor has moved since its address was noted: `share_memory` moves a
        storage under all of its tensors."""
        return self.current_addresses() != self.addresses

    @property
    def bytes(self) -> int:
        """The memory that it works in."""
        return sum(
            len(buffer)
            for buffers in (*self.layer_buffers, self.scratch)
            for buffer in buffers.values()
        )


def inputs_of(rotations: Rotations, masks: Masks, memories: list[LayerWindow]) -> list[object]:
    """Return what a pass reads beside its states and the weights."""
    return [None, *rotations.values(), *masks.values(), *memories]


@dataclass(frozen=True)
class RecordedDecoder(LeanDecoder):
    """A decoder whose passes over few positions are recorded and repeated."""

    recordings: dict[tuple, Recording] = field(default_factory=dict)

    def run(self, states, rotations, masks, memories, tapped) -> dict[int, torch.Tensor]:
        """See `LeanDecoder.run`."""
        positions = len(states)
        # packed layers come one at a time
        if not isinstance(memories, list) or positions > MAX_RECORDED_POSITIONS:
            return super().run(states, rotations, masks, memories, tapped)
        first = memories[0]
        if len(first.slots) != positions:
            return super().run(states, rotations, masks, memories, tapped)
        key = first.rows, positions, tapped, first.stops is None, torch.get_num_threads()
        inputs = inputs_of(rotations, masks, memories)
        recording = self.recordings.pop(key, None)  # meanwhile it is no other thread's
        if recording is None or recording.moved():
            recording = Recording(states, inputs)
            with recording.active():
                arguments = recording.states, rotations, masks, memories, tapped
                recording.outputs = super().run(*arguments, recording.keep)
            outputs = {index: out.clone() for index, out in recording.outputs.items()}
        else:
            outputs = recording.replay(states, inputs)
        self.recordings[key] = recording
        self.drop_old_recordings()
        return outputs

    def drop_old_recordings(self) -> None:
        """Keep the recordings used last, within the bounds of their number and memory. Other
        threads may take recordings meanwhile."""
        kept_bytes = 0
        for number, (key, recording) in enumerate(reversed(list(self.recordings.items()))):
            kept_bytes += recording.bytes
            if number >= MAX_RECORDINGS or kept_bytes > MAX_RECORDING_BYTES:
                self.recordings.pop(key, None)
