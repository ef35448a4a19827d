"""What a drafter's plain layer takes over of a target's gated attention (Qwen3.5, Qwen3-Next): a warm start that is
near, not equal.

D hidden size, H heads, E head size, R of its entries rotate in the target; all E do in a drafter.
"""

import torch
from torch import nn

from infer.targets.layers import UnknownLayer, read_norm
from infer.targets.support import rope
from infer.targets.target import Target


def is_gated(layer: nn.Module) -> bool:
    """Return whether a layer's attention has queries and gates of the same size in one projection."""
    parts = [
        getattr(getattr(layer, "self_attn", None), name, None) for name in ("q_proj", "o_proj", "q_norm", "k_norm")
    ]
    if None in parts or not (hasattr(parts[0], "out_features") and hasattr(parts[1], "in_features")):
        return False
    return parts[0].out_features == 2 * parts[1].in_features


def plain_order(size: int, share: float) -> torch.Tensor | None:
    """Return which of the target's head entries each entry of ours is, (E,), so that those that rotate do so by the
    same angles: the target's pairs (i, i + R / 2) turn by base^(-2 i / R), ours (s, s + E / 2) by base^(-2 s / E), the
    same for s = i E / R. The others turn where the target's stand still. None where E / R is no whole number."""
    rotating = int(size * share)
    if rotating == 0 or rotating % 2 or size % rotating:
        return None
    slots = torch.arange(rotating // 2) * (size // rotating)
    order = torch.full((size,), -1)
    order[slots], order[slots + size // 2] = torch.arange(rotating // 2), torch.arange(rotating // 2, rotating)
    order[order < 0] = torch.arange(rotating, size)
    return order


@torch.no_grad()
def openness(layer: nn.Module, target: Target, tokens: int = 128) -> torch.Tensor:
    """Return how open each of a layer's gates is on average, (H E,), over a random text; half where the target is not
    in memory as a whole."""
    attention = layer.self_attn
    half = torch.full((attention.o_proj.in_features,), 0.5)
    if any(weight.is_meta for weight in target.body.parameters()):
        return half
    seen: list[torch.Tensor] = []
    hook = attention.q_proj.register_forward_hook(lambda *call: seen.append(call[2].detach()))
    ids = torch.randint(target.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    ids = ids.to(target.device)
    target.packed_features(ids, torch.arange(tokens, device=ids.device)[None], torch.zeros_like(ids), ())
    hook.remove()
    gates = seen[0].unflatten(-1, (-1, 2, attention.head_dim))[0, :, :, 1]  # (T, H, E)
    return gates.float().sigmoid().mean(0).flatten().cpu()


def plain_weights(layer: nn.Module, target: Target) -> dict[str, torch.Tensor] | None:
    """Return a gated layer's weights as those of a plain one: gates at their average, head entries in `plain_order`.
    Exact but for what the gates do beyond their average and for entries that stand still in the target. None for a
    layer with other norms, experts or rotary positions."""
    attention, weights = layer.self_attn, {name: value.cpu().float() for name, value in layer.state_dict().items()}
    size = attention.head_dim
    order = plain_order(size, rope(target.config).get("partial_rotary_factor") or 1)
    if order is None:
        return None
    try:
        for name in [name for name in weights if name.endswith("norm.weight")]:
            weights[name] = read_norm(layer.get_submodule(name.removesuffix(".weight"))).weight.detach().cpu().float()
    except UnknownLayer:
        return None

    def rows(name: str, parts: int) -> torch.Tensor:
        return weights[name].unflatten(0, (-1, parts, size))[:, 0][:, order].flatten(0, 1)

    return weights | {
        "self_attn.q_proj.weight": rows("self_attn.q_proj.weight", 2),
        "self_attn.k_proj.weight": rows("self_attn.k_proj.weight", 1),
        "self_attn.q_norm.weight": weights["self_attn.q_norm.weight"][order],
        "self_attn.k_norm.weight": weights["self_attn.k_norm.weight"][order],
        "self_attn.o_proj.weight": weights["self_attn.o_proj.weight"] * openness(layer, target),
    }
