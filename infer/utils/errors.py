"""How a command ends: errors in one sentence and their exit codes, Ctrl-C, full disks, and output
that nobody reads any more."""

import os
import select
import shlex
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from infer.utils.installation import describe_missing
from infer.utils.interrupts import interrupted
from infer.utils.progress import HEARTBEAT
from infer.utils.redact import redact_text

# Before torch is imported: its threads (GNU OpenMP's) spin while they wait, and two commands side
# by side take three times as much processor time for it.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

STOPPED = 3  # exit code of what was begun and could not go on
UNREAD = (
    141  # exit code where nobody reads the output any more, as a shell has it of other programs
)


class Stopped(Exception):
    """Raised to end what has begun; the message is one sentence that says why."""


def command_line() -> str:
    """Return this process's command as it was typed, for a report; without secrets."""
    program, *words = sys.argv
    return redact_text(
        shlex.join(["./launch.sh", *["train"] * (Path(program).parent.name == "train"), *words])
    )


def output_is_unread() -> bool:
    """Return whether whoever read stdout or stderr has gone, as `head` does behind its last
    line."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # of streams that are no files
            poll.register(stream.fileno(), 0)  # errors are always told
    return bool(poll.poll(0))


@contextmanager
def quiet_where_unread() -> Iterator[None]:
    """End the process without a word where nobody reads its output any more."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
    except BrokenPipeError:
        if output_is_unread():
            os._exit(UNREAD)  # its end would flush again, and say that it cannot
        raise


@contextmanager
def errors_in_one_sentence() -> Iterator[None]:
    """End the process for an error within the block.

    What the user got wrong (ValueError, FileNotFoundError, a module that is not installed) is one
    sentence on stderr and exit code 2. Stopped and errors of files are one sentence and exit code
    3. Ctrl-C is one sentence and exit code 130, see `going_on`. Anything else is a traceback
    without secrets, and exit code 1.
    """
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        fail(str(error))
    except ModuleNotFoundError as error:
        fail_for_missing(error)
    except (Stopped, *file_errors()) as error:  # of a disk that is full or read-only, say
        if isinstance(error, BrokenPipeError) and output_is_unread():
            os._exit(UNREAD)
        fail(str(error), STOPPED)
    except KeyboardInterrupt as error:
        interrupted(error)
    except Exception:  # noqa: BLE001
        print(redact_text(traceback.format_exc()), file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        HEARTBEAT.at(None)


@contextmanager
def going_on(how: str) -> Iterator[None]:
    """Give Ctrl-C within the block a sentence that says what is kept and how to go on."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(how) from error


def file_errors() -> tuple[type[Exception], ...]:
    """Return the kinds of errors that reading and writing files raises; safetensors has its own."""
    from safetensors import SafetensorError

    return (OSError, SafetensorError)


@contextmanager
def disk(what: str) -> Iterator[None]:
    """Raise Stopped, one sentence, for an error of writing: a disk that is full, read-only or
    gone."""
    try:
        yield
    except file_errors() as error:
        if isinstance(error, BrokenPipeError):  # of the output, not of a file
            raise
        why = getattr(error, "strerror", None) or error
        kept = "what was saved before is whole, and the same command goes on from there"
        raise Stopped(f"{what} could not be written: {why}; {kept}") from error


def fail_for_missing(error: ModuleNotFoundError) -> NoReturn:
    """End with a sentence about a module that is not installed. A missing module of our own is a
    defect, and stays an exception."""
    module = (error.name or "").partition(".")[0]
    if module in ("", "conf", "data", "infer", "train"):
        raise error
    fail(describe_missing(module))


def fail(message: str, code: int = 2) -> NoReturn:
    """End with a sentence on stderr and this exit code."""
    print(f"error: {redact_text(message)}", file=sys.stderr)
    raise SystemExit(code)
