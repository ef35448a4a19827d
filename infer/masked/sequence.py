"""A sequence that a masked diffusion model decodes: a row of prompt and mask tokens. Decoding steps
replace the mask tokens in any order."""

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
    """The cost of decoding one sequence. A round is one forward pass over one or more states of the
    sequence. `histogram[i]` is the number of rounds that wrote i + 1 tokens."""

    # Tokens that were written, in whole blocks. Step-by-step decoding needs one forward pass for
    # each of them. The output has `tokens` of these tokens, since it is cut where it ends.
    written: int = 0

    @property
    def tau(self) -> float:
        """The average number of tokens that were written per forward pass."""
        return self.written / self.rounds if self.rounds else 1.0


@dataclass(eq=False)
class MaskedSequence(Sequence):
    """A sequence with its row of prompt, written tokens and masks. `ids` are the output tokens
    before the first mask. A written token never changes, so `ids` only grows."""

    # (position in the output, token) of each written token, in the order of the steps
    writes: list[Write] = field(default_factory=list)
    # int64 on the model's device: prompt, written tokens and masks. None if not running.
    row: torch.Tensor | None = None
    masked: list[int] = field(default_factory=list)  # positions with a mask, ascending
    # The newest prediction of each position. Drafts are made from these predictions.
    predictions: Predictions = field(default_factory=dict)
    statistics: SequenceStatistics = field(default_factory=lambda: SequenceStatistics({}))
    cache_row: int = 0  # the sequence's row in the engine's KV cache
    is_full_step: bool = True  # with cache=dual: whether the next step computes the whole row

    def __post_init__(self) -> None:
        self.stats = MaskedDecodeStats(
            len(self.prompt), histogram=[0] * (MAX_MASKED_DRAFT_LENGTH + 1)
        )

    @property
    def token_ids(self) -> list[int]:
        """The tokens that have to be prefilled. There are none, since prompts are computed together
        with their outputs."""
        return []

    def set_up_row(self, model: MaskedModel, length: int) -> None:
        """Set up the row with the prompt and `length` masks.

        A sequence that was interrupted starts over from the prompt. With a KV cache it cannot
        continue, since the output depends on the steps at which the cache was computed.
        """
        self.ids = []
        self.commits = []
        self.writes = []
        self.predictions = {}
        self.is_full_step = True
        self.__post_init__()
        start = len(self.prompt)
        self.row = torch.tensor(self.prompt + [model.mask_token_id] * length, device=model.device)
        self.masked = list(range(start, start + length))
        self.statistics = SequenceStatistics(dict(enumerate(self.prompt)))

    def make_plan(self, block_length: int, max_writes: int) -> DraftPlan:
        """Return the masked positions, and the limits of a round's drafts: the length of a block,
        and the maximum number of writes of a state."""
        return DraftPlan(self.masked, len(self.prompt), block_length, max_writes)

    def write(self, writes: abc.Sequence[Write], model: MaskedModel) -> None:
        """Apply the writes of a round in order. Each write is (position in the row, token)."""
        assert self.row is not None
        start = len(self.prompt)
        positions, tokens = torch.tensor(writes, device=self.row.device).T
        self.row[positions] = tokens
        written = {position for position, _ in writes}
        self.masked = [position for position in self.masked if position not in written]
        self.statistics.record_writes(writes)
        self.writes += [(position - start, token) for position, token in writes]

        first_mask = self.masked[0] if self.masked else len(self.row)
        new_positions = range(start + len(self.ids), first_mask)
        new_ids = [self.statistics.tokens[position] for position in new_positions]
        # `append` needs only the tokenizer and the end tokens, which masked models have too.
        self.append(new_ids, cast(Any, model))
