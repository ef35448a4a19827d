"""Documents of the Python standard library, before tokenisation.

The embedded default reads the source files of the Python standard library, which lie on every
machine that has Python, so a first run needs no download. `jsonl` reads the user's own files. The
embedded target was pre-trained on prose besides, such as Python's language reference.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_SHARE = (
    1 / 20
)  # of the library's files serve validation and prompts, none of them training

# Generated tables (character maps, the text of the help system) and tests, which many distributions
# leave out.
_SKIPPED = {
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
    """One text with the name it is known by (a path inside its corpus)."""

    name: str
    text: str


def is_held_out(name: str) -> bool:
    """Return whether a file serves validation: decided by a hash of its path inside the library, so
    that the same file is held out on every machine and for every version that has it."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") < HELD_OUT_SHARE * 2**64


def stdlib_documents(split: str) -> Iterator[Document]:
    """Yield the source files of the running Python's standard library, sorted by path.

    split: "train" or "held_out".
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        # paths of this machine
        if _SKIPPED & set(relative.parts) or relative.name.startswith("_sysconfigdata"):
            continue
        if is_held_out(relative.as_posix()) == (split == "held_out"):
            yield Document(relative.as_posix(), path.read_text(encoding="utf-8", errors="replace"))
