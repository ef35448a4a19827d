"""Read training examples from files, from data sets of the Hugging Face hub, and from mixtures.

An example is a dictionary {"prompt", "text", "cut", "chat", "where"}. "where" is the file and line
of the example; data/chat.py explains the other keys. Duplicates of an example are not used.
data/counts.py counts how many examples are used, and how many are not.
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

# Training examples for source=embedded: outputs of the small target model in this repository. Their
# prompts are from the text on which this model was trained.
EMBEDDED_TARGET_ANSWERS_FILE = Path(__file__).resolve().parent / "embedded" / "answers.jsonl"

DATA_SOURCES = ("embedded", "stdlib", "jsonl", "hub", "mixture", "self")
EXAMPLE_FILE_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".txt")

# Part of the cache key of every data set. Increase it after a change of the code that changes the
# examples, their tokens or the packing; old caches are then not used.
# tests/data/test_packing.py fails if this was forgotten.
DATA_CACHE_FORMAT_VERSION = 6

MAX_JSONL_LINE_CHARACTERS = 64 << 20  # longer lines of a .jsonl file are invalid examples
MAX_TEXT_FILE_BYTES = 64 << 20  # maximum size of a .txt file, which is read as one example

# Of the first EXAMPLES_WITH_DENSE_HOLD_OUT examples of a user's data set, every 10th is held out
# for evaluation. Of the examples after these, every 50th is held out.
EXAMPLES_WITH_DENSE_HOLD_OUT = 500
DENSE_HOLD_OUT_INTERVAL_EXAMPLES = 10
SPARSE_HOLD_OUT_INTERVAL_EXAMPLES = 50

# Keys are options of DataConfig, values are the smallest allowed values.
MIN_DATA_OPTION_VALUES = {"max_examples": 1, "max_invalid_fraction": 0, "length": 16}


@dataclass
class MixtureDataset:
    """One data set of a mixture.

    path: a file, a folder, or the name of a data set on the Hugging Face hub
    split: split of a data set on the hub
    weight: relative share of the data set in the examples; with the weights 1 and 3, a quarter of
        the examples comes from the first data set
    """

    path: str
    split: str = "train"
    weight: float = 1.0


@dataclass
class DataConfig:
    """The training data.

    source: 'embedded' is outputs of the small target model in this repository, 'stdlib' is source
        files of Python's standard library, 'jsonl' is your own files, 'hub' is a data set of the
        Hugging Face hub, 'mixture' is several data sets, 'self' is questions that the target
        generates (only for the command regenerate). If `path` is an existing file or folder, the
        source is 'jsonl'
    path: with source 'jsonl' a file, or a folder with .jsonl, .jsonl.gz, .parquet and .txt files (a
        .txt file is one text); with source 'hub' the name of the data set, or a folder with a copy
        of the data set and its README.md
    split: split of the data set, with source 'hub'
    datasets: with source 'mixture' the data sets, each with path, split and weight; the number of
        examples of each data set is proportional to its weight. All examples of the data set that
        is smallest relative to its weight are used
    length: number of tokens of a packed sequence; longer texts are split
    max_examples: maximum number of examples to read; null reads all. With source 'self', the number
        of questions to generate
    max_invalid_fraction: maximum fraction of invalid examples (not JSON, or values of a wrong
        type); if more are invalid, the run ends with an error. Well-formed examples that are
        skipped, such as those without an answer, are not counted as invalid
    """

    source: str = "embedded"
    path: str | None = None
    split: str = "train"
    datasets: list[MixtureDataset] = field(default_factory=list)
    length: int = 512
    max_examples: int | None = None
    max_invalid_fraction: float = 0.05

    def __post_init__(self) -> None:
        self.source = resolve_source(self.source, self.path)

    def check(self) -> None:
        """Raise ValueError for options that are out of range or contradict each other."""
        if self.source not in DATA_SOURCES:
            raise ValueError(
                f"data.source={self.source} is unknown; use one of {', '.join(DATA_SOURCES)}"
            )
        if self.source in ("jsonl", "hub") and not self.path:
            raise ValueError(
                f"data.source={self.source} needs data.path=<a file, a folder, or the name of a "
                "data set on the hub>"
            )
        if self.source == "self" and self.max_examples is None:
            raise ValueError(
                "data.source=self needs data.max_examples=<how many questions the target generates>"
            )
        if self.path is not None:
            self._check_path(self.path)

        if (self.source == "mixture") != bool(self.datasets):
            raise ValueError(
                "data=mixture and data.datasets=[{path: ..., weight: ...}, ...] must be used "
                "together; set both or neither"
            )
        if any(not part.weight > 0 for part in self.datasets):
            weights = [part.weight for part in self.datasets]
            raise ValueError(
                f"data.datasets has the weights {weights}; each weight must be above 0"
            )

        for name, minimum in MIN_DATA_OPTION_VALUES.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ValueError(f"data.{name}={value} is too small; set it to at least {minimum}")
        if self.max_invalid_fraction > 1:
            raise ValueError(
                f"data.max_invalid_fraction={self.max_invalid_fraction:g} is not a fraction of "
                "the examples; set it to a number from 0 to 1"
            )

    def _check_path(self, path: str) -> None:
        """Raise ValueError if `path` does not exist, or if data.source cannot have a path."""
        missing = f"data.path={path}: no such file or folder"
        if self.source in ("self", "mixture"):
            raise ValueError(
                f"data={self.source} cannot be combined with data.path={path}; remove data.path"
            )
        if self.source == "jsonl" and not Path(path).exists():
            raise ValueError(missing)
        if self.source == "hub" and not Path(path).exists() and looks_like_local_path(path):
            raise ValueError(
                f"{missing}, and the name of a data set on the hub has the form <owner>/<name>"
            )
        if self.source in ("embedded", "stdlib"):
            advice = ""
            if not looks_like_local_path(path):
                advice = f"; to read a data set of the hub, use data=hub data.path={path}"
            raise ValueError(missing + advice)


def resolve_source(source: str, path: str | None) -> str:
    """Return the data source to use, given the options data.source and data.path.

    If `path` is an existing file or folder, the data source is "jsonl" (the user's own files),
    whatever `source` is. There are two exceptions. The sources "self" and "mixture" are kept. The
    source "hub" is kept for a folder with a README.md, which is a copy of a data set of the hub.
    """
    if not path or source in ("self", "mixture") or not Path(path).exists():
        return source
    if source == "hub" and (Path(path) / "README.md").is_file():
        return source
    return "jsonl"


def looks_like_local_path(path: str) -> bool:
    """Return whether a path must be a file or folder, because it cannot be a data set on the hub.

    The name of a data set on the hub has the form <owner>/<name>.
    """
    return (
        path.endswith(EXAMPLE_FILE_SUFFIXES)
        or path.startswith((".", "/", "~"))
        or path.count("/") > 1
    )


def refuse_embedded_answers(config: DataConfig, target_path: str, alternatives: str = "") -> None:
    """Raise ValueError if the data are answers of the small target model in this repository, but
    another target is used.

    target_path: the option target.path
    alternatives: text for the error message that names more data sources, such as ", or data=self"
    """
    if config.source == "embedded" and target_path != "embedded":
        raise ValueError(
            "data.source=embedded has answers of the small target model in this repository, not of "
            f"target.path={target_path}; use data.path=<your files>, data=stdlib{alternatives}"
        )


def expand_mixture(config: DataConfig) -> list[tuple[DataConfig, float]]:
    """Split the configuration of a mixture into a (configuration, weight) pair for each data set.

    A configuration that is no mixture is returned unchanged, with weight 1.
    """
    if config.source != "mixture":
        return [(config, 1.0)]
    datasets = []
    for part in config.datasets:
        dataset = replace(config, source="hub", path=part.path, split=part.split, datasets=[])
        datasets.append((dataset, part.weight))
    return datasets


def list_data_files(path: str) -> list[Path]:
    """Return the file at a path, or all data files in a folder and its subfolders.

    Raises ValueError for a device or a pipe, because reading it might never end.
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
                f"data.path={path}: {file} is a device, pipe or folder; only regular files can be "
                "read"
            )
    return files


