"""A sequence that a masked diffusion model decodes: a prompt, followed by mask tokens. Decoding
steps replace the mask tokens in any order."""

from collections import abc
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from infer.engine.sequence import DecodeStats, Sequence
from infer.masked.config import MAX_MASKED_DRAFT_LENGTH
from infer.masked.drafting import DraftPlan, Predictions, Write
from infer.masked.model import MaskedModel
from infer.masked.ngram_statistics import SequenceStatistics


@dataclass
class MaskedDecodeStats(DecodeStats):
    """Statistics of decoding one sequence. A round is one forward pass over the sequence and
    drafted copies of it. `histogram[i]` is the number of rounds that wrote i + 1 tokens."""

    # Number of written tokens, including those after the end of the output, which are cut off.
    # Step-by-step decoding would need one forward pass for each of them.
    written: int = 0

    @property
    def tau(self) -> float:
        """The average number of tokens that a round (one forward pass) wrote."""
        return self.written / self.rounds if self.rounds else 1.0


@dataclass(eq=False)
class MaskedSequence(Sequence):
    """A sequence of prompt tokens, written tokens and mask tokens. `ids` are the output tokens
    before the first mask token. A written token never changes, so `ids` only grows."""

    # (position in the output, token) of each written token, in the order of the steps.
    writes: list[Write] = field(default_factory=list)
    # Token ids on the model's device: prompt, written tokens and mask tokens. None while the
    # sequence is not running.
    token_row: torch.Tensor | None = None
    masked_positions: list[int] = field(default_factory=list)  # positions of mask tokens
    # Keys are positions, values are the newest predictions, from which drafts are made.
    predictions: Predictions = field(default_factory=dict)
    statistics: SequenceStatistics = field(default_factory=lambda: SequenceStatistics({}))
    cache_row: int = 0  # row of the sequence in the engine's KV cache
    # Used only with cache=dual: whether the next step computes all positions of the sequence, not
    # only a block.
    is_full_step: bool = True

    def __post_init__(self) -> None:
        self.stats = MaskedDecodeStats(
            len(self.prompt), histogram=[0] * (MAX_MASKED_DRAFT_LENGTH + 1)
        )

    @property
    def token_ids(self) -> list[int]:
        """The tokens to prefill. There are none, since prompts are computed together with their
        outputs."""
        return []

    def set_up_row(self, model: MaskedModel, length: int) -> None:
        """Start or restart the sequence: set its row to the prompt and `length` mask tokens.

        A sequence that was interrupted starts over from the prompt. With a KV cache it could not
        continue with the same output, because the output depends on when the cache was filled.
        """
        self.ids = []
        self.commits = []
        self.writes = []
        self.predictions = {}
        self.is_full_step = True
        self.__post_init__()
        start = len(self.prompt)
        self.token_row = torch.tensor(
            self.prompt + [model.mask_token_id] * length, device=model.device
        )
        self.masked_positions = list(range(start, start + length))
        self.statistics = SequenceStatistics(dict(enumerate(self.prompt)))

    def make_plan(self, block_length: int, max_writes: int) -> DraftPlan:
        """Return the sequence's masked positions and the limits of a round's drafts.

        block_length: number of tokens per block
        max_writes: maximum number of drafted tokens
        """
        return DraftPlan(self.masked_positions, len(self.prompt), block_length, max_writes)

    def write(self, writes: abc.Sequence[Write], model: MaskedModel) -> None:
        """Replace mask tokens by the tokens of a decoding round.

        writes: (position in the row, token) pairs, in the order of the decoding steps
        """
        assert self.token_row is not None
        start = len(self.prompt)
        positions, tokens = torch.tensor(writes, device=self.token_row.device).T
        self.token_row[positions] = tokens
        written = {position for position, _ in writes}
        self.masked_positions = [
            position for position in self.masked_positions if position not in written
        ]
        self.statistics.record_writes(writes)
        self.writes += [(position - start, token) for position, token in writes]

        first_mask = self.masked_positions[0] if self.masked_positions else len(self.token_row)
        new_positions = range(start + len(self.ids), first_mask)
        new_ids = [self.statistics.tokens[position] for position in new_positions]
        # The cast is safe: `append` needs only the tokenizer and the end tokens, which masked
        # models have too.
        self.append(new_ids, cast(Any, model))
