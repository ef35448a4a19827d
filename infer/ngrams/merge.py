"""Adds up n-gram files: what one counted of all their corpora together would hold, but for what was pruned of each.

A node that was seen more often than all its children together stands for positions of its own: texts that ended there,
or that went on with what was pruned. With these numbers a file is a run of keys again (`infer.ngrams.write`). N nodes,
V ids.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from infer.ngrams.model import NGram
from infer.ngrams.write import Run, Shape, build


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
    return build(out, Shape(first.vocabulary, first.order, digest, threshold), map(own_run, models))


def own_run(model: NGram) -> Run:
    """Return the keys of the nodes that were seen more often than their children, and how much more. All positions
    that were counted for the file count, those of pruned tokens too."""
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
    taken = np.flatnonzero(own > 0)
    place = taken[np.argsort(keys[taken])]
    return Run(keys[place], own[place], model.tokens)
