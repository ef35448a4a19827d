"""Warm starts: the layers of a drafter begin with the weights of the target's layers.

They do so where both layers compute the same, or nearly so: the gated attention layers of Qwen3.5
and Qwen3-Next are close to the layers of a drafter, which have no gates.

T tokens, H heads, E head size. R of the E head entries rotate in the target; all E rotate in a
drafter.
"""

import math
from copy import deepcopy
from functools import partial
from typing import cast

import torch
from torch import nn
from torch.nn import functional as F

from infer.attention.masks import to_additive_mask
from infer.drafters.layer import DrafterLayer, negate_first_half
from infer.targets.layers import UnsupportedLayer, convert_norm
from infer.targets.support import get_rope_parameters
from infer.targets.target import Target

# The largest difference of two layers that count as the same, as a fraction of what the layer adds
# to its input. It is more than the rounding of bfloat16.
MAX_LAYER_DIFFERENCE = 0.05
MAX_GATED_LAYER_DIFFERENCE = 1.0  # of a gated layer, which a layer without gates only approximates
MIN_WARM_START_COMPARED_POSITIONS = 4
RANDOM_TOKENS_AVERAGED_FOR_ATTENTION_GATES = 128  # random tokens over which gates are averaged


@torch.no_grad()
def layer_matches_target(
    layer: DrafterLayer,
    weights: dict[str, torch.Tensor],
    target_layer: nn.Module,
    num_slots: int,
    rotary_module: nn.Module,
    target: Target,
) -> bool:
    """Return whether a drafter's layer with these weights computes what `target_layer` does.

    `num_slots` are the slots of the drafter's block, `rotary_module` computes its rotary
    embeddings.

    Names and shapes of `weights` must be those of the layer, except for tensors that only drafters
    have (`drafter_only_prefixes`). Equal shapes are not enough: norms that multiply by one plus
    their weight, other activations, scaled residuals and interleaved rotary pairs have the same
    shapes. So both layers run on the same random states, causally. A gated layer is compared at
    position 0 alone, where nothing rotates, and only for similarity.
    """
    rotary_module = rotary_module.cpu()
    layer_shapes = {
        name: tensor.shape
        for name, tensor in layer.state_dict().items()
        if not name.startswith(layer.drafter_only_prefixes)
    }
    weight_shapes = {name: tensor.shape for name, tensor in weights.items()}
    gated = has_gated_attention(target_layer)
    rotary_factor = get_rope_parameters(target.config).get("partial_rotary_factor") or 1
    if (rotary_factor != 1 and not gated) or layer_shapes != weight_shapes:
        return False

    candidate = deepcopy(layer)
    candidate.load_state_dict(weights, strict=False)
    # Convolutions act within a block, so the number of positions is a multiple of the block's.
    num_blocks = math.ceil(MIN_WARM_START_COMPARED_POSITIONS / num_slots)
    count = num_slots * num_blocks
    positions = torch.arange(count)[None]
    if gated:
        positions = torch.zeros_like(positions)
    generator = torch.Generator().manual_seed(0)
    states = 0.01 * torch.randn(1, count, target.config.hidden_size, generator=generator)

    target_output = run_target_layer(target_layer, states, positions, gated, rotary_module, target)
    if target_output is None:
        return False
    attend = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    cos, sin = rotary_module(states, positions)
    output = candidate(states, (cos, negate_first_half(sin)), attend)
    allowed = MAX_GATED_LAYER_DIFFERENCE if gated else MAX_LAYER_DIFFERENCE
    difference = (target_output.cpu().float() - output).norm()
    return bool(difference < allowed * (output - states).norm())


def run_target_layer(
    target_layer: nn.Module,
    states: torch.Tensor,
    positions: torch.Tensor,
    gated: bool,
    rotary_module: nn.Module,
    target: Target,
) -> torch.Tensor | None:
    """Return a target layer's output (1, T, D) for `states` (1, T, D) at `positions` (1, T), with
    causal attention; None if the layer takes other arguments.

    The rotary embeddings are those of `rotary_module`, or the target's own if the layer is gated.
    """
    weight = next(target_layer.parameters())
    count = states.shape[1]
    allowed = torch.ones(count, count, dtype=torch.bool).tril()[None, None]
    mask = to_additive_mask(allowed, weight.dtype).to(weight.device)
    if gated:
        target_rotary_module = cast(nn.Module, target.decoder.rotary_emb)
        rotary = target_rotary_module(states.to(weight), positions.to(weight.device))
    else:
        rotary = rotary_module(states, positions)
    rotary = tuple(table.to(weight) for table in rotary)

    try:
        output = target_layer(
            states.to(weight), attention_mask=mask, position_embeddings=rotary, past_key_values=None
        )
    except (AttributeError, KeyError, RuntimeError, TypeError):
        return None
    return output if isinstance(output, torch.Tensor) else output[0]


