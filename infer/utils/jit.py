"""Compile CPU loops to machine code with numba."""

from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Any

import numba
from numba import types

# LLVM fast-math flags. "reassoc" lets the compiler compute sums in any order. "contract" lets it
# fuse a multiplication and an addition. "nnan" lets it assume that there is no NaN. "nsz" lets it
# ignore the sign of zero.
FASTMATH_REASSOCIATE = {"reassoc", "contract"}
FASTMATH_KEEP_ORDER = {"contract", "nnan", "nsz"}


def njit(function: Callable | None = None, *, fastmath: Collection[str] = ()) -> Any:
    """Compile a function with `numba.njit` (without the GIL), and cache the machine code on disk.
    Use it as a decorator, `@njit` or `@njit(fastmath=...)`.

    function: the function; None if the decorator is used with arguments
    fastmath: LLVM fast-math flags. The compiler vectorises sums only with FASTMATH_REASSOCIATE

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

    # numba has no public option to ignore errors when it writes to the cache.
    cache = compiled._cache
    save_overload = cache.save_overload

    def save_overload_if_possible(*overload: object) -> None:
        with suppress(OSError):
            save_overload(*overload)

    cache.save_overload = save_overload_if_possible
    return compiled


def c_function_address(compiled: Any) -> int:
    """Return the address at which C code can call a function that `njit` has compiled. The function
    must take one argument of numba type `intp` (an integer as wide as a pointer).

    If the function has not been compiled for this type yet, it is compiled now.
    """
    compiled.compile((types.intp,))
    overload = compiled.overloads[types.intp,]
    return overload.library.get_pointer_to_function(overload.fndesc.llvm_cfunc_wrapper_name)
