"""The n-grams of a run's training texts, which its drafters carry: trees that ask them know which drafted tokens go
together (DART section 3.3)."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from infer.formats.checkpoint import NGRAMS
from infer.ngrams.count import count_ngrams, usual_order
from infer.ngrams.merge import merge
from infer.ngrams.model import NGram
from infer.targets.target import Target
from train.features import StoredRows
from train.run.sources import column_parts

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
    """Count the rows' n-grams into the run's folder, unless they are there; those of `earlier` texts, which a drafter
    brought along that is trained on, are added: few answers alone would make poor trees."""
    if (run / NGRAMS).exists():
        return
    vocabulary, digest, out = len(target.head_weight), target.tokenizer_digest, run / NGRAMS
    order = usual_order(vocabulary) if earlier is None else NGram.open(earlier).order
    if earlier is None:
        count_ngrams(documents(rows), vocabulary, order, out, digest, threshold=THRESHOLD)
        return
    with TemporaryDirectory(dir=run) as folder:
        ours = count_ngrams(documents(rows), vocabulary, order, Path(folder) / NGRAMS, digest)
        merge([ours.path, earlier], out, digest, THRESHOLD)
