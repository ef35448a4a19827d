"""Documents to packed training rows: tokenise, cut to length, fill rows, mark what carries loss.

T row length. A packed row has `ids`, `positions` (restarting in every document), `documents` (numbered from 0, -1 on
padding) and `loss` (whether a token may be learnt from), each (T,).
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from data.chat import normalise, tokenize_chat
from data.corpus import stdlib_documents

if TYPE_CHECKING:
    import torch

# What the embedded target wrote after prompts from its training text, by train/pretrain.py.
ANSWERS = Path(__file__).resolve().parent / "embedded" / "answers.jsonl"


@dataclass
class DataConfig:
    """What to train on."""

    source: str = "embedded"  # embedded: what the embedded target wrote; stdlib: Python's sources; jsonl: your files
    path: str | None = None  # jsonl: a file, or a folder of *.jsonl and *.parquet; row formats: data/chat.py
    length: int = 512  # tokens in a packed row
    limit: int | None = None  # take only so many documents
    bad_rows: int = 100  # rows that cannot be used and are left out; more end the run

    def check(self) -> None:
        """Raises ValueError for a source that cannot be read."""
        if self.source not in ("embedded", "stdlib", "jsonl"):
            raise ValueError(f"data.source={self.source}: use embedded, stdlib or jsonl")
        if self.source == "jsonl" and not self.path:
            raise ValueError("data.source=jsonl needs data.path=<a .jsonl file or a folder of them>")
        if self.source == "jsonl" and not Path(self.path).exists():
            raise ValueError(f"data.path={self.path}: no such file or folder")
        if self.bad_rows < 0:
            raise ValueError(f"data.bad_rows={self.bad_rows}: 0 or more")
        if self.length < 16:
            raise ValueError(f"data.length={self.length}: a row holds at least 16 tokens")


def _records(file: Path) -> Iterator[tuple[str, object]]:
    """(where, row) of a file; a line that is no JSON comes as its error."""
    if file.suffix == ".parquet":
        from pyarrow.parquet import ParquetFile

        number = 0
        for part in ParquetFile(file).iter_batches():
            for row in part.to_pylist():
                number += 1
                yield f"{file}, row {number}", row
        return
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield f"{file}, line {number}", json.loads(line)
            except ValueError as error:
                yield f"{file}, line {number}", error


def read_rows(path: str, bad_rows: int = 0, answered: bool = True) -> list[dict]:
    """Rows {"prompt", "text", "messages"} of a file or a folder, each once; loss is on "text" or on the assistant's
    messages, which end with an answer or, if not `answered`, with a question.

    Rows that cannot be used are counted, reported with an example, and left out. Raises ValueError, naming file and
    line, when there are more than `bad_rows` of them, or no others.
    """
    folder = Path(path).is_dir()
    files = (
        sorted(f for kind in ("jsonl", "parquet") for f in Path(path).rglob(f"*.{kind}")) if folder else [Path(path)]
    )
    rows, faults, seen, twice = [], [], set(), 0
    for file in files:
        for where, record in _records(file):
            try:
                if isinstance(record, ValueError):
                    raise ValueError(f"no JSON ({record})")
                row = normalise(record, answered)
            except ValueError as error:
                faults.append(f"{where}: {error}")
                continue
            key = hash(json.dumps(row, sort_keys=True))
            twice += key in seen
            if key not in seen:
                seen.add(key)
                rows.append(row)
    check_faults(faults, len(rows) + len(faults), bad_rows)
    if twice:
        print(f"data: {twice} rows are there more than once, and taken once", file=sys.stderr)
    if not rows:
        raise ValueError(f"data.path={path}: no rows in {len(files)} files")
    return rows


def check_faults(faults: list[str], count: int, bad_rows: int) -> None:
    """Reports rows that are left out. Raises ValueError if they are more than `bad_rows`."""
    if len(faults) > bad_rows:
        raise ValueError(f"{len(faults)} of {count} rows cannot be used, data.bad_rows={bad_rows} may be: {faults[0]}")
    if faults:
        print(f"data: {len(faults)} of {count} rows cannot be used and are left out: {faults[0]}", file=sys.stderr)


def held_out_rows(config: DataConfig) -> list[dict]:
    """Rows {"prompt", "text", "messages"} that training never sees: the library's held-out files, or every 50th row of
    one's own."""
    if config.source in ("embedded", "stdlib"):
        return [normalise({"text": document.text}) for document in _with_text("held_out")]
    return read_rows(config.path, config.bad_rows)[::50]


