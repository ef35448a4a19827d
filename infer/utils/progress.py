"""Print progress lines for long work, with the amount done, the rate and the remaining time.

A separate thread, the heartbeat, prints a line if a command has printed nothing for a while.
"""

import math
import os
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from shutil import get_terminal_size
from typing import TextIO

# Time between two lines of the heartbeat thread, and of a `Progress` whose output is not a
# terminal.
SECONDS_BETWEEN_PROGRESS_LINES = 60.0
# Time without output from the command after which the heartbeat thread prints its first line.
SECONDS_TO_FIRST_PROGRESS_LINE = 25.0
# Time between two updates of the progress line on a terminal.
SECONDS_BETWEEN_PROGRESS_LINE_REWRITES = 0.1
CLEAR_LINE = "\r\x1b[K"


def format_duration(seconds: float) -> str:
    """Return a duration as text, such as "40 s", "3 min" or "2 h 05 min"."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02} min"


class ActivityReporter(threading.Thread):
    """A thread that prints what the command is doing while the command itself prints nothing.

    The first line comes after SECONDS_TO_FIRST_PROGRESS_LINE without output, and later lines after
    SECONDS_BETWEEN_PROGRESS_LINES without output. While a `Progress` is updated, the thread prints
    nothing, because the `Progress` prints its own lines.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.set_activity(None)
        # `time.monotonic()` of the last line of this thread, or the last update of a `Progress`
        self.last_output_time = self.since
        self.has_printed = False  # whether this thread or a `Progress` has printed a line yet

    def start_watching(self) -> None:
        """Start the thread at the beginning of a command. Do nothing in distributed processes other
        than rank 0."""
        if os.environ.get("RANK", "0") != "0":
            return
        self.set_activity("working")
        self.last_output_time = self.since
        self.has_printed = False
        if not self.is_alive():
            self.start()

    def set_activity(self, activity: str | None, since: float | None = None) -> None:
        """Set the text about what the command is doing now.

        activity: the text; None means that the command waits for user input, and the thread prints
            nothing
        since: when the activity began, as `time.monotonic()`; None means now
        """
        self.activity = activity
        self.since = time.monotonic() if since is None else since

    def run(self) -> None:
        while True:
            time.sleep(1)
            self.print_if_silent()

    def print_if_silent(self) -> None:
        """Print the activity and its duration if nothing has been printed for long enough."""
        now = time.monotonic()
        activity = self.activity
        max_silence = (
            SECONDS_BETWEEN_PROGRESS_LINES if self.has_printed else SECONDS_TO_FIRST_PROGRESS_LINE
        )
        if activity is None or now - self.last_output_time < max_silence:
            return
        self.last_output_time = now
        self.has_printed = True
        prefix = CLEAR_LINE if sys.stderr.isatty() else ""
        line = f"{prefix}{activity} ({format_duration(now - self.since)} so far)"
        print(line, file=sys.stderr, flush=True)


HEARTBEAT = ActivityReporter()


@contextmanager
def set_activity_within_block(activity: str) -> Generator[None]:
    """Within the block, let the heartbeat thread print `activity` when the command has printed
    nothing for a while. Restore the previous text after the block.
    """
    previous_activity = HEARTBEAT.activity
    previous_since = HEARTBEAT.since
    HEARTBEAT.set_activity(activity)
    try:
        yield
    finally:
        HEARTBEAT.set_activity(previous_activity, previous_since)


