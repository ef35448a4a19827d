"""A lean decoder pass over the target's own weights: the arithmetic of Hugging Face's layers in a third of the calls.

Queries, keys and values come out of one product, gate and up of another; rotary angles are looked up and applied to
queries and keys together; the query heads that share a key head are packed into the query axis, so that keys and values
are never repeated; the cache is written in place.

It expresses decoders of the Llama kind: RMS norms, rotary positions of any scaling, grouped heads, norms of queries and
keys, biases, sliding windows, gated MLPs; any other MLP (a mixture of experts) is called as it is. Before it is used,
`Target.decoder_pass` compares every layer with Hugging Face's.

B rows, Q new positions, S cached positions, D hidden size, H query heads, K key heads, G = H / K, E head size, R of its
features rotated.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature

import torch
from torch import nn
from torch.nn import functional as F

from infer.attention.kv_cache import LayerWindow, Window

PLAIN = {"input_layernorm", "post_attention_layernorm"}  # norms of a layer of Llama's kind
SANDWICH = PLAIN | {"pre_feedforward_layernorm", "post_feedforward_layernorm"}  # of Gemma 2's: before and after
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}  # the most that rounding changes a result, relative
COARSE = 0.05  # the same in 16 bits


class UnknownLayer(Exception):
    """A layer is built in a way that this pass does not express; the message names the part."""


@dataclass(frozen=True)
class Norm:
    """RMS norm. The weight is float32 where the module multiplies by one more than it has (Gemma)."""

    weight: torch.Tensor  # (D,), or (H + K, E): of queries and keys
    eps: float

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        if self.weight.ndim == 1 and self.weight.dtype == states.dtype:
            return F.rms_norm(states, self.weight.shape, self.weight, self.eps)
        normed = F.rms_norm(states.to(self.weight.dtype), states.shape[-1:], None, self.eps) * self.weight
        return normed.to(states.dtype)


@dataclass(frozen=True)
class Layer:
    """What one decoder layer computes with. The first of two norms is attention's, the second the MLP's."""

    kind: str  # of its attention: which mask and which angles it takes
    before: tuple[Norm, Norm]
    after: tuple[Norm, Norm] | None  # of what attention and MLP add (Gemma 2 and 3)
    qkv: torch.Tensor  # ((H + 2 K) E, D)
    qkv_bias: torch.Tensor | None
    qk_norm: Norm | None
    out: nn.Module
    mlp: Callable[[torch.Tensor], torch.Tensor]
    scale: float  # of attention's scores
    residual: float  # factor of what attention and MLP add (Granite)
    rotates: bool

    def add(self, states: torch.Tensor, change: torch.Tensor, part: int) -> torch.Tensor:
        """Return the residual stream after attention (part 0) or the MLP (part 1)."""
        change = change if self.after is None else self.after[part](change)
        return states + (change if self.residual == 1 else change * self.residual)


@dataclass(frozen=True)
class LeanDecoder:
    """The layers of a target and its last norm."""

    layers: list[Layer]
    embed: Callable[[torch.Tensor], torch.Tensor]
    norm: Norm
    heads: int  # H
    key_heads: int  # K
    head_dim: int  # E
    rotary: nn.Module
    angles: dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def __call__(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | dict[str, torch.Tensor],
        window: Window,
        tapped: tuple[int, ...],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run ids (B, Q) at positions (B, Q) under additive masks (B, 1, Q, S), one for all layers or one a kind.

        Returns the outputs of the `tapped` layers, concatenated, (B, Q, taps * D), and the last states behind the final
        norm, (B, Q, D), which can be tapped too, as one layer more.
        """
        states, outputs = self.embed(ids), {}
        masks, rotations = self.prepare(states, positions, mask, window.capacity)
        for index, (layer, memory) in enumerate(zip(self.layers, window.layers(), strict=True)):
            states = self.run_layer(layer, states, rotations[layer.kind], masks[layer.kind], memory)
            if index in tapped:
                outputs[index] = states
        last = outputs[len(self.layers)] = self.norm(states)
        return torch.cat([outputs[i] for i in tapped], -1) if tapped else last[..., :0], last

    def prepare(
        self, states: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | dict[str, torch.Tensor], capacity: int
    ) -> tuple[dict[str, torch.Tensor], dict[str, tuple[torch.Tensor, torch.Tensor]]]:
        """Return by kind of layer the masks (B, 1, G Q, S) for packed heads, and cos and sin (B, Q, 1, R)."""
        groups, kinds = self.heads // self.key_heads, {layer.kind for layer in self.layers}
        if isinstance(mask, dict):
            masks = {kind: seen.repeat(1, 1, groups, 1) for kind, seen in mask.items()}
        else:
            masks = dict.fromkeys(kinds, mask.repeat(1, 1, groups, 1))
        tables = {kind: self.angle_tables(states, capacity, kind) for kind in kinds}
        return masks, {kind: tuple(table[positions][:, :, None] for table in tables[kind]) for kind in kinds}

    def angle_tables(self, states: torch.Tensor, capacity: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin (capacity, R) of all positions of a cache, the sign of the rotation in the sines."""
        if (kind, capacity) not in self.angles:
            by_kind = (kind,) if "layer_type" in signature(self.rotary.forward).parameters else ()
            cos, sin = self.rotary(states, torch.arange(capacity, device=states.device)[None], *by_kind)
            low, high = sin[0].chunk(2, dim=-1)
            self.angles[kind, capacity] = cos[0], torch.cat([-low, high], -1)
        return self.angles[kind, capacity]

    def run_layer(
        self,
        layer: Layer,
        states: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor,
        memory: LayerWindow,
    ) -> torch.Tensor:
        """Run one layer over states (B, Q, D). Its keys and values are written to `memory`."""
        rows, width, _ = states.shape
        qkv = F.linear(layer.before[0](states), layer.qkv, layer.qkv_bias).view(rows, width, -1, self.head_dim)
        both, values = qkv.split([self.heads + self.key_heads, self.key_heads], dim=2)  # (B, Q, H + K, E), (B, Q, K, E)
        if layer.qk_norm is not None:
            both = layer.qk_norm(both)
        if layer.rotates:
            both = rotate(both, *rotation)
        queries, keys = both.split([self.heads, self.key_heads], dim=2)
        memory.write(keys, values)
        queries = queries.unflatten(2, (self.key_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # (B, K, G Q, E)
        mixed = F.scaled_dot_product_attention(queries, memory.keys, memory.values, attn_mask=mask, scale=layer.scale)
        mixed = mixed.unflatten(2, (-1, width)).permute(0, 3, 1, 2, 4).flatten(2)  # (B, Q, H E)
        states = layer.add(states, layer.out(mixed), 0)
        return layer.add(states, layer.mlp(layer.before[1](states)), 1)


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first R features of heads (B, Q, heads, E) by angles (B, Q, 1, R)."""
    size, rest = cos.shape[-1], None
    if size < states.shape[-1]:
        states, rest = states[..., :size], states[..., size:]
    low, high = states.chunk(2, dim=-1)
    states = states * cos + torch.cat([high, low], -1) * sin
    return states if rest is None else torch.cat([states, rest], -1)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return whether two results differ by rounding only."""
    return bool((ours - theirs).norm() <= ROUNDING.get(theirs.dtype, COARSE) * theirs.norm())


def fuse(modules: list[nn.Module]) -> torch.Tensor:
    """Join the weights of linear layers, one below the other; each module's weight becomes a view of its part, so that
    this takes no memory. Raises UnknownLayer for modules of another class."""
    if any(type(module) is not nn.Linear for module in modules):
        raise UnknownLayer(f"projections of another class ({type(modules[0]).__name__})")
    joined = torch.cat([module.weight.data for module in modules])
    for module, part in zip(modules, joined.split([len(module.weight) for module in modules]), strict=True):
        module.weight.data = part
    return joined


def read_norm(module: nn.Module) -> Norm:
    """Read a norm module as an RMS norm. Raises UnknownLayer for any other."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is not None and eps is not None:
        states = torch.randn(2, len(weight), generator=torch.Generator().manual_seed(0)).to(weight)
        for norm in (Norm(weight, eps), Norm(weight.float() + 1, eps)):
            if close(norm(states), module(states)):
                return norm
    raise UnknownLayer(f"other norms ({type(module).__name__})")


def read_mlp(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Read a gated MLP, gate and up in one product; any other module stays as it is."""
    activation = getattr(module, "act_fn", getattr(module, "activation_fn", None))
    names = ["gate_up_proj"] if hasattr(module, "activation_fn") else ["gate_proj", "up_proj"]
    inner = [getattr(module, name, None) for name in names]
    if activation is None or any(type(part) is not nn.Linear or part.bias is not None for part in inner):

        def run(states: torch.Tensor) -> torch.Tensor:
            result = module(states)
            return result if isinstance(result, torch.Tensor) else result[0]  # some return their router's scores too

        return run
    weight, down, activation = fuse(inner), module.down_proj, F.silu if isinstance(activation, nn.SiLU) else activation

    def gated(states: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(states, weight).chunk(2, dim=-1)
        return down(activation(gate) * up)

    return gated


def read_layer(module: nn.Module, kind: str, heads: int, shared: int) -> Layer:
    """Read a decoder layer with `heads` query heads and `shared` key heads. Raises UnknownLayer, naming the part, for
    layers of another kind."""
    parts = {name: part for name, part in module.named_children() if not isinstance(part, nn.Dropout)}
    if parts.keys() - {"self_attn", "mlp"} not in (PLAIN, SANDWICH) or not parts.keys() >= {"self_attn", "mlp"}:
        raise UnknownLayer(f"other parts ({', '.join(sorted(parts))})")
    attention, second, after = module.self_attn, "post_attention_layernorm", None
    if parts.keys() >= SANDWICH:
        second = "pre_feedforward_layernorm"
        after = read_norm(parts["post_attention_layernorm"]), read_norm(parts["post_feedforward_layernorm"])
    names = ["qkv_proj"] if hasattr(attention, "qkv_proj") else ["q_proj", "k_proj", "v_proj"]
    projections, qk_norm = [getattr(attention, name) for name in names], None
    if getattr(attention, "q_norm", None) is not None:
        norms = read_norm(attention.q_norm), read_norm(attention.k_norm)
        if any(len(norm.weight) != attention.head_dim for norm in norms):
            raise UnknownLayer("norms over all heads together")
        weights = [norm.weight.expand(count, -1) for norm, count in zip(norms, (heads, shared), strict=True)]
        qk_norm = Norm(torch.cat(weights), norms[0].eps)
    biases = [projection.bias for projection in projections]
    return Layer(
        kind=kind,
        before=(read_norm(module.input_layernorm), read_norm(parts[second])),
        after=after,
        qkv=fuse(projections),
        qkv_bias=None if biases[0] is None else torch.cat(biases),
        qk_norm=qk_norm,
        out=attention.o_proj,
        mlp=read_mlp(module.mlp),
        scale=attention.scaling,
        residual=getattr(module, "residual_multiplier", 1.0),
        rotates=bool(getattr(attention, "use_rope", True)),
    )


def lean_decoder(
    body: nn.Module, kinds: list[str], heads: int, shared: int, embed: Callable[[torch.Tensor], torch.Tensor]
) -> LeanDecoder:
    """Return the lean pass of a decoder with `heads` query heads and `shared` key heads, whose layers attend in `kinds`
    of ways. Raises UnknownLayer with the part that it does not express."""
    layers = [read_layer(module, kind, heads, shared) for module, kind in zip(body.layers, kinds, strict=True)]
    size = len(layers[0].qkv) // (heads + 2 * shared)
    return LeanDecoder(layers, embed, read_norm(body.norm), heads, shared, size, body.rotary_emb)
