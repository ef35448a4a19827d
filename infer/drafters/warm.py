"""Warm starts: a drafter's layers begin with the weights of the target's, where they compute the
same, or nearly: gated attention layers (Qwen3.5, Qwen3-Next) are near a drafter's plain ones, not
equal.

H heads, E head size, R of its entries rotate in the target; all E do in a drafter.
"""

import math
from copy import deepcopy
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from infer.attention.masks import additive
from infer.targets.layers import UnknownLayer, read_norm
from infer.targets.support import rope
from infer.targets.target import Target


@torch.no_grad()
def can_start_as(
    layer: nn.Module,
    weights: dict[str, torch.Tensor],
    source: nn.Module,
    drafter: nn.Module,
    target: Target,
) -> bool:
    """Return whether a drafter's layer with these weights computes what the target's layer `source`
    does. `weights` must be those of the layer in name and shape, but for those that only drafters
    have (its `own_weights`).

    Shapes do not tell: norms that multiply by one more than their weight, other activations,
    residuals that are scaled, and rotary positions in other pairs look alike. Both see a few random
    states, causally, at the drafter's angles. A gated layer is compared where nothing turns, with
    its gates as they are: near is all that can be asked."""
    ours = {
        name: tensor.shape
        for name, tensor in layer.state_dict().items()
        if not name.startswith(layer.own_weights)
    }
    gated = is_gated(source)
    rotating = rope(target.config).get("partial_rotary_factor") or 1
    if (rotating != 1 and not gated) or ours != {
        name: tensor.shape for name, tensor in weights.items()
    }:
        return False
    trial = deepcopy(layer)
    weight = next(source.parameters())
    trial.load_state_dict(weights, strict=False)
    count = drafter.num_queries * math.ceil(
        4 / drafter.num_queries
    )  # whole blocks: convolutions end with each
    positions = torch.arange(count)[None]
    states = 0.01 * torch.randn(
        1, count, target.config.hidden_size, generator=torch.Generator().manual_seed(0)
    )
    mask = additive(torch.ones(count, count, dtype=torch.bool).tril()[None, None], weight.dtype).to(
        weight.device
    )
    if gated:
        positions = torch.zeros_like(positions)
        angles = target.body.rotary_emb(states.to(weight), positions.to(weight.device))
    else:
        angles = drafter.rotary[0].cpu()(states, positions)
    angles = tuple(table.to(weight) for table in angles)
    try:
        found = source(
            states.to(weight), attention_mask=mask, position_embeddings=angles, past_key_values=None
        )
    except (AttributeError, KeyError, RuntimeError, TypeError):  # the layer takes other arguments
        return False
    found = (found if isinstance(found, torch.Tensor) else found[0]).cpu().float()
    attend = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    expected = trial(states, drafter.angles(positions), attend)
    within = (
        1.0 if gated else 0.05
    )  # of what the layer adds; the latter is more than bfloat16's rounding
    return bool((found - expected).norm() < within * (expected - states).norm())


def weights_of(layer: nn.Module, target: Target) -> dict[str, torch.Tensor]:
    """Return the weights of a target's layer as a plain layer takes them; none where it cannot."""
    return plain_weights(layer, target) if is_gated(layer) else layer.state_dict()


def is_gated(layer: nn.Module) -> bool:
    """Return whether a layer's attention has queries and gates of the same size in one
    projection."""
    shapes = {name: tensor.shape for name, tensor in layer.named_parameters()}
    names = [f"self_attn.{part}.weight" for part in ("q_proj", "o_proj", "q_norm", "k_norm")]
    return shapes.keys() >= {*names} and shapes[names[0]][0] == 2 * shapes[names[1]][1]


def plain_order(size: int, share: float) -> torch.Tensor | None:
    """Return which of the target's head entries each entry of ours is, (E,), so that those that
    rotate do so by the same angles: the target's pairs (i, i + R / 2) turn by base^(-2 i / R), ours
    (s, s + E / 2) by base^(-2 s / E), the same for s = i E / R. The others turn where the target's
    stand still. None where E / R is no whole number."""
    rotating = int(size * share)
    if rotating == 0 or rotating % 2 or size % rotating:
        return None
    slots = torch.arange(rotating // 2) * (size // rotating)
    order = torch.full((size,), -1)
    order[slots], order[slots + size // 2] = (
        torch.arange(rotating // 2),
        torch.arange(rotating // 2, rotating),
    )
    order[order < 0] = torch.arange(rotating, size)
    return order


@torch.no_grad()
def openness(layer: nn.Module, target: Target, tokens: int = 128) -> torch.Tensor:
    """Return how open each of a layer's gates is on average, (H E,), over a random text; half where
    the target is not in memory as a whole."""
    attention = layer.self_attn
    if any(weight.is_meta for weight in target.body.parameters()):
        return torch.full((attention.o_proj.in_features,), 0.5)
    seen: list[torch.Tensor] = []
    hook = attention.q_proj.register_forward_hook(lambda *call: seen.append(call[2].detach()))
    ids = torch.randint(
        target.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0)
    )
    ids = ids.to(target.device)
    target.packed_features(
        ids, torch.arange(tokens, device=ids.device)[None], torch.zeros_like(ids), ()
    )
    hook.remove()
    gates = seen[0].unflatten(-1, (-1, 2, attention.head_dim))[0, :, :, 1]  # (T, H, E)
    return gates.float().sigmoid().mean(0).flatten().cpu()


@torch.no_grad()
def plain_weights(layer: nn.Module, target: Target) -> dict[str, torch.Tensor]:
    """Return a gated layer's weights as those of a plain one: gates at their average, head entries
    in `plain_order`. Exact but for what the gates do beyond their average and for entries that
    stand still in the target. None at all for a layer with other norms, experts or rotary
    positions."""
    weights = {name: value.cpu().float() for name, value in layer.state_dict().items()}
    size = layer.self_attn.head_dim
    order = plain_order(size, rope(target.config).get("partial_rotary_factor") or 1)
    if order is None:
        return {}
    try:
        for name in [name for name in weights if name.endswith("norm.weight")]:
            weights[name] = (
                read_norm(layer.get_submodule(name.removesuffix(".weight")))
                .weight.detach()
                .cpu()
                .float()
            )
    except UnknownLayer:
        return {}
    for name, parts in (("self_attn.q_proj.weight", 2), ("self_attn.k_proj.weight", 1)):
        weights[name] = weights[name].unflatten(0, (-1, parts, size))[:, 0][:, order].flatten(0, 1)
    for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
        weights[name] = weights[name][order]
    return weights | {
        "self_attn.o_proj.weight": weights["self_attn.o_proj.weight"] * openness(layer, target)
    }
