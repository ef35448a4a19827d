"""Numbers that went wrong: steps that are skipped, losses that jump.

A step whose loss or gradient is not finite changes neither weights nor moments, in no process and at no ZeRO stage
(`train.loop.train_step`, `train.engine.take_step`).
"""

import math
import statistics
from collections import deque

from data.packing import row_index
from infer.utils.entry import Stopped
from train.config import TrainConfig

WINDOW = 50  # losses that a jump is measured against
ENOUGH = 10  # of them, before it is


def rows_of(step: int, rows: int, config: TrainConfig) -> str:
    """Name the rows of a step, which is counted from 1, in a training set of so many `rows`."""
    first, count = (step - 1) * config.optim.batch, config.optim.batch
    shown = ", ".join(str(row_index(first + i, rows, config.seed)) for i in range(min(count, 16)))
    return f"its rows of the training set are {shown}" + (", ..." if count > 16 else "")


class Spikes:
    """Finds losses far above those before them."""

    def __init__(self, config: TrainConfig, rows: int, known: list[dict]) -> None:
        """`rows` of the training set; `known` are the lines of metrics.jsonl so far: a resumed run sees what an
        uninterrupted one would."""
        self.config, self.rows = config, rows
        losses = [line["loss"] for line in known if line["loss"] is not None]
        self.recent: deque[float] = deque(losses, maxlen=WINDOW)

    def __call__(self, line: dict) -> str | None:
        """Return a sentence if this step's loss is a jump."""
        loss, step = line["loss"], line["step"]
        if loss is None:
            return None
        usual = statistics.median(self.recent) if len(self.recent) >= ENOUGH else math.inf
        self.recent.append(loss)
        if not loss > self.config.guards.spike * usual > 0:  # rows without anchors have no loss
            return None
        return (
            f"loss spike at step {step}: {loss:.3f}, {loss / usual:.1f} times the median {usual:.3f} of the steps "
            f"before; {rows_of(step, self.rows, self.config)}"
        )


class Skips:
    """Counts skipped steps in a row."""

    def __init__(self, config: TrainConfig, rows: int) -> None:
        """`rows` of the training set."""
        self.config, self.rows = config, rows
        self.in_a_row, self.last = 0, -1

    def __call__(self, step: int, loss: float | None) -> str:
        """Return a sentence about a skipped step; loss: None where that is not finite. Raises Stopped after too
        many."""
        self.in_a_row = self.in_a_row + 1 if step == self.last + 1 else 1
        self.last = step
        which = "loss and gradient are" if loss is None else "gradient is"
        what = f"step {step} is skipped: its {which} not finite; {rows_of(step, self.rows, self.config)}"
        if self.in_a_row < self.config.guards.most_skipped:
            return what
        raise Stopped(
            f"{what}. That were guards.most_skipped={self.in_a_row} in a row; weights and moments are as they were "
            "before the first of them: optim.precision=float32, a lower optim.lr or other data may help"
        )
