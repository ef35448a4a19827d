"""The base class of drafters, with the code that all drafter families share.

A slot is an input position of a drafted block. A slot's hidden state after the last layer gives the
distribution of one drafted token.

Shapes: B batch rows, C new context positions, T context length, N anchors (positions of the bonus
tokens after which blocks are drafted), L drafted positions, W slots of a block, D hidden size, F
size of a position's features (hidden states of several target layers, concatenated), E size of an
attention head, V tokens of the target's vocabulary, R tokens that the drafter can propose (R <= V).

A drafter family consists of a subclass of `Drafter` and an entry in `infer.drafters.families`. Read
dflash/model.py as the example. Besides its layers, a subclass defines:

- for new drafters: `default_layer_ids` chooses the target layers that the drafter reads, and
  `build_family_config` builds the object in config.json that holds the family's keys;
- for reading and writing config.json: `read_config` and `export_writers`;
- for training: `prepare_training_inputs` and `forward` run all blocks of packed sequences in one
  pass, with one attention mask for each of `attention_patterns`;
- for decoding: `build_state` creates the decoding state, `update_context` adds newly committed
  positions to its KV cache, and `compute_block_states` computes the hidden states of one block per
  sequence, from which `draft_block` computes the distributions of the drafted tokens;
- for warm starts from the target's weights: `choose_warm_start_layers` and `finish_warm_start`.
"""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import PretrainedConfig, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from infer.attention.kv_cache import KVCache
from infer.config import DrafterConfig
from infer.drafters.config_keys import ParsedConfig
from infer.drafters.families import Family
from infer.drafters.heads.base import ConditionalHead, ConfidenceHead, get_draft_vocab_size
from infer.drafters.heads.table import HeadSpec, find_head_spec
from infer.drafters.initial_weights import shrink_final_norm
from infer.drafters.layer import CosSin, DrafterLayer, negate_first_half
from infer.drafters.state import AttentionPattern, BlockPosition, DrafterState, allocate_cache
from infer.drafters.target_head import TargetHeadCopy, update_target_head_copy
from infer.drafters.warm_start import get_ungated_target_weights, layer_matches_target
from infer.kernels.table import Kernels, select_kernels
from infer.targets.layers import convert_norm
from infer.targets.target import Target, parameter_aliases
from infer.trees.vocabulary import FULL_VOCABULARY, DraftVocabulary


class DraftedBlock(NamedTuple):
    """One drafted block per batch row: the log-probabilities of the tokens at each drafted
    position, and the hidden states that the drafter's conditional head reads."""

    # (B, drafted positions, tokens that the drafter can propose) float32 log-probabilities
    marginals: torch.Tensor
    # (B, slots of the block, hidden size): hidden states after the last layer, which the
    # conditional head reads; None if the drafter has no conditional head
    states: torch.Tensor | None = None


