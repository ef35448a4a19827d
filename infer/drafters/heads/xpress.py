"""XPress' refiner (arXiv 2608.02438; speculators 0.9.0): a conditional head that corrects the
logits of a drafted position with the hidden states and tokens of all positions of the block up to
this one.

The logits of position k are U_k + R (c_k + Wd (silu(Wg c_k) * Wu c_k)). U_k are the logits before
the correction. The vector c_k has r entries (the rank) and mixes the positions, separately for each
entry: c_k = x_k + sum_{j <= k} M_kj * x_j with x_j = Wi [Wh h_j; Wm mean(h); E[y_j]]. Here h_j is
the hidden state at position j, mean(h) is the mean over the block, and y_j is the token before
position j. The comments in `XPressHead.__init__` name the tensors of these matrices.

The sum includes the bonus token's position even if nothing is drafted there. For that position, y_j
is then the bonus token itself, as in vLLM; speculators trains with the token before the bonus
token.

Serving engines refine a whole block in several passes, where each pass reads the tokens of the
previous pass (Jacobi iteration). As c_k depends on no later position, these passes converge to the
tokens that this project drafts one after the other.

In shapes: B batch rows, G blocks, W input positions (slots) of a block, r rank. The recurrent state
has W * r entries: for every position k, the sum of those terms of c_k that depend on the hidden
states and on the tokens that the head has read.
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import Qwen3Config

from infer.drafters.heads.base import (
    ConditionalHead,
    EmbedAndNorm,
    HeadOutput,
    get_draft_vocab_size,
)


class XPressHead(ConditionalHead):
    """XPress' refiner, a conditional head. The names of tensors and config keys are those of
    speculators."""

    recurrent = True
    output_name = "readout.weight"

    def __init__(self, config: Qwen3Config, family_config: dict) -> None:
        super().__init__()
        rank = family_config["xpress_rank"]
        slots = config.block_size
        intermediate_size = rank * family_config.get("xpress_mlp_ratio", 2)
        self.first_draft_slot = 1
        if family_config.get("sample_from_anchor") or family_config.get("shifted"):
            self.first_draft_slot = 0
        # matrix E of the module docstring's formula
        self.token_embed = nn.Embedding(config.vocab_size, rank)
        # matrix Wh of the module docstring's formula
        self.down_h = nn.Linear(config.hidden_size, rank, bias=False)
        # matrix Wm of the module docstring's formula
        self.down_g = nn.Linear(config.hidden_size, rank, bias=False)
        # matrix Wi of the module docstring's formula
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        # M of the module docstring's formula, indexed [entry, k, j]
        self.mix_l = nn.Parameter(torch.empty(rank, slots, slots))
        # matrix Wg of the module docstring's formula
        self.mlp_gate = nn.Linear(rank, intermediate_size, bias=False)
        # matrix Wu of the module docstring's formula
        self.mlp_up = nn.Linear(rank, intermediate_size, bias=False)
        # matrix Wd of the module docstring's formula
        self.mlp_down = nn.Linear(intermediate_size, rank, bias=False)
        # matrix R of the module docstring's formula
        self.readout = nn.Linear(rank, get_draft_vocab_size(config), bias=False)

    def compute_mixing_weights(self, slots: int) -> torch.Tensor:
        """Return the weights (slots, slots, rank), indexed [j, k, entry], with which the head mixes
        the positions of a block: the weight of x_j in c_k, in the notation of the module docstring.

        The weights are M plus the identity for j <= k, and zero for j > k.
        """
        mix = self.mix_l[:, :slots, :slots].tril() + torch.eye(slots).to(self.mix_l)
        return mix.permute(2, 1, 0)

    def project_tokens(self, previous_tokens: torch.Tensor) -> torch.Tensor:
        """Return the term (..., rank) of x_j (see the module docstring) that depends on
        `previous_tokens` (...), the tokens y_j before the positions j."""
        embedded = self.token_embed(previous_tokens)
        return F.linear(embedded, self.in_proj.weight[:, -embedded.shape[-1] :])

    def project_states(self, states: torch.Tensor) -> torch.Tensor:
        """Return [Wh h_j; Wm mean(h)] for each position j of some blocks, in the notation of the
        module docstring.

        `states` (num_blocks, num_slots, hidden_size) are the hidden states h_j. The result has the
        shape (num_blocks, num_slots, 2 * rank).
        """
        states = states.to(self.readout.weight.dtype)
        mean = states.mean(1, keepdim=True).expand_as(states)
        return torch.cat([self.down_h(states), self.down_g(mean)], -1)

    def compute_low_rank_correction(self, mixed: torch.Tensor) -> torch.Tensor:
        """Return c_k + Wd (silu(Wg c_k) * Wu c_k), in the notation of the module docstring, for the
        vectors c_k in `mixed` (..., rank)."""
        return mixed + self.mlp_down(F.silu(self.mlp_gate(mixed)) * self.mlp_up(mixed))

    def initial_state(self, bonus_tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        projected = self.project_states(states)
        x = F.linear(projected, self.in_proj.weight[:, : projected.shape[-1]])  # (B, slots, rank)
        if self.first_draft_slot:
            x[:, 0] += self.project_tokens(bonus_tokens)
        mixed = torch.einsum("gjr,jkr->gkr", x, self.compute_mixing_weights(states.shape[1]))
        return mixed.flatten(1)[:, None]

    def condition(
        self,
        embed_and_norm: EmbedAndNorm,
        states: torch.Tensor,
        previous_tokens: torch.Tensor,
        slots: torch.Tensor,
        recurrent_state: torch.Tensor | None,
    ) -> HeadOutput:
        assert recurrent_state is not None
        mixed = recurrent_state.unflatten(-1, (-1, self.mix_l.shape[0]))  # (..., slots, rank)
        slots = (slots + self.first_draft_slot).expand(previous_tokens.shape)
        weights = self.compute_mixing_weights(mixed.shape[-2])[slots]  # (..., slots, rank)
        mixed = mixed + weights * self.project_tokens(previous_tokens)[..., None, :]
        slot_mixed = mixed.take_along_dim(slots[..., None, None], -2)[..., 0, :]  # (..., rank)
        return HeadOutput(states, self.compute_low_rank_correction(slot_mixed), mixed.flatten(-2))

    def teacher_force(
        self, embed_and_norm: EmbedAndNorm, states: torch.Tensor, previous_tokens: torch.Tensor
    ) -> HeadOutput:
        """Return the head's outputs as described in `ConditionalHead.teacher_force`, computed for
        all positions at once."""
        slots = states.shape[1]
        # (blocks, slots)
        tokens = torch.cat([previous_tokens[:, :1], previous_tokens], 1)[:, -slots:]
        x = self.in_proj(torch.cat([self.project_states(states), self.token_embed(tokens)], -1))
        mixed = torch.einsum("gjr,jkr->gkr", x, self.compute_mixing_weights(slots))
        correction = self.compute_low_rank_correction(mixed[:, self.first_draft_slot :])
        return HeadOutput(states[:, self.first_draft_slot :], correction)

    def init_weights(self, generator: torch.Generator) -> None:
        """Initialise the weights such that all corrections of the logits are 0."""
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.02, generator=generator)
        nn.init.normal_(self.token_embed.weight, std=1.0, generator=generator)
        nn.init.zeros_(self.mix_l)
        nn.init.zeros_(self.readout.weight)
