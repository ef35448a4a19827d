"""Rows to packed training rows: tokenise, cut to length, fill rows, mark what carries loss.

T row length. A packed row has `ids`, `positions` (restarting in every document), `documents`
(numbered from 0, -1 on padding) and `loss` (whether a token may be learnt from), each (T,). A piece
is the token ids of a text of at most T tokens, and which of them carry loss.
"""

import errno
import hashlib
import json
import os
import sys
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import chain, islice
from typing import TYPE_CHECKING

from data.chat import NO_ANSWER
from data.counts import ExampleCounts, ExcludedExample
from data.rows import FORMAT, DataConfig, single, source_digest, training_rows
from data.template import tokenize_chat

if TYPE_CHECKING:
    import torch
    from datasets import Dataset

WINDOW = 8192  # pieces that are packed together
MANY = 20_000  # texts from which on all cores tokenise
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)  # of writing, not of reading


def pieces_of(row: dict, tokenizer, length: int) -> list[tuple[list[int], list[bool]]]:
    """Return a row as pieces of at most `length` tokens that have something to learn; longer texts
    are split.

    The end-of-text token closes a text that is not cut, and carries loss; a prompt does not. Of a
    chat, the answers do, with what ends them. Raises ExcludedExample for a chat that the template
    does not show as it is and where there is nothing to learn, InvalidExample for ids that are no
    tokens.
    """
    if row["chat"]:
        texts = tokenize_chat(tokenizer, row["chat"])
    else:
        prompt, text = (
            tokenizer(row[part], add_special_tokens=False)["input_ids"]
            for part in ("prompt", "text")
        )
        if not row["cut"] and tokenizer.eos_token_id is not None:
            text = [*text, tokenizer.eos_token_id]
        texts = [(prompt + text, [False] * len(prompt) + [True] * len(text))]
    pieces = [
        (ids[start : start + length], loss[start : start + length])
        for ids, loss in texts
        for start in range(0, len(ids), length)
        if sum(loss[start : start + length]) > 1  # an anchor needs a successor
    ]
    if not pieces:
        raise ExcludedExample("fewer than two tokens to learn")
    return pieces


def best_fit(lengths: Iterable[int], length: int) -> Iterator[list[int]]:
    """Yield which pieces, by number, share a row of `length`: of every WINDOW pieces the longest
    first, each into the fullest row that has room for it. Rows and what is in them keep the order
    of the pieces."""
    numbered = enumerate(lengths)
    while window := list(islice(numbered, WINDOW)):
        rows: list[list[int]] = []
        rooms: list[tuple[int, int]] = []  # (room left, row), ascending
        for i, size in sorted(window, key=lambda piece: -piece[1]):
            at = bisect_left(rooms, (size, -1))
            if at == len(rooms):
                rows.append([])
                room = length
                row = len(rows) - 1
            else:
                room, row = rooms.pop(at)
            rows[row].append(i)
            insort(rooms, (room - size, row))
        yield from sorted(map(sorted, rows))


def lay_out(ids: list[list[int]], loss: list[list[bool]], length: int) -> dict[str, list]:
    """Return a packed row of exactly `length`, of pieces that fit into it."""
    sizes = [len(piece) for piece in ids]
    rest = length - sum(sizes)
    return {
        "ids": [*chain(*ids), *[0] * rest],
        "loss": [*chain(*loss), *[False] * rest],
        "positions": [*chain(*map(range, sizes)), *[0] * rest],
        "documents": [n for n, size in enumerate(sizes) for _ in range(size)] + [-1] * rest,
    }


def stored_rows(config: DataConfig) -> Iterator[dict]:
    """Yield the rows of one data set to train on, each as JSON, which has room for any tools and
    arguments; then, last, one without a row that has the counts of all examples."""
    counts = ExampleCounts()
    for row in training_rows(config, counts):
        yield {"row": json.dumps(row, ensure_ascii=False), "counts": ""}
    yield {"row": "", "counts": json.dumps(asdict(counts), ensure_ascii=False)}


@dataclass(frozen=True)
class CountedRows:
    """Rows of a data set, None where no example is learnt from; and what became of all its
    examples."""

    rows: "Dataset | None"
    counts: ExampleCounts


