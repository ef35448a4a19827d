"""The decoder layer of drafters, and its attention over the context and the drafted block.

B batch rows, T context length, Q queries of all blocks of a batch row, D hidden size, H heads, E
head size.
"""

from collections.abc import Callable

import torch
from torch import nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from infer.attention.kv_cache import CacheView
from infer.attention.masks import AttentionMask
from infer.kernels.table import select_kernels

CosSin = tuple[torch.Tensor, torch.Tensor]  # of rotary embeddings, (B, T, E) each, sin signed
# attends from queries (B, H, Q, E) to the block's keys and values (B, H, Q, E) and to the context,
# and returns (B, H, Q, E)
AttendFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def apply_rotary(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary position embeddings to `states` (B, H, T, E).

    `cos` and `sin` (B, T, E) are those of `Drafter.compute_rotary`, whose sines include the signs
    of the rotation.
    """
    first_half, second_half = states.chunk(2, dim=-1)
    swapped = torch.cat([second_half, first_half], dim=-1)
    return states * cos[:, None] + swapped * sin[:, None]


def negate_first_half(sin: torch.Tensor) -> torch.Tensor:
    """Return sines (B, T, E) with the signs of the rotation, as `apply_rotary` expects them."""
    half = sin.shape[-1] // 2
    return torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)


class DrafterAttention(nn.Module):
    """The projections of an attention layer whose input has `input_size` features.

    `use_qk_norm`: queries and keys are normalised per head, as in Qwen 3.
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
        """Return the projections to keys and to values, `k_proj` and `v_proj` followed by
        `suffix`."""
        names = (f"k_proj{suffix}", f"v_proj{suffix}")
        return [self.get_submodule(name) for name in names]

    def project_keys_values(
        self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, suffix: str = ""
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute keys and values (B, H, T, E) of `states` (B, T, input_size).

        `cos` and `sin` (B, T, E) belong to their positions; `suffix` chooses among
        `key_value_projections`.
        """
        project_keys, project_values = self.key_value_projections(suffix)
        keys = self.split_heads(project_keys(states))
        values = self.split_heads(project_values(states))
        keys = apply_rotary(self.k_norm(keys).transpose(1, 2), cos, sin)
        return keys, values.transpose(1, 2)

    def project_queries(
        self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Compute queries (B, H, Q, E) of `states` (B, Q, input_size) at the positions of `cos` and
        `sin` (B, Q, E)."""
        queries = self.q_norm(self.split_heads(self.q_proj(states)))
        return apply_rotary(queries.transpose(1, 2), cos, sin)


class DrafterLayer(nn.Module):
    """A decoder layer, for training and for decoding; its attention reads `input_size` features."""

    # Prefixes of the names of tensors that no layer of a target has.
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
        """Return the weights of a target's layer in the names and shapes of this layer."""
        return target_weights

    def prepare_attention_inputs(self, states: torch.Tensor) -> torch.Tensor:
        """Return the inputs of attention (..., input_size) for `states` (..., D)."""
        return self.input_layernorm(states)

    def apply_sublayer(
        self,
        name: str,
        inputs: torch.Tensor,
        sublayer: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Return the output of a sublayer for normalised inputs.

        `name` is "attention" or "mlp". A family may wrap the sublayer, for example in convolutions.
        """
        return sublayer(inputs)

    def forward(
        self,
        states: torch.Tensor,
        rotary: CosSin,
        attend: AttendFunction,
        attention_inputs: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the output states (B, Q, D) for the states of blocks (B, Q, D).

        `rotary` belongs to the positions of the blocks. `attend` is called with the queries, keys
        and values of the blocks and adds those of the context, from a cache or from a packed
        sequence. `attention_inputs` (B, Q, input_size) replaces `prepare_attention_inputs(states)`.
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
    """Attend in training: from queries (B, H, Q, E) of blocks to the context and the blocks.

    `context_keys_values` are those of packed sequences, (B, H, T, E) each; `keys` and `values`
    (B, H, Q, E) those of the blocks. `mask` has columns [context | blocks].
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
    """Attend in decoding: from queries (B, H, Q, E) of blocks to a layer's cache and the blocks.

    `keys` and `values` (B, H, Q, E) are those of the blocks; they are written after the committed
    positions of the cache, where the next pass overwrites them.
    """
    keys, values = cache_window.update(keys, values, layer)
    return select_kernels(values.device, values.dtype).attention(queries, keys, values, mask)
