"""What the families of drafters share: where they tap the target, their attention, and their memory
while decoding.

B rows, C new context positions, T context length, N anchors, K block size (bonus token and L
drafted positions), W queries of a block, D hidden size, F features of a position, H heads, E head
size, V vocabulary, of which the drafter may know a part: its scores are over R of them.

A family is a subclass of `Drafter` that a row of `infer.drafters.families` names. What it has
besides what stands here (dflash/model.py is the one to read):

- `default_layer_ids`, `own_config`: where it taps the target, and its own part of a new drafter's
  config.json;
- `read` and `writers`: its layouts of config.json, to and fro;
- `inputs` and `forward` for training: many blocks of packed rows under shared masks (`block_mask`,
one
  for each of the `attention_patterns` that its layers have), of `num_queries` queries each; the
  first query stands `anchor_offset` positions before the anchor, and slot `first_draft_slot` is the
  first whose state is read;
- `make_state`, `update_context` and `block_states` for decoding: memory for texts; features and
tokens
  of newly committed positions in; states of a block out, which `draft_block` turns into marginals;
- `warm_layers`, `finish_warm_start`: which of the target's layers its own can start as, which of
the
  tapped layers they then read, and what else a warm start sets.
"""

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple
from weakref import ref

import torch
from torch import nn
from transformers import PretrainedConfig, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RotaryEmbedding

from infer.attention.kv_cache import KVCache, Window
from infer.attention.masks import Mask, block_mask, cached_blocks
from infer.config import DrafterConfig
from infer.drafters.families import FAMILIES, Family
from infer.drafters.heads.base import Confidence, Head, head_rows
from infer.drafters.heads.table import HeadRow, head_of, new_head
from infer.drafters.warm import can_start_as, weights_of
from infer.kernels.table import Kernels, kernels_for
from infer.targets.layers import read_norm, some_outputs
from infer.targets.loading import int8_package
from infer.targets.support import head_size, key_heads, mlp_size, norm_eps, rope
from infer.targets.target import Target, memory_of
from infer.trees.vocabulary import ALL, Vocabulary

# Names of tokens that stand for nothing: Llama's reserved, Gemma's unused, Nemotron's special ones
# by number.
SPARE = re.compile(r"[<\[]\W*\w*(mask|reserved|unused|special_\d)\w*\W*[>\]]", re.IGNORECASE)
WIDEST = 64  # positions of a pass over a cache that forgets, or a block
# Kinds of rotary scaling that a new drafter takes over. Not Llama 3's: it changes what is thousands
# of positions apart, and llama.cpp has no word for it in a drafter.
SCALINGS = ("linear", "yarn")
# largest logit of a fresh drafter for what enters it, over so many tokens
FLAT = 3.0
PROBES = 32


def mask_candidates(tokenizer, vocabulary: int, end_ids: Collection[int]) -> Iterator[int]:
    """Yield ids that text does not use, the surest first: the tokenizer's own mask token; the first
    id past the tokenizer's inside the padded vocabulary (Qwen3: 151669); a token that is a mask,
    reserved or unused by name (Gemma, Llama 3, Nemotron); the padding token, if nothing else ends
    or begins with it; the last of the special tokens that neither begin or end texts nor stand in
    the chat template (SmolLM2: <empty_output>)."""
    if tokenizer.mask_token_id is not None:
        yield tokenizer.mask_token_id
    if len(tokenizer) < vocabulary:
        yield len(tokenizer)
    taken = {*end_ids, tokenizer.eos_token_id, tokenizer.bos_token_id}
    template = str(tokenizer.chat_template)
    known = {
        id: name
        for name, id in tokenizer.get_vocab().items()
        if id < vocabulary and id not in taken
    }
    yield from sorted(
        id for id, name in known.items() if SPARE.fullmatch(name) and name not in template
    )
    if tokenizer.pad_token_id in known:
        yield tokenizer.pad_token_id
    added = tokenizer.added_tokens_decoder
    special = (
        id for id in known if id in added and added[id].special and id != tokenizer.unk_token_id
    )
    yield from sorted((id for id in special if known[id] not in template), reverse=True)


