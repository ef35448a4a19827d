"""The DFlash drafter: proposes a block of tokens in one pass over the target's hidden states.

A slot is an input position of a block. B batch rows, C new context positions, T context length, N
anchors (positions of the blocks' bonus tokens), W slots of a block (the bonus token and masks), D
hidden size, F size of a position's features (hidden states of several target layers, concatenated),
H key and value heads, E head size.

The architecture is that of the public DFlash checkpoints. The drafter has a few Qwen3 layers, whose
queries are the slots of the block `[bonus token, mask, ..., mask]`. Keys and values come from the
context and from the block. For the context, one projection and one norm convert the features to the
inputs of keys and values, and all layers read the same inputs. The embedding and the language model
head are the target's.

With the option `layer_fusion` (DFlare; arXiv 2606.02091 and AngelSlim's class), this shared
projection does not exist: each layer reads its own learned mix of the target's layers, and has
separate key and value projections for the context.

Training runs `forward`: all blocks of packed sequences in one pass through `DFlashLayer`. Decoding
runs `draft_block`: one block per batch row, with a KV cache for the context, through
`KernelDecoder`, which computes the same with faster kernels. A drafter with convolutions runs
`DFlashLayer` in decoding too. DDTree section 3 describes the distributions of a block's tokens.
"""

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedTokenizerBase, Qwen3Config

from infer.attention.kv_cache import KVCache
from infer.attention.masks import AttentionMask
from infer.config import DrafterConfig
from infer.drafters.base import Drafter
from infer.drafters.build import build_feature_layer_config, choose_mask_token
from infer.drafters.dflash import layouts, writers
from infer.drafters.families import DRAFTER_FAMILIES
from infer.drafters.initial_weights import init_projection_to_select_layer
from infer.drafters.layer import CosSin, DrafterLayer, attend_cached_context, attend_packed_context
from infer.drafters.state import (
    AttentionPattern,
    BlockPosition,
    DrafterState,
    build_cached_block_mask,
)
from infer.kernels.operands import RMSNormWeights
from infer.targets.kernel_decoder import KernelDecoder
from infer.targets.layers import convert_layer, join_linear_copies, select_decoder_class
from infer.targets.support import get_attention_layer_ids
from infer.targets.target import Target

# Public drafters have at least MIN_LAYERS_OF_PUBLIC_DRAFTERS layers and read as many target layers.
# A drafter with fewer layers still reads three target layers if the target has at least
# MIN_LAYERS_OF_DEEP_TARGET layers, since fewer target layers carry too little information (LOG.md).
MIN_LAYERS_OF_DEEP_TARGET = 12
MIN_LAYERS_OF_PUBLIC_DRAFTERS = 3
MAX_CONVOLUTION_GROUP_SIZE = 16  # maximum number of channels that share a convolution kernel
# With layer fusion, each layer reads a mix of target layers, whose weights are the softmax of
# learned logits. In a new drafter, one target layer has this logit, and the others have the logit
# 0.
INITIAL_PREFERRED_FUSION_LAYER_LOGIT = 2.0


def get_layer_patterns(config: Qwen3Config) -> list[AttentionPattern]:
    """Return the attention pattern of every layer: whether attention is causal within the block,
    and the length of the sliding window (None for full attention).

    If `dflash_config` has the key `causal`, its value holds for all layers. Otherwise, layers with
    a sliding window are causal and layers with full attention are not, as in serving engines.
    """
    all_causal = config.dflash_config.get("causal")
    patterns = []
    for layer_type in config.layer_types or []:
        slides = layer_type == "sliding_attention"
        causal = slides if all_causal is None else all_causal
        patterns.append((causal, config.sliding_window if slides else None))
    return patterns


