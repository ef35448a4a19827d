"""Rows to learn from: files, data sets of the hub, mixtures of them; each example once. What
becomes of every example is counted (data/counts.py).

A row is {"prompt", "text", "cut", "chat"}, see data/chat.py, and "where", its file and line.
"""

import gzip
import hashlib
import json
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice, zip_longest
from pathlib import Path

from data.chat import checked, normalise
from data.corpus import stdlib_documents
from data.counts import ExampleCounts, ExcludedExample, InvalidExample

# What the embedded target wrote after prompts from its training text.
ANSWERS = Path(__file__).resolve().parent / "embedded" / "answers.jsonl"
SOURCES = ("embedded", "stdlib", "jsonl", "hub", "mixture", "self")
FILE_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".txt")  # of files that are read
# Part of the key of cached rows. Raise it when a change of data/ gives other rows, other tokens or
# another packing: rows that are in a cache are then made again. tests/data/test_packing.py notices
# such a change.
FORMAT = 6
LONGEST = 64 << 20  # characters of a line, bytes of a text
# Of the user's own rows one in 10 is kept for evaluation while they are few, one in 50 of those
# behind the first 500.
HELD_OUT = 50
FEW = 500
OF_FEW = 10


@dataclass
class DataPart:
    """One data set of a mixture.

    path: a file, a folder, or a name on the hub
    split: split of a data set on the hub
    weight: its share of the examples, relative to the other data sets' weights
    """

    path: str
    split: str = "train"
    weight: float = 1.0


@dataclass
class DataConfig:
    """The training data.

    source: embedded: outputs of the embedded target; stdlib: source files of Python's standard
        library; jsonl: your own files; hub: a data set of the Hugging Face hub; mixture: several
        data sets; self: questions that the target writes (regenerate only). A path to an existing
        file or folder means jsonl
    path: for jsonl: a file, or a folder with .jsonl(.gz), .parquet and .txt files, where a .txt
        file is one text; for hub: the name, or a folder with a copy of the data set and its
        README.md
    split: for hub: the split
    datasets: for mixture: the data sets, see DataPart; the total size follows from the smallest one
        and the weights
    length: tokens of a packed sequence; longer texts are split
    max_examples: maximum number of examples to read; null: all. For self: the number of questions
    max_invalid_fraction: maximum fraction of invalid examples (no JSON, wrong types); more end the
        run. Examples that are skipped by a rule, such as those without an answer, do not count
    """

    source: str = "embedded"
    path: str | None = None
    split: str = "train"
    datasets: list[DataPart] = field(default_factory=list)
    length: int = 512
    max_examples: int | None = None
    max_invalid_fraction: float = 0.05

    def __post_init__(self) -> None:
        self.source = resolve_source(self.source, self.path)

    def check(self) -> None:
        """Raise ValueError for a source that cannot be read."""
        if self.source not in SOURCES:
            raise ValueError(f"data.source={self.source}: use one of {', '.join(SOURCES)}")
        if self.source in ("jsonl", "hub") and not self.path:
            raise ValueError(
                f"data.source={self.source} needs data.path=<a file, a folder, or a name on the hub>"
            )
        if self.source == "self" and self.max_examples is None:
            raise ValueError(
                "data.source=self needs data.max_examples=<how many questions the target writes>"
            )
        if self.path is not None:
            self._check_path()
        if (self.source == "mixture") != bool(self.datasets):
            raise ValueError(
                "data.datasets=[{path: ..., weight: ...}, ...] and data=mixture belong together"
            )
        if any(not part.weight > 0 for part in self.datasets):
            raise ValueError(
                f"data.datasets: weights are above 0, not {[part.weight for part in self.datasets]}"
            )
        for name, least in (("max_examples", 1), ("max_invalid_fraction", 0), ("length", 16)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"data.{name}={value}: at least {least}")
        if self.max_invalid_fraction > 1:
            raise ValueError(
                f"data.max_invalid_fraction={self.max_invalid_fraction:g}: a share of the examples, from 0 to 1"
            )

    def _check_path(self) -> None:
        """Raise ValueError for a path that the source does not read."""
        missing = f"data.path={self.path}: no such file or folder"
        if self.source in ("self", "mixture"):
            raise ValueError(f"data={self.source} and data.path={self.path}: give one of them")
        if self.source == "jsonl" and not Path(self.path).exists():
            raise ValueError(missing)
        if self.source == "hub" and not Path(self.path).exists() and names_a_file(self.path):
            raise ValueError(f"{missing}, and no name on the hub, which is <owner>/<name>")
        if self.source in ("embedded", "stdlib"):
            hub = (
                ""
                if names_a_file(self.path)
                else f"; of a data set on the hub: data=hub data.path={self.path}"
            )
            raise ValueError(missing + hub)


