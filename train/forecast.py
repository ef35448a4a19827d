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
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from transformers import AutoTokenizer

from data.chat import THOUGHT
from data.packing import best_fit, flat, tokenize
from data.prompts import evaluation_prompts
from data.rows import DataConfig, files_of, single, training_rows
from infer.config import TargetConfig
from infer.drafters.base import default_mask_token, new_drafter
from infer.evaluation.evaluate import brief, parts_of
from infer.evaluation.measuring import synchronised_clock
from infer.targets.loading import resolve_path, tell_template, without_memory
from infer.targets.support import refuse_unsupported
from infer.targets.target import Target
from infer.utils.progress import doing
from train.batches import Prefetch
from train.config import TrainConfig
from train.engine import build_engine, compute_dtype, micro_batch, target_dtype, with_precision
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
from train.run.initial import named_mask, resolve_init
from train.safety.processes import start_processes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SAMPLE = 2000  # texts whose lengths say how full rows become
SHARE = 0.4  # of a device's rate that a run is expected to use where it could not be measured
WARM = 2  # steps that are not timed: the first ones compile, and touch their memory
PATIENCE = 10.0  # seconds of steps, at most
ENOUGH = 30  # steps


@dataclass
class Sample:
    """The first rows of the data, as training reads them; without the target's tokenizer, by four bytes a token."""

    tokens: float = 0.0  # of all rows, about
    sizes: list[int] = field(default_factory=list)  # tokens of every piece
    used: set[int] = field(default_factory=set)  # ids that they have
    room: int = 1  # positions of the packed rows

    @property
    def fill(self) -> float:
        """How full packed rows are."""
        return sum(self.sizes) / self.room or 1.0


def sample_data(config: TrainConfig, tokenizer) -> Sample | None:
    """Return a sample of the training rows, None where they are not on this machine yet."""
    sample, length = Sample(), config.data.length
    for data, _ in single(config.data):
        if data.source == "hub":
            return None
        rows = list(islice(training_rows(data), SAMPLE + 1))
        before = sum(sample.sizes)
        for row in rows:
            sizes, ids = pieces_of(row, tokenizer, data)
            sample.sizes += sizes
            sample.used.update(ids)
        share = 1.0
        if len(rows) > SAMPLE:  # all files have so many times the sample's bytes
            seen = sum(len(json.dumps(row, ensure_ascii=False).encode(errors="replace")) for row in rows)
            share = max(1.0, bytes_of(data) / seen)
        sample.tokens += share * (sum(sample.sizes) - before)
    sample.room = length * max(1, sum(1 for _ in best_fit(sample.sizes, length)))
    return sample


def pieces_of(row: dict, tokenizer, data: DataConfig) -> tuple[list[int], set[int]]:
    """Return the sizes of a row's pieces in tokens, and the ids that they have, where there is a tokenizer."""
    if tokenizer is not None:
        pieces = tokenize({key: [value] for key, value in flat(row).items()}, tokenizer, data.length, data.long)["ids"]
        return [len(ids) for ids in pieces if ids], {id for ids in pieces for id in ids}
    said = row["prompt"] + row["text"]
    if row["chat"]:
        said = "".join(turn["role"] + turn["content"] + turn.get(THOUGHT, "") for turn in row["chat"]["messages"])
    tokens = len(said.encode(errors="replace")) // 4 + 1
    return [min(data.length, tokens - start) for start in range(0, tokens, data.length)], set()


def bytes_of(data: DataConfig) -> float:
    """Return the bytes of a data set's rows."""
    if data.source in ("embedded", "stdlib"):
        return sum(len(json.dumps(row, ensure_ascii=False)) for row in training_rows(data))
    return sum(file.stat().st_size * (3 if file.suffix in (".parquet", ".gz") else 1) for file in files_of(data.path))


def tokenizer_at_hand(target: TargetConfig):
    """Return the target's tokenizer, None where it is not on this machine."""
    try:
        place = resolve_path(target.path)
        tokenizer = AutoTokenizer.from_pretrained(
            place, local_files_only=True, trust_remote_code=target.trust_remote_code
        )
    except (OSError, ValueError):
        return None
    tell_template(tokenizer, target.chat_template_kwargs)
    return tokenizer


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
) -> Iterator[tuple[Callable[[], object], Target]]:
    """A function that takes the next one of `count` steps of a run on random rows, from random weights; the target."""
    start_processes(device)
    target = random_target(theirs, target_dtype(config, device), device)
    with device:
        drafter = new_drafter(config.drafter, None, target.config)
    engine = build_engine(drafter, config, device)
    rows = RandomRows(4 * config.optim.batch, config.data.length, target.config.vocab_size)
    with closing(Prefetch(rows, config, 0, count, pinned=device.type == "cuda")) as prefetch:
        yield lambda: train_step(engine, target, prefetch(), config, lambda phase: None), target


