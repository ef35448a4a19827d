"""How far long work is: how much of it, how fast, and how long the rest will take."""

import sys
import time
from shutil import get_terminal_size
from typing import TextIO

EVERY = 30.0  # seconds between lines where there is no terminal
OFTEN = 0.1  # seconds between changes of a terminal's line
BAR = 20  # characters


def duration(seconds: float) -> str:
    """Return a time in words: 40 s, 3 min, 2 h 05 min."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def per_second(rate: float) -> str:
    """Return a rate in words: 1,250 a second, 3.2 a second, 4.0 a minute."""
    if rate >= 1:
        return f"{rate:,.0f} a second" if rate >= 100 else f"{rate:.1f} a second"
    return f"{60 * rate:.1f} a minute"


class Progress:
    """A line about work under way: rewritten on a terminal; elsewhere a line every half minute, and one at the end.

    what: the work, "evaluating"; unit: what is counted, "prompts". begun: how much an earlier process had done, which
    the rate leaves out. quiet: show nothing at all (processes but the first).
    """

    def __init__(
        self, what: str, unit: str = "", begun: int = 0, quiet: bool = False, stream: TextIO | None = None
    ) -> None:
        self.what, self.unit, self.begun, self.quiet = what, unit, begun, quiet
        self.own_stream = stream
        self.start = self.last = time.monotonic()
        self.done = begun
        self.shown = False  # whether the terminal's line holds something

    @property
    def stream(self) -> TextIO:
        """Where the lines go: standard error as it is now, if nothing else was given."""
        return self.own_stream or sys.stderr

    @property
    def live(self) -> bool:
        return self.stream.isatty()

    def __call__(self, done: int, total: int | None = None, note: str = "") -> None:
        """Report that so much is done; `total` where it is known, `note` for what else is worth a look."""
        now, finished = time.monotonic(), total is not None and done >= total
        if done < self.done:  # the next work of the same kind
            self.start, self.begun = now, done
        self.done = done
        if self.quiet or (now - self.last < (OFTEN if self.live else EVERY) and not finished):
            return
        self.last = now
        line = self.line(done, total, now - self.start, note)
        if self.live:
            width = get_terminal_size().columns - 1
            self.stream.write(f"\r\x1b[K{self.bar(done, total)}{line}"[: width + 4])
            self.shown = True
            if finished:
                self.close()
        else:
            self.stream.write(line + "\n")
        self.stream.flush()

    def line(self, done: int, total: int | None, seconds: float, note: str) -> str:
        """Return the words for so much work in so many seconds."""
        count = f"{done:,}" + (f" of {total:,}" if total is not None else "") + (f" {self.unit}" if self.unit else "")
        parts = [f"{self.what}: {count}"]
        rate = (done - self.begun) / max(seconds, 1e-9)
        if rate > 0:
            parts.append(per_second(rate))
            if total is not None:
                parts.append(f"{duration((total - done) / rate)} left" if done < total else f"took {duration(seconds)}")
        return ", ".join(parts + ([note] if note else []))

    def bar(self, done: int, total: int | None) -> str:
        """Return a bar of the share that is done."""
        full = BAR * done // total if total else 0
        return f"{'━' * full}{'─' * (BAR - full)} " if total else ""

    def say(self, text: str) -> None:
        """Print a line of its own, above the terminal's line."""
        if not self.quiet:
            self.stream.write(("\r\x1b[K" if self.shown else "") + text + "\n")
            self.stream.flush()
            self.shown = False

    def close(self) -> None:
        """Leave the terminal's line as it is, and go on below it."""
        if self.shown:
            self.stream.write("\n")
            self.stream.flush()
            self.shown = False