def resolve_source(source: str, path: str | None) -> str:
    """Return the source that is read: a path that exists is a file or folder of the user's own,
    whatever the source was. `self` and `mixture` have no path. A folder with a README.md is a copy
    of a data set of the hub where the source is `hub`."""
    if not path or source in ("self", "mixture") or not Path(path).exists():
        return source
    if source == "hub" and (Path(path) / "README.md").is_file():
        return source
    return "jsonl"


def names_a_file(path: str) -> bool:
    """Return whether a path can only be meant as a file or folder: it has a suffix of files that
    are read, or is no <owner>/<name>."""
    return path.endswith(FILE_SUFFIXES) or path.startswith((".", "/", "~")) or path.count("/") > 1


def check_source(config: DataConfig, target: str, instead: str = "") -> None:
    """Raise ValueError where another target would read what the embedded one wrote. `instead`: what
    a command takes besides."""
    if config.source == "embedded" and target != "embedded":
        raise ValueError(
            "data.source=embedded is what the embedded target wrote: use data.path=<your files>, "
            f"data=stdlib{instead}, for target.path={target}"
        )


def single(config: DataConfig) -> list[tuple[DataConfig, float]]:
    """Return the data sets that a configuration stands for, none of them a mixture, with their
    weights."""
    if config.source != "mixture":
        return [(config, 1.0)]
    parts = []
    for part in config.datasets:
        data = replace(config, source="hub", path=part.path, split=part.split, datasets=[])
        parts.append((data, part.weight))
    return parts


def files_of(path: str) -> list[Path]:
    """Return the files that a path stands for. Raises ValueError for a device or pipe, which might
    never end."""
    found = [Path(path)]
    if found[0].is_dir():
        found = sorted(
            file
            for kind in ("jsonl", "jsonl.gz", "parquet", "txt")
            for file in found[0].rglob(f"*.{kind}")
        )
    for file in found:
        if file.exists() and not file.is_file():
            raise ValueError(
                f"data.path={path}: {file} is no regular file, but a device, pipe or folder"
            )
    return found


def _records(config: DataConfig) -> Iterator[tuple[str, object]]:
    """(where, row) of a data set; a line that is no JSON comes as its error."""
    if config.source != "hub":
        for file in files_of(config.path):
            yield from file_records(file)
        return
    from datasets import load_dataset

    try:
        rows = load_dataset(config.path, split=config.split)
    except (OSError, ValueError) as error:  # a ConnectionError is an OSError
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"data.path={config.path}, split {config.split}: could not be read ({reason})"
        ) from error
    yield from ((f"{config.path}, row {number}", row) for number, row in enumerate(rows))


def _lines(file: Path) -> Iterator[object]:
    """Yield a row a line. A line of more than LONGEST characters comes in parts, which are no
    JSON."""
    opened = gzip.open if file.suffix == ".gz" else open
    with opened(file, "rt", encoding="utf-8-sig", errors="replace") as lines:
        while line := lines.readline(LONGEST):
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                yield InvalidExample("no JSON", str(error))


def _parquet(file: Path) -> Iterator[object]:
    from pyarrow.parquet import ParquetFile

    for part in ParquetFile(file).iter_batches():
        yield from part.to_pylist()


def _list(file: Path) -> Iterator[object]:
    yield from checked(
        json.loads(file.read_text(encoding="utf-8-sig")), list, "it is not one list of rows"
    )


def _text(file: Path) -> Iterator[object]:
    if file.stat().st_size > LONGEST:
        raise ValueError(f"a text of more than {LONGEST >> 20} MB; split it, or use .jsonl")
    yield {"text": file.read_text(encoding="utf-8-sig", errors="replace")}


# Kinds of files by their last suffix: what a row is called, how rows are read. A byte order mark is
# no part of a row.
FILES = {".parquet": ("row", _parquet), ".json": ("entry", _list), ".txt": ("text", _text)}


def file_records(file: Path) -> Iterator[tuple[str, object]]:
    """(where, row) of a file of FILES, or else a .jsonl or .jsonl.gz; a line that is no JSON comes
    as its error. Raises ValueError, naming the file, where it is damaged."""
    unit, read = FILES.get(file.suffix, ("line", _lines))
    number = 0
    try:
        for number, row in enumerate(read(file), 1):
            yield f"{file}, {unit} {number}", row
    except (
        OSError,
        ValueError,
        RecursionError,
        EOFError,
        zlib.error,
    ) as error:  # of pyarrow, json and gzip
        raise ValueError(f"{file}: damaged or cut off after {unit} {number} ({error})") from error


def refuse_unwritten(config: DataConfig) -> None:
    """Raise ValueError for data=self, which no file has."""
    if config.source == "self":
        raise ValueError(
            "data=self are questions that the target is still to write: ./launch.sh regenerate data=self "
            "target.path=... out=answers.jsonl, then data=jsonl data.path=answers.jsonl"
        )


