"""Run decoding rounds as CUDA graphs. A round has thousands of kernels, and the device executes
them faster than the host can launch them one by one. With a graph, the host launches all of them at
once."""

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from infer.config import SamplingOptions
from infer.drafters.base import Drafter
from infer.engine.sampling import SamplingTensors
from infer.targets.target import Target


class SamplingBuffers:
    """Device memory at fixed addresses for the sampling options of all batch rows.

    Decoding rounds that were recorded as CUDA graphs read the options from here. Before a round,
    new options are written into the buffers if the sequences in the batch rows have changed.
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        # (rows, vocab_size): which tokens the sequence in each batch row contains
        self.seen = torch.zeros(rows, vocab_size, dtype=torch.bool, device=device)
        options = [SamplingOptions(temperature=1.0)] * rows
        self.tensors = SamplingTensors.from_options(options, vocab_size, device)

    def write(self, tensors: SamplingTensors, seen: torch.Tensor | None) -> None:
        """Copy the sampling options of the first batch rows into the buffers.

        `seen` (B, vocab_size) bool tells which tokens the sequence in each row contains. It is None
        if no sequence has a repetition penalty.
        """
        if seen is not None:
            self.seen[: len(seen)] = seen
        for name, column in tensors.columns.items():
            self.tensors.columns[name][: len(column)] = column


@dataclass(frozen=True)
class CapturedGraph:
    """A CUDA graph, the tensors that it writes its results to, and the objects whose memory it
    uses."""

    graph: torch.cuda.CUDAGraph
    results: Any
    # objects kept alive, because the graph stores addresses of their memory
    references: list[object]


class CudaGraphs:
    """Runs functions as CUDA graphs, with one graph for each key. On other devices, functions are
    called directly.

    A function must read and write tensors that stay at the same addresses. It must not depend on
    host values that change, and must not synchronise with the host. The first call for a key runs
    the function, which compiles kernels and fills caches. The second call records the function as a
    CUDA graph. Later calls replay the graph.

    All graphs share one memory pool, so replaying any graph overwrites the results of the others.
    If recording fails, a warning is issued once, and from then on all functions are called
    directly.

    A graph also stores addresses of memory that belongs to `models`. The objects that
    `graph_references()` of each model returns are therefore kept alive together with the graph.
    """

    def __init__(self, device: torch.device, models: Sequence[Target | Drafter]) -> None:
        self.is_enabled = device.type == "cuda"
        self.pool: Any = None
        self.models = models
        # Keys are the keys of `run`. A value is None between the first call for a key and the
        # second, which records the graph.
        self.graphs: dict[Hashable, CapturedGraph | None] = {}

    def run(self, key: Hashable, function: Callable[[], Any]) -> Any:
        """Call `function` or replay its CUDA graph, and return the results. The first `run` with
        this `key` calls the function, the second records it as a CUDA graph, and later ones replay
        the graph."""
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
        """Return all objects in whose memory a graph may read or write: those that each model's
        `graph_references()` returns."""
        references = []
        for model in self.models:
            references.extend(model.graph_references())
        return references

    def _capture(self, function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """Record a function as a CUDA graph. Return the graph and the tensors that the function
        returned, whose values are only computed when the graph is replayed."""
        graph = torch.cuda.CUDAGraph()
        # With "thread_local", other threads may use the device during the recording.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            results = function()
        if self.pool is None:
            self.pool = graph.pool()
        return graph, results
