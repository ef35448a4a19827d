"""A run's folder: configuration, lock, identity of target and training data, and n-grams.

An existing run is resumed, or the new configuration is refused. A run is never overwritten, and
never written by two processes at once. Target and training data are identified by their content,
because the content of a path can change between the start of a run and its resumption.
"""

import hashlib
import json
import shutil
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from omegaconf import OmegaConf

from infer.formats.checkpoint import NGRAM_FILE_NAME
from infer.ngrams.count import count_ngrams, default_ngram_order
from infer.targets.identity import target_identity
from infer.targets.target import Target
from infer.utils.errors import abort_on_write_error
from infer.utils.files import (
    atomic_replace_file,
    atomic_write,
    hold_lock_file,
    refuse_changed_settings,
    write_json,
)
from infer.utils.redact import redact
from infer.utils.renamed_options import translate_saved_config
from train.config import TrainConfig
from train.features import StoredFeatures
from train.run.checkpoints import remove_partial_checkpoints
from train.run.log import METRICS_FILE, WANDB_ID_FILE

if TYPE_CHECKING:
    from datasets import Dataset

RUN_CONFIG_FILE = "config.json"
RUN_INPUT_IDENTITY_FILE = "sources.json"
HYDRA_CONFIG_FILE = "config.yaml"  # for Hydra: --config-dir <run> --config-name config
RUN_LOCK_FILE = "lock"
# n-grams that occur once are two thirds of the file, and trees are no better with them: LOG.md
MIN_NGRAM_COUNT = 2
# options that a resumed run may change: they change nothing that is learned, except for rounding
OPTIONS_CHANGEABLE_ON_RESUME = (
    "runs_dir",
    "save_interval_minutes",
    "wandb",
    "evaluation",
    "deepspeed",
    "count_ngrams",
    "compile",
    "gradient_checkpointing",
    "self_check",
    "stall_timeout_minutes",
    "optim.micro_batch_size",
    "optim.precision",
    "target.shard",
    "target.device",
    "data.max_invalid_fraction",
    "optim.clock",
)
# options of earlier versions, with the only values that a run may have to be resumed now
REMOVED_OPTIONS = {
    "target": {"adapter": None},
    "objective": {"alpha": 0.5, "confidence": 1.0},
    "optim": {"weight_decay": 0.0},
}


def run_folder(config: TrainConfig) -> Path:
    """Return the path of the run's folder."""
    return Path(config.runs_dir) / config.name


def config_to_json(config: TrainConfig) -> dict:
    """Return the configuration as it is written to config.json, without secrets."""
    return json.loads(json.dumps(redact(asdict(config))))


def add_removed_options(config: dict) -> dict:
    """Return a configuration with the options that earlier versions had."""
    complete = {}
    for group, options in config.items():
        if group in REMOVED_OPTIONS:
            options = options | REMOVED_OPTIONS[group]
        complete[group] = options
    return complete


def has_started(run: Path) -> bool:
    """Return whether the run has taken a step. Before that, its name can be used by another
    configuration."""
    return (run / METRICS_FILE).exists() or (run / "checkpoints").exists()


def update_options(recorded: dict, defaults: dict) -> dict:
    """Return the options of `defaults`, with their values from `recorded` where it has them.

    So options that are newer than the recorded configuration get their default, and options that no
    longer exist are removed. A dictionary without defaults is taken as it was recorded.
    """
    updated = dict(defaults)
    for key in recorded.keys() & defaults.keys():
        if isinstance(recorded[key], dict) and defaults[key]:
            updated[key] = update_options(recorded[key], defaults[key])
        else:
            updated[key] = recorded[key]
    return updated


