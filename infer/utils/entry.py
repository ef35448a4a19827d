"""From the command line to a command's end: its options, its errors in one sentence, Ctrl-C, and lines
while it works.

Used by the `main.py` stubs only; the rest of `infer` needs no Hydra.
"""

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from infer.utils.hub import refrain_from_silent_hub
from infer.utils.interrupts import INTERRUPTS, interrupted
from infer.utils.overrides import composed, help_text, in_one_sentence, merged, values
from infer.utils.progress import HEARTBEAT
from infer.utils.redact import redact_text

# Before torch is imported: its threads (GNU OpenMP's) spin while they wait, and two commands side by
# side take three times as much processor time for it.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

STOPPED = 3  # exit code of what was begun and could not go on


class Stopped(Exception):
    """Raised to end what has begun; the message is one sentence that says why."""


def command_line() -> str:
    """Return this process's command as it was typed, for a report; without secrets."""
    program, *words = sys.argv
    return redact_text(shlex.join(["./launch.sh", *["train"] * (Path(program).parent.name == "train"), *words]))


def entry(name: str, schema: type, run: Callable[[object], object], arguments: list[str] | None = None) -> None:
    """Compose conf/<name>.yaml with the overrides, check it against the dataclass `schema`, and call
    `run(config)`.

    Whatever the user got wrong is one sentence on stderr and exit code 2, before anything heavy is
    imported; the same goes for a ValueError or FileNotFoundError out of `run` (a missing model, say),
    and with exit code 3 for a Stopped and for other errors of files (`file_errors`).
    Ctrl-C is one sentence and exit code 130, see `going_on`.
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
    except (Stopped, *file_errors()) as error:  # of a disk that is full or read-only, say
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
        why = getattr(error, "strerror", None) or error
        kept = "what was saved before is whole, and the same command goes on from there"
        raise Stopped(f"{what} could not be written: {why}; {kept}") from error


def fail(message: str, code: int = 2) -> None:
    print(f"error: {redact_text(message)}", file=sys.stderr)
    raise SystemExit(code)
