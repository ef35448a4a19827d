"""Pack examples into training sequences: tokenise, split to length, fill, mark what carries loss.

T: length of a packed sequence (data.length). A packed sequence has the columns `ids`, `positions`
(restarting in every document), `documents` (numbered from 0, -1 on padding) and `loss` (whether a
token carries loss), each (T,). A segment is at most T consecutive token ids of an example with
their loss mask.
"""

import errno
import hashlib
import json
import os
import sys
from bisect import bisect_left, insort
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from data.chat import NO_ANSWER_EXCLUSION_REASON
from data.counts import ExampleCounts, ExcludedExample, get_error_reason
from data.rows import (
    DATA_CACHE_FORMAT_VERSION,
    DataConfig,
    compute_source_digest,
    expand_mixture,
    read_training_examples,
)
from data.template import tokenize_chat

if TYPE_CHECKING:
    import torch
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

PACKING_GROUP_SEGMENTS = 8192  # segments that are packed together
MIN_MULTIPROCESS_EXAMPLES = 20_000  # fewer examples are tokenised in one process
MIN_LOSS_TOKENS_PER_SEGMENT = 2  # of a segment: an anchor needs a token after it
RECORDS_PER_CACHE_WRITE = 256  # examples or packed sequences that are written to the cache at once
DISK_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)

Segment = tuple[list[int], list[bool]]  # token ids and loss mask
ReportProgress = Callable[[int, int], None]  # called with (examples done, all examples)


def ignore_progress(done: int, total: int) -> None:
    """Do nothing; the default of `ReportProgress` arguments."""


def tokenize_example(
    example: dict, tokenizer: "PreTrainedTokenizerBase", max_length: int
) -> list[Segment]:
    """Return an example as segments of at most `max_length` tokens that carry loss.

    Of plain text, the text and its end-of-text token carry loss (the latter unless the text was cut
    off), the prompt does not. Of a chat, the answers and their end tokens carry loss. Longer token
    sequences are split, and segments with fewer than MIN_LOSS_TOKENS_PER_SEGMENT are dropped.

    Raises ExcludedExample for a chat that the template changes or if no segment is left, and
    InvalidExample for ids outside the vocabulary.
    """
    if example["chat"]:
        sequences = tokenize_chat(tokenizer, example["chat"])
    else:
        prompt_ids = tokenizer(example["prompt"], add_special_tokens=False)["input_ids"]
        text_ids = tokenizer(example["text"], add_special_tokens=False)["input_ids"]
        if not example["cut"] and tokenizer.eos_token_id is not None:
            text_ids = [*text_ids, tokenizer.eos_token_id]
        loss_mask = [False] * len(prompt_ids) + [True] * len(text_ids)
        sequences = [(prompt_ids + text_ids, loss_mask)]

    segments = []
    for ids, loss in sequences:
        for start in range(0, len(ids), max_length):
            segment_loss = loss[start : start + max_length]
            if sum(segment_loss) >= MIN_LOSS_TOKENS_PER_SEGMENT:
                segments.append((ids[start : start + max_length], segment_loss))
    if not segments:
        raise ExcludedExample("fewer than two tokens carry loss")
    return segments


def best_fit_decreasing(lengths: Iterable[int], capacity: int) -> Iterator[list[int]]:
    """Yield the segment indices of each packed sequence (best-fit decreasing bin packing).

    Of every PACKING_GROUP_SEGMENTS segments the longest is placed first, each into the fullest
    sequence that still has space for it. Sequences, and the segments in them, stay in input order.

    lengths: tokens of each segment, at most `capacity`
    capacity: tokens of a packed sequence
    """
    numbered_lengths = enumerate(lengths)
    while group := list(islice(numbered_lengths, PACKING_GROUP_SEGMENTS)):
        sequences: list[list[int]] = []
        free_space: list[tuple[int, int]] = []  # ascending (free tokens, index into `sequences`)
        for segment, length in sorted(group, key=lambda item: -item[1]):
            fullest = bisect_left(free_space, (length, -1))
            if fullest == len(free_space):
                sequences.append([])
                free_tokens = capacity
                sequence = len(sequences) - 1
            else:
                free_tokens, sequence = free_space.pop(fullest)
            sequences[sequence].append(segment)
            insort(free_space, (free_tokens - length, sequence))
        yield from sorted(map(sorted, sequences))


