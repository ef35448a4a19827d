"""Documents to packed training rows: tokenise, cut to length, fill rows, mark what carries loss.

T row length. A packed row has `ids`, `positions` (restarting in every document), `documents` (numbered from 0, -1 on
padding) and `loss` (whether a token may be learnt from), each (T,).
"""

import hashlib
import json
import os
import sys
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING

from data.rows import FORMAT, DataConfig, check_faults, single, source_digest, training_rows
from data.template import tokenize_chat

if TYPE_CHECKING:
    import torch
    from datasets import Dataset

WINDOW = 8192  # pieces that are packed together
MANY = 20_000  # texts from which on all cores tokenise


def tokenize(rows: dict[str, list], tokenizer, length: int, long: str = "split") -> dict[str, list]:
    """Turn a batch of rows into pieces of at most `length` tokens: {"ids": ..., "loss": ..., "fault": ...}; longer
    texts are split, truncated or dropped.

    The end-of-text token closes a text that is not cut, and carries loss; a prompt does not. Of a chat (JSON, "" for
    none), the answers do, with what ends them. A row that the chat template does not show as it is becomes a piece
    without tokens and its fault.
    """
    pieces: dict[str, list] = {"ids": [], "loss": [], "fault": []}
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    prompts = tokenizer(rows["prompt"], add_special_tokens=False)["input_ids"]
    texts = tokenizer(rows["text"], add_special_tokens=False)["input_ids"]
    for prompt, text, cut, chat in zip(prompts, texts, rows["cut"], rows["chat"], strict=True):
        closed = text if cut else text + end
        found = [(prompt + closed, [False] * len(prompt) + [True] * len(closed))]
        if chat:
            try:
                found = tokenize_chat(tokenizer, json.loads(chat))
            except ValueError as error:
                for column, value in zip(pieces.values(), ([], [], str(error)), strict=True):
                    column.append(value)
                continue
        for ids, loss in found:
            for part in cut_to_length(ids, loss, length, long):
                for column, value in zip(pieces.values(), (*part, ""), strict=True):
                    column.append(value)
    return pieces


def cut_to_length(ids: list[int], loss: list[bool], length: int, long: str) -> Iterator[tuple[list[int], list[bool]]]:
    """Yield the pieces of at most `length` tokens of a text, as `long` says, that have something to learn."""
    if long == "drop" and len(ids) > length:
        return
    for start in range(0, len(ids) if long == "split" else min(length, len(ids)), length):
        if sum(loss[start : start + length]) > 1:  # an anchor needs a successor
            yield ids[start : start + length], loss[start : start + length]


def best_fit(lengths: Iterable[int], length: int) -> Iterator[list[int]]:
    """Yield which pieces, by number, share a row of `length`: of every WINDOW pieces the longest first, each into the
    fullest row that has room for it. Rows and what is in them keep the order of the pieces; the same pieces give the
    same rows however many processes do the rest."""
    numbered = enumerate(lengths)
    while window := list(islice(numbered, WINDOW)):
        rows: list[list[int]] = []
        rooms: list[tuple[int, int]] = []  # (room left, row), ascending
        for i, size in sorted(window, key=lambda piece: -piece[1]):
            at = bisect_left(rooms, (size, -1))
            if at == len(rooms):
                rows.append([])
                room, row = length, len(rows) - 1
            else:
                room, row = rooms.pop(at)
            rows[row].append(i)
            insort(rooms, (room - size, row))
        yield from sorted(map(sorted, rows))


def lay_out(pieces: dict[str, list], rows: Iterable[list[int]], length: int) -> dict[str, list]:
    """Return packed rows of exactly `length`, of pieces by their place in `pieces`."""
    packed: dict[str, list] = {"ids": [], "positions": [], "documents": [], "loss": []}
    for row in rows:
        ids = [id for i in row for id in pieces["ids"][i]]
        rest = length - len(ids)
        sizes = [len(pieces["ids"][i]) for i in row]
        packed["ids"].append(ids + [0] * rest)
        packed["positions"].append([at for size in sizes for at in range(size)] + [0] * rest)
        packed["documents"].append([n for n, size in enumerate(sizes) for _ in range(size)] + [-1] * rest)
        packed["loss"].append([on for i in row for on in pieces["loss"][i]] + [False] * rest)
    return packed


