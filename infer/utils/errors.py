"""Convert errors, including Ctrl-C, full disks and closed output pipes, to one sentence on stderr
and an exit code.
"""

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

# Let idle OpenMP threads sleep instead of waiting in a busy loop. With busy loops, two commands
# that run at the same time need three times as much CPU time. This must be set before torch is
# imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

EXIT_CODE_RUN_ABORTED = 3  # the command started its work, but could not finish it
EXIT_CODE_BROKEN_PIPE = 141  # 128 + SIGPIPE, as shells report for programs killed by SIGPIPE


class RunAborted(Exception):
    """Raised when work that has already started cannot continue. The message is for the user."""


def redacted_command_line() -> str:
    """Return the command line of this process as ./launch.sh command, with secrets replaced."""
    program, *arguments = sys.argv
    words = ["./launch.sh", *arguments]
    if Path(program).parent.name == "train":
        words.insert(1, "train")
    return redact_text(shlex.join(words))


def is_output_pipe_closed() -> bool:
    """Return whether stdout or stderr is a pipe whose reading process has closed it or ended, such
    as `head`."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        # `fileno` fails for a stream that is not a file, which cannot be a pipe either.
        with suppress(AttributeError, OSError, ValueError):
            poll.register(stream.fileno(), 0)  # with the event mask 0, poll reports only errors
    return bool(poll.poll(0))


@contextmanager
def exit_quietly_on_broken_pipe() -> Generator[None]:
    """End the process without a message if its output goes to a pipe and the pipe is closed."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
    except BrokenPipeError:
        if is_output_pipe_closed():
            # `sys.exit` would flush stdout and stderr once more, and print an error about the pipe.
            os._exit(EXIT_CODE_BROKEN_PIPE)
        raise


@contextmanager
def report_errors_and_exit() -> Generator[None]:
    """If the block raises an error, print it and end the process.

    | error | printed | exit code |
    | --- | --- | --- |
    | ValueError, FileNotFoundError, a Python module that is not installed | a sentence | 2 |
    | RunAborted, OSError, SafetensorError | a sentence | 3 |
    | KeyboardInterrupt (see `set_interrupt_message`) | a sentence | 130 |
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
def set_interrupt_message(explanation: str) -> Generator[None]:
    """Set the message of the KeyboardInterrupt if Ctrl-C is pressed within the block. `explanation`
    tells the user what was saved and how to continue."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(explanation) from error


def file_error_types() -> tuple[type[Exception], ...]:
    """Return the exception classes for errors in reading and writing files: OSError and
    SafetensorError."""
    from safetensors import SafetensorError

    return (OSError, SafetensorError)


@contextmanager
def abort_on_write_error(output_name: str) -> Generator[None]:
    """Convert write errors in the block to RunAborted, for example if the disk is full.

    output_name: what the block writes, for the message

    BrokenPipeError is not converted, because it concerns stdout or stderr and not a file.
    """
    try:
        yield
    except file_error_types() as error:
        if isinstance(error, BrokenPipeError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise RunAborted(
            f"{output_name} could not be written: {reason}; what was saved before is complete. "
            "Solve the problem, and run the same command again to continue"
        ) from error


def exit_for_missing_module(error: ModuleNotFoundError) -> NoReturn:
    """Print that a Python module is not installed and how to install it, and end the process.

    If the missing module is part of this project, `error` is raised again, because it is a bug.
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