def pack_segments(
    ids: Sequence[list[int]], loss: Sequence[list[bool]], length: int
) -> dict[str, list]:
    """Return the columns of one packed sequence.

    ids, loss: token ids and loss mask of each segment; together at most `length` tokens
    length: tokens of the packed sequence, T
    """
    sizes = [len(segment) for segment in ids]
    padding = length - sum(sizes)
    documents = []
    for number, size in enumerate(sizes):
        documents += [number] * size
    return {
        "ids": [*chain(*ids), *[0] * padding],
        "loss": [*chain(*loss), *[False] * padding],
        "positions": [*chain(*map(range, sizes)), *[0] * padding],
        "documents": documents + [-1] * padding,
    }


def generate_cached_examples(config: DataConfig) -> Iterator[dict[str, str]]:
    """Yield the cache rows of one data set: each training example as JSON, then the counts.

    JSON can hold any tools and arguments, for which a table would need a fixed schema. Only the
    last row has counts, and it has no example.
    """
    counts = ExampleCounts()
    for example in read_training_examples(config, counts):
        yield {"row": json.dumps(example, ensure_ascii=False), "counts": ""}
    yield {"row": "", "counts": json.dumps(asdict(counts), ensure_ascii=False)}


@dataclass(frozen=True)
class CountedDataset:
    """A data set and the counts of its examples.

    dataset: None if no example can be trained on
    """

    dataset: "Dataset | None"
    counts: ExampleCounts


def load_raw_examples(config: DataConfig) -> CountedDataset:
    """Return one data set's training examples as JSON in the column `row`.

    They are read once into a memory-mapped cache of `datasets`.
    """
    from datasets import Dataset, Features, Value

    columns = Features({"row": Value("string"), "counts": Value("string")})
    digest = compute_source_digest(config)
    with unwrap_generation_errors():
        cached = Dataset.from_generator(
            generate_cached_examples, columns, gen_kwargs={"config": config}, fingerprint=digest
        )
    counts = ExampleCounts(**json.loads(cached[-1]["counts"]))
    examples = cached.select(range(len(cached) - 1)).select_columns("row")
    return CountedDataset(examples, counts)


@contextmanager
def unwrap_generation_errors() -> Generator[None]:
    """Raise the cause of an error that `datasets` wraps while it writes a cache.

    An OSError of the cache's disk is raised unchanged, an error of the data as a ValueError.
    """
    from datasets.exceptions import DatasetGenerationError

    try:
        yield
    except DatasetGenerationError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in DISK_WRITE_ERRORS:
            raise cause from None
        if isinstance(cause, ValueError | OSError):
            raise ValueError(f"training examples cannot be read: {cause}") from None
        raise


def load_mixed_examples(config: DataConfig) -> CountedDataset:
    """Return the training examples of all data sets of a configuration, as JSON in column `row`.

    The numbers of examples are proportional to the weights, such that the scarcest data set is used
    up. The choice does not depend on the run's seed.
    """
    from datasets import concatenate_datasets

    counts = ExampleCounts()
    datasets = []
    weights = []
    for data, weight in expand_mixture(config):
        raw = load_raw_examples(data)
        assert raw.dataset is not None
        counts.add_counts(raw.counts)
        datasets.append(raw.dataset)
        weights.append(weight)

    if len(datasets) > 1:
        pairs = list(zip(datasets, weights, strict=True))
        scale = min(len(dataset) / weight for dataset, weight in pairs)
        datasets = [
            dataset.shuffle(seed=0).select(range(round(scale * weight)))
            for dataset, weight in pairs
        ]
    mixed = concatenate_datasets(datasets)
    if config.max_examples is not None:
        mixed = mixed.select(range(min(config.max_examples, len(mixed))))
    counts.not_taken += counts.used - len(mixed)
    counts.used = len(mixed)
    return CountedDataset(mixed, counts)


