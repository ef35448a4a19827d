"""Initial weights of new drafters. Warm starts, which copy the target's weights, are in
warm_start.py."""

import torch
from torch import nn

from infer.targets.target import Target

# Maximum absolute value of a new drafter's logits. The logits are measured for
# NUM_TOKENS_FOR_INITIAL_LOGIT_MEASUREMENT input tokens.
MAX_LOGIT_OF_NEW_DRAFTER = 3.0
NUM_TOKENS_FOR_INITIAL_LOGIT_MEASUREMENT = 32


def init_projection_to_select_layer(projection: nn.Linear, index: int) -> None:
    """Set the weight of `projection` such that it returns the hidden states of a single target
    layer.

    The input of `projection` is the concatenation of the hidden states of several target layers.
    `index` chooses among these layers.
    """
    size = projection.out_features
    projection.weight.zero_()
    projection.weight.view(size, -1, size)[:, index] = torch.eye(size)


@torch.no_grad()
def shrink_final_norm(norm: nn.RMSNorm, target: Target) -> None:
    """Shrink the weight of a new drafter's final norm so that the drafter's logits are at most
    about MAX_LOGIT_OF_NEW_DRAFTER in absolute value.

    The layers of a new drafter hardly change their input. Without this scaling, a language model
    head that is tied to the embedding would give nearly all probability to the input token.
    """
    ids = torch.linspace(
        0, target.vocab_size - 1, NUM_TOKENS_FOR_INITIAL_LOGIT_MEASUREMENT, device=target.device
    ).long()
    states = norm(target.embed(ids).cpu().float()).to(target.head_weight)
    max_logit = target.compute_logits(states).float().abs().amax().item()
    norm.weight.mul_(min(1.0, MAX_LOGIT_OF_NEW_DRAFTER / max_logit))
