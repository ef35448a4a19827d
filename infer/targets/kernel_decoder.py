"""Our own decoder, which runs a target's layers, or a drafter's layers in decoding, on the
operations of `infer.kernels`. It computes what Hugging Face's layers compute.

Queries, keys and values come from one matmul, gate and up projection from another; rotary angles
are looked up in a table and applied to queries and keys together; the query heads that share a key
head are packed into the query axis, so that keys and values are never repeated; the cache is
written in place.

It supports decoders of the Llama kind: RMS norms, rotary positions with any scaling, grouped heads,
norms of queries and keys, biases, sliding windows and gated MLPs. Any other MLP (a mixture of
experts) is called as a module. Before it is used, `Target.kernel_decoder` compares every layer with
Hugging Face's layer.

N positions of B batch rows, Q each, S cached positions, D hidden size, I inner size, H query heads,
K key heads, E head size, R rotated features of a head.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from inspect import signature

import torch
from torch import nn

from infer.attention.kv_cache import CacheView, LayerCacheView, PackedLayerView
from infer.attention.masks import AttentionMask
from infer.kernels.operands import Activation, LinearWeights, RMSNormWeights
from infer.kernels.table import Kernels
from infer.targets.recurrent import PackedCacheView

CosinesAndSines = tuple[torch.Tensor, torch.Tensor]
RotationsByLayerType = dict[str, CosinesAndSines]
MasksByLayerType = dict[str, AttentionMask]


@dataclass(frozen=True)
class GatedMLP:
    """A gated MLP: down(activation(gate) * up). `gate_up` and `down` are operands of
    `Kernels.linear`."""

    kernels: Kernels
    gate_up: object  # D to 2 I, gate first
    activation: Activation
    down: object  # I to D

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Return the MLP's output (N, D) for normed states (N, D)."""
        gate_up = self.kernels.linear(states, self.gate_up)
        inner = self.kernels.gated_activation(gate_up, self.activation)
        return self.kernels.linear(inner, self.down)


