"""The decoder layer of drafters, and its attention over the context and the drafted block.

Shapes: B batch rows, T context length, Q input positions of all blocks of a batch row (each has a
query), D hidden size, H attention heads (for keys and values: key and value heads), E head size.
"""

from collections.abc import Callable

import torch
from torch import nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from infer.attention.kv_cache import CacheView
from infer.attention.masks import AttentionMask
from infer.kernels.table import select_kernels

# cos and sin of rotary embeddings, (B, T, head size) each. The first half of sin's entries is
# negated, see `negate_first_half`.
CosSin = tuple[torch.Tensor, torch.Tensor]
# Takes the queries, keys and values of drafted blocks, (B, heads, positions, head size) each. The
# queries attend to the context and to the blocks. Returns the output in the shape of the queries.
AttendFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def apply_rotary(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary position embeddings to `states` (B, heads, T, head_size) at T positions.

    `cos` and `sin` (B, T, head_size) come from `Drafter.compute_rotary`, which has already negated
    the first half of the entries of `sin`.
    """
    first_half, second_half = states.chunk(2, dim=-1)
    swapped = torch.cat([second_half, first_half], dim=-1)
    return states * cos[:, None] + swapped * sin[:, None]


def negate_first_half(sin: torch.Tensor) -> torch.Tensor:
    """Negate the first half of the last dimension of `sin` (B, T, head_size), as `apply_rotary`
    expects."""
    half = sin.shape[-1] // 2
    return torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)


class DrafterAttentionProjections(nn.Module):
    """The projections (query, key, value, output) of an attention layer whose input vectors have
    `input_size` entries.

    `use_qk_norm` tells whether queries and keys are normalised per head, as in Qwen3.
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
        """Reshape projected vectors (B, T, heads * head_size) to (B, T, heads, head_size)."""
        return states.unflatten(-1, (-1, self.head_dim))

    def get_key_value_projections(self, suffix: str = "") -> list[nn.Module]:
        """Return the submodules that compute keys and values. Their names are `k_proj` and
        `v_proj`, each followed by `suffix`."""
        names = (f"k_proj{suffix}", f"v_proj{suffix}")
        return [self.get_submodule(name) for name in names]

    def project_keys_values(
        self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, suffix: str = ""
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the keys and values, (B, heads, T, head_size) each, of `states`
        (B, T, input_size).

        `cos` and `sin` (B, T, head_size) are the rotary embeddings of the T positions. `suffix` is
        appended to the names of the projections `k_proj` and `v_proj` that are used.
        """
        project_keys, project_values = self.get_key_value_projections(suffix)
        keys = self.split_heads(project_keys(states))
        values = self.split_heads(project_values(states))
        keys = apply_rotary(self.k_norm(keys).transpose(1, 2), cos, sin)
        return keys, values.transpose(1, 2)

    def project_queries(
        self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Compute the queries (B, heads, T, head_size) of `states` (B, T, input_size).

        `cos` and `sin` (B, T, head_size) are the rotary embeddings of the T positions.
        """
        queries = self.q_norm(self.split_heads(self.q_proj(states)))
        return apply_rotary(queries.transpose(1, 2), cos, sin)


class DrafterLayer(nn.Module):
    """A decoder layer of a drafter, for training and for decoding. The input vectors of its
    attention have `input_size` entries."""

    # Prefixes of the names of tensors that exist in a drafter layer but not in a target layer.
    drafter_only_tensor_prefixes: tuple[str, ...] = ()

    def __init__(self, config: Qwen3Config, input_size: int, use_qk_norm: bool = True) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = DrafterAttentionProjections(config, input_size, use_qk_norm)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = Qwen3MLP(config)

    def adapt_target_weights(
        self, target_weights: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Convert a target layer's weights to the names and shapes of this layer's weights."""
        return target_weights

    def prepare_attention_inputs(self, states: torch.Tensor) -> torch.Tensor:
        """Compute the inputs of attention (..., input_size) from hidden states `states`
        (..., hidden_size)."""
        return self.input_layernorm(states)

    def apply_sublayer(
        self, name: str, inputs: torch.Tensor, sublayer: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Run a sublayer on normalised inputs and return its output.

        `name` is "attention" or "mlp", and `sublayer` is the function that computes the output. A
        drafter family may override this method to add operations before and after the
        sublayer, for example convolutions.
        """
        return sublayer(inputs)

    def forward(
        self,
        states: torch.Tensor,
        rotary: CosSin,
        attend: AttendFunction,
        attention_inputs: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the layer on the hidden states `states` (B, Q, hidden_size) at Q positions of drafted
        blocks. Return the output hidden states in the same shape.

        `rotary` holds cos and sin of the positions' rotary embeddings. `attend` computes attention
        from the blocks' queries, keys and values, and supplies the keys and values of the context.
        `attention_inputs` (B, Q, input_size), if given, are used instead of
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
    """Compute attention in training: the queries of drafted blocks attend to the context and to the
    blocks.

    `queries`, `keys` and `values` (B, heads, num_queries, head_size) belong to the blocks.
    `context_keys_values` are the keys and the values of packed sequences of T tokens,
    (B, heads, T, head_size) each. The columns of `mask` are first the T context positions, then the
    positions of the blocks. Returns the output of attention in the shape of `queries`.
    """
    context_keys, context_values = context_keys_values
    keys = torch.cat([context_keys, keys], dim=2)
    values = torch.cat([context_values, values], dim=2)
    return select_kernels(values.device, values.dtype).attention(queries, keys, values, mask)


def attend_cached_context(
    cache_view: CacheView,
    layer: int,
    mask: AttentionMask | torch.Tensor | None,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """Compute attention in decoding: the queries of drafted blocks attend to the context, whose
    keys and values are cached, and to the blocks.

    `queries`, `keys` and `values` (B, heads, num_queries, head_size) belong to the blocks.
    `cache_view` describes the cache and `layer` is the index of the layer. The keys and values of
    the blocks are written into the cache after the committed positions; the next pass overwrites
    them. Returns the output of attention in the shape of `queries`.
    """
    keys, values = cache_view.update(keys, values, layer)
    return select_kernels(values.device, values.dtype).attention(queries, keys, values, mask)