def tokenize_batch(
    batch: dict[str, list],
    indices: list[int],
    rank: int | None,
    total: int,
    processes: int,
    progress: ReportProgress,
    tokenizer: "PreTrainedTokenizerBase",
    length: int,
) -> dict[str, list]:
    """Return the segments of a batch of examples as columns, one entry a segment.

    An example that cannot be trained on becomes a segment without tokens, with the reason in the
    column `excluded` or `invalid` and the whole error message in `described`.

    batch: examples as JSON in the column `row`
    indices: positions of the examples in the data set
    rank: number of this process, from 0; None without multiprocessing
    total: examples of the data set
    processes: number of processes; the first one reports the estimated progress of all
    length: maximum tokens of a segment
    """
    columns = {name: [] for name in ("ids", "loss", "excluded", "invalid", "described")}

    def add_segment(
        ids: list[int], loss: list[bool], excluded: str = "", invalid: str = "", described: str = ""
    ) -> None:
        columns["ids"].append(ids)
        columns["loss"].append(loss)
        columns["excluded"].append(excluded)
        columns["invalid"].append(invalid)
        columns["described"].append(described)

    for example in map(json.loads, batch["row"]):
        try:
            for ids, loss in tokenize_example(example, tokenizer, length):
                add_segment(ids, loss)
        except ExcludedExample as error:
            add_segment([], [], excluded=error.reason)
        except ValueError as error:
            description = f"{example['where']}: {error}"
            add_segment([], [], invalid=get_error_reason(error), described=description)

    if not rank:
        progress(min(total, (indices[-1] + 1) * processes), total)
    return columns | {"size": [len(ids) for ids in columns["ids"]]}


def count_rejected_examples(tokenized: "Dataset", counts: ExampleCounts) -> ExampleCounts:
    """Return the counts after tokenisation.

    tokenized: columns of `tokenize_batch`
    counts: counts of the examples as they were read
    """
    counts = replace(counts, excluded=dict(counts.excluded), invalid=dict(counts.invalid))
    column = tokenized.data.column
    for entry in column("excluded").value_counts().to_pylist():
        if entry["values"]:
            counts.count_excluded(entry["values"], entry["counts"])
            counts.used -= entry["counts"]
    for entry in column("invalid").value_counts().to_pylist():
        if entry["values"]:
            first_description = next(filter(None, column("described").to_pylist()))
            counts.count_invalid(entry["values"], first_description, entry["counts"])
            counts.used -= entry["counts"]
    return counts


def generate_packed_sequences(tokenized: "Dataset", length: int) -> Iterator[dict[str, list]]:
    """Yield the packed sequences of a tokenised data set, each of `length` tokens."""
    segments = tokenized.select_columns(["ids", "loss"])
    for indices in best_fit_decreasing(tokenized["size"], length):
        selected = segments[indices]
        yield pack_segments(selected["ids"], selected["loss"], length)


def prepare_packed_dataset(
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    digest: str,
    progress: ReportProgress = ignore_progress,
) -> CountedDataset:
    """Return the memory-mapped training set, whose rows are packed sequences of (T,) tensors.

    The result is cached. The cache key consists of what determines the packed sequences: the data
    options, sizes and times of the files, DATA_CACHE_FORMAT_VERSION, and `digest`.

    digest: of the tokenizer and its chat template
    progress: called while examples are tokenised

    Raises ValueError if more than the share data.max_invalid_fraction of the examples is invalid.
    """
    from datasets import Dataset, Features, List, Value, disable_progress_bars

    disable_progress_bars()
    mixed = load_mixed_examples(config)
    raw = mixed.dataset
    if not raw:
        return CountedDataset(None, mixed.counts)

    key = compute_cache_key(config, digest)
    tokenized = _tokenize_dataset(raw, config, tokenizer, key, progress)
    counts = count_rejected_examples(tokenized, mixed.counts)
    counts.check_invalid_share(config.max_invalid_fraction)
    if not counts.used:
        return CountedDataset(None, counts)
    if counts.used < len(raw):
        tokenized = tokenized.filter(
            lambda size: size > 0, input_columns="size", new_fingerprint=f"{key}-sound"
        )

    columns = {
        "ids": List(Value("int32")),
        "loss": List(Value("bool")),
        "positions": List(Value("int32")),
        "documents": List(Value("int32")),
    }
    with unwrap_generation_errors():
        packed = Dataset.from_generator(
            generate_packed_sequences,
            features=Features(columns),
            gen_kwargs={"tokenized": tokenized, "length": config.length},
            fingerprint=f"{key}-packed",
            writer_batch_size=RECORDS_PER_CACHE_WRITE,
        )
    return CountedDataset(packed.with_format("torch"), counts)


