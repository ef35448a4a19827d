"""Source files of the Python standard library as text documents.

Every machine with Python has these files, so a first training run needs no download. The embedded
target was pre-trained on them and on prose such as Python's language reference.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

HELD_OUT_SHARE_OF_STDLIB_FILES = (
    1 / 20
)  # of the library's files; used for validation and prompts only

# Installed packages, generated tables (character maps, help texts), and tests, which many Linux
# distributions do not install.
_SKIPPED_STDLIB_DIRECTORIES = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
    "lib-dynload",
}


@dataclass(frozen=True)
class Document:
    """A text and its name: the path inside its corpus."""

    name: str
    text: str


def is_held_out_file(name: str) -> bool:
    """Return whether a library file is reserved for validation.

    name: path inside the library. Its hash decides, so that the same file is held out on every
        machine and in every Python version.
    """
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") < HELD_OUT_SHARE_OF_STDLIB_FILES * 2**64


def read_stdlib_documents(split: Literal["train", "held_out"]) -> Iterator[Document]:
    """Yield the source files of the running Python's standard library, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        # _sysconfigdata*.py holds paths of this machine.
        if _SKIPPED_STDLIB_DIRECTORIES & set(relative.parts) or relative.name.startswith(
            "_sysconfigdata"
        ):
            continue
        if is_held_out_file(relative.as_posix()) == (split == "held_out"):
            text = path.read_text(encoding="utf-8", errors="replace")
            yield Document(relative.as_posix(), text)
