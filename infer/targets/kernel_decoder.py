"""The kernel decoder: our own implementation of decoder layers, which calls the operations of
`infer.kernels`. It runs targets, and also drafters during decoding. Its outputs are those of
Hugging Face's layers, up to rounding.

Queries, keys and values come from one matmul; the gate and up projections come from another. Rotary
angles are looked up in a table and applied to queries and keys together. The query heads that share
a key head are packed into the query axis, so that keys and values are never repeated. The KV cache
is written in place.

The decoder supports layers like those of Llama: RMS norms, rotary positions with any scaling,
grouped query heads, norms of queries and keys, biases, sliding windows and gated MLPs. For any
other MLP, such as a mixture of experts, it calls the Hugging Face module. `Target.kernel_decoder`
compares every layer with Hugging Face's layer before the decoder is used.
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
from infer.targets.recurrent import UncachedPackedView

CosinesAndSines = tuple[torch.Tensor, torch.Tensor]
RotationsByLayerType = dict[str, CosinesAndSines]
MasksByLayerType = dict[str, AttentionMask]


@dataclass(frozen=True)
class GatedMLP:
    """A gated MLP: down(activation(gate) * up). `gate_up` and `down` are weights in the form that
    `Kernels.linear` takes."""

    kernels: Kernels
    gate_up: object  # weights of the gate and up projections; the gate's outputs come first
    activation: Activation
    down: object  # weights of the down projection

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Return the MLP's output for normalised hidden states. Both have the shape (num_positions,
        hidden_size)."""
        gate_up = self.kernels.linear(states, self.gate_up)
        inner = self.kernels.gated_activation(gate_up, self.activation)
        return self.kernels.linear(inner, self.down)


@dataclass(frozen=True)
class DecoderLayer:
    """The weights and settings of one decoder layer. `qkv` (the joint projection to queries, keys
    and values) and `attention_output` (the output projection) are weights in the form that
    `Kernels.linear` takes."""

    kernels: Kernels
    layer_type: str  # kind of attention; it determines the layer's attention mask and rotary angles
    num_heads: int  # number of query heads
    num_key_heads: int  # number of key/value heads
    attention_norm: RMSNormWeights  # the norm before attention
    mlp_norm: RMSNormWeights  # the norm before the MLP
    # The norm after attention and the norm after the MLP (Gemma 2 and 3). None for other models.
    output_norms: tuple[RMSNormWeights, RMSNormWeights] | None
    qkv: object  # weights of the joint projection to queries, keys and values
    qk_norm: RMSNormWeights | None  # applied to every query and key head
    attention_output: object  # weights of attention's output projection
    # A GatedMLP, or another function from normalised hidden states to the MLP's output. Both have
    # the shape (num_positions, hidden_size).
    mlp: Callable[[torch.Tensor], torch.Tensor]
    attention_scale: float  # attention scores are multiplied by this factor
    # The outputs of attention and of the MLP are multiplied by this factor before they are added to
    # the residual stream (Granite).
    residual_scale: float
    uses_rope: bool

    @property
    def is_recordable(self) -> bool:
        """Return whether the calls of all operations of the layer can be recorded once and then
        replayed (`infer.kernels.launch`)."""
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
        """Run the layer on N positions, and write their keys and values to `layer_view`.

        states: (N, hidden_size), the residual stream before the layer
        normed: (N, hidden_size), `states` after `attention_norm`
        next_norm: the norm that follows this layer
        rotation: cosines and sines of the positions' rotary angles, (N, 1, rotated_size) each,
            where rotated_size is the number of rotated features of a head

        Returns the residual stream after the layer, and the same tensor after `next_norm`. Both
        have the shape (N, hidden_size).
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
    """The decoder layers and the final norm of a target or a drafter. A drafter has neither an
    embedding nor a rotary embedding here: both are None."""

    kernels: Kernels
    layers: list[DecoderLayer]
    final_norm: RMSNormWeights
    embed: Callable[[torch.Tensor], torch.Tensor] | None = None
    rotary_embedding: nn.Module | None = None
    # Keys are layer types, values are the cosines and sines of the rotary angles. A table has at
    # least as many positions as the largest cache that was used.
    rope_tables: RotationsByLayerType = field(default_factory=dict)

    def __call__(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        masks: MasksByLayerType,
        cache_view: CacheView | UncachedPackedView,
        feature_layer_ids: tuple[int, ...],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run all layers on token ids at absolute positions.

        ids, positions: (B, length) int64 each, or (N,) each for the N positions that are not
            padding
        feature_layer_ids: indices of the layers whose outputs are returned; the number of layers,
            as an index, selects the last layer's outputs after the final norm

        Returns two tensors whose leading axes are those of `ids`: the outputs of the layers
        `feature_layer_ids`, concatenated along the last axis, and the last layer's outputs after
        the final norm.
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
        """Run all layers on the hidden states `states` (num_positions, hidden_size).

        rotations: keys are layer types, values are the cosines and sines of the positions' rotary
            angles
        masks: keys are layer types, values are attention masks
        layer_views: where each layer stores its keys and values
        output_layer_ids: indices of the layers whose outputs are returned
        keep_output: applied to each returned layer output, for example to copy it before later
            layers overwrite it

        Returns the outputs (num_positions, hidden_size) by layer index. An additional entry, whose
        key is the number of layers, is the last hidden states after the final norm.
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
        """Return the cosines and sines of the rotary angles at `positions`, by layer type. Each has
        the shape (num_positions, 1, rotated_size), where rotated_size is the number of rotated
        features of a head.

        states: any tensor with the dtype and device of the layers
        positions: absolute positions, of any shape
        capacity: number of positions per batch row of the cache
        """
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
        """Return the cosines and sines of the rotary angles at all positions of a cache, for one
        layer type. Each has the shape (num_positions, rotated_size), where num_positions is at
        least `capacity` and rotated_size is the number of rotated features of a head. The sines of
        the first half of the features are negated, as the rotation needs them.

        states: any tensor with the dtype and device of the layers

        A table that was computed for a longer cache is also right for a shorter one:
        `Target.allocate_cache` refuses every capacity at which rotary angles would change.
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