class Drafter(nn.Module):
    """The base class of drafters. Its tensors have the same names as in the public checkpoints of
    the drafter family."""

    family: Family
    # Key: the name of an export format. Value: the function that converts a drafter to this format;
    # infer/drafters/dflash/writers.py describes its arguments and its result.
    export_writers: dict[str, Callable] = {}
    anchor_offset = 0  # number of positions by which a block's first slot precedes the bonus token
    # distinct attention patterns (causal or not, length of the sliding window) of the layers
    attention_patterns: list[AttentionPattern]
    num_queries: int  # number of slots (input positions) of a block
    first_draft_slot: int  # index, in a block, of the first slot whose output is a drafted token
    # input token of drafted positions; None if a learned vector is used
    mask_token_id: int | None = None
    norm: nn.RMSNorm  # norm before the language model head
    # (number of tokens that the drafter can propose,) int64: the drafter's token i is the target's
    # token i + d2t[i]. None if the drafter can propose all tokens of the target.
    d2t: torch.Tensor | None

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.config = config
        # number of drafted positions + 1, as the bonus token is counted too
        self.block_size: int = config.block_size
        self.layer_ids = get_feature_layer_ids(self.family_config, config.num_target_layers)
        # The module is stored in a list so that `nn.Module.to` does not find it: rotary embeddings
        # must not be cast to bfloat16.
        self.rotary_modules = [Qwen3RotaryEmbedding(config)]
        # properties of the conditional head; None without a head
        self.head_spec: HeadSpec | None = None
        self.confidence_head: ConfidenceHead | None = None
        # whether the conditional head reads the last layer's output before the final norm
        self.head_reads_raw_states = False
        # file of n-gram counts in the checkpoint's folder; None if there is none
        self.ngram_path: Path | None = None
        self.quantised = False  # whether the linear layers have int8 weights
        # whether training recomputes activations in the backward pass instead of storing them
        self.recompute = False
        self.embed_tokens: nn.Embedding | None = None
        self.lm_head: nn.Linear | None = None
        draft_vocab_size = vars(config).get("draft_vocab_size")
        d2t = None
        if draft_vocab_size is not None:
            d2t = torch.zeros(draft_vocab_size, dtype=torch.long)
        self.register_buffer("d2t", d2t)
        self.target_head_copy: TargetHeadCopy | None = None  # cached result of `get_target_head`

    # Every family overrides the following methods.

    @staticmethod
    def read_config(
        family: Family, raw: dict, tensors: Collection[str], target_layers: int | None
    ) -> ParsedConfig | None:
        """Translate the content of a drafter's config.json to this project's keys.

        `raw` is the content. `tensors` are the names of the tensors in the checkpoint.
        `target_layers` is the target's number of layers, used if `raw` does not store this number.
        Returns None if the family cannot read this form of config.json.
        """
        raise NotImplementedError

    @staticmethod
    def default_layer_ids(target_layers: int, layers: int) -> list[int]:
        """Return the default choice of target layers whose hidden states a new drafter reads.

        `target_layers` and `layers` are the numbers of layers of the target and of the drafter.
        """
        raise NotImplementedError

    @staticmethod
    def build_family_config(
        options: DrafterConfig, target_config: PretrainedConfig, target: Target | None
    ) -> dict[str, Any]:
        """Return the object that holds the drafter family's keys in the config.json of a new
        drafter.

        `options` are the user's options. `target` is None if only the target's config is known.
        """
        raise NotImplementedError

    @staticmethod
    def choose_warm_start_layers(
        layer_ids: tuple[int, ...], layers: int, target_config: PretrainedConfig
    ) -> list[int]:
        """Choose the target layers whose weights are copied into the drafter's layers in a warm
        start.

        `layer_ids` are the target layers that the drafter reads, and `layers` is the drafter's
        number of layers. Returns one target layer for each drafter layer, or [] if the target has
        no suitable layers.
        """
        raise NotImplementedError

    def finish_warm_start(
        self,
        layer_weights: list[dict[str, torch.Tensor]],
        target: Target,
        generator: torch.Generator | None,
    ) -> None:
        """Finish a warm start: set the weights that are computed from the target and are not copies
        of a target layer's weights.

        `layer_weights` holds, for each layer of the drafter, the weights that were copied from the
        target. `generator` draws the random tokens that some drafter families need.
        """
        raise NotImplementedError

    def prepare_training_inputs(
        self, target: Target, ids: torch.Tensor, positions: torch.Tensor, anchors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the two inputs of `forward` that are not the same in all drafter families.
        `forward` takes them as the arguments after `positions`.

        `ids` (B, T) are the tokens of the packed sequences, and `positions` (B, T) their positions.
        `anchors` (B, num_blocks) are the indices of the blocks' bonus tokens in the packed
        sequences.
        """
        raise NotImplementedError

    def build_state(self, cache: KVCache, rotary_tables: CosSin) -> DrafterState:
        """Return a decoding state that contains `cache` and `rotary_tables`.

        `cache` is an empty KV cache. `rotary_tables` are cos and sin of the rotary embeddings of
        all positions.
        """
        raise NotImplementedError

    def update_context(
        self,
        target: Target,
        features: torch.Tensor,
        tokens: torch.Tensor,
        counts: list[int] | None,
        state: Any,
        counts_on_device: torch.Tensor | None = None,
    ) -> None:
        """Add newly committed positions to the decoding state.

        `features` (B, T, num_features) are the concatenated hidden states of the target layers
        `layer_ids` at T new positions. `tokens` (B, T) are the tokens at these positions. The first
        counts[b] positions of batch row b are added; the other positions are padding.

        `counts_on_device` (B,) is `counts` as a tensor on the device. One of these two arguments
        may be None: `counts` is None if reading it would need a GPU-to-CPU synchronisation.
        """
        raise NotImplementedError

    def compute_block_states(
        self, target: Target, bonus: torch.Tensor, position: BlockPosition, state: Any
    ) -> torch.Tensor:
        """Compute the hidden states (B, num_slots, hidden_size) of the slots (input positions) of
        one block per batch row.

        `bonus` (B,) are the bonus tokens, after which the blocks are drafted. `position` describes
        the positions of the blocks, and `state` is the decoding state. The final norm has been
        applied to the returned hidden states, unless the conditional head reads the hidden states
        before this norm.
        """
        raise NotImplementedError

    # All families share the following methods.

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    @property
    def default_ngram_path(self) -> Path | None:
        """The n-gram file that DDTree uses if the option `ngrams` is null: the one in the
        checkpoint's folder. None on CUDA, because rounds with n-grams cannot be recorded as CUDA
        graphs."""
        return None if self.norm.weight.is_cuda else self.ngram_path

    @property
    def kernels(self) -> Kernels:
        """The kernels (implementations of operations) for the drafter's device and weight dtype."""
        dtype = torch.int8 if self.quantised else self.dtype
        return select_kernels(self.norm.weight.device, dtype)

    @property
    def family_config(self) -> dict[str, Any]:
        """The object in config.json that holds the drafter family's keys, for example
        `dflash_config`."""
        return vars(self.config)[self.family.config_key]

    @property
    def vocabulary(self) -> DraftVocabulary:
        """The tokens that the drafter can propose: all tokens of the target, or the subset that
        `d2t` defines (as in EAGLE-3 and FR-Spec)."""
        if self.d2t is None:
            return FULL_VOCABULARY
        tokens = self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)
        return DraftVocabulary(tokens, self.config.vocab_size)

    @property
    def conditional_head(self) -> ConditionalHead | None:
        """The module that makes a drafted token's score depend on the drafted tokens before it.

        None if the drafter has no such module and predicts each drafted position independently.
        """
        if self.head_spec is None:
            return None
        return cast(ConditionalHead, self.get_submodule(self.head_spec.module_name))

    def add_conditional_and_confidence_heads(self) -> None:
        """Create the conditional head and the confidence head if config.json describes them. Their
        weights are uninitialised.

        A conditional head makes a drafted token's score depend on the drafted tokens before it. A
        confidence head predicts the probability that a drafted token is accepted.
        """
        family_config = self.family_config
        spec = find_head_spec(family_config)
        self.head_spec = spec
        if spec is None:
            return

        head = spec.load()(self.config, family_config)
        self.add_module(spec.module_name, head)
        self.head_reads_raw_states = head.reads_raw_states
        if family_config.get("enable_confidence_head"):
            input_size = self.config.hidden_size
            if family_config.get("confidence_head_with_markov"):
                input_size += family_config[spec.presence_key]
            self.confidence_head = ConfidenceHead(input_size)

    def add_embedding_and_head(self, embedding: bool, head: bool) -> None:
        """Create an embedding if `embedding` is true, and a language model head if `head` is true.

        If the drafter lacks one of these modules, it uses the target's.
        """
        config = self.config
        if embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if head:
            self.lm_head = nn.Linear(config.hidden_size, get_draft_vocab_size(config), bias=False)

    def embed(self, target: Target, ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings (..., hidden_size) of token ids `ids` (...) in the drafter's
        dtype."""
        embedded = target.embed(ids) if self.embed_tokens is None else self.embed_tokens(ids)
        return embedded.to(self.norm.weight.dtype)

    def compute_logits(self, target: Target, states: torch.Tensor) -> torch.Tensor:
        """Return the float32 logits (..., draft_vocab_size) of hidden states (..., hidden_size).

        The final norm must already have been applied to `states`.
        """
        if self.lm_head is not None:
            return target.logit_scale(self.lm_head(states)).float()
        return target.logit_scale(get_target_head(self, target)(states.to(target.dtype))).float()

    def apply_final_norm(self, states: torch.Tensor) -> torch.Tensor:
        """Apply the final norm to the last layer's hidden states (..., hidden_size). The result has
        the same shape and is the input of the language model head."""
        return self.norm(states)

    def normalize_for_head(self, states: torch.Tensor) -> torch.Tensor:
        """Apply the final norm to the last layer's hidden states (..., hidden_size).

        Return them unchanged if the drafter's conditional head reads hidden states before the final
        norm.
        """
        return states if self.head_reads_raw_states else self.apply_final_norm(states)

    def check_target(self, target: Target) -> None:
        """Raise ValueError if the drafter was made for another target. The message names every
        setting in the drafter's config that does not fit the target."""
        config = self.config
        target_config = target.config
        sizes = {
            "hidden_size": (config.hidden_size, target_config.hidden_size),
            "num_target_layers": (config.num_target_layers, target_config.num_hidden_layers),
        }
        if self.embed_tokens is not None or self.lm_head is not None or self.d2t is not None:
            sizes["vocab_size"] = (config.vocab_size, target.vocab_size)
        differences = [
            f"{key} {size}, the target has {target_size}"
            for key, (size, target_size) in sizes.items()
            if size is not None and size != target_size
        ]

        ids = self.family_config["target_layer_ids"]
        layers = target_config.num_hidden_layers
        if max(ids) >= layers:
            differences.append(f"target_layer_ids {list(ids)}, the target has {layers} layers")
        reads_normed = layers - 1 in ids and self.family_config.get("last_tap") == "normed"
        if reads_normed and layers not in self.layer_ids:
            differences.append(
                "no num_target_layers, although the drafter reads the target's last layer (use "
                f"load_drafter(..., target_layers={layers}))"
            )
        if (self.mask_token_id or 0) >= target.vocab_size:
            differences.append(
                f"mask_token_id {self.mask_token_id}, the target has {target.vocab_size} tokens"
            )
        if differences:
            raise ValueError(
                "this drafter was made for another target: its config has "
                f"{'; '.join(differences)}. Use the target that it was made for"
            )

    def init_weights(self, generator: torch.Generator) -> None:
        """Initialise all weights of the drafter.

        Matrices are drawn from a normal distribution with the standard deviation
        `config.initializer_range`. The weights of norms are set to one.
        """
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=self.config.initializer_range, generator=generator)
            else:
                nn.init.ones_(parameter)
        self.init_head_weights(generator)

    def init_head_weights(self, generator: torch.Generator) -> None:
        """Initialise the conditional head and the confidence head, if the drafter has them.

        With these initial weights, the conditional head does not change the scores of drafted
        tokens.
        """
        if self.conditional_head is not None:
            self.conditional_head.init_weights(generator)
        if self.confidence_head is not None:
            nn.init.zeros_(self.confidence_head.proj.weight)
            nn.init.zeros_(self.confidence_head.proj.bias)

    @torch.no_grad()
    def initialize(self, target: Target, generator: torch.Generator, warm_start: bool) -> bool:
        """Initialise all weights of a new drafter for a target. Return true if the layers were
        warm-started, that is, if they start with weights of target layers.

        If the drafter family has its own language model head, this head starts as a copy of the
        target's. If `warm_start` is true and a warm start is possible, the layers are warm-started;
        otherwise they start with random weights.
        """
        self.init_weights(generator)
        shrink_final_norm(self.norm, target)
        if self.family.includes_lm_head:
            assert self.lm_head is not None
            self.lm_head.weight.copy_(get_target_head_weight(self, target))
        return warm_start and self.warm_start(target, generator)

    @torch.no_grad()
    def warm_start(self, target: Target, generator: torch.Generator | None = None) -> bool:
        """Copy the weights of target layers and of the target's final norm into the drafter. Return
        whether this was possible.

        A warm start is possible if a drafter layer with the weights of a target layer computes the
        same output as the target layer. If it is not possible, the drafter's weights are not
        changed. If the drafter has a projection of the target's hidden states, the warm start sets
        this projection to select a single target layer.
        """
        layers = [module for module in self.modules() if isinstance(module, DrafterLayer)]
        layer_ids = self.choose_warm_start_layers(self.layer_ids, len(layers), target.config)
        all_target_layers = cast(nn.ModuleList, target.decoder.layers)
        target_layers = [all_target_layers[i] for i in layer_ids]
        layer_weights = [
            layers[0].adapt_target_weights(get_ungated_target_weights(layer, target))
            for layer in target_layers
        ]
        if not target_layers:
            return False
        for weights, target_layer in zip(layer_weights, target_layers, strict=True):
            if not layer_matches_target(
                layers[0], weights, target_layer, self.num_queries, self.rotary_modules[0], target
            ):
                return False

        for layer, weights in zip(layers, layer_weights, strict=True):
            # strict=False: target layers have no convolutions, so the drafter's convolutions keep
            # their initial weights, with which they are the identity.
            layer.load_state_dict(weights, strict=False)
        self.norm.weight.copy_(convert_norm(cast(nn.Module, target.decoder.norm)).weight)
        self.finish_warm_start(layer_weights, target, generator)
        return True

    def graph_references(self) -> list[object]:
        """Return the objects whose memory `draft_block` reads, apart from its arguments.

        If a call of `draft_block` is recorded as a CUDA graph, these objects must stay alive as
        long as the graph.
        """
        return [self.target_head_copy, *parameter_aliases(self)]

    def compute_rotary(self, positions: torch.Tensor) -> CosSin:
        """Return cos and sin, (B, T, head_size) each, of the rotary embeddings of `positions`
        (B, T).

        The first half of the entries of sin is negated, as `apply_rotary` expects.
        """
        rotary_module = self.rotary_modules[0].to(positions.device)
        cos, sin = rotary_module(self.norm.weight, positions)
        return cos, negate_first_half(sin)

    def allocate_state(
        self, rows: int, capacity: int, keep_all_positions: bool = False
    ) -> DrafterState:
        """Return an empty decoding state for up to `rows` sequences of up to `capacity` positions
        each.

        If all layers have a sliding window, the KV cache drops positions that no layer can attend
        to any more, unless `keep_all_positions` is true.
        """
        config = self.config
        weight = self.norm.weight
        capacity += self.block_size
        rotary_tables = self.compute_rotary(torch.arange(capacity, device=weight.device)[None])

        cache = allocate_cache(
            config,
            self.attention_patterns,
            rows,
            capacity,
            self.block_size,
            weight,
            keep_all_positions,
        )
        return self.build_state(cache, rotary_tables)

    @torch.no_grad()
    def draft_block(self, target: Target, bonus: torch.Tensor, state: Any) -> DraftedBlock:
        """Draft one block for every batch row, after the bonus tokens `bonus` (B,) int64.

        The result does not depend on the conditional head: the distribution at a drafted position
        does not depend on the tokens at the other drafted positions. The keys and values of the
        block do not stay in the KV cache.
        """
        cache = state.cache
        rows = len(bonus)
        position = BlockPosition(
            cache.get_device_lengths(rows),
            state.next_rotary(rows, self.num_queries),
            cache.make_view(self.num_queries),
        )
        states = self.compute_block_states(target, bonus, position, state)
        return draft_from_states(self, target, states)