def default_mask_token(
    tokenizer,
    vocabulary: int,
    end_ids: Collection[int],
    used: Callable[[], Collection[int]] | None = None,
) -> int:
    """Return the first of `mask_candidates` that the data do not use, where `used()` says which ids
    they do; then any other id that they do not, the last one, will do. Raises ValueError where
    there is none."""
    masks = mask_candidates(tokenizer, vocabulary, end_ids)
    first = next(masks, None)
    if first is not None and (used is None or first >= len(tokenizer)):  # no text has the latter
        return first
    if used is not None:
        taken = {*used(), None}
        free = [mask for mask in (first, *masks) if mask not in taken]
        free = free or sorted({*range(vocabulary)} - taken - {*end_ids})[-1:]
        if free:
            return free[0]
    raise ValueError(
        "the target has no unused token id: name one that text never uses with drafter.mask_token_id=<id>"
    )


def tap_ids(own: dict, layers: int | None) -> tuple[int, ...]:
    """Return the tapped layers as `Target` counts them, where id `layers` is the last layer's
    states behind the last norm. own: the family's part of config.json; layers: how many the target
    has."""
    normed = layers is not None and own.get("last_tap") == "normed"
    return tuple(layers if normed and i == layers - 1 else i for i in own["target_layer_ids"])


def target_sizes(options: DrafterConfig, theirs: PretrainedConfig) -> dict:
    """Return the keys of a drafter's config.json that all families share: sizes of the target and
    of the options."""
    same = ("hidden_size", "num_attention_heads", "max_position_embeddings", "vocab_size")
    return {
        "block_size": options.block_size - bool(options.sample_from_anchor),
        "intermediate_size": mlp_size(theirs),
        "num_target_layers": theirs.num_hidden_layers,
        "num_hidden_layers": options.layers,
        "layer_types": ["full_attention" if options.sliding_window is None else "sliding_attention"]
        * options.layers,
        "use_sliding_window": options.sliding_window is not None,
        "sliding_window": options.sliding_window,
        "num_key_value_heads": key_heads(theirs),
        "head_dim": head_size(theirs),
        "rms_norm_eps": norm_eps(theirs),
        "rope_parameters": drafter_rope(theirs),
        "tie_word_embeddings": False,
        "has_embed_tokens": False,
        "has_lm_head": False,
        **{key: getattr(theirs, key) for key in (*same, "bos_token_id", "eos_token_id")},
    }


