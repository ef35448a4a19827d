"""What a training run takes, before it is begun: `./launch.sh plan [the overrides of the run]`.
Memory and operations follow by formulas from the target's config.json and the configuration; time
from the rate of large matrix products, measured where the device is at hand.

B rows of a pass, T packed length, N anchors, K block size, L = K - 1, W queries of a block,
Q = B * N * W block positions, D hidden size, A = heads * head size, A' = key-value heads * head
size, I intermediate size, V tokens that the drafter knows.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from data.chat import NO_ANSWER
from data.counts import ExampleCounts
from data.packing import CountedRows, prepare_rows
from data.rows import single
from infer.attention.masks import GROUP
from infer.drafters.base import default_mask_token, new_drafter
from infer.drafters.families import FAMILIES
from infer.drafters.heads.base import head_rows
from infer.targets.ends import end_tokens
from infer.targets.loading import load_config, load_generation_config, load_tokenizer, resolve_path
from infer.targets.support import head_size, key_heads, mlp_size, refuse_unsupported
from infer.targets.target import tokenizer_digest
from infer.utils.progress import Progress
from train.config import TrainConfig
from train.engine import compiles, compute_dtype, micro_batch, target_dtype
from train.features import row_bytes
from train.run.folder import used_ids
from train.run.initial import named_mask, resolve_init

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PretrainedConfig

BUCKET = 500_000_000  # gradients that ZeRO gathers before it reduces them, DeepSpeed's default
FITS = 0.9  # of a device's memory, at most, that a step may be planned to take


class StepShape:
    """The sizes that a step's work depends on, from a run's configuration and its target's
    config.json; `rows` of a pass if they are not the whole step's."""

    def __init__(
        self, config: TrainConfig, theirs: "PretrainedConfig", rows: int | None = None
    ) -> None:
        from transformers import AutoModelForCausalLM

        text = theirs.get_text_config()
        rows = rows or config.optim.batch_size
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(theirs)
            drafter = new_drafter(config.drafter, None, text)
        blocks = rows * config.anchors_per_sequence
        counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
        tables = (model.get_input_embeddings(), model.get_output_embeddings())
        self.length = config.data.length  # T
        self.block = config.drafter.block_size  # K
        window = min(config.drafter.sliding_window or self.length, self.length)
        # positions of the context that a query sees, on average
        self.seen = window - window**2 / (2 * self.length)
        self.context = rows * self.length  # B * T
        self.queries = blocks * drafter.num_queries  # Q
        self.drafted = blocks * (self.block - 1)  # B * N * L, supervised rows at most
        self.chunk_rows = min(config.objective.chunk_rows, self.drafted)
        # features that the drafter's query, key and value projections take
        self.input_size = next(
            w.shape[1] for name, w in drafter.named_parameters() if name.endswith("q_proj.weight")
        )
        self.drafter_parameters = sum(parameter.numel() for parameter in drafter.parameters())
        self.tapped = len(drafter.layer_ids)  # layers of the target whose outputs are features
        self.layers = config.drafter.layers
        self.hidden = text.hidden_size  # D
        self.vocabulary = text.vocab_size
        self.known = head_rows(drafter.config)  # V
        self.intermediate = mlp_size(text)  # I
        self.width = text.num_attention_heads * head_size(text)  # A
        self.kv_width = key_heads(text) * head_size(text)  # A'
        self.target_layers = text.num_hidden_layers
        self.target_parameters = sum(counts.values())
        # of these, embedding and head
        self.target_ends = sum(
            {id(p): p.numel() for table in tables for p in table.parameters()}.values()
        )


