"""The target: any Hugging Face causal language model, frozen, tapped and verified through one
wrapper.

B rows, Q new positions, T packed length, M tree nodes, K tapped layers, D hidden size, V
vocabulary.
"""

import hashlib
import json
import math
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from infer.attention.kv_cache import KVCache, Window
from infer.attention.masks import Mask, additive, packed_mask, tree_mask
from infer.kernels.table import Kernels, kernels_for
from infer.targets.ends import end_tokens
from infer.targets.layers import UnknownLayer, close, lean_decoder
from infer.targets.lean import LeanDecoder
from infer.targets.recurrent import Lineage, PackedWindow, Shapes, States, follow_trees
from infer.targets.support import (
    CHUNKED,
    STATEFUL,
    decoder_of,
    key_heads,
    logit_scale,
    longest,
    refuse_longer,
    refuse_unfit,
    refuse_unsupported,
    setting,
    windows,
)
from infer.targets.watch import Watch
from infer.trees.tree import DraftTree

NOT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# a lock for each model: its hooks serve one pass at a time, whatever targets are made of it
LOCKS: "weakref.WeakKeyDictionary[nn.Module, threading.RLock]" = weakref.WeakKeyDictionary()


def lock_of(model: nn.Module) -> threading.RLock:
    """Return the lock of a model's passes with hooks."""
    return LOCKS.setdefault(model, threading.RLock())


@dataclass(frozen=True)
class Features:
    """The outputs of one target pass: the drafter's input and the head's."""

    context: torch.Tensor  # (B, Q, K*D) outputs of the tapped layers, concatenated
    last: torch.Tensor  # (B, Q, D) final hidden state, after the target's last norm


