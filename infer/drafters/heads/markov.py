"""DSpark's Markov heads: conditional heads that add a low-rank table of token pairs to the logits.

For the drafted position k, U_k are the logits before the head changes them, h_k is the hidden
state, and x is the token before the position. W1, W2, Wg and Wz are matrices; W1[x] is the row of
token x, whose length is the head's rank. The three kinds of head compute these logits:

- `vanilla`: U_k + W2 W1[x];
- `gated`: U_k + W2 (sigmoid(Wg [h_k; W1[x]]) * W1[x]);
- `rnn`: U_k + W2 tanh(o). The three vectors a, c and o are the thirds of Wz [s; W1[x]; h_k], where
  s is a recurrent state. With g = sigmoid(a), the next recurrent state is g s + (1 - g) tanh(c).
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


class MarkovHead(ConditionalHead):
    """DSpark's Markov head. The names of tensors and config keys are DSpark's.

    `markov_w1` has a row for each token of the target, and `markov_w2` for each token that the
    drafter can propose.
    """

    output_name = "markov_w2.weight"

    def __init__(self, config: Qwen3Config, family_config: dict) -> None:
        super().__init__()
        rank = family_config["markov_rank"]
        hidden_size = config.hidden_size
        self.kind = family_config.get("markov_head_type", "vanilla")
        self.recurrent = self.kind == "rnn"
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, get_draft_vocab_size(config), bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        if self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def initial_state(
        self, bonus_tokens: torch.Tensor, states: torch.Tensor
    ) -> torch.Tensor | None:
        if not self.recurrent:
            return None
        rank = self.markov_w1.embedding_dim
        return self.markov_w1.weight.new_zeros(len(bonus_tokens), 1, rank)

    def condition(
        self,
        embed_and_norm: EmbedAndNorm,
        states: torch.Tensor,
        previous_tokens: torch.Tensor,
        slots: torch.Tensor,
        recurrent_state: torch.Tensor | None,
    ) -> HeadOutput:
        embedded = self.markov_w1(previous_tokens)  # (..., rank)
        if self.kind == "vanilla":
            return HeadOutput(states, embedded, None, embedded)

        hidden = states.to(embedded.dtype)
        if self.kind == "gated":
            hidden = hidden.expand(*previous_tokens.shape, -1)
            gate = self.gate_proj(torch.cat([hidden, embedded], -1)).sigmoid()
            return HeadOutput(states, gate * embedded, None, embedded)

        assert recurrent_state is not None
        joint = self.joint_proj(torch.cat([recurrent_state, embedded, hidden], -1))
        gate, candidate, output = joint.chunk(3, -1)
        gate = gate.sigmoid()
        next_state = gate * recurrent_state + (1 - gate) * candidate.tanh()
        return HeadOutput(states, output.tanh(), next_state, embedded)

    def init_weights(self, generator: torch.Generator) -> None:
        """Initialise the weights such that all corrections of the logits are 0."""
        nn.init.normal_(self.markov_w1.weight, std=1.0, generator=generator)
        nn.init.zeros_(self.markov_w2.weight)
        for name in ("gate_proj", "joint_proj"):
            layer = getattr(self, name, None)
            if layer is not None:
                nn.init.normal_(layer.weight, std=0.02, generator=generator)
                nn.init.zeros_(layer.bias)
