"""Launch compiled CPU kernels on as many threads as PyTorch uses.

A kernel is a function that numba compiles. Its argument is the address of a structure with named
fields (`KernelArguments`). All threads of a launch run the same function. The work is divided into
work items, and each thread takes the next work item until none is left. The first field of the
structure is an atomic counter, the index of the next work item.
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

# ctypes types for the fields of a `KernelArguments` structure.
KERNEL_ARGUMENT_ADDRESS_TYPE = ctypes.c_int64
KERNEL_ARGUMENT_INTEGER_TYPE = ctypes.c_int64
KERNEL_ARGUMENT_FLOAT_TYPE = ctypes.c_float

# A kernel that is estimated to take fewer CPU cycles runs on one thread, because it takes less time
# than waking other threads.
MIN_CYCLES_FOR_PARALLEL_CPU_KERNEL = 6 * 10**4
KERNEL_PROTOTYPE = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)


class Recorder(Protocol):
    """An object that records the kernel calls of a forward pass, so that they can be replayed.

    A recorder is active in one thread and records only the calls of this thread. The implementation
    is `infer.int8_cpu.recording.Recording`.
    """

    def allocate_tensor(
        self, shape: tuple[int, ...], dtype: torch.dtype, scratch: str | None
    ) -> torch.Tensor:
        """Return an uninitialised tensor in memory that belongs to the recording.

        scratch: see the function `allocate_tensor` of this module
        """
        ...

    def record_call(
        self,
        call: Callable[[], object],
        tensors: list[torch.Tensor],
        bind: Callable | None,
        inputs: tuple,
    ) -> None:
        """Record a call that was made during a forward pass.

        call: a function without arguments that repeats the call
        tensors: the tensors whose addresses are stored in the call
        bind: a function that sets the arguments of the call that differ between forward passes. A
            replay calls it with the new values of `inputs`. None if there are no such arguments.
        inputs: the arguments of `bind` in the recorded forward pass
        """
        ...


class ActiveRecorder(threading.local):
    """Thread-local storage for the recorder that is active in the current thread, if any."""

    recorder: Recorder | None = None


ACTIVE_KERNEL_CALL_RECORDER = ActiveRecorder()


class KernelArguments(ctypes.Structure):
    """A C structure with the arguments of a compiled kernel.

    Each kernel has a subclass, whose `_fields_` are the arguments of the kernel.
    """

    _fields_ = [("next_work_item", KERNEL_ARGUMENT_INTEGER_TYPE)]

    def __init__(self, **values: torch.Tensor | float | None) -> None:
        """Set the fields with the given names. A tensor is stored as its address, and None as 0.

        `self.tensors` keeps references to the tensors, so that their memory is not freed.
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
    """A recorded call of a compiled function with int64 arguments. The call can be repeated."""

    function_address: int
    call_arguments: tuple[int, int, int, int]
    # The structure whose address is one of the `call_arguments`. This field keeps the structure
    # from being freed.
    kernel_arguments: KernelArguments

    def __call__(self) -> None:
        self.kernel_arguments.next_work_item = 0
        get_kernel_function(self.function_address)(*self.call_arguments)


def llvm_intrinsic(generator: Callable) -> Callable[..., Any]:
    """Convert a function that generates LLVM code to a function that compiled code can call.

    This is numba's `intrinsic`, with a type annotation. The function returned has the arguments of
    the generator, without the first argument `typing`.
    """
    return cast(Callable[..., Any], intrinsic(generator))


def make_argument_reader(arguments_class: type[KernelArguments]) -> Callable[[int], Any]:
    """Return a function that gives compiled code access to the arguments of a kernel.

    The function takes the address of a structure of type `arguments_class`. It returns an object
    whose attributes are the fields of this structure.
    """
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
    """Return a function with which compiled code converts an int64 address to a typed pointer.

    number_type: type of the numbers in memory at the address
    """

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
    """Return the index of the next work item, which the calling thread must then compute.

    address: address of the kernel's arguments, which begin with the work item counter

    The counter is incremented atomically.
    """

    def generate(context, builder, signature, values):
        counter = builder.inttoptr(values[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", counter, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.intp), generate


@cache
def find_gomp_parallel_address() -> int:
    """Return the address of the libgomp function `GOMP_parallel`, or 0 if libgomp is not loaded.

    `GOMP_parallel` runs a function on several threads, the same that PyTorch uses for matmuls.
    libgomp is not loaded if PyTorch uses another OpenMP library.
    """
    function = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    if function is None:
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


get_kernel_address = cache(c_function_address)  # returns the address of a compiled function
get_kernel_function = cache(KERNEL_PROTOTYPE)  # makes the function at an address callable


def launch_kernel(
    kernel: object,
    arguments: KernelArguments,
    work_items: int,
    cycles: int,
    update_arguments: Callable | None = None,
    inputs: tuple = (),
) -> None:
    """Run a compiled kernel, and record the call if a recorder is active in this thread.

    work_items: number of parts into which the kernel divides its work
    cycles: estimated number of CPU cycles that the kernel takes on one thread. If it is larger than
        MIN_CYCLES_FOR_PARALLEL_CPU_KERNEL, several threads are used. The results do not depend on
        the number of threads.
    update_arguments, inputs: see `Recorder.record_call`
    """
    address = get_kernel_address(kernel)
    arguments_address = ctypes.addressof(arguments)
    threads = min(torch.get_num_threads(), work_items)
    if cycles > MIN_CYCLES_FOR_PARALLEL_CPU_KERNEL and threads > 1 and find_gomp_parallel_address():
        call_arguments = (address, arguments_address, threads, 0)
        call = KernelCall(find_gomp_parallel_address(), call_arguments, arguments)
    else:
        call = KernelCall(address, (arguments_address, 0, 0, 0), arguments)
    run_and_record(call, arguments.tensors, update_arguments, inputs)


def run_and_record(
    call: Callable[[], object],
    tensors: list[torch.Tensor],
    bind: Callable | None = None,
    inputs: tuple = (),
) -> None:
    """Make a call, and record it if a recorder is active in this thread.

    call, tensors, bind, inputs: see `Recorder.record_call`
    """
    call()
    if ACTIVE_KERNEL_CALL_RECORDER.recorder is not None:
        ACTIVE_KERNEL_CALL_RECORDER.recorder.record_call(call, tensors, bind, inputs)


def allocate_tensor(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, scratch: str | None = None
) -> torch.Tensor:
    """Return an uninitialised tensor.

    If a recorder is active in this thread, the tensor is in memory that belongs to the recording.

    scratch: None for the result of an operation; a name for a tensor that is only used within an
        operation. A recording uses the same memory for all scratch tensors of the same name.
    """
    if ACTIVE_KERNEL_CALL_RECORDER.recorder is not None:
        return ACTIVE_KERNEL_CALL_RECORDER.recorder.allocate_tensor(shape, dtype, scratch)
    return torch.empty(shape, dtype=dtype)
