"""Documents to packed training rows: tokenise, cut to length, fill rows, mark what carries loss.

T row length. A packed row has `ids`, `positions` (restarting in every document), `documents` (numbered from 0, -1 on
padding) and `loss` (whether a token may be learnt from), each (T,).
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from data.corpus import stdlib_documents

if TYPE_CHECKING:
    import torch

# What the embedded target wrote after prompts from its training text, by train/pretrain.py.
ANSWERS = Path(__file__).resolve().parent / "embedded" / "answers.jsonl"


@dataclass
class DataConfig:
    """What to train on."""

    source: str = "embedded"  # embedded: what the embedded target wrote; stdlib: Python's sources; jsonl: your files
    path: str | None = (
        None  # jsonl: a file or a folder of *.jsonl with "text", or "prompt" and "response", in each line
    )
    length: int = 512  # tokens in a packed row
    limit: int | None = None  # take only so many documents

    def check(self) -> None:
        """Raises ValueError for a source that cannot be read."""
        if self.source not in ("embedded", "stdlib", "jsonl"):
            raise ValueError(f"data.source={self.source}: use embedded, stdlib or jsonl")
        if self.source == "jsonl" and not self.path:
            raise ValueError("data.source=jsonl needs data.path=<a .jsonl file or a folder of them>")
        if self.source == "jsonl" and not Path(self.path).exists():
            raise ValueError(f"data.path={self.path}: no such file or folder")
        if self.length < 16:
            raise ValueError(f"data.length={self.length}: a row holds at least 16 tokens")


def read_jsonl(path: str) -> list[dict]:
    """Rows {"prompt", "text"} of a file or a folder; a row's loss is on "text" alone.

    Raises ValueError naming file and line of the first bad row.
    """
    files = sorted(Path(path).rglob("*.jsonl")) if Path(path).is_dir() else [Path(path)]
    rows = []
    for file in files:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    row = json.loads(line)
                    text = row["text"] if "text" in row else row["response"]
                    prompt = row.get("prompt", "")
                    if not (isinstance(text, str) and isinstance(prompt, str)):
                        raise TypeError("text, prompt and response are strings")
                except (ValueError, KeyError, TypeError) as error:
                    wanted = "a JSON object with 'text', or 'prompt' and 'response'"
                    raise ValueError(f"{file}, line {number}: expected {wanted} ({error!r})") from error
                rows.append({"prompt": prompt, "text": text})
    if not rows:
        raise ValueError(f"data.path={path}: no rows in {len(files)} *.jsonl files")
    return rows


def held_out_rows(config: DataConfig) -> list[dict]:
    """Rows {"prompt", "text"} that training never sees: the library's held-out files, or every 50th row of one's
    own."""
    if config.source in ("embedded", "stdlib"):
        return [{"prompt": "", "text": document.text} for document in stdlib_documents("held_out")]
    return read_jsonl(config.path)[::50]


def training_rows(config: DataConfig) -> list[dict]:
    """Rows {"prompt", "text"} to train on."""
    if config.source == "stdlib":
        rows = [{"prompt": "", "text": document.text} for document in stdlib_documents("train")]
    elif config.source == "embedded":
        rows = read_jsonl(str(ANSWERS))
    else:
        rows = [row for i, row in enumerate(read_jsonl(config.path)) if i % 50]
    if not rows:
        raise ValueError(f"data.path={config.path}: too few rows, one of fifty is held out for evaluation")
    return rows[: config.limit]


def tokenize(rows: dict[str, list[str]], tokenizer, length: int) -> dict[str, list]:
    """A batch of rows to pieces of at most `length` tokens: {"ids": ..., "loss": ...}.

    The end-of-text token closes a document and carries loss; a prompt does not.
    """
    pieces: dict[str, list] = {"ids": [], "loss": []}
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    prompts = tokenizer(rows["prompt"], add_special_tokens=False)["input_ids"]
    texts = tokenizer(rows["text"], add_special_tokens=False)["input_ids"]
    for prompt, text in zip(prompts, texts, strict=True):
        ids, loss = prompt + text + end, [False] * len(prompt) + [True] * (len(text) + len(end))
        for cut in range(0, len(ids), length):
            if sum(loss[cut : cut + length]) > 1:  # an anchor needs a successor
                pieces["ids"].append(ids[cut : cut + length])
                pieces["loss"].append(loss[cut : cut + length])
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
    """The training set: a `datasets.Dataset` whose rows are dictionaries of (T,) tensors."""
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
