"""The DART drafter: one decoder layer over the target's hidden states and the tokens that follow them.

B rows, C new context positions, T context length, N anchors, L drafted positions, W queries of a block, D hidden size,
F features of a position (3 D), H heads, E head size, V vocabulary.

DART section 3.2: the item at position i is the pair of what the target felt there, g_i = fc(features_i), and the token
after it, e_{i+1}; behind the last item, whose token is the bonus token, stand copies of one learned mask vector. All is
causal, and logits are shifted: an item says which token follows its own one, so that the last item drafts the first
position and W - 1 = L - 1 masks the others. Unshifted (table 3's ablation), L masks say which token stands in their
place. The head is the drafter's own and starts as the target's. Items before the last see only items before them:
their keys and values are what decoding keeps.

The token behind the last committed position, the bonus token, is not in the memory yet: that position's features wait
for it.

Tensor names and the order of features and embeddings are those of the authors' published checkpoints.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from infer.attention.attend import attend_grouped, has_kernel
from infer.attention.kv_cache import KVCache
from infer.attention.masks import block_mask, masked_attention
from infer.config import DrafterConfig
from infer.drafters.base import Attention, Drafter, DraftState, Place, init_last_norm, rotate, taps
from infer.drafters.dart import layouts
from infer.drafters.families import FAMILIES
from infer.drafters.warm import can_start_as, weights_of
from infer.targets.layers import read_norm
from infer.targets.support import attention_layers
from infer.targets.target import Target

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class Layer(nn.Module):
    """The decoder layer; its projections take an embedding and features side by side, (..., 2 D)."""

    own_weights = ("input_layernorm.", "mask_rep")  # what no layer of a target has

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)  # of the embedding
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)  # of the features
        self.mask_rep = nn.Parameter(torch.empty(2 * config.hidden_size))  # never normalised
        self.self_attn = Attention(config, 2 * config.hidden_size, config.dart_config["qk_norm"])
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = Qwen3MLP(config)

    def items(self, projected: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """g (..., D) and the embeddings of the following tokens (..., D) to the inputs of attention (..., 2 D)."""
        return torch.cat([self.input_layernorm(following), self.hidden_norm(projected)], dim=-1)

    def finish(self, residual: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """What attention found (B, H, Q, E) onto the residuals (B, Q, D), and the feed-forward half of the layer."""
        states = residual + self.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))
        return states + self.mlp(self.post_attention_layernorm(states))

    def forward(self, states: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], attend) -> torch.Tensor:
        """The layer over features (B, Q, D) without embeddings: what a layer of the target's computes."""
        items = self.items(states, torch.zeros_like(states))
        queries, (keys, values) = self.self_attn.queries(items, *rotary), self.self_attn.keys_values(items, *rotary)
        return self.finish(states, attend(queries, keys, values))


@dataclass
class DARTState(DraftState):
    """Keys and values of all items of every row but the last: the token behind the last position is not known before it
    is committed, so that position's features wait."""

    pending: torch.Tensor  # (rows, F) features of every row's last position
    fresh: bool = False  # rows that have no last position yet

    @contextmanager
    def add(self, count: int) -> Iterator["DARTState"]:
        """`count` more rows, as a state of their own over the same memory, to be filled."""
        pending = self.pending[len(self.pending) - count :]
        with self.cache.add(count) as cache:
            yield replace(self, cache=cache, pending=pending, fresh=True)
        used = len(self.cache.lengths)
        self.pending[used - count : used] = pending.clone()

    def keep(self, order: list[int]) -> None:
        """Row i becomes what row order[i] was."""
        super().keep(order)
        self.pending[: len(order)] = self.pending[order]

    def pass_inputs(self, rows: int) -> tuple[torch.Tensor]:
        """The features (rows, F) of the last positions."""
        return (self.pending[:rows],)


