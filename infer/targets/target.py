"""The target: any Hugging Face causal language model, frozen. The wrapper `Target` returns hidden
states of its layers, which drafters use as features, and verifies draft trees."""

import hashlib
import json
import math
import threading
import warnings
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from infer.attention.kv_cache import CacheView, KVCache
from infer.attention.masks import AttentionMask, build_packed_mask, to_additive_mask
from infer.kernels.table import Kernels, select_kernels
from infer.targets.end_tokens import find_eos_token_ids
from infer.targets.kernel_decoder import KernelDecoder
from infer.targets.layer_masks import build_causal_mask, build_masks_by_layer_type, build_tree_masks
from infer.targets.layers import UnsupportedLayer, build_kernel_decoder, equals_up_to_rounding
from infer.targets.predecessors import Predecessors
from infer.targets.recurrent import CacheShapes, RecurrentStates, UncachedPackedView
from infer.targets.recurrent_modules import patch_recurrent_modules
from infer.targets.support import (
    RECURRENT_LAYER_TYPES,
    find_decoder,
    get_attention_windows,
    get_decoder_layers,
    get_first_truthy_setting,
    get_logit_scale,
    get_max_length_with_fixed_rope,
    get_num_key_heads,
    refuse_length_dependent_rope,
    refuse_unsupported,
    refuse_unsupported_modules,
)
from infer.targets.weight_watcher import WeightWatcher
from infer.trees.tree import DraftTree

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# all attention backends of PyTorch except cuDNN, which needs 40 ms of planning for every new
# sequence length
SDPA_BACKENDS_WITHOUT_CUDNN = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
# Keys are models, values are their locks. A model's hooks serve only one forward pass at a time,
# even if several targets wrap the same model.
MODEL_LOCKS: "weakref.WeakKeyDictionary[nn.Module, threading.RLock]" = weakref.WeakKeyDictionary()


def get_model_lock(model: nn.Module) -> threading.RLock:
    """Return the lock of a model. Hold this lock during a forward pass that uses hooks of the
    model."""
    return MODEL_LOCKS.setdefault(model, threading.RLock())


@dataclass(frozen=True)
class Features:
    """The hidden states that one forward pass of the target returns. The drafter reads
    `layer_features`; the language model head reads `last_hidden_states`."""

    # (B, length, num_layers * hidden_size), concatenated outputs of the requested layers
    layer_features: torch.Tensor
    # (B, length, hidden_size), the last layer's outputs after the final norm
    last_hidden_states: torch.Tensor


