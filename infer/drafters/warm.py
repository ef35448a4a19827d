"""Warm starts: a drafter's layers begin with the weights of the target's, where they compute the same,
or nearly (gated.py)."""

import math
from copy import deepcopy
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from infer.attention.masks import additive
from infer.drafters.gated import is_gated
from infer.targets.support import rope
from infer.targets.target import Target


@torch.no_grad()
def can_start_as(
    layer: nn.Module, weights: dict[str, torch.Tensor], source: nn.Module, drafter: nn.Module, target: Target
) -> bool:
    """Return whether a drafter's layer with these weights computes what the target's layer `source`
    does. `weights` must be those of the layer in name and shape, but for those that only drafters have
    (its `own_weights`).

    Shapes do not tell: norms that multiply by one more than their weight, other activations, residuals
    that are scaled, and rotary positions in other pairs look alike. Both see a few random states,
    causally, at the drafter's angles. A gated layer is compared where nothing turns, with its gates as
    they are: near is all that can be asked."""
    ours = {name: tensor.shape for name, tensor in layer.state_dict().items() if not name.startswith(layer.own_weights)}
    gated, rotating = is_gated(source), rope(target.config).get("partial_rotary_factor") or 1
    if (rotating != 1 and not gated) or ours != {name: tensor.shape for name, tensor in weights.items()}:
        return False
    trial, weight = deepcopy(layer), next(source.parameters())
    trial.load_state_dict(weights, strict=False)
    count = drafter.num_queries * math.ceil(4 / drafter.num_queries)  # whole blocks: convolutions end with each
    positions = torch.arange(count)[None]
    states = 0.01 * torch.randn(1, count, target.config.hidden_size, generator=torch.Generator().manual_seed(0))
    mask = additive(torch.ones(count, count, dtype=torch.bool).tril()[None, None], weight.dtype).to(weight.device)
    if gated:
        positions = torch.zeros_like(positions)
        angles = target.body.rotary_emb(states.to(weight), positions.to(weight.device))
    else:
        angles = drafter.rotary[0].cpu()(states, positions)
    angles = tuple(table.to(weight) for table in angles)
    try:
        found = source(states.to(weight), attention_mask=mask, position_embeddings=angles, past_key_values=None)
    except (AttributeError, KeyError, RuntimeError, TypeError):  # the layer takes other arguments
        return False
    found = (found if isinstance(found, torch.Tensor) else found[0]).cpu().float()
    attend = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    expected = trial(states, drafter.angles(positions), attend)
    within = 1.0 if gated else 0.05  # of what the layer adds; the latter is more than bfloat16's rounding
    return bool((found - expected).norm() < within * (expected - states).norm())
