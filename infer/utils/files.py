"""Files that are whole or as they were before whenever the process is killed, and hold no secrets;
their modes, their digests, and the refusal to go on with what was begun with other settings."""

import hashlib
import json
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TextIO

from infer.utils.redact import redact, redact_text

if TYPE_CHECKING:
    import torch

READABLE = (
    0o644  # of model files: engines of other users read them, and safetensors alone gives 0600
)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a hidden path beside `path` to write to; it takes the place of `path`, synced, if the
    block succeeds. An OSError that names no file, as of a full disk, names `path`."""
    fresh = path.with_name(f".{path.name}")
    try:
        fresh.unlink(missing_ok=True)
        yield fresh
        sync(fresh)
        fresh.replace(path)
    except BaseException as error:
        fresh.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Give a hidden folder of the same name to fill; it takes the place of `path`, which is not
    there or empty, if the block succeeds, and nothing is left of it otherwise."""
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.absolute().parent, prefix=f".{path.name}.") as aside:
        (fresh := Path(aside) / path.name).mkdir()
        yield fresh
        fresh.replace(path)


def atomic_write(path: Path, text: str) -> None:
    """Write a text file, whole or not at all, without secrets (`infer.utils.redact`)."""
    with replacing(path) as fresh:
        fresh.write_text(redact_text(text), encoding="utf-8")


def write_json(path: Path, value: object) -> None:
    """Write a value as JSON, whole or not at all, without secrets."""
    atomic_write(path, json.dumps(redact(value), indent=1) + "\n")


def save_readable(
    tensors: "dict[str, torch.Tensor]", file: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file that other users can read. Raises OSError where it cannot be
    written."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, file, metadata=metadata)
    except SafetensorError as error:
        raise OSError(f"{file} could not be written: {error}") from error
    file.chmod(READABLE)


class NotReadable(ValueError):
    """A file is of a kind or size that must not be read; the message says which."""


def read_text(path: Path, most: int) -> str:
    """Return the text of a regular file of at most `most` bytes. Nothing else is opened: a device
    never ends, and a pipe waits for a writer. Raises NotReadable, and OSError as `open` does."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise NotReadable(f"{path.name} is no regular file, but a device, pipe or folder")
    if status.st_size > most:
        raise NotReadable(f"{path.name} has {status.st_size} bytes: exceeds the limit of {most}")
    return path.read_text(encoding="utf-8")


@contextmanager
def locked(file: Path, what: str, instead: str) -> Iterator[None]:
    """Lock `what`, which is written by one process at once, by a file of its own, which is removed
    behind the block; the kernel releases the lock however the process ends. Raises ValueError when
    another process has it; `instead` says what to choose then."""
    with lock_file(file, what, instead) as lock:
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        try:
            yield
        finally:
            file.unlink(
                missing_ok=True
            )  # before the lock is released: `lock_file` sees that it has gone


def lock_file(file: Path, what: str, instead: str) -> TextIO:
    """Return the open file with its lock, for `locked`."""
    import fcntl

    while True:
        lock = file.open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            with lock:
                lock.seek(0)
                holder = lock.read().strip() or "another process"
            raise ValueError(
                f"{what} is being written by {holder}: wait for it, stop it, or choose another {instead}"
            ) from error
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), file.stat()):
                return lock
        lock.close()  # its last holder has removed it since it was opened


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_digest(value: object) -> str:
    """Return the SHA-256 of a JSON value, however its file is laid out."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def differences(known: object, wanted: object, prefix: str = "") -> list[str]:
    """Return the dotted keys under which two nested dictionaries differ."""
    if isinstance(known, dict) and isinstance(wanted, dict):
        keys = dict.fromkeys((*wanted, *known))
        return [
            d
            for key in keys
            for d in differences(known.get(key), wanted.get(key), f"{prefix}{key}.")
        ]
    return [] if known == wanted else [prefix.removesuffix(".")]


def refuse_other_settings(
    known: dict, wanted: dict, message: str, free: tuple[str, ...] = ()
) -> None:
    """Raise ValueError if what is on the disk was begun with other settings than those wanted now.
    The message has {keys} where the differing keys go; keys that start with one of `free` may
    differ. Secrets are not compared: what was written has none."""
    changed = differences(redact(known), redact(json.loads(json.dumps(wanted))))
    changed = [key for key in changed if not key.startswith(free)]
    if changed:
        raise ValueError(message.replace("{keys}", ", ".join(changed)))
