"""Read training examples from files, data sets of the Hugging Face hub, and mixtures of them.

Every example is used once; data/counts.py counts what becomes of each. An example is {"prompt",
"text", "cut", "chat"}, see data/chat.py, and "where": its file and line.
"""

import gzip
import hashlib
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Literal

from data.chat import normalise_example, require_type
from data.corpus import read_stdlib_documents
from data.counts import ExampleCounts, ExcludedExample, InvalidExample, get_error_reason

# Answers that the embedded target generated for prompts from its training text.
EMBEDDED_ANSWERS_FILE = Path(__file__).resolve().parent / "embedded" / "answers.jsonl"

DATA_SOURCES = ("embedded", "stdlib", "jsonl", "hub", "mixture", "self")
EXAMPLE_FILE_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".txt")

# Contained in the key of cached data sets. Raise it when a change of data/ gives other examples,
# other tokens or another packing, so that cached data sets are made again.
# tests/data/test_packing.py fails after such a change.
DATA_CACHE_FORMAT_VERSION = 6

MAX_JSONL_LINE_CHARACTERS = 64 << 20  # of a .jsonl file
MAX_EXAMPLE_FILE_BYTES = 64 << 20

# Of the first examples of a user's data set one in 10 is held out for evaluation, of the others
# one in 50.
EXAMPLES_WITH_DENSE_HOLD_OUT = 500
DENSE_HOLD_OUT_INTERVAL_EXAMPLES = 10
SPARSE_HOLD_OUT_INTERVAL_EXAMPLES = 50

MIN_DATA_OPTION_VALUES = {"max_examples": 1, "max_invalid_fraction": 0, "length": 16}


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
        """Raise ValueError for options that are out of range or contradict each other."""
        if self.source not in DATA_SOURCES:
            raise ValueError(f"data.source={self.source}: use one of {', '.join(DATA_SOURCES)}")
        if self.source in ("jsonl", "hub") and not self.path:
            raise ValueError(
                f"data.source={self.source} needs data.path=<a file, a folder, or a name on the hub>"
            )
        if self.source == "self" and self.max_examples is None:
            raise ValueError(
                "data.source=self needs data.max_examples=<how many questions the target generates>"
            )
        if self.path is not None:
            self._check_path(self.path)

        if (self.source == "mixture") != bool(self.datasets):
            raise ValueError(
                "data=mixture and data.datasets=[{path: ..., weight: ...}, ...] must be used together"
            )
        if any(not part.weight > 0 for part in self.datasets):
            weights = [part.weight for part in self.datasets]
            raise ValueError(f"data.datasets: weights are {weights}; each must be above 0")

        for name, minimum in MIN_DATA_OPTION_VALUES.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ValueError(f"data.{name}={value}: at least {minimum}")
        if self.max_invalid_fraction > 1:
            raise ValueError(
                f"data.max_invalid_fraction={self.max_invalid_fraction:g}: a share of the examples, from 0 to 1"
            )

    def _check_path(self, path: str) -> None:
        """Raise ValueError for a path that does not exist or that the source does not use."""
        missing = f"data.path={path}: no such file or folder"
        if self.source in ("self", "mixture"):
            raise ValueError(f"data={self.source} and data.path={path}: use only one of them")
        if self.source == "jsonl" and not Path(path).exists():
            raise ValueError(missing)
        if self.source == "hub" and not Path(path).exists() and looks_like_file(path):
            raise ValueError(
                f"{missing}; it is not a name on the hub either, which is <owner>/<name>"
            )
        if self.source in ("embedded", "stdlib"):
            advice = ""
            if not looks_like_file(path):
                advice = f"; for a data set on the hub use data=hub data.path={path}"
            raise ValueError(missing + advice)


def resolve_source(source: str, path: str | None) -> str:
    """Return the source that is read, given the options data.source and data.path.

    A path that exists is the user's own file or folder ("jsonl"), whatever the source. Exceptions:
    "self" and "mixture" have no path, and with "hub" a folder with a README.md is a local copy of a
    data set of the hub.
    """
    if not path or source in ("self", "mixture") or not Path(path).exists():
        return source
    if source == "hub" and (Path(path) / "README.md").is_file():
        return source
    return "jsonl"


def looks_like_file(path: str) -> bool:
    """Return whether a path can only be a file or folder, not <owner>/<name> on the hub."""
    return (
        path.endswith(EXAMPLE_FILE_SUFFIXES)
        or path.startswith((".", "/", "~"))
        or path.count("/") > 1
    )


def refuse_embedded_answers(config: DataConfig, target_path: str, alternatives: str = "") -> None:
    """Raise ValueError if another target would be trained on the embedded target's answers.

    target_path: the option target.path
    alternatives: what else the command can use, added to the error message
    """
    if config.source == "embedded" and target_path != "embedded":
        raise ValueError(
            f"data.source=embedded has answers of the embedded target, not of target.path={target_path}: use data.path=<your files>, data=stdlib{alternatives}"
        )


