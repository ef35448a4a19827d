"""Model folders in the hub's cache, such as converted GGUF files: created once from a source,
checked at every use, and created again if they are damaged."""

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
from infer.utils.progress import report_activity

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# file with the size and checksum of every other file of a folder
CACHE_MANIFEST_FILE = "blockdraft-cache.json"
CHECKSUM_BLOCK_BYTES = 1 << 20
MAX_CHECKSUM_BLOCKS = 256  # per file: of a larger file, this many evenly spaced blocks are read

Source = TypeVar("Source")


def cache_folder(name: str, source: str) -> Path:
    """Return the folder in the hub's cache for what is created from a source.

    name: begins the folder's name. source: identifies the source, by file names, sizes and times,
    for example.
    """
    digest = hashlib.sha256(source.encode()).hexdigest()
    return Path(constants.HF_HOME) / "blockdraft" / f"{name}-{digest[:8]}"


def create_cached_folder(
    folder: Path,
    message: str,
    open_source: Callable[[], Source],
    write_folder: Callable[[Source, Path], None],
) -> Path:
    """Return a folder of the cache, after creating it if it is missing.

    The first process that needs it creates it, and others wait. A folder that is damaged, or was
    created by an early version without a manifest, is deleted and created again.

    message: printed, and shown as progress, while `write_folder(open_source(), folder)` runs. The
        source is opened before, so that an exception of a damaged source is the only output.

    Raises OSError with a one-sentence message if the folder cannot be written; nothing is left of
    it then.
    """
    if find_cache_problem(folder) is None:
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it whenever the process ends
        problem = find_cache_problem(folder)
        if problem is None:  # another process has created it
            return folder
        source = open_source()
        if folder.exists():
            message += f", again: {problem}"
        print(message, file=sys.stderr, flush=True)
        partial_folder = folder.with_name(f".{folder.name}")
        for stale_folder in (folder, partial_folder):  # a killed process leaves the latter
            shutil.rmtree(stale_folder, ignore_errors=True)
        try:
            with report_activity(message):
                write_folder(source, partial_folder)
            manifest = {"files": compute_file_checksums(partial_folder)}
            write_json(partial_folder / CACHE_MANIFEST_FILE, manifest)
            partial_folder.replace(folder)
        except OSError as error:
            raise OSError(
                f"{folder} could not be written: {error.strerror or error}; "
                "free some space, or set HF_HOME to a folder on another disk"
            ) from error
        finally:
            shutil.rmtree(partial_folder, ignore_errors=True)
    return folder


def save_model(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", folder: Path
) -> None:
    """Save a model and its tokenizer as a Hugging Face folder. Raises OSError if the disk is full
    or read-only, for which safetensors and tokenizers raise their own exceptions."""
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except Exception as error:
        if isinstance(error, SafetensorError) or "os error" in str(error):
            raise OSError(" ".join(str(error).split())) from error
        raise


def find_cache_problem(folder: Path) -> str | None:
    """Return what is wrong with a folder of the cache; None if nothing is."""
    if not folder.is_dir():
        return "the folder does not exist"
    files = sorted(file for file in folder.iterdir() if file.is_file())
    stats = [(file.name, file.stat()) for file in files]
    stamps = tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
    return compare_with_manifest(folder, stamps)


@lru_cache(maxsize=64)
def compare_with_manifest(folder: Path, stamps: tuple[tuple[str, int, int], ...]) -> str | None:
    """Return which file of a folder differs from its manifest; None if no file does.

    stamps: name, size and modification time of every file. They are the cache's key: files are not
    read again while they stay the same.
    """
    if CACHE_MANIFEST_FILE not in {name for name, *_ in stamps}:
        return "the existing folder is of an earlier version"
    damaged_files = []
    try:
        manifest = json.loads((folder / CACHE_MANIFEST_FILE).read_text(encoding="utf-8"))
        expected = manifest["files"]
        actual = compute_file_checksums(folder)
        for name in sorted({*expected, *actual}):
            if expected.get(name) != actual.get(name):
                damaged_files.append(name)
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        damaged_files = [CACHE_MANIFEST_FILE]
    if damaged_files:
        return f"{damaged_files[0]} of the existing folder is damaged"
    return None


def compute_file_checksums(folder: Path) -> dict[str, list[int]]:
    """Return size and checksum of every file of a folder except its manifest."""
    files = sorted(
        file for file in folder.iterdir() if file.is_file() and file.name != CACHE_MANIFEST_FILE
    )
    return {file.name: [file.stat().st_size, file_checksum(file)] for file in files}


def file_checksum(file: Path) -> int:
    """Return the Adler-32 checksum of a file, or of evenly spaced blocks of a large file."""
    size = file.stat().st_size
    step = max(CHECKSUM_BLOCK_BYTES, size // MAX_CHECKSUM_BLOCKS)
    value = 1
    with file.open("rb") as content:
        for start in range(0, size, step):
            content.seek(start)
            value = zlib.adler32(content.read(CHECKSUM_BLOCK_BYTES), value)
    return value
