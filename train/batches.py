"""The rows of every step, read ahead by another thread, and their anchors."""

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from data.packing import CountedRows, batch, prepare_rows, refuse_no_rows
from infer.targets.target import Target
from infer.utils.errors import Stopped
from infer.utils.progress import Progress
from train.blocks import Blocks, draw_anchors, lay_out
from train.config import TrainConfig
from train.divergences import DIVERGENCES
from train.engine import micro_batch
from train.objective import RowPlan, plan_rows, position_weights


class Pass(NamedTuple):
    """What one pass of a step is computed from, laid out ahead of it on the host."""

    rows: dict[str, torch.Tensor]
    blocks: Blocks
    plan: RowPlan

    def to(self, device: torch.device) -> "Pass":
        """Return the same on a device."""
        return tree_map_only(torch.Tensor, lambda part: part.to(device, non_blocking=True), self)

    def pinned(self) -> "Pass":
        """Return the same in memory that a GPU reads by itself."""
        return tree_map_only(torch.Tensor, torch.Tensor.pin_memory, self)


StepRows = list[Pass]


def seeded(*parts: int) -> torch.Generator:
    """Make a generator that is a pure function of its parts (seed, step, rank, ...)."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def prepared_rows(config: TrainConfig, target: Target) -> CountedRows:
    """Return the packed rows, and what became of all examples: one process of each machine makes
    them, the others find them in the cache. Raises ValueError where there are no rows, and, naming
    the cache, if that is damaged or cannot be written."""
    from datasets.config import HF_DATASETS_CACHE
    from pyarrow import ArrowException

    def rows() -> CountedRows:
        try:
            prepared = prepare_rows(config.data, target.tokenizer, target.tokenizer_digest, shown)
        except (OSError, ArrowException) as error:
            raise ValueError(
                f"the cache of training rows in {HF_DATASETS_CACHE} cannot be used ({error}): is there room? If it is "
                "damaged, delete it: the rows are read anew"
            ) from error
        refuse_no_rows(prepared.counts)
        return prepared

    first = int(os.environ.get("LOCAL_RANK", 0)) == 0
    shown = Progress("tokenising", "texts", quiet=dist.get_rank() > 0)
    made = rows() if first else None
    dist.barrier()
    return made if first else rows()


def first_draw(config: TrainConfig, step: int, turn: int, rank: int, world: int) -> int:
    """Return the number of the first draw of a process's pass: a pure function, so that resuming
    needs no state, and a step has the same rows however they are spread over processes."""
    count, _ = micro_batch(config, world)
    return step * config.optim.batch_size + (turn * world + rank) * count


def draw_blocks(rows: dict[str, torch.Tensor], config: TrainConfig, first: int) -> Blocks:
    """Draw anchors for a batch that starts with the run's `first`-th draw, and the blocks behind
    them. Anchors belong to a draw, not to a batch: the same ones come out however the rows are
    spread over processes and micro-steps."""
    count = len(rows["ids"])
    jitter = [
        torch.rand(config.anchors_per_sequence, generator=seeded(config.seed, first + i))
        for i in range(count)
    ]
    drawn = torch.stack(jitter).to(rows["ids"].device)
    anchors, valid = draw_anchors(
        rows["loss"], rows["documents"], drawn, config.anchors_per_document
    )
    until_gap = DIVERGENCES[config.objective.divergence].until_gap
    return lay_out(rows, anchors, valid, config.drafter.block_size, until_gap)


class Prefetch:
    """The passes of steps, by their numbers, in order; each step's are read and laid out by a
    thread while the one before is computed."""

    def __init__(self, dataset, config: TrainConfig, steps: Iterable[int], pinned: bool) -> None:
        self.dataset = dataset
        self.config = config
        self.pinned = pinned
        self.steps = iter(steps)
        self.thread = ThreadPoolExecutor(1)
        self.ahead = self.thread.submit(self.read)

    def read(self) -> StepRows:
        """Return the passes of the next step; none behind the last."""
        rank = dist.get_rank()
        world = dist.get_world_size()
        share, passes = micro_batch(self.config, world)
        options = self.config.objective
        read = []
        weights = position_weights(options, self.config.drafter.block_size - 1)
        step = next(self.steps, None)
        for i in range(passes if step is not None else 0):
            draw = first_draw(self.config, step, i, rank, world)
            rows = batch(self.dataset, draw, share, self.config.seed)
            blocks = draw_blocks(rows, self.config, draw)
            plan = plan_rows(blocks.teacher_rows, weights * blocks.supervised, options.chunk_rows)
            laid = Pass(rows, blocks, plan)
            read.append(laid.pinned() if self.pinned else laid)
        return read

    def close(self) -> None:
        """Read no further."""
        self.thread.shutdown(wait=False, cancel_futures=True)

    def __call__(self) -> StepRows:
        """Return the rows of the next step. Raises Stopped, with the reason, if they cannot be
        read."""
        error = self.ahead.exception()
        if error is not None:
            files = [file["filename"] for file in getattr(self.dataset, "cache_files", [])]
            where = (
                f" from {', '.join(files)}" if files else ""
            )  # stored features name their shard themselves
            raise Stopped(
                f"training rows cannot be read{where}: {type(error).__name__}: {error}"
            ) from error
        rows = self.ahead.result()
        self.ahead = self.thread.submit(self.read)
        return rows