def training_rows(config: DataConfig) -> list[dict]:
    """Rows {"prompt", "text", "messages"} to train on."""
    if config.source == "stdlib":
        rows = [normalise({"text": document.text}) for document in _with_text("train")]
    elif config.source == "embedded":
        rows = read_rows(str(ANSWERS))
    else:
        rows = [row for i, row in enumerate(read_rows(config.path, config.bad_rows)) if i % 50]
    if not rows:
        raise ValueError(f"data.path={config.path}: too few rows, one of fifty is held out for evaluation")
    return rows[: config.limit]


def _with_text(split: str) -> Iterator:
    return (document for document in stdlib_documents(split) if document.text.strip())


def questions(config: DataConfig) -> list[dict]:
    """All rows {"prompt", "text", "messages"} as questions, whatever has been answered to them."""
    if config.source == "jsonl":
        return read_rows(config.path, config.bad_rows, answered=False)[: config.limit]
    return training_rows(config)


def tokenize(rows: dict[str, list], tokenizer, length: int) -> dict[str, list]:
    """A batch of rows to pieces of at most `length` tokens: {"ids": ..., "loss": ..., "fault": ...}.

    The end-of-text token closes a text and carries loss; a prompt does not. Of a chat, the answers do, with what
    ends them. A row that the chat template does not show as it is becomes a piece without tokens and its fault.
    """
    pieces: dict[str, list] = {"ids": [], "loss": [], "fault": []}
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    prompts = tokenizer(rows["prompt"], add_special_tokens=False)["input_ids"]
    texts = tokenizer(rows["text"], add_special_tokens=False)["input_ids"]
    for prompt, text, messages in zip(prompts, texts, rows["messages"], strict=True):
        ids, loss = prompt + text + end, [False] * len(prompt) + [True] * (len(text) + len(end))
        if messages is not None:
            try:
                ids, loss = tokenize_chat(tokenizer, messages)
            except ValueError as error:
                for column, value in zip(pieces.values(), ([], [], str(error)), strict=True):
                    column.append(value)
                continue
        for cut in range(0, len(ids), length):
            if sum(loss[cut : cut + length]) > 1:  # an anchor needs a successor
                pieces["ids"].append(ids[cut : cut + length])
                pieces["loss"].append(loss[cut : cut + length])
                pieces["fault"].append("")
    return pieces


def pack(pieces: dict[str, list], length: int) -> dict[str, list]:
    """Pieces, in order, into rows of exactly `length`; a piece that does not fit opens the next row."""
    rows: dict[str, list] = {"ids": [], "positions": [], "documents": [], "loss": []}
    room = 0
    for ids, loss in zip(pieces["ids"], pieces["loss"], strict=True):
        if len(ids) > room:
            for column in rows.values():
                column.append([])
            room, document = length, 0
        rows["ids"][-1] += ids
        rows["positions"][-1] += range(len(ids))
        rows["documents"][-1] += [document] * len(ids)
        rows["loss"][-1] += loss
        room, document = room - len(ids), document + 1
    for name, filler in (("ids", 0), ("positions", 0), ("documents", -1), ("loss", False)):
        for row in rows[name]:
            row += [filler] * (length - len(row))
    return rows


def packed_rows(config: DataConfig, tokenizer):
    """The training set: a `datasets.Dataset` whose rows are dictionaries of (T,) tensors. Raises ValueError when more
    than `bad_rows` rows do not go through the chat template."""
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    raw = Dataset.from_list(training_rows(config))
    tokenized = raw.map(
        tokenize,
        batched=True,
        batch_size=256,
        remove_columns=raw.column_names,
        fn_kwargs={"tokenizer": tokenizer, "length": config.length},
    )
    faults = [fault for fault in tokenized["fault"] if fault]
    check_faults(faults, len(raw), config.bad_rows)
    tokenized = tokenized.filter(lambda fault: not fault, input_columns="fault")
    packed = tokenized.map(
        pack, batched=True, batch_size=2048, remove_columns=tokenized.column_names, fn_kwargs={"length": config.length}
    )
    return packed.with_format("torch")


def row_index(sample: int, rows: int, seed: int) -> int:
    """Which row the `sample`-th draw of a run is: every epoch a fresh permutation, a pure function of its
    arguments, so that a resumed run needs no loader state."""
    epoch, offset = divmod(sample, rows)
    return int(_epoch_order(rows, seed, epoch)[offset])


@lru_cache(maxsize=2)
def _epoch_order(rows: int, seed: int, epoch: int) -> "torch.Tensor":
    import torch

    return torch.randperm(rows, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


def batch(dataset, first: int, count: int, seed: int) -> "dict[str, torch.Tensor]":
    """Draws `first` .. `first + count - 1` of a run: each column (count, T)."""
    return dataset[[row_index(first + i, len(dataset), seed) for i in range(count)]]