def read_target_layer(layer: nn.Module, target: Target) -> dict[str, torch.Tensor]:
    """Return the weights of a target's layer for a layer without gates; {} if this is not
    possible."""
    if has_gated_attention(layer):
        return remove_gates(layer, target)
    return layer.state_dict()


def has_gated_attention(layer: nn.Module) -> bool:
    """Return whether the query projection of a layer's attention also computes gates of the same
    size, as in Qwen3.5 and Qwen3-Next."""
    shapes = {name: tensor.shape for name, tensor in layer.named_parameters()}
    names = [f"self_attn.{module}.weight" for module in ("q_proj", "o_proj", "q_norm", "k_norm")]
    if not shapes.keys() >= {*names}:
        return False
    query_rows = shapes["self_attn.q_proj.weight"][0]
    output_columns = shapes["self_attn.o_proj.weight"][1]
    return query_rows == 2 * output_columns


def match_rotary_order(head_size: int, rotary_factor: float) -> torch.Tensor | None:
    """Return the order (E,) int64 in which a drafter takes the target's head entries, so that the
    rotating ones keep their angles: entry i of the drafter is entry order[i] of the target.

    R = head_size * rotary_factor entries rotate in the target. Its pairs (i, i + R / 2) rotate by
    base^(-2 i / R), a drafter's pairs (s, s + E / 2) by base^(-2 s / E): the same for s = i E / R.
    The target's other entries do not rotate; in a drafter they do. Returns None where E / R is not
    an integer.
    """
    rotating = int(head_size * rotary_factor)
    if rotating == 0 or rotating % 2 or head_size % rotating:
        return None
    drafter_entries = torch.arange(rotating // 2) * (head_size // rotating)
    order = torch.full((head_size,), -1)
    order[drafter_entries] = torch.arange(rotating // 2)
    order[drafter_entries + head_size // 2] = torch.arange(rotating // 2, rotating)
    order[order < 0] = torch.arange(rotating, head_size)
    return order


@torch.no_grad()
def measure_mean_gates(
    layer: nn.Module, target: Target, tokens: int = RANDOM_TOKENS_AVERAGED_FOR_ATTENTION_GATES
) -> torch.Tensor:
    """Return the mean value (H E,) of each attention gate of a layer, over random tokens; 0.5 where
    the target's weights are not in memory."""
    attention = cast(nn.Module, layer.self_attn)
    query_projection = cast(nn.Module, attention.q_proj)
    output_projection = cast(nn.Linear, attention.o_proj)
    if any(weight.is_meta for weight in target.decoder.parameters()):
        return torch.full((output_projection.in_features,), 0.5)

    projected: list[torch.Tensor] = []
    hook = query_projection.register_forward_hook(
        lambda module, inputs, output: projected.append(output.detach())
    )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.config.vocab_size, (1, tokens), generator=generator)
    ids = ids.to(target.device)
    positions = torch.arange(tokens, device=ids.device)[None]
    target.compute_packed_features(ids, positions, torch.zeros_like(ids), ())
    hook.remove()

    # The projection holds a query and a gate for each head.
    gates = projected[0].unflatten(-1, (-1, 2, attention.head_dim))[0, :, :, 1]  # (T, H, E)
    return gates.float().sigmoid().mean(0).flatten().cpu()


@torch.no_grad()
def remove_gates(layer: nn.Module, target: Target) -> dict[str, torch.Tensor]:
    """Return the weights of a gated attention layer for a layer without gates.

    Each gate is replaced by its mean value, which scales the output projection, and head entries
    are put in the order of `match_rotary_order`. The result is exact except for the deviation of
    gates from their mean and for entries that do not rotate in the target. Returns {} for a layer
    with other norms or with a rotary factor that is not supported.
    """
    weights = {name: value.cpu().float() for name, value in layer.state_dict().items()}
    attention = cast(nn.Module, layer.self_attn)
    head_size = cast(int, attention.head_dim)
    rotary_factor = get_rope_parameters(target.config).get("partial_rotary_factor") or 1
    order = match_rotary_order(head_size, rotary_factor)
    if order is None:
        return {}

    norm_names = [name for name in weights if name.endswith("norm.weight")]
    try:
        for name in norm_names:
            norm = convert_norm(layer.get_submodule(name.removesuffix(".weight")))
            weights[name] = norm.weight.detach().cpu().float()
    except UnsupportedLayer:
        return {}

    query_rows = weights["self_attn.q_proj.weight"].unflatten(0, (-1, 2, head_size))
    weights["self_attn.q_proj.weight"] = query_rows[:, 0][:, order].flatten(0, 1)
    key_rows = weights["self_attn.k_proj.weight"].unflatten(0, (-1, head_size))
    weights["self_attn.k_proj.weight"] = key_rows[:, order].flatten(0, 1)
    for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
        weights[name] = weights[name][order]
    gates = measure_mean_gates(layer, target)
    weights["self_attn.o_proj.weight"] = weights["self_attn.o_proj.weight"] * gates
    return weights
