"""What a run is, settled once: its options before the target is loaded (`settled`, what config.json
says), its state when target and rows are there. Nothing else changes the configuration."""

import json
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from data.rows import DataConfig
from infer.config import DrafterConfig
from infer.drafters.base import (
    Drafter,
    config_for,
    default_mask_token,
    fixed_options,
    tapped_layers,
)
from infer.drafters.families import FAMILIES
from infer.formats.folders import open_folder
from infer.formats.layouts import find_problems, read
from infer.targets.loading import load_config, open_target, resolve_dtype
from infer.targets.target import Target, number_format
from train.blocks import anchor_room
from train.config import OptimConfig, TrainConfig, check_head_training
from train.engine import compute_dtype, micro_batch
from train.features import StoredRows
from train.optim import learning_rate
from train.plan import StepShape, device_memory, length_of, total_steps, with_recompute
from train.processes import first_only
from train.run.checkpoints import checkpoints
from train.run.folder import CONFIG, begun, column_parts, learnt_counts, run_folder, used_ids
from train.run.initial import resolve_init
from train.run.log import read_log

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass
class Course:
    """How far a run has come, by its steps or by their seconds."""

    optim: OptimConfig
    length: float  # of the run, in steps, or with optim.max_minutes in seconds
    checkpoints: int
    step: int  # done
    seconds: float  # that they took

    @property
    def at(self) -> float:
        """The steps done, or the seconds spent."""
        return self.step if self.optim.max_minutes is None else self.seconds

    @property
    def over(self) -> bool:
        return self.at >= self.length

    @property
    def total(self) -> int:
        """Steps of the whole run, as far as is known."""
        return (
            max(self.step, round(self.length / max(self.at, 1e-9) * self.step))
            if self.step
            else round(self.length)
        )

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        return learning_rate(self.optim, self.at, self.length)

    def advance(self, seconds: float) -> bool:
        """Count a step, after which so many seconds are spent; return whether a checkpoint is due:
        they are evenly spread, the last at the end."""
        before = self.at
        whole = self.optim.max_minutes is None
        self.step = self.step + 1
        self.seconds = seconds
        places = (self.length * (i + 1) / self.checkpoints for i in range(self.checkpoints))
        return any(before < (round(place) if whole else place) <= self.at for place in places)


@dataclass(frozen=True)
class RunState:
    """Everything that the steps need, loaded; computed once from the configuration."""

    config: TrainConfig  # complete
    folder: Path
    device: torch.device
    target: Target
    dataset: "StoredRows | Dataset"
    drafter: Drafter  # that is trained
    engine: object  # DeepSpeed's, around the drafter
    course: Course
    notes: list[str]  # lines for the user

    @property
    def dtype(self) -> torch.dtype:
        """Of decoding: the target's in evaluations, and the saved drafters'."""
        return resolve_dtype(self.config.target.dtype, self.device)

    def whole_target(self) -> Target:
        """Return the target to decode with: with stored features, or where it teaches in another
        dtype, another one, in memory only meanwhile."""
        if self.config.features is None and self.target.dtype == self.dtype:
            return self.target
        return load_frozen(self.config, self.device, self.dtype)


def course_of(config: TrainConfig, rows: int, folder: Path, step: int) -> Course:
    """Return the course of a run over so many rows that has done `step` steps; its log, which ends
    with them, says how long they took."""
    spent = max((line.get("seconds", 0.0) for line in read_log(folder)), default=0.0)
    minutes = config.optim.max_minutes
    length = total_steps(config, rows) if minutes is None else 60 * minutes
    return Course(config.optim, length, config.checkpoints, step, spent)


def load_frozen(
    config: TrainConfig, device: torch.device, dtype: torch.dtype, stored: StoredRows | None = None
) -> Target:
    """Load the target onto the device, or onto the host if it is to be sharded. With stored
    features, load only its embedding, its head and the layers that the drafter is initialised
    from."""
    options = config.target
    layers = None
    if stored is not None:
        family = FAMILIES[config.drafter.family].load()
        theirs = load_config(options.path, options.trust_remote_code).get_text_config()
        layers = family.warm_layers(
            tapped_layers(config.drafter, theirs), config.drafter.layers, theirs
        )
    kind = str(dtype).removeprefix("torch.")
    place = "cpu" if options.shard else str(device)
    return open_target(replace(options, dtype=kind, device=place), layers)


def settled(config: TrainConfig, device: torch.device) -> TrainConfig:
    """Return the configuration with the options of drafter.init, and with the precision that this
    run keeps. Raises ValueError for a drafter that does not fit the target, and for a head that
    cannot be trained as asked."""
    config = replace(config, drafter=resolve_init(config.drafter, config.target))
    if config.drafter.init is None:  # else it is what it is
        theirs = load_config(config.target.path, config.target.trust_remote_code)
        config_for(config.drafter, None, theirs.get_text_config())
    check_head_training(config)
    return replace(
        config,
        optim=replace(config.optim, precision=first_only(lambda: precision_of(config, device))),
    )


