"""TreeFlash's conditional head: a SwiGLU layer that adds information about the previous token to
the hidden state at a drafted position.

The new hidden state is h' = h_k + Wd (silu(g) * u) with [u; g] = Wug [RMSNorm(E[x]); norm(h_k)].
The language model head reads norm(h'). `norm` is the drafter's final norm, h_k is the hidden state
at position k before the final norm, x is the token before position k, E is the target's embedding,
and Wd and Wug are the weights of the layer.
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import Qwen3Config

from infer.drafters.heads.base import ConditionalHead, EmbedAndNorm, HeadOutput


class SwiGLUHead(ConditionalHead):
    """TreeFlash's conditional head. The tensors have the same names as in TreeFlash's
    checkpoints."""

    reads_raw_states = True

    def __init__(self, config: Qwen3Config, family_config: dict) -> None:
        super().__init__()
        hidden_size = config.hidden_size
        intermediate_size = family_config.get("ar_hidden_size") or config.intermediate_size
        self.norm = nn.RMSNorm(hidden_size, eps=1e-6)  # epsilon of the TreeFlash authors' code
        self.ug = nn.Linear(2 * hidden_size, 2 * intermediate_size)
        self.d = nn.Linear(intermediate_size, hidden_size, bias=False)

    def condition(
        self,
        embed_and_norm: EmbedAndNorm,
        states: torch.Tensor,
        previous_tokens: torch.Tensor,
        slots: torch.Tensor,
        recurrent_state: torch.Tensor | None,
    ) -> HeadOutput:
        # In training, the hidden states can be bfloat16 while the head's weights are float32.
        states = states.to(self.ug.weight.dtype)
        embedded = self.norm(embed_and_norm.embed(previous_tokens).to(states.dtype))
        normalized = embed_and_norm.norm(states).expand_as(embedded)
        up, gate = self.ug(torch.cat([embedded, normalized], -1)).chunk(2, -1)
        return HeadOutput(embed_and_norm.norm(states + self.d(F.silu(gate) * up)))

    def init_weights(self, generator: torch.Generator) -> None:
        """Initialise the weights such that the head leaves hidden states unchanged."""
        nn.init.ones_(self.norm.weight)
        nn.init.normal_(self.ug.weight, std=0.02, generator=generator)
        nn.init.zeros_(self.ug.bias)
        nn.init.zeros_(self.d.weight)