class BlockConvolution(nn.Module):
    """DFlash 2's two convolutions around a sublayer (attention or MLP): one on its input, one on
    its output. They mix each slot (input position) of a block with the slots before it.

    Conv(x)_t = sum_o (base[o] + delta_t[o, group]) x_{t-o}. Here t is a slot, the offset o runs
    from 0 to kernel_size - 1, and x is zero before the block's first slot. `base` is a parameter.
    `delta` is computed from the sublayer's input and is the same for all channels of a group. With
    initial weights, both convolutions are the identity.
    """

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        hidden_size = config.hidden_size
        self.block_slots: int = config.block_size
        self.kernel_size: int = config.dflash_config["conv_kernel_size"]
        self.group_size: int = config.dflash_config["conv_group_size"]
        kernel_rows = 2 * self.kernel_size * hidden_size // self.group_size
        self.base_kernel = nn.Parameter(torch.empty(2, self.kernel_size, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, kernel_rows, bias=False)

    def init_weights(self) -> None:
        """Initialise both convolutions as the identity."""
        nn.init.zeros_(self.kernel_projection.weight)
        nn.init.zeros_(self.base_kernel)
        nn.init.ones_(self.base_kernel[:, 0])

    def compute_kernels(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the kernels of the convolution before the sublayer and of the one after it.

        `inputs` (B, num_slots, hidden_size) is the sublayer's input at the slots of all blocks.
        Each kernel has the shape (B, num_slots, kernel_size, hidden_size).
        """
        delta = self.kernel_projection(inputs)
        # (B, slots of all blocks, 2, kernel size, groups of channels)
        delta = delta.unflatten(-1, (2, self.kernel_size, -1))
        kernels = self.base_kernel + delta.repeat_interleave(self.group_size, -1)
        kernel_before, kernel_after = kernels.unbind(2)
        return kernel_before, kernel_after

    def convolve(self, states: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
        """Return the convolution (B, num_slots, hidden_size) of `states` with a kernel.

        `states` (B, num_slots, hidden_size) are the hidden states at the slots of all blocks.
        `kernel` (B, num_slots, kernel_size, hidden_size) has one kernel per slot.
        """
        # (B, blocks, slots of a block, hidden size)
        blocks = states.unflatten(1, (-1, self.block_slots))
        shifted = []
        for offset in range(self.kernel_size):
            padded = F.pad(blocks, (0, 0, offset, 0))
            shifted.append(padded[:, :, : self.block_slots].flatten(1, 2))
        return (torch.stack(shifted, 2) * kernel).sum(2)


class DFlashLayer(DrafterLayer):
    """A decoder layer of DFlash. If the config has convolutions, one is applied before and one
    after attention, and one before and one after the MLP."""

    drafter_only_tensor_prefixes = (
        "attention_conv.",
        "mlp_conv.",
        "self_attn.k_proj_target.",
        "self_attn.v_proj_target.",
    )

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config, config.hidden_size)
        if config.dflash_config.get("layer_fusion"):
            self.self_attn.k_proj_target = deepcopy(self.self_attn.k_proj)
            self.self_attn.v_proj_target = deepcopy(self.self_attn.v_proj)
        self.has_convolutions = bool(config.dflash_config.get("conv_kernel_size"))
        if self.has_convolutions:
            self.attention_conv = BlockConvolution(config)
            self.mlp_conv = BlockConvolution(config)

    def apply_sublayer(
        self, name: str, inputs: torch.Tensor, sublayer: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        if not self.has_convolutions:
            return sublayer(inputs)
        convolution = cast(BlockConvolution, self.get_submodule(f"{name}_conv"))
        kernel_before, kernel_after = convolution.compute_kernels(inputs)
        outputs = sublayer(convolution.convolve(inputs, kernel_before))
        return convolution.convolve(outputs, kernel_after)


@dataclass
class DFlashState(DrafterState):
    """The decoding state: the KV cache of the context, and the drafter's weights in the form that
    the kernels read.

    If the drafter is being trained, the weights are copies of the drafter's.
    """

    # runs the layers; None for drafters with convolutions, which no kernel supports
    decoder: KernelDecoder | None
    # the function that `DFlash.build_context_kv_projection` returns
    project_context_keys_values: Callable[[torch.Tensor], torch.Tensor]
    key_norm: RMSNormWeights  # norms of the keys; the weight is (layers, key heads, head size)


class DFlash(Drafter):
    """The DFlash drafter. Its tensors have the same names as in the public checkpoints.

    The inputs of a block are the bonus token and mask tokens. A token is drafted at each mask
    token, and also at the bonus token if `sample_from_anchor` is true in the config.
    """

    family = DRAFTER_FAMILIES["dflash"]
    export_writers = {
        "dflash": writers.convert_to_public_format,
        "dflash2": writers.convert_to_dflash2_format,
        "dspark": writers.convert_to_dspark_format,
        "specforge": writers.convert_to_specforge_format,
        "speculators": writers.convert_to_speculators_format,
        "transformers": writers.convert_to_transformers_format,
    }
    read_config = staticmethod(layouts.read_config)

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)
        family_config = self.family_config
        hidden_size = config.hidden_size
        self.mask_token_id = family_config["mask_token_id"]
        self.first_draft_slot = 0 if family_config.get("sample_from_anchor") else 1
        self.num_queries = config.block_size
        self.block_size = self.num_queries + 1 - self.first_draft_slot
        layer_patterns = get_layer_patterns(config)
        self.attention_patterns = list(dict.fromkeys(layer_patterns))
        # for each layer, the index of its pattern in `attention_patterns`
        self.pattern_of_layer = [
            self.attention_patterns.index(pattern) for pattern in layer_patterns
        ]
        self.has_layer_fusion = bool(family_config.get("layer_fusion"))
        # suffix in the names of the projections that compute the context's keys and values
        self.context_projection_suffix = "_target" if self.has_layer_fusion else ""
        num_features = len(self.layer_ids)
        if self.has_layer_fusion:
            # (drafter layers, target layers): layer i of the drafter reads a weighted mean of
            # target layers; the weights are softmax(layer_fusion_weights[i]).
            self.layer_fusion_weights = nn.Parameter(
                torch.empty(config.num_hidden_layers, num_features)
            )
        else:
            self.fc = nn.Linear(num_features * hidden_size, hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(hidden_size, eps=config.rms_norm_eps)
        self.add_embedding_and_head(config.has_embed_tokens, config.has_lm_head)
        self.add_conditional_and_confidence_heads()

    @property
    def typed_layers(self) -> list[DFlashLayer]:
        """The layers of the drafter, as a list whose element type is known to be `DFlashLayer`."""
        return [cast(DFlashLayer, layer) for layer in self.layers]

    @staticmethod
    def default_layer_ids(target_layers: int, layers: int) -> list[int]:
        """Return the default choice of target layers whose hidden states a new drafter reads.

        `target_layers` and `layers` are the numbers of layers of the target and of the drafter.
        Like the public drafters, a drafter with n layers reads n target layers, evenly spaced from
        layer 1 to layer `target_layers - 3`. There are two exceptions:

        - A drafter with fewer than MIN_LAYERS_OF_PUBLIC_DRAFTERS layers reads three target layers
          if the target has at least MIN_LAYERS_OF_DEEP_TARGET layers.
        - A drafter with one layer reads the target's middle layer if the target has fewer than
          MIN_LAYERS_OF_DEEP_TARGET layers.
        """
        if layers < MIN_LAYERS_OF_PUBLIC_DRAFTERS and target_layers >= MIN_LAYERS_OF_DEEP_TARGET:
            first = target_layers // 4 - 1
            last = target_layers - 3
            return [first, (first + last) // 2, last]
        if layers == 1:
            return [target_layers // 2]
        return [round(1 + i * (target_layers - 4) / (layers - 1)) for i in range(layers)]

    @staticmethod
    def choose_warm_start_layers(
        layer_ids: tuple[int, ...], layers: int, target_config: PretrainedConfig
    ) -> list[int]:
        """Return the target layers whose weights the drafter's layers copy in a warm start.

        These are the first attention layers of the target that follow layer_ids[0], the first layer
        that the drafter reads. If too few attention layers follow it, these are the target's last
        attention layers. `layers` is the drafter's number of layers. Returns [] if the target has
        fewer attention layers than the drafter has layers.
        """
        all_attention_layers = get_attention_layer_ids(target_config)
        later_layers = [layer for layer in all_attention_layers if layer > layer_ids[0]]
        chosen = all_attention_layers[-layers:]
        if len(later_layers) >= layers:
            chosen = later_layers[:layers]
        return chosen if len(chosen) == layers else []

    @staticmethod
    def build_family_config(
        options: DrafterConfig, target_config: PretrainedConfig, target: Target | None
    ) -> dict[str, Any]:
        """Return the object `dflash_config` for the config.json of a new drafter.

        Raises ValueError if `mask_token_id` is not in the target's vocabulary.
        """
        vocab_size = target_config.vocab_size
        mask_token_id = options.mask_token_id
        if mask_token_id is None and target is not None:
            tokenizer = cast(PreTrainedTokenizerBase, target.tokenizer)
            mask_token_id = choose_mask_token(tokenizer, vocab_size, target.eos_token_ids)
        if mask_token_id is None:
            mask_token_id = 0
        if not 0 <= mask_token_id < vocab_size:
            raise ValueError(
                f"drafter.mask_token_id={mask_token_id}: use an id of the target's vocabulary, 0 "
                f"to {vocab_size - 1}"
            )

        num_slots = options.block_size
        if options.sample_from_anchor:
            num_slots -= 1
        family_config: dict[str, Any] = {"block_size": num_slots, "mask_token_id": mask_token_id}
        family_config |= build_feature_layer_config(options, target_config)
        if options.conv_kernel_size:
            group_size = math.gcd(target_config.hidden_size, MAX_CONVOLUTION_GROUP_SIZE)
            family_config["conv_kernel_size"] = options.conv_kernel_size
            family_config["conv_group_size"] = group_size
        if options.sliding_window:
            # Without this key, serving engines would assume that layers with a sliding window are
            # causal.
            family_config["causal"] = False
        for name in ("sample_from_anchor", "causal", "layer_fusion"):
            if vars(options)[name]:
                family_config[name] = True
        return family_config

    def init_weights(self, generator: torch.Generator) -> None:
        """Initialise all weights.

        With layer fusion, each layer of the drafter learns its own mix of target layers. In the
        initial mixes, deeper layers of the drafter prefer deeper layers of the target, as in
        AngelSlim.
        """
        super().init_weights(generator)
        if self.has_layer_fusion:
            nn.init.zeros_(self.layer_fusion_weights)
            for i, logits in enumerate(self.layer_fusion_weights):
                preferred = i * len(logits) // len(self.layers)
                logits.data[preferred] = INITIAL_PREFERRED_FUSION_LAYER_LOGIT
        for layer in self.typed_layers:
            if layer.has_convolutions:
                layer.attention_conv.init_weights()
                layer.mlp_conv.init_weights()

    def finish_warm_start(
        self,
        layer_weights: list[dict[str, torch.Tensor]],
        target: Target,
        generator: torch.Generator | None,
    ) -> None:
        """Set the weights that convert the target's hidden states to inputs of keys and values.

        With these weights, the drafter's first layer computes the same keys and values of the
        context as the target layer that it was copied from.
        """
        self.hidden_norm.weight.copy_(layer_weights[0]["input_layernorm.weight"])
        if not self.has_layer_fusion:
            init_projection_to_select_layer(self.fc, 0)
            return
        for layer in self.typed_layers:
            attention = layer.self_attn
            keys, values = attention.get_key_value_projections()
            context_keys, context_values = attention.get_key_value_projections("_target")
            context_keys.load_state_dict(keys.state_dict())
            context_values.load_state_dict(values.state_dict())

    def mix_features_per_drafter_layer(self, features: torch.Tensor) -> torch.Tensor:
        """Return the input of each layer of a drafter with layer fusion: a mix of the target
        layers' hidden states, (..., drafter layers, hidden_size).

        `features` (..., target layers * hidden_size) are the concatenated hidden states of the
        target layers.
        """
        by_target_layer = features.unflatten(-1, (-1, self.config.hidden_size))
        return self.layer_fusion_weights.softmax(-1) @ by_target_layer

    def project_contexts(self, features: torch.Tensor) -> Sequence[torch.Tensor]:
        """Convert the target's hidden states to the vectors from which each layer computes keys and
        values of the context.

        `features` (B, T, num_features) are the concatenated hidden states of several target layers
        at T positions. Returns one tensor (B, T, hidden_size) per layer of the drafter.
        """
        if self.has_layer_fusion:
            return self.hidden_norm(self.mix_features_per_drafter_layer(features)).unbind(-2)
        return [self.hidden_norm(self.fc(features))] * len(self.layers)

    def build_block_ids(self, bonus: torch.Tensor) -> torch.Tensor:
        """Return the input tokens `[bonus token, mask, ..., mask]` of one block for each of the
        bonus tokens `bonus` (...), as a tensor (..., num_slots)."""
        block_ids = bonus.unsqueeze(-1).repeat_interleave(self.num_queries, dim=-1)
        block_ids[..., 1:] = cast(int, self.mask_token_id)
        return block_ids

    def prepare_training_inputs(
        self, target: Target, ids: torch.Tensor, positions: torch.Tensor, anchors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the inputs of `forward` for packed sequences of T tokens each.

        `ids` and `positions` (B, T) are the tokens and their positions. `anchors` (B, num_blocks)
        are the indices of the blocks' bonus tokens. Returns the embeddings
        (B, num_blocks * num_slots, hidden_size) and the positions (B, num_blocks * num_slots) of
        the blocks' input tokens.
        """
        block_ids = self.build_block_ids(ids.gather(1, anchors))
        blocks = self.embed(target, block_ids).flatten(1, 2)
        offsets = torch.arange(self.num_queries, device=ids.device)
        block_positions = positions.gather(1, anchors)[..., None] + offsets
        return blocks, block_positions.flatten(1)

    def forward(
        self,
        features: torch.Tensor,
        positions: torch.Tensor,
        blocks: torch.Tensor,
        block_positions: torch.Tensor,
        *masks: AttentionMask | torch.Tensor | None,
    ) -> torch.Tensor:
        """Run all blocks of packed sequences at once, in training.

        `features` (B, T, num_features) and `positions` (B, T) describe the T context positions.
        `blocks` (B, num_blocks * num_slots, hidden_size) are the embeddings of the blocks' input
        tokens (slots), and `block_positions` (B, num_blocks * num_slots) are their positions.
        `masks` come from `build_training_mask`, one for each of `attention_patterns`; their columns
        are the context positions, then all slots. Returns the hidden states of the slots after
        `normalize_for_head`, in the shape of `blocks`.
        """
        contexts = self.project_contexts(features)
        rotary = self.compute_rotary(block_positions)
        context_rotary = self.compute_rotary(positions)

        def run_layer(
            layer: DFlashLayer,
            states: torch.Tensor,
            context: torch.Tensor,
            mask: AttentionMask | torch.Tensor | None,
        ) -> torch.Tensor:
            keys_values = layer.self_attn.project_keys_values(
                context, *context_rotary, suffix=self.context_projection_suffix
            )
            return layer(states, rotary, partial(attend_packed_context, keys_values, mask))

        states = blocks
        layers = zip(self.typed_layers, contexts, self.pattern_of_layer, strict=True)
        for layer, context, pattern in layers:
            # With `checkpoint`, only the inputs of each layer are stored for the backward pass.
            if self.recompute:
                states = checkpoint(
                    run_layer, layer, states, context, masks[pattern], use_reentrant=False
                )
            else:
                states = run_layer(layer, states, context, masks[pattern])
        return self.normalize_for_head(states)

    def build_state(self, cache: KVCache, rotary_tables: CosSin) -> DFlashState:
        """Return a decoding state with an empty KV cache and the drafter's weights in the form that
        the kernels read."""
        layers = self.typed_layers
        key_weights = [
            cast(nn.RMSNorm, layer.self_attn.k_norm).weight.detach().expand(cache.num_key_heads, -1)
            for layer in layers
        ]
        key_norm = RMSNormWeights(torch.stack(key_weights), self.config.rms_norm_eps)
        decoder = None
        if not layers[0].has_convolutions:
            decoder = self.build_decoder()
        return DFlashState(
            cache, rotary_tables, decoder, self.build_context_kv_projection(), key_norm
        )

    def build_decoder(self) -> KernelDecoder:
        """Convert the layers to a `KernelDecoder`, which runs them in decoding.

        The weights are copied if the drafter is being trained.
        """
        kernels = self.kernels
        modules = self.layers
        if any(parameter.requires_grad for parameter in self.parameters()):
            modules = deepcopy(self.layers)
        heads = self.config.num_attention_heads
        key_heads = cast(int, self.config.num_key_value_heads)
        layers = [
            convert_layer(module, str(pattern), heads, key_heads, kernels)
            for module, pattern in zip(modules, self.pattern_of_layer, strict=True)
        ]
        final_norm = RMSNormWeights(self.norm.weight.detach(), self.config.rms_norm_eps)
        return select_decoder_class(layers, kernels)(kernels, layers, final_norm)

    def build_context_kv_projection(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function that computes the keys and values of the context in all layers, before
        the key norm and rotary embeddings.

        The function maps the target's hidden states (tokens, num_features) to keys and values
        (tokens, layers * 2 * key_value_heads * head_size). Without layer fusion, it needs one
        matmul for all layers, because all layers read the same inputs.
        """
        kernels = self.kernels
        norm = RMSNormWeights(self.hidden_norm.weight.detach(), self.config.rms_norm_eps)
        layer_projections = [
            layer.self_attn.get_key_value_projections(self.context_projection_suffix)
            for layer in self.typed_layers
        ]

        if self.has_layer_fusion:
            operands = [join_linear_copies(projections) for projections in layer_projections]

            def project_mixes(features: torch.Tensor) -> torch.Tensor:
                mixes = kernels.rms_norm(
                    self.mix_features_per_drafter_layer(features), norm
                ).unbind(1)
                keys_values = [
                    kernels.linear(mix, operand)
                    for mix, operand in zip(mixes, operands, strict=True)
                ]
                return torch.cat(keys_values, 1)

            return project_mixes

        fc = join_linear_copies([self.fc])
        all_projections = [module for projections in layer_projections for module in projections]
        joined_projection = join_linear_copies(all_projections)

        def project_context(features: torch.Tensor) -> torch.Tensor:
            context = kernels.rms_norm(kernels.linear(features, fc), norm)
            return kernels.linear(context, joined_projection)

        return project_context

    @torch.no_grad()
    def update_context(
        self,
        target: Target,
        features: torch.Tensor,
        tokens: torch.Tensor,
        counts: list[int] | None,
        state: DFlashState,
        counts_on_device: torch.Tensor | None = None,
    ) -> None:
        """Compute the keys and values of newly committed positions and write them to the KV cache.

        The keys and values equal those that `project_keys_values` computes in training.
        `tokens` is ignored; the other arguments are explained in `Drafter.update_context`.
        """
        cache = state.cache
        rows, width, _ = features.shape
        if cache.max_query_length is not None and width > cache.max_query_length:
            for begin in range(0, width, cache.max_query_length):
                chunk = slice(begin, begin + cache.max_query_length)
                chunk_counts = None
                if counts is not None:
                    chunk_counts = [
                        min(max(count - begin, 0), cache.max_query_length) for count in counts
                    ]
                chunk_counts_on_device = None
                if counts_on_device is not None:
                    chunk_counts_on_device = (counts_on_device - begin).clamp(
                        0, cache.max_query_length
                    )
                self.update_context(
                    target,
                    features[:, chunk],
                    tokens[:, chunk],
                    chunk_counts,
                    state,
                    chunk_counts_on_device,
                )
            return

        keys_values = state.project_context_keys_values(features.flatten(0, 1))
        keys_values = keys_values.view(rows * width, len(self.layers), 2 * cache.num_key_heads, -1)
        cache_window = cache.make_view(width)
        first_layer = cache_window.layer_views()[0]
        first_layer.slot_mapping = cache_window.slot_mapping[:rows].flatten()
        cos, sin = state.next_rotary(rows, width)
        # (B * new positions, 1, head size)
        rotation = (cos.flatten(0, 1)[:, None], sin.flatten(0, 1)[:, None])
        self.kernels.qk_norm_rope_write(
            keys_values, cache.num_key_heads, state.key_norm, rotation, first_layer
        )
        cache.advance_lengths(counts, counts_on_device)

    def compute_block_states(
        self, target: Target, bonus: torch.Tensor, position: BlockPosition, state: DFlashState
    ) -> torch.Tensor:
        """Compute the hidden states (B, num_slots, hidden_size) of the slots (input positions) of
        one block per batch row.

        `bonus` (B,) are the bonus tokens, after which the blocks are drafted. The result is the
        same as that of `forward` in training.
        """
        masks = {
            str(index): build_cached_block_mask(position, self.num_queries, pattern)
            for index, pattern in enumerate(self.attention_patterns)
        }
        states = self.embed(target, self.build_block_ids(bonus))  # (B, slots, hidden size)
        cache_window = position.cache_view
        if state.decoder is None:
            for index, layer in enumerate(self.layers):
                mask = masks[str(self.pattern_of_layer[index])]
                attend = partial(attend_cached_context, cache_window, index, mask)
                states = layer(states, position.rotary, attend)
            return self.normalize_for_head(states)

        cos, sin = position.rotary
        # (B * slots, 1, head size)
        rotation = (cos.flatten(0, 1)[:, None], sin.flatten(0, 1)[:, None])
        rotations = dict.fromkeys(masks, rotation)
        # `KernelDecoder.run` returns a dict. Key i holds the output of layer i, and key
        # len(self.layers) holds the output after the final norm.
        output_index = len(self.layers)
        output_layers = ()
        if self.head_reads_raw_states:
            output_index = len(self.layers) - 1
            output_layers = (output_index,)
        outputs = state.decoder.run(
            states.flatten(0, 1), rotations, masks, cache_window.layer_views(), output_layers
        )
        return outputs[output_index].unflatten(0, (len(bonus), -1))
