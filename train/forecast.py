"""What a training run will take, before it is begun: `./launch.sh plan [the overrides of the run]`.

Sizes, operations and memory follow from the target's config.json and the run's configuration (`train.plan`). The time
of a step is measured where the device of the run is at hand: the run's own steps, on random rows, through a random
target and a random drafter of its sizes.
"""

import json
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from data.packing import best_fit
from data.rows import files_of, single, training_rows
from infer.drafters.families import FAMILIES
from infer.evaluation.evaluate import synchronised_clock
from infer.targets.loading import without_memory
from infer.targets.support import refuse_unsupported
from infer.targets.target import Target
from train.batches import Prefetch
from train.config import TrainConfig
from train.engine import build_engine, compute_dtype, micro_batch, target_dtype
from train.features import row_bytes
from train.loop import train_step
from train.plan import (
    FITS,
    Recompute,
    Shape,
    device_memory,
    in_bytes,
    in_time,
    matmul_rate,
    recompute_of,
    shape_of,
    step_memory,
    step_operations,
    target_config,
    total_steps,
)
from train.run.initial import resolve_init
from train.safety.processes import start_processes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SAMPLE = 2000  # texts whose lengths say how full rows become
SHARE = 0.4  # of a device's rate that a run is expected to use where it could not be measured
WARM = 2  # steps that are not timed: the first ones compile, and touch their memory
PATIENCE = 10.0  # seconds of steps, at most
ENOUGH = 30  # steps


def estimated_tokens(config: TrainConfig) -> float | None:
    """Estimate how many tokens the training rows have, four bytes each; None where they are not on this machine yet."""
    size = 0.0
    for data, _ in single(config.data):
        if data.source == "hub":
            return None
        if data.source in ("embedded", "stdlib"):
            size += sum(len(row["prompt"] + row["text"]) for row in training_rows(data))
        else:
            size += sum(file.stat().st_size * (3 if file.suffix == ".parquet" else 1) for file in files_of(data.path))
    return size / 4


def row_fill(config: TrainConfig) -> float:
    """Estimate how full packed rows are, from the first texts of the data, four bytes a token; 1 where they are not on
    this machine yet."""
    length, sizes = config.data.length, []
    for data, _ in single(config.data):
        if data.source == "hub":
            return 1.0
        for row in islice(training_rows(data), SAMPLE):
            said = (
                json.dumps(row["chat"]["messages"], ensure_ascii=False) if row["chat"] else row["prompt"] + row["text"]
            )
            tokens = len(said.encode(errors="replace")) // 4 + 1
            sizes += [min(length, tokens - start) for start in range(0, tokens, length)]
    rows = sum(1 for _ in best_fit(sizes, length))
    return sum(sizes) / (rows * length) if rows else 1.0


