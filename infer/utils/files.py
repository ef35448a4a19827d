"""Files that are there whole or not at all, whenever the process is killed."""

import os
from pathlib import Path


def atomic_write(path: Path, text: str) -> None:
    """Writes a file that is there whole or as it was before, whenever the process is killed."""
    fresh = path.with_name(f".{path.name}")
    try:
        fresh.write_text(text, encoding="utf-8")
        sync(fresh)
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Waits until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
