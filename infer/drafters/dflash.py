"""The DFlash drafter: proposes a whole block of tokens in one pass over the target's hidden states.

B rows, C new context positions, T context length, N anchors, K block size (bonus token and L drafted positions),
D hidden size, H heads, E head size, V vocabulary.

The architecture is that of the public DFlash checkpoints: a few Qwen3 layers whose queries are the block
`[bonus, mask x L]` and whose keys and values come from the normalised, projected context features (the same for every
layer) and from the block itself, at absolute positions. Embedding and head are the target's. Training (`forward`, many
blocks of a packed row under one mask) and decoding (`draft`, one block of every row against a cache) share each line
of the layer; DDTree section 3 has the marginals it yields.
"""

from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from infer.attention.compile import padded
from infer.attention.kv_cache import Window
from infer.attention.masks import masked_attention
from infer.config import DrafterConfig
from infer.drafters.base import (
    Attention,
    Drafter,
    DraftState,
    check_layer_ids,
    default_mask_token,
    matches_layer,
    rotate,
    target_sizes,
)
from infer.targets.target import Target

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def default_layer_ids(target_layers: int, layers: int) -> list[int]:
    """Where the public drafters tap: from layer 1 to N - 3, evenly; the middle for a single layer."""
    if layers == 1:
        return [target_layers // 2]
    return [round(1 + i * (target_layers - 4) / (layers - 1)) for i in range(layers)]


def tapped_layers(options: DrafterConfig, theirs: PretrainedConfig) -> tuple[int, ...]:
    """The target's layers that the drafter listens to, from the target's config. Raises ValueError for others."""
    ids = options.target_layer_ids or default_layer_ids(theirs.num_hidden_layers, options.layers)
    return check_layer_ids(ids, theirs)


def warm_layers(layer_ids: tuple[int, ...], layers: int, target_layers: int) -> range:
    """The target's layers that a drafter of so many layers can start as: those behind the first tapped one."""
    first = min(layer_ids[0] + 1, target_layers - layers)
    return range(max(first, 0), max(first, 0) + layers)


def drafter_config(options: DrafterConfig, target: Target) -> Qwen3Config:
    """The drafter's config.json for a target: its sizes, and where it taps. Raises ValueError for ids out of range."""
    options.check()
    theirs = target.config
    ids = tapped_layers(options, theirs)
    mask = default_mask_token(target) if options.mask_token_id is None else options.mask_token_id
    if not 0 <= mask < theirs.vocab_size:
        raise ValueError(f"drafter.mask_token_id={mask}: the target's vocabulary has ids 0 to {theirs.vocab_size - 1}")
    return Qwen3Config(
        architectures=["DFlashDraftModel"],
        auto_map={"AutoModel": "dflash.DFlashDraftModel"},
        dflash_config={
            "block_size": options.block_size,
            "mask_token_id": mask,
            "target_layer_ids": list(ids),
        },
        **target_sizes(options, theirs),
    )


def layer_patterns(config: Qwen3Config) -> list[tuple[bool, int | None]]:
    """Return every layer's pattern: whether it is causal within the block, and its sliding window. As serving engines
    read it, a sliding layer is causal and a full one is not, unless the config says `causal` for all."""
    causal = config.dflash_config.get("causal")
    sliding = [kind == "sliding_attention" for kind in config.layer_types]
    return [(slides if causal is None else causal, config.sliding_window if slides else None) for slides in sliding]


def visible(ends: torch.Tensor, width: int, extent: int, causal: bool, window: int | None) -> torch.Tensor:
    """What blocks of `width` behind `ends` (B,) cached positions see of the first `extent` ones, block included: bool,
    (B, 1, width, extent), or (B, 1, 1, extent) where all of a block see the same."""
    keys, steps = torch.arange(extent, device=ends.device), torch.arange(width, device=ends.device)
    last = ends[:, None] + (steps if causal else width - 1)
    seen = keys <= last[..., None]
    if window is not None:
        seen = seen & (((ends[:, None] + steps)[..., None] - keys).abs() < window)
    return seen[:, None]


class Layer(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config, config.hidden_size)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = Qwen3MLP(config)

    def forward(self, block: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], attend) -> torch.Tensor:
        """One layer over block states (B, Q, D). `attend(queries, keys, values)`, all of the block, (B, H, Q, E), adds
        the context to the keys and values and returns (B, H, Q, E): from a cache or from a packed row."""
        states = self.input_layernorm(block)
        queries = self.self_attn.queries(states, *rotary)
        keys, values = self.self_attn.keys_values(states, *rotary)
        mixed = attend(queries, keys, values).transpose(1, 2).flatten(2)  # (B, Q, H*E)
        block = block + self.self_attn.o_proj(mixed)
        return block + self.mlp(self.post_attention_layernorm(block))


