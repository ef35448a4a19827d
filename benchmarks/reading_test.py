"""Draw what a reader who does not know the code is asked to explain.

    python benchmarks/reading_test.py definitions --seed 1
    python benchmarks/reading_test.py definitions --seed 1 --key

Definitions: functions, methods and classes of train, infer and data, by name and signature, and
constants by name, without bodies and docstrings. The reader writes down what each is for. With
--key the same draw is printed with its location and source, for the judge of the answers.

    python benchmarks/reading_test.py docstrings --seed 1

Docstrings, comments and messages (texts of exceptions, log lines and help) are printed in full; the
reader marks each as understood at once or not.

    python benchmarks/reading_test.py sentences --seed 1

Sentences and rows of tables of the documents, with the paragraph or table that they are part of: 20
each of the README with the guides, of docs/results, of LOG.md, and of the page of errors.
"""

import argparse
import ast
import io
import random
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("train", "infer", "data")
DEFINITIONS_PER_DRAW = 60
CONSTANTS_PER_DRAW = 20
TEXTS_PER_DRAW = 30
SENTENCES_PER_DOCUMENT_GROUP = 20
MIN_MESSAGE_WORDS = 5
MAX_SOURCE_LINES = 60
ERROR_PAGE = "docs/troubleshooting.md"
# Key: name of a group of documents. Value: glob patterns of its files.
DOCUMENT_GROUPS = {
    "guides": ("README.md", "docs/*.md"),
    "results": ("docs/results/*.md",),
    "log": ("LOG.md",),
    "errors": (ERROR_PAGE,),
}
MIN_SENTENCE_WORDS = 4

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Item:
    """Something to explain: what the reader sees, and where it is with its source for the judge."""

    question: str
    location: str
    source: str


def python_files() -> Iterator[tuple[Path, str]]:
    """Yield every Python file of the packages with its source."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT), path.read_text()


def signature_of(node: FunctionNode | ast.ClassDef, class_name: str | None) -> str:
    """Return the first line of a definition as it is written, with decorators that change its
    meaning, such as @property."""
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    prefix = "".join(f"@{decorator}\n" for decorator in decorators)
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        fields = [
            f"    {statement.target.id}: {ast.unparse(statement.annotation)}"
            for statement in node.body
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        ]
        header = f"class {node.name}({bases}):" if bases else f"class {node.name}:"
        return "\n".join([prefix + header, *fields])
    keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    owner = f"(method of {class_name}) " if class_name else ""
    return f"{prefix}{owner}{keyword} {node.name}({ast.unparse(node.args)}){returns}"


def source_of(source: str, node: ast.stmt) -> str:
    """Return the first lines of a statement's source."""
    lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
    return "\n".join(lines[:MAX_SOURCE_LINES])


def definitions() -> tuple[list[Item], list[Item]]:
    """Return all functions, methods and classes, and all constants of modules and classes."""
    functions: list[Item] = []
    constants: list[Item] = []
    for path, source in python_files():
        owners: list[tuple[str | None, list[ast.stmt]]] = [(None, ast.parse(source).body)]
        while owners:
            class_name, body = owners.pop()
            for node in body:
                location = f"{path}:{node.lineno}"
                if isinstance(node, ast.ClassDef):
                    owners.append((node.name, node.body))
                is_definition = isinstance(node, FunctionNode | ast.ClassDef)
                if is_definition and not node.name.startswith("__"):
                    question = signature_of(node, class_name)
                    functions.append(Item(question, location, source_of(source, node)))
                for name in assigned_constants(node):
                    constants.append(Item(name, location, source_of(source, node)))
    return functions, constants


def assigned_constants(node: ast.stmt) -> list[str]:
    """Return the upper-case names that a statement assigns."""
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    else:
        return []
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    return [name for name in names if name.isupper() and len(name) > 1]


def docstrings() -> list[Item]:
    """Return all docstrings, with the signature that a reader sees above them."""
    items = []
    for path, source in python_files():
        tree = ast.parse(source)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Module | ast.ClassDef | FunctionNode):
                continue
            docstring = ast.get_docstring(node)
            if docstring is None:
                continue
            if isinstance(node, ast.Module):
                header = str(path)
                location = f"{path}:1"
            else:
                header = signature_of(node, None)
                location = f"{path}:{node.lineno}"
            items.append(Item(f"{header}\n\n{docstring}", location, ""))
    return items