def compute_cache_key(config: DataConfig, digest: str) -> str:
    """Return the cache key of a packed data set.

    digest: of the tokenizer and its chat template
    """
    datasets = [(compute_source_digest(data), weight) for data, weight in expand_mixture(config)]
    key_fields = [DATA_CACHE_FORMAT_VERSION, digest, datasets, config.max_examples, config.length]
    return hashlib.sha256(json.dumps(key_fields).encode()).hexdigest()[:32]


def _tokenize_dataset(
    raw: "Dataset",
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    key: str,
    progress: ReportProgress,
) -> "Dataset":
    """Return the segments of all examples with the columns of `tokenize_batch`, cached by `key`."""
    from datasets import Features, List, Value

    processes = 1
    if len(raw) > MIN_MULTIPROCESS_EXAMPLES:
        processes = os.cpu_count() or 1
    if processes > 1:
        # The processes use all cores, so that a tokenizer must not start threads of its own.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    columns = {
        "ids": List(Value("int32")),
        "loss": List(Value("bool")),
        "excluded": Value("string"),
        "invalid": Value("string"),
        "described": Value("string"),
        "size": Value("int32"),
    }
    arguments = {
        "tokenizer": tokenizer,
        "length": config.length,
        "total": len(raw),
        "processes": processes,
        "progress": progress,
    }
    return raw.map(
        tokenize_batch,
        batched=True,
        with_indices=True,
        with_rank=True,
        batch_size=RECORDS_PER_CACHE_WRITE,
        remove_columns=raw.column_names,
        features=Features(columns),
        fn_kwargs=arguments,
        num_proc=processes if processes > 1 else None,
        new_fingerprint=f"{key}-tokenized",
    )


def load_packed_dataset(
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    digest: str,
    progress: ReportProgress = ignore_progress,
) -> "Dataset":
    """Return the data set of `prepare_packed_dataset`. Raises ValueError if it is empty."""
    prepared = prepare_packed_dataset(config, tokenizer, digest, progress)
    refuse_empty_dataset(prepared.counts)
    assert prepared.dataset is not None
    return prepared.dataset


def refuse_empty_dataset(counts: ExampleCounts) -> None:
    """Raise ValueError with the reasons if no example can be trained on."""
    if counts.used:
        return
    advice = ""
    if NO_ANSWER_EXCLUSION_REASON in counts.excluded:
        advice = "; ./launch.sh regenerate lets the target generate answers"
    elif counts.held_out:
        advice = "; one example of ten is held out for evaluation"
    raise ValueError(f"no example to train on; {counts.summarise()}{advice}")


def tokenize_documents(
    config: DataConfig, tokenizer: "PreTrainedTokenizerBase", counts: ExampleCounts
) -> Iterator[list[int]]:
    """Yield the token ids of every training example, not split: what an n-gram model counts.

    counts: the counts of the examples are added to these

    Raises ValueError if more than the share data.max_invalid_fraction of the examples is invalid.
    """
    mixed = load_mixed_examples(config)
    assert mixed.dataset is not None
    counts.add_counts(mixed.counts)
    for cached in mixed.dataset:
        example = json.loads(cached["row"])
        try:
            for ids, _ in tokenize_example(example, tokenizer, sys.maxsize):
                yield ids
        except ExcludedExample as error:
            counts.count_excluded(error.reason)
            counts.used -= 1
        except ValueError as error:
            counts.count_invalid(get_error_reason(error), f"{example['where']}: {error}")
            counts.used -= 1
    counts.check_invalid_share(config.max_invalid_fraction)


def get_shuffled_index(draw: int, dataset_size: int, seed: int) -> int:
    """Return the data set index of a run's draw number `draw`, counted from 0.

    Every epoch is a new permutation. It is a pure function of its arguments, so that a resumed run
    needs no data loader state.
    """
    epoch, offset = divmod(draw, dataset_size)
    return int(_epoch_permutation(dataset_size, seed, epoch)[offset])


@lru_cache(maxsize=2)
def _epoch_permutation(dataset_size: int, seed: int, epoch: int) -> "torch.Tensor":
    """Return the order of an epoch's draws, (dataset_size,) indices."""
    import torch

    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(dataset_size, generator=generator)


def read_batch(dataset: Any, first_draw: int, count: int, seed: int) -> "dict[str, torch.Tensor]":
    """Return draws `first_draw` to `first_draw + count - 1` of a run: columns of (count, T)."""
    indices = [
        get_shuffled_index(draw, len(dataset), seed)
        for draw in range(first_draw, first_draw + count)
    ]
    return dataset[indices]
