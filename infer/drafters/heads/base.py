"""The interface of conditional heads. A slot is an input position of a drafted block. For a slot
and the token before the slot, a conditional head computes the input of the language model head, and
a correction that is added to the logits.

B batch rows, L drafted positions, W slots of a block, G blocks, D hidden size, V tokens of the
target's vocabulary, R tokens that the drafter can propose, r rank of the head, S size of the
state of a recurrent head; `...` stands for any number of dimensions.

The token before a slot can be any token of the target, because it may come from a prompt or from an
n-gram. A table that is indexed by this token therefore has V rows. The table `correction_matrix` is
indexed by the drafted token and has R rows.

Every head computes the logits of slot k as
`logits = lm_head @ head_input + correction_matrix @ correction`. `head_input` (D,) and `correction`
(r,) depend on the slot's hidden state h_k and on the token before the slot. In a recurrent head,
they depend on all tokens of the block before the slot. `correction_matrix` (R, r) is a parameter of
the head. A head without this parameter adds no correction. Thanks to this common form, one function
in `train/objective.py` computes the gradients of every head chunk by chunk, and the code in
`infer/drafters/heads/draft.py` decodes with every head.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from transformers import Qwen3Config


class EmbedAndNorm(NamedTuple):
    """The two functions of a drafter that a conditional head may call: embedding lookup and final
    norm."""

    # maps token ids (...) to embeddings (..., hidden size)
    embed: Callable[[torch.Tensor], torch.Tensor]
    # applies the drafter's final norm to hidden states (..., hidden size)
    norm: Callable[[torch.Tensor], torch.Tensor]


class HeadOutput(NamedTuple):
    """The output of a conditional head for one or more drafted positions, given the token before
    each position."""

    head_input: torch.Tensor  # (..., hidden size): input of the language model head
    # (..., rank): `correction_matrix` maps it to a correction of the logits; None if the head
    # corrects no logits
    low_rank_correction: torch.Tensor | None = None
    # (..., state size): state of a recurrent head, the input for the next drafted position; None
    # for other heads
    recurrent_state: torch.Tensor | None = None
    # (..., rank): the head's embedding of the previous token, which the confidence head reads; None
    # if the head has no embedding
    token_embedding: torch.Tensor | None = None


class ConditionalHead(nn.Module):
    """Base class of conditional heads, which make a drafted token's score depend on the drafted
    tokens before it.

    The constructor takes the drafter's config and `family_config`, the object in config.json that
    holds the keys of the drafter family and of the head (listed in table.py). A subclass defines
    `condition`, which computes the head's output, and `init_weights`.
    """

    # whether the head has a recurrent state, which depends on all previous tokens of the block
    recurrent = False
    reads_raw_states = False  # whether the head reads hidden states before the final norm
    top_k = 0  # number of likeliest tokens per position that the head scores; 0 means all tokens
    # name of the parameter that is `correction_matrix`; None for a head without corrections
    output_name: str | None = None

    @property
    def correction_matrix(self) -> torch.Tensor | None:
        """The matrix (draft_vocab_size, rank) that maps the head's corrections to logits; None for
        a head without corrections."""
        if self.output_name is None:
            return None
        return self.get_parameter(self.output_name)

    def initial_state(
        self, bonus_tokens: torch.Tensor, states: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the recurrent state (B, 1, state_size) before the first drafted token; None if the
        head is not recurrent.

        `bonus_tokens` (B,) int64 are the tokens before the first drafted token. `states`
        (B, num_slots, hidden_size) are the hidden states at all input positions of the block.
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
        """Return the head's output for drafted positions, given the token before each position.

        `states` (..., hidden_size) are the hidden states at the drafted positions.
        `previous_tokens` (...) int64 are the tokens before them. `slots` (...) int64 are the
        numbers of the drafted positions in the block, counted from 0. `states` and `slots` are
        broadcast to the shape of `previous_tokens`. `recurrent_state` (..., state_size) is the
        state of a recurrent head before it reads the previous tokens; None for other heads.
        """
        raise NotImplementedError

    def init_weights(self, generator: torch.Generator) -> None:
        """Initialise the weights such that the head does not change the drafter's scores."""
        raise NotImplementedError

    def teacher_force(
        self, embed_and_norm: EmbedAndNorm, states: torch.Tensor, previous_tokens: torch.Tensor
    ) -> HeadOutput:
        """Return the head's outputs for all drafted positions of some blocks, given the true tokens
        of the training text.

        `states` (num_blocks, num_slots, hidden_size) are the hidden states at all input positions
        of the blocks. The last L input positions of a block are the drafted ones. `previous_tokens`
        (num_blocks, L) int64 are the true tokens before the drafted positions. The outputs have the
        shape (num_blocks, L, ...).
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
    """Return the number of tokens that a drafter can propose."""
    return vars(config).get("draft_vocab_size") or config.vocab_size


class ConfidenceHead(nn.Module):
    """DSpark's confidence head: predicts the probability that a drafted token is accepted.

    The confidence head reads the hidden state at the drafted position. If `input_size` is larger
    than the hidden size, it also reads the conditional head's embedding of the token before that
    position.
    """

    def __init__(self, input_size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(input_size, 1)

    def forward(self, states: torch.Tensor, output: HeadOutput) -> torch.Tensor:
        """Return the logits (...) of the probability that the drafted tokens are accepted.

        `states` (..., hidden_size) are the hidden states at the drafted positions. `output` is the
        conditional head's output for the same positions.
        """
        inputs = [states]
        if self.proj.in_features > states.shape[-1]:
            assert output.token_embedding is not None
            inputs.append(output.token_embedding)
        inputs = [tensor.to(self.proj.weight) for tensor in inputs]
        return self.proj(torch.cat(inputs, -1))[..., 0]
