"""What a user sees during a run: a live bar on a terminal, a line every 15 seconds elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

QUIET = 15.0  # seconds between lines where there is no terminal


class Progress:
    """The bar of a run. Only the first process shows anything."""

    def __init__(self, total: int, enabled: bool) -> None:
        self.console = Console(highlight=False, quiet=not enabled)
        columns = (TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeRemainingColumn())
        self.bar = Bar(*columns, TextColumn("{task.fields[note]}"), console=self.console, transient=True)
        self.total, self.task, self.last = total, None, time.monotonic()
        self.live = self.console.is_terminal and enabled

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def step(self, line: dict) -> None:
        """One step's metrics, as they are written to metrics.jsonl."""
        agreement = " ".join(f"{100 * share:.0f}" for share in line["agreement"][:8])
        loss = "not finite" if line["loss"] is None else f"{line['loss']:.3f}"
        note = f"loss {loss}  agree {agreement} %  prefix {line['prefix']:.2f}  {line['tokens_per_second']:,.0f} tok/s"
        if self.live:
            if self.task is None:
                self.bar.start()
                self.task = self.bar.add_task("training", total=self.total, note="")
            self.bar.update(self.task, completed=line["step"], note=note)
        elif time.monotonic() - self.last > QUIET or line["step"] in (1, self.total):
            self.last = time.monotonic()
            self.say(f"step {line['step']}/{self.total}  {note}")

    @contextmanager
    def counting(self, what: str, total: int) -> Iterator[Callable[[int, int], None]]:
        """A second bar for the time of an evaluation."""
        task = self.bar.add_task(what, total=total, note="") if self.live else None

        def advance(done: int, total: int) -> None:
            if task is not None:
                self.bar.update(task, completed=done)

        yield advance
        if task is not None:
            self.bar.remove_task(task)

    def close(self) -> None:
        self.bar.stop()
