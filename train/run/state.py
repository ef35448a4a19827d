"""The state of a training run, and the functions that complete its configuration.

The configuration is completed in two steps. `resolve_config` runs before the target is loaded; its
result is written to config.json. `complete_config` runs when target and training data are loaded.
Nothing else changes the configuration.
"""

import json
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist

from data.rows import DataConfig
from infer.config import DrafterConfig
from infer.drafters.base import Drafter
from infer.drafters.build import (
    build_drafter_config,
    choose_feature_layers,
    choose_mask_token,
    read_options_from_config,
)
from infer.drafters.families import DRAFTER_FAMILIES
from infer.formats.folders import open_drafter_folder
from infer.formats.layouts import find_folder_problems, parse_drafter_config
from infer.targets.loading import load_config, load_configured_target, resolve_dtype
from infer.targets.target import Target, weight_format_name
from train.blocks import count_available_anchors
from train.config import OptimConfig, TrainConfig, check_conditional_head_options
from train.engine import compute_micro_batch_sizes, get_drafter_matmul_dtype
from train.features import StoredFeatures
from train.optim import cosine_learning_rate
from train.plan import count_total_steps, describe_run_length
from train.processes import run_on_first_process
from train.run.checkpoints import list_checkpoints
from train.run.folder import (
    RUN_CONFIG_FILE,
    collect_token_ids,
    count_supervised_tokens,
    has_completed_step,
    iterate_column,
    run_folder,
)
from train.run.initial import resolve_drafter_options
from train.run.log import read_step_metrics
from train.step_memory import StepSizes, available_device_memory, choose_gradient_checkpointing

if TYPE_CHECKING:
    from datasets import Dataset
    from deepspeed import DeepSpeedEngine


@dataclass
class TrainingSchedule:
    """The progress of a run. It decides when checkpoints are due, when the run ends, and the
    learning rate. Length and progress are in steps, or in seconds if `optim.max_minutes` is set."""

    optim: OptimConfig
    total_length: float  # length of the whole run in steps, or in seconds with optim.max_minutes
    num_checkpoints: int  # number of checkpoints, evenly spaced over the run
    completed_steps: int  # number of completed steps
    completed_seconds: float  # duration of all completed steps together

    @property
    def completed_length(self) -> float:
        """The progress in the unit of `total_length`: the number of completed steps, or with
        optim.max_minutes the duration of these steps in seconds."""
        return self.completed_steps if self.optim.max_minutes is None else self.completed_seconds

    @property
    def is_finished(self) -> bool:
        """Whether the run has reached its length."""
        return self.completed_length >= self.total_length

    @property
    def estimated_steps(self) -> int:
        """The expected number of steps of the whole run. With optim.max_minutes, it is estimated
        from the duration of the completed steps."""
        if self.completed_steps == 0:
            return round(self.total_length)
        return max(
            self.completed_steps,
            round(self.total_length / max(self.completed_length, 1e-9) * self.completed_steps),
        )

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return cosine_learning_rate(self.optim, self.completed_length, self.total_length)

    def advance(self, total_seconds: float) -> bool:
        """Count one completed step, and return whether a checkpoint is due now.

        total_seconds: duration of all completed steps, including this one. The last checkpoint is
        due at the end of the run.
        """
        elapsed_before = self.completed_length
        self.completed_steps += 1
        self.completed_seconds = total_seconds
        for i in range(self.num_checkpoints):
            due_at = self.total_length * (i + 1) / self.num_checkpoints
            if self.optim.max_minutes is None:
                due_at = round(due_at)
            if elapsed_before < due_at <= self.completed_length:
                return True
        return False


@dataclass(frozen=True)
class RunState:
    """Everything that training steps need, loaded once before the first step."""

    config: TrainConfig  # the completed configuration, from `complete_config`
    folder: Path  # the run's folder
    device: torch.device
    target: Target  # the frozen target
    dataset: "StoredFeatures | Dataset"  # packed training sequences
    drafter: Drafter  # the drafter that is trained
    engine: "DeepSpeedEngine"  # the DeepSpeed engine around the drafter
    schedule: TrainingSchedule
    notes: list[str]  # lines for the user, printed before the first step

    @property
    def decoding_dtype(self) -> torch.dtype:
        """The dtype in which target and drafter are evaluated, and drafters are saved."""
        return resolve_dtype(self.config.target.dtype, self.device)

    def load_decoding_target(self) -> Target:
        """Return the target for evaluations. The target that is in memory for training is reused if
        it has all its layers and the dtype `decoding_dtype`. Otherwise, the target is loaded
        again."""
        if self.config.features is None and self.target.dtype == self.decoding_dtype:
            return self.target
        return load_frozen_target(self.config, self.device, self.decoding_dtype)


