"""Launching loops that numba compiled, from as many threads as torch has.

A compiled loop takes the address of a structure with named fields (`Arguments`). All threads of a
launch run the same function; each claims the next part of the work through an atomic counter, the
structure's first field, until no part is left.
"""

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from infer.utils.jit import address_of

ADDRESS = INTEGER = ctypes.c_int64
FLOAT = ctypes.c_float
MIN_PARALLEL_CYCLES = 6 * 10**4  # below, waking other threads takes longer than the loop
LOOP_PROTOTYPE = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)


@dataclass(frozen=True)
class LoopCall:
    """A call of a compiled loop: a function and its four arguments, int64."""

    function: int  # its address
    words: tuple[int, int, int, int]
    arguments: "Arguments"  # of the loop, which `words` point to

    def __call__(self) -> None:
        self.arguments.next_part = 0
        loop_function(self.function)(*self.words)


class Recorder(Protocol):
    """What wants to know of every call while it is active (`infer.int8_cpu.recording`)."""

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, scratch: str | None
    ) -> torch.Tensor:
        """Return memory, see `empty` below."""

    def note(
        self,
        call: Callable[[], object],
        tensors: list[torch.Tensor],
        bind: Callable | None,
        inputs: tuple,
    ) -> None:
        """Take note of a call, the tensors whose addresses it holds, and what `bind` must be given
        again if other inputs take the place of these."""


class ActiveRecorder(threading.local):
    """The recorder of this thread."""

    recorder: Recorder | None = None


ACTIVE = ActiveRecorder()


class Arguments(ctypes.Structure):
    """The arguments of a compiled loop; a subclass names them in `_fields_`."""

    _fields_ = [("next_part", INTEGER)]

    def __init__(self, **values: torch.Tensor | float | None) -> None:
        """Set fields: a tensor stands for its address, None for address 0. `tensors` are those
        whose addresses are among them."""
        super().__init__()
        self.tensors: list[torch.Tensor] = []
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                self.tensors.append(value)
                setattr(self, name, value.data_ptr())
            else:
                setattr(self, name, value or 0)


def reader(arguments: type[Arguments]) -> Callable:
    """Return a function for compiled code that reads the structure at an address; its result has
    the structure's fields as attributes."""
    names = [
        name for base in reversed(arguments.__mro__) for name, _ in vars(base).get("_fields_", ())
    ]
    kinds = [
        kind for base in reversed(arguments.__mro__) for _, kind in vars(base).get("_fields_", ())
    ]
    layout = {
        "names": names,
        "formats": [np.dtype(kind) for kind in kinds],
        "offsets": [getattr(arguments, name).offset for name in names],
        "itemsize": ctypes.sizeof(arguments),
    }
    record = numba.from_dtype(np.dtype(layout, align=True))

    @intrinsic
    def read_arguments(typing, address):
        def generate(context, builder, signature, values):
            return builder.inttoptr(values[0], context.get_value_type(record))

        return record(types.intp), generate

    return read_arguments


def pointer(kind: types.Type) -> Callable:
    """Return a function for compiled code that makes an address a pointer to numbers of a kind."""

    @intrinsic
    def point(typing, address):
        def generate(context, builder, signature, values):
            return builder.inttoptr(values[0], context.get_value_type(kind).as_pointer())

        return types.CPointer(kind)(types.intp), generate

    return point


float_pointer = pointer(types.float32)
int64_pointer = pointer(types.int64)


@intrinsic
def claim_part(typing, address):
    """Return the next part of a loop's work: the counter at an address, which is raised by one."""

    def generate(context, builder, signature, values):
        counter = builder.inttoptr(values[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", counter, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.intp), generate


@cache
def parallel_entry() -> int:
    """Return the address of the function that calls another from several threads, those of torch's
    matmuls: libgomp's entry for `omp parallel`. 0 where torch comes with another library."""
    function = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    return 0 if function is None else ctypes.cast(function, ctypes.c_void_p).value


loop_address = cache(address_of)
loop_function = cache(LOOP_PROTOTYPE)  # of an address


def launch(
    loop: object,
    arguments: Arguments,
    parts: int,
    cycles: int,
    bind: Callable | None = None,
    inputs: tuple = (),
) -> None:
    """Run a loop over its parts, on several threads where it takes that many cycles. What is
    computed for a part does not depend on which thread takes it. `bind(*inputs)`, if given, has set
    those arguments that belong to one pass."""
    address = loop_address(loop)
    memory = ctypes.addressof(arguments)
    threads = min(torch.get_num_threads(), parts)
    if cycles > MIN_PARALLEL_CYCLES and threads > 1 and parallel_entry():
        call = LoopCall(parallel_entry(), (address, memory, threads, 0), arguments)
    else:
        call = LoopCall(address, (memory, 0, 0, 0), arguments)
    run_and_record(call, arguments.tensors, bind, inputs)


def run_and_record(
    call: Callable[[], object],
    tensors: list[torch.Tensor],
    bind: Callable | None = None,
    inputs: tuple = (),
) -> None:
    """Make a call, and have the active recorder note it."""
    call()
    if ACTIVE.recorder is not None:
        ACTIVE.recorder.note(call, tensors, bind, inputs)


def empty(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, scratch: str | None = None
) -> torch.Tensor:
    """Return memory for the result of an operation; for what lasts within one operation only,
    `scratch` names it."""
    if ACTIVE.recorder is not None:
        return ACTIVE.recorder.empty(shape, dtype, scratch)
    return torch.empty(shape, dtype=dtype)
