"""A text that a masked diffusion model writes: a row of prompt and masks, which its steps fill in
any order."""

from collections import abc
from dataclasses import dataclass, field

import torch

from infer.engine.sequence import DecodeStats, Sequence
from infer.masked.config import LONGEST
from infer.masked.drafting import Guesses, Plan, Write
from infer.masked.habits import TextHabits
from infer.masked.model import MaskedModel


@dataclass
class MaskedStats(DecodeStats):
    """Counts of one text. `rounds` are passes of the model over one or more states of the text,
    whatever other texts share them; `histogram[i]` counts those that wrote i + 1 tokens."""

    written: int = 0  # tokens, each a pass of step-by-step decoding; `tokens` of them are kept

    @property
    def tau(self) -> float:
        """Tokens written a pass."""
        return self.written / self.rounds if self.rounds else 1.0


@dataclass(eq=False)
class MaskedSequence(Sequence):
    """A text and its row. `ids` are the answer's tokens up to the first mask: a written token never
    changes, so `ids` only grows."""

    # (position in the answer, token), in the order of the steps
    writes: list[Write] = field(default_factory=list)
    row: torch.Tensor | None = (
        None  # (T,) int64, on the model's device: the prompt, tokens and masks
    )
    masked: list[int] = field(default_factory=list)  # where the row has masks, ascending
    guesses: Guesses = field(
        default_factory=dict
    )  # the newest of every position, from which drafts are made
    habits: TextHabits | None = None
    slot: int = 0  # of the engine's rows
    full: bool = True  # cache=dual: whether the next step is one

    def __post_init__(self) -> None:
        self.stats = MaskedStats(len(self.prompt), histogram=[0] * (LONGEST + 1))

    @property
    def known(self) -> list[int]:
        """Nothing is to be computed before the text is written."""
        return []

    def begin(self, model: MaskedModel, length: int) -> None:
        """Lay out the row, with `length` masks. A text that was begun before begins again: with a
        cache of keys and values, what is written depends on where they were computed anew."""
        self.ids = []
        self.commits = []
        self.writes = []
        self.guesses = {}
        self.full = True
        self.__post_init__()
        start = len(self.prompt)
        self.row = torch.tensor(self.prompt + [model.mask_token_id] * length, device=model.device)
        self.masked = list(range(start, start + length))
        self.habits = TextHabits(dict(enumerate(self.prompt)))

    def plan(self, block_length: int, longest: int) -> Plan:
        """Return how far a round may draft."""
        return Plan(self.masked, len(self.prompt), block_length, longest)

    def write(self, writes: abc.Sequence[Write], model: MaskedModel) -> None:
        """Apply the writes of a round, (position in the row, token), in order."""
        start = len(self.prompt)
        positions, tokens = torch.tensor(writes, device=self.row.device).T
        self.row[positions] = tokens
        written = {position for position, _ in writes}
        self.masked = [position for position in self.masked if position not in written]
        self.habits.wrote(writes)
        self.writes += [(position - start, token) for position, token in writes]
        certain = self.masked[0] if self.masked else len(self.row)
        self.append(
            [self.habits.row[position] for position in range(start + len(self.ids), certain)], model
        )