class DART(Drafter):
    """The drafter. Parameters carry the names of the published checkpoints."""

    anchor_offset = 1  # a block begins with the last item, one position before the bonus token
    family = FAMILIES["dart"]
    writers = {"dart": layouts.write_published}
    read = staticmethod(layouts.read)
    attention_patterns = [(True, None)]
    projects_once = True

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)
        self.first_draft_slot = 0 if self.own["shifted"] else 1
        self.num_queries = self.block_size - 1 + self.first_draft_slot  # W
        self.fc = nn.Linear(len(self.layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = Layer(config)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.add_ends(embedding=False, head=True)
        self.add_conditional_head()

    @staticmethod
    def default_layer_ids(target_layers: int, layers: int) -> list[int]:
        return layouts.default_layer_ids(target_layers)

    @staticmethod
    def warm_layers(layer_ids: tuple[int, ...], layers: int, theirs: PretrainedConfig) -> list[int]:
        """Return the target's layer behind the last tapped one that attends; the last such one, if there is none."""
        attending = attention_layers(theirs)
        return ([i for i in attending if i > layer_ids[-1]] or attending[-1:])[:1]

    @staticmethod
    def own_config(options: DrafterConfig, theirs: PretrainedConfig, target: Target | None) -> dict:
        """Return `dart_config`; queries and keys have norms where the target's have."""
        attending = [] if target is None else [target.body.layers[i] for i in attention_layers(theirs)[:1]]
        norms = all(hasattr(getattr(layer, "self_attn", None), "q_norm") for layer in attending)
        return taps(options, theirs) | {"shifted": options.shifted, "qk_norm": norms}

    def last_norm(self, states: torch.Tensor) -> torch.Tensor:
        """What the head reads, (..., D). The authors' code applies this norm twice, and so do drafters of theirs."""
        return self.norm(self.norm(states) if self.own.get("norm_twice") else states)

    def init_weights(self, generator: torch.Generator) -> None:
        """Draw fresh weights, for the mask vector too (DART appendix B.2)."""
        super().init_weights(generator)
        nn.init.normal_(self.midlayer.mask_rep, std=self.config.initializer_range, generator=generator)

    @torch.no_grad()
    def initialize(self, target: Target, generator: torch.Generator, warm: bool) -> None:
        """Draw fresh weights and copy the target's head. If `warm`, also take over the target's own layer where it
        computes what ours does, and a mask that goes with it, unless the target has no weights to run with."""
        self.init_weights(generator)
        init_last_norm(self, target)
        self.lm_head.weight.copy_(target.head_weight)
        if warm and self.warm_start(target) and not any(weight.is_meta for weight in target.body.parameters()):
            self._init_mask(target, generator)

    @torch.no_grad()
    def warm_start(self, target: Target) -> bool:
        """Start from the target's last norm and the layer behind the last tapped one, which reads that layer's features
        and no embeddings yet, where it computes what ours does; return whether it does."""
        chosen = self.warm_layers(self.layer_ids, 1, target.config)
        if not chosen:
            return False
        source = target.body.layers[chosen[0]]
        theirs = dict(weights_of(source, target))
        size = self.config.hidden_size
        if "input_layernorm.weight" in theirs:
            theirs["hidden_norm.weight"] = theirs.pop("input_layernorm.weight")
        for name in theirs:
            if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                theirs[name] = torch.cat([torch.zeros_like(theirs[name]), theirs[name]], dim=1)
        if not can_start_as(self.midlayer, theirs, source, self, target):
            return False
        self.midlayer.load_state_dict(theirs, strict=False)
        self.fc.weight.zero_()
        self.fc.weight[:, -size:] = torch.eye(size)
        self.norm.weight.copy_(read_norm(target.body.norm).weight)
        return True

    def _init_mask(self, target: Target, generator: torch.Generator) -> None:
        """Set the mask to the average item of a random text: a random mask drowns what attention adds to it
        (LOG.md)."""
        ids = torch.randint(target.config.vocab_size, (1, 128), generator=generator).to(target.device)
        features = target.packed_features(ids, torch.arange(128)[None].to(ids), torch.zeros_like(ids), self.layer_ids)
        projected = self.fc(features.context[0].to(self.fc.weight))  # (128, D)
        items = self.midlayer.items(projected, target.embed(ids[0]).to(projected))
        self.midlayer.mask_rep.copy_(torch.cat([projected.mean(0), items[:, projected.shape[1] :].mean(0)]))

    def inputs(self, target: Target, ids: torch.Tensor, positions: torch.Tensor, anchors: torch.Tensor):
        """What `forward` takes of packed rows, ids (B, T), beside features and mask: the tokens after every position,
        embedded, (B, T, D), and where the last items of the blocks stand, one before their anchors (B, N). The token
        after a document's end is another's; no block sees that item."""
        following = target.embed(ids.roll(-1, dims=1)).to(self.norm.weight.dtype)
        return following, (anchors - 1).clamp(min=0)  # an unused slot may hold any position

    def forward(
        self,
        features: torch.Tensor,
        positions: torch.Tensor,
        following: torch.Tensor,
        last: torch.Tensor,
        mask: "torch.Tensor | BlockMask",
    ) -> torch.Tensor:
        """Training: all blocks of packed rows at once (DART section 3.3, prefix-shared).

        features (B, T, F), positions (B, T) and following (B, T, D) of the context's items; last (B, N): the items that
        begin the blocks; mask: `train.blocks.block_mask`, from queries of the blocks to keys [context | blocks].
        Returns hidden states before the head, (B, N*W, D).
        """
        steps = torch.arange(self.num_queries, device=last.device)
        block_positions = (positions.gather(1, last)[..., None] + steps).flatten(1)  # (B, N*W)
        rotary, context_rotary = self.angles(block_positions), self.angles(positions)
        layer, attention = self.midlayer, self.midlayer.self_attn

        def blocks(of_items: torch.Tensor, of_mask: torch.Tensor) -> torch.Tensor:
            """What stands in the blocks, (B, N*W, C), from what belongs to their first items, (B, N, C), and to a mask,
            (C,): all masks are alike, so that they are projected once."""
            masked = of_mask.expand(*of_items.shape[:2], self.num_queries - 1, -1)
            return torch.cat([of_items[:, :, None], masked], dim=2).flatten(1, 2)

        def through(projected: torch.Tensor) -> torch.Tensor:
            items = layer.items(projected, following)  # (B, T, 2 D)
            keys, values = attention.keys_values(items, *context_rotary)
            begin = items.gather(1, last[..., None].expand(-1, -1, items.shape[-1]))  # (B, N, 2 D)
            q, k, v = (
                attention.heads(blocks(project(begin), project(layer.mask_rep)))  # (B, N*W, H, E)
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            queries = rotate(attention.q_norm(q).transpose(1, 2), *rotary)
            keys = torch.cat([keys, rotate(attention.k_norm(k).transpose(1, 2), *rotary)], dim=2)
            values = torch.cat([values, v.transpose(1, 2)], dim=2)
            residual = projected.gather(1, last[..., None].expand(-1, -1, projected.shape[-1]))  # (B, N, D)
            residual = blocks(residual, layer.mask_rep[: projected.shape[-1]])
            return layer.finish(residual, masked_attention(queries, keys, values, mask))

        projected = self.fc(features)  # (B, T, D)
        states = checkpoint(through, projected, use_reentrant=False) if self.recompute else through(projected)
        return self.for_head(states)

    def make_state(self, cache: KVCache, angles: tuple[torch.Tensor, torch.Tensor]) -> DARTState:
        weight, size = self.norm.weight, len(self.layer_ids) * self.config.hidden_size
        return DARTState(cache, angles, torch.zeros(cache.rows, size, dtype=weight.dtype, device=weight.device))

    @torch.no_grad()
    def update_context(
        self,
        target: Target,
        features: torch.Tensor,
        tokens: torch.Tensor,
        counts: list[int] | None,
        state: DARTState,
        on_device: torch.Tensor | None = None,
    ) -> None:
        """Add the features (B, C, F) of newly committed positions and their tokens (B, C) to the memory. `counts[b]`
        positions of row b are real, the rest is padding; `on_device` (B,) is `counts` where that is on the device
        already, and alone where the host does not know them. Each token completes the item before it; the last
        position's features wait for theirs."""
        cache = state.cache
        rows = len(features)
        real = torch.tensor(counts, device=features.device) if on_device is None else on_device
        if counts is None:
            real = on_device * cache.live[:rows]  # what waits in rows that are being filled must stay
        ends = features[torch.arange(rows, device=real.device), (real - 1).clamp(min=0)]  # (B, F)
        if state.fresh:
            features, tokens, counts = features[:, :-1], tokens[:, 1:], [count - 1 for count in counts]
            on_device = real - 1
        else:
            ends = torch.where(real[:, None] > 0, ends, state.pending[:rows])
            features = torch.cat([state.pending[:rows, None], features[:, :-1]], dim=1)
        state.pending[:rows] = ends
        state.fresh = False
        if features.shape[1]:
            width = features.shape[1]
            items = self.midlayer.items(self.fc(features), self.embed(target, tokens))
            keys, values = self.midlayer.self_attn.keys_values(items, *state.rotary(rows, width))
            slots = cache.window(width).slots[:rows].flatten()
            both = torch.stack([keys, values]).transpose(2, 3).flatten(3).flatten(1, 2)  # (2, B * C, H * E)
            cache.buffer.index_copy_(1, slots, both)
        cache.advance(counts, on_device)

    def block_states(self, target: Target, bonus: torch.Tensor, place: Place, pending: torch.Tensor) -> torch.Tensor:
        """Return the layer's states (B, W, D) of blocks behind bonus tokens (B,); pending (B, F): features of the last
        positions, which are `place.ends`."""
        ends, rotary, window = place
        layer, attention = self.midlayer, self.midlayer.self_attn
        mask = block_mask(ends, self.num_queries, True, None)
        mask = mask if has_kernel(ends.device) else mask.dense(window.extent)
        following = target.embed(bonus)[:, None].to(pending.dtype)  # (B, 1, D)
        projected = self.fc(pending[:, None])  # (B, 1, D)
        masks = layer.mask_rep.expand(len(ends), self.num_queries - 1, -1)  # (B, W - 1, 2 D)
        inputs = torch.cat([layer.items(projected, following), masks], dim=1)
        queries = attention.queries(inputs, *rotary)
        keys, values = window.update(*attention.keys_values(inputs, *rotary), 0)
        mixed = attend_grouped(queries, keys, values, mask)
        residual = torch.cat([projected, masks[..., : projected.shape[-1]]], dim=1)  # of a mask: its first half
        return layer.finish(residual, mixed)