class RandomRows:
    """Random rows, as `Prefetch` reads them, of so many documents each: one is the most work."""

    def __init__(self, count: int, length: int, vocabulary: int, documents: int = 1) -> None:
        generator = torch.Generator().manual_seed(0)
        each = -(-length // documents)
        numbers = torch.arange(length) // each
        self.columns = {
            "ids": torch.randint(vocabulary, (count, length), generator=generator),
            "positions": (torch.arange(length) - numbers * each).expand(count, -1),
            "documents": numbers.expand(count, -1),
            "loss": torch.ones(count, length, dtype=torch.bool),
        }

    def __len__(self) -> int:
        return len(self.columns["ids"])

    def __getitem__(self, indices: list[int]) -> dict[str, torch.Tensor]:
        return {name: column[indices] for name, column in self.columns.items()}


def random_target(theirs: "PretrainedConfig", dtype: torch.dtype, device: torch.device) -> Target:
    """Return a target of a config's sizes with random weights, without a tokenizer."""
    from transformers import AutoModelForCausalLM

    attention = without_memory(theirs).config.get_text_config()._attn_implementation
    with device:
        return Target(AutoModelForCausalLM.from_config(theirs, dtype=dtype, attn_implementation=attention))


@contextmanager
def random_steps(
    config: TrainConfig, theirs: "PretrainedConfig", device: torch.device, count: int
) -> Iterator[Callable[[], object]]:
    """A function that takes the next one of `count` steps of a run on random rows, from random weights."""
    start_processes(device)
    target = random_target(theirs, target_dtype(config, device), device)
    family = FAMILIES[config.drafter.family].load()
    with device:
        drafter = family(family.config_for(config.drafter, None, target.config))
    engine = build_engine(drafter, config, device)
    rows = RandomRows(4 * config.optim.batch, config.data.length, target.config.vocab_size)
    with closing(Prefetch(rows, config, 0, count, pinned=device.type == "cuda")) as prefetch:
        yield lambda: train_step(engine, target, prefetch(), config, lambda phase: None)


def measure_step(config: TrainConfig, theirs: "PretrainedConfig", device: torch.device) -> float:
    """Return the seconds of a step of one process: the median of `ENOUGH` steps, or of those of ten seconds."""
    last, clock, seconds = WARM + ENOUGH, synchronised_clock(device), []
    with random_steps(config, theirs, device, last) as step:
        while len(seconds) < last and sum(seconds[WARM:]) < PATIENCE:
            began = clock()
            step()
            seconds.append(clock() - began)
    return statistics.median(seconds[WARM:])


@dataclass(frozen=True)
class Work:
    """A run on a device, as far as it is known before anything is loaded."""

    config: TrainConfig
    theirs: "PretrainedConfig"
    shape: Shape  # of a pass of one process
    world: int  # processes
    device: torch.device  # that the run is for
    recompute: Recompute

    @property
    def operations(self) -> dict[str, float]:
        """Useful operations of a step, by part, all processes together."""
        passes = self.config.optim.batch / self.shape.rows
        return {part: passes * count for part, count in step_operations(self.shape).items()}

    @property
    def memory(self) -> dict[str, float]:
        """Bytes on one device at a step's peak, by part."""
        weight = target_dtype(self.config, self.device).itemsize
        product, cuda = compute_dtype(self.config, self.device).itemsize, self.device.type == "cuda"
        return step_memory(self.shape, self.config, self.world, weight, product, cuda)


def work_of(config: TrainConfig) -> Work:
    """Return the work of a run, from its configuration and the target's config.json. Raises ValueError as the run
    would."""
    config = replace(config, drafter=resolve_init(config.drafter, config.target))
    theirs = target_config(config)
    refuse_unsupported(theirs)
    world = int(os.environ.get("NPROC") or 1)
    cuda = config.target.device.startswith("cuda") or (
        config.target.device == "auto" and (torch.cuda.is_available() or config.target.path != "embedded")
    )
    device = torch.device("cuda" if cuda else "cpu")
    room = device_memory(device, world) if cuda == torch.cuda.is_available() else None
    shape = shape_of(config, theirs, micro_batch(config, world)[0])
    weight, product = target_dtype(config, device).itemsize, compute_dtype(config, device).itemsize
    recompute = recompute_of(shape, config, world, weight, product, cuda, room)
    return Work(replace(config, recompute=recompute.chosen), theirs, shape, world, device, recompute)


def obstacle(work: Work) -> str | None:
    """Say why a step cannot be measured here; None where it can."""
    config, room = work.config, work.recompute.room
    if room is None:
        return "there is no GPU here" if work.device.type == "cuda" else "it is for a CPU, and here is a GPU"
    if config.features or config.target.shard:
        return "that needs the stored features" if config.features else "that takes all processes"
    if sum(work.memory.values()) > FITS * room:
        return "it does not fit"
    least = sum(work.operations.values()) / work.world / matmul_rate(work.device, compute_dtype(config, work.device))
    return f"it takes at least {least:.0f} seconds" if (WARM + 1) * least > PATIENCE else None


def print_time(work: Work, steps: int) -> None:
    """Print how long so many steps take: as measured, otherwise by an assumption."""
    config, why = work.config, obstacle(work)
    if why is None:
        own = replace(config, optim=replace(config.optim, batch=config.optim.batch // work.world))
        try:
            seconds = measure_step(own, work.theirs, work.device)
        except RuntimeError as error:  # of memory, of kernels: the plan is of use without it
            why = str(error).splitlines()[0]
    if why is None:
        alone = " of one process alone" if work.world > 1 else ""
        print(
            f"time       {steps:,} steps: about {in_time(steps * seconds)} without evaluations, by steps{alone} of "
            f"{1000 * seconds:,.0f} ms, measured here with random weights"
        )
        return
    rates = {"an H100 (989 TFLOP/s in bfloat16)": 989e12}
    if work.recompute.room is not None:
        rates = {f"this machine's {work.device.type}": matmul_rate(work.device, compute_dtype(config, work.device))}
    for name, rate in rates.items():
        seconds = steps * sum(work.operations.values()) / work.world / (SHARE * rate)
        print(
            f"time       {steps:,} steps: about {in_time(seconds)} without evaluations, if they reach "
            f"{100 * SHARE:.0f} % of {name}; a step was not measured: {why}"
        )


def print_data(work: Work) -> int:
    """Print what is known of the data, and what features would take; return the steps of the run."""
    config, shape = work.config, work.shape
    stored = {store: row_bytes(1, shape.tapped, shape.hidden, store) for store in ("bfloat16", "int8")}  # of a token
    print(
        "features   stored by ./launch.sh features: "
        + ", ".join(f"{in_bytes(size * 1e6)} a million tokens in {store}" for store, size in stored.items())
    )
    tokens = estimated_tokens(config)
    if tokens is None:
        print("data       on the hub: how many tokens it has, and so how many steps, shows once it is here")
        return config.optim.steps or 1000
    fill = row_fill(config)
    print(
        f"data       about {tokens:,.0f} tokens, rows {100 * fill:.0f} % full; "
        f"{in_bytes(stored['bfloat16'] * tokens / fill)} of features in bfloat16"
    )
    return total_steps(config, tokens / fill / shape.length)


def print_plan(config: TrainConfig) -> None:
    """Print the plan."""
    work = work_of(config)
    shape, operations, world = work.shape, work.operations, work.world
    print(
        f"target     {config.target.path}: {shape.target_parameters / 1e6:,.1f} million parameters, "
        f"{shape.target_layers} layers, hidden {shape.hidden}, vocabulary {shape.vocabulary:,}\n"
        f"drafter    {config.drafter.family}, {shape.layers} layer{'s' * (shape.layers > 1)}, block {shape.block}: "
        f"{shape.drafter_parameters / 1e6:,.1f} million\n"
        f"step       {config.optim.batch} rows of {shape.length:,} tokens, {shape.anchors} blocks each; {world} "
        f"{'GPU' if work.device.type == 'cuda' else 'CPU'} process{'es' if world > 1 else ''}, {shape.rows} rows a pass"
    )
    whole = sum(operations.values())
    shares = ", ".join(f"{part} {100 * count / whole:.0f} %" for part, count in operations.items())
    print(f"work       {whole / 1e12:,.3g} TFLOP a step ({shares})")
    print(work.recompute)
    for part, size in work.memory.items():
        print(f"           {in_bytes(size):>10}  {part}")
    print_time(work, print_data(work))
    if dist.is_initialized():  # a step was measured
        dist.destroy_process_group()
