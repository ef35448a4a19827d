"""The target: any Hugging Face causal language model, frozen, tapped and verified through one wrapper.

B rows, Q new positions, T packed length, M tree nodes, K tapped layers, D hidden size, V vocabulary.
"""

import hashlib
import json
import math
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, wraps

import torch
import torch.distributed as dist
from torch import nn

from infer.attention.attend import has_kernel
from infer.attention.kv_cache import KVCache, PackedRows, Window
from infer.attention.masks import (
    TreeMask,
    additive,
    cached,
    dense,
    nearby,
    packed_ranges,
    range_mask,
    same_chunk,
)
from infer.targets.layers import UnknownLayer, close, lean_decoder
from infer.targets.lean import LeanDecoder, Masks
from infer.targets.mixed_cache import MixedCache, PackedWindow, Shapes, find_shapes
from infer.targets.recurrent import Lineage, States, follow_trees
from infer.targets.support import (
    CHUNKED,
    STATEFUL,
    decoder_of,
    key_heads,
    logit_scale,
    longest,
    refuse_unfit,
    refuse_unsupported,
    windows,
)
from infer.targets.watch import Watch
from infer.trees.tree import DraftTree

COPIES = ("lean_pass", "decoder_pass")  # what is made of the weights on first use
# a lock for each model: its hooks serve one pass at a time, whatever targets are made of it
LOCKS: "weakref.WeakKeyDictionary[nn.Module, threading.RLock]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Features:
    """The outputs of one target pass: the drafter's input and the head's."""

    context: torch.Tensor  # (B, Q, K*D) outputs of the tapped layers, concatenated
    last: torch.Tensor  # (B, Q, D) final hidden state, after the target's last norm


@dataclass
class Taps:
    """What the forward hooks of a target's layers keep of a pass."""

    stream: int | None = None  # which of several residual streams is the model's own (Gemma 3n); None: there is one
    wanted: frozenset[int] = frozenset()  # layers
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)

    def hook(self, layer: int) -> Callable:
        """Return a forward hook that keeps the output of a wanted layer."""

        def keep(module: nn.Module, args: tuple, output: torch.Tensor | tuple) -> None:
            if layer in self.wanted:
                output = output if isinstance(output, torch.Tensor) else output[0]
                self.outputs[layer] = output if self.stream is None else output[self.stream]

        return keep


