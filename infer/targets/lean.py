"""A lean decoder pass over the target's own weights: the arithmetic of Hugging Face's layers in a third
of the calls.

Queries, keys and values come out of one product, gate and up of another; rotary angles are looked up
and applied to queries and keys together; the query heads that share a key head are packed into the
query axis, so that keys and values are never repeated; the cache is written in place. What few
positions on a CPU go through is compiled (loops.py).

It expresses decoders of the Llama kind: RMS norms, rotary positions of any scaling, grouped heads,
norms of queries and keys, biases, sliding windows, gated MLPs; any other MLP (a mixture of experts) is
called as it is. Before it is used, `Target.decoder_pass` compares every layer with Hugging Face's.

B rows, Q new positions, S cached positions, D hidden size, H query heads, K key heads, G = H / K, E
head size, R of its features rotated.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature

import torch
from torch import nn
from torch.nn import functional as F

from infer.attention.attend import attend
from infer.attention.kv_cache import LayerWindow, PackedLayer, Window
from infer.attention.masks import Mask
from infer.targets import loops
from infer.targets.int8 import Int8Product
from infer.targets.recurrent import PackedWindow

Rotation = tuple[torch.Tensor, torch.Tensor]  # cosines and sines
Rotations, Masks = dict[str, Rotation], dict[str, Mask]  # by kind of layer


class Norm:
    """RMS norm. The weight is float32 where the module multiplies by one more than it has (Gemma)."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        """weight (D,), or (H + K, E): of queries and keys."""
        self.weight, self.eps = weight, eps
        # for compiled loops
        self.wide = weight.detach().to(torch.promote_types(weight.dtype, torch.float32)).contiguous()

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        if self.weight.ndim == 1 and loops.serve(states):
            return loops.norm(states, self.wide, self.eps)
        if self.weight.ndim == 1 and self.weight.dtype == states.dtype:
            return F.rms_norm(states, self.weight.shape, self.weight, self.eps)
        normed = F.rms_norm(states.to(self.weight.dtype), states.shape[-1:], None, self.eps) * self.weight
        return normed.to(states.dtype)


@dataclass(frozen=True)
class Product:
    """A linear layer."""

    weight: torch.Tensor  # (inputs, outputs)
    bias: torch.Tensor | None = None

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        return states @ self.weight if self.bias is None else torch.addmm(self.bias, states, self.weight)

    def normed(self, states: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Return the product (N, outputs) of states (N, inputs) behind a norm."""
        return self(norm(states))

    def onto(self, before: torch.Tensor, states: torch.Tensor, factor: float) -> torch.Tensor:
        """Return the product of states (N, inputs) times a factor, without the bias, added to others
        (N, outputs)."""
        return torch.addmm(before, states, self.weight, alpha=factor)

    @staticmethod
    def fuse(modules: list[nn.Linear]) -> "Product":
        """Join layers without biases that read the same states."""
        return Product(torch.cat([module.weight for module in modules]).detach().t())


def attend_packed(queries: torch.Tensor, memory: LayerWindow | PackedLayer, mask: Mask, scale: float) -> torch.Tensor:
    """Return the attention (B Q, H E) of queries (B Q, H, E) over a layer of a cache."""
    shape = memory.rows, memory.width, memory.keys.shape[1], -1, queries.shape[-1]
    queries = queries.view(shape).permute(0, 2, 3, 1, 4)  # (B, K, G, Q, E)
    mixed = attend(queries.flatten(2, 3), memory.keys, memory.values, mask, scale).view(queries.shape)
    return mixed.permute(0, 3, 1, 2, 4).reshape(memory.rows * memory.width, -1)


