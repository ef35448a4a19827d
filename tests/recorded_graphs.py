"""A stand-in for CUDA graphs on the CPU: operations are recorded one by one, and a replay repeats
them on the same memory."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from infer.engine.capture import CudaGraphs


class Recorder(TorchDispatchMode):
    """Records every operation with its arguments and results. Raises if the host reads a value."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(function), "the host synchronises with the device"
        result = function(*args, **(kwargs or {}))
        self.steps.append((function, args, kwargs or {}, tree_flatten(result)[0]))
        return result


class RecordedGraphs(CudaGraphs):
    """Graphs whose replay repeats the recorded operations and writes their results to the same
    memory."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.is_enabled = True
        self.replays = 0

    def _capture(self, function):
        with Recorder() as recorder:
            results = function()
        return Recording(self, recorder.steps), results


class Recording:
    """Replaces a CUDA graph."""

    def __init__(self, graphs: RecordedGraphs, steps: list) -> None:
        self.graphs = graphs
        self.steps = steps
        # Unlike a capture, recording computes the results, so the first replay does nothing.
        self.is_computed = True

    def replay(self) -> None:
        self.graphs.replays += 1
        if self.is_computed:
            self.is_computed = False
            return
        for function, args, kwargs, old_results in self.steps:
            new_results = tree_flatten(function(*args, **kwargs))[0]
            for old, new in zip(old_results, new_results, strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
