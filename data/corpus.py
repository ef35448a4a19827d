"""Read the source files of the Python standard library as text documents.

Every machine with Python has these files, so a first training run needs no download. The small
target model in this repository was pre-trained on these files and on prose such as Python's
language reference.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

HELD_OUT_SHARE_OF_STDLIB_FILES = 1 / 20  # fraction of the files that are held out for evaluation

# Directories whose files are not used: installed packages, generated tables (character maps, help
# texts), and tests. Many Linux distributions do not install the tests.
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
    """A text of a corpus. Its name is the path of the file inside the corpus."""

    name: str
    text: str


def is_held_out_file(name: str) -> bool:
    """Return whether a file of the standard library is held out for evaluation.

    The decision depends only on the hash of the path. The same files are therefore held out on
    every machine and in every Python version.

    name: path of the file inside the library
    """
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") < HELD_OUT_SHARE_OF_STDLIB_FILES * 2**64


def read_stdlib_documents(split: Literal["train", "held_out"]) -> Iterator[Document]:
    """Yield the source files of one split of Python's standard library, sorted by path.

    The standard library is that of the Python that runs this code.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        # The files _sysconfigdata*.py are skipped, because they contain paths of this machine.
        if _SKIPPED_STDLIB_DIRECTORIES & set(relative.parts) or relative.name.startswith(
            "_sysconfigdata"
        ):
            continue
        if is_held_out_file(relative.as_posix()) == (split == "held_out"):
            text = path.read_text(encoding="utf-8", errors="replace")
            yield Document(relative.as_posix(), text)
