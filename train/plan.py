"""The cost of a training run, before anything is loaded: parameters, operations, memory, disk, time.

`./launch.sh plan [the overrides of the run]`. All follows from the target's config.json and the run's configuration.

B rows of a pass, T packed length, N anchors, K block size, L = K - 1, W queries of a block,
Q = B * N * W block positions, D hidden size, A = heads * head size, A' = key-value heads * head size, I intermediate
size, V vocabulary.
"""

import json
import os
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from data.packing import best_fit
from data.rows import files_of, single, training_rows
from infer.attention.masks import GROUP
from infer.drafters.families import FAMILIES
from infer.evaluation.evaluate import synchronised_clock
from infer.targets.loading import load_config, resolve_dtype, resolve_path
from infer.targets.support import expert_share, head_size, key_heads, mlp_size, refuse_unsupported
from train.config import TrainConfig
from train.engine import compiles, compute_dtype, micro_batch
from train.features import row_bytes
from train.run.initial import resolve_init

if TYPE_CHECKING:
    from transformers import PretrainedConfig

BUCKET = 500_000_000  # gradients that ZeRO gathers before it reduces them, DeepSpeed's default
SAMPLE = 2000  # texts whose lengths say how full rows become
SHARE = 0.4  # of a device's rate that a run is expected to use


@dataclass(frozen=True)
class Shape:
    """The sizes that a step's work depends on."""

    rows: int  # B
    length: int  # T
    anchors: int  # N
    block: int  # K
    block_queries: int  # W
    projected_queries: int  # of these; copies of one vector are projected once
    input_size: int  # features that the drafter's query, key and value projections take
    drafter_parameters: int
    trains_head: bool
    rank: int  # of a conditional head's corrections, 0 without
    tapped: int  # layers of the target whose outputs are features
    layers: int  # of the drafter
    hidden: int  # D
    width: int  # A
    head_dim: int
    kv_width: int  # A'
    intermediate: int  # I
    vocabulary: int  # V
    target_layers: int
    target_parameters: int  # all of them
    target_ends: int  # of these, embedding and head
    target_active: int  # of the others, those that a token passes through: not all experts
    chunk_rows: int

    @property
    def context(self) -> int:
        """B * T positions."""
        return self.rows * self.length

    @property
    def queries(self) -> int:
        """Q."""
        return self.rows * self.anchors * self.block_queries

    @property
    def drafted(self) -> int:
        """Supervised rows, at most."""
        return self.rows * self.anchors * (self.block - 1)

    @property
    def input_matrices(self) -> int:
        """Entries of one layer's query, key and value projections."""
        return self.input_size * (self.width + 2 * self.kv_width)

    @property
    def output_matrices(self) -> int:
        """Entries of one layer's other matrices."""
        return self.hidden * (self.width + 3 * self.intermediate)


def shape_of(config: TrainConfig, theirs: "PretrainedConfig", rows: int | None = None) -> Shape:
    """Return the sizes of a run on a target, from its config.json; `rows` of a pass if they are not the whole
    step's."""
    from transformers import AutoModelForCausalLM

    text, family = theirs.get_text_config(), FAMILIES[config.drafter.family].load()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs)
        drafter = family(family.config_for(config.drafter, None, text))
    head = drafter.conditional_head
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    ends = {
        id(p): p.numel() for m in (model.get_input_embeddings(), model.get_output_embeddings()) for p in m.parameters()
    }
    experts = sum(count for name, count in counts.items() if ".experts." in name)
    share = expert_share(text)
    everything = sum(counts.values())
    head_dim = head_size(text)
    return Shape(
        rows=rows or config.optim.batch,
        length=config.data.length,
        anchors=config.anchors,
        block=config.drafter.block_size,
        block_queries=drafter.num_queries,
        projected_queries=1 if drafter.projects_once else drafter.num_queries,
        input_size=drafter.input_size,
        drafter_parameters=sum(parameter.numel() for parameter in drafter.parameters()),
        trains_head=drafter.lm_head is not None,
        rank=0 if head is None or head.out is None else head.out.shape[1],
        tapped=len(drafter.layer_ids),
        layers=config.drafter.layers,
        hidden=text.hidden_size,
        width=text.num_attention_heads * head_dim,
        kv_width=key_heads(text) * head_dim,
        intermediate=mlp_size(text),
        vocabulary=text.vocab_size,
        target_layers=text.num_hidden_layers,
        target_parameters=everything,
        target_ends=sum(ends.values()),
        target_active=everything - sum(ends.values()) - round(experts * (1 - share)),
        chunk_rows=config.objective.chunk_rows,
        head_dim=head_dim,
    )