def expand_mixture(config: DataConfig) -> list[tuple[DataConfig, float]]:
    """Return (data set, weight) of each data set of a configuration; none of them is a mixture."""
    if config.source != "mixture":
        return [(config, 1.0)]
    datasets = []
    for part in config.datasets:
        dataset = replace(config, source="hub", path=part.path, split=part.split, datasets=[])
        datasets.append((dataset, part.weight))
    return datasets


def list_data_files(path: str) -> list[Path]:
    """Return the file at a path, or all data files in a folder and its subfolders.

    Raises ValueError for a device or pipe, which might never end.
    """
    files = [Path(path)]
    if files[0].is_dir():
        files = []
        for suffix in (".jsonl", ".jsonl.gz", ".parquet", ".txt"):
            files += Path(path).rglob(f"*{suffix}")
        files.sort()
    for file in files:
        if file.exists() and not file.is_file():
            raise ValueError(
                f"data.path={path}: {file} is not a regular file, but a device, pipe or folder"
            )
    return files


def _read_records(config: DataConfig) -> Iterator[tuple[str, object]]:
    """Yield (location, record) of a data set. A line that is not JSON is yielded as its error."""
    assert config.path is not None
    if config.source != "hub":
        for file in list_data_files(config.path):
            yield from read_file_records(file)
        return
    from datasets import load_dataset

    try:
        rows: Any = load_dataset(config.path, split=config.split)
    except (OSError, ValueError) as error:  # ConnectionError is an OSError
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"data.path={config.path}, split {config.split}: could not be read ({reason})"
        ) from error
    for number, row in enumerate(rows):
        yield f"{config.path}, row {number}", row


def _read_json_lines(file: Path) -> Iterator[object]:
    """Yield one record a line; a line that is not JSON is yielded as its error.

    A line of more than MAX_JSONL_LINE_CHARACTERS characters is read in pieces, which are not JSON.
    """
    open_file = gzip.open if file.suffix == ".gz" else open
    with open_file(file, "rt", encoding="utf-8-sig", errors="replace") as lines:
        while line := lines.readline(MAX_JSONL_LINE_CHARACTERS):
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                yield InvalidExample("not valid JSON", str(error))


def _read_parquet(file: Path) -> Iterator[object]:
    """Yield the rows of a Parquet file."""
    from pyarrow.parquet import ParquetFile

    for record_batch in ParquetFile(file).iter_batches():
        yield from record_batch.to_pylist()


def _read_json_list(file: Path) -> Iterator[object]:
    """Yield the entries of a JSON file that holds one list."""
    content = json.loads(file.read_text(encoding="utf-8-sig"))
    yield from require_type(content, list, "it does not hold one list of records")


def _read_text_file(file: Path) -> Iterator[object]:
    """Yield a text file as one record. Raises ValueError for a file that is too large."""
    if file.stat().st_size > MAX_EXAMPLE_FILE_BYTES:
        max_megabytes = MAX_EXAMPLE_FILE_BYTES >> 20
        raise ValueError(f"a text of more than {max_megabytes} MB; split it, or use .jsonl")
    yield {"text": file.read_text(encoding="utf-8-sig", errors="replace")}


# By file suffix: what a record is called in error messages, and how records are read. Other
# suffixes are read as JSON lines. All readers skip a byte order mark.
RecordReader = Callable[[Path], Iterator[object]]
RECORD_READERS: dict[str, tuple[str, RecordReader]] = {
    ".parquet": ("row", _read_parquet),
    ".json": ("entry", _read_json_list),
    ".txt": ("text", _read_text_file),
}


def read_file_records(file: Path) -> Iterator[tuple[str, object]]:
    """Yield (location, record) of a file. A line that is not JSON is yielded as its error.

    Raises ValueError, naming the file, if the file is damaged.
    """
    unit, read = RECORD_READERS.get(file.suffix, ("line", _read_json_lines))
    number = 0
    try:
        for number, record in enumerate(read(file), 1):
            yield f"{file}, {unit} {number}", record
    except (OSError, ValueError, RecursionError, EOFError, zlib.error) as error:
        raise ValueError(f"{file}: damaged or cut off after {unit} {number} ({error})") from error


def refuse_self_source(config: DataConfig) -> None:
    """Raise ValueError for data=self, which is questions that do not exist yet."""
    if config.source == "self":
        raise ValueError(
            "data=self stands for questions that the target still has to generate: first run ./launch.sh regenerate data=self target.path=... out=answers.jsonl, then use data=jsonl data.path=answers.jsonl"
        )


