"""A drafter's copy of the target's language model head."""

from typing import NamedTuple
from weakref import ref

import torch
from torch import nn

from infer.targets.layers import select_outputs
from infer.targets.loading import load_int8_package
from infer.targets.target import Target


class TargetHeadCopy(NamedTuple):
    """A copy of the target's language model head, limited to some tokens or with int8 weights."""

    source: "ref[nn.Module]"  # the target's language model head
    # differs from that of an earlier copy if the target's weights or the draft vocabulary changed
    version: tuple
    head: nn.Module  # the copy


def update_target_head_copy(
    old_copy: TargetHeadCopy | None,
    target: Target,
    head: nn.Module,
    d2t: torch.Tensor | None,
    tokens: torch.Tensor | None,
    to_int8: bool,
) -> TargetHeadCopy:
    """Return a copy of the target's language model head `head`: `old_copy` if it is still valid,
    else a new copy.

    The copy has the rows of the R tokens in `tokens` (R,) int64, or all rows if `tokens` is None.
    `d2t` is the drafter's tensor from which `tokens` was computed. `to_int8` tells whether the
    weights of the copy are rounded to int8.
    """
    d2t_version = None
    if d2t is not None and not d2t.is_inference():
        d2t_version = d2t._version
    version = (target.weight_version, next(head.parameters()).data_ptr(), d2t_version)
    if old_copy is not None and old_copy.source() is head and old_copy.version == version:
        return old_copy

    # Tensors made in inference mode could not be used in training afterwards.
    with torch.inference_mode(False):
        copied_head = head if tokens is None else select_outputs(head, tokens)
        if to_int8:
            copied_head = load_int8_package().quantise_linear(copied_head)
    return TargetHeadCopy(ref(head), version, copied_head)
