"""Machine code for loops on the CPU, by numba. Where it is not installed, such functions are ordinary Python ones: most
callers then have a tensor version to take."""

from collections.abc import Callable
from contextlib import suppress

try:
    import numba
except ImportError:  # infer runs without it, somewhat slower
    numba = None

AVAILABLE = numba is not None


def njit(function: Callable) -> Callable:
    """Compile a function that needs no interpreter, and keep its machine code for the next process, beside the source
    or in the user's cache; where neither can be written, or the disk is full, it is compiled in every process anew."""
    if numba is None:
        return function
    try:
        compiled = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        return numba.njit(nogil=True)(function)
    cache = compiled._cache  # numba has no public way to miss a write
    save = cache.save_overload

    def save_if_there_is_room(*overload: object) -> None:
        with suppress(OSError):
            save(*overload)

    cache.save_overload = save_if_there_is_room
    return compiled


__all__ = ["AVAILABLE", "njit"]
