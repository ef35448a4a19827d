"""What a user sees during a run: the line of its steps and of its evaluations, and sentences between them."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from infer.utils import progress


class Progress:
    """The steps of a run. Only the first process shows anything."""

    def __init__(self, total: int, begun: int, enabled: bool) -> None:
        self.quiet, self.total = not enabled, total
        self.steps = progress.Progress("training", "steps", begun, self.quiet, sys.stdout)

    def say(self, text: str) -> None:
        self.steps.say(text)

    def step(self, line: dict) -> None:
        """One step's metrics, as they are written to metrics.jsonl."""
        agreement = " ".join(f"{100 * share:.0f}" for share in line["agreement"][:8])
        loss = "not finite" if line["loss"] is None else f"{line['loss']:.3f}"
        note = f"loss {loss}, agree {agreement} %, prefix {line['prefix']:.2f}, {line['tokens_per_second']:,.0f} tok/s"
        self.steps(line["step"], self.total, note)

    @contextmanager
    def counting(self, what: str, total: int) -> Iterator[Callable[[int, int], None]]:
        """Count the prompts of an evaluation, whose time is not the steps'."""
        self.steps.close()
        counted = progress.Progress(what, "prompts", quiet=self.quiet, stream=self.steps.stream)
        yield counted
        counted.close()
        self.steps.start += counted.last - counted.start

    def close(self) -> None:
        self.steps.close()