def get_feature_layer_ids(
    family_config: dict[str, Any], num_target_layers: int | None
) -> tuple[int, ...]:
    """Return the ids of the target layers whose hidden states the drafter reads, counted from 0.

    An id equal to the number of target layers means the last layer's hidden states after the final
    norm.

    `family_config` is the object in config.json that holds the drafter family's keys.
    `num_target_layers` is the number of target layers, None if config.json does not store it.
    """
    layer_ids = family_config["target_layer_ids"]
    if num_target_layers is None or family_config.get("last_tap") != "normed":
        return tuple(layer_ids)
    return tuple(
        num_target_layers if layer == num_target_layers - 1 else layer for layer in layer_ids
    )


def limit_attention_window(drafter: Drafter, window: int) -> None:
    """Limit the attention of every layer of the drafter to a sliding window of `window` positions,
    which includes positions of the drafted block.

    SGLang has the same option, `--speculative-dflash-draft-window-size`. Raises ValueError if the
    drafter's family does not support sliding windows, or if the window is shorter than a block.
    """
    if "sliding_window" not in drafter.family.specific_option_names:
        raise ValueError(
            f"drafter.sliding_window={window}: {drafter.family.title} drafters do not support "
            "sliding windows; remove this option"
        )
    if window < drafter.block_size:
        raise ValueError(
            f"drafter.sliding_window={window}: the window must be at least as long as a block; "
            f"use {drafter.block_size} or more"
        )
    drafter.attention_patterns = [
        (causal, window if old_window is None else min(window, old_window))
        for causal, old_window in drafter.attention_patterns
    ]