@dataclass(frozen=True)
class GatedMLP:
    """A gated MLP but for its last product."""

    both: Product  # D to gate and up, (2 I)
    activation: Callable[[torch.Tensor], torch.Tensor]
    bend: loops.Bend | None  # the same for compiled loops

    def __call__(self, states: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Return activation(gate) * up, (N, I), of states (N, D) behind a norm."""
        halves = self.both.normed(states, norm)
        if self.bend is not None and loops.serve(halves):
            return loops.gate(halves, self.bend)
        gate, up = halves.chunk(2, dim=-1)
        return self.activation(gate).mul_(up)


@dataclass(frozen=True)
class Layer:
    """What one decoder layer computes with. The first of two norms is attention's, the second the
    MLP's."""

    kind: str  # of its attention: which mask and which angles it takes
    heads: int  # H
    key_heads: int  # K
    before: tuple[Norm, Norm]
    after: tuple[Norm, Norm] | None  # of what attention and MLP add (Gemma 2 and 3)
    qkv: Product  # D to (H + 2 K) E
    qk_norm: Norm | None
    out: Product
    mlp: GatedMLP | Callable[[torch.Tensor, Norm], torch.Tensor]  # of states before the norm
    down: Product | None  # the MLP's last product, where it is not in `mlp`
    scale: float  # of attention's scores
    residual: float  # factor of what attention and MLP add (Granite)
    rotates: bool

    @property
    def in_order(self) -> bool:
        """Whether it attends over a cache place after place, as int8 layers do (`loops.attend_in_order`)."""
        return type(self.qkv) is Int8Product

    @property
    def products(self) -> tuple[Int8Product, ...] | None:
        """The products of a layer that can be on a tape: all are of codes, and go as they are into the
        residual stream."""
        if self.after is not None or type(self.mlp) is not GatedMLP or self.mlp.bend is None:
            return None
        found = self.qkv, self.out, self.mlp.both, self.down
        able = all(type(product) is Int8Product and product.taped for product in found)
        biased = self.residual != 1 and any(product.bias is not None for product in (self.out, self.down))
        return found if able and not biased else None

    def add(self, states: torch.Tensor, inner: torch.Tensor, product: Product | None, part: int) -> torch.Tensor:
        """Return the residual stream after attention (part 0) or the MLP (part 1), whose last product
        is to come."""
        if self.after is None and product is not None and product.bias is None:
            return product.onto(states, inner, self.residual)
        change = inner if product is None else product(inner)
        change = change if self.after is None else self.after[part](change)
        return states + (change if self.residual == 1 else change * self.residual)

    def run(self, states: torch.Tensor, rotation: Rotation, mask: Mask, memory: LayerWindow | PackedLayer):
        """Return states (B Q, D) after the layer. Keys and values are written to `memory`; rotation:
        cos and sin (B Q, 1, R) of the positions."""
        count = states.shape[0]  # `len` of a tensor takes a microsecond more
        parts = self.qkv.normed(states, self.before[0]).view(count, self.heads + 2 * self.key_heads, -1)
        queries = self.place(parts, rotation, memory)  # of parts (B Q, H + 2 K, E)
        mix = loops.attend_in_order if self.in_order and isinstance(memory, LayerWindow) else attend_packed
        states = self.add(states, mix(queries, memory, mask, self.scale), self.out, 0)
        return self.add(states, self.mlp(states, self.before[1]), self.down, 1)

    def place(self, parts: torch.Tensor, rotation: Rotation, memory: LayerWindow | PackedLayer) -> torch.Tensor:
        """Norm and rotate heads (B Q, H + 2 K, E), in place, write keys and values to `memory`; return
        the queries, (B Q, H, E)."""
        if isinstance(memory, LayerWindow) and loops.serve(parts):
            return loops.place(parts, self.qk_norm, rotation if self.rotates else None, memory)
        both = parts[:, : -self.key_heads]
        normed = both if self.qk_norm is None else self.qk_norm(both)
        if self.rotates:
            rotate_into(normed, *rotation, out=both)
        elif self.qk_norm is not None:
            both.copy_(normed)
        memory.write(parts[:, self.heads :])
        return parts[:, : self.heads]


@dataclass(frozen=True)
class LeanDecoder:
    """The layers of a target, or of a drafter, and the last norm; a target's embedding and angles."""

    layers: list[Layer]
    norm: Norm
    embed: Callable[[torch.Tensor], torch.Tensor] | None = None
    rotary: nn.Module | None = None
    angles: dict[str, Rotation] = field(default_factory=dict)  # of the longest cache so far, by kind of layer

    def __call__(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        masks: Masks,
        window: Window | PackedWindow,
        tapped: tuple[int, ...],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run ids (B, Q) at positions (B, Q) under the masks of the kinds of layers.

        Returns the outputs of the `tapped` layers, concatenated, (B, Q, taps * D), and the last states
        behind the final norm, (B, Q, D), which can be tapped too, as one layer more.
        """
        states = self.embed(ids.flatten())
        outputs = self.run(states, self.rotations(states, positions, window.capacity), masks, window, tapped)
        last = outputs[len(self.layers)]
        context = torch.cat([outputs[i] for i in tapped], -1) if tapped else last[..., :0]
        return context.unflatten(0, ids.shape), last.unflatten(0, ids.shape)

    def run(
        self, states: torch.Tensor, rotations: Rotations, masks: Masks, window: Window, tapped: tuple[int, ...]
    ) -> dict[int, torch.Tensor]:
        """Run the layers on states (B Q, D); return the outputs of the tapped ones and, behind the last
        one, the last states."""
        outputs = {}
        for index, (layer, memory) in enumerate(zip(self.layers, window.layers(), strict=True)):
            states = layer.run(states, rotations[layer.kind], masks[layer.kind], memory)
            if index in tapped:
                outputs[index] = states
        return outputs | {len(self.layers): self.norm(states)}

    def rotations(self, states: torch.Tensor, positions: torch.Tensor, capacity: int) -> Rotations:
        """Return by kind of layer cos and sin (B Q, 1, R) of positions (B, Q)."""
        tables = {layer.kind: self.angle_tables(states, capacity, layer.kind) for layer in self.layers}
        flat = positions.flatten()
        return {
            kind: (cos.index_select(0, flat)[:, None], sin.index_select(0, flat)[:, None])
            for kind, (cos, sin) in tables.items()
        }

    def angle_tables(self, states: torch.Tensor, capacity: int, kind: str) -> Rotation:
        """Return cos and sin (S, R) of all positions of a cache and perhaps some more, S >= capacity, the
        sign of the rotation in the sines. A table serves every shorter cache, since `Target.cache` refuses
        capacities at which angles would change."""
        if kind not in self.angles or len(self.angles[kind][0]) < capacity:
            by_kind = (kind,) if "layer_type" in signature(self.rotary.forward).parameters else ()
            cos, sin = self.rotary(states, torch.arange(capacity, device=states.device)[None], *by_kind)
            low, high = sin[0].chunk(2, dim=-1)
            self.angles[kind] = cos[0], torch.cat([-low, high], -1)
        return self.angles[kind]


def rotate_into(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
    """Write heads (B Q, heads, E), the first R features rotated by angles (B Q, 1, R), to `out`."""
    size = cos.shape[-1]
    if size < states.shape[-1]:
        out[..., size:] = states[..., size:]
    states = states[..., :size]
    out[..., :size] = torch.addcmul(states * cos, states.roll(size // 2, -1), sin)
