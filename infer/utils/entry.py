"""From the command line to a command's end: its options, its errors in one sentence, Ctrl-C, and lines
while it works.

Used by the `main.py` stubs only; the rest of `infer` needs no Hydra.
"""

import os
import select
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from infer.utils.hub import refrain_from_silent_hub
from infer.utils.installation import describe_missing
from infer.utils.interrupts import INTERRUPTS, interrupted
from infer.utils.overrides import composed, help_text, in_one_sentence, merged, values
from infer.utils.progress import HEARTBEAT
from infer.utils.redact import redact_text

# Before torch is imported: its threads (GNU OpenMP's) spin while they wait, and two commands side by
# side take three times as much processor time for it.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

STOPPED = 3  # exit code of what was begun and could not go on
UNREAD = 141  # exit code where nobody reads the output any more, as a shell has it of other programs


class Stopped(Exception):
    """Raised to end what has begun; the message is one sentence that says why."""


def command_line() -> str:
    """Return this process's command as it was typed, for a report; without secrets."""
    program, *words = sys.argv
    return redact_text(shlex.join(["./launch.sh", *["train"] * (Path(program).parent.name == "train"), *words]))


def output_is_unread() -> bool:
    """Return whether whoever read stdout or stderr has gone, as `head` does behind its last line."""
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


@quiet_where_unread()
def entry(name: str, schema: type, run: Callable[[object], object], arguments: list[str] | None = None) -> None:
    """Compose conf/<name>.yaml with the overrides, check it against the dataclass `schema`, and call
    `run(config)`.

    Whatever the user got wrong is one sentence on stderr and exit code 2, before anything heavy is
    imported; the same goes for a ValueError or FileNotFoundError out of `run` (a missing model, say)
    and for a module that is not installed, and with exit code 3 for a Stopped and for other errors of
    files (`file_errors`). Ctrl-C is one sentence and exit code 130, see `going_on`. Where nobody reads the output any
    more, the command ends without a word and with exit code 141.
    `--help` explains every key, `--cfg job` prints the configuration.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if asked := {argument.split("=")[0] for argument in arguments} & {"--help", "-h", "--cfg", "-c"}:
            return show(name, schema, [a for a in arguments if "=" in a and not a.startswith("-")], asked)
        config = composed(name, schema, arguments)
        HEARTBEAT.begin()
        INTERRUPTS.begin()
        refrain_from_silent_hub(values(asdict(config)))
        run(config)
    except (ValueError, FileNotFoundError) as error:
        fail(str(error))
    except ModuleNotFoundError as error:
        fail_for_missing(error)
    except (Stopped, *file_errors()) as error:  # of a disk that is full or read-only, say
        if isinstance(error, BrokenPipeError) and output_is_unread():
            raise
        fail(str(error), STOPPED)
    except KeyboardInterrupt as error:
        interrupted(error)
    finally:
        HEARTBEAT.at(None)


def show(name: str, schema: type, arguments: list[str], asked: set[str]) -> None:
    """Print the help of a command, with the defaults that the arguments, a bundle of settings say,
    give; or the configuration that they stand for."""
    from omegaconf import OmegaConf

    with in_one_sentence():
        config = merged(name, schema, arguments)
        text = OmegaConf.to_yaml(config) if asked & {"--cfg", "-c"} else help_text(name, OmegaConf.to_object(config))
    print(text)


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
    """Raise Stopped, one sentence, for an error of writing: a disk that is full, read-only or gone."""
    try:
        yield
    except file_errors() as error:
        if isinstance(error, BrokenPipeError):  # of the output, not of a file
            raise
        why = getattr(error, "strerror", None) or error
        kept = "what was saved before is whole, and the same command goes on from there"
        raise Stopped(f"{what} could not be written: {why}; {kept}") from error


def fail_for_missing(error: ModuleNotFoundError) -> NoReturn:
    """End with a sentence about a module that is not installed. A missing module of our own is a defect,
    and stays an exception."""
    module = (error.name or "").partition(".")[0]
    if module in ("", "conf", "data", "infer", "train"):
        raise error
    fail(describe_missing(module))


def fail(message: str, code: int = 2) -> NoReturn:
    """End with a sentence on stderr and this exit code."""
    print(f"error: {redact_text(message)}", file=sys.stderr)
    raise SystemExit(code)