def read_rows(
    config: DataConfig, answered: bool = True, counts: ExampleCounts | None = None
) -> Iterator[dict]:
    """Yield rows of the user's own data, each once; loss is on "text" or on the assistant's
    messages, which end with an answer or, if not `answered`, with a question. Only digests of the
    rows are kept in memory.

    `counts` says, when all is read, what became of every example. Raises ValueError, naming file
    and line, when more than `max_invalid` of them are broken, or there are none.
    """
    refuse_unwritten(config)
    counts = ExampleCounts() if counts is None else counts
    seen = set()
    for where, record in _records(config):
        try:
            if isinstance(record, ValueError):
                raise record
            row = normalise(record, answered)
            # fails for half a surrogate pair
            content = json.dumps(row, sort_keys=True, ensure_ascii=False).encode()
            key = hashlib.blake2b(content, digest_size=8).digest()
            if key in seen:
                raise ExcludedExample("there more than once, and taken once")
        except ExcludedExample as excluded:
            counts.exclude(excluded.reason)
            continue
        except ValueError as error:
            counts.invalidate(getattr(error, "reason", str(error)), f"{where}: {error}")
            continue
        seen.add(key)
        counts.used += 1
        yield row | {"where": where}
    if not counts.total:
        raise ValueError(f"data.path={config.path}: no rows")
    counts.check(config.max_invalid_fraction)


def is_held_out(number: int) -> bool:
    """Return whether the row of this number, counted from 0, is kept for evaluation. It follows
    from the number alone, so that rows can be read without knowing how many there are."""
    return number % (OF_FEW if number < FEW else HELD_OUT) == 0


def held_out_rows(config: DataConfig) -> Iterator[dict]:
    """Yield the rows that training never sees: the library's held-out files, or those of the user's
    own that `is_held_out`; of a mixture, in turns from all its parts."""
    if config.source in ("embedded", "stdlib"):
        yield from _library("held_out")
        return
    parts = [
        (row for i, row in enumerate(read_rows(part)) if is_held_out(i))
        for part, _ in single(config)
    ]
    yield from in_turn(parts)


def in_turn(sources: Iterable[Iterable]) -> Iterator:
    """Yield what several sources have, one of each in turn, until all are at their end."""
    for together in zip_longest(*sources):
        yield from (one for one in together if one is not None)


def training_rows(config: DataConfig, counts: ExampleCounts | None = None) -> Iterator[dict]:
    """Yield the rows of one data set to train on. `counts`: as of `read_rows`, of what was read
    until data.max_examples rows were there."""
    counts = ExampleCounts() if counts is None else counts
    if config.source == "stdlib":
        rows = _library("train", counts)
    elif config.source == "embedded":
        rows = read_rows(replace(config, path=str(ANSWERS)), counts=counts)
    else:
        rows = _not_held_out(read_rows(config, counts=counts), counts)
    yield from islice(rows, config.max_examples)


def _not_held_out(rows: Iterable[dict], counts: ExampleCounts) -> Iterator[dict]:
    """Yield the rows that are not kept for evaluation, and count the others."""
    for number, row in enumerate(rows):
        if is_held_out(number):
            counts.used -= 1
            counts.held_out += 1
        else:
            yield row


def _library(split: str, counts: ExampleCounts | None = None) -> Iterator[dict]:
    """Yield the documents of Python's standard library as rows."""
    for document in stdlib_documents(split):
        if document.text.strip():
            if counts is not None:
                counts.used += 1
            yield normalise({"text": document.text}) | {"where": document.name}


def questions(config: DataConfig, counts: ExampleCounts | None = None) -> Iterator[dict]:
    """Yield all rows as questions, whatever their answers. `counts`: as of `read_rows`. Raises
    ValueError where there are none."""
    counts = ExampleCounts() if counts is None else counts
    for part, _ in single(config):
        if part.source in ("jsonl", "hub"):
            rows = read_rows(part, answered=False, counts=counts)
        else:
            rows = training_rows(part, counts)
        yield from islice(rows, config.max_examples)
    if not counts.used:
        raise ValueError(f"data.path={config.path}: no question to ask; {counts.summary()}")


def source_digest(config: DataConfig) -> str:
    """Return a digest of what shapes the rows of one data set before they are packed: where they
    come from, their files' sizes and times, FORMAT, and of Python's own sources the version."""
    files = (
        files_of(config.path)
        if config.source == "jsonl"
        else [ANSWERS]
        if config.source == "embedded"
        else []
    )
    stamps = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    chosen = [config.source, config.path, config.split, config.max_examples]
    version = sys.version if config.source == "stdlib" else None
    return hashlib.sha256(json.dumps([FORMAT, chosen, stamps, version]).encode()).hexdigest()