@contextmanager
def tapped(
    layers: nn.ModuleList, wanted: tuple[int, ...], stream: int | None
) -> Iterator[dict[int, torch.Tensor]]:
    """Keep the outputs of the `wanted` layers of a pass inside. `stream`: which of several residual
    streams is the model's own (Gemma 3n); None: there is one."""
    outputs = {}

    def keep(layer: int, module: nn.Module, args: tuple, output: torch.Tensor | tuple) -> None:
        output = output[0] if type(output) is tuple else output
        outputs[layer] = output if stream is None else output[stream]

    hooks = [layers[i].register_forward_hook(partial(keep, i)) for i in wanted if i < len(layers)]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class Target:
    """A frozen causal LM. A layer id k means the output of decoder layer k, counted from 0; the id
    one past the last layer's means the last layer's output behind the last norm."""

    model: nn.Module
    tokenizer: object | None = None
    name: str = "target"
    spread: bool = (
        False  # over processes: a pass takes all of them, so that none may decide by its own clock
    )

    def __post_init__(self) -> None:
        self.model.eval().requires_grad_(False)
        refuse_unsupported(self.model.config)
        refuse_unfit(self.model)
        self.config = self.model.config.get_text_config()
        self.scale, self.windows = logit_scale(self.config), windows(self.config)
        self.body, self.embedding = decoder_of(self.model), self.model.get_input_embeddings()
        self.number = numbers(self.embedding)  # tells device and dtype
        head = self.model.get_output_embeddings()
        self.vocabulary = len(numbers(head))  # V
        self.quantised = hasattr(
            head, "joins"
        )  # its linear layers are of int8 codes (`infer.int8_cpu.weights`)
        self.recurrent = follow_trees(self.body)
        self.watch = Watch(self.model)
        self.changes = 0
        self.calibrations = weakref.WeakKeyDictionary()  # drafter -> what passes take (budget=auto)
        self._stream = self.config.to_dict().get("altup_active_idx")

    @property
    def device(self) -> torch.device:
        return self.number.device

    @property
    def dtype(self) -> torch.dtype:
        return self.number.dtype

    @property
    def kernels(self) -> Kernels:
        """The operations that serve for its weights."""
        return kernels_for(self.device, torch.int8 if self.quantised else self.dtype)

    @property
    def head_weight(self) -> torch.Tensor:
        """(V, D), shared with the drafter and frozen; of codes what they stand for, made anew."""
        return self.model.get_output_embeddings().weight

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an output (`infer.targets.ends`)."""
        configs = (self.model.generation_config, self.model.config, self.config)
        return end_tokens(configs, self.tokenizer, self.vocabulary)

    @cached_property
    def tokenizer_digest(self) -> str | None:
        """`tokenizer_digest` of the tokenizer; None where there is no tokenizer."""
        return None if self.tokenizer is None else tokenizer_digest(self.tokenizer)

    def follow_weights(self) -> int:
        """Drop all copies of weights if the model's were changed since they were made; return how
        often that was."""
        if self.watch.changed():
            self.__dict__.pop("lean", None)
            self.changes += 1
        return self.changes

    def graph_references(self) -> list[object]:
        """Return what a pass reads beside its arguments: the memory of weights and buffers, the
        lean pass and its tables of angles. A graph holds them, since all of these may be replaced
        meanwhile."""
        tables = [] if self.lean is None else [self.lean, *self.lean.angles.values()]
        return [*tables, *memory_of(self.model)]

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the input of the first layer, (..., D), for token ids (...,)."""
        embedded = self.embedding(ids)  # Gemma's module scales by itself, Granite's does not
        multiplier = setting(self.config, "embedding_multiplier")
        return embedded * multiplier if multiplier else embedded

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits (..., V) of final hidden states (..., D)."""
        return self.scale(
            self.model.get_output_embeddings()(hidden.contiguous())
        )  # one product, not one a row

    def cache(self, rows: int, capacity: int) -> KVCache:
        """Allocate a cache for up to `rows` texts of up to `capacity` positions. Layers with a
        sliding window keep all positions too, at the memory of full attention, so that a row has
        one length and the window is in the masks alone. Raises ValueError where rotary angles
        change within the capacity."""
        refuse_longer(self.config, capacity, "shorten prompts or answers")
        states = (
            States.zeros(self.shapes, rows, self.dtype, self.device) if self.recurrent else None
        )
        return KVCache(self.shapes.attention, rows, capacity, self.dtype, self.device, states)

    @cached_property
    @torch.no_grad()
    def shapes(self) -> Shapes:
        """What the layers keep of a text, found by a pass over one token. Raises ValueError where
        the model does not get through it: kernels of quantised weights that want other sizes,
        say."""
        first = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        window = PackedWindow(first)
        try:
            self.library_pass(
                first, first, by_kind(self.windows, partial(packed_mask, first, first)), window, ()
            )
        except (
            AssertionError,
            AttributeError,
            ImportError,
            LookupError,
            RuntimeError,
            TypeError,
        ) as error:
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(
                f"this target ({self.config.model_type}) does not run on this machine: {why}"
            ) from error
        return window.shapes

    def library_pass(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        masks: dict[str, Mask],
        window: Window | None,
        layers: tuple[int, ...],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one pass over ids (B, Q) at absolute positions (B, Q), under the masks of the kinds
        of layers, through Hugging Face's layers; return the outputs of `layers`, concatenated, and
        the final hidden states. On CUDA without cuDNN's attention, which plans for 40 ms at every
        new length."""
        found = {kind: additive(mask.dense, self.dtype) for kind, mask in masks.items()}
        found |= dict.fromkeys(STATEFUL) if self.recurrent else {}
        kernels = sdpa_kernel(NOT_CUDNN) if self.device.type == "cuda" else nullcontext()
        with (
            lock_of(self.model),
            tapped(self.body.layers, layers, self._stream) as outputs,
            kernels,
        ):
            last = self.body(
                input_ids=ids,
                position_ids=positions,
                attention_mask=found if len(found) > 1 else found.popitem()[1],
                past_key_values=window,
                use_cache=window is not None,
            ).last_hidden_state
            outs = [last if layer == len(self.body.layers) else outputs[layer] for layer in layers]
        return torch.cat(outs, dim=-1) if outs else last[..., :0], last

    @torch.no_grad()
    def packed_features(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        documents: torch.Tensor,
        layers: tuple[int, ...],
        library: bool = False,
    ) -> Features:
        """Features of packed documents for training: all arguments (B, T), documents -1 on padding.
        `library`: through Hugging Face's layers whatever the lean pass may do."""
        length = ids.shape[1]
        masks = by_kind(self.windows, partial(packed_mask, positions, documents))
        if setting(self.config, "floor_scale"):  # queries are scaled by their place in the row
            refuse_longer(self.config, length, "pack shorter rows (data.length)")
        if not library and self.lean is not None and length <= (longest(self.config) or length):
            window = PackedWindow(documents, len(self.lean.layers))
            return Features(*self.lean(ids, positions, masks, window, layers))
        window = PackedWindow(documents) if self.recurrent else None
        return Features(*self.library_pass(ids, positions, masks, window, layers))

    @cached_property
    def context_reach(self) -> float:
        """The length of a context whose attention takes a position as many multiplications as its
        weights do, of all layers together and without the head. Of experts, those count that a
        position goes through."""
        experts = setting(self.config, "num_experts_per_tok") or 1
        weights = sum(w.numel() for w in self.body.layers.parameters() if w.ndim == 2)
        weights += sum(
            experts * w.numel() // len(w) for w in self.body.layers.parameters() if w.ndim == 3
        )
        sizes = sum(
            size for pair in self.shapes.attention.values() for _, size in pair
        )  # of keys and values
        return weights / (self.config.num_attention_heads * sizes) if sizes else math.inf

    @property
    def decoder_pass(self) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        """`library_pass` over cached texts, or the lean pass (`infer.targets.lean`) where that
        computes the same."""
        return self.lean or self.library_pass

    @cached_property
    def lean(self) -> LeanDecoder | None:
        """The lean pass where it computes what Hugging Face's layers do; None where it does not,
        which a warning says, or layers keep states, or their weights are here one layer at a
        time."""
        if self.spread or self.recurrent:
            return None
        alone = list(self.windows) * self.config.num_hidden_layers
        kinds = alone if len(self.windows) == 1 else self.config.layer_types
        heads = self.config.num_attention_heads, key_heads(self.config)
        try:
            with lock_of(self.model):
                # before any pass: weights are packed once
                lean = lean_decoder(self.body, kinds, *heads, self.embed, self.kernels)
                if not self.shapes.alike:
                    raise UnknownLayer("keys and values of several sizes")
                compare(self, lean)
        except UnknownLayer as error:
            warnings.warn(
                f"{self.name} runs through transformers' own layers: it has {error}", stacklevel=2
            )
            return None
        self.watch.note()  # joining weights has moved them
        return lean

    def extend(
        self,
        ids: list[list[int]],
        cache: KVCache,
        layers: tuple[int, ...],
        run: Callable | None = None,
    ) -> Features:
        """Runs the next tokens of every row behind what the cache holds, padded on the right: (B,
        Q), Q the most."""
        rows = len(ids)
        width = max(map(len, ids))
        causal = (
            torch.ones(width, width, dtype=torch.bool, device=self.device)
            .tril()
            .expand(rows, -1, -1)
        )
        window = cache.window(width)
        positions = cache.positions(rows, width)
        masks = tree_masks(self.windows, causal, positions, cache.ends_of(rows), window)
        if self.recurrent:
            cache.states.lineage = Lineage.chain([len(row) for row in ids], width, self.device)
        features = (run or self.decoder_pass)(
            pad_ids(ids, self.device), positions, masks, window, layers
        )
        cache.advance([len(row) for row in ids])
        return Features(*features)

    def verify(
        self, tree: DraftTree, ancestors: torch.Tensor, cache: KVCache, layers: tuple[int, ...] = ()
    ) -> Features:
        """Score the nodes of the draft trees in one pass (DDTree section 4.4): positions by depth,
        each node attends to its row's cache, its ancestors (B, M, M) and itself. The cache holds
        the nodes until `commit` keeps a path."""
        rows, width = tree.tokens.shape
        window = cache.window(width, tree.real)
        ends = cache.ends_of(rows)
        positions = tree.positions(ends)
        tokens = tree.tokens
        real = tree.real
        masks = tree_masks(self.windows, ancestors, positions, ends, window)
        if self.recurrent:
            cache.states.lineage = Lineage.tree(tree.parents, ancestors)
        if real is None:
            return Features(*self.decoder_pass(tokens, positions, masks, window, layers))
        found = self.lean(tokens[real], positions[real], masks, window, layers)
        return Features(
            *(
                part.new_zeros(rows, width, part.shape[-1]).index_put((real,), part)
                for part in found
            )
        )