def raw_rows(config: DataConfig) -> CountedRows:
    """Return one data set's training rows, read once into a memory-mapped cache of `datasets`."""
    from datasets import Dataset, Features, Value

    columns = Features({"row": Value("string"), "counts": Value("string")})
    digest = source_digest(config)
    with plain_errors():
        stored = Dataset.from_generator(
            stored_rows, columns, gen_kwargs={"config": config}, fingerprint=digest
        )
    counts = ExampleCounts(**json.loads(stored[-1]["counts"]))
    return CountedRows(stored.select(range(len(stored) - 1)).select_columns("row"), counts)


@contextmanager
def plain_errors() -> Iterator[None]:
    """Raise the error that `datasets` hides in its own while it writes a cache: an OSError of the
    cache's disk as it is, one of the rows as a ValueError."""
    from datasets.exceptions import DatasetGenerationError

    try:
        yield
    except DatasetGenerationError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in DISK_ERRORS:
            raise cause from None
        if isinstance(cause, ValueError | OSError):  # which name the file
            raise ValueError(f"training rows cannot be read: {cause}") from None
        raise


def mixed_rows(config: DataConfig) -> CountedRows:
    """Return the training rows of all data sets of a configuration, in numbers proportional to
    their weights, such that the scarcest is used up. Which rows these are does not depend on the
    run's seed."""
    from datasets import concatenate_datasets

    counts = ExampleCounts()
    parts = []
    for part, weight in single(config):
        counted = raw_rows(part)
        counts.add(counted.counts)
        parts.append((counted.rows, weight))
    if len(parts) > 1:
        scale = min(len(rows) / weight for rows, weight in parts)
        parts = [
            (rows.shuffle(seed=0).select(range(round(scale * weight))), weight)
            for rows, weight in parts
        ]
    rows = concatenate_datasets([rows for rows, _ in parts])
    if config.max_examples is not None:
        rows = rows.select(range(min(config.max_examples, len(rows))))
    counts.not_taken += counts.used - len(rows)
    counts.used = len(rows)
    return CountedRows(rows, counts)


def tokenize(
    rows: dict[str, list],
    indices: list[int],
    rank: int | None,
    total: int,
    processes: int,
    progress,
    **options,
) -> dict[str, list]:
    """Return the pieces of some of `total` rows, and report how far all processes have come. An
    example that is not learnt from becomes a piece without tokens, with the reason under `excluded`
    or `invalid`, and the whole sentence under `described`."""
    columns = {name: [] for name in ("ids", "loss", "excluded", "invalid", "described")}

    def add_piece(
        ids: list[int], loss: list[bool], excluded: str = "", invalid: str = "", described: str = ""
    ) -> None:
        for name, value in zip(columns, (ids, loss, excluded, invalid, described), strict=True):
            columns[name].append(value)

    for row in map(json.loads, rows["row"]):
        try:
            for ids, loss in pieces_of(row, **options):
                add_piece(ids, loss)
        except ExcludedExample as excluded:
            add_piece([], [], excluded=excluded.reason)
        except ValueError as error:
            described = f"{row['where']}: {error}"
            add_piece([], [], invalid=getattr(error, "reason", str(error)), described=described)
    if not rank:
        progress(min(total, (indices[-1] + 1) * processes), total)
    return columns | {"size": list(map(len, columns["ids"]))}


def count_rejected(tokenized: "Dataset", counts: ExampleCounts) -> ExampleCounts:
    """Return the counts with what became of the examples when they were tokenised."""
    counts = replace(counts, excluded=dict(counts.excluded), invalid=dict(counts.invalid))
    column = tokenized.data.column
    for entry in column("excluded").value_counts().to_pylist():
        if entry["values"]:
            counts.exclude(entry["values"], entry["counts"])
            counts.used -= entry["counts"]
    for entry in column("invalid").value_counts().to_pylist():
        if entry["values"]:
            first = next(filter(None, column("described").to_pylist()))
            counts.invalidate(entry["values"], first, entry["counts"])
            counts.used -= entry["counts"]
    return counts


def filled_rows(tokenized: "Dataset", length: int) -> Iterator[dict[str, list]]:
    """Yield the packed rows of a tokenised data set."""
    pieces = tokenized.select_columns(["ids", "loss"])
    yield from (
        lay_out(**pieces[row], length=length) for row in best_fit(tokenized["size"], length)
    )


