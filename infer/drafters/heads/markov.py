"""DSpark's Markov heads: a low-rank table of which token follows which, added to the logits.

- `vanilla`: U_k + W2 W1[x];
- `gated`: U_k + W2 (sigmoid(Wg [h_k; W1[x]]) * W1[x]);
- `rnn`: with a state s of the block, z = [s; W1[x]; h_k], s' = g s + (1 - g) tanh(c) and U_k + W2
  tanh(o), where (sigmoid^-1(g), c, o) = Wz z.

r rank, D hidden size, V vocabulary.
"""

import torch
from torch import nn
from transformers import Qwen3Config

from infer.drafters.heads.base import Conditioned, Head, head_rows


class Markov(Head):
    """Tensors and config keys are DSpark's; `markov_w2` has as many rows as the drafter's head."""

    output = "markov_w2.weight"

    def __init__(self, config: Qwen3Config, own: dict) -> None:
        super().__init__()
        rank = own["markov_rank"]
        hidden = config.hidden_size
        self.kind = own.get("markov_head_type", "vanilla")
        self.recurrent = self.kind == "rnn"
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, head_rows(config), bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        if self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def memory(self, bonus: torch.Tensor, states: torch.Tensor) -> torch.Tensor | None:
        if not self.recurrent:
            return None
        return self.markov_w1.weight.new_zeros(len(bonus), 1, self.markov_w1.embedding_dim)

    def condition(self, ends, states, before, slots, memory) -> Conditioned:
        embedded = self.markov_w1(before)  # (..., r)
        if self.kind == "vanilla":
            return Conditioned(states, embedded, None, embedded)
        own = states.to(embedded.dtype)
        if self.kind == "gated":
            gate = self.gate_proj(
                torch.cat([own.expand(*before.shape, -1), embedded], -1)
            ).sigmoid()
            return Conditioned(states, gate * embedded, None, embedded)
        gate, candidate, out = self.joint_proj(torch.cat([memory, embedded, own], -1)).chunk(3, -1)
        gate = gate.sigmoid()
        return Conditioned(
            states, out.tanh(), gate * memory + (1 - gate) * candidate.tanh(), embedded
        )

    def init_weights(self, generator: torch.Generator) -> None:
        """Begin with corrections of 0."""
        nn.init.normal_(self.markov_w1.weight, std=1.0, generator=generator)
        nn.init.zeros_(self.markov_w2.weight)
        for layer in self.children():
            if layer not in (self.markov_w1, self.markov_w2):
                nn.init.normal_(layer.weight, std=0.02, generator=generator)
                nn.init.zeros_(layer.bias)