def _read_records(config: DataConfig) -> Iterator[tuple[str, object]]:
    """Yield (location, record) for each record of a data set in files or on the hub.

    For a line that is not JSON, an InvalidExample exception is yielded as the record.
    """
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
            f"data.path={config.path} with data.split={config.split} could not be read from the "
            f"hub ({reason}); check the name and the split, or use a local copy"
        ) from error
    for number, row in enumerate(rows):
        yield f"{config.path}, row {number}", row


def _read_json_lines(file: Path) -> Iterator[object]:
    """Yield one record per line. For a line that is not JSON, yield an InvalidExample exception.

    A line of more than MAX_JSONL_LINE_CHARACTERS characters is split into several invalid records.
    """
    open_file = gzip.open if file.suffix == ".gz" else open
    with open_file(file, "rt", encoding="utf-8-sig", errors="replace") as lines:
        while line := lines.readline(MAX_JSONL_LINE_CHARACTERS):
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                yield InvalidExample("not valid JSON", str(error))


def _read_parquet(file: Path) -> Iterator[object]:
    """Yield the rows of a Parquet file as dictionaries."""
    from pyarrow.parquet import ParquetFile

    for record_batch in ParquetFile(file).iter_batches():
        yield from record_batch.to_pylist()


def _read_json_list(file: Path) -> Iterator[object]:
    """Yield the entries of a JSON file that holds one list."""
    content = json.loads(file.read_text(encoding="utf-8-sig"))
    yield from require_type(content, list, "the file must contain one JSON list of records")


