"""What a training run will take, before it is begun: `./launch.sh plan [the overrides of the run]`.

Sizes, operations and memory follow from the target's config.json and the run's configuration (`train.plan`); the time
of a step follows from the rate of large matrix products, which is measured where the device is at hand.
"""

import json
import os
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoTokenizer

from data.chat import THOUGHT
from data.packing import best_fit, flat, tokenize
from data.prompts import evaluation_prompts
from data.rows import DataConfig, files_of, single, training_rows
from infer.config import TargetConfig
from infer.drafters.base import default_mask_token
from infer.evaluation.evaluate import brief, parts_of
from infer.targets.loading import resolve_path, tell_template
from infer.targets.support import refuse_unsupported
from train.config import TrainConfig
from train.engine import compute_dtype, measured_precision, micro_batch, target_dtype
from train.features import row_bytes
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

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SAMPLE = 2000  # texts whose lengths say how full rows become
SHARE = 0.4  # of a device's rate of large matrix products that a run is expected to reach


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
        precision = measured_precision(config, theirs.get_text_config(), device)
        config = replace(config, optim=replace(config.optim, precision=precision))
    shape = shape_of(config, theirs, micro_batch(config, world)[0])
    weight, product = target_dtype(config, device).itemsize, compute_dtype(config, device).itemsize
    recompute = recompute_of(shape, config, world, weight, product, cuda, room)
    return Work(replace(config, recompute=recompute.chosen), theirs, shape, world, device, recompute)


def evaluated_tokens(config: TrainConfig, tokenizer) -> int:
    """Return how many tokens all evaluations of a run decode at most. Raises ValueError where there is no prompt."""
    options = config.evaluation
    prompts = evaluation_prompts(config.data, tokenizer, options.prompts, options.prompt_tokens, options.outside)
    parts = parts_of(prompts, options)
    every = [*parts, *[brief(parts[0])] * (config.checkpoints - 1)]
    ways = 4 + len(options.budgets)  # plain, generate, chain, n-grams, and trees
    return ways * options.max_new_tokens * sum(len(part.prompts) * part.config.repeats for part in every)


def print_time(work: Work, steps: int, decoded: int | None) -> None:
    """Print how long so many steps take at a share of the device's rate, an H100's where the device is not at hand.
    decoded: tokens of all evaluations, None where they are not known."""
    config, name, rate = work.config, "an H100 (989 TFLOP/s in bfloat16)", 989e12
    if work.recompute.room is not None:
        name = f"this machine's {work.device.type}"
        rate = matmul_rate(work.device, compute_dtype(config, work.device))
    seconds = steps * sum(work.operations.values()) / work.world / (SHARE * rate)
    print(
        f"time       {steps:,} steps: about {in_time(seconds)} without evaluations, if they reach "
        f"{100 * SHARE:.0f} % of {name}"
    )
    if decoded is not None:
        count = f"{config.checkpoints} evaluation{'s' * (config.checkpoints > 1)}"
        print(f"           {count} of at most {decoded:,} tokens, every way of decoding counted")


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
