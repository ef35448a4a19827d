"""The inputs of every training step: packed sequences and anchors. An anchor is the token position
at which a training block starts. A background thread prepares the next step's inputs."""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from data.packing import CountedDataset, prepare_packed_dataset, read_batch, refuse_empty_dataset
from infer.targets.target import Target
from infer.utils.errors import RunAborted
from infer.utils.progress import Progress
from train.blocks import Blocks, build_blocks, draw_anchors
from train.chunk_plan import ChunkPlan, plan_chunks
from train.config import TrainConfig
from train.divergences import DIVERGENCE_TABLE
from train.engine import compute_micro_batch_sizes
from train.objective import position_weights
from train.seeding import seeded_generator

if TYPE_CHECKING:
    from datasets import Dataset

    from train.features import StoredFeatures


class MicroBatch(NamedTuple):
    """The inputs of one forward and backward pass of the drafter, prepared on the host: packed
    sequences and the training blocks in them."""

    # Keys are columns of the data set, for example "ids". Values have the shape (packed sequences,
    # tokens); columns with stored hidden states of the target have further dimensions.
    batch: dict[str, torch.Tensor]
    blocks: Blocks
    chunk_plan: ChunkPlan

    def to_device(self, device: torch.device) -> "MicroBatch":
        """Return a copy of the micro-batch on a device. The transfer does not block the host."""
        return tree_map_only(torch.Tensor, lambda t: t.to(device, non_blocking=True), self)

    def pin_memory(self) -> "MicroBatch":
        """Return a copy of the micro-batch in page-locked host memory, which a GPU can read
        asynchronously."""
        return tree_map_only(torch.Tensor, torch.Tensor.pin_memory, self)


def load_packed_sequences(config: TrainConfig, target: Target) -> CountedDataset:
    """Return the packed training sequences, and how many examples are used and excluded.

    The first process of each machine writes the packed sequences to a cache on the disk; the other
    processes read the cache. Raises ValueError if there is no packed sequence, if the cache is
    damaged, or if the cache cannot be written.
    """
    from datasets.config import HF_DATASETS_CACHE
    from pyarrow import ArrowException

    digest = target.tokenizer_digest
    assert digest is not None and target.tokenizer is not None
    tokenizer = target.tokenizer
    progress = Progress("tokenising", "texts", quiet=dist.get_rank() > 0)

    def prepare() -> CountedDataset:
        try:
            prepared = prepare_packed_dataset(config.data, tokenizer, digest, progress)
        except (OSError, ArrowException) as error:
            raise ValueError(
                f"the cache of packed training sequences in {HF_DATASETS_CACHE} cannot be used "
                f"({error}). Check the free disk space. If the cache is damaged, delete it: the "
                "same command creates it again"
            ) from error
        refuse_empty_dataset(prepared.counts)
        return prepared

    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        prepared = prepare()
        dist.barrier()
        return prepared
    dist.barrier()
    return prepare()


def first_sequence_index(
    config: TrainConfig, step: int, micro_step: int, rank: int, world_size: int
) -> int:
    """Return the index of a micro-batch's first packed sequence, counted from the start of the run.

    step: the training step, counted from 0. micro_step: the number of the process's micro-batch
    within the step, counted from 0. rank: the number of the process.

    The index depends on the arguments only. A resumed run therefore needs no saved position in the
    data. All processes together read the same sequences in a step, however many processes there
    are.
    """
    micro_batch_size, _ = compute_micro_batch_sizes(config, world_size)
    return step * config.optim.batch_size + (micro_step * world_size + rank) * micro_batch_size


def draw_blocks(
    packed_batch: dict[str, torch.Tensor], config: TrainConfig, first_index: int
) -> Blocks:
    """Draw random anchors (start positions of training blocks) in packed sequences, and return the
    blocks.

    packed_batch: the columns of the packed sequences. first_index: index of the first of these
    sequences, counted from the start of the run.

    The anchors of a sequence depend only on the seed and the sequence's index, not on the other
    sequences of the batch.
    """
    batch_size = len(packed_batch["ids"])
    rows = []
    for row in range(batch_size):
        generator = seeded_generator(config.seed, first_index + row)
        rows.append(torch.rand(config.anchors_per_sequence, generator=generator))
    # (packed sequences, anchors per sequence)
    jitter = torch.stack(rows).to(packed_batch["ids"].device)

    anchors, valid = draw_anchors(
        packed_batch["loss"], packed_batch["documents"], jitter, config.anchors_per_document
    )
    ends_at_gap = DIVERGENCE_TABLE[config.objective.divergence].truncate_at_unsupervised
    return build_blocks(packed_batch, anchors, valid, config.drafter.block_size, ends_at_gap)


class BatchPrefetcher:
    """Prepares the micro-batches of the next training step in a background thread while the current
    step runs.

    steps: the numbers of the steps to prepare, in order. pinned: whether to put the micro-batches
    into page-locked memory.
    """

    def __init__(
        self,
        dataset: "StoredFeatures | Dataset",
        config: TrainConfig,
        steps: Iterable[int],
        pinned: bool,
    ) -> None:
        self.dataset = dataset
        self.config = config
        self.pinned = pinned
        self.steps = iter(steps)
        self.executor = ThreadPoolExecutor(1)
        self.next_batches = self.executor.submit(self.prepare_step)

    def prepare_step(self) -> list[MicroBatch]:
        """Read and return this process's micro-batches of the next step. The list is empty if there
        is no further step."""
        step = next(self.steps, None)
        if step is None:
            return []

        rank = dist.get_rank()
        world_size = dist.get_world_size()
        micro_batch_size, micro_steps = compute_micro_batch_sizes(self.config, world_size)
        objective = self.config.objective
        weights = position_weights(objective, self.config.drafter.block_size - 1)

        micro_batches = []
        for micro_step in range(micro_steps):
            first_index = first_sequence_index(self.config, step, micro_step, rank, world_size)
            packed_batch = read_batch(self.dataset, first_index, micro_batch_size, self.config.seed)
            blocks = draw_blocks(packed_batch, self.config, first_index)
            chunk_plan = plan_chunks(
                blocks.teacher_rows, weights * blocks.supervised, objective.chunk_rows
            )
            micro_batch = MicroBatch(packed_batch, blocks, chunk_plan)
            if self.pinned:
                micro_batch = micro_batch.pin_memory()
            micro_batches.append(micro_batch)
        return micro_batches

    def close(self) -> None:
        """Stop the background thread; no further steps are prepared."""
        self.executor.shutdown(wait=False, cancel_futures=True)

    def next_step(self) -> list[MicroBatch]:
        """Return this process's micro-batches of the next step. In the background, start to prepare
        those of the step after it. Raises RunAborted if the data cannot be read."""
        error = self.next_batches.exception()
        if error is not None:
            # Only a Hugging Face data set has `cache_files`. For a `StoredFeatures` data set, the
            # error itself names the damaged file.
            files = [file["filename"] for file in getattr(self.dataset, "cache_files", [])]
            source = f" from {', '.join(files)}" if files else ""
            raise RunAborted(
                f"packed training sequences cannot be read{source} ({type(error).__name__}: "
                f"{error}). Check the disk and the file. The same command continues from the "
                "newest checkpoint"
            ) from error
        micro_batches = self.next_batches.result()
        self.next_batches = self.executor.submit(self.prepare_step)
        return micro_batches
