"""What the options of a run leave open, settled once: before the target is loaded (`settled`, what config.json says),
and when target and rows are there (`completed`). Nothing else changes the configuration."""

import json
import os
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from infer.config import DrafterConfig
from infer.drafters.base import default_mask_token, fixed_options
from infer.formats.folders import open_folder
from infer.formats.layouts import find_problems, read
from infer.targets.loading import load_config
from infer.targets.target import Target
from train.blocks import anchor_room
from train.config import TrainConfig, check_head_training
from train.engine import compute_dtype, measured_precision, micro_batch
from train.features import StoredRows
from train.plan import Recompute, device_memory, recompute_of, shape_of
from train.run.checkpoints import checkpoints
from train.run.folder import begun, run_folder
from train.run.initial import resolve_init
from train.run.sources import column_parts
from train.safety.processes import first_only

if TYPE_CHECKING:
    from datasets import Dataset


def settled(config: TrainConfig, device: torch.device) -> TrainConfig:
    """Return the configuration with the options of drafter.init, and with the precision that this run keeps. Raises
    ValueError for a head that cannot be trained as asked."""
    config = replace(config, drafter=resolve_init(config.drafter, config.target))
    check_head_training(config)
    return replace(config, optim=replace(config.optim, precision=first_only(lambda: precision_of(config, device))))


def completed(
    config: TrainConfig, target: Target, rows: "StoredRows | Dataset", device: torch.device
) -> tuple[TrainConfig, Recompute]:
    """Return the configuration that the steps have: the drafter's defaults as the run began with them, its mask token,
    as many anchors as rows have room for, and whether layers are computed again, which is said."""
    drafter = with_mask_token(as_begun(config), target, rows)
    config = replace(config, drafter=drafter, anchors=first_only(lambda: most_anchors(rows, config)))
    recompute = choose_recompute(config, target, device)
    return replace(config, recompute=recompute.chosen), recompute


def precision_of(config: TrainConfig, device: torch.device) -> str:
    """Return the precision that the run began with where its option is left to auto, else as it is measured here."""
    run = run_folder(config)
    if config.optim.precision != "auto":
        return config.optim.precision
    if begun(run):
        with suppress(ValueError, OSError, KeyError):  # damaged: it is refused later
            return json.loads((run / "config.json").read_text())["optim"]["precision"]
    theirs = load_config(config.target.path, config.target.trust_remote_code).get_text_config()
    measured = measured_precision(config, theirs, device)
    if measured != "auto":
        print(f"optim.precision=auto: {measured}, in which a layer takes less time here", flush=True)
    return measured


def as_begun(config: TrainConfig) -> DrafterConfig:
    """Return the drafter's options with what the drafter of the run's newest checkpoint has, where they are left to
    their defaults: those may have changed since the run began."""
    for checkpoint in reversed(checkpoints(run_folder(config))):
        with suppress(ValueError, OSError):  # damaged: the one before says it too
            folder = open_folder(str(checkpoint / "drafter"))
            reading = read(folder)
            if not find_problems(folder, reading):
                with torch.device("meta"):
                    known = fixed_options(reading.family.load()(reading.config()))
                left = {key: value for key, value in known.items() if getattr(config.drafter, key) is None}
                return replace(config.drafter, **left)
    return config.drafter


def with_mask_token(options: DrafterConfig, target: Target, rows: "StoredRows | Dataset") -> DrafterConfig:
    """Return the options of a new drafter with a mask token that the training rows do not use. Raises ValueError where
    they use all."""
    if options.family != "dflash" or options.init is not None or options.mask_token_id is not None:
        return options

    def used() -> set[int]:
        return {int(id) for part in column_parts(rows, "ids") for id in np.unique(part)}

    mask = default_mask_token(target.tokenizer, target.config.vocab_size, target.end_ids, used)
    return replace(options, mask_token_id=mask)


def most_anchors(rows: "StoredRows | Dataset", config: TrainConfig) -> int:
    """Return how many of the configuration's anchors any row has room for: the slots beyond would be computed and
    learn nothing."""
    most = 1
    for columns in zip(column_parts(rows, "loss"), column_parts(rows, "documents"), strict=True):
        loss, documents = (torch.from_numpy(np.array(part)).view(-1, config.data.length) for part in columns)
        most = max(most, int(anchor_room(loss, documents.long(), config.document_anchors).max()))
    return min(config.anchors, most)


def choose_recompute(config: TrainConfig, target: Target, device: torch.device) -> Recompute:
    """Return whether all processes compute the drafter's layers again in the backward pass: the smallest device's
    memory decides, as sharded weights are gathered by all of them together."""
    world, kinds = dist.get_world_size(), (target.dtype.itemsize, compute_dtype(config, device).itemsize)
    room = torch.tensor(device_memory(device, int(os.environ.get("LOCAL_WORLD_SIZE") or 1)), dtype=torch.float64)
    room = room.to(device)
    dist.all_reduce(room, dist.ReduceOp.MIN)
    shape = shape_of(config, target.config, micro_batch(config, world)[0])
    return recompute_of(shape, config, world, *kinds, device.type == "cuda", room.item())