def prepare_rows(
    config: DataConfig,
    tokenizer,
    digest: str,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> CountedRows:
    """Return the training set, a `datasets.Dataset` whose rows are dictionaries of (T,) tensors,
    memory-mapped; and what became of all examples.

    It is cached. The key is what shapes the rows: data options, files' sizes and times, FORMAT, and
    `digest` of the tokenizer and its chat template. `progress(texts done, texts)` is called
    meanwhile. Raises ValueError when more than `max_invalid` of the examples are broken.
    """
    from datasets import Dataset, Features, List, Value, disable_progress_bars

    disable_progress_bars()
    mixed = mixed_rows(config)
    raw = mixed.rows
    if not len(raw):
        return CountedRows(None, mixed.counts)
    parts = [(source_digest(part), weight) for part, weight in single(config)]
    shape = [FORMAT, digest, parts, config.max_examples, config.length]
    key = hashlib.sha256(json.dumps(shape).encode()).hexdigest()[:32]
    processes = (os.cpu_count() or 1) if len(raw) > MANY else 1
    if processes > 1:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # processes instead of threads
    lists = {"ids": List(Value("int32")), "loss": List(Value("bool"))}
    reasons = dict.fromkeys(("excluded", "invalid", "described"), Value("string"))
    options = {"tokenizer": tokenizer, "length": config.length}
    tokenized = raw.map(
        tokenize,
        batched=True,
        with_indices=True,
        with_rank=True,
        batch_size=256,
        remove_columns=raw.column_names,
        features=Features(lists | reasons | {"size": Value("int32")}),
        fn_kwargs=options | {"total": len(raw), "processes": processes, "progress": progress},
        num_proc=processes if processes > 1 else None,
        new_fingerprint=f"{key}-tokenized",
    )
    counts = count_rejected(tokenized, mixed.counts)
    counts.check(config.max_invalid_fraction)
    if not counts.used:
        return CountedRows(None, counts)
    if counts.used < len(raw):
        tokenized = tokenized.filter(
            lambda size: size > 0, input_columns="size", new_fingerprint=f"{key}-sound"
        )
    with plain_errors():
        packed = Dataset.from_generator(
            filled_rows,
            features=Features(
                lists | {"positions": List(Value("int32")), "documents": List(Value("int32"))}
            ),
            gen_kwargs={"tokenized": tokenized, "length": config.length},
            fingerprint=f"{key}-packed",
            writer_batch_size=256,
        )
    return CountedRows(packed.with_format("torch"), counts)


def packed_rows(
    config: DataConfig,
    tokenizer,
    digest: str,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> "Dataset":
    """Return the rows of `prepare_rows`. Raises ValueError where there are none."""
    prepared = prepare_rows(config, tokenizer, digest, progress)
    refuse_no_rows(prepared.counts)
    return prepared.rows


def refuse_no_rows(counts: ExampleCounts) -> None:
    """Raise ValueError, with the reasons, where no example is learnt from."""
    if counts.used:
        return
    advice = ""
    if NO_ANSWER in counts.excluded:
        advice = "; ./launch.sh regenerate lets the target write answers"
    elif counts.held_out:
        advice = "; one example of ten is held out for evaluation"
    raise ValueError(f"no example to train on; {counts.summary()}{advice}")


def token_documents(config: DataConfig, tokenizer, counts: ExampleCounts) -> Iterator[list[int]]:
    """Yield every training row, uncut, as token ids: what an n-gram model counts. Add what became
    of all examples to `counts`. Raises ValueError when more than `max_invalid` of them are
    broken."""
    mixed = mixed_rows(config)
    counts.add(mixed.counts)
    for stored in mixed.rows:
        row = json.loads(stored["row"])
        try:
            yield from (ids for ids, _ in pieces_of(row, tokenizer, sys.maxsize))
        except ExcludedExample as excluded:
            counts.exclude(excluded.reason)
            counts.used -= 1
        except ValueError as error:
            counts.invalidate(getattr(error, "reason", str(error)), f"{row['where']}: {error}")
            counts.used -= 1
    counts.check(config.max_invalid_fraction)


def row_index(sample: int, rows: int, seed: int) -> int:
    """Return which row the `sample`-th draw of a run is: every epoch a fresh permutation, a pure
    function of its arguments, so that a resumed run needs no loader state."""
    epoch, offset = divmod(sample, rows)
    return int(_epoch_order(rows, seed, epoch)[offset])


@lru_cache(maxsize=2)
def _epoch_order(rows: int, seed: int, epoch: int) -> "torch.Tensor":
    import torch

    return torch.randperm(rows, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


def batch(dataset, first: int, count: int, seed: int) -> "dict[str, torch.Tensor]":
    """Return draws `first` .. `first + count - 1` of a run: each column (count, T)."""
    return dataset[[row_index(first + i, len(dataset), seed) for i in range(count)]]
