"""The rows of every step, read ahead by another thread, and their anchors."""

import hashlib
import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, Queue
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from data.packing import batch, packed_rows
from infer.targets.target import Target
from infer.utils.entry import Stopped
from infer.utils.progress import Progress
from train.blocks import Blocks, draw_anchors, lay_out
from train.config import TrainConfig
from train.divergences import DIVERGENCES
from train.engine import micro_batch
from train.objective import RowPlan, plan_rows, position_weights

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class Pass:
    """What one pass of a step is computed from, laid out ahead of it on the host."""

    rows: dict[str, torch.Tensor]
    blocks: Blocks
    plan: RowPlan

    def to(self, device: torch.device) -> "Pass":
        """Return the same on a device."""
        rows = {name: column.to(device, non_blocking=True) for name, column in self.rows.items()}
        return Pass(rows, self.blocks.to(device), self.plan.to(device))

    def pinned(self) -> "Pass":
        """Return the same in memory that a GPU reads by itself."""
        rows = {name: column.pin_memory() for name, column in self.rows.items()}
        return Pass(rows, self.blocks.pinned(), self.plan.pinned())


StepRows = list[Pass]


def seeded(*parts: int) -> torch.Generator:
    """Make a generator that is a pure function of its parts (seed, step, rank, ...)."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def prepared_rows(config: TrainConfig, target: Target) -> "Dataset":
    """Return the packed rows: one process of each machine makes them, the others find them in the cache. Raises
    ValueError, naming the cache, if it is damaged or cannot be written."""
    from datasets.config import HF_DATASETS_CACHE
    from pyarrow import ArrowException

    def rows() -> "Dataset":
        try:
            return packed_rows(config.data, target.tokenizer, target.tokenizer_digest, shown)
        except (OSError, ArrowException) as error:
            raise ValueError(
                f"the cache of training rows in {HF_DATASETS_CACHE} cannot be used ({error}): is there room? If it is "
                "damaged, delete it: the rows are read anew"
            ) from error

    first = int(os.environ.get("LOCAL_RANK", 0)) == 0
    shown = Progress("tokenising", "texts", quiet=dist.get_rank() > 0)
    made = rows() if first else None
    dist.barrier()
    return made if first else rows()


def first_draw(config: TrainConfig, step: int, turn: int, rank: int, world: int) -> int:
    """Return the number of the first draw of a process's pass: a pure function, so that resuming needs
    no state, and a step has the same rows however they are spread over processes."""
    count, _ = micro_batch(config, world)
    return step * config.optim.batch + (turn * world + rank) * count


def draw_blocks(rows: dict[str, torch.Tensor], config: TrainConfig, first: int) -> Blocks:
    """Draw anchors for a batch that starts with the run's `first`-th draw, and the blocks behind them. Anchors belong
    to a draw, not to a batch: the same ones come out however the rows are spread over processes and micro-steps."""
    count = len(rows["ids"])
    jitter = [torch.rand(config.anchors, generator=seeded(config.seed, first + i)) for i in range(count)]
    drawn = torch.stack(jitter).to(rows["ids"].device)
    anchors, valid = draw_anchors(rows["loss"], rows["documents"], drawn, config.document_anchors)
    until_gap = DIVERGENCES[config.objective.divergence].until_gap
    return lay_out(rows, anchors, valid, config.drafter.block_size, until_gap)


def plan_blocks(blocks: Blocks, config: TrainConfig) -> RowPlan:
    """Plan the objective's rows of some blocks."""
    weights = position_weights(config.objective, blocks.supervised.shape[-1]).to(blocks.supervised.device)
    return plan_rows(blocks.teacher_rows, weights * blocks.supervised, config.objective.chunk_rows)


class Prefetch:
    """The passes of steps `first` .. `last - 1`, in order, read and laid out while the steps before are computed. An
    error in the thread is raised by the call that waits for it; the process does not wait for the thread when it ends.
    """

    def __init__(self, dataset, config: TrainConfig, first: int, last: int, pinned: bool) -> None:
        self.dataset, self.config, self.pinned = dataset, config, pinned
        self.ready: Queue[StepRows | BaseException] = Queue(maxsize=1)
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._work, args=(first, last), daemon=True)
        self.thread.start()

    def _work(self, first: int, last: int) -> None:
        try:
            for step in range(first, last):
                if self.over.is_set():
                    return
                self.ready.put(self._read(step))
        except BaseException as error:  # noqa: BLE001  the thread ends; the caller that waits gets the error
            self.ready.put(error)

    def _read(self, step: int) -> StepRows:
        rank, world = dist.get_rank(), dist.get_world_size()
        count, passes = micro_batch(self.config, world)
        read = []
        for i in range(passes):
            draw = first_draw(self.config, step, i, rank, world)
            rows = batch(self.dataset, draw, count, self.config.seed)
            blocks = draw_blocks(rows, self.config, draw)
            laid = Pass(rows, blocks, plan_blocks(blocks, self.config))
            read.append(laid.pinned() if self.pinned else laid)
        return read

    def close(self) -> None:
        """Read no further."""
        self.over.set()
        with suppress(Empty):
            self.ready.get_nowait()  # the thread may wait for room

    def __call__(self) -> StepRows:
        """Return the rows of the next step. Raises Stopped, with the reason, if they cannot be read."""
        rows = self.ready.get()
        if isinstance(rows, BaseException):
            files = [file["filename"] for file in getattr(self.dataset, "cache_files", [])]
            where = f" from {', '.join(files)}" if files else ""  # stored features name their shard themselves
            raise Stopped(f"training rows cannot be read{where}: {type(rows).__name__}: {rows}") from rows
        return rows
