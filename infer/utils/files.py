"""Read and write files: atomic writes without secrets, lock files, digests, and comparison of saved
settings.

An atomic write leaves either the complete new file or the previous file, even if the process is
killed while it writes.
"""

import hashlib
import json
import os
import socket
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TextIO

from infer.utils.redact import redact, redact_text

if TYPE_CHECKING:
    import torch

# File mode of model files, with which other users may read them. safetensors creates files with
# mode 0600, which only their owner may read.
SHARED_FILE_MODE = 0o644


@contextmanager
def atomic_replace_file(path: Path) -> Generator[Path]:
    """Yield a hidden temporary path next to `path`, to which the block must write. If the block
    succeeds, rename the temporary file to `path`.

    The file is synced to disk before it is renamed. If the block fails, the temporary file is
    removed. If the block raises an OSError without a file name, as for a full disk, the name of
    `path` is added to the error.
    """
    temporary_path = path.with_name(f".{path.name}")
    try:
        temporary_path.unlink(missing_ok=True)
        yield temporary_path
        fsync_path(temporary_path)
        temporary_path.replace(path)
    except BaseException as error:
        temporary_path.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def atomic_create_folder(path: Path) -> Generator[Path]:
    """Yield a temporary folder, into which the block must write. If the block succeeds, rename the
    folder to `path`.

    `path` must not exist, or must be an empty folder. If the block fails, the temporary folder is
    removed.
    """
    parent = path.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=parent, prefix=f".{path.name}.") as temporary_parent:
        temporary_folder = Path(temporary_parent) / path.name
        temporary_folder.mkdir()
        yield temporary_folder
        temporary_folder.replace(path)


def atomic_write(path: Path, text: str) -> None:
    """Write a text file atomically, with secrets replaced (`infer.utils.redact`)."""
    with atomic_replace_file(path) as temporary_path:
        temporary_path.write_text(redact_text(text), encoding="utf-8")


def write_json(path: Path, value: object) -> None:
    """Write a value as a JSON file atomically, with secrets replaced (`infer.utils.redact`)."""
    atomic_write(path, json.dumps(redact(value), indent=1) + "\n")


def save_world_readable_safetensors(
    tensors: "dict[str, torch.Tensor]", file: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write tensors to a safetensors file that all users of the machine may read.

    Raises OSError if the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, file, metadata=metadata)
    except SafetensorError as error:
        raise OSError(f"{file} could not be written: {error}") from error
    file.chmod(SHARED_FILE_MODE)


class RefusedFileError(ValueError):
    """Raised if a path is not a regular file, or the file is larger than allowed."""


def read_small_regular_file(path: Path, max_bytes: int) -> str:
    """Return the text of a regular file of at most `max_bytes` bytes.

    Devices and pipes are never opened: a device may have no end, and a pipe may block until another
    process writes to it. Raises RefusedFileError if `path` is not a regular file or the file is too
    large. Raises OSError if the file cannot be read.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise RefusedFileError(f"{path.name} is a device, pipe or folder; give a regular file")
    if status.st_size > max_bytes:
        raise RefusedFileError(
            f"{path.name} has {status.st_size} bytes, but at most {max_bytes} bytes are allowed"
        )
    return path.read_text(encoding="utf-8")


@contextmanager
def hold_lock_file(lock_path: Path, output_name: str, option: str) -> Generator[None]:
    """Hold a lock within the block, so that only one process at a time writes an output.

    lock_path: the lock file, which is removed after the block
    output_name: the output that the lock protects, for the error message
    option: the option with which the user chooses another output, such as "out="

    The operating system releases the lock even if the process is killed. Raises ValueError if
    another process holds the lock.
    """
    with acquire_lock_file(lock_path, output_name, option) as lock:
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        try:
            yield
        finally:
            # Another process may already have opened this file. That process notices in
            # `acquire_lock_file` that the file was removed.
            lock_path.unlink(missing_ok=True)


def acquire_lock_file(lock_path: Path, output_name: str, option: str) -> TextIO:
    """Open a lock file, acquire its lock, and return the open file. The arguments are those of
    `hold_lock_file`. Raises ValueError if another process holds the lock."""
    import fcntl

    while True:
        lock = lock_path.open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            with lock:
                lock.seek(0)
                holder = lock.read().strip() or "another process"
            raise ValueError(
                f"{output_name} is being written by {holder}; wait for that process, stop it, or "
                f"choose another {option}"
            ) from error

        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), lock_path.stat()):
                return lock
        # The process that held the lock before has removed the file between `open` and `flock`. Try
        # again with a new file.
        lock.close()


def fsync_path(path: Path) -> None:
    """Wait until a file's content, or a folder's list of entries, has been written to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's content in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_digest(value: object) -> str:
    """Return the SHA-256 of a JSON value in hexadecimal. The order of the keys has no influence."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def find_changed_keys(saved: object, current: object, prefix: str = "") -> list[str]:
    """Compare two nested dictionaries. Return the keys with different values, such as
    "optim.batch_size".

    prefix: the dotted key of the dictionaries themselves, for the recursion
    """
    if not isinstance(saved, dict) or not isinstance(current, dict):
        return [] if saved == current else [prefix.removesuffix(".")]
    changed_keys = []
    for key in dict.fromkeys((*current, *saved)):
        changed_keys += find_changed_keys(saved.get(key), current.get(key), f"{prefix}{key}.")
    return changed_keys


def refuse_changed_settings(
    saved: dict, current: dict, message: str, ignored_prefixes: tuple[str, ...] = ()
) -> None:
    """Raise ValueError if the current settings differ from those with which an output, such as the
    folder of a training run, was started.

    saved: the settings that are stored with the output; secrets were replaced and are not compared
    current: the current settings
    message: the error message, in which {keys} is replaced by the changed keys
    ignored_prefixes: settings whose keys start with one of these texts may differ
    """
    json_settings = json.loads(json.dumps(current))
    changed_keys = find_changed_keys(redact(saved), redact(json_settings))
    changed_keys = [key for key in changed_keys if not key.startswith(ignored_prefixes)]
    if changed_keys:
        raise ValueError(message.replace("{keys}", ", ".join(changed_keys)))
