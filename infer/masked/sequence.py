"""A sequence that a masked diffusion model decodes: a row of prompt and masks, which its steps fill
in any order."""

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
    """The cost of decoding one sequence. `rounds` are passes of the model over one or more states
    of the sequence, `histogram[i]` counts rounds that wrote i + 1 tokens."""

    # Tokens in whole blocks. Step-by-step decoding needs one pass for each. `tokens` of them are
    # part of the output.
    written: int = 0

    @property
    def tau(self) -> float:
        """Tokens written per pass."""
        return self.written / self.rounds if self.rounds else 1.0


@dataclass(eq=False)
class MaskedSequence(Sequence):
    """A sequence and its row. `ids` are the output tokens before the first mask. A written token
    never changes, so `ids` only grows."""

    # (position in the output, token), in the order of the steps
    writes: list[Write] = field(default_factory=list)
    # (T,) int64 on the model's device: prompt, written tokens and masks. None if not running.
    row: torch.Tensor | None = None
    masked: list[int] = field(default_factory=list)  # positions with a mask, ascending
    # The newest prediction of every position, from which drafts are made.
    predictions: Predictions = field(default_factory=dict)
    statistics: SequenceStatistics = field(default_factory=lambda: SequenceStatistics({}))
    cache_row: int = 0  # row of the engine's cache
    is_full_step: bool = True  # cache=dual: whether the next step computes the whole row

    def __post_init__(self) -> None:
        self.stats = MaskedDecodeStats(
            len(self.prompt), histogram=[0] * (MAX_MASKED_DRAFT_LENGTH + 1)
        )

    @property
    def token_ids(self) -> list[int]:
        """The tokens to prefill: none, since prompts are computed together with their outputs."""
        return []

    def set_up_row(self, model: MaskedModel, length: int) -> None:
        """Set up the row with `length` masks.

        A sequence that had begun before starts over: with a KV cache, the output depends on the
        steps at which the cache was computed.
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
        """Return the limits of a round's drafts."""
        return DraftPlan(self.masked, len(self.prompt), block_length, max_writes)

    def write(self, writes: abc.Sequence[Write], model: MaskedModel) -> None:
        """Apply the writes of a round in order, each (position in the row, token)."""
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
        self.append(new_ids, cast(Any, model))  # it needs the tokenizer and end tokens only
