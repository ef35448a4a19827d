"""Progress lines: one line on a terminal, otherwise one every minute."""

import io
import pickle
import sys

import pytest

from infer.utils import progress as module
from infer.utils.progress import ActivityReporter, Progress, set_activity_within_block


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch):
    """A clock that does not run: advance it with `clock[0] += seconds`."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_without_a_terminal_a_line_every_minute(clock):
    out = io.StringIO()
    progress = Progress("regenerating", "rows", initial_count=100, stream=out)
    for done in range(101, 261):
        clock[0] += 1
        progress(done, 260, "2 failed" if done > 190 else "")
    assert out.getvalue().splitlines() == [
        "regenerating: 160 of 260 rows, 1.0 a second, 2 min left",
        "regenerating: 220 of 260 rows, 1.0 a second, 40 s left, 2 failed",
        "regenerating: 260 of 260 rows, 1.0 a second, took 3 min, 2 failed",
    ]


def test_a_limit_of_time_bounds_what_is_left(clock):
    out = io.StringIO()
    progress = Progress("evaluating", "prompts", stream=out, minutes=3)
    for done in (1, 2, 3):
        clock[0] += 60
        progress(done, 100)
    assert [line.split(", ")[2] for line in out.getvalue().splitlines()] == [
        "2 min left",
        "1 min left",
        "0 s left",
    ]


def test_on_a_terminal_one_line(clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    out = Terminal()
    progress = Progress("counting", "tokens", stream=out)
    clock[0] += 10
    progress(5_000)
    progress(5_001)  # a moment later: not worth a change
    clock[0] += 10
    progress(20_000, 40_000)
    progress.print_line("a sentence")
    clock[0] += 20
    progress(40_000, 40_000)
    lines = [line for line in out.getvalue().replace("\n", "\r\x1b[K").split("\r\x1b[K") if line]
    assert lines[:3] == [
        "counting: 5,000 tokens, 500.0 a second",
        "counting: 20,000 of 40,000 tokens, 1,000.0 a second, 20 s left",
        "a sentence",
    ]
    assert out.getvalue().endswith("took 40 s\n")


def test_the_next_set_has_a_rate_of_its_own_and_quiet_is_quiet(clock):
    out = io.StringIO()
    progress = Progress("asking", "questions", stream=out)
    clock[0] += 1000
    progress(10, 10)
    for done in (1, 2):
        clock[0] += 40
        progress(done, 2)
    assert out.getvalue().splitlines()[-1] == "asking: 2 of 2 questions, 1.5 a minute, took 40 s"
    silent = Progress("training", quiet=True, stream=out)
    before = out.getvalue()
    silent(10, 10)
    silent.print_line("x")
    assert out.getvalue() == before
    assert (
        pickle.loads(pickle.dumps(Progress("tokenising", "texts"))).activity == "tokenising"
    )  # to other processes


def test_the_heartbeat_prints_the_activity_of_silent_work(clock, monkeypatch, capsys):
    heart = ActivityReporter()
    monkeypatch.setattr(module, "HEARTBEAT", heart)
    monkeypatch.setattr(ActivityReporter, "start", lambda self: None)

    def wait(seconds: int) -> list[str]:
        for _ in range(seconds):
            clock[0] += 1
            heart.print_if_silent()
        return capsys.readouterr().err.splitlines()

    assert wait(60) == []  # no command
    heart.start_watching()
    assert wait(90) == ["working (25 s so far)", "working (1 min so far)"]
    with set_activity_within_block("loading a model"):
        assert wait(60) == ["loading a model (55 s so far)"]
    progress = Progress("evaluating", "prompts", stream=io.StringIO())
    progress(1, 3)
    assert wait(61) == ["evaluating: 1 of 3 prompts (1 min so far)"]
    clock[0] += 10
    progress(2, 3)  # prints its own line
    assert wait(59) == [] and wait(1) == ["evaluating: 2 of 3 prompts (2 min so far)"]
    progress(3, 3)
    assert wait(60) == ["working (6 min so far)"]
    heart.set_activity(None)  # the command waits for its user
    assert wait(60) == []


@pytest.mark.parametrize("seconds_a_step", [0.5, 8, 40, 200])
def test_a_run_of_steps_prints_one_line_a_minute(clock, monkeypatch, capsys, seconds_a_step):
    """The heartbeat adds no line to those of the progress, unless a step takes over a minute."""
    heart = ActivityReporter()
    monkeypatch.setattr(module, "HEARTBEAT", heart)
    monkeypatch.setattr(ActivityReporter, "start", lambda self: None)
    heart.start_watching()
    progress = Progress("training", "steps", stream=sys.stderr)
    start_time = clock[0]
    step = 0
    while clock[0] < start_time + 3600:
        step += 1
        heart.set_activity(f"training: step {step}")
        for _ in range(max(1, round(seconds_a_step))):
            clock[0] += min(1, seconds_a_step)
            heart.print_if_silent()
        progress(step, 10_000)
    lines = capsys.readouterr().err.splitlines()
    assert 36 <= len(lines) <= 72
    assert seconds_a_step > 60 or len([line for line in lines if "so far" in line]) <= 1