def read_examples(
    config: DataConfig, with_answer: bool = True, counts: ExampleCounts | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the examples of the user's own data, each of several equal ones once.

    Only digests of the examples are kept in memory.

    with_answer: end chats with an answer; otherwise end them with a question
    counts: the outcome of every example is added; complete after the last example

    Raises ValueError, naming file and line, if more than the share data.max_invalid_fraction of the
    examples is invalid, or there are none.
    """
    refuse_self_source(config)
    if counts is None:
        counts = ExampleCounts()
    seen_digests = set()
    for location, record in _read_records(config):
        try:
            if isinstance(record, ValueError):
                raise record
            example = normalise_example(record, with_answer)
            # encode() raises UnicodeEncodeError, a ValueError, for half of a surrogate pair.
            content = json.dumps(example, sort_keys=True, ensure_ascii=False).encode()
            digest = hashlib.blake2b(content, digest_size=8).digest()
            if digest in seen_digests:
                raise ExcludedExample("duplicate of an earlier example")
        except ExcludedExample as error:
            counts.count_excluded(error.reason)
            continue
        except ValueError as error:
            counts.count_invalid(get_error_reason(error), f"{location}: {error}")
            continue
        seen_digests.add(digest)
        counts.used += 1
        yield example | {"where": location}

    if not counts.total:
        raise ValueError(f"data.path={config.path}: no examples")
    counts.check_invalid_share(config.max_invalid_fraction)


def is_held_out_index(index: int) -> bool:
    """Return whether the example at this index, from 0, is held out for evaluation.

    The index alone decides, so that examples can be read without knowing how many there are.
    """
    interval = (
        DENSE_HOLD_OUT_INTERVAL_EXAMPLES
        if index < EXAMPLES_WITH_DENSE_HOLD_OUT
        else SPARSE_HOLD_OUT_INTERVAL_EXAMPLES
    )
    return index % interval == 0


def read_held_out_examples(config: DataConfig) -> Iterator[dict[str, Any]]:
    """Yield the examples that training never sees; of a mixture round-robin from its data sets."""
    if config.source in ("embedded", "stdlib"):
        yield from _read_stdlib_examples("held_out")
        return
    yield from round_robin(
        _select_held_out(read_examples(dataset)) for dataset, _ in expand_mixture(config)
    )


def _select_held_out(examples: Iterable[dict]) -> Iterator[dict[str, Any]]:
    """Yield the examples that are held out for evaluation."""
    for index, example in enumerate(examples):
        if is_held_out_index(index):
            yield example


def round_robin(iterables: Iterable[Iterable]) -> Iterator:
    """Yield one item of each iterable in turn until all are exhausted. None is no item."""
    for items in zip_longest(*iterables):
        for item in items:
            if item is not None:
                yield item


def read_training_examples(
    config: DataConfig, counts: ExampleCounts | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the training examples of one data set, at most data.max_examples.

    counts: the outcome of the examples that were read until then is added
    """
    if counts is None:
        counts = ExampleCounts()
    if config.source == "stdlib":
        examples = _read_stdlib_examples("train", counts)
    elif config.source == "embedded":
        examples = read_examples(replace(config, path=str(EMBEDDED_ANSWERS_FILE)), counts=counts)
    else:
        examples = _skip_held_out(read_examples(config, counts=counts), counts)
    yield from islice(examples, config.max_examples)


def _skip_held_out(examples: Iterable[dict], counts: ExampleCounts) -> Iterator[dict[str, Any]]:
    """Yield the examples that are not held out for evaluation, and count the others."""
    for index, example in enumerate(examples):
        if is_held_out_index(index):
            counts.used -= 1
            counts.held_out += 1
        else:
            yield example


def _read_stdlib_examples(
    split: Literal["train", "held_out"], counts: ExampleCounts | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the non-empty source files of Python's standard library as examples."""
    for document in read_stdlib_documents(split):
        if document.text.strip():
            if counts is not None:
                counts.used += 1
            yield normalise_example({"text": document.text}) | {"where": document.name}


def read_questions(
    config: DataConfig, counts: ExampleCounts | None = None
) -> Iterator[dict[str, Any]]:
    """Yield all examples as prompts without their last answers, at most data.max_examples a data
    set.

    counts: the outcome of every example is added

    Raises ValueError if there are none.
    """
    if counts is None:
        counts = ExampleCounts()
    for dataset, _ in expand_mixture(config):
        if dataset.source in ("jsonl", "hub"):
            examples = read_examples(dataset, with_answer=False, counts=counts)
        else:
            examples = read_training_examples(dataset, counts)
        yield from islice(examples, config.max_examples)
    if not counts.used:
        raise ValueError(f"data.path={config.path}: no question to answer; {counts.summarise()}")


def compute_source_digest(config: DataConfig) -> str:
    """Return a digest of what determines the examples of one data set.

    This is DATA_CACHE_FORMAT_VERSION, the options, the files' sizes and modification times, and for
    Python's own sources the version of Python.
    """
    files = []
    if config.source == "jsonl":
        assert config.path is not None
        files = list_data_files(config.path)
    elif config.source == "embedded":
        files = [EMBEDDED_ANSWERS_FILE]
    stamps = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]

    options = [config.source, config.path, config.split, config.max_examples]
    version = sys.version if config.source == "stdlib" else None
    content = json.dumps([DATA_CACHE_FORMAT_VERSION, options, stamps, version])
    return hashlib.sha256(content.encode()).hexdigest()