def build_schedule(
    config: TrainConfig, num_sequences: int, folder: Path, step: int
) -> TrainingSchedule:
    """Return the schedule of a new or resumed run that has completed `step` steps.

    num_sequences: number of packed training sequences. folder: the run's folder, from whose log the
    duration of the completed steps is read. The log must end with `step`.
    """
    seconds = 0.0
    for line in read_step_metrics(folder):
        seconds = max(seconds, line.get("seconds", 0.0))
    if config.optim.max_minutes is None:
        length = count_total_steps(config, num_sequences)
    else:
        length = 60 * config.optim.max_minutes
    return TrainingSchedule(config.optim, length, config.checkpoints, step, seconds)


def load_frozen_target(
    config: TrainConfig,
    device: torch.device,
    dtype: torch.dtype,
    stored_features: StoredFeatures | None = None,
) -> Target:
    """Load the target in `dtype` onto the device. With target.shard=true, load it into host memory
    instead, because it will be sharded later.

    stored_features: the target's hidden states if they were computed before training. Only a part
    of the target is then loaded: the embedding, the language model head, and the layers from which
    a new drafter copies its initial weights.
    """
    options = config.target
    layers = None
    if stored_features is not None:
        family: Any = DRAFTER_FAMILIES[config.drafter.family].load()
        text_config = load_config(options.path, options.trust_remote_code).get_text_config()
        layers = family.choose_warm_start_layers(
            choose_feature_layers(config.drafter, text_config), config.drafter.layers, text_config
        )
    dtype_name = str(dtype).removeprefix("torch.")
    load_device = "cpu" if options.shard else str(device)
    return load_configured_target(replace(options, dtype=dtype_name, device=load_device), layers)


def resolve_config(config: TrainConfig, device: torch.device) -> TrainConfig:
    """Complete the configuration as far as possible before the target is loaded.

    With drafter.init, the options that the existing drafter fixes are copied from its config.
    optim.precision=auto is replaced by a dtype name. Raises ValueError if the drafter does not fit
    the target, or if its conditional head cannot be trained as configured.
    """
    config = replace(config, drafter=resolve_drafter_options(config.drafter, config.target))
    # The call of `build_drafter_config` only checks the options of a new drafter. Those of an
    # existing drafter have been checked above.
    if config.drafter.init is None:
        hf_config = load_config(config.target.path, config.target.trust_remote_code)
        build_drafter_config(config.drafter, None, hf_config.get_text_config())
    check_conditional_head_options(config)
    precision = run_on_first_process(lambda: resolve_precision(config, device))
    return replace(config, optim=replace(config.optim, precision=precision))


def complete_config(
    config: TrainConfig, target: Target, dataset: "StoredFeatures | Dataset", device: torch.device
) -> tuple[TrainConfig, str]:
    """Complete the configuration after target and data are loaded. Return the configuration for
    training, and a line for the user about the memory that a training step needs.

    These options are set: drafter options that are None (`use_recorded_defaults`), the mask token
    (`set_mask_token`), `anchors_per_sequence` (`resolve_anchors_per_sequence`), and
    `gradient_checkpointing` (from the available memory).
    """
    drafter_options = set_mask_token(use_recorded_defaults(config), target, dataset)
    anchors = run_on_first_process(lambda: resolve_anchors_per_sequence(dataset, config))
    config = replace(config, drafter=drafter_options, anchors_per_sequence=anchors)

    # Use the memory of the smallest device in all processes, so that their configurations are the
    # same. The configurations must be the same, because all processes gather each layer of a
    # sharded model together.
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    memory_bytes = torch.tensor(
        available_device_memory(device, local_world_size), dtype=torch.float64
    )
    memory_bytes = memory_bytes.to(device)
    dist.all_reduce(memory_bytes, dist.ReduceOp.MIN)

    world_size = dist.get_world_size()
    micro_batch_size, _ = compute_micro_batch_sizes(config, world_size)
    return choose_gradient_checkpointing(
        config,
        StepSizes(config, target.config, micro_batch_size),
        world_size,
        target.dtype.itemsize,
        get_drafter_matmul_dtype(config, device).itemsize,
        device.type == "cuda",
        memory_bytes.item(),
    )


def resolve_precision(config: TrainConfig, device: torch.device) -> str:
    """Return the dtype of the drafter's matmuls in training, as the name 'float32' or 'bfloat16'.
    With optim.precision=auto, a resumed run keeps the dtype with which it started."""
    run = run_folder(config)
    if config.optim.precision == "auto" and has_completed_step(run):
        # A damaged file is ignored here, because `refuse_other_run` will raise an error for it.
        with suppress(ValueError, OSError, KeyError):
            recorded_config = json.loads((run / RUN_CONFIG_FILE).read_text())
            return recorded_config["optim"]["precision"]
    return str(get_drafter_matmul_dtype(config, device)).removeprefix("torch.")