def read_recorded_json(file: Path) -> dict:
    """Return what was written to a JSON file when the run started. Raises ValueError if it is
    damaged."""
    try:
        return dict(json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is damaged: restore it, or choose another name=") from error


def refuse_other_run(config: TrainConfig, run: Path) -> None:
    """Raise ValueError if the folder holds a run with another configuration."""
    if not (run / RUN_CONFIG_FILE).exists() or not has_started(run):
        return
    defaults = add_removed_options(config_to_json(TrainConfig()))
    saved = translate_saved_config(read_recorded_json(run / RUN_CONFIG_FILE))
    recorded = update_options(saved, defaults)
    message = (
        f"{run} holds a run with another configuration ({{keys}} differ): choose another name="
    )
    current = add_removed_options(config_to_json(config))
    refuse_changed_settings(recorded, current, message, OPTIONS_CHANGEABLE_ON_RESUME)


@contextmanager
def open_run_folder(config: TrainConfig) -> Generator[Path]:
    """Create the run's folder and hold its lock until the run ends. Called by the first process.

    A run that ends before its first step leaves no folder. Raises ValueError if the folder is
    locked, not writable, holds a run with another configuration, or is a copy with links followed.
    """
    run = run_folder(config)
    for best in (run / "checkpoints" / "best", run / "checkpoints" / ".best"):
        if best.is_dir() and not best.is_symlink():
            raise ValueError(
                f"{best} must be a link to a checkpoint, but it is a folder, as in a copy that "
                "followed links: "
                "delete it, and the run creates the link again"
            )
    with ExitStack() as stack:
        try:
            run.mkdir(parents=True, exist_ok=True)
            stack.enter_context(hold_lock_file(run / RUN_LOCK_FILE, str(run), "name="))
        except OSError as error:
            raise ValueError(
                f"{run} cannot be written ({error.strerror}): choose another runs_dir="
            ) from error
        try:
            refuse_other_run(config, run)
            yield run
        finally:
            if not has_started(run):
                remove_unstarted_run(run)


def remove_unstarted_run(run: Path) -> None:
    """Remove the files of a run that took no step, and its folder unless it has other files."""
    names = (
        RUN_CONFIG_FILE,
        HYDRA_CONFIG_FILE,
        RUN_INPUT_IDENTITY_FILE,
        NGRAM_FILE_NAME,
        WANDB_ID_FILE,
        RUN_LOCK_FILE,
    )
    for name in names:
        (run / name).unlink(missing_ok=True)
    with suppress(OSError):  # the folder is not empty
        run.rmdir()


def record_run_start(run: Path, config: TrainConfig, sources: dict) -> None:
    """Write the configuration and the identity of target and data (`identify_sources`).

    Raises ValueError if the run started with another target or other data. A run of an earlier
    version without a record gets one.
    """
    with abort_on_write_error(str(run)):
        if has_started(run) and (run / RUN_INPUT_IDENTITY_FILE).exists():
            message = (
                f"{run} started with other contents under the same paths ({{keys}} differ), so "
                "examples that were "
                "held out then could be trained on now: restore the contents, or choose another "
                "name="
            )
            refuse_changed_settings(
                read_recorded_json(run / RUN_INPUT_IDENTITY_FILE), sources, message
            )
        else:
            write_json(run / RUN_INPUT_IDENTITY_FILE, sources)
        if not has_started(run):
            options = config_to_json(config)
            write_json(run / RUN_CONFIG_FILE, options)
            defaults = {"defaults": ["train", "_self_"]}
            hydra_config = OmegaConf.create(defaults | options)
            atomic_write(run / HYDRA_CONFIG_FILE, OmegaConf.to_yaml(hydra_config))
        remove_partial_checkpoints(run)


def identify_sources(target_path: str, target: Target, dataset: "StoredFeatures | Dataset") -> dict:
    """Return what identifies the target and the training data. This takes about a second per
    gigabyte of tokens."""
    return {
        "target": target_identity(target_path, target.tokenizer_digest),
        "data": {"rows": len(dataset), "content": digest_dataset(dataset)},
    }


def digest_dataset(dataset: "StoredFeatures | Dataset") -> str:
    """Return the SHA-256 of all tokens in order, and of which of them carry loss. Stored features
    have the same digest as the packed sequences that they were computed from."""
    digest = hashlib.sha256()
    for name, dtype in (("ids", np.int64), ("loss", np.bool_)):
        for values in iterate_column(dataset, name):
            digest.update(np.ascontiguousarray(values, dtype=dtype).data)
    return digest.hexdigest()


def iterate_column(dataset: "StoredFeatures | Dataset", name: str) -> Iterator[np.ndarray]:
    """Yield a column of all packed sequences as flat arrays, one after the other."""
    if isinstance(dataset, StoredFeatures):
        yield from dataset.iterate_column(name)
        return
    for chunk in dataset.data.column(name).chunks:  # memory-mapped pyarrow arrays
        yield chunk.flatten().to_numpy(zero_copy_only=False)


def collect_token_ids(dataset: "StoredFeatures | Dataset") -> set[int]:
    """Return all token ids that occur in the training data."""
    token_ids: set[int] = set()
    for ids in iterate_column(dataset, "ids"):
        token_ids.update(np.unique(ids).tolist())
    return token_ids


def count_learned_tokens(dataset: "StoredFeatures | Dataset", target: Target) -> torch.Tensor:
    """Return how often each token occurs with loss in the training data, (V,) int64."""
    counts = np.zeros(target.vocab_size, dtype=np.int64)
    columns = zip(iterate_column(dataset, "ids"), iterate_column(dataset, "loss"), strict=True)
    for ids, loss in columns:
        counts = counts + np.bincount(ids[loss], minlength=target.vocab_size)
    return torch.from_numpy(counts)


def find_frequent_tokens(
    dataset: "StoredFeatures | Dataset", num_tokens: int, target: Target
) -> torch.Tensor:
    """Return the ids of the tokens that occur most often with loss, (num_tokens,) int64, ascending.

    Special tokens are always included, because a drafter must be able to draft the end of a text.
    """
    counts = count_learned_tokens(dataset, target)
    tokenizer: Any = target.tokenizer
    special_ids = {*target.eos_token_ids, *tokenizer.all_special_ids}
    counts[[token_id for token_id in special_ids if token_id < len(counts)]] = torch.iinfo(
        torch.int64
    ).max
    return counts.argsort(descending=True, stable=True)[:num_tokens].sort().values


def iterate_documents(dataset: "StoredFeatures | Dataset") -> Iterator[np.ndarray]:
    """Yield the token ids of every document of the packed sequences."""
    columns = (iterate_column(dataset, name) for name in ("ids", "positions", "documents"))
    for ids, positions, documents in zip(*columns, strict=True):
        # a document starts at every position 0; padding has position 0 and document -1
        starts = np.flatnonzero(positions == 0)
        pieces = np.split(ids, starts[1:])
        for piece, start in zip(pieces, starts, strict=True):
            if documents[start] >= 0:
                yield piece


def write_ngrams(
    dataset: "StoredFeatures | Dataset", target: Target, run: Path, initial_ngrams: Path | None
) -> None:
    """Write the n-grams of the training data into the run's folder, unless they exist.

    initial_ngrams: the file of a drafter that already had n-grams. It is copied instead, because
    little training data alone would make poor trees. Raises Stopped if the file cannot be written.
    """
    out = run / NGRAM_FILE_NAME
    if out.exists():
        return
    with abort_on_write_error(str(out)):
        if initial_ngrams is not None:
            with atomic_replace_file(out) as temporary:
                shutil.copyfile(initial_ngrams, temporary)
            return
        documents: Any = iterate_documents(dataset)  # arrays, not lists
        digest: Any = target.tokenizer_digest  # not None, because the data were tokenised
        count_ngrams(
            documents,
            target.vocab_size,
            default_ngram_order(target.vocab_size),
            out,
            digest,
            threshold=MIN_NGRAM_COUNT,
        )