def _read_text_file(file: Path) -> Iterator[object]:
    """Yield the whole file as one record {"text"}. Raises ValueError if the file is too large."""
    if file.stat().st_size > MAX_TEXT_FILE_BYTES:
        max_megabytes = MAX_TEXT_FILE_BYTES >> 20
        raise ValueError(
            f"the text file has more than {max_megabytes} MB; split it, or use a .jsonl file"
        )
    yield {"text": file.read_text(encoding="utf-8-sig", errors="replace")}


# Keys are file suffixes. Values are the noun for a record in error messages, and the function that
# reads the records. Files with other suffixes are read as JSON lines.
RecordReader = Callable[[Path], Iterator[object]]
RECORD_READERS: dict[str, tuple[str, RecordReader]] = {
    ".parquet": ("row", _read_parquet),
    ".json": ("entry", _read_json_list),
    ".txt": ("text", _read_text_file),
}


def read_file_records(file: Path) -> Iterator[tuple[str, object]]:
    """Yield (location, record) for each record of a file.

    For a line that is not JSON, an InvalidExample exception is yielded as the record. Raises
    ValueError if the file is damaged.
    """
    unit, read = RECORD_READERS.get(file.suffix, ("line", _read_json_lines))
    number = 0
    try:
        for number, record in enumerate(read(file), 1):
            yield f"{file}, {unit} {number}", record
    except (OSError, ValueError, RecursionError, EOFError, zlib.error) as error:
        raise ValueError(f"{file} is damaged or cut off after {unit} {number} ({error})") from error


def refuse_self_source(config: DataConfig) -> None:
    """Raise ValueError for data=self, whose examples must first be generated with `regenerate`."""
    if config.source == "self":
        raise ValueError(
            "data=self stands for questions that the target still has to generate: first run "
            "./launch.sh regenerate data=self target.path=... out=answers.jsonl, then use "
            "data=jsonl data.path=answers.jsonl"
        )