def step_memory(
    shape: StepShape, config: TrainConfig, world: int, weight: int, product: int, cuda: bool
) -> dict[str, float]:
    """Bytes on one device at a step's peak, by part. weight: bytes of a target's weight; product:
    bytes of an entry in the drafter's products (2 under autocast)."""
    s = shape
    parameters = shape.drafter_parameters
    stage = config.deepspeed.stage
    offload = config.deepspeed.offload
    shared = world if stage >= 1 else 1
    layers = s.target_parameters - s.target_ends
    if config.features:
        target = weight * s.target_ends
    elif config.target.shard:
        # two layers are whole
        target = weight * (s.target_ends + layers / world + 2 * layers / s.target_layers)
    else:
        target = weight * s.target_parameters
    moments = 8 * parameters + (4 * parameters if stage in (1, 2) else 0)
    one_pass = weight * s.context * (3 * s.intermediate + 4 * s.hidden + s.width)
    features = weight * s.context * (s.tapped + 1) * s.hidden
    features += 4 * s.context * s.tapped * s.hidden * (weight != 4)
    # what a compiled pass keeps one time less: it computes norms and SiLU again
    once = int(compiles(config, cuda))
    per_query = (5 - once) * s.hidden + (4 - once) * (s.width + s.intermediate) + 4 * s.kv_width
    # embeddings beside features, normalised and not
    per_context = 4 * s.kv_width + 8 * (s.input_size - s.hidden)
    layer = product * (s.queries * per_query + s.context * per_context)
    mask = 0 if cuda else 4 * s.queries * (s.seen + GROUP)  # each of its pieces sees so many keys
    ends = (
        4 * (3 * s.context + 6 * s.queries) * s.hidden
    )  # before the first and behind the last layer
    kept = (
        ends
        + mask
        + s.layers * (4 * s.queries * s.hidden if config.gradient_checkpointing else layer)
    )
    distinct = min(1, s.context / s.drafted)  # teacher rows for a row
    chunk = 4 * (4 if cuda else 1 + distinct) * s.chunk_rows * s.known
    backward = (
        3 * product * s.queries * s.intermediate
        + (layer if config.gradient_checkpointing else 0)
        - once * ends
    )
    gradients = 4 * parameters / (world if stage >= 2 else 1)
    if (
        config.optim.batch_size * s.length <= s.context * world
    ):  # one pass a step: they come while activations go
        gradients = max(0, gradients - kept)
    gradients += 4 * min(parameters, BUCKET) if stage else 0
    return {
        "target": target,
        "drafter": 4 * parameters / (world if stage == 3 else 1)
        + (2 * parameters if product == 2 else 0),
        "gradients": gradients,
        "optimiser": 0 if offload else moments / shared,
        "features": features,
        "activations": kept,
        "at once": max(one_pass - kept, chunk, backward),
    }


def device_memory(device: torch.device, processes: int) -> float:
    """Return the bytes that one of a machine's processes may use: on a GPU what is free and what it
    holds already; on a CPU an equal share of all memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / processes


def with_recompute(
    config: TrainConfig,
    shape: StepShape,
    world: int,
    weight: int,
    product: int,
    cuda: bool,
    room: float | None,
) -> tuple[TrainConfig, str]:
    """Return the configuration, with layers computed again in the backward pass where that is left
    open and a step would not fit otherwise, and a line that says what it takes. room: bytes of a
    device, None where it is not at hand; otherwise as `step_memory`."""
    ways = {again: replace(config, gradient_checkpointing=again) for again in (False, True)}
    sizes = {
        again: sum(step_memory(shape, ways[again], world, weight, product, cuda).values())
        for again in ways
    }
    chosen = config.gradient_checkpointing
    if chosen is None:
        chosen = room is not None and sizes[False] > FITS * room
    line = f"memory     {in_bytes(sizes[chosen])} on each device at a step's peak"
    line += "" if room is None else f", of {in_bytes(room)}"
    line += f"; {in_bytes(sizes[not chosen])} with gradient_checkpointing={str(not chosen).lower()}"
    if room is not None and sizes[chosen] > FITS * room:
        line += ". That may be too much: optim.micro_batch_size=1, deepspeed=zero2, target.shard=true and stored features take less"
    return ways[chosen], line


def total_steps(config: TrainConfig, rows: float) -> int:
    """Return the optimiser steps of a run over a number of packed rows."""
    if config.optim.steps is not None:
        return config.optim.steps
    return max(1, round(config.optim.epochs * rows / config.optim.batch_size))


def length_of(config: TrainConfig, rows: int) -> str:
    """Say how long a run over a number of packed rows is."""
    minutes = config.optim.max_minutes
    return (
        f"{total_steps(config, rows):,} steps"
        if minutes is None
        else f"{minutes:g} minutes of steps"
    )


def target_config(config: TrainConfig) -> "PretrainedConfig":
    """Return the target's config.json: from its folder, else made of the sizes in conf/target/,
    else from the hub."""
    from transformers import AutoConfig

    options = config.target
    if options.model_config and not Path(resolve_path(options.path)).exists():
        return AutoConfig.for_model(**options.model_config)
    return load_config(options.path, options.trust_remote_code)


def in_bytes(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


@dataclass(frozen=True)
class Work:
    """A run on a device, as far as it is known before anything is loaded."""

    config: TrainConfig
    shape: StepShape  # of a pass of one process
    world: int  # processes
    device: torch.device  # that the run is for
    room: float | None  # its bytes for a process, where it is at hand
    memory: dict[str, float]  # bytes on it at a step's peak, by part
    line: str  # that says what a step takes


def work_of(config: TrainConfig, theirs: "PretrainedConfig") -> Work:
    """Return the work of a run on this machine's device, or with target.device=cuda on a GPU.
    Raises ValueError as the run would."""
    world = int(os.environ.get("NPROC") or 1)
    there = torch.cuda.is_available()
    asked = config.target.device.partition(":")[0]
    cuda = there if asked == "auto" else asked == "cuda"
    device = torch.device("cuda" if cuda else "cpu")
    room = device_memory(device, world) if cuda <= there else None
    shape = StepShape(config, theirs, micro_batch(config, world)[0])
    sizes = (
        world,
        target_dtype(config, device).itemsize,
        compute_dtype(config, device).itemsize,
        cuda,
    )
    config, line = with_recompute(config, shape, *sizes, room)
    return Work(config, shape, world, device, room, step_memory(shape, config, *sizes), line)


def process_memory(work: Work) -> float:
    """Return the bytes of a CPU process at its peak: this one's libraries, and beside what training
    keeps either the rest of a step or, in an evaluation, float32 copies of the target's weights."""
    parts = work.memory
    copy = 4 * work.shape.target_parameters
    libraries = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    kept = sum(parts[name] for name in ("target", "drafter", "optimiser"))
    return libraries + max(sum(parts.values()), kept + copy + (parts["target"] != copy) * copy)