def takes_uneven(target: Target) -> bool:
    """Return whether the rows of a pass may have different numbers of nodes (`DraftTree.real`)."""
    return target.lean is not None and target.kernels.ragged


def numbers(module: nn.Module) -> torch.Tensor:
    """Return a parameter of a layer in the dtype that it computes in: its weight, or the scales of
    its codes."""
    return next(parameter for parameter in module.parameters() if parameter.is_floating_point())


def by_kind(windows: dict[str, int | None], make: Callable[..., Mask]) -> dict[str, Mask]:
    """Return the mask of every kind of layers, `make(width=, chunked=)` of its window or chunk."""
    return {kind: make(width=width, chunked=kind == CHUNKED) for kind, width in windows.items()}


def tree_masks(
    windows: dict[str, int | None],
    ancestors: torch.Tensor,
    positions: torch.Tensor,
    ends: torch.Tensor,
    window: Window,
) -> dict[str, Mask]:
    """Return the masks of nodes at positions (B, M) with `ancestors` (B, M, M) behind the `ends`
    (B,) of a cache. Rows of one length whose nodes are roots alone see all that was written, which
    is the common case, and cheap."""
    whole = ancestors.shape[1] == 1 and window.cache.even
    make = partial(tree_mask, ends, positions, ancestors, window.extent, whole=whole)
    return by_kind(windows, make)


