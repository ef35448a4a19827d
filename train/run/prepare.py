"""Prepare a training run: load target, data, drafter and checkpoint, check that they fit together,
and print an overview."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from infer.drafters.base import Drafter
from infer.targets.loading import shard_target
from infer.targets.target import Target
from infer.utils.progress import HEARTBEAT
from train.batches import load_packed_sequences
from train.config import TrainConfig
from train.engine import build_engine, get_training_target_dtype, restore_optimizer_state
from train.features import StoredFeatures, feature_dependencies
from train.plan import describe_run_length
from train.processes import run_on_first_process
from train.run.checkpoints import (
    find_newest_resumable_folder,
    load_training_state,
    parse_step,
    remove_superseded_states,
)
from train.run.evaluation import describe_held_out_prompt_shortage
from train.run.folder import find_frequent_tokens, identify_sources, record_run_start, write_ngrams
from train.run.initial import create_initial_drafter, format_mask_token, load_drafter_weights
from train.run.log import METRICS_FILE, trim_step_metrics
from train.run.state import (
    RunState,
    build_schedule,
    complete_config,
    describe_run,
    load_frozen_target,
)
from train.selfcheck import TrainingLossCheck
from train.step import compute_block_loss

if TYPE_CHECKING:
    from datasets import Dataset
    from deepspeed import DeepSpeedEngine

    from data.counts import ExampleCounts


def prepare_run(user_config: TrainConfig, device: torch.device, folder: Path) -> RunState:
    """Return everything that training needs. A resumed run gets its newest undamaged checkpoint.

    user_config: the options as `resolve_config` returns them. folder: the run's folder, to which
    nothing is written before all options have been checked.
    """
    # Load the frozen target and the training data. Set the options that depend on them.
    stored_features = StoredFeatures(user_config.features) if user_config.features else None
    target = load_frozen_target(
        user_config, device, get_training_target_dtype(user_config, device), stored_features
    )
    dataset, example_counts = load_dataset(user_config, target, stored_features)
    config, memory_line = complete_config(user_config, target, dataset, device)

    # Create the initial drafter. It must fit the target and the stored hidden states, if any.
    drafter = create_or_load_drafter(config, target, dataset)
    if stored_features is not None:
        stored_features.check_dependencies(feature_dependencies(config, target, drafter.layer_ids))
        stored_features.select_layers(drafter.layer_ids)
    prompts_note = run_on_first_process(lambda: describe_held_out_prompt_shortage(config, target))

    # Record configuration, target and data in the folder, or compare them with the recorded ones.
    sources = run_on_first_process(lambda: identify_sources(config.target.path, target, dataset))
    run_on_first_process(lambda: record_run_start(folder, user_config, sources))
    overview_lines = run_on_first_process(
        lambda: describe_run(config, target, dataset, drafter.vocabulary.tokens, device)
    )
    print_overview(overview_lines, example_counts, memory_line)

    # Build the DeepSpeed engine, and restore the state of the newest checkpoint.
    shard_or_strip_target(target, config, device)
    checkpoint, notes = find_newest_resumable_folder(folder)
    state = load_training_state(checkpoint)
    completed_steps = 0
    if checkpoint is not None:
        completed_steps = parse_step(checkpoint)
        load_drafter_weights(drafter, state, checkpoint)
    summary = describe_run_in_one_line(config, drafter, target, len(dataset), completed_steps)
    engine, self_check_line = build_engine_and_check_loss(drafter, target, dataset, config, device)
    if checkpoint is not None:
        restore_optimizer_state(drafter, engine, state)

    # Write the n-gram file, and remove what the run's folder has from steps after the checkpoint.
    if config.count_ngrams:
        run_on_first_process(lambda: write_ngrams(dataset, target, folder, drafter.ngram_path))
    # No folder may be removed before every process has loaded the checkpoint.
    dist.barrier()
    run_on_first_process(lambda: trim_run_to_step(folder, completed_steps))
    schedule = run_on_first_process(
        lambda: build_schedule(config, len(dataset), folder, completed_steps)
    )

    if config.anchors_per_sequence < user_config.anchors_per_sequence:
        notes.append(
            f"anchors_per_sequence={user_config.anchors_per_sequence} is reduced to "
            f"{config.anchors_per_sequence}, because no packed training sequence can have more "
            "anchors"
        )
    notes += [line for line in (self_check_line, summary, prompts_note) if line]
    return RunState(config, folder, device, target, dataset, drafter, engine, schedule, notes)


def load_dataset(
    config: TrainConfig, target: Target, stored_features: StoredFeatures | None
) -> "tuple[StoredFeatures | Dataset, ExampleCounts | None]":
    """Return the packed training sequences, and the counts of used and excluded examples.

    stored_features: the target's hidden states if they were computed before training. They include
    the sequences and are returned as the data set; the counts are then unknown (None).
    """
    if stored_features is not None:
        return stored_features, None
    prepared = load_packed_sequences(config, target)
    assert prepared.dataset is not None  # an empty data set raises an error in the call above
    return prepared.dataset, prepared.counts


def create_or_load_drafter(
    config: TrainConfig, target: Target, dataset: "StoredFeatures | Dataset"
) -> Drafter:
    """Create or load the drafter that training starts from. If the drafter scores only a part of
    the target's vocabulary (option drafter.draft_vocab_size), the most frequent tokens of the
    training data are chosen."""
    draft_tokens = None
    if config.drafter.draft_vocab_size:
        draft_tokens = find_frequent_tokens(dataset, config.drafter.draft_vocab_size, target)
    return create_initial_drafter(config, target, draft_tokens)


def print_overview(
    lines: list[str], example_counts: "ExampleCounts | None", memory_line: str
) -> None:
    """Print the run's overview, in the first process only.

    lines: the result of `describe_run`. example_counts: counts of used and excluded examples, or
    None if they are unknown. memory_line: a line about the memory that a training step needs.
    """
    if dist.get_rank() > 0:
        return
    example_lines = [] if example_counts is None else example_counts.format_lines()
    # The second line describes the data, so the lines about its examples come after it.
    print(*lines[:2], *example_lines, *lines[2:], memory_line, sep="\n", flush=True)


def shard_or_strip_target(target: Target, config: TrainConfig, device: torch.device) -> None:
    """Prepare the target's memory for training. With target.shard=true, shard the target over the
    devices of all processes. If the target's hidden states were stored before training
    (`config.features`), free its decoder layers, which are not needed any more.

    Call this after the drafter is created: a new drafter copies weights from these layers.
    """
    if config.target.shard:
        shard_target(target, device)
    if config.features:
        target.decoder.layers.to("meta")


def build_engine_and_check_loss(
    drafter: Drafter,
    target: Target,
    dataset: "StoredFeatures | Dataset",
    config: TrainConfig,
    device: torch.device,
) -> "tuple[DeepSpeedEngine, str | None]":
    """Build the DeepSpeed engine around the drafter, and check the loss of the first batch against
    a slow reference computation (the self-check).

    Returns the engine, and a line with the result of the self-check (None with self_check=false).
    Raises RunAborted if the two losses differ by more than rounding explains.
    """
    HEARTBEAT.set_activity("self-check: comparing the loss of a step with a slow computation")
    check = None
    if config.self_check:
        check = TrainingLossCheck(drafter.to(device), target, dataset, config)
    engine = build_engine(drafter, config, device)
    if check is None:
        return engine, None
    result = compute_block_loss(drafter, target, check.batch, check.blocks, config, forward=engine)
    return engine, check.compare(result)


def describe_run_in_one_line(
    config: TrainConfig, drafter: Drafter, target: Target, num_sequences: int, completed_steps: int
) -> str:
    """Return a line for the user with the run's name, its number of trainable parameters, its data
    and length, and the step from which it is resumed.

    Call this function before the DeepSpeed engine is built. With ZeRO stage 3, the engine shards
    the parameters, and this function would count too few.
    """
    trainable_parameters = sum(
        parameter.numel() for parameter in drafter.parameters() if parameter.requires_grad
    )
    line = (
        f"{config.name}: {trainable_parameters:,} trainable parameters, {num_sequences:,} packed "
        f"rows of {config.data.length} tokens, {describe_run_length(config, num_sequences)}"
        f"{format_mask_token(drafter.mask_token_id, target.tokenizer)}"
    )
    if completed_steps:
        line += f"; resuming after step {completed_steps}"
    return line


def trim_run_to_step(folder: Path, step: int) -> None:
    """Remove the log lines of all steps after `step`, which the resumed run will train again. Also
    remove older training states that are no longer needed (`remove_superseded_states`)."""
    trim_step_metrics(folder / METRICS_FILE, step)
    remove_superseded_states(folder, step)
