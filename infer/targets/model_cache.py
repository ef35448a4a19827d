"""Folders of models in the hub's cache: made once from a source, checked whenever they are used,
and made again where they are damaged."""

import fcntl
import hashlib
import json
import shutil
import sys
import zlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from huggingface_hub import constants
from safetensors import SafetensorError

from infer.utils.files import write_json
from infer.utils.progress import doing

MANIFEST = "blockdraft-cache.json"  # name, size and checksum of every other file of the folder
CHECKSUM_BLOCK_BYTES = 1 << 20
MAX_CHECKSUM_BLOCKS = 256  # of a file: a larger one is read in that many places

Source = TypeVar("Source")


def cache_folder(name: str, source: str) -> Path:
    """Return the folder, in the hub's cache, of what is made of a source: files' names, sizes and
    times, say."""
    digest = hashlib.sha256(source.encode()).hexdigest()
    return Path(constants.HF_HOME) / "blockdraft" / f"{name}-{digest[:8]}"


def make_once(
    folder: Path, why: str, open_source: Callable[[], Source], make: Callable[[Source, Path], None]
) -> Path:
    """Return a folder of the cache, made by the first process that asks, for which others wait. A
    damaged one, and one of an earlier version, which did not check its source, is deleted and made
    again.

    `why` is printed before `make(open_source(), folder)`, but after the source is open: what it
    raises is all that is said of a damaged source. Raises OSError, one sentence, where the folder
    cannot be written; nothing is left of it then."""
    if find_problem(folder) is None:
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released by the kernel, however the process ends
        problem = find_problem(folder)
        if problem is None:  # another process has made it
            return folder
        source = open_source()
        if folder.exists():
            why += f", again: {problem}"
        print(why, file=sys.stderr, flush=True)
        partial_folder = folder.with_name(f".{folder.name}")
        for stale in (folder, partial_folder):  # the latter of a process that was killed
            shutil.rmtree(stale, ignore_errors=True)
        try:
            with doing(why):
                make(source, partial_folder)
            write_json(partial_folder / MANIFEST, {"files": checksums(partial_folder)})
            partial_folder.replace(folder)
        except OSError as error:
            raise OSError(
                f"{folder} could not be written: {error.strerror or error}; free some space, or set HF_HOME to a "
                "folder on another disk"
            ) from error
        finally:
            shutil.rmtree(partial_folder, ignore_errors=True)
    return folder


def save_model(model, tokenizer, folder: Path) -> None:
    """Save a model and its tokenizer as a Hugging Face folder. Raises OSError where the disk is
    full or read-only, which safetensors and tokenizers say by exceptions of their own."""
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except Exception as error:
        if isinstance(error, SafetensorError) or "os error" in str(error):
            raise OSError(" ".join(str(error).split())) from error
        raise


def find_problem(folder: Path) -> str | None:
    """Return what is wrong with a folder of the cache, None if nothing is."""
    if not folder.is_dir():
        return "there is none"
    files = sorted(file for file in folder.iterdir() if file.is_file())
    stamps = ((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    return compare_with_manifest(folder, tuple(stamps))


@lru_cache(maxsize=64)
def compare_with_manifest(folder: Path, stamps: tuple[tuple[str, int, int], ...]) -> str | None:
    """Return which file of a folder is not what its manifest says, None if all are. `stamps`: name,
    size and time of every file; while they stay the same nothing is read again."""
    if MANIFEST not in {name for name, *_ in stamps}:
        return "the one that was there is of an earlier version"
    try:
        expected = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        actual = checksums(folder)
        wrong = [
            name for name in sorted({*expected, *actual}) if expected.get(name) != actual.get(name)
        ]
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        wrong = [MANIFEST]
    return f"{wrong[0]} of the one that was there was damaged" if wrong else None


def checksums(folder: Path) -> dict[str, list[int]]:
    """Return size and checksum of every file of a folder but its manifest."""
    files = (file for file in folder.iterdir() if file.is_file() and file.name != MANIFEST)
    return {file.name: [file.stat().st_size, checksum(file)] for file in sorted(files)}


def checksum(file: Path) -> int:
    """Return the Adler-32 of a file's content; of a large one's, of evenly spread blocks."""
    size = file.stat().st_size
    step = max(CHECKSUM_BLOCK_BYTES, size // MAX_CHECKSUM_BLOCKS)
    value = 1
    with file.open("rb") as content:
        for start in range(0, size, step):
            content.seek(start)
            value = zlib.adler32(content.read(CHECKSUM_BLOCK_BYTES), value)
    return value
