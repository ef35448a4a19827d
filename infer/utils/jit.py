"""Machine code for loops on the CPU, by numba. Where it is not installed, such functions are ordinary Python ones: most
callers then have a tensor version to take."""

try:
    from numba import njit
except ImportError:  # infer runs without it, somewhat slower

    def njit(*args, **options):
        return lambda function: function

    AVAILABLE = False
else:
    AVAILABLE = True

__all__ = ["AVAILABLE", "njit"]
