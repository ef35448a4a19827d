"""Compilation of CPU loops to machine code with numba."""

from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Any

import numba
from numba import types

# LLVM fast-math flags. "reassoc": sums may be computed in any order. "contract": a multiplication
# and an addition may become one fused operation. "nnan": there is no NaN. "nsz": the sign of zero
# does not matter.
FASTMATH_REASSOCIATE = {"reassoc", "contract"}
FASTMATH_KEEP_ORDER = {"contract", "nnan", "nsz"}


def njit(function: Callable | None = None, *, fastmath: Collection[str] = ()) -> Any:
    """Compile a function without the Python interpreter, and cache its machine code on disk.

    fastmath: LLVM fast-math flags, which vectorisation of sums needs

    Usable as `@njit` and as `@njit(fastmath=...)`. The cache is next to the source file or in the
    user's cache folder. If neither is writable, or the disk is full, every process compiles the
    function again.
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

    cache = compiled._cache  # numba has no public option to ignore failed writes
    save_overload = cache.save_overload

    def save_overload_if_possible(*overload: object) -> None:
        with suppress(OSError):
            save_overload(*overload)

    cache.save_overload = save_overload_if_possible
    return compiled


def c_function_address(compiled: Any) -> int:
    """Return the address of the C function of a compiled function with one `intp` argument.

    The function is compiled for that argument if it was not yet.
    """
    compiled.compile((types.intp,))
    overload = compiled.overloads[types.intp,]
    return overload.library.get_pointer_to_function(overload.fndesc.llvm_cfunc_wrapper_name)
