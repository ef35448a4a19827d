"""Run decoding rounds as CUDA graphs. A graph is one kernel launch instead of thousands, which the
host would issue more slowly than the device executes them.

V vocabulary size.
"""

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
    """Device memory for the sampling options of all batch rows.

    Rounds that were recorded as CUDA graphs read this memory. It is written before a round if the
    sequences in the rows have changed.
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        # (rows, V) which tokens the sequence of each row contains
        self.seen = torch.zeros(rows, vocab_size, dtype=torch.bool, device=device)
        options = [TextOptions(temperature=1.0)] * rows
        self.tensors = SamplingTensors.from_options(options, vocab_size, device)

    def write(self, tensors: SamplingTensors, seen: torch.Tensor | None) -> None:
        """Copy the sampling options of the first B batch rows into the buffers. `seen` (B, V) marks
        the tokens of each row's sequence; it is None if no row has a repetition penalty."""
        if seen is not None:
            self.seen[: len(seen)] = seen
        for name, column in tensors.columns.items():
            self.tensors.columns[name][: len(column)] = column


@dataclass(frozen=True)
class CapturedGraph:
    """A CUDA graph with its results and the objects whose memory it uses."""

    graph: torch.cuda.CUDAGraph
    results: Any
    references: list[object]  # keep alive the memory whose addresses the graph stores


class CudaGraphs:
    """Runs functions as CUDA graphs. A key identifies the graph of each function. On devices other
    than CUDA, the functions are called directly.

    A function reads and writes tensors that stay at their addresses. It must not depend on host
    values that change, and must not synchronise. The first call for a key runs the function, which
    compiles kernels and fills caches. The second call records the function as a CUDA graph. Later
    calls replay the graph. All graphs share one memory pool, so the next replay of any graph
    overwrites the results. If a graph cannot be recorded, one warning is issued, and all functions
    are called directly from then on.

    A graph stores addresses, also of memory that belongs to `models`. The objects that the models'
    `graph_references()` return are therefore kept alive as long as the graph.
    """

    def __init__(self, device: torch.device, models: Sequence[Target | Drafter]) -> None:
        self.is_enabled = device.type == "cuda"
        self.pool: Any = None
        self.models = models
        # None: the function was called once, and the next call records its graph.
        self.graphs: dict[Hashable, CapturedGraph | None] = {}

    def run(self, key: Hashable, function: Callable[[], Any]) -> Any:
        """Return the results of `function`. It is called directly, or recorded as the CUDA graph
        with this key, or that graph is replayed; see the class."""
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
                    "a round could not be recorded as a CUDA graph (compile=true), so decoding "
                    f"continues without CUDA graphs. The error was: {error}",
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
        """Record a function as a CUDA graph. Return the graph and the function's results, whose
        values are computed only when the graph is replayed."""
        graph = torch.cuda.CUDAGraph()
        # With "thread_local", other threads may use the device meanwhile, for example in a server.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            results = function()
        if self.pool is None:
            self.pool = graph.pool()
        return graph, results
