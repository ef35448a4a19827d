"""The n-grams of a run's training texts, which its drafters carry: trees that ask them know which drafted tokens go
together (DART section 3.3)."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from infer.formats.checkpoint import NGRAMS
from infer.ngrams.count import count_ngrams, usual_order
from infer.targets.target import Target
from train.features import StoredRows
from train.run.folder import column_parts

if TYPE_CHECKING:
    from datasets import Dataset

THRESHOLD = 2  # n-grams seen once are two thirds of the file, and trees are no better for them: LOG.md


def documents(rows: "StoredRows | Dataset") -> Iterator[np.ndarray]:
    """Yield the token ids of the documents of packed rows, whose positions begin at 0."""
    columns = (column_parts(rows, name) for name in ("ids", "positions", "documents"))
    for ids, positions, numbers in zip(*columns, strict=True):
        starts = np.flatnonzero(positions == 0)
        pieces = np.split(ids, starts[1:])
        yield from (piece for piece, start in zip(pieces, starts, strict=True) if numbers[start] >= 0)


def count_rows(rows: "StoredRows | Dataset", target: Target, run: Path, earlier: Path | None) -> None:
    """Count the rows' n-grams into the run's folder, unless they are there; a drafter that brought some along keeps
    those: few answers alone would make poor trees."""
    if earlier is not None:
        shutil.copyfile(earlier, run / NGRAMS)
    elif not (run / NGRAMS).exists():
        vocabulary = len(target.head_weight)
        order, digest = usual_order(vocabulary), target.tokenizer_digest
        count_ngrams(documents(rows), vocabulary, order, run / NGRAMS, digest, threshold=THRESHOLD)
