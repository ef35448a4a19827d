"""The interface of conditional heads. For a slot and the token before the slot, a conditional head
computes the input of the language model head, and a correction that is added to the logits.

B batch rows, L drafted positions, W slots of a block, G blocks, D hidden size, V tokens of the
target's vocabulary, R tokens of the draft vocabulary, r rank of the head, S entries of the state of
a recurrent head; `...` stands for any number of dimensions.

The token before a slot can be any token of the target, because it may come from a prompt or from an
n-gram. A table that is indexed by this token therefore has V rows, as in DSpark's layout. The table
`correction_matrix` is indexed by the drafted token and has R rows.

Every head computes the logits of slot k as
`logits = lm_head @ head_input + correction_matrix @ correction`. `head_input` (D,) and `correction`
(r,) depend on the slot's state h_k and on the token before the slot. In a recurrent head, they
depend on all tokens before the slot. `correction_matrix` (R, r) is a parameter of the head. A head
without this parameter adds no correction. Thanks to this common form, one function in
`train/objective.py` computes the gradients of every head chunk by chunk, and the code in
`infer/drafters/heads/draft.py` decodes with every head.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from transformers import Qwen3Config


class EmbedAndNorm(NamedTuple):
    """The functions of a drafter that a conditional head may call."""

    # maps token ids (...) to the input of the target's first layer (..., D)
    embed: Callable[[torch.Tensor], torch.Tensor]
    # applies the drafter's final norm to states (..., D) and returns states (..., D)
    norm: Callable[[torch.Tensor], torch.Tensor]


class HeadOutput(NamedTuple):
    """The output of a conditional head for slots, each with a given previous token."""

    head_input: torch.Tensor  # (..., D) input of the language model head
    # (..., r) becomes logits when it is multiplied by `correction_matrix`; None without corrections
    correction: torch.Tensor | None = None
    # (..., S) state after the previous token, from which a recurrent head continues in the next
    # slot; None for other heads
    recurrent_state: torch.Tensor | None = None
    # (..., r) embedding of the previous token, for the confidence head; None without an embedding
    token_embedding: torch.Tensor | None = None


class Head(nn.Module):
    """A conditional head.

    The constructor takes the drafter's config and `family_config`. `family_config` is the object in
    config.json that holds the family's keys and the head's keys, which are listed in table.py. A
    subclass defines `condition`, which computes the head's formula, and `init_weights`.
    """

    # whether the output depends on all tokens before the slot, through a recurrent state
    recurrent = False
    reads_raw_states = False  # whether the head reads the drafter's states before the final norm
    top_k = 0  # the head chooses among the top_k likeliest tokens of a slot; 0 means all tokens
    # the name of the parameter that `correction_matrix` returns; None for a head without
    # corrections
    output_name: str | None = None

    @property
    def correction_matrix(self) -> torch.Tensor | None:
        """The matrix (R, r) that converts corrections to logits; None for a head without
        corrections."""
        if self.output_name is None:
            return None
        return self.get_parameter(self.output_name)

    def initial_state(
        self, bonus_tokens: torch.Tensor, states: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the recurrent state (B, 1, S) before the first drafted slot; None if the head is
        not recurrent.

        `bonus_tokens` is (B,) int64. `states` (B, W, D) are the states of all slots.
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
        """Return the head's output for slots with `states` (..., D), each after the token in
        `previous_tokens` (...) int64.

        `slots` (...) int64 are the numbers of the drafted slots, counted from 0. `states` and
        `slots` are broadcast to the shape of `previous_tokens`. `recurrent_state` (..., S) is the
        state before the previous token; it is None for heads that are not recurrent.
        """
        raise NotImplementedError

    def init_weights(self, generator: torch.Generator) -> None:
        """Draw initial weights. With these weights, the drafter's scores are the same as without
        the head."""
        raise NotImplementedError

    def teacher_force(
        self, embed_and_norm: EmbedAndNorm, states: torch.Tensor, previous_tokens: torch.Tensor
    ) -> HeadOutput:
        """Return the head's outputs (G, L, ...) for the last L slots of G blocks, where the token
        before each slot is the true token of the training text.

        `states` (G, W, D) are the states of all slots. `previous_tokens` (G, L) int64 are the true
        tokens before the last L slots.
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

    The confidence head reads the slot's state. If `input_size` exceeds the hidden size, it also
    reads the conditional head's embedding of the previous token.
    """

    def __init__(self, input_size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(input_size, 1)

    def forward(self, states: torch.Tensor, output: HeadOutput) -> torch.Tensor:
        """Return the logits (...) of the acceptance probability for slots with `states` (..., D).

        `output` is the conditional head's output for the same slots.
        """
        inputs = [states]
        if self.proj.in_features > states.shape[-1]:
            assert output.token_embedding is not None
            inputs.append(output.token_embedding)
        inputs = [tensor.to(self.proj.weight) for tensor in inputs]
        return self.proj(torch.cat(inputs, -1))[..., 0]