@dataclass(frozen=True)
class DecoderLayer:
    """The weights and settings of one decoder layer. `qkv` and `attention_output` are operands of
    `Kernels.linear`."""

    kernels: Kernels
    layer_type: str  # selects the attention mask and the rotary angles
    num_heads: int  # H
    num_key_heads: int  # K
    attention_norm: RMSNormWeights  # before attention
    mlp_norm: RMSNormWeights  # before the MLP
    output_norms: (
        tuple[RMSNormWeights, RMSNormWeights] | None
    )  # after attention and after the MLP (Gemma 2 and 3)
    qkv: object  # D to (H + 2 K) E
    qk_norm: RMSNormWeights | None  # of the heads of queries and keys
    attention_output: object  # H E to D
    mlp: Callable[[torch.Tensor], torch.Tensor]  # a GatedMLP, or a function of normed states (N, D)
    attention_scale: float  # factor of attention scores
    residual_scale: float  # factor of what attention and MLP add to the residual stream (Granite)
    uses_rope: bool

    @property
    def is_recordable(self) -> bool:
        """Return whether every operation of the layer can be recorded (`infer.kernels.launch`)."""
        if type(self.mlp) is not GatedMLP or self.mlp.activation.coefficients is None:
            return False
        operands = (self.qkv, self.attention_output, self.mlp.gate_up, self.mlp.down)
        return not any(isinstance(operand, LinearWeights) for operand in operands)

    def run(
        self,
        states: torch.Tensor,
        normed: torch.Tensor,
        next_norm: RMSNormWeights,
        rotation: CosinesAndSines,
        mask: AttentionMask,
        layer_view: LayerCacheView | PackedLayerView,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layer, and write keys and values to `layer_view`.

        states: (N, D), the residual stream. normed: (N, D), the same after `attention_norm`.
        next_norm: the norm after this layer. rotation: cosines and sines (N, 1, R) of the
        positions. Returns the residual stream after the layer and the same after `next_norm`, (N,
        D) each.
        """
        kernels = self.kernels
        projected = kernels.linear(normed, self.qkv)
        num_projected_heads = self.num_heads + 2 * self.num_key_heads
        heads = projected.view(len(states), 1, num_projected_heads, -1)
        queries = kernels.qk_norm_rope_write(
            heads,
            self.num_key_heads,
            self.qk_norm,
            rotation if self.uses_rope else None,
            layer_view,
        )

        mixed = kernels.attend(queries, layer_view, mask, self.attention_scale)
        change = kernels.linear(mixed, self.attention_output)
        if self.output_norms is not None:
            change = kernels.rms_norm(change, self.output_norms[0])
        states, normed = kernels.add_rms_norm(states, change, self.mlp_norm, self.residual_scale)

        change = self.mlp(normed)
        if self.output_norms is not None:
            change = kernels.rms_norm(change, self.output_norms[1])
        return kernels.add_rms_norm(states, change, next_norm, self.residual_scale)


@dataclass(frozen=True)
class KernelDecoder:
    """The layers and the last norm of a target or a drafter; of a target also its embedding and
    rotary embedding."""

    kernels: Kernels
    layers: list[DecoderLayer]
    final_norm: RMSNormWeights
    embed: Callable[[torch.Tensor], torch.Tensor] | None = None
    rotary_embedding: nn.Module | None = None
    # by layer type, for the largest cache so far
    rope_tables: RotationsByLayerType = field(default_factory=dict)

    def __call__(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        masks: MasksByLayerType,
        cache_view: CacheView | PackedCacheView,
        feature_layer_ids: tuple[int, ...],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run token ids (B, Q), or those (N,) that are not padding, at absolute positions of the
        same shape.

        Returns the outputs of the layers in `feature_layer_ids`, concatenated, (B, Q, len * D), and
        the last hidden states after the final norm, (B, Q, D). The layer id after the last layer's
        selects the latter.
        """
        assert self.embed is not None
        states = self.embed(ids.flatten())
        rotations = self.look_up_rotations(states, positions, cache_view.capacity)
        layer_views = cache_view.layer_views()
        outputs = self.run(states, rotations, masks, layer_views, feature_layer_ids)
        last = outputs[len(self.layers)]
        features = last[..., :0]
        if feature_layer_ids:
            features = torch.cat([outputs[layer] for layer in feature_layer_ids], -1)
        return features.unflatten(0, ids.shape), last.unflatten(0, ids.shape)

    def run(
        self,
        states: torch.Tensor,
        rotations: RotationsByLayerType,
        masks: MasksByLayerType,
        layer_views: Iterable[LayerCacheView | PackedLayerView],
        output_layer_ids: tuple[int, ...],
        keep_output: Callable[[torch.Tensor], torch.Tensor] = lambda states: states,
    ) -> dict[int, torch.Tensor]:
        """Run all layers on states (N, D).

        rotations: by layer type, cosines and sines (N, 1, R) each. keep_output: protects a layer's
        output from being overwritten by later layers. Returns the outputs (N, D) of the layers in
        `output_layer_ids` by layer id, and under the id after the last layer's the last states
        after the final norm.
        """
        outputs = {}
        norms = [layer.attention_norm for layer in self.layers]
        next_norms = [*norms[1:], self.final_norm]
        normed = self.kernels.rms_norm(states, norms[0])
        steps = zip(self.layers, layer_views, next_norms, strict=True)
        for index, (layer, layer_view, next_norm) in enumerate(steps):
            layer_type = layer.layer_type
            states, normed = layer.run(
                states, normed, next_norm, rotations[layer_type], masks[layer_type], layer_view
            )
            if index in output_layer_ids:
                outputs[index] = keep_output(states)
        outputs[len(self.layers)] = normed
        return outputs

    def look_up_rotations(
        self, states: torch.Tensor, positions: torch.Tensor, capacity: int
    ) -> RotationsByLayerType:
        """Return by layer type the cosines and sines (N, 1, R) of `positions`, which has N entries,
        in a cache of `capacity` positions. states: any tensor with the layers' dtype and device."""
        layer_types = dict.fromkeys(layer.layer_type for layer in self.layers)
        tables = {
            layer_type: self.get_rope_table(states, capacity, layer_type)
            for layer_type in layer_types
        }
        flat_positions = positions.flatten()
        rotations = {}
        for layer_type, (cos, sin) in tables.items():
            rotations[layer_type] = (
                cos.index_select(0, flat_positions)[:, None],
                sin.index_select(0, flat_positions)[:, None],
            )
        return rotations

    def get_rope_table(
        self, states: torch.Tensor, capacity: int, layer_type: str
    ) -> CosinesAndSines:
        """Return cosines and sines (S, R), S >= capacity, of all positions of a cache. The sines of
        the first half of the features are negated, as the rotation needs them.

        A table computed for a longer cache serves shorter ones, since `Target.allocate_cache`
        refuses capacities at which angles would change.
        """
        table = self.rope_tables.get(layer_type)
        if table is None or len(table[0]) < capacity:
            assert self.rotary_embedding is not None
            arguments = [states, torch.arange(capacity, device=states.device)[None]]
            if "layer_type" in signature(self.rotary_embedding.forward).parameters:
                cos, sin = self.rotary_embedding(*arguments, layer_type)
            else:
                cos, sin = self.rotary_embedding(*arguments)
            first_half, second_half = sin[0].chunk(2, dim=-1)
            table = (cos[0], torch.cat([-first_half, second_half], -1))
            self.rope_tables[layer_type] = table
        return table
