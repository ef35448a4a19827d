"""Model folders that this program creates in the Hugging Face hub's cache, for example from GGUF
files. A folder is created once from a source file. Its files are checked at every use. A damaged
folder is created again."""

import fcntl
import hashlib
import json
import shutil
import sys
import zlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from huggingface_hub import constants
from safetensors import SafetensorError

from infer.utils.files import write_json
from infer.utils.progress import set_activity_within_block

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# The manifest, which contains the size and checksum of every other file in the folder.
CACHE_MANIFEST_FILE = "blockdraft-cache.json"
CHECKSUM_BLOCK_BYTES = 1 << 20
# A checksum covers about this many blocks at most. The blocks of a larger file are evenly spaced.
MAX_CHECKSUM_BLOCKS = 256

Source = TypeVar("Source")


def derived_files_folder(name: str, source: str) -> Path:
    """Return the folder, inside the Hugging Face hub's cache, for files that are derived from a
    source file. The folder need not exist.

    name: the beginning of the folder's name
    source: a text that identifies the source file, such as its name, size and modification time
    """
    digest = hashlib.sha256(source.encode()).hexdigest()
    return Path(constants.HF_HOME) / "blockdraft" / f"{name}-{digest[:8]}"


def get_or_create_cached_folder(
    folder: Path,
    message: str,
    open_source: Callable[[], Source],
    write_folder: Callable[[Source, Path], None],
) -> Path:
    """Return a folder of the cache, after creating it if it is missing or damaged.

    The first process that needs the folder creates it, and other processes wait. A folder is
    deleted and created again if it is damaged, or if an early version of this program created it
    without a manifest.

    folder: the folder, from `derived_files_folder`
    message: printed, and shown as progress, while the folder is created
    open_source: opens and checks the source file; called before `message` is printed, so that an
        exception for a damaged file is the only output
    write_folder: called with the opened source and the path of the folder to write

    Raises OSError with a one-sentence message if the folder cannot be written. A partly written
    folder is deleted.
    """
    if find_cache_problem(folder) is None:
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        # The operating system releases the lock when the process ends, even if it is killed.
        fcntl.flock(lock, fcntl.LOCK_EX)
        problem = find_cache_problem(folder)
        if problem is None:  # another process created the folder meanwhile
            return folder
        source = open_source()
        if folder.exists():
            message += f", again: {problem}"
        print(message, file=sys.stderr, flush=True)
        partial_folder = folder.with_name(f".{folder.name}")
        # A killed process may have left a partial folder.
        for stale_folder in (folder, partial_folder):
            shutil.rmtree(stale_folder, ignore_errors=True)
        try:
            with set_activity_within_block(message):
                write_folder(source, partial_folder)
            manifest = {"files": compute_file_sizes_and_checksums(partial_folder)}
            write_json(partial_folder / CACHE_MANIFEST_FILE, manifest)
            partial_folder.replace(folder)
        except OSError as error:
            raise OSError(
                f"{folder} could not be written: {error.strerror or error}; free some space, or "
                "set HF_HOME to a folder on another disk"
            ) from error
        finally:
            shutil.rmtree(partial_folder, ignore_errors=True)
    return folder


def save_model(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", folder: Path
) -> None:
    """Save a model and its tokenizer as a Hugging Face folder. Raises OSError if the disk is full
    or read-only. The libraries raise other exceptions in this case, which are converted."""
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except Exception as error:
        if isinstance(error, SafetensorError) or "os error" in str(error):
            raise OSError(" ".join(str(error).split())) from error
        raise


def find_cache_problem(folder: Path) -> str | None:
    """Return a description of what is wrong with a folder of the cache, or None if nothing is
    wrong."""
    if not folder.is_dir():
        return "the folder does not exist"
    files = sorted(file for file in folder.iterdir() if file.is_file())
    stats = [(file.name, file.stat()) for file in files]
    stamps = tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
    return compare_with_manifest(folder, stamps)


@lru_cache(maxsize=64)
def compare_with_manifest(folder: Path, stamps: tuple[tuple[str, int, int], ...]) -> str | None:
    """Return a description of the first file in a folder whose size or checksum differs from the
    folder's manifest; None if no file differs.

    stamps: (name, size, modification time) of every file; part of this function's cache key, so
        that files are read again only after they have changed
    """
    if CACHE_MANIFEST_FILE not in {name for name, *_ in stamps}:
        return "the existing folder was written by an earlier version"
    damaged_files = []
    try:
        manifest = json.loads((folder / CACHE_MANIFEST_FILE).read_text(encoding="utf-8"))
        expected = manifest["files"]
        actual = compute_file_sizes_and_checksums(folder)
        for name in sorted({*expected, *actual}):
            if expected.get(name) != actual.get(name):
                damaged_files.append(name)
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        damaged_files = [CACHE_MANIFEST_FILE]
    if damaged_files:
        return f"{damaged_files[0]} in the existing folder is damaged"
    return None


def compute_file_sizes_and_checksums(folder: Path) -> dict[str, list[int]]:
    """Return [size, checksum] of every file in a folder except the manifest, by file name."""
    files = sorted(
        file for file in folder.iterdir() if file.is_file() and file.name != CACHE_MANIFEST_FILE
    )
    return {file.name: [file.stat().st_size, sampled_file_checksum(file)] for file in files}


def sampled_file_checksum(file: Path) -> int:
    """Return the Adler-32 checksum of a file. It covers only evenly spaced blocks of a large
    file."""
    size = file.stat().st_size
    step = max(CHECKSUM_BLOCK_BYTES, size // MAX_CHECKSUM_BLOCKS)
    value = 1
    with file.open("rb") as content:
        for start in range(0, size, step):
            content.seek(start)
            value = zlib.adler32(content.read(CHECKSUM_BLOCK_BYTES), value)
    return value