@dataclass(frozen=True)
class Measured:
    """What random weights took here."""

    step: float  # seconds, of one process
    token: float  # seconds of the target's pass over one token


def measure(config: TrainConfig, theirs: "PretrainedConfig", device: torch.device) -> Measured:
    """Return the seconds of a step, the median of `ENOUGH` steps or of those of ten seconds, and of a plain pass."""
    last, clock = WARM + ENOUGH, synchronised_clock(device)

    def timed(work: Callable[[], object]) -> float:
        began = clock()
        work()
        return clock() - began

    seconds = []
    with random_steps(config, theirs, device, last) as (step, target):
        while len(seconds) < last and (len(seconds) <= WARM or sum(seconds[WARM:]) < PATIENCE):
            seconds.append(timed(step))
        one = torch.zeros(1, 1, dtype=torch.long, device=device)
        with torch.inference_mode():
            tokens = [timed(lambda: target.model(one)) for _ in range(5)]
    return Measured(statistics.median(seconds[WARM:]), statistics.median(tokens))


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
    """Return the work of a run, from its configuration and the target's config.json, on the device that the run would
    take here; without a GPU and where the CPU has no room, on a GPU. Raises ValueError as the run would."""
    config = replace(config, drafter=resolve_init(config.drafter, config.target))
    theirs = target_config(config)
    refuse_unsupported(theirs)
    if config.target.device != "auto" or torch.cuda.is_available():
        return work_on("cuda" if config.target.device.startswith(("cuda", "auto")) else "cpu", config, theirs)
    here = work_on("cpu", config, theirs)
    return here if sum(here.memory.values()) <= FITS * here.recompute.room else work_on("cuda", config, theirs)


def work_on(kind: str, config: TrainConfig, theirs: "PretrainedConfig") -> Work:
    """Return the work of a run on a kind of device."""
    world, device = int(os.environ.get("NPROC") or 1), torch.device(kind)
    cuda = kind == "cuda"
    room = device_memory(device, world) if cuda == torch.cuda.is_available() else None
    if room is not None:
        config = with_precision(config, theirs.get_text_config(), device)
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


def evaluated_tokens(config: TrainConfig, tokenizer) -> int:
    """Return how many tokens all evaluations of a run decode at most. Raises ValueError where there is no prompt."""
    options = config.evaluation
    prompts = evaluation_prompts(config.data, tokenizer, options.prompts, options.prompt_tokens, options.outside)
    parts = parts_of(prompts, options)
    every = [*parts, *[brief(parts[0])] * (config.checkpoints - 1)]
    ways = 4 + len(options.budgets)  # plain, generate, chain, n-grams, and trees
    return ways * options.max_new_tokens * sum(len(part.prompts) * part.config.repeats for part in every)


