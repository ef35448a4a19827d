"""Compiled passes over tensors of few different shapes, with a fallback where compiling does not work."""

import warnings
from collections.abc import Callable

import torch

PROGRAMS = 64  # shapes of one function that are compiled at most; torch runs further ones uncompiled


class Program:
    """A function of tensors under torch.compile, with CUDA graphs on CUDA. Where compiling fails, it warns once and
    calls the function itself from then on."""

    def __init__(self, function: Callable[..., tuple[torch.Tensor, ...]], device: torch.device) -> None:
        self.function = function
        self.mode = "reduce-overhead" if device.type == "cuda" else None
        self.compiled = torch.compile(function, dynamic=False, mode=self.mode)

    def __call__(self, *arguments: object) -> tuple[torch.Tensor, ...]:
        if self.compiled is None:
            return self.function(*arguments)
        try:
            with torch._dynamo.config.patch(recompile_limit=PROGRAMS):
                results = self.compiled(*arguments)
        except Exception as error:
            warnings.warn(f"compile=true does not work here, decoding goes on without it: {error}", stacklevel=2)
            self.compiled = None
            return self.function(*arguments)
        # the next replay of the CUDA graph overwrites these
        return tuple(result.clone() for result in results) if self.mode else results


def padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the tensor padded with rows of zeros at its end, up to `rows` rows."""
    if len(tensor) == rows:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])])
