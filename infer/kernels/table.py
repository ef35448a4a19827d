"""Select the implementation of each operation for a device: a fast version or the reference
implementation in PyTorch."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pkgutil import resolve_name
from typing import Any

import torch

from infer.kernels import reference
from infer.kernels.reference_search import search_tree_by_depth

# A function (implementation of an operation, device) -> str. It runs the implementation on the
# device. It returns how the results differ from those of the reference implementation, or "" if
# they agree.
OperationCheck = Callable[[Callable, torch.device], str]


@dataclass(frozen=True)
class Kernels:
    """One implementation of each operation. The functions in `infer.kernels.reference` define what
    the operations compute."""

    rms_norm: Callable
    add_rms_norm: Callable
    qk_norm_rope_write: Callable
    attend: Callable
    attention: Callable
    gated_activation: Callable
    linear: Callable
    argmax_head: Callable
    best_first_search: Callable
    # Whether the batch rows of a forward pass may have different numbers of new positions.
    supports_ragged: bool = False
    # "module:class" of a decoder that records and replays forward passes, or None. It is used
    # instead of `KernelDecoder` if all layers of a model can be recorded.
    recording_decoder: str | None = None


@dataclass(frozen=True)
class FastKernels:
    """Fast versions of operations for one device type and dtype of weights."""

    # Key: name of an operation, which is a field of `Kernels`. Value: its fast version.
    operations: Mapping[str, Callable]
    # Key: name of an operation. Value: the check of its fast version. Operations that are not in
    # this dict are checked by `infer.kernels.validation`.
    checks: Mapping[str, OperationCheck] = field(default_factory=dict)
    # Key: name of a field of `Kernels` that is not an operation. Value: the value of the field, set
    # only if all fast versions pass their checks.
    extra_fields: Mapping[str, Any] = field(default_factory=dict)


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

# Key: (device type, dtype of the weights); None means any dtype, and torch.int8 means quantised
# weights with float32 activations. Value: "module:name" of a `FastKernels` object.
FAST_KERNEL_TABLE_PATHS = {
    ("cuda", None): "infer.kernels.cuda:CUDA_FAST_KERNELS",
    ("cpu", torch.float32): "infer.kernels.cpu:CPU_FAST_KERNELS",
    ("cpu", torch.int8): "infer.int8_cpu.kernels:CPU_INT8_FAST_KERNELS",
}

# Key: (a value of FAST_KERNEL_TABLE_PATHS, device type, device index). Value: the validated
# kernels. This is not a functools.cache, because torch.compile would trace into a cached function.
VALIDATED_KERNELS_CACHE: dict[tuple[str, str, int | None], Kernels] = {}


def select_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    """Return an implementation of each operation for a device and a dtype of weights.

    The dtype torch.int8 means quantised weights. On the first call, fast versions are checked
    against the reference implementations.
    """
    import_path = FAST_KERNEL_TABLE_PATHS.get((device.type, dtype)) or FAST_KERNEL_TABLE_PATHS.get(
        (device.type, None)
    )
    if import_path is None:
        return REFERENCE_KERNELS
    key = import_path, device.type, device.index
    if key not in VALIDATED_KERNELS_CACHE:
        VALIDATED_KERNELS_CACHE[key] = load_validated_kernels(import_path, device)
    return VALIDATED_KERNELS_CACHE[key]


def load_validated_kernels(import_path: str, device: torch.device) -> Kernels:
    """Import fast versions of operations, and check them against the reference implementations.

    import_path: "module:name" of a `FastKernels` object

    Returns the fast versions that pass their checks, and the reference implementations of all other
    operations. Warns about each fast version that does not pass its check.
    """
    from infer.kernels.validation import KERNEL_CHECKS_BY_OPERATION

    try:
        fast_kernels: FastKernels = resolve_name(import_path)
    except ModuleNotFoundError as error:
        if error.name == "triton":  # not every PyTorch build includes Triton
            return REFERENCE_KERNELS
        raise

    checks = KERNEL_CHECKS_BY_OPERATION | dict(fast_kernels.checks)
    operations = {}
    for name, operation in fast_kernels.operations.items():
        reason = run_check(checks[name], operation, device)
        if reason:
            warnings.warn(
                f"the PyTorch implementation of {name} is used (slower, but correct), because the "
                f"fast version in {import_path} failed its check: {reason}",
                stacklevel=2,
            )
        else:
            operations[name] = operation

    features = {}
    if len(operations) == len(fast_kernels.operations):
        features = fast_kernels.extra_fields
    return replace(REFERENCE_KERNELS, **operations, **features)


def run_check(check: OperationCheck, operation: Callable, device: torch.device) -> str:
    """Check a fast version of an operation. Return "" if it passes, otherwise why it failed."""
    try:
        return check(operation, device)
    except Exception as error:  # for example, there is no C compiler
        return str(error) or type(error).__name__