def drafter_rope(theirs: PretrainedConfig) -> dict:
    """Return the rotary positions of a new drafter for a target: the target's base, and one of
    `SCALINGS`, since layers that begin as the target's have learned those angles."""
    given = rope(theirs)
    found = {"rope_type": "default", "rope_theta": float(given.get("rope_theta", 1e4))}
    if given.get("rope_type") not in SCALINGS:
        return found
    numbers = {key: value for key, value in given.items() if isinstance(value, int | float)}
    numbers.pop("partial_rotary_factor", None)
    return numbers | found | {"rope_type": given["rope_type"]}


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions to (B, H, T, E); cos and sin (B, T, E) as `Drafter.angles` gives them,
    sin signed."""
    low, high = states.chunk(2, dim=-1)
    return states * cos[:, None] + torch.cat([high, low], dim=-1) * sin[:, None]


class Attention(nn.Module):
    """The projections of a layer whose input has `inputs` features."""

    def __init__(self, config: Qwen3Config, inputs: int, norms: bool = True) -> None:
        super().__init__()
        self.head_dim, self.scaling = config.head_dim, config.head_dim**-0.5
        width = config.num_attention_heads * self.head_dim
        kv_width = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(inputs, width, bias=False)
        self.k_proj = nn.Linear(inputs, kv_width, bias=False)
        self.v_proj = nn.Linear(inputs, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps) if norms else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps) if norms else nn.Identity()

    def heads(self, states: torch.Tensor) -> torch.Tensor:
        return states.unflatten(-1, (-1, self.head_dim))  # (B, T, H, E)

    def key_value_projections(self, of: str = "") -> list[nn.Linear]:
        """Return the projections to keys and to values; `of`: the ending of their names."""
        return [self.get_submodule(f"{part}_proj{of}") for part in "kv"]

    def keys_values(self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, of: str = ""):
        """States (B, T, inputs) at the positions of cos, sin (B, T, E) to keys and values (B, H, T,
        E), by `key_value_projections`."""
        keys, values = (self.heads(project(states)) for project in self.key_value_projections(of))
        return rotate(self.k_norm(keys).transpose(1, 2), cos, sin), values.transpose(1, 2)

    def queries(self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return rotate(self.q_norm(self.heads(self.q_proj(states))).transpose(1, 2), cos, sin)


class Place(NamedTuple):
    """Where blocks are drafted in the memory."""

    ends: torch.Tensor  # (B,) int64 cached positions before every block
    rotary: tuple[torch.Tensor, torch.Tensor]  # cos and sin (B, W, E)
    window: Window


def block_sight(place: Place, width: int, pattern: tuple[bool, int | None]) -> Mask:
    """Return what the `width` queries of blocks see under one of `Drafter.attention_patterns`."""
    window = place.window
    keys = window.extent - window.first
    return cached_blocks(place.ends - window.first, width, keys, *pattern, whole=window.cache.even)


class DrafterLayer(nn.Module):
    """A decoder layer, for training and for decoding; attention reads `inputs` features."""

    own_weights: tuple[str, ...] = ()  # beginnings of the names of what no layer of a target has

    def __init__(self, config: Qwen3Config, inputs: int, norms: bool = True) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config, inputs, norms)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = Qwen3MLP(config)

    def plain_weights(self, theirs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return weights of a target's layer as this one takes them."""
        return theirs

    def items(self, states: torch.Tensor) -> torch.Tensor:
        """States (..., D) to what attention reads of them (..., inputs)."""
        return self.input_layernorm(states)

    def around(self, name: str, states: torch.Tensor, sublayer: Callable) -> torch.Tensor:
        """What `sublayer`, attention or MLP, makes of normalised states, and what a family puts
        around it."""
        return sublayer(states)

    def forward(
        self,
        states: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        attend: Callable,
        items: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The layer over states of blocks (B, Q, D). `attend(queries, keys, values)`, all of the
        blocks, (B, H, Q, E), adds the context to the keys and values and returns (B, H, Q, E): from
        a cache or from a packed row. items: what attention reads, if not `items(states)`."""

        def attention(items: torch.Tensor) -> torch.Tensor:
            queries = self.self_attn.queries(items, *rotary)
            keys, values = self.self_attn.keys_values(items, *rotary)
            return self.self_attn.o_proj(attend(queries, keys, values).transpose(1, 2).flatten(2))

        items = self.items(states) if items is None else items
        states = states + self.around("attention", items, attention)
        return states + self.around("mlp", self.post_attention_layernorm(states), self.mlp)


def masked_attention_behind(
    before: tuple[torch.Tensor, torch.Tensor], mask, queries, keys, values
) -> torch.Tensor:
    """Training: attention of queries (B, H, Q, E) over the context's keys and values, `before`, and
    the blocks' own."""
    keys, values = (torch.cat(pair, dim=2) for pair in zip(before, (keys, values), strict=True))
    return kernels_for(values.device, values.dtype).attention(queries, keys, values, mask)


def attend_cached(window: Window, layer: int, mask, queries, keys, values) -> torch.Tensor:
    """Decoding: attention of queries (B, H, Q, E) over what a layer's cache holds and the block's
    own keys and values."""
    keys, values = window.update(keys, values, layer)
    return kernels_for(values.device, values.dtype).attention(queries, keys, values, mask)


@dataclass
class DraftState:
    """A drafter's memory of the texts it drafts for: keys and values of their context. Rows come
    and go as in the cache."""

    cache: KVCache
    angles: tuple[
        torch.Tensor, torch.Tensor
    ]  # cos and sin of every position, (1, capacity, E) each

    @contextmanager
    def add(self, count: int) -> Iterator["DraftState"]:
        """`count` more rows, as a state of their own over the same memory, to be filled."""
        with self.cache.add(count) as cache:
            yield replace(self, cache=cache)

    def rotary(self, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin (rows, width, E) of the positions behind every row's committed
        ones."""
        positions = self.cache.positions(rows, width)
        cos, sin = (torch.embedding(table[0], positions) for table in self.angles)
        return cos, sin

    def keep(self, order: list[int]) -> None:
        """Row i becomes what row order[i] was."""
        self.cache.keep(order)

    def read(self, row: int, start: int, count: int) -> list[torch.Tensor]:
        """Return copies of what it has of `count` positions of a row."""
        return self.cache.read(row, start, count)

    def restore(self, row: int, ids: list[int], parts: list[list[torch.Tensor]]) -> None:
        """Take over, into an empty row, positions with tokens `ids` that were read part by part."""
        self.cache.restore(row, parts)


class DraftedBlock(NamedTuple):
    """A drafted block."""

    marginals: torch.Tensor  # (B, L, R) log space, float32
    states: torch.Tensor | None = None  # (B, W, D) of all slots: what a conditional head reads


class Drafter(nn.Module):
    """A drafter of any family. Parameters carry the names of the family's public checkpoint
    layout."""

    family: Family
    # by export format (dflash/writers.py says what they are given and return)
    writers: dict[str, Callable] = {}
    anchor_offset = 0
    # its layers' kinds: causal within the block?, sliding window
    attention_patterns: list[tuple[bool, int | None]]
    # of target, features (B, C, len(layer_ids) * D) of newly committed positions, their tokens (B,
    # C), counts, state, on_device: adds them to the memory. counts[b] positions of row b are real,
    # the rest is padding; on_device (B,) is counts where that is on the device already, and alone
    # where the host does not know them
    update_context: Callable[..., None]
    num_queries: int  # W
    first_draft_slot: int  # of the W slots
    mask_token_id: int | None = None  # what stands in the slots, where it is a token

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.config = config
        self.block_size: int = config.block_size
        self.layer_ids = tap_ids(self.own, config.num_target_layers)
        self.rotary = [
            Qwen3RotaryEmbedding(config)
        ]  # in a list: not a submodule, so never cast to bf16
        self.head_row: HeadRow | None = None  # of the conditional head
        self.confidence_head: Confidence | None = None
        self.raw_states = False  # the conditional head reads states before the last norm
        self.ngrams: Path | None = None  # an n-gram file that came with the weights, for trees
        self.quantised = False  # are its products of int8 codes?
        # training: compute the layers again in the backward pass instead of keeping them
        self.recompute = False
        self.embed_tokens: nn.Embedding | None = None
        self.lm_head: nn.Linear | None = None
        known = vars(config).get("draft_vocab_size")  # row r of the head is token r + d2t[r]
        self.register_buffer("d2t", None if known is None else torch.zeros(known, dtype=torch.long))
        self.part_of_head: tuple | None = None  # of the target's: `target_head`

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    @property
    def kernels(self) -> Kernels:
        """The operations that serve for its weights."""
        return kernels_for(self.norm.weight.device, torch.int8 if self.quantised else self.dtype)

    @property
    def own(self) -> dict:
        """The family's part of config.json."""
        return vars(self.config)[self.family.config_key]

    @property
    def vocabulary(self) -> Vocabulary:
        """The tokens that it knows: the public layouts' `d2t` (R,) as ids (EAGLE-3, FR-Spec)."""
        if self.d2t is None:
            return ALL
        return Vocabulary(
            self.d2t + torch.arange(len(self.d2t), device=self.d2t.device), self.config.vocab_size
        )

    @property
    def conditional_head(self) -> Head | None:
        """What makes a token's score depend on the tokens before it, None for independent
        positions."""
        return None if self.head_row is None else self.get_submodule(self.head_row.attribute)

    def add_conditional_head(self) -> None:
        """Give the drafter the conditional head that its config.json names, if any, without weights
        yet."""
        row = head_of(self.own)
        own = self.own
        self.head_row = row
        if row is None:
            return
        head = row.load()(self.config, own)
        self.add_module(row.attribute, head)
        self.raw_states = head.raw
        if own.get("enable_confidence_head"):
            beside = own[row.key] if own.get("confidence_head_with_markov") else 0
            self.confidence_head = Confidence(self.config.hidden_size + beside)

    def add_ends(self, embedding: bool, head: bool) -> None:
        """Give the drafter an embedding and a head of its own; otherwise it uses the target's, of
        whose head those rows that it knows."""
        config = self.config
        if embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if head:
            self.lm_head = nn.Linear(config.hidden_size, head_rows(config), bias=False)

    def embed(self, target: Target, ids: torch.Tensor) -> torch.Tensor:
        """Token ids (...,) to embeddings (..., D) in the drafter's dtype."""
        embedded = target.embed(ids) if self.embed_tokens is None else self.embed_tokens(ids)
        return embedded.to(self.norm.weight.dtype)

    def logits(self, target: Target, states: torch.Tensor) -> torch.Tensor:
        """States behind the last norm (..., D) to what the head makes of them, (..., R) float32."""
        if self.lm_head is not None:
            return target.scale(self.lm_head(states)).float()
        return target.scale(target_head(self, target)(states.to(target.dtype))).float()

    def for_head(self, states: torch.Tensor) -> torch.Tensor:
        """States of the last layer (..., D) as `forward` and `block_states` return them: behind the
        last norm, unless the conditional head reads them before it."""
        return states if self.raw_states else self.last_norm(states)

    def check_target(self, target: Target) -> None:
        """Raises ValueError, naming all that differs, where the drafter was made for another
        target."""
        ours = self.config
        theirs = target.config
        pairs = {"hidden_size": (ours.hidden_size, theirs.hidden_size)}
        pairs["num_target_layers"] = ours.num_target_layers, theirs.num_hidden_layers
        if self.embed_tokens is not None or self.lm_head is not None or self.d2t is not None:
            pairs["vocab_size"] = ours.vocab_size, target.vocabulary
        faults = [
            f"{k} {a}, the target has {b}"
            for k, (a, b) in pairs.items()
            if a is not None and a != b
        ]
        ids = self.own["target_layer_ids"]
        layers = theirs.num_hidden_layers
        if max(ids) >= layers:
            faults.append(f"target_layer_ids {list(ids)}, the target has {layers} layers")
        if (
            layers - 1 in ids
            and self.own.get("last_tap") == "normed"
            and layers not in self.layer_ids
        ):
            faults.append(
                f"no num_target_layers, and it taps the last: load_drafter(..., target_layers={layers})"
            )
        if (self.mask_token_id or 0) >= target.vocabulary:
            faults.append(
                f"mask_token_id {self.mask_token_id}, the target has {target.vocabulary} tokens"
            )
        if faults:
            raise ValueError(
                f"this drafter was made for another target: its config says {'; '.join(faults)}"
            )

    def init_weights(self, generator: torch.Generator) -> None:
        """Draw fresh weights: matrices normal with the config's standard deviation (0.02), norms
        one."""
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=self.config.initializer_range, generator=generator)
            else:
                nn.init.ones_(parameter)
        init_head(self, generator)

    @torch.no_grad()
    def initialize(self, target: Target, generator: torch.Generator, warm: bool) -> bool:
        """Draw fresh weights, or copy the target's head; then take over the target's own layers, if
        `warm` and they compute what ours do; return whether it did."""
        self.init_weights(generator)
        init_last_norm(self, target)
        if self.family.own_head:
            self.lm_head.weight.copy_(rows_of(self, target))
        return warm and self.warm_start(target, generator)

    @torch.no_grad()
    def warm_start(self, target: Target, generator: torch.Generator | None = None) -> bool:
        """Start from the target's own layers (`warm_layers`), where they compute what ours do, on
        the features of one tapped layer, and from its last norm; return whether they do."""
        layers = [part for part in self.modules() if isinstance(part, DrafterLayer)]
        chosen = self.warm_layers(self.layer_ids, len(layers), target.config)
        source = [target.body.layers[i] for i in chosen]
        theirs = [layers[0].plain_weights(weights_of(layer, target)) for layer in source]
        pairs = list(zip(theirs, source, strict=True))
        if not pairs or not all(can_start_as(layers[0], *pair, self, target) for pair in pairs):
            return False
        for ours, weights in zip(layers, theirs, strict=True):
            ours.load_state_dict(weights, strict=False)  # convolutions stay the identity
        self.norm.weight.copy_(read_norm(target.body.norm).weight)
        self.finish_warm_start(theirs, target, generator)
        return True

    def graph_references(self) -> list[object]:
        """Return what drafting reads beside its arguments and its state, see
        `Target.graph_references`."""
        return [self.part_of_head, *memory_of(self)]

    def last_norm(self, states: torch.Tensor) -> torch.Tensor:
        """States of the last layer (..., D) to what the head reads."""
        return self.norm(states)

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin (B, T, E) of absolute positions (B, T), the sign of the rotation in
        the sines."""
        cos, sin = self.rotary[0].to(positions.device)(self.norm.weight, positions)
        half = sin.shape[-1] // 2
        return cos, torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)

    def state(self, rows: int, capacity: int, whole: bool = False) -> DraftState:
        """Return an empty memory for up to `rows` texts of up to `capacity` positions. Where all
        layers slide, it forgets what is beyond their window, unless it is to be `whole`."""
        config = self.config
        weight = self.norm.weight
        windows = [width for _, width in self.attention_patterns]
        widest = max(WIDEST, self.block_size)
        reach = None if None in windows else max(windows)
        capacity += self.block_size
        room = (
            capacity if whole or reach is None else min(capacity, reach + reach // 4 + 2 * widest)
        )
        widest = widest if room < capacity else None
        each = config.num_key_value_heads, config.head_dim
        layers = dict.fromkeys(range(config.num_hidden_layers), (each, each))
        cache = KVCache(layers, rows, room, weight.dtype, weight.device, reach=reach, widest=widest)
        return self.make_state(
            cache, self.angles(torch.arange(capacity, device=weight.device)[None])
        )

    @torch.no_grad()
    def draft_block(self, target: Target, bonus: torch.Tensor, state: DraftState) -> DraftedBlock:
        """Draft one block for every row, behind the bonus tokens (B,); its own K/V are never kept.
        With a conditional head, marginals are the scores without its corrections."""
        cache = state.cache
        rows = len(bonus)
        width = self.num_queries
        place = Place(cache.ends_of(rows), state.rotary(rows, width), cache.window(width))
        return drafted_block(self, target, self.block_states(target, bonus, place, state))


def narrow(drafter: Drafter, window: int) -> None:
    """Let every layer see the last `window` positions at most, its own block's included, whatever
    it was trained with (SGLang's `--speculative-dflash-draft-window-size`). Raises ValueError where
    the family's layers cannot slide, and for less than a block."""
    if "sliding_window" not in drafter.family.options:
        raise ValueError(
            f"drafter.sliding_window={window}: the layers of {drafter.family.title} drafters do not slide"
        )
    if window < drafter.block_size:
        raise ValueError(
            f"drafter.sliding_window={window}: at least a block, {drafter.block_size} positions"
        )
    patterns = drafter.attention_patterns
    drafter.attention_patterns = [
        (causal, min(window, width or window)) for causal, width in patterns
    ]


def drafted_block(drafter: Drafter, target: Target, states: torch.Tensor) -> DraftedBlock:
    """Return what is drafted by the states (B, W, D) of blocks, as `Drafter.for_head` returns
    them."""
    drafted = states[:, drafter.first_draft_slot :].contiguous()
    read = drafter.last_norm(drafted) if drafter.raw_states else drafted
    marginals = drafter.logits(target, read).log_softmax(-1)
    return DraftedBlock(marginals, None if drafter.head_row is None else states)


def packed_states(
    drafter: Drafter,
    target: Target,
    rows: dict,
    anchors: torch.Tensor,
    context: torch.Tensor,
    run: Callable,
) -> torch.Tensor:
    """Return the states (B, N, W, D) of all slots of the blocks behind anchors (B, N) of packed
    rows, in one pass, as `Drafter.for_head` returns them. rows: "ids", "positions" and "documents",
    (B, T) each; context (B, T, F): the features; run: the drafter, or the engine around it."""
    inputs = drafter.inputs(target, rows["ids"], rows["positions"], anchors)
    starts = (anchors - drafter.anchor_offset).clamp(min=0)
    masks = [
        block_mask(starts, rows["documents"], drafter.num_queries, *view)
        for view in drafter.attention_patterns
    ]
    hidden = run(
        context.to(drafter.norm.weight.dtype), rows["positions"], *inputs, *masks
    )  # (B, N*W, D)
    return hidden.unflatten(1, (-1, drafter.num_queries))


def read_one_tap(fc: nn.Linear, tap: int) -> None:
    """Let a projection of features (D, K * D) begin with those of one tapped layer."""
    size = fc.out_features
    fc.weight.zero_()
    fc.weight.view(size, -1, size)[:, tap] = torch.eye(size)


def target_head(drafter: Drafter, target: Target) -> nn.Module:
    """Return the target's head, or a copy of those of its rows that a drafter knows, in codes for a
    quantised one, which is kept until the head or the tokens are others."""
    whole = target.model.get_output_embeddings()
    d2t = drafter.d2t
    kept = drafter.part_of_head
    as_codes = drafter.quantised and type(whole) is nn.Linear
    if d2t is None and not as_codes:
        return whole
    place = next(whole.parameters()).data_ptr()
    now = target.changes, place, None if d2t is None or d2t.is_inference() else d2t._version
    if kept is None or kept[0]() is not whole or kept[1] != now:
        with torch.inference_mode(False):  # training may use what decoding made
            part = whole if d2t is None else some_outputs(whole, drafter.vocabulary.tokens)
            if as_codes:
                part = int8_package().round_linear(part)
            kept = drafter.part_of_head = ref(whole), now, part
    return kept[2]


def rows_of(drafter: Drafter, target: Target) -> torch.Tensor:
    """Return the weight (R, D) of `target_head`."""
    return target_head(drafter, target).weight


def head_weight(drafter: Drafter, target: Target) -> torch.Tensor:
    """Return the weight (R, D) of the head that a drafter uses: its own, or the target's."""
    return rows_of(drafter, target) if drafter.lm_head is None else drafter.lm_head.weight


def init_head(drafter: Drafter, generator: torch.Generator) -> None:
    """Draw fresh weights for the conditional head, with which the drafter drafts as without it."""
    if drafter.conditional_head is not None:
        drafter.conditional_head.init_weights(generator)
    if drafter.confidence_head is not None:
        nn.init.zeros_(drafter.confidence_head.proj.weight)
        nn.init.zeros_(drafter.confidence_head.proj.bias)


@torch.no_grad()
def init_last_norm(drafter: Drafter, target: Target) -> None:
    """Make the last norm's weight so small that a fresh drafter, which hardly changes what enters
    it, guesses nearly uniformly: a head tied to the embedding otherwise gives the token that
    entered all probability."""
    ids = torch.linspace(0, target.vocabulary - 1, PROBES, device=target.device).long()
    states = drafter.norm(target.embed(ids).cpu().float()).to(target.head_weight)
    drafter.norm.weight.mul_(min(1.0, FLAT / target.head(states).float().abs().amax().item()))


def tapped_layers(options: DrafterConfig, theirs: PretrainedConfig) -> tuple[int, ...]:
    """Return the tapped layers of a target, from its config. Raises ValueError for layers that it
    does not have."""
    count = theirs.num_hidden_layers
    family = FAMILIES[options.family].load()
    ids = options.target_layer_ids or family.default_layer_ids(count, options.layers)
    if any(not 0 <= layer < count for layer in ids):
        raise ValueError(
            f"drafter.target_layer_ids={list(ids)}: the target has layers 0 to {count - 1}"
        )
    return tuple(int(layer) for layer in ids)


def taps(options: DrafterConfig, theirs: PretrainedConfig) -> dict:
    """Return what every family's part of config.json says of the tapped layers. Raises ValueError
    as `tapped_layers` does, and for a `last_tap` without a tap of the last layer."""
    ids = list(tapped_layers(options, theirs))
    last = theirs.num_hidden_layers - 1
    if last in ids:
        return {"target_layer_ids": ids, "last_tap": options.last_layer_output}
    if options.last_layer_output != "raw":
        raise ValueError(
            f"drafter.last_layer_output={options.last_layer_output}: the target's last layer, {last}, is not tapped"
        )
    return {"target_layer_ids": ids}


def config_for(
    options: DrafterConfig, target: Target | None, theirs: PretrainedConfig | None = None
) -> Qwen3Config:
    """Return the config.json of a new drafter for a target; without one, of the same sizes for the
    target config `theirs`. Raises ValueError for options that do not fit."""
    options.check()
    theirs = theirs if target is None else target.config
    family = FAMILIES[options.family]
    own = family.load().own_config(options, theirs, target) | new_head(options.head)
    known = {"draft_vocab_size": options.draft_vocab_size} if options.draft_vocab_size else {}
    check_known(options, theirs)
    return Qwen3Config(**family.config_part(own), **known, **target_sizes(options, theirs))


def check_known(options: DrafterConfig, theirs: PretrainedConfig) -> None:
    """Raise ValueError where a drafter is to know more tokens than there are."""
    if (options.draft_vocab_size or 0) > theirs.vocab_size:
        raise ValueError(
            f"drafter.draft_vocab_size={options.draft_vocab_size}: the target has {theirs.vocab_size} tokens"
        )


def new_drafter(
    options: DrafterConfig, target: Target | None, theirs: PretrainedConfig | None = None
) -> Drafter:
    """Return a drafter with the config of `config_for`, whose exceptions it raises, without weights
    yet."""
    return FAMILIES[options.family].load()(config_for(options, target, theirs))


@torch.no_grad()
def target_embeddings(target: Target) -> torch.Tensor:
    """Return what enters the target's first layer for every token, (V, D). Some targets scale their
    embeddings."""
    return target.embed(torch.arange(len(target.embedding.weight), device=target.device))


def drop_copies(drafter: Drafter, target: Target) -> None:
    """Remove an embedding and a head of the drafter's own that are the target's, bit for bit in the
    dtype of one of the two, where its family can do without. Raises ValueError where they
    differ."""
    if drafter.family.own_head:
        return
    pairs = {
        "embed_tokens": (drafter.embed_tokens, target_embeddings(target)),
        "lm_head": (drafter.lm_head, rows_of(drafter, target)),
    }
    for name, (own, weight) in pairs.items():
        if own is not None and not any(
            torch.equal(own.weight.to(x), weight.to(x)) for x in (own.weight, weight)
        ):
            raise ValueError(f"its own {name} is not the target's")
        setattr(drafter, name, None)
        setattr(drafter.config, f"has_{name}", False)


def fixed_options(drafter: Drafter) -> dict:
    """Return the fields of `infer.config.DrafterConfig` that a drafter's config.json decides,
    without its head's."""
    own = drafter.own
    row = drafter.family
    known = {
        "family": row.name,
        "layers": drafter.config.num_hidden_layers,
        "block_size": drafter.block_size,
        "target_layer_ids": list(own["target_layer_ids"]),
        "last_layer_output": own.get("last_tap", "raw"),
        "sliding_window": drafter.config.sliding_window,
        "draft_vocab_size": 0 if drafter.d2t is None else len(drafter.d2t),
    }
    known |= {"mask_token_id": own["mask_token_id"]} if "mask_token_id" in own else {}
    known |= {
        key: bool(own.get(key))
        for key in ("sample_from_anchor", "causal", "layer_fusion")
        if key in row.options
    }
    return known | (
        {"conv_kernel_size": own.get("conv_kernel_size", 0)}
        if "conv_kernel_size" in row.options
        else {}
    )
