"""The table of operations: which implementation of each operation runs on a device.

Fast versions are selected in this module only.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pkgutil import resolve_name
from typing import Any

import torch

from infer.kernels import reference
from infer.kernels.reference_search import search_tree_by_depth

# A function of an implementation of an operation and a device. It runs the implementation on the
# device, and returns a description of how the results differ from the reference, or "".
OperationCheck = Callable[[Callable, torch.device], str]


@dataclass(frozen=True)
class Kernels:
    """One implementation of every operation. `infer.kernels.reference` explains the operations."""

    rms_norm: Callable
    add_rms_norm: Callable
    qk_norm_rope_write: Callable
    attend: Callable
    attention: Callable
    gated_activation: Callable
    linear: Callable
    argmax_head: Callable
    best_first_search: Callable
    # Whether the batch rows of a pass may have different numbers of new positions.
    supports_ragged: bool = False
    # "module:class" of the decoder that records passes. It is used instead of `KernelDecoder` if
    # all layers can be recorded.
    recording_decoder: str | None = None


@dataclass(frozen=True)
class FastKernels:
    """The fast versions of some operations for one device and dtype of weights."""

    # Key: name of an operation, which is a field of `Kernels`. Value: its fast version.
    operations: Mapping[str, Callable]
    # Key: name of an operation. Value: a check that is used instead of that in
    # `infer.kernels.validation`.
    checks: Mapping[str, OperationCheck] = field(default_factory=dict)
    # Values of the fields of `Kernels` that are no operations. They are only set if all fast
    # versions pass their checks.
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

# Key: device type, and dtype of the weights (None means any dtype). Value: "module:name" of a
# `FastKernels` object. The dtype torch.int8 means quantised weights with activations in float32.
FAST_KERNELS = {
    ("cuda", None): "infer.kernels.cuda:CUDA_FAST_KERNEL_TABLE",
    ("cpu", torch.float32): "infer.kernels.cpu:CPU_FAST_KERNEL_TABLE",
    ("cpu", torch.int8): "infer.int8_cpu.kernels:CPU_INT8_FAST_KERNEL_TABLE",
}

# Key: value of FAST_KERNELS, device type and device index. Value: kernels that were validated. A
# dict is used instead of functools.cache, because torch.compile would trace into a cached function.
VALIDATED_KERNELS: dict[tuple[str, str, int | None], Kernels] = {}


def select_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    """Return the implementations of all operations for a device and a dtype of weights.

    The dtype torch.int8 means quantised weights. Fast versions are validated on the first call.
    """
    import_path = FAST_KERNELS.get((device.type, dtype)) or FAST_KERNELS.get((device.type, None))
    if import_path is None:
        return REFERENCE_KERNELS
    key = import_path, device.type, device.index
    if key not in VALIDATED_KERNELS:
        VALIDATED_KERNELS[key] = load_validated_kernels(import_path, device)
    return VALIDATED_KERNELS[key]


def load_validated_kernels(import_path: str, device: torch.device) -> Kernels:
    """Import fast versions of operations, and check them.

    Returns the fast versions that pass their checks, and the reference of all other operations. A
    warning is issued for each fast version that does not pass its check.

    import_path: value of FAST_KERNELS
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
                f"the reference of {name} is used, because its fast version in {import_path} "
                f"failed its check: {reason}",
                stacklevel=2,
            )
        else:
            operations[name] = operation

    features = {}
    if len(operations) == len(fast_kernels.operations):
        features = fast_kernels.features
    return replace(REFERENCE_KERNELS, **operations, **features)


def run_check(check: OperationCheck, operation: Callable, device: torch.device) -> str:
    """Run the check of a fast version. Return "" if it passes, otherwise why it fails."""
    try:
        return check(operation, device)
    except Exception as error:  # for example no C compiler, or an unsupported GPU
        return str(error) or type(error).__name__
