"""The DART drafter: one decoder layer whose input at a position combines the target's hidden states
at this position with the embedding of the next token.

A slot is an input position of a drafted block. B batch rows, C new context positions, T context
length, N anchors (positions of the blocks' bonus tokens), L drafted positions, W slots of a block,
D hidden size, F = 3 * D size of a position's features (hidden states of three target layers,
concatenated), H key and value heads, E head size.

The input at position i (DART section 3.2) consists of g_i = fc(features_i), computed from the
target's hidden states at position i, and of the embedding e_{i+1} of the token at position i + 1.
The first slot of a block is the last context position, so its next token is the bonus token. The
input of every other slot is one learned mask vector. Attention is causal everywhere.

Logits are shifted: a slot at position i predicts the token at position i + 2. So the first slot,
whose next token is the bonus token, drafts the first position. The W - 1 = L - 1 mask slots draft
the other positions. In the unshifted variant of DART (table 3 of the paper), there are L mask
slots, and the one at position i predicts the token at position i + 1. The drafter has its own
language model head, which starts as a copy of the target's.

The keys and values of a context position depend on the next token, but on no later token, so
decoding caches them. The token after the last committed position is the bonus token, which is not
committed yet. Until the bonus token is committed, decoding stores the features of the last
committed position (called pending features) instead of its keys and values.

The names of tensors are those of the authors' checkpoints. The order in which features and
embeddings are concatenated is also theirs.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, Qwen3Config

from infer.attention.kv_cache import KVCache
from infer.attention.masks import AttentionMask
from infer.config import DrafterConfig
from infer.drafters.base import Drafter
from infer.drafters.build import build_feature_layer_config
from infer.drafters.dart import layouts
from infer.drafters.families import DRAFTER_FAMILIES
from infer.drafters.initial_weights import init_projection_to_select_layer
from infer.drafters.layer import CosSin, DrafterLayer, attend_cached_context, attend_packed_context
from infer.drafters.state import (
    AttentionPattern,
    BlockPosition,
    DrafterState,
    build_cached_block_mask,
)
from infer.targets.support import get_attention_layer_ids
from infer.targets.target import Target

CAUSAL_PATTERN: AttentionPattern = (True, None)
# A warm start sets the mask vector, which is the input of all masked positions, to the mean input
# of the copied target layer over this number of random tokens.
NUM_RANDOM_TOKENS_FOR_MASK_VECTOR = 128


class DARTLayer(DrafterLayer):
    """DART's decoder layer. The input of its attention, (..., 2 * hidden_size), is the embedding of
    the next token, concatenated with the projected hidden states of the target."""

    drafter_only_tensor_prefixes = ("input_layernorm.", "mask_rep")

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config, 2 * config.hidden_size, config.dart_config["qk_norm"])
        # norm of the target's projected hidden states; `input_layernorm` is the norm of the
        # embeddings of the next tokens
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        # mask vector: the input of attention, to which no norm is applied, at every slot (input
        # position) of a block except the first
        self.mask_rep = nn.Parameter(torch.empty(2 * config.hidden_size))

    def prepare_attention_inputs(
        self, states: torch.Tensor, next_embeddings: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the inputs of attention (..., 2 * hidden_size).

        `states` (..., hidden_size) are the projected hidden states of the target. `next_embeddings`
        (..., hidden_size) are the embeddings of the next tokens. None means zeros; a warm start
        uses this to compare the layer with a target layer, which has no such input.
        """
        if next_embeddings is None:
            next_embeddings = torch.zeros_like(states)
        return torch.cat([self.input_layernorm(next_embeddings), self.hidden_norm(states)], dim=-1)

    def adapt_target_weights(
        self, target_weights: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Convert a target layer's weights to the names and shapes of this layer's weights.

        This layer's query, key and value projections have additional columns, which read the
        embeddings of the next tokens. These columns are zero.
        """
        weights = {
            name.replace("input_layernorm.", "hidden_norm."): tensor
            for name, tensor in target_weights.items()
        }
        for name, weight in weights.items():
            if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                weights[name] = torch.cat([torch.zeros_like(weight), weight], dim=1)
        return weights

    def build_block_states_and_inputs(
        self, projected: torch.Tensor, first_inputs: torch.Tensor, num_masks: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Build the inputs of drafted blocks. A block consists of one first slot (input position)
        and `num_masks` mask slots.

        `projected` (B, num_blocks, D) are the hidden states of the first slots, where D is the
        hidden size. `first_inputs` (B, num_blocks, 2 * D) are the inputs of attention of the first
        slots. In a mask slot, the input of attention is the mask vector, and the hidden state is
        its first half.

        Returns the hidden states (B, num_blocks * num_slots, D) and the inputs of attention (B,
        num_blocks * num_slots, 2 * D) of all slots.
        """
        masks = self.mask_rep.expand(*first_inputs.shape[:2], num_masks, -1)
        mask_states = masks[..., : projected.shape[-1]]
        states = torch.cat([projected[:, :, None], mask_states], dim=2)
        inputs = torch.cat([first_inputs[:, :, None], masks], dim=2)
        return states.flatten(1, 2), inputs.flatten(1, 2)


@dataclass
class DARTState(DrafterState):
    """The decoding state of a batch: the KV cache, and the last committed position's features
    (concatenated hidden states of target layers) for each batch row.

    The cache holds all committed positions except the last, whose keys and values depend on the
    next token, which is not committed yet.
    """

    # (batch rows, features): the target's hidden states at each batch row's last committed position
    pending_features: torch.Tensor
    is_empty: bool = False  # whether the batch rows have no committed position yet

    @contextmanager
    def add(self, count: int) -> Generator[Self]:
        """Yield a state of `count` new empty batch rows, which the caller fills. The new state uses
        this state's memory. When the `with` block ends, the new batch rows are appended to this
        state."""
        pending_features = self.pending_features[len(self.pending_features) - count :]
        with self.cache.add_rows(count) as cache:
            yield replace(self, cache=cache, pending_features=pending_features, is_empty=True)
        used_rows = len(self.cache.lengths)
        self.pending_features[used_rows - count : used_rows] = pending_features.clone()

    def keep(self, order: list[int]) -> None:
        """Select and reorder batch rows: row order[i] becomes row i. Rows that are not in `order`
        are removed."""
        super().keep(order)
        self.pending_features[: len(order)] = self.pending_features[order]


class DART(Drafter):
    """The DART drafter. Its tensors have the same names as in the published checkpoints."""

    # A block's first slot is the last context position, one before the bonus token.
    anchor_offset = 1
    family = DRAFTER_FAMILIES["dart"]
    read_config = staticmethod(layouts.read_config)
    default_layer_ids = staticmethod(layouts.default_layer_ids)
    attention_patterns = [CAUSAL_PATTERN]

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)
        hidden_size = config.hidden_size
        self.first_draft_slot = 0 if self.family_config["shifted"] else 1
        # number of slots (input positions) of a block
        self.num_queries = self.block_size - 1 + self.first_draft_slot
        self.fc = nn.Linear(len(self.layer_ids) * hidden_size, hidden_size, bias=False)
        self.midlayer = DARTLayer(config)
        self.norm = nn.RMSNorm(hidden_size, eps=config.rms_norm_eps)
        self.add_embedding_and_head(embedding=False, head=True)
        self.add_conditional_and_confidence_heads()

    @staticmethod
    def choose_warm_start_layers(
        layer_ids: tuple[int, ...], layers: int, target_config: PretrainedConfig
    ) -> list[int]:
        """Return, as a list, the target layer whose weights the drafter's layer copies in a warm
        start.

        This is the first attention layer of the target that follows all layers in `layer_ids` (the
        layers that the drafter reads). If no attention layer follows them, it is the target's last
        attention layer. `layers` is ignored: the drafter has one layer.
        """
        all_attention_layers = get_attention_layer_ids(target_config)
        for layer in all_attention_layers:
            if layer > layer_ids[-1]:
                return [layer]
        return all_attention_layers[-1:]

    @staticmethod
    def build_family_config(
        options: DrafterConfig, target_config: PretrainedConfig, target: Target | None
    ) -> dict[str, Any]:
        """Return the object `dart_config` for the config.json of a new drafter.

        The drafter normalises queries and keys if the target does, or if `target` is None.
        """
        qk_norm = True
        if target is not None:
            target_layers = cast(nn.ModuleList, target.decoder.layers)
            for index in get_attention_layer_ids(target_config)[:1]:
                names = dict(target_layers[index].named_parameters())
                qk_norm = "self_attn.q_norm.weight" in names
        family_config = build_feature_layer_config(options, target_config)
        return family_config | {"shifted": True, "qk_norm": qk_norm}

    def apply_final_norm(self, states: torch.Tensor) -> torch.Tensor:
        """Apply the final norm to the last layer's hidden states (..., hidden_size).

        The norm is applied twice if `dart_config` says so, as in the DART authors' code.
        """
        if self.family_config.get("norm_twice"):
            states = self.norm(states)
        return self.norm(states)

    def init_weights(self, generator: torch.Generator) -> None:
        """Initialise all weights. The mask vector is drawn from a normal distribution (DART
        appendix B.2)."""
        super().init_weights(generator)
        std = self.config.initializer_range
        nn.init.normal_(self.midlayer.mask_rep, std=std, generator=generator)

    def finish_warm_start(
        self,
        layer_weights: list[dict[str, torch.Tensor]],
        target: Target,
        generator: torch.Generator | None,
    ) -> None:
        """Set the weights of `fc` and the mask vector for a warm start.

        The weights of `fc` are set so that it returns the hidden states of the last target layer in
        `layer_ids`. The mask vector is set to the mean input of the layer over random tokens,
        because a random mask vector would be larger than the output of attention that is added to
        it. If the target's weights are not in memory, the mask vector stays random.
        """
        init_projection_to_select_layer(self.fc, -1)
        if any(weight.is_meta for weight in target.decoder.parameters()):
            return

        shape = (1, NUM_RANDOM_TOKENS_FOR_MASK_VECTOR)
        ids = torch.randint(target.config.vocab_size, shape, generator=generator)
        ids = ids.to(target.device)
        positions = torch.arange(NUM_RANDOM_TOKENS_FOR_MASK_VECTOR)[None].to(ids)
        features = target.compute_packed_features(
            ids, positions, torch.zeros_like(ids), self.layer_ids
        )
        projected = self.fc(features.layer_features[0].to(self.fc.weight))  # (tokens, hidden size)
        embedded = target.embed(ids[0]).to(projected)
        inputs = self.midlayer.prepare_attention_inputs(projected, embedded)
        feature_inputs = inputs[:, projected.shape[1] :]
        mask_rep = torch.cat([projected.mean(0), feature_inputs.mean(0)])
        self.midlayer.mask_rep.copy_(mask_rep)

    def prepare_training_inputs(
        self, target: Target, ids: torch.Tensor, positions: torch.Tensor, anchors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the inputs of `forward` for packed sequences of T tokens each.

        `ids` (B, T) are the tokens. `anchors` (B, num_blocks) are the indices of the blocks' bonus
        tokens. Returns the embeddings (B, T, hidden_size) of the token after each position, and the
        indices (B, num_blocks) of the blocks' first slots, each one position before the bonus
        token. The embedding returned for a document's last position does not matter, because no
        block attends to this position.
        """
        next_embeddings = target.embed(ids.roll(-1, dims=1)).to(self.norm.weight.dtype)
        # Unused entries of `anchors` may be 0. Their blocks are ignored, so clamping is harmless.
        first_positions = (anchors - 1).clamp(min=0)
        return next_embeddings, first_positions

    def forward(
        self,
        features: torch.Tensor,
        positions: torch.Tensor,
        next_embeddings: torch.Tensor,
        first_positions: torch.Tensor,
        mask: AttentionMask | torch.Tensor,
    ) -> torch.Tensor:
        """Run all blocks of packed sequences at once, in training (DART section 3.3).

        `features` (B, T, num_features), `positions` (B, T) and `next_embeddings`
        (B, T, hidden_size) describe the T context positions. `first_positions` (B, num_blocks) are
        the indices of the blocks' first slots (input positions). `mask` comes from
        `build_training_mask`; its columns are the context positions, then all slots. Returns the
        slots' hidden states (B, num_blocks * num_slots, hidden_size) after `normalize_for_head`.
        """
        offsets = torch.arange(self.num_queries, device=first_positions.device)
        block_positions = positions.gather(1, first_positions)[..., None] + offsets
        # (B, slots of all blocks, head size)
        rotary = self.compute_rotary(block_positions.flatten(1))
        context_rotary = self.compute_rotary(positions)

        def gather_first_slots(values: torch.Tensor) -> torch.Tensor:
            indices = first_positions[..., None].expand(-1, -1, values.shape[-1])
            return values.gather(1, indices)

        def run_layer(projected: torch.Tensor) -> torch.Tensor:
            inputs = self.midlayer.prepare_attention_inputs(projected, next_embeddings)
            keys_values = self.midlayer.self_attn.project_keys_values(inputs, *context_rotary)
            states, block_inputs = self.midlayer.build_block_states_and_inputs(
                gather_first_slots(projected), gather_first_slots(inputs), self.num_queries - 1
            )
            attend = partial(attend_packed_context, keys_values, mask)
            return self.midlayer(states, rotary, attend, block_inputs)

        projected = self.fc(features)  # (B, T, D)
        if self.recompute:
            states = checkpoint(run_layer, projected, use_reentrant=False)
        else:
            states = run_layer(projected)
        return self.normalize_for_head(states)

    def build_state(self, cache: KVCache, rotary_tables: CosSin) -> DARTState:
        """Return a decoding state with an empty KV cache and zeros as the features of the last
        committed positions."""
        num_features = len(self.layer_ids) * self.config.hidden_size
        weight = self.norm.weight
        pending_features = torch.zeros(
            cache.num_rows, num_features, dtype=weight.dtype, device=weight.device
        )
        return DARTState(cache, rotary_tables, pending_features)

    @torch.no_grad()
    def update_context(
        self,
        target: Target,
        features: torch.Tensor,
        tokens: torch.Tensor,
        counts: list[int] | None,
        state: DARTState,
        counts_on_device: torch.Tensor | None = None,
    ) -> None:
        """Add newly committed positions to the decoding state; the arguments are explained in
        `Drafter.update_context`.

        A position's keys and values are computed when the next token has been committed, because
        they depend on it. This call therefore writes two things to the KV cache: the last position
        of the previous call, and the new positions except the last one. It stores the features of
        the last new position.
        """
        cache = state.cache
        rows = len(features)
        if counts_on_device is None:
            added = torch.tensor(counts, device=features.device)
        else:
            added = counts_on_device
        if counts is None:
            assert counts_on_device is not None
            # Batch rows that are not in use yet get no new positions.
            added = counts_on_device * cache.used_row_mask[:rows]
        row_indices = torch.arange(rows, device=added.device)
        last_features = features[row_indices, (added - 1).clamp(min=0)]  # (B, features)

        if state.is_empty:
            assert counts is not None
            features = features[:, :-1]
            tokens = tokens[:, 1:]
            counts = [count - 1 for count in counts]
            counts_on_device = added - 1
        else:
            pending_features = state.pending_features[:rows]
            last_features = torch.where(added[:, None] > 0, last_features, pending_features)
            features = torch.cat([pending_features[:, None], features[:, :-1]], dim=1)
        state.pending_features[:rows] = last_features
        state.is_empty = False

        width = features.shape[1]
        if width:
            next_embeddings = self.embed(target, tokens)
            inputs = self.midlayer.prepare_attention_inputs(self.fc(features), next_embeddings)
            keys, values = self.midlayer.self_attn.project_keys_values(
                inputs, *state.next_rotary(rows, width)
            )
            # (keys and values, B, new positions, heads, head size)
            keys_values = torch.stack([keys, values]).transpose(2, 3)
            # (keys and values, B * new positions, heads * head size)
            keys_values = keys_values.flatten(3).flatten(1, 2)
            slots = cache.make_view(width).slot_mapping[:rows].flatten()
            cache.buffer.index_copy_(1, slots, keys_values)
        cache.advance_lengths(counts, counts_on_device)

    def compute_block_states(
        self, target: Target, bonus: torch.Tensor, position: BlockPosition, state: DARTState
    ) -> torch.Tensor:
        """Compute the hidden states (B, num_slots, hidden_size) of the slots (input positions) of
        one block per batch row.

        `bonus` (B,) are the bonus tokens, after which the blocks are drafted. The result is the
        same as that of `forward` in training.
        """
        mask = build_cached_block_mask(position, self.num_queries, CAUSAL_PATTERN)
        pending_features = state.pending_features[: len(bonus)]
        projected = self.fc(pending_features[:, None])  # (B, 1, D)
        embedded = target.embed(bonus)[:, None].to(pending_features.dtype)
        first_inputs = self.midlayer.prepare_attention_inputs(projected, embedded)
        states, inputs = self.midlayer.build_block_states_and_inputs(
            projected, first_inputs, self.num_queries - 1
        )
        attend = partial(attend_cached_context, position.cache_view, 0, mask)
        return self.normalize_for_head(self.midlayer(states, position.rotary, attend, inputs))
