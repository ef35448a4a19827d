"""Drafters in 8-bit integers, for decoding (`drafter.quantization=int8`): the layers of int8 targets with
weights rounded to nearest, without any texts. A drafter need not be exact: what rounding changes is
acceptance, never a text.
"""

import ctypes
from contextlib import suppress

import torch
from torch import nn

from infer.targets.int8 import Int8Linear, to_nearest


def rounded(linear: nn.Linear, digits: int = 1) -> Int8Linear:
    """Return what takes a linear layer's place; `digits` of its activations."""
    codes, scales = to_nearest(linear.weight.detach().float())
    return Int8Linear.of(linear, codes, scales.flatten(), torch.ones(linear.in_features), digits)


def quantise(drafter: nn.Module) -> None:
    """Put codes in the place of a float32 drafter's linear layers, in place; conditional heads stay."""
    head = drafter.conditional_head, drafter.confidence_head
    kept = {part for module in head if module is not None for part in module.modules()}
    for name, module in list(drafter.named_modules()):
        if type(module) is nn.Linear and module not in kept:
            drafter.set_submodule(name, rounded(module, 2 if name == "fc" else 1))
    drafter.quantised = True
    with suppress(OSError, AttributeError):  # loading leaves ten times what the codes take with the C library
        ctypes.CDLL(None).malloc_trim(0)
