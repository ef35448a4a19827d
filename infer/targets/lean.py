"""The decoder pass over a target's own weights, or over a drafter's while decoding: what Hugging
Face's layers compute, written once against the operations of `infer.kernels`.

Queries, keys and values come out of one matmul, gate and up of another; rotary angles are looked up
and applied to queries and keys together; the query heads that share a key head are packed into the
query axis, so that keys and values are never repeated; the cache is written in place.

It expresses decoders of the Llama kind: RMS norms, rotary positions of any scaling, grouped heads,
norms of queries and keys, biases, sliding windows, gated MLPs; any other MLP (a mixture of experts)
is called as it is. Before it is used, `Target.lean` compares every layer with Hugging Face's.

N positions of B batch rows, Q each, S cached positions, D hidden size, I inner size, H query heads,
K key heads, E head size, R of its features rotated.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from inspect import signature

import torch
from torch import nn

from infer.attention.kv_cache import LayerWindow, PackedLayer, Window
from infer.attention.masks import Mask
from infer.kernels.operands import Activation, Linear, Norm
from infer.kernels.table import Kernels
from infer.targets.recurrent import PackedWindow

Rotation = tuple[torch.Tensor, torch.Tensor]  # cosines and sines
# by kind of layer
Rotations = dict[str, Rotation]
Masks = dict[str, Mask]


@dataclass(frozen=True)
class GatedMLP:
    """A gated MLP: activation(gate) * up, projected down. `gate_up` and `down` are operands of
    `linear`."""

    kernels: Kernels
    gate_up: object  # D to gate and up, (2 I)
    activation: Activation
    down: object  # I to D

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Return the MLP's output (N, D) for normed states (N, D)."""
        kernels = self.kernels
        both = kernels.linear(states, self.gate_up)
        return kernels.linear(kernels.gated_activation(both, self.activation), self.down)


