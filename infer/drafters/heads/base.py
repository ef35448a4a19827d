"""What every conditional head answers: what the target's head reads behind a token, and a
correction of its logits.

B rows, L drafted positions, W slots of a block, G blocks, D hidden size, R tokens that the drafter
knows, r rank, S entries of a memory; `...` any shape. Tokens before a slot are ids, and may be any:
they may be a prompt's, or n-grams drafted them. So tables of them have all tokens, as in DSpark's
layout, and `out` R rows.

All heads score token v at slot k behind token x as `logits = lm_head @ read + out @ correction`,
with `read` (D,) and `correction` (r,) made of the slot's state h_k and of x, or of all tokens
before it where the head is recurrent. `out` (R, r) is the head's own, or there is no correction. So
training forms gradients of any head in one place, chunk by chunk (`train/objective.py`), and
decoding scores any head in one place (`infer/drafters/heads/draft.py`).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from transformers import Qwen3Config


class Ends(NamedTuple):
    """The parts of a drafter that a head may ask."""

    # token ids (...) -> what enters the target's first layer (..., D)
    embed: Callable[[torch.Tensor], torch.Tensor]
    norm: Callable[[torch.Tensor], torch.Tensor]  # the drafter's last norm, (..., D)


class Conditioned(NamedTuple):
    """A slot's answer behind a token."""

    read: torch.Tensor  # (..., D) what the target's head reads
    correction: torch.Tensor | None = None  # (..., r)
    memory: torch.Tensor | None = (
        None  # (..., S) of recurrent heads: what the next slot's answer depends on
    )
    # (..., r) the head's own embedding of the token, for a confidence head
    embedded: torch.Tensor | None = None


class Head(nn.Module):
    """A conditional head. `config` is the drafter's config.json, `own` the family's part of it,
    whose keys stand in the head's row (table.py). A head adds

    - `condition`: the formula;
    - `init_weights`: a fresh head must leave the drafter's scores as they are.
    """

    recurrent = False  # the answer depends on all tokens before the slot, by way of a memory
    raw = False  # it reads states before the drafter's last norm
    top_k = 0  # it chooses among so many of the likeliest tokens of the slot; 0: among all
    output: str | None = None  # the name of `out`; None: there are no corrections

    @property
    def out(self) -> torch.Tensor | None:
        """The matrix (R, r) that turns corrections into logits."""
        return None if self.output is None else self.get_parameter(self.output)

    def memory(self, bonus: torch.Tensor, states: torch.Tensor) -> torch.Tensor | None:
        """Return a recurrent head's memory (B, 1, S) before the first slot that drafts, behind
        bonus tokens (B,); states (B, W, D) are those of all slots."""
        return None

    def condition(
        self,
        ends: Ends,
        states: torch.Tensor,
        before: torch.Tensor,
        slots: torch.Tensor,
        memory: torch.Tensor | None,
    ) -> Conditioned:
        """Return the answers of slots with states (..., D) behind tokens `before` (...); `slots`
        (...) are numbers from 0; states and numbers are broadcast."""
        raise NotImplementedError

    def teach(self, ends: Ends, states: torch.Tensor, before: torch.Tensor) -> Conditioned:
        """Return the answers of whole blocks (G, W, D), at the last L slots, behind the true tokens
        (G, L): teacher forcing."""
        slots = torch.arange(before.shape[1], device=before.device)
        memory = self.memory(before[:, 0], states)
        states = states[:, -before.shape[1] :]
        if not self.recurrent:
            return self.condition(ends, states, before, slots, None)
        answers = []
        for k in range(before.shape[1]):
            answers.append(
                self.condition(ends, states[:, k : k + 1], before[:, k : k + 1], slots[k], memory)
            )
            memory = answers[-1].memory
        columns = (
            torch.cat(column, 1) if column[0] is not None else None
            for column in zip(*answers, strict=True)
        )
        return Conditioned(*columns)


def head_rows(config: Qwen3Config) -> int:
    """Return R, how many tokens a drafter knows."""
    return vars(config).get("draft_vocab_size") or config.vocab_size


class Confidence(nn.Module):
    """DSpark's confidence head: the probability that a slot's draft is accepted, from its state
    and, if `embedded`, the head's embedding of the token before it."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, 1)

    def forward(self, states: torch.Tensor, answer: Conditioned) -> torch.Tensor:
        """Return logits (...) of slots with states (..., D)."""
        parts = [states, answer.embedded] if self.proj.in_features > states.shape[-1] else [states]
        return self.proj(torch.cat([part.to(self.proj.weight) for part in parts], -1))[..., 0]
