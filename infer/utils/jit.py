"""Compilation of CPU loops to machine code with numba."""

from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Any

import numba
from numba import types

# LLVM fast-math flags. "reassoc" allows sums to be computed in any order. "contract" allows a
# multiplication and an addition to become one fused operation. "nnan" promises that there is no
# NaN. "nsz" promises that the sign of zero does not matter.
FASTMATH_REASSOCIATE = {"reassoc", "contract"}
FASTMATH_KEEP_ORDER = {"contract", "nnan", "nsz"}


def njit(function: Callable | None = None, *, fastmath: Collection[str] = ()) -> Any:
    """Compile a function to machine code that does not use the Python interpreter, and cache the
    machine code on disk.

    function: the function; None if `njit` is used with arguments, as `@njit(fastmath=...)`
    fastmath: LLVM fast-math flags, which the vectorisation of sums needs

    The cache is next to the source file or in the user's cache folder. If neither is writable, or
    if the disk is full, every process compiles the function again.
    """
    if function is None:
        return partial(njit, fastmath=fastmath)
    options: dict[str, Any] = {"nogil": True, "fastmath": set(fastmath), "error_model": "numpy"}
    try:
        compiled: Any = numba.njit(cache=True, **options)(function)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        return numba.njit(**options)(function)

    cache = compiled._cache  # numba has no public option to ignore failed cache writes
    save_overload = cache.save_overload

    def save_overload_if_possible(*overload: object) -> None:
        with suppress(OSError):
            save_overload(*overload)

    cache.save_overload = save_overload_if_possible
    return compiled


def c_function_address(compiled: Any) -> int:
    """Return the address of the C function of a function that `njit` has compiled. The function
    must take one argument, which has the numba type `intp`.

    If the function was not compiled for that type yet, it is compiled now.
    """
    compiled.compile((types.intp,))
    overload = compiled.overloads[types.intp,]
    return overload.library.get_pointer_to_function(overload.fndesc.llvm_cfunc_wrapper_name)