def comments() -> list[Item]:
    """Return all comments, those of adjacent lines together, with the code that they stand above or
    beside."""
    items = []
    for path, source in python_files():
        lines = source.splitlines()
        block: list[str] = []
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type != tokenize.COMMENT:
                continue
            row = token.start[0]
            text = token.string.lstrip("# ")
            alone = lines[row - 1].lstrip().startswith("#")
            block.append(text)
            continues = row < len(lines) and lines[row].lstrip().startswith("#")
            if alone and continues:
                continue
            code = lines[row : row + 2] if alone else [lines[row - 1]]
            question = "\n".join(["# " + " ".join(block), *code])
            items.append(Item(question, f"{path}:{row}", ""))
            block = []
    return items


def messages() -> list[Item]:
    """Return the texts of raised exceptions, warnings and printed or logged lines."""
    items = []
    names = {"print", "warn", "say", "fail", "info", "warning", "error", "write", "die"}
    for path, source in python_files():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                call = node.exc
            elif isinstance(node, ast.Call) and called_name(node) in names:
                call = node
            else:
                continue
            for argument in call.args:
                text = message_text(argument)
                if text is not None and len(text.split()) >= MIN_MESSAGE_WORDS:
                    items.append(Item(text, f"{path}:{call.lineno}", ""))
    return items


def called_name(call: ast.Call) -> str:
    """Return the last part of the name of what is called, "" for anything else."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def message_text(node: ast.expr) -> str | None:
    """Return a string or f-string as text with its expressions in braces; None for anything
    else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if not isinstance(node, ast.JoinedStr):
        return None
    pieces = []
    for value in node.values:
        if isinstance(value, ast.Constant):
            pieces.append(str(value.value))
        elif isinstance(value, ast.FormattedValue):
            pieces.append("{" + ast.unparse(value.value) + "}")
    return "".join(pieces)


def markdown_blocks(text: str) -> Iterator[tuple[int, str, list[str]]]:
    """Yield (line number, heading, lines) of every paragraph, list item and table of a Markdown
    document, without code blocks."""
    heading = ""
    block: list[str] = []
    in_code = False
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
            line = ""
        begins_heading = line.startswith("#") and not in_code
        begins_item = re.match(r"\s*([-*]|\d+\.) ", line) is not None
        if block and (not line.strip() or begins_heading or begins_item):
            yield number - len(block), heading, block
            block = []
        if begins_heading:
            heading = line.lstrip("# ")
        elif line.strip() and not in_code:
            block.append(line)


def sentences(group: str) -> list[Item]:
    """Return all sentences and table rows of a group of documents, each below its context."""
    paths = [path for pattern in DOCUMENT_GROUPS[group] for path in sorted(ROOT.glob(pattern))]
    if group == "guides":
        paths = [path for path in paths if path != ROOT / ERROR_PAGE]
    items = []
    for path in paths:
        previous_lines: list[str] = []
        for number, heading, lines in markdown_blocks(path.read_text()):
            is_table = lines[0].startswith("|")
            # A table is read after the paragraph that introduces it.
            context = "\n".join([*previous_lines, *lines] if is_table else lines)
            previous_lines = lines
            units = lines[2:] if is_table else re.split(r"(?<=[.!?]) +(?=[^a-z])", " ".join(lines))
            for unit in units:
                if len(unit.split()) >= MIN_SENTENCE_WORDS:
                    name = path.relative_to(ROOT)
                    question = f"{name}, {heading}\n{context}\n>>> {unit.strip()}"
                    items.append(Item(question, f"{name}:{number}", ""))
    return items


def draw(kind: str, seed: int) -> list[Item]:
    """Return the items of one draw; the same seed draws the same items from the same code."""
    generator = random.Random(seed)
    if kind == "definitions":
        functions, constants = definitions()
        chosen = generator.sample(functions, DEFINITIONS_PER_DRAW)
        return chosen + generator.sample(constants, CONSTANTS_PER_DRAW)
    if kind == "sentences":
        groups = [sentences(group) for group in DOCUMENT_GROUPS]
        samples = [generator.sample(group, SENTENCES_PER_DOCUMENT_GROUP) for group in groups]
        return [item for sample in samples for item in sample]
    items = {"docstrings": docstrings, "comments": comments, "messages": messages}[kind]()
    return generator.sample(items, TEXTS_PER_DRAW)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = ("definitions", "docstrings", "comments", "messages", "sentences")
    parser.add_argument("kind", choices=kinds)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--key", action="store_true", help="also print locations and sources")
    args = parser.parse_args()
    for number, item in enumerate(draw(args.kind, args.seed), start=1):
        print(f"{number}. {item.question}")
        if args.key:
            print(f"   [{item.location}]\n{item.source}")
        print()


if __name__ == "__main__":
    main()
