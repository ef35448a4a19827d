"""What the rows of a round ask of sampling, as columns on the device: made from the texts' options for every launched
round, read from memory that stays where it is in captured ones.

B rows, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from infer.config import TextOptions

# of one row: what its options say, where those that it does not use change nothing
VALUES: dict[str, Callable[[TextOptions], float | int | bool]] = {
    "sampled": lambda row: row.temperature > 0,
    "temperature": lambda row: row.temperature if row.temperature > 0 else 1.0,
    "top_k": lambda row: row.top_k if row.temperature > 0 else 0,
    "top_p": lambda row: row.top_p if row.temperature > 0 else 1.0,
    "log_min_p": lambda row: math.log(row.min_p) if row.temperature > 0 and row.min_p > 0 else -math.inf,
    "repetition_penalty": lambda row: row.repetition_penalty,
    "seed": lambda row: row.seed,
}


def to_device(values: Sequence, device: torch.device) -> torch.Tensor:
    """Return values of the host as a tensor on a device, without waiting for the device."""
    tensor = torch.tensor(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@dataclass(frozen=True)
class Kind:
    """Which options some row of a captured round uses: each kind is a graph of its own."""

    sampled: bool = False
    most_k: int = 0  # the largest top_k, up to the next power of two
    top_p: bool = False
    min_p: bool = False
    penalised: bool = False
    logprobs: int | None = None  # alternatives that are told, up to the next power of two; None: none, nor the token's

    @classmethod
    def of(cls, rows: Sequence[TextOptions], vocabulary: int) -> "Kind":
        """Return the kind of these rows."""
        drawn = [row for row in rows if row.temperature > 0]
        most = max((row.top_k for row in drawn if row.top_k < vocabulary), default=0)
        told = most_logprobs(rows)
        return cls(
            bool(drawn),
            min(_bucket(most), vocabulary - 1),
            any(row.top_p < 1 for row in drawn),
            any(row.min_p > 0 for row in drawn),
            any(row.repetition_penalty != 1 for row in rows),
            None if told is None else min(_bucket(told), vocabulary),
        )

    @property
    def everything(self) -> TextOptions:
        """A row that uses all of them."""
        return TextOptions(
            temperature=float(self.sampled),
            top_k=self.most_k,
            top_p=0.5 if self.top_p else 1.0,
            min_p=0.5 if self.min_p else 0.0,
            repetition_penalty=2.0 if self.penalised else 1.0,
            logprobs=self.logprobs,
        )


def _bucket(count: int) -> int:
    """Return the next power of two, of 0 itself."""
    return 1 << (count - 1).bit_length() if count else 0


def most_logprobs(rows: Sequence[TextOptions]) -> int | None:
    """Return how many alternatives the rows want to know the log-probabilities of at most; None where no row asks."""
    return max((row.logprobs for row in rows if row.logprobs is not None), default=None)


class Columns:
    """Device memory for what rows ask: written when other texts come into the rows, read by captured rounds."""

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        self.seen = torch.zeros(rows, vocabulary, dtype=torch.bool, device=device)  # tokens that the rows hold
        neutral = TextOptions()
        self.values = {
            name: to_device([value(neutral)], device).repeat(rows) for name, value in VALUES.items()
        }  # (rows,) each

    def write(self, rows: Sequence[TextOptions], seen: torch.Tensor | None) -> None:
        """Note what the first rows ask, and the tokens (B, V) that they hold, needed for a penalty only."""
        if seen is not None:
            self.seen[: len(rows)] = seen
        for name, value in VALUES.items():
            found = [value(row) for row in rows]
            if name == "top_k":
                found = [k if k < self.seen.shape[1] else 0 for k in found]
            self.values[name][: len(rows)] = to_device(found, self.values[name].device)


class FixedRows(Sequence[TextOptions]):
    """The options of a captured round's rows: to the host every row uses all of its kind, and what it really asks is in
    the columns."""

    def __init__(self, count: int, kind: Kind, columns: Columns) -> None:
        self.count, self.every, self.columns = count, kind.everything, columns

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> TextOptions:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return self.every


def column(rows: Sequence[TextOptions], name: str, device: torch.device) -> torch.Tensor:
    """Return a value of `VALUES` for each row, (B, 1, 1)."""
    if isinstance(rows, FixedRows):
        found = rows.columns.values[name][: len(rows)]
    else:
        found = to_device([VALUES[name](row) for row in rows], device)
    return found.view(-1, 1, 1)


def sampled_rows(rows: Sequence[TextOptions]) -> list[int]:
    """Return which rows are sampled; of a captured round all, if some may be."""
    return [i for i, row in enumerate(rows) if row.temperature > 0]


def pick(rows: Sequence[TextOptions], which: Sequence[int]) -> Sequence[TextOptions]:
    """Return some of the rows."""
    return rows if len(which) == len(rows) else [rows[i] for i in which]


def index(rows: Sequence[TextOptions], which: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return the numbers of some of the rows on the device; of all, without a copy from the host."""
    return torch.arange(len(rows), device=device) if len(which) == len(rows) else to_device(which, device)
