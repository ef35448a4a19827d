"""The DART drafter: one decoder layer over the target's hidden states and the tokens that follow
them.

B rows, C new context positions, T context length, N anchors, L drafted positions, W queries of a
block, D hidden size, F features of a position (3 D), H heads, E head size, V vocabulary.

DART section 3.2: the item at position i is the pair of what the target felt there, g_i =
fc(features_i), and the token after it, e_{i+1}; behind the last item, whose token is the bonus
token, stand copies of one learned mask vector. All is causal, and logits are shifted: an item says
which token follows its own one, so that the last item drafts the first position and W - 1 = L - 1
masks the others. Unshifted (table 3's ablation), L masks say which token stands in their place. The
head is the drafter's own and starts as the target's. Items before the last see only items before
them: their keys and values are what decoding keeps.

The token behind the last committed position, the bonus token, is not in the memory yet: that
position's features wait for it.

Tensor names and the order of features and embeddings are those of the authors' published
checkpoints.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, Qwen3Config

from infer.attention.kv_cache import KVCache
from infer.attention.masks import Mask
from infer.config import DrafterConfig
from infer.drafters.base import (
    Drafter,
    DrafterLayer,
    DraftState,
    Place,
    attend_cached,
    block_sight,
    masked_attention_behind,
    read_one_tap,
    taps,
)
from infer.drafters.dart import layouts
from infer.drafters.families import FAMILIES
from infer.targets.support import attention_layers
from infer.targets.target import Target


class DARTLayer(DrafterLayer):
    """Its attention reads an embedding and features side by side, (..., 2 D)."""

    own_weights = ("input_layernorm.", "mask_rep")

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config, 2 * config.hidden_size, config.dart_config["qk_norm"])
        self.hidden_norm = nn.RMSNorm(
            config.hidden_size, eps=config.rms_norm_eps
        )  # of the features
        self.mask_rep = nn.Parameter(torch.empty(2 * config.hidden_size))  # never normalised

    def items(self, projected: torch.Tensor, following: torch.Tensor | None = None) -> torch.Tensor:
        """g (..., D) and the embeddings of the following tokens (..., D) to the inputs of attention
        (..., 2 D); without embeddings, as a layer of the target's reads states."""
        following = torch.zeros_like(projected) if following is None else following
        return torch.cat([self.input_layernorm(following), self.hidden_norm(projected)], dim=-1)

    def plain_weights(self, theirs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return weights of a target's layer as this one takes them, which reads no embeddings
        yet."""
        weights = {
            name.replace("input_layernorm.", "hidden_norm."): tensor
            for name, tensor in theirs.items()
        }
        for name in weights:
            if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                weights[name] = torch.cat([torch.zeros_like(weights[name]), weights[name]], dim=1)
        return weights

    def blocks(
        self, projected: torch.Tensor, items: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the residuals (B, N W, D) and the inputs of attention (B, N W, 2 D) of blocks that
        begin with items (B, N, 2 D), of features (B, N, D), and go on with `count` masks each. A
        mask's residual is its first half."""
        masks = self.mask_rep.expand(*items.shape[:2], count, -1)
        residual = torch.cat([projected[:, :, None], masks[..., : projected.shape[-1]]], dim=2)
        return residual.flatten(1, 2), torch.cat([items[:, :, None], masks], dim=2).flatten(1, 2)


@dataclass
class DARTState(DraftState):
    """Keys and values of all items of every row but the last: the token behind the last position is
    not known before it is committed, so that position's features wait."""

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


class DART(Drafter):
    """The drafter. Parameters carry the names of the published checkpoints."""

    anchor_offset = 1  # a block begins with the last item, one position before the bonus token
    family = FAMILIES["dart"]
    read = staticmethod(layouts.read)
    default_layer_ids = staticmethod(layouts.default_layer_ids)
    attention_patterns = [(True, None)]

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)
        self.first_draft_slot = 0 if self.own["shifted"] else 1
        self.num_queries = self.block_size - 1 + self.first_draft_slot  # W
        self.fc = nn.Linear(
            len(self.layer_ids) * config.hidden_size, config.hidden_size, bias=False
        )
        self.midlayer = DARTLayer(config)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.add_ends(embedding=False, head=True)
        self.add_conditional_head()

    @staticmethod
    def warm_layers(layer_ids: tuple[int, ...], layers: int, theirs: PretrainedConfig) -> list[int]:
        """Return the target's layer behind the last tapped one that attends; the last such one, if
        there is none."""
        attending = attention_layers(theirs)
        return ([i for i in attending if i > layer_ids[-1]] or attending[-1:])[:1]

    @staticmethod
    def own_config(options: DrafterConfig, theirs: PretrainedConfig, target: Target | None) -> dict:
        """Return `dart_config`; queries and keys have norms where the target's have."""
        attending = (
            [] if target is None else [target.body.layers[i] for i in attention_layers(theirs)[:1]]
        )
        norms = all(
            "self_attn.q_norm.weight" in dict(layer.named_parameters()) for layer in attending
        )
        return taps(options, theirs) | {"shifted": True, "qk_norm": norms}

    def last_norm(self, states: torch.Tensor) -> torch.Tensor:
        """What the head reads, (..., D). The authors' code applies this norm twice, and so do
        drafters of theirs."""
        return self.norm(self.norm(states) if self.own.get("norm_twice") else states)

    def init_weights(self, generator: torch.Generator) -> None:
        """Draw fresh weights, for the mask vector too (DART appendix B.2)."""
        super().init_weights(generator)
        nn.init.normal_(
            self.midlayer.mask_rep, std=self.config.initializer_range, generator=generator
        )

    def finish_warm_start(
        self, theirs: list[dict], target: Target, generator: torch.Generator | None
    ) -> None:
        """Set the mask to the average item of a random text, unless the target has no weights to
        run
        with: a random mask drowns what attention adds to it (LOG.md)."""
        read_one_tap(self.fc, -1)
        if any(weight.is_meta for weight in target.body.parameters()):
            return
        ids = torch.randint(target.config.vocab_size, (1, 128), generator=generator).to(
            target.device
        )
        features = target.packed_features(
            ids, torch.arange(128)[None].to(ids), torch.zeros_like(ids), self.layer_ids
        )
        projected = self.fc(features.context[0].to(self.fc.weight))  # (128, D)
        items = self.midlayer.items(projected, target.embed(ids[0]).to(projected))
        self.midlayer.mask_rep.copy_(
            torch.cat([projected.mean(0), items[:, projected.shape[1] :].mean(0)])
        )

    def inputs(
        self, target: Target, ids: torch.Tensor, positions: torch.Tensor, anchors: torch.Tensor
    ):
        """What `forward` takes of packed rows, ids (B, T), beside features and mask: the tokens
        after every position, embedded, (B, T, D), and where the last items of the blocks stand, one
        before their anchors (B, N). The token after a document's end is another's; no block sees
        that item."""
        following = target.embed(ids.roll(-1, dims=1)).to(self.norm.weight.dtype)
        return following, (anchors - 1).clamp(min=0)  # an unused slot may hold any position

    def forward(
        self,
        features: torch.Tensor,
        positions: torch.Tensor,
        following: torch.Tensor,
        last: torch.Tensor,
        mask: Mask | torch.Tensor,
    ) -> torch.Tensor:
        """Training: all blocks of packed rows at once (DART section 3.3, prefix-shared).

        features (B, T, F), positions (B, T) and following (B, T, D) of the context's items; last
        (B, N): the items that begin the blocks; mask: `block_mask`, from queries of the blocks to
        keys [context | blocks]. Returns hidden states before the head, (B, N*W, D).
        """
        steps = torch.arange(self.num_queries, device=last.device)
        block_positions = (positions.gather(1, last)[..., None] + steps).flatten(1)  # (B, N*W)
        rotary = self.angles(block_positions)
        context_rotary = self.angles(positions)

        def through(projected: torch.Tensor) -> torch.Tensor:
            items = self.midlayer.items(projected, following)  # (B, T, 2 D)
            before = self.midlayer.self_attn.keys_values(items, *context_rotary)
            begin = (
                part.gather(1, last[..., None].expand(-1, -1, part.shape[-1]))
                for part in (projected, items)
            )
            residual, inputs = self.midlayer.blocks(*begin, self.num_queries - 1)
            return self.midlayer(
                residual, rotary, partial(masked_attention_behind, before, mask), inputs
            )

        projected = self.fc(features)  # (B, T, D)
        states = (
            checkpoint(through, projected, use_reentrant=False)
            if self.recompute
            else through(projected)
        )
        return self.for_head(states)

    def make_state(self, cache: KVCache, angles: tuple[torch.Tensor, torch.Tensor]) -> DARTState:
        weight = self.norm.weight
        size = len(self.layer_ids) * self.config.hidden_size
        return DARTState(
            cache, angles, torch.zeros(cache.rows, size, dtype=weight.dtype, device=weight.device)
        )

    @torch.no_grad()
    def update_context(self, target, features, tokens, counts, state, on_device=None) -> None:
        """Each token completes the item before it; the last position's features wait for theirs."""
        cache = state.cache
        rows = len(features)
        real = torch.tensor(counts, device=features.device) if on_device is None else on_device
        if counts is None:
            real = (
                on_device * cache.live[:rows]
            )  # what waits in rows that are being filled must stay
        ends = features[torch.arange(rows, device=real.device), (real - 1).clamp(min=0)]  # (B, F)
        if state.fresh:
            features = features[:, :-1]
            tokens = tokens[:, 1:]
            counts = [count - 1 for count in counts]
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
            both = (
                torch.stack([keys, values]).transpose(2, 3).flatten(3).flatten(1, 2)
            )  # (2, B * C, H * E)
            cache.buffer.index_copy_(1, slots, both)
        cache.advance(counts, on_device)

    def block_states(
        self, target: Target, bonus: torch.Tensor, place: Place, state: DARTState
    ) -> torch.Tensor:
        """Return the states (B, W, D) of blocks behind bonus tokens (B,), as `for_head` returns
        them."""
        mask = block_sight(place, self.num_queries, (True, None))
        pending = state.pending[: len(bonus)]
        projected = self.fc(pending[:, None])  # (B, 1, D)
        items = self.midlayer.items(projected, target.embed(bonus)[:, None].to(pending.dtype))
        residual, inputs = self.midlayer.blocks(projected, items, self.num_queries - 1)
        attend = partial(attend_cached, place.window, 0, mask)
        return self.for_head(self.midlayer(residual, place.rotary, attend, inputs))
