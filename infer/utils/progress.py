"""How far long work is: how much of it, how fast, and how long the rest will take; and a line where
it says nothing."""

import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from shutil import get_terminal_size
from typing import TextIO

SECONDS_BETWEEN_LINES = 60.0  # where there is no terminal
SECONDS_TO_FIRST_LINE = 25.0  # of a command that has said nothing yet
SECONDS_BETWEEN_REWRITES = 0.1  # of a terminal's line


def duration(seconds: float) -> str:
    """Return a time in words: 40 s, 3 min, 2 h 05 min."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


class Heartbeat(threading.Thread):
    """Says what a command is at after SECONDS_TO_FIRST_LINE, and then whenever nothing was said for
    SECONDS_BETWEEN_LINES. Work that calls its `Progress` says so itself."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.at(None)
        self.heard = self.since  # when a line was printed, or a `Progress` was called
        self.spoke = False  # whether there was a line since the command began

    def begin(self) -> None:
        """Watch over a command, in the first process only."""
        if os.environ.get("RANK", "0") == "0":
            self.at("working")
            self.heard = self.since
            self.spoke = False
            if not self.is_alive():
                self.start()

    def at(self, what: str | None, since: float | None = None) -> None:
        """Name what the command is at, and since when; None: it waits for its user, who needs no
        lines."""
        self.what = what
        self.since = time.monotonic() if since is None else since

    def run(self) -> None:
        while True:
            time.sleep(1)
            self.beat()

    def beat(self) -> None:
        """Say it, if it is time."""
        now = time.monotonic()
        what = self.what
        patience = SECONDS_BETWEEN_LINES if self.spoke else SECONDS_TO_FIRST_LINE
        if what is not None and now - self.heard >= patience:
            self.heard = now
            self.spoke = True
            clear = "\r\x1b[K" if sys.stderr.isatty() else ""
            print(
                f"{clear}{what} ({duration(now - self.since)} so far)", file=sys.stderr, flush=True
            )


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
    """A line about work under way: rewritten on a terminal; elsewhere a line every minute, and one
    at the end.

    what: the work, "evaluating"; unit: what is counted, "prompts". begun: how much an earlier
        process
    had done, which the rate leaves out. quiet: show nothing at all (processes but the first).
    minutes: after which the work ends, however much is left; None: it is all done.
    """

    def __init__(
        self,
        what: str,
        unit: str = "",
        begun: int = 0,
        quiet: bool = False,
        stream: TextIO | None = None,
        minutes: float | None = None,
    ) -> None:
        self.what = what
        self.unit = unit
        self.begun = begun
        self.quiet = quiet
        self.own_stream = stream
        self.start = self.last = time.monotonic()
        self.until = math.inf if minutes is None else self.start + 60 * minutes
        self.done = begun
        self.shown = False  # whether the terminal's line holds something
        self.before = HEARTBEAT.what, HEARTBEAT.since
        if not quiet:
            HEARTBEAT.at(what)

    @property
    def stream(self) -> TextIO:
        """Where the lines go: standard error as it is now, if nothing else was given."""
        return self.own_stream or sys.stderr

    def __call__(self, done: int, total: int | None = None, note: str = "") -> None:
        """Report that so much is done; `total` where it is known, `note` for what else is worth a
        look."""
        now = time.monotonic()
        finished = total is not None and done >= total
        if done < self.done:  # the next work of the same kind
            self.start = now
            self.begun = done
        self.done = done
        if self.quiet:
            return
        count = (
            f"{self.what}: {done:,}{'' if total is None else f' of {total:,}'} {self.unit}".rstrip()
        )
        HEARTBEAT.at(*(self.before if finished else (count, self.start)))
        HEARTBEAT.heard = now
        live = self.stream.isatty()
        if (
            now - self.last >= (SECONDS_BETWEEN_REWRITES if live else SECONDS_BETWEEN_LINES)
            or finished
        ):
            self.last = now
            HEARTBEAT.spoke = True
            line = ", ".join(
                [count, *self.pace(done, total, now - self.start), *([note] if note else [])]
            )
            self.say(
                line[: get_terminal_size().columns - 1] if live else line,
                "" if live and not finished else "\n",
            )

    def pace(self, done: int, total: int | None, seconds: float) -> list[str]:
        """Return how fast it goes, and how long the rest will take, in words."""
        rate = (done - self.begun) / max(seconds, 1e-9)
        if rate == 0:
            return []
        words = [f"{rate:,.1f} a second" if rate >= 1 else f"{60 * rate:.1f} a minute"]
        if total is not None:
            left = min((total - done) / rate, max(0.0, self.until - time.monotonic()))
            words.append(f"{duration(left)} left" if done < total else f"took {duration(seconds)}")
        return words

    def say(self, text: str, end: str = "\n") -> None:
        """Print a line in the place of the terminal's line, if there is one."""
        if not self.quiet:
            print(("\r\x1b[K" if self.shown else "") + text, end=end, file=self.stream, flush=True)
            self.shown = end == ""

    def close(self) -> None:
        """Leave the terminal's line as it is, and go on below it."""
        if self.shown:
            print(file=self.stream, flush=True)
            self.shown = False
