"""The table of operations: which implementation of each operation runs on a device.

This is the only place that selects a fast version.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pkgutil import resolve_name
from typing import Any

import torch

from infer.kernels import reference
from infer.kernels.reference_search import search_tree_by_depth

# Takes an operation and a device; returns how its results differ from the reference, or "".
OperationCheck = Callable[[Callable, torch.device], str]


@dataclass(frozen=True)
class Kernels:
    """One implementation of every operation. `infer.kernels.reference` documents the operations."""

    rms_norm: Callable
    add_rms_norm: Callable
    qk_norm_rope_write: Callable
    attend: Callable
    attention: Callable
    gated_activation: Callable
    linear: Callable
    argmax_head: Callable
    best_first_search: Callable
    # Whether the batch rows of a pass may have different numbers of positions
    # (`DraftTree.node_mask`).
    supports_ragged: bool = False
    # "module:class" of the decoder that replaces `KernelDecoder` if all layers are recordable.
    recording_decoder: str | None = None


@dataclass(frozen=True)
class FastKernels:
    """The fast versions of some operations for one device and dtype of weights."""

    operations: Mapping[str, Callable]  # by the name of a field of `Kernels`
    # Checks that replace those of `infer.kernels.validation`, by operation.
    checks: Mapping[str, OperationCheck] = field(default_factory=dict)
    # Other fields of `Kernels`. They are only set if every fast version passes its check.
    features: Mapping[str, Any] = field(default_factory=dict)


REFERENCE_KERNELS = Kernels(
    rms_norm=reference.rms_norm,
    add_rms_norm=reference.add_rms_norm,
    qk_norm_rope_write=reference.qk_norm_rope_write,
    attend=reference.attend,
    attention=reference.attention,
    gated_activation=reference.gated_activation,
    linear=reference.linear,
    argmax_head=reference.argmax_head,
    best_first_search=search_tree_by_depth,
)

# Device type and dtype of the weights (None: any dtype) -> "module:name" of a `FastKernels`.
# The dtype torch.int8 stands for quantised weights, whose activations are float32.
FAST_KERNELS = {
    ("cuda", None): "infer.kernels.cuda:CUDA_FAST_KERNEL_TABLE",
    ("cpu", torch.float32): "infer.kernels.cpu:CPU_FAST_KERNEL_TABLE",
    ("cpu", torch.int8): "infer.int8_cpu.kernels:CPU_INT8_FAST_KERNEL_TABLE",
}

# Validated kernels by import path, device type and device index. This is a dict and not
# functools.cache, because torch.compile would trace into a cached function.
VALIDATED_KERNELS: dict[tuple[str, str, int | None], Kernels] = {}


def select_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    """Return the operations for a device and a dtype of weights (torch.int8: quantised weights)."""
    import_path = FAST_KERNELS.get((device.type, dtype)) or FAST_KERNELS.get((device.type, None))
    if import_path is None:
        return REFERENCE_KERNELS
    key = import_path, device.type, device.index
    if key not in VALIDATED_KERNELS:
        VALIDATED_KERNELS[key] = load_validated_kernels(import_path, device)
    return VALIDATED_KERNELS[key]


def load_validated_kernels(import_path: str, device: torch.device) -> Kernels:
    """Import the fast versions named by an entry of FAST_KERNELS and return those that pass their
    checks, with the reference of all other operations.

    Warns about each fast version that fails or whose results differ from the reference.
    """
    from infer.kernels.validation import KERNEL_CHECKS_BY_OPERATION

    try:
        fast_kernels: FastKernels = resolve_name(import_path)
    except ModuleNotFoundError as error:
        if error.name == "triton":  # some builds of PyTorch come without Triton
            return REFERENCE_KERNELS
        raise

    checks = KERNEL_CHECKS_BY_OPERATION | dict(fast_kernels.checks)
    operations = {}
    for name, operation in fast_kernels.operations.items():
        reason = run_check(checks[name], operation, device)
        if reason:
            warnings.warn(
                f"{name} runs without its fast version ({import_path}): {reason}", stacklevel=2
            )
        else:
            operations[name] = operation

    features = {}
    if len(operations) == len(fast_kernels.operations):
        features = fast_kernels.features
    return replace(REFERENCE_KERNELS, **operations, **features)


def run_check(check: OperationCheck, operation: Callable, device: torch.device) -> str:
    """Return why a fast version must not be used, or "" if it passes its check."""
    try:
        return check(operation, device)
    except Exception as error:  # no C compiler, a GPU that Triton does not support, ...
        return str(error) or type(error).__name__