def step_operations(shape: Shape) -> dict[str, float]:
    """Useful floating-point operations of one pass, by part: a product of matrices counts two an entry and inner step;
    what a causal mask hides, an implementation recomputes or repeats is not counted."""
    s = shape
    target = 2 * s.target_active * s.context + 2 * s.context * s.length * s.width * s.target_layers
    features = 4 * s.tapped * s.hidden**2 * s.context  # no gradient goes to the features
    context = 6 * s.layers * 2 * s.input_size * s.kv_width * s.context
    attention = 12 * s.layers * s.queries * (s.length / 2 + s.block) * s.width
    projected = s.rows * s.anchors * s.projected_queries
    layers = 6 * s.layers * (s.input_matrices * projected + s.output_matrices * s.queries)
    drafter = features + context + layers + attention
    teacher, corrections = min(s.context, s.drafted), 3 * s.rank * s.drafted
    return {
        "target": target,
        "drafter": drafter,
        "objective": 2 * s.vocabulary * (s.hidden * ((3 if s.trains_head else 2) * s.drafted + teacher) + corrections),
    }


def step_memory(
    shape: Shape, config: TrainConfig, world: int, weight: int, product: int, cuda: bool
) -> dict[str, float]:
    """Bytes on one device at a step's peak, by part. weight: bytes of a target's weight; product: bytes of an entry in
    the drafter's products (2 under autocast)."""
    s, parameters = shape, shape.drafter_parameters
    stage, offload = config.deepspeed.stage, config.deepspeed.offload
    shared = world if stage >= 1 else 1
    layers = s.target_parameters - s.target_ends
    if config.features:
        target = weight * s.target_ends
    elif config.target.shard:
        target = weight * (s.target_ends + layers / world + 2 * layers / s.target_layers)  # two layers are whole
    else:
        target = weight * s.target_parameters
    moments = 8 * parameters + (4 * parameters if stage in (1, 2) else 0)
    one_pass = weight * s.context * (3 * s.intermediate + 4 * s.hidden + s.width)
    features = weight * s.context * (s.tapped + 1) * s.hidden
    features += 4 * s.context * s.tapped * s.hidden * (weight != 4)
    once = int(compiles(config, cuda))  # what a compiled pass keeps one time less: it computes norms and SiLU again
    per_query = (5 - once) * s.hidden + (4 - once) * (s.width + s.intermediate) + 4 * s.kv_width
    per_context = 4 * s.kv_width + 8 * (s.input_size - s.hidden)  # embeddings beside features, normalised and not
    layer = product * (s.queries * per_query + s.context * per_context)
    pieces = 0 if cuda else s.length / 2 + GROUP  # keys that each of the mask's pieces sees
    mask = 4 * s.queries * pieces
    ends = 4 * (3 * s.context + 6 * s.queries) * s.hidden  # before the first and behind the last layer
    kept = ends + mask + s.layers * (4 * s.queries * s.hidden if config.recompute else layer)
    distinct = min(1, s.context / s.drafted)  # teacher rows for a row
    chunk = 4 * (4 if cuda else 1 + distinct) * min(s.chunk_rows, s.drafted) * s.vocabulary
    backward = 3 * product * s.queries * s.intermediate + (layer if config.recompute else 0) - once * ends
    gradients = 4 * parameters / (world if stage >= 2 else 1)
    if config.optim.batch <= s.rows * world:  # one pass a step: they come while activations go
        gradients = max(0, gradients - kept)
    gradients += 4 * min(parameters, BUCKET) if stage else 0
    return {
        "target": target,
        "drafter": 4 * parameters / (world if stage == 3 else 1) + (2 * parameters if product == 2 else 0),
        "gradients": gradients,
        "optimiser": 0 if offload else moments / shared,
        "features": features,
        "activations": kept,
        "at once": max(one_pass - kept, chunk, backward),
    }


