"""Rows to learn from: files, data sets of the hub, mixtures of them; each row once, broken ones counted
and left out.

A row is {"prompt", "text", "cut", "chat"}, see data/chat.py.
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

from data.chat import NothingWhole, checked, normalise
from data.corpus import stdlib_documents

# What the embedded target wrote after prompts from its training text.
ANSWERS = Path(__file__).resolve().parent / "embedded" / "answers.jsonl"
SOURCES = ("embedded", "stdlib", "jsonl", "hub", "mixture", "self")
# Part of the key of cached rows. Raise it when a change of data/ gives other rows, other tokens or
# another packing: rows that are in a cache are then made again. tests/data/test_packing.py notices such
# a change.
FORMAT = 5
LONGEST = 64 << 20  # characters of a line, bytes of a text
# Of the user's own rows one in 10 is kept for evaluation while they are few, one in 50 of those behind
# the first 500.
HELD_OUT, FEW, OF_FEW = 50, 500, 10


@dataclass
class DataPart:
    """One data set of a mixture: a file, a folder, or a name on the hub.

    path: a file, a folder, or a name on the hub
    split: split of a data set on the hub
    weight: its share of the rows, relative to the other parts'
    """

    path: str
    split: str = "train"
    weight: float = 1.0


@dataclass
class DataConfig:
    """What to train on.

    source: where rows come from. embedded: what the embedded target wrote; stdlib: Python's sources;
        jsonl: your files; hub: a data set of the Hugging Face hub; mixture: several of them, in parts;
        self: of regenerate, questions that the target writes
    path: of jsonl, a file, or a folder of .jsonl(.gz), .parquet and .txt files, the last a text each;
        of hub, the name or folder
    split: of hub, which split
    parts: of mixture, its parts, see DataPart; as many rows as the scarcest one allows
    length: tokens in a packed row; longer texts are split
    limit: most documents that are taken; None: all. Of self, how many questions are written
    bad_rows: most rows that may be left out because they cannot be used, or, below 1, the largest share
        of all rows; more end the run
    """

    source: str = "embedded"
    path: str | None = None
    split: str = "train"
    parts: list[DataPart] = field(default_factory=list)
    length: int = 512
    limit: int | None = None
    bad_rows: float = 100

    def check(self) -> None:
        """Raise ValueError for a source that cannot be read."""
        if self.source not in SOURCES:
            raise ValueError(f"data.source={self.source}: use one of {', '.join(SOURCES)}")
        if self.source in ("jsonl", "hub") and not self.path:
            raise ValueError(f"data.source={self.source} needs data.path=<a file, a folder, or a name on the hub>")
        if self.source == "self" and self.limit is None:
            raise ValueError("data.source=self needs data.limit=<how many questions the target writes>")
        if self.source == "jsonl" and not Path(self.path).exists():
            raise ValueError(f"data.path={self.path}: no such file or folder")
        if (self.source == "mixture") != bool(self.parts):
            raise ValueError("data.parts=[{path: ..., weight: ...}, ...] and data=mixture belong together")
        if any(not part.weight > 0 for part in self.parts):
            raise ValueError(f"data.parts: weights are above 0, not {[part.weight for part in self.parts]}")
        for name, least in (("limit", 1), ("bad_rows", 0), ("length", 16)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"data.{name}={value}: at least {least}")


def check_source(config: DataConfig, target: str, instead: str = "") -> None:
    """Raise ValueError where another target would read what the embedded one wrote. `instead`: what a
    command takes besides."""
    if config.source == "embedded" and target != "embedded":
        raise ValueError(
            "data.source=embedded is what the embedded target wrote: use data=jsonl with data.path=<your files>, "
            f"data=stdlib{instead}, for target.path={target}"
        )


def single(config: DataConfig) -> list[tuple[DataConfig, float]]:
    """Return the data sets that a configuration stands for, none of them a mixture, with their
    weights."""
    if config.source != "mixture":
        return [(config, 1.0)]
    parts = []
    for part in config.parts:
        source = "jsonl" if Path(part.path).exists() else "hub"
        parts.append((replace(config, source=source, path=part.path, split=part.split, parts=[]), part.weight))
    return parts


def files_of(path: str) -> list[Path]:
    """Return the files that a path stands for. Raises ValueError for a device or pipe, which might
    never end."""
    found = [Path(path)]
    if found[0].is_dir():
        found = sorted(file for kind in ("jsonl", "jsonl.gz", "parquet", "txt") for file in found[0].rglob(f"*.{kind}"))
    for file in found:
        if file.exists() and not file.is_file():
            raise ValueError(f"data.path={path}: {file} is no regular file, but a device, pipe or folder")
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
        raise ValueError(f"data.path={config.path}, split {config.split}: could not be read ({reason})") from error
    yield from ((f"{config.path}, row {number}", row) for number, row in enumerate(rows))


def _lines(file: Path) -> Iterator[object]:
    """Yield a row a line. A line of more than LONGEST characters comes in parts, which are no JSON."""
    opened = gzip.open if file.suffix == ".gz" else open
    with opened(file, "rt", encoding="utf-8-sig", errors="replace") as lines:
        while line := lines.readline(LONGEST):
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                yield ValueError(f"no JSON ({error})")


def _parquet(file: Path) -> Iterator[object]:
    from pyarrow.parquet import ParquetFile

    for part in ParquetFile(file).iter_batches():
        yield from part.to_pylist()


def _list(file: Path) -> Iterator[object]:
    yield from checked(json.loads(file.read_text(encoding="utf-8-sig")), list, "it is not one list of rows")


def _text(file: Path) -> Iterator[object]:
    if file.stat().st_size > LONGEST:
        raise ValueError(f"a text of more than {LONGEST >> 20} MB; split it, or use .jsonl")
    yield {"text": file.read_text(encoding="utf-8-sig", errors="replace")}


# Kinds of files by their last suffix: what a row is called, how rows are read. A byte order mark is no
# part of a row.
FILES = {".parquet": ("row", _parquet), ".json": ("entry", _list), ".txt": ("text", _text)}


def file_records(file: Path) -> Iterator[tuple[str, object]]:
    """(where, row) of a file of FILES, or else a .jsonl or .jsonl.gz; a line that is no JSON comes as
    its error. Raises ValueError, naming the file, where it is damaged."""
    unit, read = FILES.get(file.suffix, ("line", _lines))
    number = 0
    try:
        for number, row in enumerate(read(file), 1):
            yield f"{file}, {unit} {number}", row
    except (OSError, ValueError, RecursionError, EOFError, zlib.error) as error:  # of pyarrow, json and gzip
        raise ValueError(f"{file}: damaged or cut off after {unit} {number} ({error})") from error


def refuse_unwritten(config: DataConfig) -> None:
    """Raise ValueError for data=self, which no file has."""
    if config.source == "self":
        raise ValueError(
            "data=self are questions that the target is still to write: ./launch.sh regenerate data=self "
            "target.path=... out=answers.jsonl, then data=jsonl data.path=answers.jsonl"
        )


def read_rows(config: DataConfig, answered: bool = True) -> Iterator[dict]:
    """Yield rows of the user's own data, each once; loss is on "text" or on the assistant's messages,
    which end with an answer or, if not `answered`, with a question. Only digests of the rows are kept
    in memory.

    Rows that cannot be used are counted, reported with an example, and left out. Raises ValueError,
    naming file and line, when there are more than `bad_rows` of them, or no others.
    """
    refuse_unwritten(config)
    faults, seen, count, cut = [], set(), 0, 0
    for where, record in _records(config):
        count += 1
        try:
            if isinstance(record, ValueError):
                raise record
            row = normalise(record, answered)
            # no row with half a surrogate pair
            said = json.dumps(row, sort_keys=True, ensure_ascii=False).encode()
        except NothingWhole:
            cut += 1
            continue
        except ValueError as error:
            faults.append(f"{where}: {error}")
            if len(faults) > config.bad_rows >= 1:
                break  # of a share it is seen at the end
            continue
        key = hashlib.blake2b(said, digest_size=8).digest()
        if key not in seen:
            seen.add(key)
            yield row
    check_faults(faults, count, config.bad_rows)
    if cut:
        print(f"data: {cut} rows are left out, as their answers were cut within a thought", file=sys.stderr)
    if twice := count - len(faults) - cut - len(seen):
        print(f"data: {twice} rows are there more than once, and taken once", file=sys.stderr)
    if not seen:
        raise ValueError(f"data.path={config.path}: no rows")


def check_faults(faults: list[str], count: int, bad_rows: float) -> None:
    """Report rows that are left out. Raises ValueError if they are all rows, or more than `bad_rows`,
    below 1 a share of all."""
    said = f"{len(faults)} of {count} rows cannot be used"
    if len(faults) > (bad_rows * count if bad_rows < 1 else bad_rows):
        raise ValueError(f"{said}, data.bad_rows={bad_rows:g} may be: {faults[0]}")
    if faults and len(faults) == count:
        raise ValueError(f"{said}: {faults[0]}")
    if faults:
        print(f"data: {said} and are left out: {faults[0]}", file=sys.stderr)


def is_held_out(number: int) -> bool:
    """Return whether the row of this number, counted from 0, is kept for evaluation. It follows from
    the number alone, so that rows can be read without knowing how many there are."""
    return number % (OF_FEW if number < FEW else HELD_OUT) == 0


def held_out_rows(config: DataConfig) -> Iterator[dict]:
    """Yield the rows that training never sees: the library's held-out files, or those of the user's own
    that `is_held_out`; of a mixture, in turns from all its parts."""
    if config.source in ("embedded", "stdlib"):
        yield from _library("held_out")
        return
    parts = [(row for i, row in enumerate(read_rows(part)) if is_held_out(i)) for part, _ in single(config)]
    yield from in_turn(parts)


def in_turn(sources: Iterable[Iterable]) -> Iterator:
    """Yield what several sources have, one of each in turn, until all are at their end."""
    for together in zip_longest(*sources):
        yield from (one for one in together if one is not None)


def training_rows(config: DataConfig) -> Iterator[dict]:
    """Yield the rows of one data set to train on."""
    if config.source == "stdlib":
        rows = _library("train")
    elif config.source == "embedded":
        rows = read_rows(replace(config, source="jsonl", path=str(ANSWERS)))
    else:
        rows = (row for i, row in enumerate(read_rows(config)) if not is_held_out(i))
    yield from islice(rows, config.limit)


def _library(split: str) -> Iterator[dict]:
    return (normalise({"text": document.text}) for document in stdlib_documents(split) if document.text.strip())


def questions(config: DataConfig) -> Iterator[dict]:
    """Yield all rows as questions, whatever their answers."""
    for part, _ in single(config):
        own = part.source in ("jsonl", "hub")
        yield from islice(read_rows(part, answered=False) if own else training_rows(part), config.limit)


def source_digest(config: DataConfig) -> str:
    """Return a digest of what shapes the rows of one data set before they are packed: where they come
    from, their files' sizes and times, FORMAT, and of Python's own sources the version."""
    files = files_of(config.path) if config.source == "jsonl" else [ANSWERS] if config.source == "embedded" else []
    stamps = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    chosen = [config.source, config.path, config.split, config.limit, config.bad_rows]
    version = sys.version if config.source == "stdlib" else None
    return hashlib.sha256(json.dumps([FORMAT, chosen, stamps, version]).encode()).hexdigest()
