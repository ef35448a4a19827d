"""How a command ends: errors are printed as one sentence and have exit codes, and Ctrl-C, full
disks and closed pipes are handled."""

import os
import select
import shlex
import sys
import traceback
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from infer.utils.installation import describe_missing_module
from infer.utils.interrupts import exit_after_interrupt
from infer.utils.progress import HEARTBEAT
from infer.utils.redact import redact_text

# This must be set before torch is imported. By default, idle threads of GNU OpenMP wait in a busy
# loop, so that two commands that run at the same time take three times as much processor time.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

EXIT_CODE_RUN_ABORTED = 3  # the command had started its work and could not continue
EXIT_CODE_BROKEN_PIPE = 141  # 128 + SIGPIPE, the code that shells report for other programs


class RunAborted(Exception):
    """An error that ends work that has already started. Its message is one sentence."""


def redacted_command_line() -> str:
    """Return the command line of this process for a report, with secrets replaced."""
    program, *arguments = sys.argv
    words = ["./launch.sh", *arguments]
    if Path(program).parent.name == "train":
        words.insert(1, "train")
    return redact_text(shlex.join(words))


def is_output_pipe_closed() -> bool:
    """Return whether stdout or stderr is a pipe whose reader has closed it, as `head` does."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        # A stream that is not a file has no descriptor to poll.
        with suppress(AttributeError, OSError, ValueError):
            poll.register(stream.fileno(), 0)  # with the event mask 0, poll reports only errors
    return bool(poll.poll(0))


@contextmanager
def exit_quietly_on_broken_pipe() -> Generator[None]:
    """End the process without a message if the reader of the process's output closes the pipe."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
    except BrokenPipeError:
        if is_output_pipe_closed():
            # A normal exit would flush the streams once more, which would print an error.
            os._exit(EXIT_CODE_BROKEN_PIPE)
        raise


@contextmanager
def report_errors_and_exit() -> Generator[None]:
    """Print an error that the block raises, and end the process.

    | error | output | exit code |
    | --- | --- | --- |
    | ValueError, FileNotFoundError, a Python module that is not installed | a sentence | 2 |
    | RunAborted, OSError, SafetensorError | a sentence | 3 |
    | KeyboardInterrupt (see `explain_interrupt`) | a sentence | 130 |
    | any other exception | a traceback without secrets | 1 |
    """
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        exit_with_error(str(error))
    except ModuleNotFoundError as error:
        exit_for_missing_module(error)
    except (RunAborted, *file_error_types()) as error:
        if isinstance(error, BrokenPipeError) and is_output_pipe_closed():
            os._exit(EXIT_CODE_BROKEN_PIPE)
        exit_with_error(str(error), EXIT_CODE_RUN_ABORTED)
    except KeyboardInterrupt as error:
        exit_after_interrupt(error)
    except Exception:  # noqa: BLE001
        print(redact_text(traceback.format_exc()), file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        HEARTBEAT.set_activity(None)


@contextmanager
def explain_interrupt(explanation: str) -> Generator[None]:
    """Attach `explanation` to the KeyboardInterrupt that Ctrl-C raises within the block. The
    explanation says what was saved and how to continue."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(explanation) from error


def file_error_types() -> tuple[type[Exception], ...]:
    """Return the exception classes that reading and writing files raises, including the one of
    safetensors."""
    from safetensors import SafetensorError

    return (OSError, SafetensorError)


@contextmanager
def abort_on_write_error(output_name: str) -> Generator[None]:
    """Raise RunAborted if the block cannot write its files, because a disk is full, read-only or
    missing.

    output_name: what the block writes, for the message

    BrokenPipeError is raised unchanged, because it concerns the command's output and not a file.
    """
    try:
        yield
    except file_error_types() as error:
        if isinstance(error, BrokenPipeError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise RunAborted(
            f"{output_name} could not be written: {reason}; what was saved before is complete, "
            "and the same command goes on from there"
        ) from error


def exit_for_missing_module(error: ModuleNotFoundError) -> NoReturn:
    """Print a sentence about a Python module that is not installed, and end the process.

    If the missing module belongs to this project, that is a bug, and the exception is raised again.
    """
    module = (error.name or "").partition(".")[0]
    if module in ("", "conf", "data", "infer", "train"):
        raise error
    exit_with_error(describe_missing_module(module))


def exit_with_error(message: str, code: int = 2) -> NoReturn:
    """Print an error message to stderr, with secrets replaced, and end the process with the exit
    code `code`."""
    print(f"error: {redact_text(message)}", file=sys.stderr)
    raise SystemExit(code)
