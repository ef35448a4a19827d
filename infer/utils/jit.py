"""Machine code for loops on the CPU, by numba. Where it is not installed, such functions are ordinary Python ones: most
callers then have a tensor version to take."""

from collections.abc import Callable

try:
    import numba
except ImportError:  # infer runs without it, somewhat slower
    numba = None

AVAILABLE = numba is not None


def njit(function: Callable) -> Callable:
    """Compile a function that needs no interpreter, and keep its machine code for the next process, beside the source
    or in the user's cache; where neither can be written it is compiled in every process anew."""
    if numba is None:
        return function
    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        return numba.njit(nogil=True)(function)


__all__ = ["AVAILABLE", "njit"]
