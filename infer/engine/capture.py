"""Rounds as CUDA graphs: one launch instead of thousands, where the host would be slower than the
device."""

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from infer.config import TextOptions
from infer.drafters.base import Drafter
from infer.engine.sampling import SamplingTensors
from infer.targets.target import Target


class SamplingBuffers:
    """Device memory for the sampling options of all rows. It is written when other sequences enter
    the rows, and read by captured rounds."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        # (rows, V) the tokens that every row's sequence contains
        self.seen = torch.zeros(rows, vocab_size, dtype=torch.bool, device=device)
        options = [TextOptions(temperature=1.0)] * rows
        self.tensors = SamplingTensors.from_options(options, vocab_size, device)

    def write(self, tensors: SamplingTensors, seen: torch.Tensor | None) -> None:
        """Copy the options of the first B rows, and `seen` (B, V), needed for a penalty only."""
        if seen is not None:
            self.seen[: len(seen)] = seen
        for name, column in tensors.columns.items():
            self.tensors.columns[name][: len(column)] = column


@dataclass(frozen=True)
class CapturedGraph:
    """A CUDA graph with its results and the objects whose memory it uses."""

    graph: torch.cuda.CUDAGraph
    results: Any
    references: list[object]  # keeps the memory alive that the graph addresses


class CudaGraphs:
    """Runs functions as CUDA graphs, each identified by a key. On other devices it just calls them.

    A function reads and writes tensors that stay at their addresses. It must not depend on host
    values that change, and must not synchronise. The first call runs it, which compiles kernels and
    fills caches. The second call captures it, and later calls replay the graph. All graphs share
    one memory pool, so the results are overwritten by the next replay of any graph. If a capture
    fails, one warning is issued and functions are called from then on.

    A graph stores addresses. Functions also read memory of `models`; what their
    `graph_references()` returns is kept alive as long as the graph.
    """

    def __init__(self, device: torch.device, models: Sequence[Target | Drafter]) -> None:
        self.is_enabled = device.type == "cuda"
        self.pool: Any = None
        self.models = models
        # None: the function was called once and is captured at the next call.
        self.graphs: dict[Hashable, CapturedGraph | None] = {}

    def run(self, key: Hashable, function: Callable[[], Any]) -> Any:
        """Return the results of a function that is called, or captured and replayed."""
        if not self.is_enabled:
            return function()
        if key not in self.graphs:
            self.graphs[key] = None
            return function()

        captured = self.graphs[key]
        if captured is None:
            try:
                references = self._collect_references()
                graph, results = self._capture(function)
            except RuntimeError as error:
                warnings.warn(
                    f"decoding continues without CUDA graphs (compile=true), since capturing one "
                    f"failed: {error}",
                    stacklevel=2,
                )
                self.is_enabled = False
                return function()
            captured = CapturedGraph(graph, results, references)
            self.graphs[key] = captured
        captured.graph.replay()
        return captured.results

    def _collect_references(self) -> list[object]:
        """Return the objects of all models whose memory a graph may address."""
        references = []
        for model in self.models:
            references.extend(model.graph_references())
        return references

    def _capture(self, function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """Capture a function; return the graph and its results. The capture computes nothing."""
        graph = torch.cuda.CUDAGraph()
        # "thread_local": other threads may go on using the device, for example those of a server.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            results = function()
        if self.pool is None:
            self.pool = graph.pool()
        return graph, results
