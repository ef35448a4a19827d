"""What a training step costs, by formulas: parameters, operations, memory. `train.forecast` prints it.

All follows from the target's config.json and the run's configuration.

B rows of a pass, T packed length, N anchors, K block size, L = K - 1, W queries of a block,
Q = B * N * W block positions, D hidden size, A = heads * head size, A' = key-value heads * head size, I intermediate
size, V vocabulary.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from infer.attention.masks import GROUP
from infer.drafters.base import new_drafter
from infer.evaluation.measuring import synchronised_clock
from infer.targets.loading import load_config, resolve_path
from infer.targets.support import expert_share, head_size, key_heads, mlp_size
from train.config import TrainConfig
from train.engine import compiles

if TYPE_CHECKING:
    from transformers import PretrainedConfig

BUCKET = 500_000_000  # gradients that ZeRO gathers before it reduces them, DeepSpeed's default
FITS = 0.9  # of a device's memory, at most, that a step may be planned to take


@dataclass(frozen=True)
class Shape:
    """The sizes that a step's work depends on."""

    rows: int  # B
    length: int  # T
    anchors: int  # N
    block: int  # K
    block_queries: int  # W
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

    text = theirs.get_text_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs)
        drafter = new_drafter(config.drafter, None, text)
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
        input_size=next(w.shape[1] for name, w in drafter.named_parameters() if name.endswith("q_proj.weight")),
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
    layers = 6 * s.layers * (s.input_matrices + s.output_matrices) * s.queries
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


def device_memory(device: torch.device, processes: int) -> float:
    """Return the bytes that one of a machine's processes may use: on a GPU what is free and what it holds already; on a
    CPU an equal share of all memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / processes


@dataclass(frozen=True)
class Recompute:
    """Whether the drafter's layers are computed again in the backward pass, and why: bytes on one device at a step's
    peak without and with it, and how many there are (None: not known, as the device is not at hand)."""

    asked: bool | None  # None: where a step would not fit otherwise
    without: float
    with_it: float
    room: float | None

    @property
    def chosen(self) -> bool:
        """Whether they are."""
        if self.asked is None:
            return self.room is not None and self.without > FITS * self.room
        return self.asked

    def __str__(self) -> str:
        """One line for the user."""
        peak, other = (self.with_it, self.without) if self.chosen else (self.without, self.with_it)
        line = f"memory     {in_bytes(peak)} on each device at a step's peak"
        if self.room is not None:
            line += f", of {in_bytes(self.room)}"
        if self.chosen:
            line += f"; layers are computed again in the backward pass: without it {in_bytes(other)}"
        else:
            line += f"; {in_bytes(other)} with recompute=true"
        if self.asked is None and self.room is None:
            line += ", which a run chooses by itself where it would not fit"
        if self.room is not None and peak > FITS * self.room:
            line += (
                ". That may be too much: optim.micro=1, deepspeed=zero2, target.shard=true and stored features take "
                "less"
            )
        return line


def recompute_of(
    shape: Shape, config: TrainConfig, world: int, weight: int, product: int, cuda: bool, room: float | None
) -> Recompute:
    """Return whether a run computes layers again; `room`: the bytes of a device, otherwise as `step_memory`."""
    without, with_it = (
        sum(step_memory(shape, replace(config, recompute=again), world, weight, product, cuda).values())
        for again in (False, True)
    )
    return Recompute(config.recompute, without, with_it, room)


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


def in_bytes(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def in_time(seconds: float) -> str:
    if seconds < 60:
        return f"{max(1, seconds):,.0f} seconds"
    return f"{seconds / 3600:,.1f} hours" if seconds >= 3600 else f"{seconds / 60:,.1f} minutes"
