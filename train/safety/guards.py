"""Numbers that went wrong: steps that are skipped and kept for `./launch.sh replay`, losses that jump.

A step whose loss or gradient is not finite changes neither weights nor moments, in no process and at no ZeRO stage
(`train.loop.train_step`, `train.engine.take_step`). What it was computed from is written down:

    <run>/skipped/step-00000123/
        skipped.json             step, seed, draws, loss, gradient norm, where the weights are, the configuration
        rows-<rank>.safetensors  <pass>/<column>: the rows of that process, (B, T), their anchors and valid (B, N)
        weights.safetensors      the drafter that met them, float32; of steps skipped in a row only the first has it
"""

import math
import os
import shutil
import statistics
from collections import deque
from pathlib import Path

import torch
import torch.distributed as dist

from data.packing import row_index
from infer.utils.entry import Stopped, disk
from infer.utils.files import save_readable, write_json
from train.batches import StepRows
from train.config import TrainConfig
from train.engine import training_state
from train.run.folder import plain
from train.safety.processes import first_only

WINDOW = 50  # losses that a jump is measured against
ENOUGH = 10  # of them, before it is
MOST_KEPT = 20  # skipped steps that are written down; the later ones are counted only


class Spikes:
    """Finds losses far above those before them."""

    def __init__(self, config: TrainConfig, rows: int, known: list[dict]) -> None:
        """`rows` of the training set; `known` are the lines of metrics.jsonl so far: a resumed run sees what an
        uninterrupted one would."""
        self.config, self.rows = config, rows
        losses = [line["loss"] for line in known if line["loss"] is not None]
        self.recent: deque[float] = deque(losses, maxlen=WINDOW)

    def __call__(self, line: dict) -> str | None:
        """Return a sentence if this step's loss is a jump."""
        loss, step = line["loss"], line["step"]
        if loss is None:
            return None
        usual = statistics.median(self.recent) if len(self.recent) >= ENOUGH else math.inf
        self.recent.append(loss)
        if not loss > self.config.guards.spike * usual > 0:  # rows without anchors have no loss
            return None
        first, count = (step - 1) * self.config.optim.batch, self.config.optim.batch
        rows = [row_index(first + i, self.rows, self.config.seed) for i in range(count)]
        shown = ", ".join(map(str, rows[:16])) + (", ..." if count > 16 else "")
        return (
            f"loss spike at step {step}: {loss:.3f}, {loss / usual:.1f} times the median {usual:.3f} of the steps "
            f"before; its rows of the training set are {shown}"
        )


class Skips:
    """Counts skipped steps in a row, and stores what they were computed from."""

    def __init__(self, run: Path, config: TrainConfig) -> None:
        self.run, self.config = run, config
        self.in_a_row, self.last = 0, -1
        self.weights: str | None = None  # folder of the first of them, relative to <run>/skipped

    def __call__(self, line: dict, drawn: StepRows, engine) -> str:
        """Return a sentence about a skipped step; every process calls it. Raises Stopped after too many."""
        self.in_a_row = self.in_a_row + 1 if line["step"] == self.last + 1 else 1
        if self.in_a_row == 1:
            self.weights = None
        self.last = step = line["step"]
        kept = self._keep(line, drawn, engine)
        which = " and ".join(
            {"loss": "loss", "grad_norm": "gradient"}[k] for k in ("loss", "grad_norm") if line[k] is None
        )
        what = f"step {step} is skipped: its {which} is not finite"
        how = f"./launch.sh replay run={self.run} step={step} looks for the cause"
        if self.in_a_row < self.config.guards.most_skipped:
            return what + (f"; {how}" if kept else "")
        raise Stopped(
            f"{what}, the {self.in_a_row}. in a row (guards.most_skipped={self.in_a_row}); {how}; weights and moments "
            "are as they were before the first of them: a lower optim.lr or other data may help"
        )

    def _keep(self, line: dict, drawn: StepRows, engine) -> bool:
        """Store the step, unless MOST_KEPT are stored already."""
        folder = self.run / "skipped" / f"step-{line['step']:08d}"
        others = first_only(lambda: sorted(path.name for path in folder.parent.glob("step-*") if path != folder))
        if len(others) >= MOST_KEPT:
            return False
        fresh = self.weights is None
        self.weights = self.weights or folder.name
        state = training_state(engine) if fresh else {}
        first_only(lambda: self._start(folder, state))
        tensors = {}
        for i, laid in enumerate(drawn):
            columns = laid.rows | {"anchors": laid.blocks.anchors, "valid": laid.blocks.valid}
            tensors |= {f"{i}/{name}": value.cpu().contiguous() for name, value in columns.items()}
        with disk(f"{folder}"):
            os.makedirs(folder, exist_ok=True)  # the first process made it, perhaps on another machine
            save_readable(tensors, folder / f"rows-{dist.get_rank()}.safetensors")
        record = line | {"seed": self.config.seed, "processes": dist.get_world_size()}
        record |= {"draws": [laid.draw for laid in drawn]}  # of the first process
        record |= {"weights": f"{self.weights}/weights.safetensors", "config": plain(self.config)}

        def finish() -> None:
            with disk(f"{folder}"):
                write_json(folder / "skipped.json", record)

        dist.barrier()
        first_only(finish)
        return True

    def _start(self, folder: Path, state: dict[str, torch.Tensor]) -> None:
        with disk(f"{folder}"):
            shutil.rmtree(folder, ignore_errors=True)
            os.makedirs(folder)
            weights = {name: value for name, value in state.items() if "/" not in name}
            if weights:
                save_readable(weights, folder / "weights.safetensors")
