"""Warm starts: the layers of a new drafter start with the weights of target layers.

A warm start is possible if a drafter layer with the weights of a target layer computes the same as
the target layer. It is also possible for layers with gated attention (Qwen3.5 and Qwen3-Next): a
drafter layer has no gates, but computes nearly the same.

T tokens, D hidden size, H heads, E head size (entries per head). Rotary embeddings rotate R of the
E entries of a head in the target, and all E entries in a drafter.
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

# Maximum relative difference between the outputs of a drafter layer and a target layer that count
# as equal: the norm of the difference, divided by the norm of what the drafter layer adds to its
# input. The maximum is above the rounding errors of bfloat16.
MAX_LAYER_DIFFERENCE = 0.05
# Replaces MAX_LAYER_DIFFERENCE for target layers with gated attention, which a drafter layer only
# approximates.
MAX_WARM_START_GATED_LAYER_DIFFERENCE = 1.0
MIN_WARM_START_COMPARED_POSITIONS = (
    4  # minimum number of positions at which a drafter layer and a target layer are compared
)
NUM_RANDOM_TOKENS_FOR_MEAN_GATES = (
    128  # number of random tokens over which the values of attention gates are averaged
)


@torch.no_grad()
def layer_matches_target(
    layer: DrafterLayer,
    weights: dict[str, torch.Tensor],
    target_layer: nn.Module,
    num_slots: int,
    rotary_module: nn.Module,
    target: Target,
) -> bool:
    """Return whether the drafter layer `layer`, with the weights `weights`, computes the same as
    `target_layer`.

    `num_slots` is the number of input positions of a drafted block. `rotary_module` computes the
    drafter's rotary embeddings.

    First, the names and shapes of `weights` are compared with those of `layer`, apart from tensors
    that a target layer does not have. If they agree, the two layers can still have different norms,
    activations, residual scales or rotary embeddings. Therefore both layers run on the same random
    inputs with causal attention, and their outputs are compared.

    If the target layer has gated attention, the outputs need only be similar. All tokens are then
    at position 0, where rotary embeddings rotate nothing.
    """
    rotary_module = rotary_module.cpu()
    layer_shapes = {
        name: tensor.shape
        for name, tensor in layer.state_dict().items()
        if not name.startswith(layer.drafter_only_tensor_prefixes)
    }
    weight_shapes = {name: tensor.shape for name, tensor in weights.items()}
    gated = has_gated_attention(target_layer)
    rotary_factor = get_rope_parameters(target.config).get("partial_rotary_factor") or 1
    if (rotary_factor != 1 and not gated) or layer_shapes != weight_shapes:
        return False

    candidate = deepcopy(layer)
    candidate.load_state_dict(weights, strict=False)
    # The drafter's convolutions act within blocks, so the inputs must consist of whole blocks.
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
    allowed = MAX_WARM_START_GATED_LAYER_DIFFERENCE if gated else MAX_LAYER_DIFFERENCE
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
    """Run a target layer with causal attention on the hidden states `states` (1, T, hidden_size) of
    T tokens at `positions` (1, T).

    Returns the output (1, T, hidden_size), or None if the layer does not accept the arguments that
    this function passes to it. `gated` tells whether the layer has gated attention. The rotary
    embeddings come from the target if the layer is gated, else from `rotary_module`.
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


def get_ungated_target_weights(layer: nn.Module, target: Target) -> dict[str, torch.Tensor]:
    """Return the weights of a target layer as a dict from names to tensors.

    If the layer has gated attention, the weights are converted to those of a layer without gates.
    Returns {} if this conversion is not possible.
    """
    if has_gated_attention(layer):
        return fold_mean_gates_into_weights(layer, target)
    return layer.state_dict()


def has_gated_attention(layer: nn.Module) -> bool:
    """Return whether a target layer has gated attention, as in Qwen3.5 and Qwen3-Next.

    In such a layer, half of the query projection's outputs are gates.
    """
    shapes = {name: tensor.shape for name, tensor in layer.named_parameters()}
    names = [f"self_attn.{module}.weight" for module in ("q_proj", "o_proj", "q_norm", "k_norm")]
    if not shapes.keys() >= {*names}:
        return False
    query_rows = shapes["self_attn.q_proj.weight"][0]
    output_columns = shapes["self_attn.o_proj.weight"][1]
    return query_rows == 2 * output_columns


def compute_rotary_permutation(head_size: int, rotary_factor: float) -> torch.Tensor | None:
    """Return the order (head_size,) int64 of head entries that converts a target's attention head
    to a drafter's: the drafter's entry i is the target's entry order[i].

    Rotary embeddings rotate R = head_size * rotary_factor entries of a head in the target, but all
    E entries in a drafter, where E is head_size. In the target, the pair (i, i + R / 2) has the
    frequency base^(-2 i / R). In a drafter, the pair (s, s + E / 2) has the frequency base^(-2 s /
    E). The two are equal for s = i E / R, so target pair i becomes drafter pair i E / R. The
    remaining entries rotate in the drafter, although they do not rotate in the target.

    R must be even and divide E; otherwise None is returned.
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
    layer: nn.Module, target: Target, tokens: int = NUM_RANDOM_TOKENS_FOR_MEAN_GATES
) -> torch.Tensor:
    """Return the mean value of each attention gate of a target layer, measured over random tokens,
    as a tensor (heads * head_size,).

    `tokens` is the number of random tokens. All values are 0.5 if the target's weights are not in
    memory.
    """
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

    # The query projection computes a query and a gate for each head. These are the gates, (tokens,
    # heads, head size).
    gates = projected[0].unflatten(-1, (-1, 2, attention.head_dim))[0, :, :, 1]
    return gates.float().sigmoid().mean(0).flatten().cpu()


@torch.no_grad()
def fold_mean_gates_into_weights(layer: nn.Module, target: Target) -> dict[str, torch.Tensor]:
    """Convert the weights of a target layer with gated attention to weights of a drafter layer,
    which has no gates.

    Each gate is replaced by its mean value, which is multiplied into the output projection. The
    entries of each head are reordered as described in `compute_rotary_permutation`.

    The converted layer is only similar to the target layer, for two reasons: gates vary around
    their mean, and some head entries do not rotate in the target. Returns {} if the layer has
    unsupported norms, or if `compute_rotary_permutation` returns None.
    """
    weights = {name: value.cpu().float() for name, value in layer.state_dict().items()}
    attention = cast(nn.Module, layer.self_attn)
    head_size = cast(int, attention.head_dim)
    rotary_factor = get_rope_parameters(target.config).get("partial_rotary_factor") or 1
    order = compute_rotary_permutation(head_size, rotary_factor)
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
