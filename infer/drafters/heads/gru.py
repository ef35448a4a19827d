"""Domino's conditional head: a GRU reads the drafted tokens before a position, and a small network
corrects the logits from the GRU's state and the position's hidden state.

The logits of the k-th drafted position, counted from 1, are

U_k + C silu(J [h_k; GRU(E[x_0 .. x_{k-1}])]).

U_k are the logits before the correction, h_k is the hidden state at this position, x_0 is the bonus
token, x_1 .. x_{k-1} are the tokens drafted before position k, E is the target's embedding, and C
and J are matrices. The logits of the first `pure_draft_prefix_len` drafted positions are not
corrected.
"""

import torch
from torch import nn
from transformers import Qwen3Config

from infer.drafters.heads.base import (
    ConditionalHead,
    EmbedAndNorm,
    HeadOutput,
    get_draft_vocab_size,
)


class GRUHead(ConditionalHead):
    """Domino's conditional head. The tensors have the same names as in Domino's checkpoints."""

    recurrent = True
    output_name = "embed_proj.2.weight"

    def __init__(self, config: Qwen3Config, family_config: dict) -> None:
        super().__init__()
        rank = family_config.get("emb_dim", 256)
        state_size = family_config["gru_hidden_dim"]
        # the first drafted position, counted from 0, whose logits are corrected
        self.first_corrected_slot = family_config.get("pure_draft_prefix_len", 0)
        self.prefix_gru = nn.GRU(config.hidden_size, state_size, bias=False, batch_first=True)
        # matrix J of the module docstring's formula
        input_projection = nn.Linear(config.hidden_size + state_size, rank, bias=False)
        # matrix C of the module docstring's formula
        output_projection = nn.Linear(rank, get_draft_vocab_size(config), bias=False)
        self.embed_proj = nn.Sequential(input_projection, nn.SiLU(), output_projection)

    def initial_state(self, bonus_tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        assert self.correction_matrix is not None
        return self.correction_matrix.new_zeros(len(bonus_tokens), 1, self.prefix_gru.hidden_size)

    def condition(
        self,
        embed_and_norm: EmbedAndNorm,
        states: torch.Tensor,
        previous_tokens: torch.Tensor,
        slots: torch.Tensor,
        recurrent_state: torch.Tensor | None,
    ) -> HeadOutput:
        assert recurrent_state is not None
        # (..., hidden size)
        embedded = embed_and_norm.embed(previous_tokens).to(recurrent_state.dtype)
        inputs = embedded.reshape(-1, 1, embedded.shape[-1])
        state_before = recurrent_state.reshape(1, -1, recurrent_state.shape[-1])
        _, state_after = self.prefix_gru(inputs, state_before)
        state_after = state_after.view(recurrent_state.shape)
        return HeadOutput(
            states, self._compute_low_rank_correction(states, state_after, slots), state_after
        )

    def teacher_force(
        self, embed_and_norm: EmbedAndNorm, states: torch.Tensor, previous_tokens: torch.Tensor
    ) -> HeadOutput:
        """Return the head's outputs as described in `ConditionalHead.teacher_force`. The GRU runs
        once over all tokens."""
        length = previous_tokens.shape[1]
        assert self.correction_matrix is not None
        embedded = embed_and_norm.embed(previous_tokens).to(self.correction_matrix.dtype)
        recurrent_states, _ = self.prefix_gru(embedded)  # (blocks, drafted positions, state size)
        states = states[:, -length:]
        slots = torch.arange(length, device=previous_tokens.device)
        correction = self._compute_low_rank_correction(states, recurrent_states, slots)
        return HeadOutput(states, correction, recurrent_states)

    def _compute_low_rank_correction(
        self, states: torch.Tensor, recurrent_states: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """Return the corrections (..., rank) of the logits. They are zero for drafted positions
        before `first_corrected_slot`."""
        inputs = torch.cat([states.to(recurrent_states.dtype), recurrent_states], -1)
        correction = self.embed_proj[:2](inputs)
        return correction * (slots >= self.first_corrected_slot).to(correction)[..., None]

    def init_weights(self, generator: torch.Generator) -> None:
        """Initialise the weights such that all corrections of the logits are 0."""
        for weight in (*self.prefix_gru.parameters(), self.get_parameter("embed_proj.0.weight")):
            nn.init.normal_(weight, std=0.02, generator=generator)
        assert self.correction_matrix is not None
        nn.init.zeros_(self.correction_matrix)
