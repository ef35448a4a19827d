"""Documents of the Python standard library, before tokenisation.

The embedded default reads the source files of the Python standard library, which lie on every machine
that has Python, so a first run needs no download. `jsonl` reads the user's own files. The embedded target was
pre-trained on prose besides: the library's docstrings, questions about them, and Python's language reference.
"""

import ast
import hashlib
import importlib
import inspect
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

HELD_OUT_SHARE = 1 / 20  # of the library's files serve validation and prompts, none of them training

# Generated tables (character maps, the text of the help system) and tests, which many distributions leave out.
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "lib-dynload"}


@dataclass(frozen=True)
class Document:
    """One text with the name it is known by (a path inside its corpus)."""

    name: str
    text: str


def is_held_out(name: str) -> bool:
    """Return whether a file serves validation: decided by a hash of its path inside the library, so that the
    same file is held out on every machine and for every version that has it."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") < HELD_OUT_SHARE * 2**64


def stdlib_documents(split: str) -> Iterator[Document]:
    """Yield the source files of the running Python's standard library, sorted by path.

    split: "train" or "held_out". Raises FileNotFoundError when the library has no sources here.
    """
    assert split in ("train", "held_out"), split
    root = Path(sysconfig.get_paths()["stdlib"])
    found = False
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _SKIPPED & set(relative.parts) or relative.name.startswith("_sysconfigdata"):  # paths of this machine
            continue
        found = True
        if is_held_out(relative.as_posix()) == (split == "held_out"):
            yield Document(relative.as_posix(), path.read_text(encoding="utf-8", errors="replace"))
    if not found:
        raise FileNotFoundError(f"no Python sources under {root}: use data=jsonl data.path=<your files>")


def stdlib_prose(split: str) -> Iterator[Document]:
    """Yield plain English that lies on every machine that has Python: for every source file of `stdlib_documents` its
    docstrings as one page and questions about them with their answers, and the chapters of the language reference.

    A page is held out exactly when its source file is; a chapter by a hash of its name.
    """
    for document in stdlib_documents(split):
        module = document.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        entries = _docstrings(document.text, module)
        if entries:
            page = "\n\n\n".join(f"{name}{arguments}\n\n{text}" for name, arguments, text in entries)
            yield Document(document.name + ":page", page + "\n")
            yield Document(document.name + ":questions", "".join(_questions(entries, module)))
    for name, text in sorted(importlib.import_module("pydoc_data.topics").topics.items()):
        if is_held_out(name) == (split == "held_out"):
            yield Document("reference:" + name, text)


class _Entry(NamedTuple):
    name: str  # dotted
    arguments: str  # as written, "" for what takes none
    text: str  # the docstring


def _docstrings(source: str, module: str) -> list[_Entry]:
    """Return the docstrings of a module and of all that it defines and documents."""
    entries = []

    def visit(node: ast.AST, name: str, arguments: str) -> None:
        text = inspect.cleandoc(ast.get_docstring(node) or "").strip()
        if text:
            entries.append(_Entry(name, arguments, text))
        for child in node.body:
            if isinstance(child, ast.ClassDef):
                visit(child, f"{name}.{child.name}", "")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                visit(child, f"{name}.{child.name}", f"({ast.unparse(child.args)})")

    try:
        visit(ast.parse(source), module, "")
    except SyntaxError:  # the library keeps a few broken files for its own tools' tests
        return []
    return entries


def _questions(entries: list[_Entry], module: str) -> Iterator[str]:
    """Yield questions with their answers, in the form in which the embedded target's template joins a chat."""
    for name, arguments, text in entries:
        says = " ".join(text.split("\n\n")[0].split())
        short = name.rpartition(".")[2]
        if not says or len(says) > 400:
            continue
        if name == module:
            yield f"What is {name}?\n{name} is a module of the standard library: {says}\n"
        elif arguments:
            yield f"What does {name} do?\n{says}\n"
            yield f"How do I call {short}?\nCall {name}{arguments}. {says}\n"
        else:
            yield f"What is {name}?\n{short} is a class in the module {module}. {says}\n"