@dataclass
class Target:
    """A frozen causal LM. A layer id k means the output of decoder layer k, counted from 0; the id one past the last
    layer's means the last layer's output behind the last norm."""

    model: nn.Module
    tokenizer: object | None = None
    name: str = "target"
    spread: bool = False  # over processes: a pass takes all of them, so that none may decide by its own clock

    def __post_init__(self) -> None:
        self.model.eval().requires_grad_(False)
        refuse_unsupported(self.model.config)
        refuse_unfit(self.model)
        self.config = self.model.config.get_text_config()
        self.scale, self.windows = logit_scale(self.config), windows(self.config)
        self.body = decoder_of(self.model)
        self.recurrent = follow_trees(self.body)
        self.watch, self.changes = Watch(self.model), 0
        self.budget_rules = weakref.WeakKeyDictionary()  # drafter -> rows -> what passes take (budget=auto)
        self._taps = Taps(getattr(self.config, "altup_active_idx", None))
        hooks = [module.register_forward_hook(self._taps.hook(i)) for i, module in enumerate(self.body.layers)]
        weakref.finalize(self, lambda: [hook.remove() for hook in hooks])

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    @property
    def embedding(self) -> nn.Module:
        return self.model.get_input_embeddings()

    @property
    def head_weight(self) -> torch.Tensor:
        """(V, D), shared with the drafter and frozen."""
        return self.model.get_output_embeddings().weight

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a text, from the generation config."""
        generation = getattr(self.model, "generation_config", None)
        ids = generation.eos_token_id if generation is not None else self.config.eos_token_id
        return frozenset([ids] if isinstance(ids, int) else ids or [])

    @cached_property
    def tokenizer_digest(self) -> str | None:
        """`tokenizer_digest` of the tokenizer; None where there is no tokenizer."""
        return None if self.tokenizer is None else tokenizer_digest(self.tokenizer)

    def follow_weights(self) -> int:
        """Drop all copies of weights if the model's were changed since they were made; return how often that was."""
        if self.watch.changed():
            for name in COPIES:
                self.__dict__.pop(name, None)
            self.changes += 1
        return self.changes

    def shard(self, device: torch.device) -> None:
        """Shard the layers over the processes of the group, each on its `device`: a pass gathers them one after the
        other and needs all processes (FSDP without gradients, like ZeRO stage 3). Embedding, norm and head are whole in
        every process."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.spread = True
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for layer in self.body.layers:
            fully_shard(layer, mesh=mesh)
        inside = {parameter for layer in self.body.layers for parameter in layer.parameters()}
        rest = {parameter for parameter in self.body.parameters() if parameter not in inside}
        fully_shard(self.body, mesh=mesh, ignored_params=rest)
        for parameter in {*rest, self.head_weight}:
            parameter.data = parameter.data.to(device)
        for buffer in self.model.buffers():
            buffer.data = buffer.data.to(device)
        self.__dict__["lean_pass"] = "layers that are spread over processes"

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the input of the first layer, (..., D), for token ids (...,)."""
        embedded = self.embedding(ids)  # Gemma's module scales by itself, Granite's does not
        multiplier = getattr(self.config, "embedding_multiplier", None)
        return embedded * multiplier if multiplier else embedded

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits (..., V) of final hidden states (..., D)."""
        return self.scale(self.model.get_output_embeddings()(hidden))

    def cache(self, rows: int, capacity: int) -> KVCache:
        """Allocate a cache for up to `rows` texts of up to `capacity` positions. Layers with a sliding window keep all
        positions too, at the memory of full attention, so that a row has one length and the window is in the masks
        alone. Raises ValueError where rotary angles change within the capacity."""
        self._check_length(capacity, "shorten prompts or answers")
        shapes = self.shapes
        if shapes.alike is None:
            return MixedCache(shapes, rows, capacity, self.dtype, self.device)
        return KVCache(len(shapes.attention), rows, capacity, *shapes.alike, self.dtype, self.device)

    def _check_length(self, length: int, remedy: str) -> None:
        most = longest(self.config)
        if most is not None and length > most:
            raise ValueError(
                f"this target's rotary angles or scales change beyond {most} positions, {length} are asked for: "
                f"{remedy}"
            )

    @cached_property
    def shapes(self) -> Shapes:
        """What the layers keep of a text, found by a pass over one token. Raises ValueError where the model does not
        get through it: kernels of quantised weights that want other sizes, say."""

        def run(ids: torch.Tensor, window: PackedWindow) -> None:
            masks = self.masks(torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device), ids)
            self.library_pass(ids, ids, masks, window, ())

        try:
            return find_shapes(run, self.device)
        except (AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError) as error:
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(f"this target ({self.config.model_type}) does not run on this machine: {why}") from error

    def masks(
        self, allowed: torch.Tensor, positions: torch.Tensor, ends: torch.Tensor | None = None
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Return the additive mask of every kind of layers, or the only one, from what full attention allows queries at
        `positions` (B, Q), (B, 1, Q, S). Keys are the queries themselves, or the cache that has `ends` (B,)."""
        masks = {}
        for kind, width in self.windows.items():
            near, seen = same_chunk if kind == CHUNKED else nearby, allowed
            if width is not None:
                seen = allowed & near(positions, ends, allowed.shape[-1], width)
            masks[kind] = additive(seen, self.dtype)
        if self.recurrent:
            return masks | dict.fromkeys(STATEFUL)
        return masks if len(masks) > 1 else masks.popitem()[1]

    def library_pass(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | dict[str, torch.Tensor],
        window: Window | None,
        layers: tuple[int, ...],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one pass over ids (B, Q) at absolute positions (B, Q) under additive masks (B, 1, Q, S) through Hugging
        Face's layers; return the outputs of `layers`, concatenated, and the final hidden states."""
        with self._one_at_a_time():
            return self._hooked_pass(ids, positions, mask, window, layers)

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        """Around a pass with hooks: threads wait for each other, and no output of a failed pass is kept."""
        with LOCKS.setdefault(self.model, threading.RLock()):
            try:
                yield
            finally:
                self._taps.wanted = frozenset()
                self._taps.outputs.clear()

    def _hooked_pass(self, ids, positions, mask, window, layers) -> tuple[torch.Tensor, torch.Tensor]:
        self._taps.wanted = frozenset(layers)
        last = self.body(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=window,
            use_cache=window is not None,
        ).last_hidden_state
        outputs = self._taps.outputs
        tapped = [last if layer == len(self.body.layers) else outputs[layer] for layer in layers]
        outputs.clear()
        return torch.cat(tapped, dim=-1) if tapped else last[..., :0], last

    @torch.no_grad()
    def packed_features(
        self, ids: torch.Tensor, positions: torch.Tensor, documents: torch.Tensor, layers: tuple[int, ...]
    ) -> Features:
        """Features of packed documents for training: all arguments (B, T), documents -1 on padding."""
        rows, length = ids.shape
        if hasattr(self.config, "floor_scale"):  # queries are scaled by their place in the row
            self._check_length(length, "pack shorter rows (data.length)")
        if isinstance(self.lean_pass, LeanDecoder) and length <= (longest(self.config) or length):
            return Features(
                *self.lean_pass(
                    ids,
                    positions,
                    self._packed_masks(positions, documents),
                    PackedRows(*ids.shape, len(self.lean_pass.layers)),
                    layers,
                )
            )
        return self.library_features(ids, positions, documents, layers)

    @torch.no_grad()
    def library_features(
        self, ids: torch.Tensor, positions: torch.Tensor, documents: torch.Tensor, layers: tuple[int, ...]
    ) -> Features:
        """Do as `packed_features` does, through Hugging Face's layers under a dense mask."""
        length = ids.shape[1]
        allowed = dense(packed_ranges(positions, documents), length)
        window = PackedWindow(States(lineage=Lineage.packed(documents))) if self.recurrent else None
        return Features(*self.library_pass(ids, positions, self.masks(allowed, positions), window, layers))

    @cached_property
    def context_reach(self) -> float:
        """The length of a context whose attention takes a position as many multiplications as its weights do, of all
        layers together and without the head. Of experts, those count that a position goes through."""
        experts = getattr(self.config, "num_experts_per_tok", None) or 1
        weights = sum(w.numel() for w in self.body.layers.parameters() if w.ndim == 2)
        weights += sum(experts * w.numel() // len(w) for w in self.body.layers.parameters() if w.ndim == 3)
        sizes = sum(size for pair in self.shapes.attention.values() for _, size in pair)  # of keys and values
        return weights / (self.config.num_attention_heads * sizes) if sizes else math.inf

    @cached_property
    def decoder_pass(self) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        """`library_pass` over cached texts, or the lean pass (`infer.targets.lean`) where that computes the same."""
        if isinstance(self.lean_pass, LeanDecoder):
            return self.lean_pass.turned()
        if self.lean_pass is not None:
            warnings.warn(
                f"{self.name} is decoded through transformers' own layers: it has {self.lean_pass}", stacklevel=2
            )
        return without_plans(self.library_pass) if self.device.type == "cuda" else self.library_pass

    @cached_property
    def lean_pass(self) -> LeanDecoder | str | None:
        """The lean pass where it computes what Hugging Face's layers do, else what it does not express; None where
        layers keep states, or keys and values of several sizes."""
        if self.shapes.alike is None:
            return None
        kinds = (
            list(self.windows) * self.config.num_hidden_layers if len(self.windows) == 1 else self.config.layer_types
        )
        try:
            heads = self.config.num_attention_heads, key_heads(self.config)
            with self._one_at_a_time():
                lean = lean_decoder(self.body, kinds, *heads, self.embed)
                self._compare(lean)
        except UnknownLayer as error:
            return str(error)
        return lean

    @property
    def lean(self) -> bool:
        """Whether cached texts go through the lean pass."""
        return isinstance(self.decoder_pass, LeanDecoder)

    @torch.no_grad()
    def _compare(self, lean: LeanDecoder, context: int = 9, width: int = 5) -> None:
        """Run random tokens behind a random context through Hugging Face's layers, and each lean layer on the same
        input. Raises UnknownLayer for the first whose results differ by more than rounding."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self.config.vocab_size, (2, context + width), generator=generator).to(self.device)
        cache = self.cache(2, context + width)
        with cache.add(2) as rows:
            self.extend(ids[:, :context].tolist(), rows, (), self.library_pass)
        causal = torch.ones(width, width, dtype=torch.bool, device=ids.device).tril().expand(2, -1, -1)
        window, positions = cache.window(width), cache.positions(2, width)
        mask = self.masks(cached(cache.ends, causal, window.extent), positions, cache.ends)
        every = tuple(range(len(lean.layers)))
        outputs, last = self.library_pass(ids[:, context:], positions, mask, window, every)
        states = self.embed(ids[:, context:]).flatten(0, 1)
        mask = self._tree_masks(causal, positions, cache.ends, cache, window, lean)
        masks, rotations = lean.prepare(states, positions, mask, window.capacity)
        for layer, memory, module, theirs in zip(
            lean.layers, window.layers(), self.body.layers, outputs.chunk(len(every), dim=-1), strict=True
        ):
            ours, theirs = layer.run(states, rotations[layer.kind], masks[layer.kind], memory), theirs.flatten(0, 1)
            if not close(ours - states, theirs - states):
                raise UnknownLayer(f"layers that compute something else ({type(module).__name__})")
            states = theirs
        if not close(lean.norm(states), last.flatten(0, 1)):
            raise UnknownLayer("another last norm")

    def extend(
        self, ids: list[list[int]], cache: KVCache, layers: tuple[int, ...], run: Callable | None = None
    ) -> Features:
        """Runs the next tokens of every row behind what the cache holds, padded on the right: (B, Q), Q the most."""
        width = max(map(len, ids))
        causal = torch.ones(width, width, dtype=torch.bool, device=self.device).tril().expand(len(ids), -1, -1)
        tokens = pad_ids(ids, self.device)
        window = cache.window(width)
        positions = cache.positions(len(ids), width)
        mask = self._tree_masks(causal, positions, cache.ends, cache, window, run or self.decoder_pass)
        if self.recurrent:
            cache.states.lineage = Lineage.chain([len(row) for row in ids], width, self.device)
        features = (run or self.decoder_pass)(tokens, positions, mask, window, layers)
        cache.advance([len(row) for row in ids])
        return Features(*features)

    def verify(
        self, tree: DraftTree, ancestors: torch.Tensor, cache: KVCache, layers: tuple[int, ...] = ()
    ) -> Features:
        """Score the nodes of the draft trees in one pass (DDTree section 4.4): positions by depth, each node attends
        to its row's cache, its ancestors (B, M, M) and itself. The cache holds the nodes until `commit` keeps a
        path."""
        rows, width = tree.tokens.shape
        window, ends = cache.window(width), cache.ends_of(rows)
        positions = tree.positions(ends)
        mask = self._tree_masks(ancestors, positions, ends, cache, window, self.decoder_pass)
        if self.recurrent:
            cache.states.lineage = Lineage.tree(tree.parents, ancestors)
        return Features(*self.decoder_pass(tree.tokens, positions, mask, window, layers))

    def _packed_masks(self, positions: torch.Tensor, documents: torch.Tensor) -> Masks:
        """Return the masks of packed rows for the lean pass, by kind of layers; all arguments (B, T)."""
        return {
            kind: range_mask(packed_ranges(positions, documents, width, kind == CHUNKED), documents.shape[1])
            for kind, width in self.windows.items()
        }

    def _tree_masks(
        self,
        ancestors: torch.Tensor,
        positions: torch.Tensor,
        ends: torch.Tensor,
        cache: KVCache,
        window: Window,
        run: Callable,
    ) -> Masks:
        """Return the masks of nodes (B, M) with `ancestors` (B, M, M) behind the `ends` (B,) of a cache, for a pass by
        `run`. Rows of one length and one kind of full attention are the common case, and cheap: all of the cache is
        visible."""
        lean = isinstance(run, LeanDecoder)
        if lean and has_kernel(ends.device):
            return {kind: TreeMask(ends, ancestors, positions, width) for kind, width in self.windows.items()}
        alike = not cache.fixed_rows and len(set(cache.lengths)) == 1
        if self.recurrent or set(self.windows.values()) != {None} or not alike:
            return self.masks(cached(ends, ancestors, window.extent), positions, ends)
        nodes = ancestors.shape[1]
        if nodes == 1 and lean:
            return None
        mask = ancestors.new_zeros(len(ancestors), 1, nodes, window.extent, dtype=self.dtype)
        mask[..., -nodes:].masked_fill_(~ancestors[:, None], torch.finfo(self.dtype).min)
        return mask


def without_plans(run: Callable) -> Callable:
    """Return a pass whose attention is any of torch's but cuDNN's, which plans for 40 ms at every new length."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    @wraps(run)
    def passed(*arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            return run(*arguments)

    return passed


def pad_ids(rows: list[list[int]], device: torch.device) -> torch.Tensor:
    """Return token ids of several rows, padded on the right: (B, Q) int64."""
    width = max(map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)


def tokenizer_digest(tokenizer: object) -> str:
    """Return the SHA-256 of what a tokenizer's output follows from, its vocabulary and its chat template, as 64
    hexadecimal digits: two tokenizers with the same digest write the same ids."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    template = getattr(tokenizer, "chat_template", None)
    return hashlib.sha256(json.dumps([vocabulary, template]).encode()).hexdigest()
