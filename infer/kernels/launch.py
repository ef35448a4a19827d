"""Launching compiled CPU kernels on as many threads as PyTorch uses.

A kernel is a numba function that takes the address of a structure with named fields
(`KernelArguments`). All threads of a launch run the same function; each claims work items through
an atomic counter, the structure's first field, until none is left.
"""

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, cast

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from infer.utils.jit import c_function_address

# Types of the fields of `KernelArguments`.
KERNEL_ARGUMENT_ADDRESS_TYPE = ctypes.c_int64
KERNEL_ARGUMENT_INTEGER_TYPE = ctypes.c_int64
KERNEL_ARGUMENT_FLOAT_TYPE = ctypes.c_float

MIN_CYCLES_FOR_PARALLEL_CPU_KERNEL = (
    6 * 10**4
)  # for less work, waking other threads takes longer than the kernel
KERNEL_PROTOTYPE = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)


class Recorder(Protocol):
    """Records the kernel calls of a pass while it is active (`infer.int8_cpu.recording`)."""

    def allocate_tensor(
        self, shape: tuple[int, ...], dtype: torch.dtype, scratch: str | None
    ) -> torch.Tensor:
        """Return uninitialised memory; see the function `allocate_tensor` below."""
        ...

    def record_call(
        self,
        call: Callable[[], object],
        tensors: list[torch.Tensor],
        bind: Callable | None,
        inputs: tuple,
    ) -> None:
        """Record a call and the tensors whose addresses it stores.

        `bind(*inputs)` has set the arguments that depend on the inputs of the pass; a replay calls
        it again with the inputs of the new pass.
        """
        ...


class ActiveRecorder(threading.local):
    """The recorder that is active in this thread."""

    recorder: Recorder | None = None


ACTIVE_KERNEL_CALL_RECORDER = ActiveRecorder()


class KernelArguments(ctypes.Structure):
    """The arguments of a compiled kernel. A subclass declares them in `_fields_`."""

    _fields_ = [("next_work_item", KERNEL_ARGUMENT_INTEGER_TYPE)]

    def __init__(self, **values: torch.Tensor | float | None) -> None:
        """Set fields: a tensor is stored as its address, None as 0.

        The tensors are kept in `self.tensors`, so that their memory is not freed.
        """
        super().__init__()
        self.tensors: list[torch.Tensor] = []
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                self.tensors.append(value)
                setattr(self, name, value.data_ptr())
            else:
                setattr(self, name, value or 0)


@dataclass(frozen=True)
class KernelCall:
    """A call of a compiled function with four int64 arguments."""

    function_address: int
    call_arguments: tuple[int, int, int, int]
    kernel_arguments: KernelArguments  # the structure that `call_arguments` points to

    def __call__(self) -> None:
        self.kernel_arguments.next_work_item = 0
        get_kernel_function(self.function_address)(*self.call_arguments)


def llvm_intrinsic(generator: Callable) -> Callable[..., Any]:
    """Make a function for compiled code from a generator of LLVM code (numba's `intrinsic`).

    Compiled code calls it without the generator's first argument, `typing`.
    """
    return cast(Callable[..., Any], intrinsic(generator))


def make_argument_reader(arguments_class: type[KernelArguments]) -> Callable[[int], Any]:
    """Return a function for compiled code that reads the structure at an address. Its result has
    the fields of the structure as attributes."""
    fields = []
    for base in reversed(arguments_class.__mro__):
        fields += vars(base).get("_fields_", ())
    layout = {
        "names": [name for name, _ in fields],
        "formats": [np.dtype(field_type) for _, field_type in fields],
        "offsets": [getattr(arguments_class, name).offset for name, _ in fields],
        "itemsize": ctypes.sizeof(arguments_class),
    }
    record = numba.from_dtype(np.dtype(layout, align=True))

    @llvm_intrinsic
    def read_arguments(typing, address):
        def generate(context, builder, signature, values):
            return builder.inttoptr(values[0], context.get_value_type(record))

        return record(types.intp), generate

    return read_arguments


def make_pointer_cast(number_type: types.Type) -> Callable[[int], Any]:
    """Return a function for compiled code that converts an address to a pointer to numbers of a
    type."""

    @llvm_intrinsic
    def cast_to_pointer(typing, address):
        def generate(context, builder, signature, values):
            return builder.inttoptr(values[0], context.get_value_type(number_type).as_pointer())

        return types.CPointer(number_type)(types.intp), generate

    return cast_to_pointer


float_pointer = make_pointer_cast(types.float32)
int64_pointer = make_pointer_cast(types.int64)


@llvm_intrinsic
def claim_work_item(typing, address):
    """Return the index of the next work item: the counter at an address, which is incremented."""

    def generate(context, builder, signature, values):
        counter = builder.inttoptr(values[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", counter, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.intp), generate


@cache
def find_openmp_parallel() -> int:
    """Return the address of libgomp's entry for `omp parallel`, or 0 if PyTorch uses another
    OpenMP library.

    It calls a function from several threads; these are the threads of PyTorch's own matmuls.
    """
    function = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    if function is None:
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


get_kernel_address = cache(c_function_address)  # of a compiled function
get_kernel_function = cache(KERNEL_PROTOTYPE)  # of an address


def launch_kernel(
    kernel: object,
    arguments: KernelArguments,
    work_items: int,
    cycles: int,
    bind: Callable | None = None,
    inputs: tuple = (),
) -> None:
    """Run a compiled kernel over its work items, and record the call if a recorder is active.

    Several threads are used if the kernel takes more than MIN_CYCLES_FOR_PARALLEL_CPU_KERNEL. The result for a
    work item does not depend on the thread that computes it.

    cycles: an estimate of the CPU cycles that the kernel takes on one thread. bind: has set, as
    `bind(*inputs)`, the arguments that differ from pass to pass; see `Recorder.record_call`.
    """
    address = get_kernel_address(kernel)
    arguments_address = ctypes.addressof(arguments)
    threads = min(torch.get_num_threads(), work_items)
    if cycles > MIN_CYCLES_FOR_PARALLEL_CPU_KERNEL and threads > 1 and find_openmp_parallel():
        call_arguments = (address, arguments_address, threads, 0)
        call = KernelCall(find_openmp_parallel(), call_arguments, arguments)
    else:
        call = KernelCall(address, (arguments_address, 0, 0, 0), arguments)
    run_and_record(call, arguments.tensors, bind, inputs)


def run_and_record(
    call: Callable[[], object],
    tensors: list[torch.Tensor],
    bind: Callable | None = None,
    inputs: tuple = (),
) -> None:
    """Make a call, and record it if a recorder is active. See `Recorder.record_call`."""
    call()
    if ACTIVE_KERNEL_CALL_RECORDER.recorder is not None:
        ACTIVE_KERNEL_CALL_RECORDER.recorder.record_call(call, tensors, bind, inputs)


def allocate_tensor(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, scratch: str | None = None
) -> torch.Tensor:
    """Return uninitialised memory for the result of an operation.

    scratch: a name for memory that is used within one operation only; a recording uses the same
    memory for all scratch tensors of that name.
    """
    if ACTIVE_KERNEL_CALL_RECORDER.recorder is not None:
        return ACTIVE_KERNEL_CALL_RECORDER.recorder.allocate_tensor(shape, dtype, scratch)
    return torch.empty(shape, dtype=dtype)
