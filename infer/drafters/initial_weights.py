"""Initial weights of drafters; warm starts are in warm_start.py.

D hidden size, K target layers whose states a drafter reads.
"""

import torch
from torch import nn

from infer.targets.target import Target

MAX_LOGIT_OF_NEW_DRAFTER = 3.0  # the largest logit of a new drafter, over TOKENS_MEASURING_INITIAL_DRAFTER_LOGITS input tokens
TOKENS_MEASURING_INITIAL_DRAFTER_LOGITS = 32


def select_feature_layer(projection: nn.Linear, index: int) -> None:
    """Initialise a projection (D, K * D) of features of K layers to return those of one layer."""
    size = projection.out_features
    projection.weight.zero_()
    projection.weight.view(size, -1, size)[:, index] = torch.eye(size)


@torch.no_grad()
def shrink_final_norm(norm: nn.RMSNorm, target: Target) -> None:
    """Scale the weight of a new drafter's final norm so that its logits are at most
    MAX_LOGIT_OF_NEW_DRAFTER.

    The layers of a new drafter hardly change their input. With a head that is tied to the
    embedding, the input token would get all probability.
    """
    ids = torch.linspace(
        0, target.vocab_size - 1, TOKENS_MEASURING_INITIAL_DRAFTER_LOGITS, device=target.device
    ).long()
    states = norm(target.embed(ids).cpu().float()).to(target.head_weight)
    max_logit = target.compute_logits(states).float().abs().amax().item()
    norm.weight.mul_(min(1.0, MAX_LOGIT_OF_NEW_DRAFTER / max_logit))
