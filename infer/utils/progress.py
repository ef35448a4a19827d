"""How far long work is: how much of it, how fast, and how long the rest will take; and a line where it says nothing."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from shutil import get_terminal_size
from typing import TextIO

EVERY = 30.0  # seconds between lines where there is no terminal
SILENCE = 25.0  # seconds without a line after which a command says what it is at
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


class Heartbeat(threading.Thread):
    """Says what a command is at whenever that, or `Progress`, has said nothing for SILENCE seconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.at(None)
        self.said = self.since

    def begin(self) -> None:
        """Watch over a command, in the first process only."""
        if os.environ.get("RANK", "0") == "0":
            self.at("working")
            self.said = self.since
            if not self.is_alive():
                self.start()

    def at(self, what: str | None, since: float | None = None) -> None:
        """Name what the command is at, and since when; None: it waits for its user, who needs no lines."""
        self.what, self.since = what, time.monotonic() if since is None else since

    def run(self) -> None:
        while True:
            time.sleep(1)
            self.beat()

    def beat(self) -> None:
        """Say it, if it is time."""
        now, what = time.monotonic(), self.what
        if what is not None and now - self.said >= SILENCE:
            self.said = now
            clear = "\r\x1b[K" if sys.stderr.isatty() else ""
            print(f"{clear}{what} ({duration(now - self.since)} so far)", file=sys.stderr, flush=True)


HEARTBEAT = Heartbeat()


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Name what the command is at within the block."""
    before = HEARTBEAT.what, HEARTBEAT.since
    HEARTBEAT.at(what)
    try:
        yield
    finally:
        HEARTBEAT.at(*before)


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
        self.before = HEARTBEAT.what, HEARTBEAT.since
        if not quiet:
            HEARTBEAT.at(what)

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
        if not self.quiet:
            HEARTBEAT.at(*(self.before if finished else (self.counted(done, total), self.start)))
        if self.quiet or (now - self.last < (OFTEN if self.live else EVERY) and not finished):
            return
        self.last = HEARTBEAT.said = now
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
        parts = [self.counted(done, total)]
        rate = (done - self.begun) / max(seconds, 1e-9)
        if rate > 0:
            parts.append(per_second(rate))
            if total is not None:
                parts.append(f"{duration((total - done) / rate)} left" if done < total else f"took {duration(seconds)}")
        return ", ".join(parts + ([note] if note else []))

    def counted(self, done: int, total: int | None) -> str:
        """Return the words for so much work."""
        count = f"{done:,}" + (f" of {total:,}" if total is not None else "") + (f" {self.unit}" if self.unit else "")
        return f"{self.what}: {count}"

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
