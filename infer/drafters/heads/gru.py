"""Domino's head: a recurrent network reads the tokens before a slot, a small network turns that
into a correction.

U_k + C silu(J [h_k; GRU(E[x_0 .. x_{k-1}])]), E the target's embedding, for all drafted slots but
the first `pure_draft_prefix_len`.

r rank (`emb_dim`), D hidden size, S entries of the state (`gru_hidden_dim`), V vocabulary.
"""

import torch
from torch import nn
from transformers import Qwen3Config

from infer.drafters.heads.base import Conditioned, Ends, Head, head_rows


class GRU(Head):
    """Tensors are Domino's."""

    recurrent = True
    output = "embed_proj.2.weight"

    def __init__(self, config: Qwen3Config, own: dict) -> None:
        super().__init__()
        rank = own.get("emb_dim", 256)
        size = own["gru_hidden_dim"]
        self.first = own.get("pure_draft_prefix_len", 0)  # slot from 0
        self.prefix_gru = nn.GRU(config.hidden_size, size, bias=False, batch_first=True)
        reads = nn.Linear(config.hidden_size + size, rank, bias=False)
        self.embed_proj = nn.Sequential(
            reads, nn.SiLU(), nn.Linear(rank, head_rows(config), bias=False)
        )

    def memory(self, bonus: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return self.out.new_zeros(len(bonus), 1, self.prefix_gru.hidden_size)

    def condition(self, ends, states, before, slots, memory) -> Conditioned:
        embedded = ends.embed(before).to(memory.dtype)  # (..., D)
        after = self.prefix_gru(
            embedded.reshape(-1, 1, embedded.shape[-1]), memory.reshape(1, -1, memory.shape[-1])
        )[1]
        after = after.view(memory.shape)
        return Conditioned(states, self._correction(states, after, slots), after)

    def teach(self, ends: Ends, states: torch.Tensor, before: torch.Tensor) -> Conditioned:
        """Return the answers of whole blocks in one pass."""
        after = self.prefix_gru(ends.embed(before).to(self.out.dtype))[0]  # (G, L, S)
        states = states[:, -before.shape[1] :]
        slots = torch.arange(before.shape[1], device=before.device)
        return Conditioned(states, self._correction(states, after, slots), after)

    def _correction(
        self, states: torch.Tensor, after: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        correction = self.embed_proj[:2](torch.cat([states.to(after.dtype), after], -1))
        return correction * (slots >= self.first).to(correction)[..., None]

    def init_weights(self, generator: torch.Generator) -> None:
        """Begin with corrections of 0."""
        for weight in (*self.prefix_gru.parameters(), self.embed_proj[0].weight):
            nn.init.normal_(weight, std=0.02, generator=generator)
        nn.init.zeros_(self.out)
