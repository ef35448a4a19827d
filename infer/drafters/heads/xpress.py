"""XPress' refiner (arXiv 2608.02438; speculators 0.9.0): a correction made of all slots up to this
one.

U_k + R (c_k + Wd (silu(Wg c_k) * Wu c_k)), where c mixes the slots, channel by channel: c_k = x_k +
sum_{j <= k} M_kj * x_j with x_j = Wi [Wh h_j; Wm mean(h); E[y_j]], y_j the token before slot j. The
bonus token's slot is mixed in where it drafts nothing too; the bonus token stands there for the
token before itself, as in vLLM's engine (speculators trains with the true one).

Engines refine a whole block in K passes, each behind the tokens of the pass before (Jacobi
iteration); as c_k depends on no later slot, what the passes approach is the chain that is drafted
here token by token.

r rank, W slots of a block, D hidden size; a memory has every slot's c as far as it is known, W r
entries.
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import Qwen3Config

from infer.drafters.heads.base import Conditioned, Ends, Head, head_rows


class XPress(Head):
    """Tensors and config keys are speculators'."""

    recurrent = True
    output = "readout.weight"

    def __init__(self, config: Qwen3Config, own: dict) -> None:
        super().__init__()
        rank = own["xpress_rank"]
        slots = config.block_size
        inner = rank * own.get("xpress_mlp_ratio", 2)
        self.first = (
            0 if own.get("sample_from_anchor") or own.get("shifted") else 1
        )  # slot that drafts
        self.token_embed = nn.Embedding(config.vocab_size, rank)  # E
        self.down_h, self.down_g = (
            nn.Linear(config.hidden_size, rank, bias=False) for _ in range(2)
        )  # Wh, Wm
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)  # Wi
        self.mix_l = nn.Parameter(torch.empty(rank, slots, slots))  # M: [channel, k, j]
        self.mlp_gate, self.mlp_up = (nn.Linear(rank, inner, bias=False) for _ in range(2))
        self.mlp_down = nn.Linear(inner, rank, bias=False)
        self.readout = nn.Linear(rank, head_rows(config), bias=False)  # R

    def mixer(self, slots: int) -> torch.Tensor:
        """Return what each slot's x adds to the c of each, (W, W, r): [j, k]."""
        mix = self.mix_l[:, :slots, :slots].tril() + torch.eye(slots).to(self.mix_l)
        return mix.permute(2, 1, 0)

    def of_tokens(self, before: torch.Tensor) -> torch.Tensor:
        """Return the share of x (..., r) that is of the tokens before the slots (...)."""
        embedded = self.token_embed(before)
        return F.linear(embedded, self.in_proj.weight[:, -embedded.shape[-1] :])

    def of_states(self, states: torch.Tensor) -> torch.Tensor:
        """Return what x reads of the states (G, W, D): (G, W, 2 r)."""
        states = states.to(self.out.dtype)
        mean = states.mean(1, keepdim=True).expand_as(states)
        return torch.cat([self.down_h(states), self.down_g(mean)], -1)

    def refined(self, mixed: torch.Tensor) -> torch.Tensor:
        """Return corrections (..., r) of c (..., r)."""
        return mixed + self.mlp_down(F.silu(self.mlp_gate(mixed)) * self.mlp_up(mixed))

    def memory(self, bonus: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        read = self.of_states(states)
        x = F.linear(read, self.in_proj.weight[:, : read.shape[-1]])
        if self.first:
            x[:, 0] += self.of_tokens(bonus)
        return torch.einsum("gjr,jkr->gkr", x, self.mixer(states.shape[1])).flatten(1)[:, None]

    def condition(self, ends, states, before, slots, memory) -> Conditioned:
        mixed = memory.unflatten(-1, (-1, self.mix_l.shape[0]))  # (..., W, r)
        slots = (slots + self.first).expand(before.shape)
        mixed = mixed + self.mixer(mixed.shape[-2])[slots] * self.of_tokens(before)[..., None, :]
        here = mixed.take_along_dim(slots[..., None, None], -2)[..., 0, :]
        return Conditioned(states, self.refined(here), mixed.flatten(-2))

    def teach(self, ends: Ends, states: torch.Tensor, before: torch.Tensor) -> Conditioned:
        """Return the answers of whole blocks in one pass."""
        tokens = torch.cat([before[:, :1], before], 1)[:, -states.shape[1] :]  # (G, W)
        x = self.in_proj(torch.cat([self.of_states(states), self.token_embed(tokens)], -1))
        mixed = torch.einsum("gjr,jkr->gkr", x, self.mixer(states.shape[1]))
        return Conditioned(states[:, self.first :], self.refined(mixed[:, self.first :]))

    def init_weights(self, generator: torch.Generator) -> None:
        """Begin with corrections of 0."""
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.02, generator=generator)
        nn.init.normal_(self.token_embed.weight, std=1.0, generator=generator)
        nn.init.zeros_(self.mix_l)
        nn.init.zeros_(self.out)
