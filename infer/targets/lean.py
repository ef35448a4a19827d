"""A lean decoder pass over the target's own weights: the arithmetic of Hugging Face's layers in a third of the calls.

Queries, keys and values come out of one product, gate and up of another; rotary angles are looked up and applied to
queries and keys together; the query heads that share a key head are packed into the query axis, so that keys and values
are never repeated; the cache is written in place.

It expresses decoders of the Llama kind: RMS norms, rotary positions of any scaling, grouped heads, norms of queries and
keys, biases, sliding windows, gated MLPs. Any other MLP (a mixture of experts) is called as it is. `lean_decoder`
compares every layer with Hugging Face's on random states, and gives the reason where one differs.

B rows, Q new positions, S cached positions, D hidden size, H query heads, K key heads, G = H / K, E head size, R rotated
part of a head.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from infer.attention.kv_cache import Window
from infer.attention.masks import cached
from infer.targets.support import head_size
from infer.targets.support import key_heads as key_heads_of

if TYPE_CHECKING:
    from infer.targets.target import Target

PLAIN = {"input_layernorm", "post_attention_layernorm"}  # norms of a layer of Llama's kind
SANDWICH = PLAIN | {"pre_feedforward_layernorm", "post_feedforward_layernorm"}  # of Gemma 2's: before and after
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}  # relative difference that rounding explains; else BFLOAT16
BFLOAT16 = 0.05


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
    """What one decoder layer computes with."""

    kind: str  # of its attention: which mask and which angles it takes
    norms: tuple[Norm, Norm]  # before attention and before the MLP
    after: tuple[Norm, Norm] | None  # of what attention and MLP add (Gemma 2 and 3)
    qkv: torch.Tensor  # ((H + 2 K) E, D)
    qkv_bias: torch.Tensor | None
    qk_norm: Norm | None
    out: nn.Module
    mlp: Callable[[torch.Tensor], torch.Tensor]
    scale: float  # of attention's scores
    residual: float  # factor of what attention and MLP add (Granite)
    rotates: bool


@dataclass(frozen=True)
class LeanDecoder:
    """The layers of a target and its last norm. The fused weights are the model's own: its projections become views of
    them, so that they take no memory of their own."""

    layers: list[Layer]
    embed: Callable[[torch.Tensor], torch.Tensor]
    norm: Norm
    heads: int  # H
    key_heads: int  # K
    head_dim: int  # E
    rotary: Callable[[torch.Tensor, torch.Tensor, str], tuple[torch.Tensor, torch.Tensor]]
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
        norm, (B, Q, D).
        """
        states, outputs = self.embed(ids), []
        masks, rotations = self.prepare(states, positions, mask, window.capacity)
        for index, layer in enumerate(self.layers):
            states = self.run_layer(index, states, rotations[layer.kind], masks[layer.kind], window)
            if index in tapped:
                outputs.append(states)
        last = self.norm(states)
        return torch.cat(outputs, -1) if outputs else last[..., :0], last

    def prepare(
        self, states: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | dict[str, torch.Tensor], capacity: int
    ) -> tuple[dict[str, torch.Tensor], dict[str, tuple[torch.Tensor, torch.Tensor]]]:
        """Masks (B, 1, G Q, S) for packed heads, and cos and sin (B, Q, 1, E), by kind of layer."""
        kinds = {layer.kind for layer in self.layers}
        by_kind = mask if isinstance(mask, dict) else dict.fromkeys(kinds, mask)
        packed = {id(seen): seen.repeat(1, 1, self.heads // self.key_heads, 1) for seen in by_kind.values()}
        tables = {kind: self.angle_tables(states, capacity, kind) for kind in kinds}
        rotations = {kind: tuple(table[positions][:, :, None] for table in tables[kind]) for kind in kinds}
        return {kind: packed[id(seen)] for kind, seen in by_kind.items()}, rotations

    def angle_tables(self, states: torch.Tensor, capacity: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin (capacity, R) of all positions a cache has room for, the sign of the rotation in the sines."""
        if (kind, capacity) not in self.angles:
            cos, sin = self.rotary(states, torch.arange(capacity, device=states.device)[None], kind)
            low, high = sin[0].chunk(2, dim=-1)
            self.angles[kind, capacity] = cos[0], torch.cat([-low, high], -1)
        return self.angles[kind, capacity]

    def run_layer(
        self,
        index: int,
        states: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor,
        window: Window,
    ) -> torch.Tensor:
        """One layer over states (B, Q, D). Its keys and values are written to the window."""
        layer, (rows, width, _) = self.layers[index], states.shape
        qkv = F.linear(layer.norms[0](states), layer.qkv, layer.qkv_bias)
        qkv = qkv.view(rows, width, -1, self.head_dim)  # (B, Q, H + 2 K, E)
        both, values = qkv[:, :, : -self.key_heads], qkv[:, :, -self.key_heads :]
        if layer.qk_norm is not None:
            both = layer.qk_norm(both)
        if layer.rotates:
            both = rotate(both, *rotation)
        window.write(index, both[:, :, self.heads :].flatten(2), values.flatten(2))
        keys, values = window.read(index, rows)  # (B, K, S, E)
        queries = both[:, :, : self.heads].unflatten(2, (self.key_heads, -1))  # (B, Q, K, G, E)
        queries = queries.permute(0, 2, 3, 1, 4).flatten(2, 3)  # (B, K, G Q, E)
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=layer.scale)
        mixed = mixed.unflatten(2, (-1, width)).permute(0, 3, 1, 2, 4).flatten(2)  # (B, Q, H E)
        states = add(states, layer.out(mixed), layer, 0)
        return add(states, layer.mlp(layer.norms[1](states)), layer, 1)


def add(states: torch.Tensor, change: torch.Tensor, layer: Layer, part: int) -> torch.Tensor:
    """The residual stream after attention (part 0) or the MLP (part 1)."""
    if layer.after is not None:
        change = layer.after[part](change)
    return states + (change if layer.residual == 1 else change * layer.residual)


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first R features of heads (B, Q, heads, E) by angles (B, Q, 1, R)."""
    size = cos.shape[-1]
    turning = states if size == states.shape[-1] else states[..., :size]
    low, high = turning.chunk(2, dim=-1)
    turned = turning * cos + torch.cat([high, low], -1) * sin
    return turned if size == states.shape[-1] else torch.cat([turned, states[..., size:]], -1)


def fuse(modules: list[nn.Module]) -> torch.Tensor:
    """The weights of linear layers below one another; each module's own becomes a view of its part."""
    if any(type(module) is not nn.Linear for module in modules):
        raise UnknownLayer(f"a projection of another class than nn.Linear ({type(modules[0]).__name__})")
    if len(modules) == 1:
        return modules[0].weight
    fused = torch.cat([module.weight.data for module in modules])
    for module, part in zip(modules, fused.split([len(module.weight) for module in modules]), strict=True):
        module.weight.data = part
    return fused


def norm_of(module: nn.Module) -> Norm:
    """A norm module as an RMS norm. Raises UnknownLayer for any other."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or eps is None:
        raise UnknownLayer(f"norms without weight or epsilon ({type(module).__name__})")
    states = torch.randn(2, len(weight), generator=torch.Generator().manual_seed(0)).to(weight)
    for norm in (Norm(weight, eps), Norm(weight.float() + 1, eps)):
        if close(norm(states), module(states)):
            return norm
    raise UnknownLayer(f"norms that are no RMS norms ({type(module).__name__})")


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two results differ by rounding only."""
    return bool((ours - theirs).norm() <= ROUNDING.get(theirs.dtype, BFLOAT16) * theirs.norm())


def mlp_of(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """A gated MLP with gate and up in one product; any other module as it is."""
    if all(hasattr(module, name) for name in ("gate_up_proj", "down_proj", "activation_fn")):
        inner, activation = module.gate_up_proj, module.activation_fn
        weight, down = fuse([inner]), module.down_proj
    elif all(type(getattr(module, name, None)) is nn.Linear for name in ("gate_proj", "up_proj", "down_proj")):
        inner, activation, down = module.gate_proj, module.act_fn, module.down_proj
        if inner.bias is not None:
            return module
        weight = fuse([module.gate_proj, module.up_proj])
    else:

        def run(states: torch.Tensor) -> torch.Tensor:
            result = module(states)
            return result if isinstance(result, torch.Tensor) else result[0]  # some experts also give their router's

        return run
    activation = F.silu if isinstance(activation, nn.SiLU) else activation

    def gated(states: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(states, weight).chunk(2, dim=-1)
        return down(activation(gate) * up)

    return gated


def layer_of(module: nn.Module, kind: str, heads: int, key_heads: int) -> Layer:
    """What a decoder layer computes with. Raises UnknownLayer, naming the part, for layers of another kind."""
    parts = dict(module.named_children())
    names = {name for name, part in parts.items() if not isinstance(part, nn.Dropout)} - {"self_attn", "mlp"}
    if names not in (PLAIN, SANDWICH) or "self_attn" not in parts or "mlp" not in parts:
        raise UnknownLayer(f"other parts ({', '.join(sorted(parts))})")
    attention, before_mlp, after = module.self_attn, "post_attention_layernorm", None
    if names == SANDWICH:
        before_mlp = "pre_feedforward_layernorm"
        after = norm_of(module.post_attention_layernorm), norm_of(module.post_feedforward_layernorm)
    if hasattr(attention, "qkv_proj"):
        projections = [attention.qkv_proj]
    else:
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    qk_norm = None
    if getattr(attention, "q_norm", None) is not None:
        query, key = norm_of(attention.q_norm), norm_of(attention.k_norm)
        if len(query.weight) != attention.head_dim:
            raise UnknownLayer("norms over all query heads together")
        weight = torch.cat([query.weight.expand(heads, -1), key.weight.expand(key_heads, -1)])
        qk_norm = Norm(weight, query.eps)
    biases = [projection.bias for projection in projections]
    return Layer(
        kind=kind,
        norms=(norm_of(module.input_layernorm), norm_of(parts[before_mlp])),
        after=after,
        qkv=fuse(projections),
        qkv_bias=None if biases[0] is None else torch.cat(biases),
        qk_norm=qk_norm,
        out=attention.o_proj,
        mlp=mlp_of(module.mlp),
        scale=attention.scaling,
        residual=getattr(module, "residual_multiplier", 1.0),
        rotates=bool(getattr(attention, "use_rope", True)),
    )


def lean_decoder(target: "Target") -> LeanDecoder:
    """The lean pass of a target, compared with Hugging Face's layers. Raises UnknownLayer with the part that it does not
    express, or the first layer whose results differ by more than rounding."""
    config, body = target.config, target.body
    kinds = getattr(config, "layer_types", None) or ["all"] * len(body.layers)
    if len(target.windows) == 1:
        kinds = list(target.windows) * len(body.layers)
    heads, key_heads = config.num_attention_heads, key_heads_of(config)
    by_kind = "layer_type" in signature(body.rotary_emb.forward).parameters

    def rotary(states: torch.Tensor, positions: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        return body.rotary_emb(states, positions, kind) if by_kind else body.rotary_emb(states, positions)

    layers = [layer_of(*pair, heads, key_heads) for pair in zip(body.layers, kinds, strict=True)]
    decoder = LeanDecoder(layers, target.embed, norm_of(body.norm), heads, key_heads, head_size(config), rotary)
    compare(decoder, target)
    return decoder


@torch.no_grad()
def compare(decoder: LeanDecoder, target: "Target", context: int = 9, width: int = 5) -> None:
    """Run random tokens behind a random context through Hugging Face's layers, and each lean layer on the same input.
    Raises UnknownLayer for the first that differs."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.config.vocab_size, (2, context + width), generator=generator).to(target.device)
    cache = target.cache(2, context + width)
    with cache.add(2) as rows:
        target.extend(ids[:, :context].tolist(), rows, ())
    causal = torch.ones(width, width, dtype=torch.bool, device=ids.device).tril().expand(2, -1, -1)
    window, positions = cache.window(width), cache.positions(2, width)
    mask = target.masks(cached(cache.ends, causal, window.extent), positions, cache.ends)
    every = tuple(range(len(decoder.layers)))
    outputs, last = target.library_pass(ids[:, context:], positions, mask, window, every)
    states = decoder.embed(ids[:, context:])
    masks, rotations = decoder.prepare(states, positions, mask, window.capacity)
    for index, theirs in enumerate(outputs.chunk(len(every), dim=-1)):
        kind = decoder.layers[index].kind
        ours = decoder.run_layer(index, states, rotations[kind], masks[kind], window)
        if not close(ours - states, theirs - states):
            raise UnknownLayer(f"layer {index} computes something else ({type(target.body.layers[index]).__name__})")
        states = theirs
    if not close(decoder.norm(states), last):
        raise UnknownLayer("a last norm of its own")
