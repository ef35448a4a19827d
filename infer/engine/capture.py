"""Rounds as CUDA graphs: launched by one call instead of thousands, where the host would be slower
than the device."""

import warnings
from collections.abc import Callable, Hashable, Sequence

import torch

from infer.config import TextOptions
from infer.drafters.base import Drafter
from infer.engine.sampling import Sampling
from infer.targets.target import Target


class Columns:
    """Device memory for what rows ask: written when other texts come into the rows, read by
    captured rounds."""

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        self.seen = torch.zeros(
            rows, vocabulary, dtype=torch.bool, device=device
        )  # tokens that the rows hold
        self.sampling = Sampling.of([TextOptions(temperature=1.0)] * rows, vocabulary, device)

    def write(self, sampling: Sampling, seen: torch.Tensor | None) -> None:
        """Note what the first rows ask, and the tokens (B, V) that they hold, needed for a penalty
        only."""
        if seen is not None:
            self.seen[: len(seen)] = seen
        for name, column in sampling.columns.items():
            self.sampling.columns[name][: len(column)] = column


class Graphs:
    """Runs functions of device memory, each known by a key, as CUDA graphs; elsewhere than on CUDA,
    as they are.

    A function reads and writes tensors that stay where they are, and what it does may depend on
    nothing
    else: no host value that changes, no wait for the device. The first time it is run as it is,
        which
    compiles kernels and fills caches; the second time it is captured, from then on replayed. Its
    results are overwritten by the next replay of any graph, as all share their memory. Where a
    capture fails, one warning says why and functions run as they are. A graph stores addresses:
    what `graph_references()` of each of the `models` returns, which functions read beside their own
    memory, is held as long as the graph is.
    """

    def __init__(self, device: torch.device, models: Sequence[Target | Drafter]) -> None:
        self.works = device.type == "cuda"
        self.pool = None
        self.models = models
        self.graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, object, list[object]] | None] = {}

    def run(self, key: Hashable, function: Callable[[], object]) -> object:
        """Return the function's results: run, or captured and replayed."""
        if not self.works:
            return function()
        if key not in self.graphs:
            self.graphs[key] = None
            return function()
        if self.graphs[key] is None:
            try:
                references = [held for model in self.models for held in model.graph_references()]
                self.graphs[key] = *self._capture(function), references
            except RuntimeError as error:
                warnings.warn(
                    f"compile=true does not work here, decoding goes on without it: {error}",
                    stacklevel=2,
                )
                self.works = False
                return function()
        graph, results, _ = self.graphs[key]
        graph.replay()
        return results

    def _capture(self, function: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, object]:
        graph = torch.cuda.CUDAGraph()
        # other threads may go on using the device, a server's for example
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            results = function()
        self.pool = self.pool or graph.pool()
        return graph, results