def use_recorded_defaults(config: TrainConfig) -> DrafterConfig:
    """Return the drafter's options. If the run has a checkpoint, options that are None get the
    values of the newest checkpoint's drafter.

    A resumed run must not use the program's current defaults, which may have changed since the run
    started.
    """
    for checkpoint in reversed(list_checkpoints(run_folder(config))):
        # Skip a damaged checkpoint: older checkpoints of the run have the same options.
        with suppress(ValueError, OSError):
            folder = open_drafter_folder(str(checkpoint / "drafter"))
            reading = parse_drafter_config(folder)
            if not find_folder_problems(folder, reading):
                recorded_options = read_options_from_config(cast(Drafter, reading.build_drafter()))
                unset = {}
                for key, value in recorded_options.items():
                    if getattr(config.drafter, key) is None:
                        unset[key] = value
                return replace(config.drafter, **unset)
    return config.drafter


def set_mask_token(
    options: DrafterConfig, target: Target, dataset: "StoredFeatures | Dataset"
) -> DrafterConfig:
    """Return the drafter's options with a mask token. If a new drafter needs a mask token and none
    is configured, a token that does not occur in the training data is chosen. Otherwise, the
    options are returned unchanged.

    Raises ValueError if there is no such token.
    """
    needs_mask_token = DRAFTER_FAMILIES[options.family].uses_mask_token and options.init is None
    if not needs_mask_token or options.mask_token_id is not None:
        return options
    assert target.tokenizer is not None
    mask_token_id = choose_mask_token(
        target.tokenizer,
        target.config.vocab_size,
        target.eos_token_ids,
        lambda: collect_token_ids(dataset),
    )
    return replace(options, mask_token_id=mask_token_id)


def resolve_anchors_per_sequence(dataset: "StoredFeatures | Dataset", config: TrainConfig) -> int:
    """Return how many anchors (positions at which a training block starts) are drawn per packed
    sequence: `config.anchors_per_sequence`, but at most the largest number of anchors that any
    sequence has room for.

    Every further anchor would be padding in all sequences, and would still cost compute.
    """
    max_anchors = 1
    columns = zip(
        iterate_column(dataset, "loss"), iterate_column(dataset, "documents"), strict=True
    )
    for loss_values, document_values in columns:
        loss = torch.from_numpy(np.array(loss_values)).view(-1, config.data.length)
        documents = torch.from_numpy(np.array(document_values)).view(-1, config.data.length)
        counts = count_available_anchors(loss, documents.long(), config.anchors_per_document)
        max_anchors = max(max_anchors, int(counts.max()))
    return min(config.anchors_per_sequence, max_anchors)


def describe_run(
    config: TrainConfig,
    target: Target,
    dataset: "StoredFeatures | Dataset",
    draft_tokens: torch.Tensor | None,
    device: torch.device,
) -> list[str]:
    """Return the lines of the run's overview: one each about the target, the data, and the run's
    length and precision. If the drafter has a reduced vocabulary (it scores only some of the
    target's tokens), a fourth line describes it.

    draft_tokens: (num_tokens,) the token ids of the reduced vocabulary, or None.
    """
    hf_config = target.config
    target_line = (
        f"target     {config.target.path}, {hf_config.num_hidden_layers} layers of hidden size "
        f"{hf_config.hidden_size}, {weight_format_name(target)}"
    )
    if config.target.chat_template_kwargs:
        target_line += f"; chat template arguments {config.target.chat_template_kwargs}"

    num_sequences = len(dataset)
    length = config.data.length
    num_tokens = sum(int((values >= 0).sum()) for values in iterate_column(dataset, "documents"))
    num_learned = sum(int(values.sum()) for values in iterate_column(dataset, "loss"))
    fill_percent = 100 * (num_tokens / (num_sequences * length))
    data_line = (
        f"data       {describe_data(config.data)}: {num_sequences:,} rows of {length:,} tokens, "
        f"{fill_percent:.1f} % full; {num_learned:,} tokens to learn from"
    )

    anchor_limit = ""
    if config.anchors_per_document:
        anchor_limit = f" and at most {config.anchors_per_document} per document"
    precision = str(get_drafter_matmul_dtype(config, device)).removeprefix("torch.")
    run_line = (
        f"run        {describe_run_length(config, num_sequences)} of {config.optim.batch_size} "
        f"rows, {config.anchors_per_sequence} blocks per row{anchor_limit}, matmuls in {precision}"
    )

    lines = [target_line, data_line, run_line]
    if draft_tokens is not None:
        counts = count_supervised_tokens(dataset, target)
        coverage_percent = 100 * counts[draft_tokens].sum() / counts.sum()
        lines.append(
            f"vocabulary {len(draft_tokens):,} of {len(counts):,} tokens, which cover "
            f"{coverage_percent:.1f} % of the tokens to learn from"
        )
    return lines


def describe_data(data: DataConfig) -> str:
    """Return a text for the user that names the training data and, where known, says whether the
    target generated the answers."""
    if data.source == "hub":
        return (
            f"{data.path} ({data.split}), with answers that were published and not generated by "
            "this target (./launch.sh regenerate lets the target generate them)"
        )
    if data.source == "mixture":
        return " + ".join(f"{entry.path} x {entry.weight:g}" for entry in data.datasets)
    if data.path:
        return data.path
    if data.source == "embedded":
        return "texts that the small target model in this repository generated"
    return "Python's standard library"