def read_examples(
    config: DataConfig, ends_with_answer: bool = True, counts: ExampleCounts | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the examples of one data set in files or on the hub, without duplicates.

    ends_with_answer: if True, each chat ends with its last answer; if False, with its last question
    counts: updated with the numbers of used, excluded and invalid examples while examples are read

    Raises ValueError if there are no examples, or if more than the fraction
    data.max_invalid_fraction of the examples is invalid. The message states the file and line of
    the first invalid example.
    """
    refuse_self_source(config)
    if counts is None:
        counts = ExampleCounts()
    seen_digests = set()
    for location, record in _read_records(config):
        try:
            if isinstance(record, ValueError):
                raise record
            example = normalise_example(record, ends_with_answer)
            # For a text with half of a surrogate pair, encode() raises UnicodeEncodeError. This is
            # a ValueError, so the example is counted as invalid.
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
        raise ValueError(f"data.path={config.path} contains no examples")
    counts.check_invalid_fraction(config.max_invalid_fraction)


def is_held_out_index(index: int) -> bool:
    """Return whether the example at an index, from 0, is held out for evaluation."""
    interval = (
        DENSE_HOLD_OUT_INTERVAL_EXAMPLES
        if index < EXAMPLES_WITH_DENSE_HOLD_OUT
        else SPARSE_HOLD_OUT_INTERVAL_EXAMPLES
    )
    return index % interval == 0


def read_held_out_examples(config: DataConfig) -> Iterator[dict[str, Any]]:
    """Yield the examples that are held out for evaluation, which training never reads.

    For a mixture, one example of each data set is yielded in turn.
    """
    if config.source in ("embedded", "stdlib"):
        yield from _read_stdlib_examples("held_out")
        return
    yield from round_robin(
        _select_held_out(read_examples(dataset)) for dataset, _ in expand_mixture(config)
    )


def _select_held_out(examples: Iterable[dict]) -> Iterator[dict[str, Any]]:
    """Yield only those of the given examples that are held out for evaluation."""
    for index, example in enumerate(examples):
        if is_held_out_index(index):
            yield example


def round_robin(iterables: Iterable[Iterable]) -> Iterator:
    """Yield one item of each iterable in turn until all iterables are exhausted.

    Items that are None are skipped.
    """
    for items in zip_longest(*iterables):
        for item in items:
            if item is not None:
                yield item


def read_training_examples(
    config: DataConfig, counts: ExampleCounts | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the training examples of one data set, at most data.max_examples of them.

    counts: updated with the numbers of used and unused examples while the examples are read
    """
    if counts is None:
        counts = ExampleCounts()
    if config.source == "stdlib":
        examples = _read_stdlib_examples("train", counts)
    elif config.source == "embedded":
        examples = read_examples(
            replace(config, path=str(EMBEDDED_TARGET_ANSWERS_FILE)), counts=counts
        )
    else:
        examples = _skip_held_out(read_examples(config, counts=counts), counts)
    yield from islice(examples, config.max_examples)


def _skip_held_out(examples: Iterable[dict], counts: ExampleCounts) -> Iterator[dict[str, Any]]:
    """Yield the examples that are not held out for evaluation, and count the held-out ones."""
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
    """Yield the examples to which `./launch.sh regenerate` lets the target generate new answers.

    A chat from the user's files or from the hub ends with its last question. At most
    data.max_examples examples of each data set are yielded.

    counts: updated with the numbers of used and unused examples while the examples are read

    Raises ValueError if no example can be used.
    """
    if counts is None:
        counts = ExampleCounts()
    for dataset, _ in expand_mixture(config):
        if dataset.source in ("jsonl", "hub"):
            examples = read_examples(dataset, ends_with_answer=False, counts=counts)
        else:
            examples = read_training_examples(dataset, counts)
        yield from islice(examples, config.max_examples)
    if not counts.used:
        raise ValueError(
            f"data.path={config.path} contains no example that the target could answer; "
            f"{counts.summarise_unused()}"
        )


def digest_data_options_and_file_stats(config: DataConfig) -> str:
    """Return a digest that identifies the examples of one data set, for cache keys.

    The digest is computed from DATA_CACHE_FORMAT_VERSION, the options, and the sizes and
    modification times of the files. With source 'stdlib', the version of Python is included.
    """
    files = []
    if config.source == "jsonl":
        assert config.path is not None
        files = list_data_files(config.path)
    elif config.source == "embedded":
        files = [EMBEDDED_TARGET_ANSWERS_FILE]
    stamps = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]

    options = [config.source, config.path, config.split, config.max_examples]
    version = sys.version if config.source == "stdlib" else None
    content = json.dumps([DATA_CACHE_FORMAT_VERSION, options, stamps, version])
    return hashlib.sha256(content.encode()).hexdigest()
