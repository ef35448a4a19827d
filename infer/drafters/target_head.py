"""A drafter's copy of the target's language model head, for drafters that score only a subset of
the vocabulary or have int8 weights."""

from typing import NamedTuple
from weakref import ref

import torch
from torch import nn

from infer.targets.layers import select_output_features
from infer.targets.loading import load_int8_package
from infer.targets.target import Target


class TargetHeadCopy(NamedTuple):
    """A copy of the target's language model head that is limited to a subset of the vocabulary, or
    has int8 weights, or both."""

    source: "ref[nn.Module]"  # the target's language model head, of which this is a copy
    # value that changes when the target's weights or the tokens that the drafter scores change
    version: tuple
    head: nn.Module  # the copied language model head


def update_target_head_copy(
    old_copy: TargetHeadCopy | None,
    target: Target,
    head: nn.Module,
    d2t: torch.Tensor | None,
    tokens: torch.Tensor | None,
    to_int8: bool,
) -> TargetHeadCopy:
    """Return `old_copy` if it is still an up-to-date copy of the target's language model head
    `head`, else a new copy.

    `tokens` int64 are the tokens whose rows are copied, or None for all rows. `d2t` is the
    drafter's tensor from which `tokens` was computed; it is only used to detect changes. `to_int8`
    tells whether the weights of the copy are rounded to int8.
    """
    d2t_version = None
    if d2t is not None and not d2t.is_inference():
        d2t_version = d2t._version
    version = (target.weight_version, next(head.parameters()).data_ptr(), d2t_version)
    if old_copy is not None and old_copy.source() is head and old_copy.version == version:
        return old_copy

    # Leave inference mode: tensors that are created in inference mode cannot be used in training.
    with torch.inference_mode(False):
        copied_head = head if tokens is None else select_output_features(head, tokens)
        if to_int8:
            copied_head = load_int8_package().quantise_linear(copied_head)
    return TargetHeadCopy(ref(head), version, copied_head)
