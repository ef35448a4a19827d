"""What comes before a run's first step: everything is loaded, checked and announced, in this
order."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from infer.drafters.base import Drafter
from infer.targets.loading import spread
from infer.targets.target import Target
from infer.utils.progress import HEARTBEAT
from train.batches import prepared_rows
from train.config import TrainConfig
from train.engine import build_engine, restore, target_dtype
from train.features import StoredRows, dependencies
from train.plan import length_of
from train.processes import first_only
from train.run.checkpoints import load, newest, step_of, tidy
from train.run.evaluation import note_few_prompts
from train.run.folder import begin_run, count_rows, frequent_tokens, sources
from train.run.initial import initial_drafter, named_mask, take_weights
from train.run.log import METRICS, trim_log
from train.run.state import RunState, completed, course_of, load_frozen, overview
from train.selfcheck import SelfCheck
from train.step import block_loss

if TYPE_CHECKING:
    from datasets import Dataset

    from data.counts import ExampleCounts


def prepare_run(asked: TrainConfig, device: torch.device, folder: Path) -> RunState:
    """Load everything into memory, from the folder's newest undamaged checkpoint if there is one.

    What the user can mend is refused before anything is written to the folder. Weights are read
    before the engine is built around them, the optimiser's state after that.
    """
    # the target and the training rows, and with them the complete configuration
    stored = StoredRows(asked.features) if asked.features else None
    target = load_frozen(asked, device, target_dtype(asked, device), stored)
    dataset, counts = load_rows(asked, target, stored)
    config, memory_line = completed(asked, target, dataset, device)

    # the drafter of step 0; what does not fit it or the target is refused
    drafter = start_drafter(config, target, dataset)
    if stored is not None:
        stored.check(dependencies(config, target, drafter.layer_ids))
    prompts_note = first_only(lambda: note_few_prompts(config, target))

    # from here on the folder is this run's
    first_only(lambda: begin_run(folder, asked, sources(config.target.path, target, dataset)))
    lines = first_only(lambda: overview(config, target, dataset, drafter.vocabulary.tokens, device))
    print_overview(lines, counts, memory_line)

    # everything to its device, with the state of the newest checkpoint
    place_target(target, config, device)
    checkpoint, notes = newest(folder)
    state = load(checkpoint)
    done = step_of(checkpoint) if checkpoint else 0
    if state:
        take_weights(drafter, state, checkpoint)
    summary = summarise_run(config, drafter, target, len(dataset), done)
    engine, check_line = build_checked_engine(drafter, target, dataset, config, device)
    if state:
        restore(drafter, engine, state)

    # the folder as it was after that checkpoint
    if config.count_ngrams:
        first_only(lambda: count_rows(dataset, target, folder, drafter.ngrams))
    dist.barrier()  # every process has looked for checkpoints
    first_only(lambda: drop_later_steps(folder, done))
    course = first_only(lambda: course_of(config, len(dataset), folder, done))

    if config.anchors_per_sequence < asked.anchors_per_sequence:
        notes.append(
            f"anchors_per_sequence={asked.anchors_per_sequence}: no row has room for more than {config.anchors_per_sequence}"
        )
    notes += [line for line in (check_line, summary, prompts_note) if line]
    return RunState(config, folder, device, target, dataset, drafter, engine, course, notes)


def load_rows(
    config: TrainConfig, target: Target, stored: StoredRows | None
) -> "tuple[StoredRows | Dataset, ExampleCounts | None]":
    """Return the packed rows, and what became of all examples, which stored features do not
    know."""
    if stored is not None:
        return stored, None
    prepared = prepared_rows(config, target)
    return prepared.rows, prepared.counts


def start_drafter(config: TrainConfig, target: Target, dataset: "StoredRows | Dataset") -> Drafter:
    """Return the drafter that the run starts from: one of a part of the vocabulary knows the
    training rows' most frequent tokens."""
    known_tokens = None
    if config.drafter.draft_vocab_size:
        known_tokens = frequent_tokens(dataset, config.drafter.draft_vocab_size, target)
    return initial_drafter(config, target, known_tokens)


def print_overview(lines: list[str], counts: "ExampleCounts | None", memory_line: str) -> None:
    """Print what the run is, in the first process, before the self-check, which takes a while for a
    large model. The examples' line stands behind the one about data."""
    if dist.get_rank() > 0:
        return
    example_lines = [] if counts is None else counts.lines()
    print(*lines[:2], *example_lines, *lines[2:], memory_line, sep="\n", flush=True)


def place_target(target: Target, config: TrainConfig, device: torch.device) -> None:
    """Spread a target that is to be sharded over the processes' devices; drop the layers of one
    whose features are stored, which a new drafter has copied from by now."""
    if config.target.shard:
        spread(target, device)
    if config.features:
        target.body.layers.to("meta")


def build_checked_engine(
    drafter: Drafter,
    target: Target,
    dataset: "StoredRows | Dataset",
    config: TrainConfig,
    device: torch.device,
) -> tuple[object, str | None]:
    """Return the engine around the drafter, and a line that says that a first pass agrees with a
    plain computation, made before there was an engine; None without `self_check`. Raises Stopped
    where they differ."""
    HEARTBEAT.at("checking a step against a plain computation")
    check = SelfCheck(drafter.to(device), target, dataset, config) if config.self_check else None
    engine = build_engine(drafter, config, device)
    if check is None:
        return engine, None
    return engine, check(
        block_loss(drafter, target, check.rows, check.blocks, config, forward=engine)
    )


def summarise_run(
    config: TrainConfig, drafter: Drafter, target: Target, rows: int, done: int
) -> str:
    """Return a line: the run's name, what is trained, on how much, and after which step it goes
    on."""
    # before ZeRO 3 takes parameters apart
    parameters = sum(
        parameter.numel() for parameter in drafter.parameters() if parameter.requires_grad
    )
    return (
        f"{config.name}: {parameters:,} trainable parameters, "
        f"{rows:,} packed rows of {config.data.length} tokens, {length_of(config, rows)}"
        + named_mask(drafter.mask_token_id, target.tokenizer)
        + (f"; going on after step {done}" if done else "")
    )


def drop_later_steps(folder: Path, done: int) -> None:
    """Remove what a run that is gone on with after step `done` does again, and states that are
    superfluous."""
    trim_log(folder / METRICS, done)
    tidy(folder, done)
