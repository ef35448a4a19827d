"""A run's log: metrics.jsonl, one line of JSON a step."""

import json
import math
import resource
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from infer.utils.entry import disk
from infer.utils.files import atomic_write
from infer.utils.progress import EVERY
from train.config import TrainConfig
from train.plan import in_time, total_steps
from train.run.progress import Progress
from train.run.tracking import Tracker
from train.safety.guards import Spikes

METRICS = "metrics.jsonl"
EARLY = 12  # steps after which the time of the rest is said, by the last nine of them; a third of a shorter run's


def finite(value: float) -> float | None:
    """A number as JSON has it; None for infinity and NaN."""
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class StepMetrics:
    """One step over all processes. Tensors on the device: reading them synchronises."""

    loss: torch.Tensor  # () weighted mean divergence, nats
    agreement: torch.Tensor  # (L,) share of supervised positions where drafter and target choose the same token
    prefix: torch.Tensor  # () teacher-forced joint prefix length, the bonus token included
    grad_norm: torch.Tensor  # ()

    def numbers(self) -> dict:
        """The metrics as JSON has them."""
        return {
            "loss": finite(self.loss.item()),
            "prefix": self.prefix.item(),
            "agreement": self.agreement.tolist(),
            "grad_norm": finite(self.grad_norm.item()),
        }


class StepLog:
    """Collects the metrics of steps and writes them together, because reading them synchronises."""

    def __init__(self, config: TrainConfig, run: Path, rows: int, full_rate: float) -> None:
        """rows: of the training set; full_rate: seconds of a step's work at the rate of large matrix products."""
        self.config, self.run, self.full_rate = config, run, full_rate
        self.spikes = Spikes(config, rows, read_log(run))
        self.enough = min(EARLY, max(2, total_steps(config, rows) // 3))
        self.pending: list[tuple[int, float, StepMetrics]] = []
        self.early: list[float] = []  # seconds of the first steps
        self.foretold = False
        self.restart_clock()

    def restart_clock(self) -> float:
        """Leave out the time until now: saving and evaluating are no part of a step."""
        self.began = time.perf_counter()
        return self.began

    @property
    def due(self) -> bool:
        """Whether a user has waited for half a minute, or can be told how long the rest takes."""
        foretells = not self.foretold and len(self.early) + len(self.pending) >= self.enough
        return foretells or time.perf_counter() - self.began > EVERY

    def add(self, step: int, rate: float, metrics: StepMetrics) -> None:
        """Keep a step's metrics until `write`."""
        self.pending.append((step, rate, metrics))

    def write(self, progress: Progress, tracker: Tracker) -> None:
        """Write what was added: in the first process to metrics.jsonl, the tracker and the terminal."""
        if not self.pending:
            return
        seconds = (time.perf_counter() - self.began) / len(self.pending)
        cost = {
            "tokens_per_second": self.config.optim.batch * self.config.data.length / seconds,
            "mfu": self.full_rate / seconds,
            "peak_gb": peak_memory(self.pending[0][2].loss.device) / 1e9,
        }
        lines = [{"step": step, "lr": rate, **cost, **metrics.numbers()} for step, rate, metrics in self.pending]
        if dist.get_rank() == 0:
            with disk(f"{self.run}/{METRICS}"), (self.run / METRICS).open("a") as log:
                log.write("".join(json.dumps(line) + "\n" for line in lines))
            for line in lines:
                tracker.log(line)
                progress.step(line)
                if spike := self.spikes(line):
                    progress.say(spike)
        self.foretell(progress, lines[-1]["step"], seconds)
        self.pending.clear()
        self.restart_clock()

    def foretell(self, progress: Progress, step: int, seconds: float) -> None:
        """Say once, as soon as the first steps have shown it, how long the rest takes; seconds: of a step."""
        self.early += [seconds] * len(self.pending)
        if self.foretold or len(self.early) < self.enough:
            return
        self.foretold = True
        if progress.total > step:
            typical = statistics.median(self.early[len(self.early) // 4 :])  # the first ones compile
            left = in_time(typical * (progress.total - step))
            progress.say(f"about {left} left, by steps of {1000 * typical:,.0f} ms so far; without evaluations")


def read_log(run: Path) -> list[dict]:
    """Return the lines of metrics.jsonl."""
    file = run / METRICS
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def trim_log(path: Path, step: int) -> None:
    """Drop the lines of steps after `step`, which a resumed run does again, and a half-written last line."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError):
            continue
    with disk(str(path)):
        atomic_write(path, "".join(line + "\n" for line in kept))


def peak_memory(device: torch.device) -> int:
    """Return the most bytes in use so far: of the allocator on CUDA, of the process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
