"""Adds up n-gram files: what one counted of all their corpora together would hold, but for what was pruned of each.

A node that was seen more often than all its children together stands for positions of its own: texts that ended there,
or that went on with what was pruned. With these numbers a file is a run of `infer.ngrams.count` again. N nodes, V ids.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from infer.ngrams.count import Shape, build, save_run
from infer.ngrams.model import NGram


def merge(files: Sequence[Path], out: Path, digest: str, threshold: int = 1) -> NGram:
    """Write the n-grams of all files into the file `out`, and open it; digest and threshold as of `count_ngrams`. 30
    bytes a node of the largest file are in memory. Raises ValueError where orders or vocabularies differ."""
    models = [NGram.open(file) for file in files]
    first = models[0]
    for model in models[1:]:
        if (model.order, model.vocabulary) != (first.order, first.vocabulary):
            raise ValueError(
                f"{model.path}: order {model.order} over {model.vocabulary} ids, and {first.path}: order {first.order} "
                f"over {first.vocabulary}; count them again alike"
            )

    def jobs(folder: Path) -> Iterator[tuple]:
        for run, model in enumerate(models):
            yield folder, run, model

    shape = Shape(first.vocabulary, first.order, digest, threshold)
    return build(out, shape, write_model, jobs, 1, lambda tokens: None)


def write_model(folder: Path, run: int, model: NGram) -> int:
    """Write a file's keys; return how many positions were counted for it, those of pruned tokens too."""
    keys, counts = own_counts(model)
    place = np.argsort(keys)
    save_run(folder, run, keys[place], counts[place])
    return model.tokens


def own_counts(model: NGram) -> tuple[np.ndarray, np.ndarray]:
    """Return the keys (n,) uint64 of the nodes that were seen more often than their children, and how much more (n,)
    int64."""
    bits, inner, count = model.vocabulary.bit_length(), model.arrays.inner, sum(model.nodes)
    tokens, counts = model.decode(0, count)  # (N,)
    parents = np.repeat(np.arange(inner), np.diff(model.child_starts(0, inner + 1)))  # (N - V,)
    keys = (tokens + 1).astype(np.uint64)
    keys[: model.vocabulary] <<= np.uint64(bits * (model.order - 1))
    ends = np.cumsum(model.nodes)
    for level in range(2, model.order + 1):
        nodes = slice(ends[level - 2], ends[level - 1])
        above = parents[nodes.start - model.vocabulary : nodes.stop - model.vocabulary]
        keys[nodes] = keys[nodes] << np.uint64(bits * (model.order - level)) | keys[above]
    own = counts.copy()
    np.subtract.at(own, parents, counts[model.vocabulary :])
    taken = own > 0
    return keys[taken], own[taken]