@torch.no_grad()
def compare(target: Target, lean: LeanDecoder, context: int = 9, width: int = 5) -> None:
    """Run random tokens behind a random context through Hugging Face's layers, and each lean layer
    on the same input. Raises UnknownLayer for the first whose results differ by more than
    rounding."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.config.vocab_size, (2, context + width), generator=generator).to(
        target.device
    )
    cache = target.cache(2, context + width)
    with cache.add(2) as rows:
        target.extend(ids[:, :context].tolist(), rows, (), target.library_pass)
    causal = torch.ones(width, width, dtype=torch.bool, device=ids.device).tril().expand(2, -1, -1)
    window = cache.window(width)
    positions = cache.positions(2, width)
    masks = tree_masks(target.windows, causal, positions, cache.ends, window)
    every = tuple(range(len(lean.layers)))
    outputs, last = target.library_pass(ids[:, context:], positions, masks, window, every)
    states = target.embed(ids[:, context:]).flatten(0, 1)
    rotations = lean.rotations(states, positions, window.capacity)
    for layer, memory, module, theirs in zip(
        lean.layers,
        window.layers(),
        target.body.layers,
        outputs.chunk(len(every), dim=-1),
        strict=True,
    ):
        theirs = theirs.flatten(0, 1)
        normed = lean.kernels.rms_norm(states, layer.attention_norm)
        ours, _ = layer.run(
            states, normed, lean.norm, rotations[layer.kind], masks[layer.kind], memory
        )
        if not close(ours - states, theirs - states, target.quantised, float(states.norm())):
            raise UnknownLayer(f"layers that compute something else ({type(module).__name__})")
        states = theirs
    if not close(lean.kernels.rms_norm(states, lean.norm), last.flatten(0, 1), target.quantised):
        raise UnknownLayer("another last norm")


def pad_ids(rows: list[list[int]], device: torch.device) -> torch.Tensor:
    """Return token ids of several rows, padded on the right: (B, Q) int64."""
    width = max(map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)


def tokenizer_digest(tokenizer: object) -> str:
    """Return the SHA-256 of what a tokenizer's output follows from, its vocabulary and its chat
    template, as 64 hexadecimal digits: two tokenizers with the same digest write the same ids."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps([vocabulary, tokenizer.chat_template]).encode()).hexdigest()


def memory_of(module: nn.Module) -> list[torch.Tensor]:
    """Return aliases of a module's parameters and buffers, which keep their memory whatever the
    parameters are given."""
    return [tensor.detach() for tensor in (*module.parameters(), *module.buffers())]


def number_format(target: Target) -> str:
    """Return what reports call the numbers that a target computes with, such as "float32" or
    "int8"."""
    return "int8" if target.quantised else str(target.dtype).removeprefix("torch.")
