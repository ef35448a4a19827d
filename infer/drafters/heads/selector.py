"""DFlash 2's candidate selector: which of a slot's likeliest tokens follows the token before it.

U_k(v) + <A[x] * (P h_k), B[v]> over the k likeliest tokens of U_k; a softmax over these alone.

r rank, D hidden size, V vocabulary.
"""

import torch
from torch import nn
from transformers import Qwen3Config

from infer.drafters.heads.base import Conditioned, Head, head_rows


class Selector(Head):
    """Tensors and config keys are DFlash 2's."""

    output = "successor_codebook"

    def __init__(self, config: Qwen3Config, own: dict) -> None:
        super().__init__()
        rank = own["selector_rank"]
        self.top_k = min(own.get("selector_top_k", 0), head_rows(config))
        self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, rank))  # A
        self.successor_codebook = nn.Parameter(torch.empty(head_rows(config), rank))  # B
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)  # P

    def condition(self, ends, states, before, slots, memory) -> Conditioned:
        projected = self.hidden_projection(states.to(self.hidden_projection.weight.dtype))
        return Conditioned(states, self.predecessor_codebook[before] * projected)

    def init_weights(self, generator: torch.Generator) -> None:
        """Begin with corrections of 0."""
        nn.init.normal_(self.predecessor_codebook, std=1.0, generator=generator)
        nn.init.zeros_(self.successor_codebook)
        nn.init.normal_(self.hidden_projection.weight, std=0.02, generator=generator)
