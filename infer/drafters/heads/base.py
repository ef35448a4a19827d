"""The interface of a conditional head: the input of the language model head after a given previous
token, and a correction of its logits.

B batch rows, L drafted positions, W slots of a block, G blocks, D hidden size, R tokens of the
draft vocabulary, r rank, S entries of a recurrent state; `...` any shape. The token before a slot
is a token id of the target. It may be any, since it may come from a prompt or from an n-gram. So
tables that are indexed by the previous token have all V rows, as in DSpark's layout, and
`correction_matrix` has R rows.

Every head scores token v at slot k after token x as
`logits = lm_head @ head_input + correction_matrix @ correction`. `head_input` (D,) and `correction`
(r,) are functions of the slot's state h_k and of x, or of all tokens before the slot where the head
is recurrent. `correction_matrix` (R, r) belongs to the head; heads without one add no correction. So
training computes the gradients of every head in one function, chunk by chunk
(`train/objective.py`), and decoding scores every head in one function
(`infer/drafters/heads/draft.py`).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from transformers import Qwen3Config


class EmbedAndNorm(NamedTuple):
    """The functions of a drafter that a conditional head may call."""

    # token ids (...) -> the input of the target's first layer (..., D)
    embed: Callable[[torch.Tensor], torch.Tensor]
    norm: Callable[[torch.Tensor], torch.Tensor]  # the drafter's final norm, (..., D) -> (..., D)


class HeadOutput(NamedTuple):
    """What a conditional head computes for slots, each after a given previous token."""

    head_input: torch.Tensor  # (..., D) input of the language model head
    correction: torch.Tensor | None = None  # (..., r), to be multiplied by `correction_matrix`
    # (..., S) of recurrent heads: the state after the previous token, input of the next slot
    recurrent_state: torch.Tensor | None = None
    # (..., r) the head's embedding of the previous token, read by a confidence head
    token_embedding: torch.Tensor | None = None


class Head(nn.Module):
    """A conditional head.

    Its constructor takes the drafter's config.json and `family_config`, the family's object in it,
    which holds the head's keys (table.py). A subclass defines `condition`, the formula, and
    `init_weights`, after which the drafter's scores are as without the head.
    """

    recurrent = False  # the output depends on all tokens before the slot, through a recurrent state
    reads_raw_states = False  # it reads the drafter's states before the final norm
    top_k = 0  # it chooses among the top_k likeliest tokens of a slot; 0: among all
    output_name: str | None = (
        None  # the parameter `correction_matrix`; None: there are no corrections
    )

    @property
    def correction_matrix(self) -> torch.Tensor | None:
        """The matrix (R, r) that turns corrections into logits, None without corrections."""
        if self.output_name is None:
            return None
        return self.get_parameter(self.output_name)

    def initial_state(
        self, bonus_tokens: torch.Tensor, states: torch.Tensor
    ) -> torch.Tensor | None:
        """Return a recurrent head's state (B, 1, S) before the first drafted slot; else None.

        Arguments are bonus tokens (B,) int64 and the states (B, W, D) of all slots.
        """
        return None

    def condition(
        self,
        embed_and_norm: EmbedAndNorm,
        states: torch.Tensor,
        previous_tokens: torch.Tensor,
        slots: torch.Tensor,
        recurrent_state: torch.Tensor | None,
    ) -> HeadOutput:
        """Return the output for slots with `states` (..., D) after `previous_tokens` (...) int64.

        `slots` (...) int64 are numbers of drafted slots, from 0. States and slot numbers are
        broadcast against the tokens. `recurrent_state` (..., S) is the state before the previous
        token, None for heads that are not recurrent.
        """
        raise NotImplementedError

    def init_weights(self, generator: torch.Generator) -> None:
        """Draw initial weights with which the drafter's scores are as without the head."""
        raise NotImplementedError

    def teacher_force(
        self, embed_and_norm: EmbedAndNorm, states: torch.Tensor, previous_tokens: torch.Tensor
    ) -> HeadOutput:
        """Return the outputs (G, L, ...) for the last L slots of blocks, after the true tokens.

        `states` (G, W, D) are those of all slots, `previous_tokens` (G, L) int64 the true tokens
        before the last L slots.
        """
        length = previous_tokens.shape[1]
        slots = torch.arange(length, device=previous_tokens.device)
        recurrent_state = self.initial_state(previous_tokens[:, 0], states)
        states = states[:, -length:]
        if not self.recurrent:
            return self.condition(embed_and_norm, states, previous_tokens, slots, None)

        outputs = []
        for k in range(length):
            output = self.condition(
                embed_and_norm,
                states[:, k : k + 1],
                previous_tokens[:, k : k + 1],
                slots[k],
                recurrent_state,
            )
            recurrent_state = output.recurrent_state
            outputs.append(output)

        def concatenate(tensors: tuple[torch.Tensor | None, ...]) -> torch.Tensor | None:
            present = [tensor for tensor in tensors if tensor is not None]
            if not present:
                return None
            return torch.cat(present, 1)

        head_inputs, corrections, recurrent_states, embeddings = zip(*outputs, strict=True)
        return HeadOutput(
            torch.cat(head_inputs, 1),
            concatenate(corrections),
            concatenate(recurrent_states),
            concatenate(embeddings),
        )


def get_draft_vocab_size(config: Qwen3Config) -> int:
    """Return R, the number of tokens that a drafter can propose."""
    return vars(config).get("draft_vocab_size") or config.vocab_size


class ConfidenceHead(nn.Module):
    """DSpark's confidence head: predicts the probability that a slot's draft is accepted.

    It reads the slot's state and, if it has the inputs for it, the conditional head's embedding of
    the previous token.
    """

    def __init__(self, input_size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(input_size, 1)

    def forward(self, states: torch.Tensor, output: HeadOutput) -> torch.Tensor:
        """Return logits (...) of acceptance for slots with `states` (..., D), given the conditional
        head's output for them."""
        inputs = [states]
        if self.proj.in_features > states.shape[-1]:
            assert output.token_embedding is not None
            inputs.append(output.token_embedding)
        inputs = [tensor.to(self.proj.weight) for tensor in inputs]
        return self.proj(torch.cat(inputs, -1))[..., 0]