def draft_from_states(drafter: Drafter, target: Target, states: torch.Tensor) -> DraftedBlock:
    """Compute the drafted block of each batch row from the hidden states of the block's slots.

    `states` (B, num_slots, hidden_size) is the result of `Drafter.compute_block_states`.
    """
    draft_states = states[:, drafter.first_draft_slot :].contiguous()
    if drafter.head_reads_raw_states:
        draft_states = drafter.apply_final_norm(draft_states)
    marginals = drafter.compute_logits(target, draft_states).log_softmax(-1)
    return DraftedBlock(marginals, None if drafter.head_spec is None else states)


def get_target_head(drafter: Drafter, target: Target) -> nn.Module:
    """Return the target's language model head, limited to the tokens that the drafter can propose.

    The result is a copy if the drafter scores only a subset of the vocabulary (the copy has the
    rows of these tokens) or if the drafter is quantised (the copy has int8 weights). Later calls
    return the same copy until the target's head or the subset of the vocabulary changes.
    """
    head = target.model.get_output_embeddings()
    to_int8 = drafter.quantised and type(head) is nn.Linear
    if drafter.d2t is None and not to_int8:
        return head
    tokens = drafter.vocabulary.tokens
    drafter.target_head_copy = update_target_head_copy(
        drafter.target_head_copy, target, head, drafter.d2t, tokens, to_int8
    )
    return drafter.target_head_copy.head


def get_target_head_weight(drafter: Drafter, target: Target) -> torch.Tensor:
    """Return the weight (draft_vocab_size, hidden_size) of the module that `get_target_head`
    returns."""
    return cast(torch.Tensor, get_target_head(drafter, target).weight)


def get_head_weight(drafter: Drafter, target: Target) -> torch.Tensor:
    """Return the weight (draft_vocab_size, hidden_size) of the language model head that the drafter
    uses: the drafter's own head if it has one, else the target's."""
    if drafter.lm_head is not None:
        return drafter.lm_head.weight
    return get_target_head_weight(drafter, target)