def pack(pieces: dict[str, list], length: int) -> dict[str, list]:
    """Pack pieces into rows of exactly `length`."""
    return lay_out(pieces, best_fit(map(len, pieces["ids"]), length), length)


def planned_rows(tokenized: "Dataset", length: int) -> Iterator[dict]:
    """Yield the rows of a tokenised data set, as the numbers of their pieces."""
    sizes = tokenized.select_columns("size").with_format("numpy")
    every = (int(size) for batch in sizes.iter(WINDOW) for size in batch["size"])
    yield from ({"pieces": row} for row in best_fit(every, length))


def fill_rows(plan: dict[str, list], tokenized: "Dataset", length: int) -> dict[str, list]:
    """Return the packed rows of a batch of `planned_rows`."""
    pieces = tokenized.select_columns(["ids", "loss"])[[i for row in plan["pieces"] for i in row]]
    counts = iter(range(len(pieces["ids"])))
    return lay_out(pieces, [list(islice(counts, len(row))) for row in plan["pieces"]], length)


def flat(row: dict) -> dict:
    """Return a row as `tokenize` takes it: its chat as JSON, which has room for any tools and arguments."""
    return row | {"chat": "" if row["chat"] is None else json.dumps(row["chat"], ensure_ascii=False)}


def stored_rows(config: DataConfig) -> Iterator[dict]:
    """Yield the rows of one data set to train on, each flat."""
    yield from map(flat, training_rows(config))


def raw_rows(config: DataConfig) -> "Dataset":
    """Return one data set's training rows, read once into a memory-mapped cache of `datasets`."""
    from datasets import Dataset, Features, Value
    from datasets.exceptions import DatasetGenerationError

    features = Features(
        {"prompt": Value("string"), "text": Value("string"), "cut": Value("bool"), "chat": Value("string")}
    )
    try:
        return Dataset.from_generator(
            stored_rows, features=features, gen_kwargs={"config": config}, fingerprint=source_digest(config)
        )
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, ValueError):
            raise error.__cause__ from None
        if isinstance(error.__cause__, OSError):  # names the file
            raise ValueError(f"training rows cannot be read: {error.__cause__}") from None
        raise


def mixed_rows(config: DataConfig) -> "Dataset":
    """Return the training rows of all data sets of a configuration, in numbers proportional to their weights, such that
    the scarcest is used up. Which rows these are does not depend on the run's seed."""
    from datasets import concatenate_datasets

    parts = [(raw_rows(part), weight) for part, weight in single(config)]
    if len(parts) > 1:
        scale = min(len(rows) / weight for rows, weight in parts)
        parts = [(rows.shuffle(seed=0).select(range(round(scale * weight))), weight) for rows, weight in parts]
    rows = concatenate_datasets([rows for rows, _ in parts])
    return rows if config.limit is None else rows.select(range(min(config.limit, len(rows))))


def tokenize_part(
    rows: dict[str, list], indices: list[int], rank: int | None, total: int, processes: int, progress, **options
) -> dict[str, list]:
    """`tokenize` some of `total` rows, and report how far all processes, this one being like the others, have come."""
    pieces = tokenize(rows, **options)
    if not rank:
        progress(min(total, (indices[-1] + 1) * processes), total)
    return pieces | {"size": [len(ids) for ids in pieces["ids"]]}


def worker_count(config: DataConfig, texts: int) -> int | None:
    """Return how many processes prepare so many texts, None for this one alone."""
    count = config.num_proc or (os.cpu_count() or 1 if texts > MANY else 1)
    if count > 1:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # processes instead of threads
    return count if count > 1 else None