def completed(
    config: TrainConfig, target: Target, rows: "StoredRows | Dataset", device: torch.device
) -> tuple[TrainConfig, str]:
    """Return the configuration that the steps have: the drafter's defaults as the run began with
    them, its mask token, as many anchors as rows have room for, and whether layers are computed
    again; and the line that says so."""
    drafter = with_mask_token(as_begun(config), target, rows)
    config = replace(
        config, drafter=drafter, anchors_per_sequence=first_only(lambda: most_anchors(rows, config))
    )
    room = torch.tensor(
        device_memory(device, int(os.environ.get("LOCAL_WORLD_SIZE") or 1)), dtype=torch.float64
    )
    room = room.to(
        device
    )  # of the smallest device: sharded weights are gathered by all of them together
    dist.all_reduce(room, dist.ReduceOp.MIN)
    shape = StepShape(config, target.config, micro_batch(config, dist.get_world_size())[0])
    weight = target.dtype.itemsize
    product = compute_dtype(config, device).itemsize
    return with_recompute(
        config, shape, dist.get_world_size(), weight, product, device.type == "cuda", room.item()
    )


def precision_of(config: TrainConfig, device: torch.device) -> str:
    """Return the precision that the run began with where its option is left to auto, else the one
    of training here."""
    run = run_folder(config)
    if config.optim.precision == "auto" and begun(run):
        with suppress(ValueError, OSError, KeyError):  # damaged: it is refused later
            return json.loads((run / CONFIG).read_text())["optim"]["precision"]
    return str(compute_dtype(config, device)).removeprefix("torch.")


def as_begun(config: TrainConfig) -> DrafterConfig:
    """Return the drafter's options with what the drafter of the run's newest checkpoint has, where
    they are left to their defaults: those may have changed since the run began."""
    for checkpoint in reversed(checkpoints(run_folder(config))):
        with suppress(ValueError, OSError):  # damaged: the one before says it too
            folder = open_folder(str(checkpoint / "drafter"))
            reading = read(folder)
            if not find_problems(folder, reading):
                known = fixed_options(reading.drafter())
                left = {
                    key: value
                    for key, value in known.items()
                    if getattr(config.drafter, key) is None
                }
                return replace(config.drafter, **left)
    return config.drafter


def with_mask_token(
    options: DrafterConfig, target: Target, rows: "StoredRows | Dataset"
) -> DrafterConfig:
    """Return the options of a new drafter with a mask token that the training rows do not use.
    Raises ValueError where they use all."""
    if (
        not FAMILIES[options.family].mask_token
        or options.init is not None
        or options.mask_token_id is not None
    ):
        return options
    mask = default_mask_token(
        target.tokenizer, target.config.vocab_size, target.end_ids, lambda: used_ids(rows)
    )
    return replace(options, mask_token_id=mask)


def most_anchors(rows: "StoredRows | Dataset", config: TrainConfig) -> int:
    """Return how many of the configuration's anchors any row has room for: the slots beyond would
    be computed and learn nothing."""
    most = 1
    for columns in zip(column_parts(rows, "loss"), column_parts(rows, "documents"), strict=True):
        loss, documents = (
            torch.from_numpy(np.array(part)).view(-1, config.data.length) for part in columns
        )
        most = max(
            most, int(anchor_room(loss, documents.long(), config.anchors_per_document).max())
        )
    return min(config.anchors_per_sequence, most)


def overview(
    config: TrainConfig,
    target: Target,
    rows: "StoredRows | Dataset",
    known: torch.Tensor | None,
    device: torch.device,
) -> list[str]:
    """Return three lines: which target, told what; which data, and how much there is to learn; how
    many steps, and the dtype of their products. known (R,): the tokens of a drafter that does not
    know all, which has a line of its own."""
    told = config.target.chat_template_kwargs
    count = len(rows)
    theirs = target.config
    full = sum(int((part >= 0).sum()) for part in column_parts(rows, "documents")) / (
        count * config.data.length
    )
    learnt = sum(int(part.sum()) for part in column_parts(rows, "loss"))
    share = (
        f", at most {config.anchors_per_document} a document" if config.anchors_per_document else ""
    )
    products = str(compute_dtype(config, device)).removeprefix("torch.")
    part = []
    if known is not None:
        counts = learnt_counts(rows, target)
        drafted = 100 * counts[known].sum() / counts.sum()
        part = [
            f"vocabulary {len(known):,} of {len(counts):,} tokens: {drafted:.1f} % of those to learn from"
        ]
    return [
        f"target     {config.target.path}, {theirs.num_hidden_layers} layers of {theirs.hidden_size}, "
        f"{number_format(target)}" + (f"; chat template told {told}" if told else ""),
        f"data       {described(config.data)}: {count:,} rows of {config.data.length:,} tokens, {100 * full:.1f} % "
        f"full; {learnt:,} tokens to learn from",
        f"run        {length_of(config, count)} of {config.optim.batch_size} rows, {config.anchors_per_sequence} blocks a row{share}, "
        f"products in {products}",
        *part,
    ]


def described(data: DataConfig) -> str:
    """Name the data, and say whose answers they are where that is known."""
    if data.source == "hub":
        return f"{data.path} ({data.split}), answers as published, not this target's: see ./launch.sh regenerate"
    if data.source == "mixture":
        return " + ".join(f"{part.path} x {part.weight:g}" for part in data.datasets)
    return data.path or {"embedded": "what the embedded target wrote"}.get(
        data.source, "Python's standard library"
    )