def rows_of(config: TrainConfig, tokenizer) -> CountedRows:
    """Return the training rows, which the run will find in the cache, and what became of all
    examples; no rows where no example has something to learn, as with questions that the target is
    still to answer, or where the data are not on this machine yet."""
    if config.data.source == "self" or any(data.source == "hub" for data, _ in single(config.data)):
        return CountedRows(None, ExampleCounts())
    progress = Progress("tokenising", "texts")
    return prepare_rows(config.data, tokenizer, tokenizer_digest(tokenizer), progress)


def time_line(config: TrainConfig, prepared: CountedRows | None) -> str:
    """Say how many steps or minutes a run has, as far as that is known; `prepared`: None without a
    tokenizer."""
    if config.data.source == "self":
        return "unknown: data=self has no rows yet, ./launch.sh regenerate lets the target write questions and answers"
    known = prepared is not None and prepared.counts.total > 0
    if known and prepared.rows is None:
        if NO_ANSWER in prepared.counts.excluded:
            return "unknown: questions without answers, ./launch.sh regenerate lets the target write them"
        return "unknown: there is no example to learn from"
    if config.optim.max_minutes is not None:
        return f"{config.optim.max_minutes:g} minutes of steps, without evaluations"
    if config.optim.steps is None and not known:
        return (
            "unknown: the number of steps follows from the data, which are not on this machine yet"
        )
    rows = len(prepared.rows) if known else 0
    return f"{total_steps(config, rows):,} steps, without evaluations"


def mask_of(
    config: TrainConfig, theirs: "PretrainedConfig", tokenizer, rows: "Dataset | None"
) -> str:
    """Return the drafter's mask token in words. Raises ValueError where there is none."""
    mask = config.drafter.mask_token_id
    if FAMILIES[config.drafter.family].mask_token and mask is None:
        text = theirs.get_text_config()
        configs = (load_generation_config(config.target.path), theirs, text)
        ends = end_tokens(configs, tokenizer, text.vocab_size)
        mask = default_mask_token(
            tokenizer, text.vocab_size, ends, rows and (lambda: used_ids(rows))
        )
    return named_mask(mask, tokenizer)


def print_plan(config: TrainConfig) -> None:
    """Print the plan."""
    config = replace(config, drafter=resolve_init(config.drafter, config.target))
    options = config.target
    theirs = target_config(config)
    tokenizer = prepared = rows = None
    mask = ""
    refuse_unsupported(theirs)
    work = work_of(config, theirs)
    try:
        tokenizer = load_tokenizer(
            options.path, options.trust_remote_code, options.chat_template_kwargs
        )
    except FileNotFoundError:  # of a model in conf/target that cannot be reached
        pass
    else:
        prepared = rows_of(config, tokenizer)
        rows = prepared.rows
        mask = mask_of(config, theirs, tokenizer, rows)
    shape = work.shape
    device = "GPU" if work.device.type == "cuda" else "CPU"
    print(
        f"target     {options.path}: {shape.target_parameters / 1e6:,.1f} million parameters, "
        f"{shape.target_layers} layers, hidden {shape.hidden}, vocabulary {shape.vocabulary:,}\n"
        f"drafter    {config.drafter.family}, layers {shape.layers}, block {shape.block}: "
        f"{shape.drafter_parameters / 1e6:,.1f} million{mask}\n"
        f"step       {config.optim.batch_size} rows of {shape.length:,} tokens, {config.anchors_per_sequence} blocks each, by "
        f"{work.world} {device} process{'es' * (work.world > 1)}\n{work.line}"
    )
    for part, size in work.memory.items():
        print(f"           {in_bytes(size):>10}  {part}")
    if device == "CPU" and Path("/proc/self/statm").exists():
        print(
            f"           {in_bytes(process_memory(work)):>10}  in all, with libraries and an evaluation's copies"
        )
    stored = row_bytes(1, shape.tapped, shape.hidden, "bfloat16")
    line = f"{in_bytes(1e6 * stored)} of stored features a million tokens"
    if rows is not None:
        line = f"{len(rows):,} rows, {line}"
    if prepared is not None and prepared.counts.total:
        print(*prepared.counts.lines(), sep="\n")
    print(f"data       {line}\ntime       {time_line(config, prepared)}")