@dataclass(frozen=True)
class Layer:
    """What one decoder layer computes with. `qkv` and `out` are operands of `linear`."""

    kernels: Kernels
    kind: str  # of its attention: which mask and which angles it takes
    heads: int  # H
    key_heads: int  # K
    attention_norm: Norm  # before attention
    mlp_norm: Norm  # before the MLP
    output_norms: tuple[Norm, Norm] | None  # of what attention and MLP add (Gemma 2 and 3)
    qkv: object  # D to (H + 2 K) E
    qk_norm: Norm | None
    out: object
    mlp: GatedMLP | Callable[[torch.Tensor], torch.Tensor]  # of normed states
    scale: float  # of attention's scores
    residual: float  # factor of what attention and MLP add (Granite)
    rotates: bool

    @property
    def recordable(self) -> bool:
        """Whether all that it computes are operations that a recorder sees
        (`infer.kernels.launch`)."""
        if type(self.mlp) is not GatedMLP or self.mlp.activation.coefficients is None:
            return False
        operands = self.qkv, self.out, self.mlp.gate_up, self.mlp.down
        return not any(isinstance(operand, Linear) for operand in operands)

    def run(
        self,
        states: torch.Tensor,
        normed: torch.Tensor,
        next_norm: Norm,
        rotation: Rotation,
        mask: Mask,
        memory: LayerWindow | PackedLayer,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return states (N, D) after the layer, and the same behind the norm that comes next.

        states (N, D) come with `normed`, their RMS norm by `attention_norm`. Keys and values are
        written to `memory`;
        rotation: cos and sin (N, 1, R) of the positions."""
        kernels = self.kernels
        heads = kernels.linear(normed, self.qkv).view(
            len(states), 1, self.heads + 2 * self.key_heads, -1
        )
        turning = rotation if self.rotates else None
        queries = kernels.qk_norm_rope_write(heads, self.key_heads, self.qk_norm, turning, memory)

        change = kernels.linear(kernels.attend(queries, memory, mask, self.scale), self.out)
        if self.output_norms is not None:
            change = kernels.rms_norm(change, self.output_norms[0])
        states, normed = kernels.add_rms_norm(states, change, self.mlp_norm, self.residual)

        change = self.mlp(normed)
        if self.output_norms is not None:
            change = kernels.rms_norm(change, self.output_norms[1])
        return kernels.add_rms_norm(states, change, next_norm, self.residual)


@dataclass(frozen=True)
class LeanDecoder:
    """The layers of a target, or of a drafter, and the last norm; a target's embedding and
    angles."""

    kernels: Kernels
    layers: list[Layer]
    norm: Norm
    embed: Callable[[torch.Tensor], torch.Tensor] | None = None
    rotary: nn.Module | None = None
    angles: dict[str, Rotation] = field(
        default_factory=dict
    )  # of the longest cache so far, by kind of layer

    def __call__(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        masks: Masks,
        window: Window | PackedWindow,
        tapped: tuple[int, ...],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run ids (B, Q) at positions (B, Q) under the masks of the kinds of layers.

        Returns the outputs of the `tapped` layers, concatenated, (B, Q, taps * D), and the last
        states behind the final norm, (B, Q, D), which can be tapped too, as one layer more.
        """
        states = self.embed(ids.flatten())
        rotations = self.rotations(states, positions, window.capacity)
        outputs = self.run(states, rotations, masks, window.layers(), tapped)
        last = outputs[len(self.layers)]
        context = torch.cat([outputs[i] for i in tapped], -1) if tapped else last[..., :0]
        return context.unflatten(0, ids.shape), last.unflatten(0, ids.shape)

    def run(
        self,
        states: torch.Tensor,
        rotations: Rotations,
        masks: Masks,
        memories: list[LayerWindow] | Iterator[PackedLayer],
        tapped: tuple[int, ...],
        keep: Callable[[torch.Tensor], torch.Tensor] = lambda states: states,
    ) -> dict[int, torch.Tensor]:
        """Run the layers on states (N, D), each with its memory; return the outputs of the tapped
        ones and, behind the last one, the last states behind the final norm. `keep` makes an output
        last beyond the next layers."""
        outputs = {}
        norms = [layer.attention_norm for layer in self.layers]
        normed = self.kernels.rms_norm(states, norms[0])
        following = zip(self.layers, memories, [*norms[1:], self.norm], strict=True)
        for index, (layer, memory, next_norm) in enumerate(following):
            kind = layer.kind
            states, normed = layer.run(
                states, normed, next_norm, rotations[kind], masks[kind], memory
            )
            if index in tapped:
                outputs[index] = keep(states)
        return outputs | {len(self.layers): normed}

    def rotations(self, states: torch.Tensor, positions: torch.Tensor, capacity: int) -> Rotations:
        """Return by kind of layer cos and sin (B Q, 1, R) of positions (B, Q)."""
        tables = {
            layer.kind: self.angle_tables(states, capacity, layer.kind) for layer in self.layers
        }
        flat = positions.flatten()
        return {
            kind: (cos.index_select(0, flat)[:, None], sin.index_select(0, flat)[:, None])
            for kind, (cos, sin) in tables.items()
        }

    def angle_tables(self, states: torch.Tensor, capacity: int, kind: str) -> Rotation:
        """Return cos and sin (S, R) of all positions of a cache and perhaps some more, S >=
        capacity, the sign of the rotation in the sines. A table serves every shorter cache, since
        `Target.cache` refuses capacities at which angles would change."""
        if kind not in self.angles or len(self.angles[kind][0]) < capacity:
            by_kind = (kind,) if "layer_type" in signature(self.rotary.forward).parameters else ()
            cos, sin = self.rotary(
                states, torch.arange(capacity, device=states.device)[None], *by_kind
            )
            low, high = sin[0].chunk(2, dim=-1)
            self.angles[kind] = cos[0], torch.cat([-low, high], -1)
        return self.angles[kind]
