"""The DART drafter: one decoder layer over the target's hidden states and the tokens that follow
them.

B batch rows, C new context positions, T context length, N anchors, L drafted positions, W slots of
a block, D hidden size, F features of a position (3 D), H heads, E head size, V vocabulary.

DART section 3.2: the input at position i is a pair, g_i = fc(features_i) of the target's states
there, and the embedding e_{i+1} of the next token. In a block, the first slot is the input of the
last context position, whose next token is the bonus token. The other slots are copies of one
learned mask vector. Attention is causal everywhere.

Logits are shifted: a slot predicts the token after its own next token. So the first slot drafts the
first position, and W - 1 = L - 1 masks draft the others. In the unshifted variant (the ablation of
table 3), L masks each predict the token at their own position. The language model head is the
drafter's own and starts as the target's. Inputs of the context depend on inputs before them alone,
so decoding caches their keys and values.

The token after the last committed position is the bonus token, which is not committed yet. So the
features of that position are stored until it is.

Tensor names and the order of features and embeddings are those of the authors' checkpoints.
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
from infer.drafters.build import build_feature_layer_keys
from infer.drafters.dart import layouts
from infer.drafters.families import DRAFTER_FAMILIES
from infer.drafters.initial_weights import select_feature_layer
from infer.drafters.layer import CosSin, DrafterLayer, attend_cached_context, attend_packed_context
from infer.drafters.state import (
    AttentionPattern,
    BlockPosition,
    DrafterState,
    build_cached_block_mask,
)
from infer.targets.support import attention_layer_ids
from infer.targets.target import Target

CAUSAL_PATTERN: AttentionPattern = (True, None)
RANDOM_TOKENS_AVERAGED_FOR_MASK_VECTOR = (
    128  # random tokens from which the mask vector of a warm start is averaged
)


class DARTLayer(DrafterLayer):
    """A decoder layer whose attention reads an embedding and features, concatenated: (..., 2 D)."""

    drafter_only_prefixes = ("input_layernorm.", "mask_rep")

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config, 2 * config.hidden_size, config.dart_config["qk_norm"])
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)  # of features
        # the input of a masked slot, which is not normalised
        self.mask_rep = nn.Parameter(torch.empty(2 * config.hidden_size))

    def prepare_attention_inputs(
        self, states: torch.Tensor, next_embeddings: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the inputs of attention (..., 2 D).

        `states` (..., D) are projected features g, `next_embeddings` (..., D) the embeddings of the
        next tokens; without these, zeros take their place, as for a layer of the target.
        """
        if next_embeddings is None:
            next_embeddings = torch.zeros_like(states)
        return torch.cat([self.input_layernorm(next_embeddings), self.hidden_norm(states)], dim=-1)

    def adapt_target_weights(
        self, target_weights: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the weights of a target's layer in the names and shapes of this layer; the columns
        for embeddings of next tokens are zero."""
        weights = {
            name.replace("input_layernorm.", "hidden_norm."): tensor
            for name, tensor in target_weights.items()
        }
        for name, weight in weights.items():
            if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                weights[name] = torch.cat([torch.zeros_like(weight), weight], dim=1)
        return weights

    def build_blocks(
        self, projected: torch.Tensor, first_inputs: torch.Tensor, num_masks: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the states (B, N * W, D) and the inputs of attention (B, N * W, 2 D) of blocks.

        A block is a first slot with projected features (B, N, D) and inputs (B, N, 2 D), followed
        by `num_masks` masks. The state of a mask is the first half of its inputs.
        """
        masks = self.mask_rep.expand(*first_inputs.shape[:2], num_masks, -1)
        mask_states = masks[..., : projected.shape[-1]]
        states = torch.cat([projected[:, :, None], mask_states], dim=2)
        inputs = torch.cat([first_inputs[:, :, None], masks], dim=2)
        return states.flatten(1, 2), inputs.flatten(1, 2)


@dataclass
class DARTState(DrafterState):
    """Keys and values of all committed positions but the last of each batch row, and the features
    of the last one.

    The token after the last position is not known before the next commit.
    """

    pending_features: torch.Tensor  # (rows, F) of every batch row's last position
    is_empty: bool = False  # no position was added to these batch rows yet

    @contextmanager
    def add(self, count: int) -> Generator[Self]:
        """Yield a state of `count` new empty batch rows in the same memory, to be filled; they
        become the next rows of this state when the block is left."""
        pending_features = self.pending_features[len(self.pending_features) - count :]
        with self.cache.add_rows(count) as cache:
            yield replace(self, cache=cache, pending_features=pending_features, is_empty=True)
        used_rows = len(self.cache.lengths)
        self.pending_features[used_rows - count : used_rows] = pending_features.clone()

    def keep(self, order: list[int]) -> None:
        """Replace the batch rows: new row i is the old row order[i]; other rows are removed."""
        super().keep(order)
        self.pending_features[: len(order)] = self.pending_features[order]


class DART(Drafter):
    """The DART drafter. Parameter names are those of the published checkpoints."""

    anchor_offset = 1  # a block begins with the last context position, before the bonus token
    family = DRAFTER_FAMILIES["dart"]
    read_config = staticmethod(layouts.read_config)
    default_layer_ids = staticmethod(layouts.default_layer_ids)
    attention_patterns = [CAUSAL_PATTERN]

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)
        hidden_size = config.hidden_size
        self.first_draft_slot = 0 if self.family_config["shifted"] else 1
        self.num_queries = self.block_size - 1 + self.first_draft_slot  # W
        self.fc = nn.Linear(len(self.layer_ids) * hidden_size, hidden_size, bias=False)
        self.midlayer = DARTLayer(config)
        self.norm = nn.RMSNorm(hidden_size, eps=config.rms_norm_eps)
        self.add_embedding_and_head(embedding=False, head=True)
        self.add_conditional_head()

    @staticmethod
    def choose_warm_start_layers(
        layer_ids: tuple[int, ...], layers: int, target_config: PretrainedConfig
    ) -> list[int]:
        """Return the target's first attention layer after the last layer that the drafter reads;
        its last attention layer if there is none after it."""
        all_attention_layers = attention_layer_ids(target_config)
        for layer in all_attention_layers:
            if layer > layer_ids[-1]:
                return [layer]
        return all_attention_layers[-1:]

    @staticmethod
    def build_family_config(
        options: DrafterConfig, target_config: PretrainedConfig, target: Target | None
    ) -> dict[str, Any]:
        """Return `dart_config` of a new drafter; queries and keys have norms where the target's
        have."""
        qk_norm = True
        if target is not None:
            target_layers = cast(nn.ModuleList, target.decoder.layers)
            for index in attention_layer_ids(target_config)[:1]:
                names = dict(target_layers[index].named_parameters())
                qk_norm = "self_attn.q_norm.weight" in names
        family_config = build_feature_layer_keys(options, target_config)
        return family_config | {"shifted": True, "qk_norm": qk_norm}

    def apply_final_norm(self, states: torch.Tensor) -> torch.Tensor:
        """Return the input (..., D) of the language model head. The authors' code applies the norm
        twice, and drafters in their layout need the same."""
        if self.family_config.get("norm_twice"):
            states = self.norm(states)
        return self.norm(states)

    def init_weights(self, generator: torch.Generator) -> None:
        """Draw initial weights, also of the mask vector (DART appendix B.2)."""
        super().init_weights(generator)
        std = self.config.initializer_range
        nn.init.normal_(self.midlayer.mask_rep, std=std, generator=generator)

    def finish_warm_start(
        self,
        layer_weights: list[dict[str, torch.Tensor]],
        target: Target,
        generator: torch.Generator | None,
    ) -> None:
        """Read the last feature layer alone, and set the mask vector to the mean input over random
        tokens.

        A random mask vector would outweigh what attention adds to it (LOG.md). It stays random
        where the target's weights are not in memory.
        """
        select_feature_layer(self.fc, -1)
        if any(weight.is_meta for weight in target.decoder.parameters()):
            return

        shape = (1, RANDOM_TOKENS_AVERAGED_FOR_MASK_VECTOR)
        ids = torch.randint(target.config.vocab_size, shape, generator=generator)
        ids = ids.to(target.device)
        positions = torch.arange(RANDOM_TOKENS_AVERAGED_FOR_MASK_VECTOR)[None].to(ids)
        features = target.compute_packed_features(
            ids, positions, torch.zeros_like(ids), self.layer_ids
        )
        projected = self.fc(features.context[0].to(self.fc.weight))  # (tokens, D)
        embedded = target.embed(ids[0]).to(projected)
        inputs = self.midlayer.prepare_attention_inputs(projected, embedded)
        feature_inputs = inputs[:, projected.shape[1] :]
        mask_rep = torch.cat([projected.mean(0), feature_inputs.mean(0)])
        self.midlayer.mask_rep.copy_(mask_rep)

    def prepare_inputs(
        self, target: Target, ids: torch.Tensor, positions: torch.Tensor, anchors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the embeddings (B, T, D) of the next tokens of packed sequences (B, T), and the
        first positions (B, N) of blocks, one before their anchors (B, N).

        The token after the last one of a document is another document's, but no block attends to
        that position.
        """
        next_embeddings = target.embed(ids.roll(-1, dims=1)).to(self.norm.weight.dtype)
        first_positions = (anchors - 1).clamp(min=0)  # an unused anchor may have any position
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

        `features` (B, T, F), `positions` (B, T) and `next_embeddings` (B, T, D) are the context;
        `first_positions` (B, N) are the indices of the blocks' first slots in it. `mask` is that of
        `build_training_mask`, with columns [context | blocks]. Returns states (B, N * W, D) that went
        through `normalize_for_head`.
        """
        offsets = torch.arange(self.num_queries, device=first_positions.device)
        block_positions = positions.gather(1, first_positions)[..., None] + offsets
        rotary = self.compute_rotary(block_positions.flatten(1))  # (B, N * W, E)
        context_rotary = self.compute_rotary(positions)

        def gather_first_slots(values: torch.Tensor) -> torch.Tensor:
            indices = first_positions[..., None].expand(-1, -1, values.shape[-1])
            return values.gather(1, indices)

        def run_layer(projected: torch.Tensor) -> torch.Tensor:
            inputs = self.midlayer.prepare_attention_inputs(projected, next_embeddings)
            keys_values = self.midlayer.self_attn.project_keys_values(inputs, *context_rotary)
            states, block_inputs = self.midlayer.build_blocks(
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
        """Return a state with an empty cache and no pending features."""
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
        """Write the keys and values of positions whose next token is now known to the cache.

        These are the pending position of each batch row and all new ones but the last, whose
        features become pending.
        """
        cache = state.cache
        rows = len(features)
        if counts_on_device is None:
            added = torch.tensor(counts, device=features.device)
        else:
            added = counts_on_device
        if counts is None:
            assert counts_on_device is not None
            # Pending features of batch rows that are being filled must stay.
            added = counts_on_device * cache.used_row_mask[:rows]
        row_indices = torch.arange(rows, device=added.device)
        last_features = features[row_indices, (added - 1).clamp(min=0)]  # (B, F)

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
            keys_values = torch.stack([keys, values]).transpose(2, 3)  # (2, B, C, H, E)
            keys_values = keys_values.flatten(3).flatten(1, 2)  # (2, B * C, H * E)
            slots = cache.make_view(width).slot_mapping[:rows].flatten()
            cache.buffer.index_copy_(1, slots, keys_values)
        cache.advance_lengths(counts, counts_on_device)

    def compute_block_states(
        self, target: Target, bonus: torch.Tensor, position: BlockPosition, state: DARTState
    ) -> torch.Tensor:
        """Return the states (B, W, D) of blocks after bonus tokens (B,), as `forward` computes
        them."""
        mask = build_cached_block_mask(position, self.num_queries, CAUSAL_PATTERN)
        pending_features = state.pending_features[: len(bonus)]
        projected = self.fc(pending_features[:, None])  # (B, 1, D)
        embedded = target.embed(bonus)[:, None].to(pending_features.dtype)
        first_inputs = self.midlayer.prepare_attention_inputs(projected, embedded)
        states, inputs = self.midlayer.build_blocks(projected, first_inputs, self.num_queries - 1)
        attend = partial(attend_cached_context, position.cache_window, 0, mask)
        return self.normalize_for_head(self.midlayer(states, position.rotary, attend, inputs))