def packed_rows(
    config: DataConfig, tokenizer, digest: str, progress: Callable[[int, int], None] = lambda done, total: None
) -> "Dataset":
    """Return the training set: a `datasets.Dataset` whose rows are dictionaries of (T,) tensors, memory-mapped.

    It is cached. The key is what shapes the rows: the data options, the sizes and times of files, FORMAT, and `digest`,
    which stands for the tokenizer and its chat template (`infer.targets.target.tokenizer_digest`). `progress(texts
    done, texts)` is called while there is something to tokenise. Raises ValueError
    when more than `bad_rows` rows do not go through the chat template, or there is nothing to train on."""
    from datasets import Dataset, Features, List, Value, disable_progress_bars

    disable_progress_bars()
    raw = mixed_rows(config)
    parts = [(source_digest(part), weight) for part, weight in single(config)]
    shape = [FORMAT, digest, parts, config.limit, config.length, config.long]
    key = hashlib.sha256(json.dumps(shape).encode()).hexdigest()[:32]
    processes = worker_count(config, len(raw))
    lists = {"ids": List(Value("int32")), "loss": List(Value("bool"))}
    tokenized = raw.map(
        tokenize_part,
        batched=True,
        with_indices=True,
        with_rank=True,
        batch_size=256,
        remove_columns=raw.column_names,
        features=Features(lists | {"fault": Value("string"), "size": Value("int32")}),
        fn_kwargs={"tokenizer": tokenizer, "length": config.length, "long": config.long}
        | {"total": len(raw), "processes": processes or 1, "progress": progress},
        num_proc=processes,
        new_fingerprint=f"{key}-tokenized",
    )
    faults = [fault for fault in tokenized.with_format(None)["fault"] if fault]
    check_faults(faults, len(raw), config.bad_rows)
    if faults:
        tokenized = tokenized.filter(lambda fault: not fault, input_columns="fault", new_fingerprint=f"{key}-sound")
    if len(tokenized) == 0:
        raise ValueError(
            f"data.source={config.source}: no row to train on is left (one of ten is held out for evaluation, "
            f"and data.long={config.long} may drop texts of more than {config.length} tokens)"
        )
    plan = Dataset.from_generator(
        planned_rows,
        features=Features({"pieces": List(Value("int64"))}),
        gen_kwargs={"tokenized": tokenized, "length": config.length},
        fingerprint=f"{key}-planned",
    )
    packed = plan.map(
        fill_rows,
        batched=True,
        batch_size=256,
        remove_columns=plan.column_names,
        features=Features(lists | {"positions": List(Value("int32")), "documents": List(Value("int32"))}),
        fn_kwargs={"tokenized": tokenized, "length": config.length},
        num_proc=processes if len(plan) > 256 else None,
        new_fingerprint=f"{key}-packed",
    )
    return packed.with_format("torch")


def token_documents(config: DataConfig, tokenizer) -> Iterator[list[int]]:
    """Yield every training row, uncut, as token ids: what an n-gram model counts. Raises ValueError when more than
    `bad_rows` rows do not go through the chat template."""
    rows, faults = mixed_rows(config), []
    for start in range(0, len(rows), 256):
        pieces = tokenize(rows[start : start + 256], tokenizer, sys.maxsize, "truncate")
        faults += [fault for fault in pieces["fault"] if fault]
        yield from (ids for ids in pieces["ids"] if ids)
    check_faults(faults, len(rows), config.bad_rows)


def row_index(sample: int, rows: int, seed: int) -> int:
    """Return which row the `sample`-th draw of a run is: every epoch a fresh permutation, a pure function of its
    arguments, so that a resumed run needs no loader state."""
    epoch, offset = divmod(sample, rows)
    return int(_epoch_order(rows, seed, epoch)[offset])


@lru_cache(maxsize=2)
def _epoch_order(rows: int, seed: int, epoch: int) -> "torch.Tensor":
    import torch

    return torch.randperm(rows, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


def batch(dataset, first: int, count: int, seed: int) -> "dict[str, torch.Tensor]":
    """Return draws `first` .. `first + count - 1` of a run: each column (count, T)."""
    return dataset[[row_index(first + i, len(dataset), seed) for i in range(count)]]
