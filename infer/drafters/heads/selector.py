"""DFlash 2's candidate selector: a conditional head that rescores the likeliest tokens of a drafted
position, given the token before the position.

For the drafted position k, the head keeps the `top_k` likeliest tokens. The logit of such a token v
is U_k(v) + <A[x] * (P h_k), B[v]>. The softmax is over these tokens alone. U_k are the logits
before the head changes them, h_k is the hidden state at position k, x is the token before position
k, and <., .> is the dot product. The matrices A and B have `rank` columns, and P has `rank` rows.
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


class SelectorHead(ConditionalHead):
    """DFlash 2's candidate selector. The names of tensors and config keys are those of DFlash 2."""

    output_name = "successor_codebook"

    def __init__(self, config: Qwen3Config, family_config: dict) -> None:
        super().__init__()
        rank = family_config["selector_rank"]
        draft_vocab_size = get_draft_vocab_size(config)
        self.top_k = min(family_config.get("selector_top_k", 0), draft_vocab_size)
        # matrix A of the module docstring's formula
        self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, rank))
        # matrix B of the module docstring's formula
        self.successor_codebook = nn.Parameter(torch.empty(draft_vocab_size, rank))
        # matrix P of the module docstring's formula
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)

    def condition(
        self,
        embed_and_norm: EmbedAndNorm,
        states: torch.Tensor,
        previous_tokens: torch.Tensor,
        slots: torch.Tensor,
        recurrent_state: torch.Tensor | None,
    ) -> HeadOutput:
        projected = self.hidden_projection(states.to(self.hidden_projection.weight.dtype))
        return HeadOutput(states, self.predecessor_codebook[previous_tokens] * projected)

    def init_weights(self, generator: torch.Generator) -> None:
        """Initialise the weights such that all corrections of the logits are 0."""
        nn.init.normal_(self.predecessor_codebook, std=1.0, generator=generator)
        nn.init.zeros_(self.successor_codebook)
        nn.init.normal_(self.hidden_projection.weight, std=0.02, generator=generator)
