"""Machine code for loops on the CPU, by numba."""

from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial

import numba
from numba import types

REORDERS = {
    "reassoc",
    "contract",
}  # sums may be taken in any order and multiplications joined with them
IN_ORDER = {"contract", "nnan", "nsz"}  # multiplications may be joined with sums; there is no NaN


def njit(function: Callable | None = None, *, fast: Collection[str] = ()) -> Callable:
    """Compile a function that needs no interpreter, and keep its machine code for the next process,
    beside the source or in the user's cache; where neither can be written, or the disk is full, it
    is compiled in every process anew. `fast`: what vectors of numbers need (LLVM's fast-math
    flags)."""
    if function is None:
        return partial(njit, fast=fast)
    options = {"nogil": True, "fastmath": set(fast), "error_model": "numpy"}
    try:
        compiled = numba.njit(cache=True, **options)(function)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        return numba.njit(**options)(function)
    cache = compiled._cache  # numba has no public way to miss a write
    save = cache.save_overload

    def save_if_there_is_room(*overload: object) -> None:
        with suppress(OSError):
            save(*overload)

    cache.save_overload = save_if_there_is_room
    return compiled


def address_of(compiled: object) -> int:
    """Return the address of a function of one word as C calls it; it is compiled where it was
    not."""
    compiled.compile((types.intp,))
    code = compiled.overloads[types.intp,]
    return code.library.get_pointer_to_function(code.fndesc.llvm_cfunc_wrapper_name)
