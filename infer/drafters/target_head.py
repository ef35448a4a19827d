"""A drafter's copy of the target's language model head."""

from typing import NamedTuple
from weakref import ref

import torch
from torch import nn

from infer.targets.layers import select_outputs
from infer.targets.loading import load_int8_package
from infer.targets.target import Target


class TargetHeadCopy(NamedTuple):
    """A copy of the target's language model head, for some tokens or with int8 weights."""

    source: "ref[nn.Module]"  # the target's head
    version: tuple  # changes where the target's weights or the draft vocabulary change
    head: nn.Module


def update_target_head_copy(
    old_copy: TargetHeadCopy | None,
    target: Target,
    head: nn.Module,
    d2t: torch.Tensor | None,
    tokens: torch.Tensor | None,
    to_int8: bool,
) -> TargetHeadCopy:
    """Return the copy of a target's `head`: the old copy if it is still valid, else a new one.

    The copy has the rows `tokens` (R,) int64, or all rows for None. `d2t` is the drafter's tensor
    that determines them. `to_int8`: the weights are rounded to int8.
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