class Progress:
    """Prints the progress of running work. Call the object with the amount done so far.

    On a terminal one line is rewritten in place. Otherwise a line is printed every minute and at
    the end.

    activity: the work, such as "evaluating"
    unit: what is counted, such as "prompts"
    initial_count: amount that was done before the work was resumed, which is not counted in the
        rate
    quiet: print nothing. Set it in all distributed processes except the first
    stream: where lines are printed; None means standard error
    minutes: time limit of the work; None means that the work has no time limit
    """

    def __init__(
        self,
        activity: str,
        unit: str = "",
        initial_count: int = 0,
        quiet: bool = False,
        stream: TextIO | None = None,
        minutes: float | None = None,
    ) -> None:
        self.activity = activity
        self.unit = unit
        self.initial_count = initial_count
        self.quiet = quiet
        self.explicit_stream = stream
        self.start_time = time.monotonic()
        self.last_line_time = self.start_time
        self.deadline = math.inf if minutes is None else self.start_time + 60 * minutes
        self.count = initial_count
        # whether the terminal's last line is a progress line that will be rewritten in place
        self.has_open_line = False
        self.previous_activity = HEARTBEAT.activity
        self.previous_since = HEARTBEAT.since
        if not quiet:
            HEARTBEAT.set_activity(activity)

    @property
    def stream(self) -> TextIO:
        """The stream to which lines are printed: the argument `stream`, or else `sys.stderr`."""
        return self.explicit_stream or sys.stderr

    def __call__(self, count: int, total: int | None = None, note: str = "") -> None:
        """Record that `count` of `total` units are done. Print a line if the last one was printed
        long enough ago.

        total: number of units of the whole work; None if the number is unknown
        note: text at the end of the line
        """
        now = time.monotonic()
        finished = total is not None and count >= total
        if count < self.count:  # a smaller count means that a new piece of work has started
            self.start_time = now
            self.initial_count = count
        self.count = count
        if self.quiet:
            return

        amount = f"{count:,}" if total is None else f"{count:,} of {total:,}"
        status = f"{self.activity}: {amount} {self.unit}".rstrip()
        if finished:
            HEARTBEAT.set_activity(self.previous_activity, self.previous_since)
        else:
            HEARTBEAT.set_activity(status, self.start_time)
        HEARTBEAT.last_output_time = now

        is_terminal = self.stream.isatty()
        min_interval = (
            SECONDS_BETWEEN_PROGRESS_LINE_REWRITES
            if is_terminal
            else SECONDS_BETWEEN_PROGRESS_LINES
        )
        if now - self.last_line_time < min_interval and not finished:
            return
        self.last_line_time = now
        HEARTBEAT.has_printed = True
        details = self.describe_rate_and_remaining_time(count, total, now - self.start_time)
        if note:
            details.append(note)
        line = ", ".join([status, *details])
        if is_terminal:
            line = line[: get_terminal_size().columns - 1]
        self.print_line(line, end="" if is_terminal and not finished else "\n")

    def describe_rate_and_remaining_time(
        self, count: int, total: int | None, seconds: float
    ) -> list[str]:
        """Return texts such as ["2.5 a second", "3 min left"] about the rate and the remaining
        time. Return an empty list if nothing has been done yet.

        seconds: time since the work started
        """
        rate = (count - self.initial_count) / max(seconds, 1e-9)
        if rate == 0:
            return []
        words = [f"{rate:,.1f} a second" if rate >= 1 else f"{60 * rate:.1f} a minute"]
        if total is None:
            return words
        if count < total:
            seconds_to_deadline = max(0.0, self.deadline - time.monotonic())
            seconds_left = min((total - count) / rate, seconds_to_deadline)
            words.append(f"{format_duration(seconds_left)} left")
        else:
            words.append(f"took {format_duration(seconds)}")
        return words

    def print_line(self, text: str, end: str = "\n") -> None:
        """Print a line. If a progress line is shown on a terminal, the new line replaces it."""
        if self.quiet:
            return
        prefix = CLEAR_LINE if self.has_open_line else ""
        print(prefix + text, end=end, file=self.stream, flush=True)
        self.has_open_line = end == ""

    def end_open_line(self) -> None:
        """End the progress line on the terminal, if there is one, so that later output starts on a
        new line.
        """
        if self.has_open_line:
            print(file=self.stream, flush=True)
            self.has_open_line = False