@dataclass
class DFlashState(DraftState):
    """Keys and values of the context features, and what computes them for all layers at once."""

    projection: torch.Tensor  # (layers * 2 * H * E, D) key and value weights of all layers, that see the same context
    scale: torch.Tensor  # (layers, 1, E) weights of the key norms


class DFlash(Drafter):
    """The drafter. Parameters carry the names of the public checkpoint layout. Where the config says
    `sample_from_anchor`, the bonus token's slot drafts too: K slots then draft K tokens."""

    anchor_offset = 0  # a block is `[bonus, mask x L]`

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config, config.dflash_config["target_layer_ids"])
        self.mask_token_id: int = config.dflash_config["mask_token_id"]
        self.first_draft_slot = 0 if config.dflash_config.get("sample_from_anchor") else 1  # the slot that drafts first
        self.num_queries = config.block_size
        self.block_size = self.num_queries + 1 - self.first_draft_slot
        of_layers = layer_patterns(config)
        self.attention_patterns = list(dict.fromkeys(of_layers))
        self.pattern_of_layer = [self.attention_patterns.index(pattern) for pattern in of_layers]
        self.fc = nn.Linear(len(self.layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.add_ends(getattr(config, "has_embed_tokens", False), getattr(config, "has_lm_head", False))

    @torch.no_grad()
    def warm_start(self, target: Target) -> bool:
        """Starts from the target's own layers, where they work like ours; returns whether they do.

        The drafter's layers become those that follow the first tapped layer, `fc` passes that layer's features on, and
        `hidden_norm` and `norm` are the ones that such features and the head were trained with: the first layer's
        context K/V are then exactly the target's own.
        """
        if len(target.body.layers) < len(self.layers):
            return False
        which = warm_layers(self.layer_ids, len(self.layers), len(target.body.layers))
        theirs = [target.body.layers[i].state_dict() for i in which]
        shapes = {name: tensor.shape for name, tensor in self.layers[0].state_dict().items()}
        for i, layer in zip(which, theirs, strict=True):
            if {name: tensor.shape for name, tensor in layer.items()} != shapes:
                return False
            trial = deepcopy(self.layers[0])
            trial.load_state_dict(layer)
            if not matches_layer(target.body.layers[i], target, self, trial):
                return False
        for ours, layer in zip(self.layers, theirs, strict=True):
            ours.load_state_dict(layer)
        size = self.config.hidden_size
        self.fc.weight.zero_()
        self.fc.weight[:, :size] = torch.eye(size)
        self.hidden_norm.weight.copy_(theirs[0]["input_layernorm.weight"])
        self.norm.weight.copy_(target.body.norm.weight)
        return True

    def context(self, features: torch.Tensor) -> torch.Tensor:
        """Context features (B, T, len(layer_ids) * D) to what every layer's K/V see: (B, T, D)."""
        return self.hidden_norm(self.fc(features))

    def block_ids(self, bonus: torch.Tensor) -> torch.Tensor:
        """Bonus tokens (...,) to blocks `[bonus, mask x L]` (..., K)."""
        block = bonus.unsqueeze(-1).repeat_interleave(self.num_queries, dim=-1)
        block[..., 1:] = self.mask_token_id
        return block

    def inputs(self, target: Target, ids: torch.Tensor, positions: torch.Tensor, anchors: torch.Tensor):
        """What `forward` takes of packed rows, ids and positions (B, T), beside features and mask: the blocks at
        anchors (B, N), embedded, (B, N*K, D), and their positions (B, N*K)."""
        blocks = self.embed(target, self.block_ids(ids.gather(1, anchors))).flatten(1, 2)
        steps = torch.arange(self.num_queries, device=ids.device)
        return blocks, (positions.gather(1, anchors)[..., None] + steps).flatten(1)

    def forward(
        self,
        features: torch.Tensor,
        positions: torch.Tensor,
        blocks: torch.Tensor,
        block_positions: torch.Tensor,
        *masks: "torch.Tensor | BlockMask | None",
    ) -> torch.Tensor:
        """Training: all blocks of packed rows at once.

        features (B, T, len(layer_ids) * D) and positions (B, T) of the context; blocks (B, N*K, D) embedded, at
        block_positions (B, N*K); masks: `train.blocks.block_mask` of each of the `attention_patterns`, from queries of
        the blocks to keys [context | blocks]. Returns hidden states before the head, (B, N*K, D).
        """
        context, block = self.context(features), blocks
        rotary, context_rotary = self.angles(block_positions), self.angles(positions)

        def through(layer: Layer, block: torch.Tensor, context: torch.Tensor, mask) -> torch.Tensor:
            before = layer.self_attn.keys_values(context, *context_rotary)

            def attend(queries, keys, values):
                keys, values = (torch.cat(pair, dim=2) for pair in zip(before, (keys, values), strict=True))
                return masked_attention(queries, keys, values, mask)

            return layer(block, rotary, attend)

        for layer, pattern in zip(self.layers, self.pattern_of_layer, strict=True):
            if self.recompute:  # only `block` and `context` are kept for the backward pass
                block = checkpoint(through, layer, block, context, masks[pattern], use_reentrant=False)
            else:
                block = through(layer, block, context, masks[pattern])
        return self.norm(block)

    def state(self, rows: int, capacity: int, static: bool = False) -> DFlashState:
        """An empty memory for up to `rows` texts of up to `capacity` positions, none in use yet. Drafting is compiled
        if it is `static`."""
        cache = self.cache(rows, capacity, static)
        attentions = [layer.self_attn for layer in self.layers]
        return DFlashState(
            cache,
            self.angles(torch.arange(cache.capacity, device=self.norm.weight.device)[None]),
            torch.cat([part.weight for attention in attentions for part in (attention.k_proj, attention.v_proj)]),
            torch.stack([attention.k_norm.weight for attention in attentions])[:, None],
        )

    @torch.no_grad()
    def update_context(
        self,
        target: Target,
        features: torch.Tensor,
        tokens: torch.Tensor,
        counts: list[int],
        state: DFlashState,
        on_device: torch.Tensor | None = None,
    ) -> None:
        """Takes in the context features (B, C, len(layer_ids) * D) of newly committed positions, whose tokens (B, C) do
        not matter here; `counts[b]` of them are real, the rest padding; `on_device` (B,) says the same where it is
        there already. One projection serves all layers: what `Attention.keys_values` does in training, layer by
        layer."""
        cache = state.cache
        rows, width, _ = features.shape
        both = F.linear(self.context(features), state.projection)
        both = both.unflatten(-1, (len(self.layers), 2, cache.heads, self.config.head_dim))  # (B, C, layers, 2, H, E)
        keys = F.rms_norm(both[:, :, :, 0], (self.config.head_dim,), eps=self.config.rms_norm_eps) * state.scale
        slots = cache.window(width).slots[:rows]
        cos, sin = state.rotary(rows, width)
        keys = rotate(keys.flatten(2, 3).transpose(1, 2), cos, sin).transpose(1, 2)  # (B, C, layers * H, E)
        both = torch.stack([keys.reshape(rows, width, len(self.layers), -1), both[:, :, :, 1].flatten(3)], dim=3)
        both = both.flatten(2, 3).flatten(0, 1).transpose(0, 1)  # (layers * 2, B * C, H * E)
        cache.buffer.index_copy_(1, slots.flatten(), both)
        cache.advance(counts, on_device)

    @torch.no_grad()
    def draft(self, target: Target, bonus: torch.Tensor, state: DFlashState) -> torch.Tensor:
        """One block for every row, behind the bonus tokens (B,): the marginals of its L drafted positions, in log space
        and float32, (B, L, V). The block's own K/V are never kept."""
        cache = state.cache
        window = cache.window(self.num_queries)
        rows = len(window.slots)
        alike = not cache.static and len(set(cache.lengths)) == 1  # rows of the same length see all of the window
        run = self.program(target, cache.static)
        (marginals,) = run(padded(bonus, rows), cache.ends[:rows], state.angles, window, alike)
        return marginals[: len(bonus)]

    def _draft_pass(
        self,
        target: Target,
        bonus: torch.Tensor,
        ends: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        window: Window,
        alike: bool,
    ) -> tuple[torch.Tensor]:
        """All of `draft` that is computed: bonus tokens (B,) at positions `ends` (B,) to marginals (B, L, V)."""
        steps = torch.arange(self.num_queries, device=ends.device)
        masks = [
            None if alike and pattern == (False, None) else visible(ends, self.num_queries, window.extent, *pattern)
            for pattern in self.attention_patterns
        ]
        rotary = tuple(table[0, ends[:, None] + steps] for table in angles)  # (B, K, E) each
        block = self.embed(target, self.block_ids(bonus))  # (B, K, D)
        for i, layer in enumerate(self.layers):

            def attend(queries, keys, values, i=i):
                keys, values = window.update(keys, values, i)
                mask = masks[self.pattern_of_layer[i]]
                return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)

            block = layer(block, rotary, attend)
        return (self.marginals(target, self.norm(block[:, self.first_draft_slot :])),)