def matmul_rate(device: torch.device, dtype: torch.dtype, repeats: int = 5) -> float:
    """Operations a second of one large matrix product on this machine: the yardstick of utilisation."""
    size, clock = 8192 if device.type == "cuda" else 1024, synchronised_clock(device)
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    seconds = []
    for _ in range(repeats):
        began = clock()
        a @ b
        seconds.append(clock() - began)
    return 2 * size**3 / min(seconds)


def total_steps(config: TrainConfig, rows: float) -> int:
    """Return the optimiser steps of a run over a number of packed rows."""
    if config.optim.steps is not None:
        return config.optim.steps
    return max(1, round(config.optim.epochs * rows / config.optim.batch))


def target_config(config: TrainConfig) -> "PretrainedConfig":
    """Return the target's config.json: from its folder, else made of the sizes in conf/target/, else from the hub."""
    from transformers import AutoConfig

    options = config.target
    if options.sizes and not Path(resolve_path(options.path)).exists():
        return AutoConfig.for_model(**options.sizes)
    return load_config(options.path, options.trust_remote_code)


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


def print_plan(config: TrainConfig) -> None:
    """Print the plan."""
    config = replace(config, drafter=resolve_init(config.drafter, config.target))
    theirs = target_config(config)
    refuse_unsupported(theirs)
    world = int(os.environ.get("NPROC") or 1)
    rows, _ = micro_batch(config, world)
    cuda = config.target.device.startswith("cuda") or (
        config.target.device == "auto" and (torch.cuda.is_available() or config.target.path != "embedded")
    )
    device = torch.device("cuda" if cuda else "cpu")
    weight, product = resolve_dtype(config.target.dtype, device).itemsize, compute_dtype(config, device).itemsize
    shape = shape_of(config, theirs, rows)
    operations, memory = step_operations(shape), step_memory(shape, config, world, weight, product, cuda)
    whole = sum(operations.values()) * config.optim.batch / rows

    print(
        f"target     {config.target.path}: {shape.target_parameters / 1e6:,.1f} million parameters, "
        f"{shape.target_layers} layers, hidden {shape.hidden}, vocabulary {shape.vocabulary:,}\n"
        f"drafter    {config.drafter.family}, {shape.layers} layer{'s' * (shape.layers > 1)}, block {shape.block}: "
        f"{shape.drafter_parameters / 1e6:,.1f} million\n"
        f"step       {config.optim.batch} rows of {shape.length:,} tokens, {shape.anchors} blocks each; {world} "
        f"{'GPU' if cuda else 'CPU'} process{'es' if world > 1 else ''}, {rows} rows a pass"
    )
    shares = ", ".join(f"{part} {100 * n / sum(operations.values()):.0f} %" for part, n in operations.items())
    print(f"work       {whole / 1e12:,.3g} TFLOP a step ({shares})")
    print(f"memory     {in_bytes(sum(memory.values()))} on each device at the peak")
    for part, size in memory.items():
        print(f"           {in_bytes(size):>10}  {part}")
    stored = {store: row_bytes(1, shape.tapped, shape.hidden, store) for store in ("bfloat16", "int8")}  # of a token
    print(
        "features   stored by ./launch.sh features: "
        + ", ".join(f"{in_bytes(size * 1e6)} a million tokens in {store}" for store, size in stored.items())
    )
    tokens = estimated_tokens(config)
    if tokens is None:
        print("data       on the hub: how many tokens it has, and so how many steps, shows once it is here")
        steps = config.optim.steps or 1000
    else:
        fill = row_fill(config)
        print(
            f"data       about {tokens:,.0f} tokens, rows {100 * fill:.0f} % full; "
            f"{in_bytes(stored['bfloat16'] * tokens / fill)} of features in bfloat16"
        )
        steps = total_steps(config, tokens / fill / shape.length)
    present = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    here = matmul_rate(present, resolve_dtype("auto", present))
    for name, rate in ((f"this machine's {present.type}", here), ("an H100 (989 TFLOP/s in bfloat16)", 989e12)):
        seconds = steps * whole / world / (SHARE * rate)
        print(
            f"time       {steps:,} steps: about {in_time(seconds)} at {100 * SHARE:.0f} % of {name}, without evaluation"
        )


def in_bytes(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def in_time(seconds: float) -> str:
    return f"{seconds / 3600:,.1f} hours" if seconds >= 3600 else f"{seconds / 60:,.1f} minutes"
