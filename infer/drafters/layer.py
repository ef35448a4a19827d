"""The decoder layer of drafters, and its attention over the context and the drafted block.

Shapes: B batch rows, T context length, Q queries of all blocks of a batch row, D hidden size, H
attention heads (key and value heads for keys and values), E head size.
"""

from collections.abc import Callable

import torch
from torch import nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from infer.attention.kv_cache import CacheView
from infer.attention.masks import AttentionMask
from infer.kernels.table import select_kernels

# cos and sin of rotary embeddings, (B, T, E) each; sin has the signs that `negate_first_half` sets
CosSin = tuple[torch.Tensor, torch.Tensor]
# Takes the queries, keys and values of blocks, (B, H, Q, E) each. Attends from the queries to the
# keys and values of the context and of the blocks, and returns the outputs (B, H, Q, E).
AttendFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def apply_rotary(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary position embeddings to `states` (B, H, T, E).

    `cos` and `sin` (B, T, E) come from `Drafter.compute_rotary`, which has already negated the
    first half of `sin`.
    """
    first_half, second_half = states.chunk(2, dim=-1)
    swapped = torch.cat([second_half, first_half], dim=-1)
    return states * cos[:, None] + swapped * sin[:, None]


def negate_first_half(sin: torch.Tensor) -> torch.Tensor:
    """Negate the first half of the head entries of `sin` (B, T, E), as `apply_rotary` expects."""
    half = sin.shape[-1] // 2
    return torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)


class DrafterAttention(nn.Module):
    """The projections of an attention layer whose input has `input_size` features.

    `use_qk_norm` tells whether queries and keys are normalised per head, as in Qwen 3.
    """

    def __init__(self, config: Qwen3Config, input_size: int, use_qk_norm: bool = True) -> None:
        super().__init__()
        self.head_dim: int = config.head_dim
        self.scaling = config.head_dim**-0.5
        query_size = config.num_attention_heads * self.head_dim
        assert config.num_key_value_heads is not None
        key_size = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(input_size, query_size, bias=False)
        self.k_proj = nn.Linear(input_size, key_size, bias=False)
        self.v_proj = nn.Linear(input_size, key_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if use_qk_norm:
            self.q_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def split_heads(self, states: torch.Tensor) -> torch.Tensor:
        """Reshape projected states (B, T, H * E) to (B, T, H, E)."""
        return states.unflatten(-1, (-1, self.head_dim))

    def key_value_projections(self, suffix: str = "") -> list[nn.Module]:
        """Return the submodules that compute keys and values. Their names are `k_proj` and
        `v_proj`, each followed by `suffix`."""
        names = (f"k_proj{suffix}", f"v_proj{suffix}")
        return [self.get_submodule(name) for name in names]

    def project_keys_values(
        self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, suffix: str = ""
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute keys and values (B, H, T, E) of `states` (B, T, input_size).

        `cos` and `sin` (B, T, E) are the rotary embeddings of the positions of `states`. `suffix`
        chooses the projections, see `key_value_projections`.
        """
        project_keys, project_values = self.key_value_projections(suffix)
        keys = self.split_heads(project_keys(states))
        values = self.split_heads(project_values(states))
        keys = apply_rotary(self.k_norm(keys).transpose(1, 2), cos, sin)
        return keys, values.transpose(1, 2)

    def project_queries(
        self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Compute queries (B, H, Q, E) of `states` (B, Q, input_size).

        `cos` and `sin` (B, Q, E) are the rotary embeddings of the positions of `states`.
        """
        queries = self.q_norm(self.split_heads(self.q_proj(states)))
        return apply_rotary(queries.transpose(1, 2), cos, sin)


class DrafterLayer(nn.Module):
    """A decoder layer, for training and for decoding. The input of its attention has `input_size`
    features."""

    # Prefixes of the names of tensors that a drafter layer has and a target layer lacks.
    drafter_only_prefixes: tuple[str, ...] = ()

    def __init__(self, config: Qwen3Config, input_size: int, use_qk_norm: bool = True) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = DrafterAttention(config, input_size, use_qk_norm)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = Qwen3MLP(config)

    def adapt_target_weights(
        self, target_weights: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Convert the weights of a target layer to the names and shapes of this layer's weights."""
        return target_weights

    def prepare_attention_inputs(self, states: torch.Tensor) -> torch.Tensor:
        """Compute the inputs of attention (..., input_size) from `states` (..., D)."""
        return self.input_layernorm(states)

    def apply_sublayer(
        self, name: str, inputs: torch.Tensor, sublayer: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return the output of a sublayer, attention or MLP, for normalised inputs.

        `name` is "attention" or "mlp". A family may override this method to surround the sublayer
        with other operations, for example with convolutions.
        """
        return sublayer(inputs)

    def forward(
        self,
        states: torch.Tensor,
        rotary: CosSin,
        attend: AttendFunction,
        attention_inputs: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the layer on the states of blocks (B, Q, D), and return the output states (B, Q, D).

        `rotary` holds the rotary embeddings of the positions of the blocks. `attend` is called with
        the queries, keys and values of the blocks, and adds the keys and values of the context,
        from a cache or from a packed sequence. `attention_inputs` (B, Q, input_size) replaces
        `prepare_attention_inputs(states)`.
        """

        def self_attention(inputs: torch.Tensor) -> torch.Tensor:
            queries = self.self_attn.project_queries(inputs, *rotary)
            keys, values = self.self_attn.project_keys_values(inputs, *rotary)
            outputs = attend(queries, keys, values)
            return self.self_attn.o_proj(outputs.transpose(1, 2).flatten(2))

        if attention_inputs is None:
            attention_inputs = self.prepare_attention_inputs(states)
        states = states + self.apply_sublayer("attention", attention_inputs, self_attention)
        mlp_inputs = self.post_attention_layernorm(states)
        return states + self.apply_sublayer("mlp", mlp_inputs, self.mlp)


def attend_packed_context(
    context_keys_values: tuple[torch.Tensor, torch.Tensor],
    mask: AttentionMask | torch.Tensor | None,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """Compute attention in training: the queries (B, H, Q, E) of blocks attend to the context and
    to the blocks.

    `context_keys_values` are the keys and the values of packed sequences, (B, H, T, E) each. `keys`
    and `values` (B, H, Q, E) belong to the blocks. The columns of `mask` are first the context
    positions, then the block slots.
    """
    context_keys, context_values = context_keys_values
    keys = torch.cat([context_keys, keys], dim=2)
    values = torch.cat([context_values, values], dim=2)
    return select_kernels(values.device, values.dtype).attention(queries, keys, values, mask)


def attend_cached_context(
    cache_window: CacheView,
    layer: int,
    mask: AttentionMask | torch.Tensor | None,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """Compute attention in decoding: the queries (B, H, Q, E) of blocks attend to the KV cache of
    layer number `layer` and to the blocks.

    `keys` and `values` (B, H, Q, E) belong to the blocks. They are written into the cache after the
    committed positions; the next pass overwrites them.
    """
    keys, values = cache_window.update(keys, values, layer)
    return select_kernels(values.device, values.dtype).attention(queries, keys, values, mask)
