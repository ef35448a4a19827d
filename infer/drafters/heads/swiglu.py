"""TreeFlash's head: one feed-forward step from the state and the token before it to the state
behind that token.

h' = h_k + Wd (silu(g) * u) with [u; g] = Wug [RMSNorm(E[x]); norm(h_k)], read through the last
norm; h_k stands before that norm, E is the target's embedding.

D hidden size, I entries between the two matrices.
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import Qwen3Config

from infer.drafters.heads.base import Conditioned, Head


class SwiGLU(Head):
    """Tensors are TreeFlash's."""

    raw = True

    def __init__(self, config: Qwen3Config, own: dict) -> None:
        super().__init__()
        size = config.hidden_size
        inner = own.get("ar_hidden_size") or config.intermediate_size
        self.norm = nn.RMSNorm(size, eps=1e-6)  # of the embedding, the authors' own epsilon
        self.ug = nn.Linear(2 * size, 2 * inner)
        self.d = nn.Linear(inner, size, bias=False)

    def condition(self, ends, states, before, slots, memory) -> Conditioned:
        states = states.to(
            self.ug.weight.dtype
        )  # in training with a bfloat16 target the head stays float32
        embedded = self.norm(ends.embed(before).to(states.dtype))
        up, gate = self.ug(torch.cat([embedded, ends.norm(states).expand_as(embedded)], -1)).chunk(
            2, -1
        )
        return Conditioned(ends.norm(states + self.d(F.silu(gate) * up)))

    def init_weights(self, generator: torch.Generator) -> None:
        """Begin as the identity."""
        nn.init.ones_(self.norm.weight)
        nn.init.normal_(self.ug.weight, std=0.02, generator=generator)
        nn.init.zeros_(self.ug.bias)
        nn.init.zeros_(self.d.weight)