@contextmanager
def capture_layer_outputs(
    layers: nn.ModuleList, layer_ids: tuple[int, ...], residual_stream: int | None
) -> Generator[dict[int, torch.Tensor]]:
    """Yield a dictionary that every forward pass within the `with` block fills with layer outputs.
    Keys are layer indices.

    layer_ids: indices of the layers to record; indices beyond the last layer are ignored
    residual_stream: index of the main residual stream, for a model whose layers return several
        residual streams (Gemma 3n); None for a model whose layers return a single one
    """
    outputs: dict[int, torch.Tensor] = {}

    def store_output(layer_id: int, module: nn.Module, args: tuple, output: Any) -> None:
        states = output[0] if type(output) is tuple else output
        outputs[layer_id] = states if residual_stream is None else states[residual_stream]

    hooks = [
        layers[layer_id].register_forward_hook(partial(store_output, layer_id))
        for layer_id in layer_ids
        if layer_id < len(layers)
    ]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class Target:
    """A frozen causal language model.

    Layer ids select hidden states. Id k is the output of decoder layer k, counted from 0. The
    number of layers, as an id, selects the last layer's output after the final norm.
    """

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase | None" = None
    name: str = "target"
    # Whether the layers are sharded over several processes (`infer.targets.loading.shard_target`).
    # All processes must then run every forward pass together, so no process may stop earlier than
    # the others because of a time limit.
    is_sharded: bool = False

    def __post_init__(self) -> None:
        self.model.eval().requires_grad_(False)
        refuse_unsupported(self.model.config)
        refuse_unsupported_modules(self.model)
        self.config = self.model.config.get_text_config()
        self.logit_scale = get_logit_scale(self.config)
        self.attention_windows = get_attention_windows(self.config)
        self.decoder = find_decoder(self.model)
        self.embedding = self.model.get_input_embeddings()
        self.vocab_size = len(first_float_parameter(self.head_module))
        # Whether linear layers have int8 weights (`infer.int8_cpu.modules`).
        self.is_int8 = hasattr(self.head_module, "can_join")
        self.has_recurrent_layers = patch_recurrent_modules(self.decoder)
        self.weight_watcher = WeightWatcher(self.model)
        self.weight_version = 0  # how many times changed weights were detected
        # Keys are drafters, values are measured times of forward passes
        # (`infer.engine.round_cost.Calibration`).
        self.cost_calibrations = weakref.WeakKeyDictionary()
        self._reference_parameter = first_float_parameter(self.embedding)
        self._residual_stream = self.config.to_dict().get("altup_active_idx")

    @property
    def device(self) -> torch.device:
        return self._reference_parameter.device

    @property
    def dtype(self) -> torch.dtype:
        return self._reference_parameter.dtype

    @property
    def kernels(self) -> Kernels:
        """Return the operations of `infer.kernels` for the device and dtype of the target's
        weights."""
        return select_kernels(self.device, torch.int8 if self.is_int8 else self.dtype)

    @property
    def head_module(self) -> nn.Module:
        """Return the language model head, which maps hidden states to logits."""
        return cast(nn.Module, self.model.get_output_embeddings())

    @property
    def head_weight(self) -> torch.Tensor:
        """Return the weight (vocab_size, hidden_size) of the language model head. It is frozen and
        shared with the drafter. An int8 weight is dequantised at every access."""
        return cast(torch.Tensor, self.head_module.weight)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Return the ids of the tokens that end an output (`infer.targets.end_tokens`)."""
        configs = (self.model.generation_config, self.model.config, self.config)
        return find_eos_token_ids(configs, self.tokenizer, self.vocab_size)

    @cached_property
    def tokenizer_digest(self) -> str | None:
        """Return a SHA-256 of the tokenizer's vocabulary and chat template (see the function
        `tokenizer_digest`), or None if the target has no tokenizer."""
        return None if self.tokenizer is None else tokenizer_digest(self.tokenizer)

    def drop_decoder_if_weights_changed(self) -> int:
        """If the model's weights have changed, drop our own decoder, which has copies of some
        weights. Return `weight_version`, the number of weight changes that were detected."""
        if self.weight_watcher.detect_changes():
            self.__dict__.pop("kernel_decoder", None)
            self.weight_version += 1
        return self.weight_version

    def graph_references(self) -> list[object]:
        """Return the objects that a forward pass reads besides its arguments: the memory of weights
        and buffers, our own decoder and the decoder's rotary tables. A CUDA graph must hold
        references to these objects, because the target may replace all of them while the graph
        exists."""
        references: list[object] = [*parameter_aliases(self.model)]
        if self.kernel_decoder is not None:
            references += [self.kernel_decoder, *self.kernel_decoder.rope_tables.values()]
        return references

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the input of the first layer, (..., hidden_size), for token ids (...) of any
        shape."""
        # Granite's embedding is multiplied by a factor here. Gemma's embedding module does this
        # itself.
        embedded = self.embedding(ids)
        multiplier = get_first_truthy_setting(self.config, "embedding_multiplier")
        return embedded * multiplier if multiplier else embedded

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits (..., vocab_size) of hidden states (..., hidden_size) after the final
        norm."""
        # A contiguous tensor needs a single matmul. Any other tensor needs one matmul per batch
        # row.
        return self.logit_scale(self.head_module(hidden.contiguous()))

    def allocate_cache(self, num_rows: int, capacity: int) -> KVCache:
        """Allocate a KV cache for up to `num_rows` sequences of up to `capacity` positions each.

        Layers with a sliding window also store all positions; only their attention masks implement
        the window. All layers of a batch row therefore have the same length. Raises ValueError if
        the target's rotary angles would change within `capacity` positions.
        """
        refuse_length_dependent_rope(self.config, capacity, "shorten prompts or outputs")
        states = None
        if self.has_recurrent_layers:
            states = RecurrentStates.allocate(self.cache_shapes, num_rows, self.dtype, self.device)
        shapes = self.cache_shapes.attention
        return KVCache(shapes, num_rows, capacity, self.dtype, self.device, states)

    @cached_property
    @torch.no_grad()
    def cache_shapes(self) -> CacheShapes:
        """Return the shapes of the tensors that the layers store for one sequence. They are
        measured by a forward pass over one token. Raises ValueError if the pass fails, for example
        because the kernels of quantised weights do not support the model's sizes."""
        zero = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        masks = build_masks_by_layer_type(
            self.attention_windows, partial(build_packed_mask, zero, zero)
        )
        cache_view = UncachedPackedView(zero)
        failures = (
            AssertionError,
            AttributeError,
            ImportError,
            LookupError,
            RuntimeError,
            TypeError,
        )
        try:
            self.run_transformers_layers(zero, zero, masks, cache_view, ())
        except failures as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(
                f"this target ({self.config.model_type}) does not run on this machine ({reason}); "
                "use another target or device"
            ) from error
        return cache_view.shapes

    def run_transformers_layers(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        masks: dict[str, AttentionMask],
        cache_view: CacheView | UncachedPackedView | None,
        feature_layer_ids: tuple[int, ...],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run token ids (B, length) at absolute positions (B, length) through Hugging Face's
        layers.

        masks: keys are layer types, values are attention masks
        cache_view: where keys and values are stored; None means that nothing is cached
        feature_layer_ids: ids of the layers whose outputs are returned

        Returns the outputs of these layers, concatenated to (B, length, num_feature_layers *
        hidden_size), and the last hidden states after the final norm, (B, length, hidden_size).
        """
        additive_masks: dict[str, torch.Tensor | None] = {
            layer_type: to_additive_mask(mask.dense, self.dtype)
            for layer_type, mask in masks.items()
        }
        if self.has_recurrent_layers:
            additive_masks |= dict.fromkeys(RECURRENT_LAYER_TYPES)
        attention_mask: Any = additive_masks
        if len(additive_masks) == 1:
            attention_mask = next(iter(additive_masks.values()))
        backend = nullcontext()
        if self.device.type == "cuda":
            backend = sdpa_kernel(SDPA_BACKENDS_WITHOUT_CUDNN)
        layers = get_decoder_layers(self.decoder)
        with (
            get_model_lock(self.model),
            capture_layer_outputs(layers, feature_layer_ids, self._residual_stream) as outputs,
            backend,
        ):
            last = self.decoder(
                input_ids=ids,
                position_ids=positions,
                attention_mask=attention_mask,
                past_key_values=cache_view,
                use_cache=cache_view is not None,
            ).last_hidden_state
            outputs[len(layers)] = last
            features = [outputs[layer_id] for layer_id in feature_layer_ids]
        context = torch.cat(features, dim=-1) if features else last[..., :0]
        return context, last

    @torch.no_grad()
    def compute_packed_features(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        documents: torch.Tensor,
        feature_layer_ids: tuple[int, ...],
        use_transformers: bool = False,
    ) -> Features:
        """Compute hidden states of packed sequences for training. A packed sequence consists of
        several documents, which do not attend to each other.

        ids: (B, length) int64, token ids
        positions: (B, length) int64, the position of every token within its document
        documents: (B, length) int64, document numbers, -1 on padding
        feature_layer_ids: ids of the layers whose outputs are returned
        use_transformers: run Hugging Face's layers even if our own decoder supports the target
        """
        length = ids.shape[1]
        make_mask = partial(build_packed_mask, positions, documents)
        masks = build_masks_by_layer_type(self.attention_windows, make_mask)
        # Llama 4 scales a query by its index in the packed sequence, not in its document.
        if get_first_truthy_setting(self.config, "floor_scale"):
            refuse_length_dependent_rope(self.config, length, "set a smaller data.length")
        max_length = get_max_length_with_fixed_rope(self.config) or length
        if not use_transformers and self.kernel_decoder is not None and length <= max_length:
            cache_view = UncachedPackedView(documents, len(self.kernel_decoder.layers))
            outputs = self.kernel_decoder(ids, positions, masks, cache_view, feature_layer_ids)
            return Features(*outputs)
        cache_view = UncachedPackedView(documents) if self.has_recurrent_layers else None
        outputs = self.run_transformers_layers(ids, positions, masks, cache_view, feature_layer_ids)
        return Features(*outputs)

    @cached_property
    def context_length_matching_weight_cost(self) -> float:
        """Return the context length at which one position needs as many multiplications for
        attention as for the matmuls with the weights of the decoder layers. The language model head
        is not counted. In a mixture of experts, only the experts that one position uses are
        counted."""
        experts_per_token = get_first_truthy_setting(self.config, "num_experts_per_tok") or 1
        weight_macs = 0
        for weight in get_decoder_layers(self.decoder).parameters():
            if weight.ndim == 2:
                weight_macs += weight.numel()
            elif weight.ndim == 3:  # (num_experts, outputs, inputs)
                weight_macs += experts_per_token * weight.numel() // len(weight)
        head_sizes = [size for pair in self.cache_shapes.attention.values() for _, size in pair]
        # number of multiplications for attention to one context position, in all layers
        attention_macs = self.config.num_attention_heads * sum(head_sizes)
        return weight_macs / attention_macs if attention_macs else math.inf

    @property
    def run_decoder(self) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        """Return the function that runs the target's decoder over cached sequences. This is our own
        decoder if it supports the target, otherwise `run_transformers_layers`."""
        return self.kernel_decoder or self.run_transformers_layers

    @cached_property
    def kernel_decoder(self) -> KernelDecoder | None:
        """Return our own decoder (`infer.targets.kernel_decoder`) if it computes the same as
        Hugging Face's layers. Otherwise print a warning and return None. Also return None, without
        a warning, for sharded targets and targets with recurrent layers."""
        if self.is_sharded or self.has_recurrent_layers:
            return None
        if len(self.attention_windows) == 1:
            layer_types = list(self.attention_windows) * self.config.num_hidden_layers
        else:
            layer_types = self.config.layer_types
        try:
            with get_model_lock(self.model):
                # Building our decoder moves weights. The checks below run the model, so they come
                # afterwards.
                decoder = build_kernel_decoder(
                    self.decoder,
                    layer_types,
                    self.config.num_attention_heads,
                    get_num_key_heads(self.config),
                    self.embed,
                    self.kernels,
                )
                if not self.cache_shapes.has_only_uniform_attention:
                    raise UnsupportedLayer(
                        "our decoder does not support layers whose keys and values have different "
                        "sizes"
                    )
                compare_with_transformers(self, decoder)
        except UnsupportedLayer as error:
            warnings.warn(
                f"{self.name} runs through transformers' own layers, which may be slower than our "
                f"own decoder. Reason: {error}",
                stacklevel=2,
            )
            return None
        self.weight_watcher.take_snapshot()  # building the decoder moved weights
        return decoder

    def extend_cache(
        self,
        ids: list[list[int]],
        cache: KVCache,
        feature_layer_ids: tuple[int, ...],
        run_decoder: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> Features:
        """Run the next tokens of every sequence through the target, and add their keys and values
        (or states) to the cache.

        ids: the next token ids of every batch row
        feature_layer_ids: ids of the layers whose outputs are returned
        run_decoder: function to use in place of `Target.run_decoder`

        Returns hidden states with the axes (batch row, token, feature). Batch rows with fewer
        tokens are padded on the right.
        """
        rows = len(ids)
        width = max(map(len, ids))
        causal_mask = build_causal_mask(rows, width, self.device)
        cache_view = cache.make_view(width)
        positions = cache.next_positions(rows, width)
        cached_lengths = cache.get_device_lengths(rows)
        masks = build_tree_masks(
            self.attention_windows, causal_mask, positions, cached_lengths, cache_view
        )
        counts = [len(row) for row in ids]
        if self.has_recurrent_layers:
            states = cast(RecurrentStates, cache.recurrent_states)
            states.predecessors = Predecessors.of_chains(counts, width, self.device)
        tokens = pad_token_ids(ids, self.device)
        run = run_decoder or self.run_decoder
        outputs = run(tokens, positions, masks, cache_view, feature_layer_ids)
        cache.advance_lengths(counts)
        return Features(*outputs)

    def verify(
        self,
        tree: DraftTree,
        ancestors: torch.Tensor,
        cache: KVCache,
        feature_layer_ids: tuple[int, ...] = (),
    ) -> Features:
        """Run all nodes of the draft trees through the target in one forward pass (DDTree section
        4.4).

        The position of a node follows from its depth. A node attends to the cached positions of its
        batch row, to its ancestors and to itself.

        ancestors: (B, num_nodes, num_nodes) bool; entry [b, i, j] is true if node j is node i or an
            ancestor of node i
        feature_layer_ids: ids of the layers whose outputs are returned

        Returns the hidden states of all nodes. The cache stores all nodes until `KVCache.commit`
        keeps the nodes of one path.
        """
        rows, width = tree.tokens.shape
        cache_view = cache.make_view(width, tree.node_mask)
        cached_lengths = cache.get_device_lengths(rows)
        positions = tree.positions(cached_lengths)
        tokens = tree.tokens
        valid_mask = tree.node_mask
        masks = build_tree_masks(
            self.attention_windows, ancestors, positions, cached_lengths, cache_view
        )
        if self.has_recurrent_layers:
            states = cast(RecurrentStates, cache.recurrent_states)
            states.predecessors = Predecessors.of_trees(tree.parents, ancestors)
        if valid_mask is None:
            outputs = self.run_decoder(tokens, positions, masks, cache_view, feature_layer_ids)
            return Features(*outputs)
        assert self.kernel_decoder is not None, "trees of different sizes need our own decoder"
        outputs = self.kernel_decoder(
            tokens[valid_mask], positions[valid_mask], masks, cache_view, feature_layer_ids
        )
        padded_outputs = []
        for states in outputs:
            padded = states.new_zeros(rows, width, states.shape[-1])
            padded_outputs.append(padded.index_put((valid_mask,), states))
        return Features(*padded_outputs)


def supports_ragged_trees(target: Target) -> bool:
    """Return whether one forward pass of the target may verify draft trees with different numbers
    of nodes."""
    return target.kernel_decoder is not None and target.kernels.supports_ragged


def first_float_parameter(module: nn.Module) -> nn.Parameter:
    """Return the first floating-point parameter of a layer: the weight, or the scales of an int8
    weight. The layer computes in this parameter's dtype."""
    return next(parameter for parameter in module.parameters() if parameter.is_floating_point())


@torch.no_grad()
def compare_with_transformers(
    target: Target, decoder: KernelDecoder, context_length: int = 9, width: int = 5
) -> None:
    """Raise UnsupportedLayer for the first layer of our own decoder whose output differs from that
    of Hugging Face's layer by more than rounding.

    Two batch rows get a random context of `context_length` tokens. Then `width` random tokens run
    through Hugging Face's layers. Each of our layers runs on the same input as its counterpart.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(
        target.config.vocab_size, (2, context_length + width), generator=generator
    ).to(target.device)
    cache = target.allocate_cache(2, context_length + width)
    with cache.add_rows(2) as new_rows:
        context_ids = ids[:, :context_length].tolist()
        target.extend_cache(context_ids, new_rows, (), target.run_transformers_layers)
    causal_mask = build_causal_mask(2, width, ids.device)
    cache_view = cache.make_view(width)
    positions = cache.next_positions(2, width)
    masks = build_tree_masks(
        target.attention_windows, causal_mask, positions, cache.device_lengths, cache_view
    )
    new_ids = ids[:, context_length:]
    layer_ids = tuple(range(len(decoder.layers)))
    outputs, last = target.run_transformers_layers(new_ids, positions, masks, cache_view, layer_ids)
    states = target.embed(new_ids).flatten(0, 1)
    rotations = decoder.look_up_rotations(states, positions, cache_view.capacity)
    pairs = zip(
        decoder.layers,
        cache_view.layer_views(),
        get_decoder_layers(target.decoder),
        outputs.chunk(len(layer_ids), dim=-1),
        strict=True,
    )
    for layer, layer_view, module, output in pairs:
        expected = output.flatten(0, 1)
        layer_type = layer.layer_type
        normed = decoder.kernels.rms_norm(states, layer.attention_norm)
        actual, _ = layer.run(
            states, normed, decoder.final_norm, rotations[layer_type], masks[layer_type], layer_view
        )
        # Compare only what the layer adds to the residual stream, because the residual stream
        # itself may be much larger.
        if not equals_up_to_rounding(
            actual - states, expected - states, target.is_int8, float(states.norm())
        ):
            raise UnsupportedLayer(
                "the outputs of our decoder differ from those of a layer of the class "
                f"{type(module).__name__}"
            )
        states = expected
    last_normed = decoder.kernels.rms_norm(states, decoder.final_norm)
    if not equals_up_to_rounding(last_normed, last.flatten(0, 1), target.is_int8):
        raise UnsupportedLayer(
            "the output of our decoder's final norm differs from that of the target's final norm"
        )


def pad_token_ids(rows: list[list[int]], device: torch.device) -> torch.Tensor:
    """Return the token ids of several batch rows as one int64 tensor (num_rows, max_length), padded
    on the right with 0."""
    width = max(map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)


def tokenizer_digest(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the SHA-256 of a tokenizer's vocabulary and chat template, as 64 hexadecimal digits.
    Two tokenizers with the same digest give the same token ids."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    content = json.dumps([vocabulary, tokenizer.chat_template])
    return hashlib.sha256(content.encode()).hexdigest()


def parameter_aliases(module: nn.Module) -> list[torch.Tensor]:
    """Return tensors that share memory with a module's parameters and buffers. They keep this
    memory alive even after a parameter has been moved to other memory."""
    return [tensor.detach() for tensor in (*module.parameters(), *module.buffers())]


def weight_format_name(target: Target) -> str:
    """Return the number format of a target's weights as a name for reports, such as "float32" or
    "int8"."""
    return "int8" if target.is_int8 else str(target.dtype).removeprefix("torch.")
