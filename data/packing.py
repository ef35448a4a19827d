"""Tokenise examples, split long ones into segments, and pack the segments into training sequences.

A packed sequence has T tokens, where T is the option data.length. A segment is a piece of an
example, with at most T token ids and a loss mask. A packed sequence has four columns of shape (T,):

- `ids`: token ids
- `loss`: whether the token carries loss, that is, whether it is trained on
- `positions`: position of the token in its segment, from 0
- `documents`: number of the token's segment in the packed sequence, from 0; -1 for padding
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
    digest_data_options_and_file_stats,
    expand_mixture,
    read_training_examples,
)
from data.template import tokenize_chat

if TYPE_CHECKING:
    import torch
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

PACKING_GROUP_SEGMENTS = 8192  # bin packing is applied to groups of this many segments
MIN_MULTIPROCESS_EXAMPLES = 20_000  # fewer examples than this are tokenised in one process
# Segments with fewer loss-carrying tokens are dropped. A training block needs two: its first token,
# which the drafter is given, and at least one token that the drafter predicts.
MIN_LOSS_TOKENS_PER_SEGMENT = 2
RECORDS_PER_CACHE_WRITE = (
    256  # number of examples or packed sequences that one write to the cache contains
)
# Error numbers of a disk that is full, over quota or read-only, or that refuses such large files.
DISK_WRITE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)

Segment = tuple[list[int], list[bool]]  # token ids, and the loss mask with one value per token
ReportProgress = Callable[[int, int], None]  # arguments: examples done, number of all examples


def ignore_progress(done: int, total: int) -> None:
    """Do nothing. Used as the progress callback if the caller gives none."""


def tokenize_example(
    example: dict, tokenizer: "PreTrainedTokenizerBase", max_length: int
) -> list[Segment]:
    """Tokenise an example. Return its token ids and loss mask, split into segments.

    In a chat, the answers and their end tokens carry loss. In plain text, the text carries loss and
    the prompt does not. An end-of-text token with loss is appended to a plain text unless the text
    was cut off. Segments with fewer than MIN_LOSS_TOKENS_PER_SEGMENT tokens that carry loss are
    dropped.

    max_length: maximum number of tokens of a segment

    Raises ExcludedExample if the chat template changes an answer, or if all segments are dropped.
    Raises InvalidExample for recorded token ids outside the vocabulary.
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
        raise ExcludedExample("the example has fewer than two tokens to train on")
    return segments