def print_time(work: Work, steps: int, decoded: int | None) -> None:
    """Print how long so many steps and the evaluations take: as measured, otherwise by an assumption. decoded: tokens
    of all evaluations, None where they are not known."""
    config, why = work.config, obstacle(work)
    if why is None:
        own = replace(config, optim=replace(config.optim, batch=config.optim.batch // work.world))
        try:
            with doing("measuring a step with random weights"):
                took = measure(own, work.theirs, work.device)
        except RuntimeError as error:  # of memory, of kernels: the plan is of use without it
            why = str(error).splitlines()[0]
    if why is None:
        alone = " of one process alone" if work.world > 1 else ""
        print(
            f"time       {steps:,} steps: about {in_time(steps * took.step)} without evaluations, by steps{alone} of "
            f"{1000 * took.step:,.0f} ms, measured here with random weights"
        )
    rates = {"an H100 (989 TFLOP/s in bfloat16)": 989e12}
    if work.recompute.room is not None:
        rates = {f"this machine's {work.device.type}": matmul_rate(work.device, compute_dtype(config, work.device))}
    for name, rate in rates.items() if why else ():
        seconds = steps * sum(work.operations.values()) / work.world / (SHARE * rate)
        print(
            f"time       {steps:,} steps: about {in_time(seconds)} without evaluations, if they reach "
            f"{100 * SHARE:.0f} % of {name}; a step was not measured: {why}"
        )
    if decoded is not None:
        count = f"{config.checkpoints} evaluation{'s' * (config.checkpoints > 1)}"
        takes = "" if why else f": about {in_time(decoded * took.token / work.world)}, if each takes a plain pass"
        print(f"           {count} of at most {decoded:,} tokens, every way of decoding counted{takes}")


def print_data(work: Work, sample: Sample | None) -> int:
    """Print what is known of the data, and what features would take; return the steps of the run."""
    config, shape = work.config, work.shape
    stored = {store: row_bytes(1, shape.tapped, shape.hidden, store) for store in ("bfloat16", "int8")}  # of a token
    print(
        "features   stored by ./launch.sh features: "
        + ", ".join(f"{in_bytes(size * 1e6)} a million tokens in {store}" for store, size in stored.items())
    )
    if sample is None:
        print("data       on the hub: how many tokens it has, and so how many steps, shows once it is here")
        return config.optim.steps or 1000
    print(
        f"data       about {sample.tokens:,.0f} tokens, rows {100 * sample.fill:.0f} % full; "
        f"{in_bytes(stored['bfloat16'] * sample.tokens / sample.fill)} of features in bfloat16"
    )
    return total_steps(config, sample.tokens / sample.fill / shape.length)


def process_memory(work: Work) -> float:
    """Return the bytes of a CPU process at its peak: this one's libraries, and beside what training keeps either the
    rest of a step or, in an evaluation, float32 copies of the target's weights."""
    parts, shape = work.memory, work.shape
    libraries = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    again = 0 if parts["target"] == 4 * shape.target_parameters else 4 * shape.target_parameters
    kept = sum(parts[name] for name in ("target", "drafter", "optimiser"))
    return libraries + max(sum(parts.values()), kept + again + 4 * shape.target_parameters)


def print_plan(config: TrainConfig) -> None:
    """Print the plan."""
    work = work_of(config)
    shape, operations, world = work.shape, work.operations, work.world
    tokenizer = tokenizer_at_hand(config.target)
    sample = sample_data(config, tokenizer)
    print(
        f"target     {config.target.path}: {shape.target_parameters / 1e6:,.1f} million parameters, "
        f"{shape.target_layers} layers, hidden {shape.hidden}, vocabulary {shape.vocabulary:,}\n"
        f"drafter    {config.drafter.family}, {shape.layers} layer{'s' * (shape.layers > 1)}, block {shape.block}: "
        f"{shape.drafter_parameters / 1e6:,.1f} million{mask_of(work, tokenizer, sample)}\n"
        f"step       {config.optim.batch} rows of {shape.length:,} tokens, {shape.anchors} blocks each; {world} "
        f"{'GPU' if work.device.type == 'cuda' else 'CPU'} process{'es' if world > 1 else ''}, {shape.rows} rows a pass"
    )
    whole = sum(operations.values())
    shares = ", ".join(f"{part} {100 * count / whole:.0f} %" for part, count in operations.items())
    print(f"work       {whole / 1e12:,.3g} TFLOP a step ({shares})")
    print(work.recompute)
    for part, size in work.memory.items():
        print(f"           {in_bytes(size):>10}  {part}")
    if work.device.type == "cpu" and Path("/proc/self/statm").exists():
        print(f"           {in_bytes(process_memory(work)):>10}  in all, with libraries and an evaluation's copies")
    steps = print_data(work, sample)
    known = tokenizer is not None and sample is not None
    print_time(work, steps, evaluated_tokens(config, tokenizer) if known else None)
    if dist.is_initialized():  # a step was measured
        dist.destroy_process_group()


def mask_of(work: Work, tokenizer, sample: Sample | None) -> str:
    """Return the drafter's mask token in words, where that can be known. Raises ValueError where there is none."""
    options, theirs = work.config.drafter, work.theirs.get_text_config()
    mask = options.mask_token_id
    if options.family != "dflash" or tokenizer is None:
        return ""
    if mask is None:
        ends = theirs.eos_token_id if isinstance(theirs.eos_token_id, list) else [theirs.eos_token_id]
        mask = default_mask_token(tokenizer, theirs.vocab_size, ends, sample and (lambda: sample.used))
    return named_mask(mask, tokenizer)
