"""The table of operations: which implementation of each runs on a device. This is the only place
that selects a fast path."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module

import torch

from infer.kernels import reference
from infer.kernels.reference_search import search_by_depth


@dataclass(frozen=True)
class Kernels:
    """One implementation of every operation; `infer.kernels.reference` says what each computes."""

    rms_norm: Callable
    add_rms_norm: Callable
    qk_norm_rope_write: Callable
    attend: Callable
    attention: Callable
    gated_activation: Callable
    linear: Callable
    argmax_head: Callable
    best_first_search: Callable
    # whether batch rows of a pass may have different numbers of positions (`DraftTree.real`)
    ragged: bool = False
    # "module:class" of what runs layers all of which are recordable, instead of `LeanDecoder`
    recording_decoder: str | None = None


REFERENCE = Kernels(
    rms_norm=reference.rms_norm,
    add_rms_norm=reference.add_rms_norm,
    qk_norm_rope_write=reference.qk_norm_rope_write,
    attend=reference.attend,
    attention=reference.attention,
    gated_activation=reference.gated_activation,
    linear=reference.linear,
    argmax_head=reference.argmax_head,
    best_first_search=search_by_depth,
)

# Device type and dtype of the weights, None: any -> module with faster versions of some operations,
# in its dict OPERATIONS; what else `Kernels` says of them, in FEATURES; checks of its own, in
# CHECKS. torch.int8: codes, whose activations are float32.
FAST_VERSIONS = {
    ("cuda", None): "infer.kernels.cuda",
    ("cpu", torch.float32): "infer.kernels.cpu",
    ("cpu", torch.int8): "infer.int8_cpu.kernels",
}


VALIDATED: dict[tuple[str, str, int | None], Kernels] = {}


def kernels_for(device: torch.device, dtype: torch.dtype) -> Kernels:
    """Return the operations for a device and the dtype of weights, torch.int8 for codes."""
    module = FAST_VERSIONS.get((device.type, dtype)) or FAST_VERSIONS.get((device.type, None))
    if module is None:
        return REFERENCE
    # A dict and no functools.cache, into which torch.compile would look: it is filled before a
    # drafter is compiled.
    key = module, device.type, device.index
    if key not in VALIDATED:
        VALIDATED[key] = validated_kernels(module, device)
    return VALIDATED[key]


def validated_kernels(module: str, device: torch.device) -> Kernels:
    """Return the operations with a module's fast versions, but for those that fail or whose results
    differ from the reference's, which a warning names."""
    from infer.kernels.validation import CHECKS

    try:
        fast = import_module(module)
    except ModuleNotFoundError as error:
        if error.name == "triton":  # not part of every installation of torch
            return REFERENCE
        raise
    checks = CHECKS | vars(fast).get("CHECKS", {})
    operations = {}
    for name, operation in fast.OPERATIONS.items():
        reason = find_fault(checks[name], operation, device)
        if reason:
            warnings.warn(
                f"{name} runs without its fast version ({module}): {reason}", stacklevel=2
            )
        else:
            operations[name] = operation
    features = vars(fast).get("FEATURES", {})
    if len(operations) < len(fast.OPERATIONS):
        features = {}  # they hold of all operations together
    return replace(REFERENCE, **operations, **features)


def find_fault(check: Callable, operation: Callable, device: torch.device) -> str:
    """Return why a fast version is not used, an empty string if it is."""
    try:
        return check(operation, device)
    except Exception as error:  # no C compiler, a device that Triton does not know, ...
        return str(error) or type(error).__name__