def best_fit_decreasing(lengths: Iterable[int], capacity: int) -> Iterator[list[int]]:
    """Distribute segments over packed sequences; yield the segment indices of each packed sequence.

    The method is best-fit decreasing bin packing: the longest segments are placed first, each into
    the fullest packed sequence that has enough space. Each group of PACKING_GROUP_SEGMENTS
    consecutive segments is packed separately. The indices of a packed sequence are sorted. The
    packed sequences of a group are sorted by their first index.

    lengths: number of tokens of each segment, at most `capacity`
    capacity: number of tokens of a packed sequence
    """
    numbered_lengths = enumerate(lengths)
    while group := list(islice(numbered_lengths, PACKING_GROUP_SEGMENTS)):
        sequences: list[list[int]] = []
        # sorted pairs (number of free tokens, index in `sequences`)
        free_space: list[tuple[int, int]] = []
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
    """Concatenate segments to a packed sequence, pad it, and return its four columns.

    ids, loss: token ids and loss mask of each segment; in total at most `length` tokens
    length: number of tokens of the packed sequence
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


def generate_example_cache_rows(config: DataConfig) -> Iterator[dict[str, str]]:
    """Yield what `load_training_examples` stores in its cache for one data set, as rows of a table.

    Every row except the last holds a training example, as JSON in the column "row". The last row
    holds the counts of used and unused examples, as JSON in the column "counts". Examples are
    stored as JSON because the tools and tool arguments of a chat have no fixed schema.
    """
    counts = ExampleCounts()
    for example in read_training_examples(config, counts):
        yield {"row": json.dumps(example, ensure_ascii=False), "counts": ""}
    yield {"row": "", "counts": json.dumps(asdict(counts), ensure_ascii=False)}


@dataclass(frozen=True)
class CountedDataset:
    """A data set and the counts of its examples.

    dataset: the data set, or None if no example can be trained on
    """

    dataset: "Dataset | None"
    counts: ExampleCounts


def load_training_examples(config: DataConfig) -> CountedDataset:
    """Return the training examples of one data set, as JSON in the column `row`.

    The first call writes the examples to the memory-mapped cache of the library `datasets`. Later
    calls read this cache.
    """
    from datasets import Dataset, Features, Value

    columns = Features({"row": Value("string"), "counts": Value("string")})
    digest = digest_data_options_and_file_stats(config)
    with unwrap_dataset_generation_errors():
        cached = Dataset.from_generator(
            generate_example_cache_rows, columns, gen_kwargs={"config": config}, fingerprint=digest
        )
    counts = ExampleCounts(**json.loads(cached[-1]["counts"]))
    examples = cached.select(range(len(cached) - 1)).select_columns("row")
    return CountedDataset(examples, counts)


@contextmanager
def unwrap_dataset_generation_errors() -> Generator[None]:
    """Raise the cause of a DatasetGenerationError instead of the DatasetGenerationError itself.

    This applies inside the `with` block. If the cause is an OSError of DISK_WRITE_ERRNOS, this
    OSError is raised unchanged. If the cause is another OSError or a ValueError, the data cannot be
    read, and a ValueError with the message of the cause is raised.
    """
    from datasets.exceptions import DatasetGenerationError

    try:
        yield
    except DatasetGenerationError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in DISK_WRITE_ERRNOS:
            raise cause from None
        if isinstance(cause, ValueError | OSError):
            raise ValueError(f"training examples cannot be read: {cause}") from None
        raise


def load_mixed_examples(config: DataConfig) -> CountedDataset:
    """Return the training examples of all data sets of a configuration, as JSON in column `row`.

    The number of examples from each data set is proportional to its weight. All examples of the
    data set that is smallest relative to its weight are used. The choice of examples does not
    depend on the seed of the run.
    """
    from datasets import concatenate_datasets

    counts = ExampleCounts()
    datasets = []
    weights = []
    for data, weight in expand_mixture(config):
        raw = load_training_examples(data)
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
    """Tokenise a batch of examples, and return the segments as columns with an entry per segment.

    The columns are `ids`, `loss`, `size` (number of tokens), `excluded`, `invalid` and `described`.
    An example that cannot be trained on becomes an empty segment: `excluded` holds the reason if
    the example is well-formed, `invalid` holds the reason if it is malformed. For a malformed
    example, `described` holds the location and the error message. All other entries are "".

    batch: examples as JSON in the column `row`
    indices: indices of the examples in the data set
    rank: number of this process, from 0; None without multiprocessing
    total: number of examples of the data set
    processes: number of processes; the process with rank 0 estimates the progress of all processes
    progress: called with the progress after the batch
    length: maximum number of tokens of a segment
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
    """Return a copy of the counts in which the examples that tokenisation rejected are counted as
    excluded or invalid, and no longer as used.

    tokenized: data set with the columns that `tokenize_batch` returns
    counts: counts of the examples before tokenisation
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
    """Return the packed sequences of all data sets of a configuration, with the example counts.

    Each row of the returned data set is a packed sequence, whose four tensors are described at the
    top of this file. The packed sequences are stored in a memory-mapped cache. The cache key
    depends on the data options, the sizes and modification times of the files,
    DATA_CACHE_FORMAT_VERSION and `digest`.

    digest: digest of the tokenizer and its chat template
    progress: called while examples are tokenised

    Raises ValueError if more than the fraction data.max_invalid_fraction of the examples is
    invalid.
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
    counts.check_invalid_fraction(config.max_invalid_fraction)
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
    with unwrap_dataset_generation_errors():
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

    digest: digest of the tokenizer and its chat template
    """
    datasets = [
        (digest_data_options_and_file_stats(data), weight)
        for data, weight in expand_mixture(config)
    ]
    key_fields = [DATA_CACHE_FORMAT_VERSION, digest, datasets, config.max_examples, config.length]
    return hashlib.sha256(json.dumps(key_fields).encode()).hexdigest()[:32]


def _tokenize_dataset(
    raw: "Dataset",
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    key: str,
    progress: ReportProgress,
) -> "Dataset":
    """Tokenise all examples; return a data set with the columns that `tokenize_batch` returns.

    The data set is stored in the cache of the library `datasets` under `key`.
    """
    from datasets import Features, List, Value

    processes = 1
    if len(raw) > MIN_MULTIPROCESS_EXAMPLES:
        processes = os.cpu_count() or 1
    if processes > 1:
        # There is already one process per core, so tokenizers must not start threads.
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
    """Return the packed sequences of all data sets of a configuration.

    digest: digest of the tokenizer and its chat template
    progress: called while examples are tokenised

    Raises ValueError if no example can be trained on, or too many examples are invalid.
    """
    prepared = prepare_packed_dataset(config, tokenizer, digest, progress)
    refuse_empty_dataset(prepared.counts)
    assert prepared.dataset is not None
    return prepared.dataset


def refuse_empty_dataset(counts: ExampleCounts) -> None:
    """Raise ValueError if no example can be trained on. The message states why."""
    if counts.used:
        return
    advice = ""
    if NO_ANSWER_EXCLUSION_REASON in counts.excluded:
        advice = "; run ./launch.sh regenerate to let the target generate answers"
    elif counts.held_out:
        advice = "; every tenth example is held out for evaluation, so add more examples"
    raise ValueError(f"no example to train on; {counts.summarise_unused()}{advice}")


def tokenize_training_examples(
    config: DataConfig, tokenizer: "PreTrainedTokenizerBase", counts: ExampleCounts
) -> Iterator[list[int]]:
    """Yield the token ids of each training example without splitting them into segments.

    counts: updated with the numbers of used, excluded and invalid examples

    Raises ValueError if more than the fraction data.max_invalid_fraction of the examples is
    invalid.
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
    counts.check_invalid_fraction(config.max_invalid_fraction)


def get_shuffled_index(sequence_number: int, dataset_size: int, seed: int) -> int:
    """Return the index in the data set of the packed sequence that a training run reads next.

    Each epoch reads the data set in another random order. The index depends only on the arguments,
    so a resumed run needs no saved state of a data loader.

    sequence_number: number of packed sequences that the run has read before, in all epochs
    """
    epoch, offset = divmod(sequence_number, dataset_size)
    return int(_epoch_permutation(dataset_size, seed, epoch)[offset])


@lru_cache(maxsize=2)
def _epoch_permutation(dataset_size: int, seed: int, epoch: int) -> "torch.Tensor":
    """Return the indices of all packed sequences, (dataset_size,), in the order of an epoch."""
    import torch

    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(dataset_size, generator=generator)


def read_batch(
    dataset: Any, sequences_read: int, count: int, seed: int
) -> "dict[str, torch.Tensor]":
    """Return the next `count` packed sequences of a run, as columns of shape (count, data.length).

    sequences_read: number of packed sequences that the run has read before, in all epochs
    """
    indices = [
        get_shuffled_index(draw, len(dataset), seed)
        for draw in range(sequences_read, sequences_read + count)
    ]
    return dataset[indices]
