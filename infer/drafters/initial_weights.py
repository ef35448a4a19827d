"""Initial weights of new drafters. Warm starts from the target's weights are in warm_start.py.

D hidden size, K number of target layers whose states the drafter reads.
"""

import torch
from torch import nn

from infer.targets.target import Target

# The largest absolute logit of a new drafter, measured with
# TOKENS_MEASURING_INITIAL_DRAFTER_LOGITS input tokens.
MAX_LOGIT_OF_NEW_DRAFTER = 3.0
TOKENS_MEASURING_INITIAL_DRAFTER_LOGITS = 32


def select_feature_layer(projection: nn.Linear, index: int) -> None:
    """Set the weight (D, K * D) of `projection`, whose input is the concatenated states of K target
    layers, so that its output is the states of target layer number `index` of these K."""
    size = projection.out_features
    projection.weight.zero_()
    projection.weight.view(size, -1, size)[:, index] = torch.eye(size)


@torch.no_grad()
def shrink_final_norm(norm: nn.RMSNorm, target: Target) -> None:
    """Shrink the weight of a new drafter's final norm so that no logit of the drafter exceeds
    MAX_LOGIT_OF_NEW_DRAFTER in absolute value.

    The layers of a new drafter hardly change their input. Without this scaling, a language model
    head that is tied to the embedding would give nearly all probability to the input token.
    """
    ids = torch.linspace(
        0, target.vocab_size - 1, TOKENS_MEASURING_INITIAL_DRAFTER_LOGITS, device=target.device
    ).long()
    states = norm(target.embed(ids).cpu().float()).to(target.head_weight)
    max_logit = target.compute_logits(states).float().abs().amax().item()
    norm.weight.mul_(min(1.0, MAX_LOGIT_OF_NEW_DRAFTER / max_logit))
