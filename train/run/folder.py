"""Create and lock the folder of a training run, and record what the run was started with: its
configuration, digests of target and training data, and the n-grams of the training data.

If the folder already contains a run with the same configuration, that run is resumed. If the
configurations differ, an error is raised; a run is never overwritten. A lock keeps two commands
from writing to the folder at the same time.

Target and training data are compared by content, because the files under a path can change between
the start of a run and its resumption.
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
from infer.targets.identity import compute_target_digests
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
from infer.utils.renamed_options import rename_old_options
from train.config import TrainConfig
from train.features import StoredFeatures
from train.run.checkpoints import remove_partial_checkpoints
from train.run.log import METRICS_FILE, WANDB_ID_FILE

if TYPE_CHECKING:
    from datasets import Dataset

RUN_CONFIG_FILE = "config.json"
RUN_INPUT_DIGESTS_FILE = "sources.json"
# The run's configuration as YAML, for Hydra's options --config-dir <run> --config-name config.
HYDRA_CONFIG_FILE = "config.yaml"
RUN_LOCK_FILE = "lock"
# N-grams with a smaller count are left out of the n-gram file. N-grams that occur once would be two
# thirds of the file, and draft trees are not better with them (see LOG.md).
MIN_NGRAM_COUNT = 2
# Options whose values may change when a run is resumed. They do not influence what the drafter
# learns, except for rounding.
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
# Options of earlier versions that no longer exist. Keys are groups of options. Values are
# dictionaries from each removed option to the value that the program now always uses. A run of an
# earlier version can be resumed only if its options have these values.
REMOVED_OPTIONS = {
    "target": {"adapter": None},
    "objective": {"alpha": 0.5, "confidence": 1.0},
    "optim": {"weight_decay": 0.0},
}


def run_folder(config: TrainConfig) -> Path:
    """Return the path <runs_dir>/<name> of the run's folder, from the options of these names."""
    return Path(config.runs_dir) / config.name


def config_to_json(config: TrainConfig) -> dict:
    """Convert the configuration to the dictionary that is written to config.json, without
    secrets."""
    return json.loads(json.dumps(redact(asdict(config))))


def add_removed_options(config: dict) -> dict:
    """Return a copy of a configuration with the options of earlier versions added that no longer
    exist (REMOVED_OPTIONS). Their values are those that the program now always uses."""
    complete = {}
    for group, options in config.items():
        if group in REMOVED_OPTIONS:
            options = options | REMOVED_OPTIONS[group]
        complete[group] = options
    return complete


def has_completed_step(run: Path) -> bool:
    """Return whether a run has completed a training step. Until then, a run with another
    configuration may use the same folder."""
    return (run / METRICS_FILE).exists() or (run / "checkpoints").exists()


def migrate_recorded_options(recorded: dict, defaults: dict) -> dict:
    """Convert the options of a run of an older version to the options of this version.

    recorded: the recorded options and their values. defaults: this version's options and their
    default values. An option that is not in `recorded` gets its default. An option that is not in
    `defaults` is left out. Groups of options are nested dictionaries, and are converted in the same
    way. Exception: if the default is an empty dictionary, the recorded dictionary is copied
    unchanged.
    """
    updated = dict(defaults)
    for key in recorded.keys() & defaults.keys():
        if isinstance(recorded[key], dict) and defaults[key]:
            updated[key] = migrate_recorded_options(recorded[key], defaults[key])
        else:
            updated[key] = recorded[key]
    return updated


def read_recorded_json(file: Path) -> dict:
    """Read a JSON file that was written to the run's folder when the run started. Raises ValueError
    if the file is damaged."""
    try:
        return dict(json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{file} is damaged: restore it, or choose another name for the run with name="
        ) from error


def refuse_other_run(config: TrainConfig, run: Path) -> None:
    """Raise ValueError if the folder `run` contains a run with another configuration, and that run
    has completed a training step."""
    if not (run / RUN_CONFIG_FILE).exists() or not has_completed_step(run):
        return
    defaults = add_removed_options(config_to_json(TrainConfig()))
    saved = rename_old_options(read_recorded_json(run / RUN_CONFIG_FILE))
    recorded = migrate_recorded_options(saved, defaults)
    message = (
        f"{run} contains a run with another configuration ({{keys}} differ): choose another name "
        "for this run with name="
    )
    current = add_removed_options(config_to_json(config))
    refuse_changed_settings(recorded, current, message, OPTIONS_CHANGEABLE_ON_RESUME)


@contextmanager
def open_run_folder(config: TrainConfig) -> Generator[Path]:
    """Create the run's folder, hold its lock within the `with` block, and yield its path. Only the
    first process may call this function.

    If the run ends before its first step, the folder is removed. Raises ValueError if the folder is
    locked, cannot be written, or contains a run with another configuration. Also raises ValueError
    if checkpoints/best is not a symbolic link.
    """
    run = run_folder(config)
    for best in (run / "checkpoints" / "best", run / "checkpoints" / ".best"):
        if best.is_dir() and not best.is_symlink():
            raise ValueError(
                f"{best} must be a link to a checkpoint, but it is a folder. This happens when a "
                "run is copied and links are copied as folders. Delete the folder; the run "
                "creates the link again"
            )
    with ExitStack() as stack:
        try:
            run.mkdir(parents=True, exist_ok=True)
            stack.enter_context(hold_lock_file(run / RUN_LOCK_FILE, str(run), "name="))
        except OSError as error:
            raise ValueError(
                f"{run} cannot be written ({error.strerror}): choose another folder for runs with "
                "runs_dir="
            ) from error
        try:
            refuse_other_run(config, run)
            yield run
        finally:
            if not has_completed_step(run):
                remove_unstarted_run(run)


def remove_unstarted_run(run: Path) -> None:
    """Remove the files of a run that has not completed a step. Also remove the folder if no other
    files are in it."""
    names = (
        RUN_CONFIG_FILE,
        HYDRA_CONFIG_FILE,
        RUN_INPUT_DIGESTS_FILE,
        NGRAM_FILE_NAME,
        WANDB_ID_FILE,
        RUN_LOCK_FILE,
    )
    for name in names:
        (run / name).unlink(missing_ok=True)
    with suppress(OSError):  # rmdir raises OSError if the folder is not empty
        run.rmdir()


def record_run_start(run: Path, config: TrainConfig, sources: dict) -> None:
    """Write a run's configuration, and the digests of its target and training data, to its folder.

    sources: the digests, from `identify_sources`. If the run has already completed a step, nothing
    is overwritten: `sources` is compared with the recorded digests. Raises ValueError if they
    differ.
    """
    with abort_on_write_error(str(run)):
        if has_completed_step(run) and (run / RUN_INPUT_DIGESTS_FILE).exists():
            message = (
                f"the run in {run} started with other files under the same paths ({{keys}} "
                "differ). If it were resumed, it could train on examples that were held out "
                "before. Restore the files, or choose another name for the run with name="
            )
            refuse_changed_settings(
                read_recorded_json(run / RUN_INPUT_DIGESTS_FILE), sources, message
            )
        else:
            write_json(run / RUN_INPUT_DIGESTS_FILE, sources)
        if not has_completed_step(run):
            options = config_to_json(config)
            write_json(run / RUN_CONFIG_FILE, options)
            defaults = {"defaults": ["train", "_self_"]}
            hydra_config = OmegaConf.create(defaults | options)
            atomic_write(run / HYDRA_CONFIG_FILE, OmegaConf.to_yaml(hydra_config))
        remove_partial_checkpoints(run)


def identify_sources(target_path: str, target: Target, dataset: "StoredFeatures | Dataset") -> dict:
    """Return digests of the target and of the training data, which change if the content changes.
    Computing them takes about a second per gigabyte of tokens."""
    return {
        "target": compute_target_digests(target_path, target.tokenizer_digest),
        "data": {"rows": len(dataset), "content": digest_dataset(dataset)},
    }


def digest_dataset(dataset: "StoredFeatures | Dataset") -> str:
    """Return the SHA-256 of all training token ids in order, and of the mask of tokens with a loss.

    Stored hidden states of the target (`StoredFeatures`) have the same digest as the packed
    sequences from which they were computed."""
    digest = hashlib.sha256()
    for name, dtype in (("ids", np.int64), ("loss", np.bool_)):
        for values in iterate_column(dataset, name):
            digest.update(np.ascontiguousarray(values, dtype=dtype).data)
    return digest.hexdigest()


def iterate_column(dataset: "StoredFeatures | Dataset", name: str) -> Iterator[np.ndarray]:
    """Yield all values of a column of the training data, in order. Each array is one-dimensional
    and joins the values of many packed sequences.

    name: 'ids', 'loss', 'positions' or 'documents'
    """
    if isinstance(dataset, StoredFeatures):
        yield from dataset.iterate_column(name)
        return
    for chunk in dataset.data.column(name).chunks:  # memory-mapped pyarrow arrays
        yield chunk.flatten().to_numpy(zero_copy_only=False)


def collect_token_ids(dataset: "StoredFeatures | Dataset") -> set[int]:
    """Return the set of all token ids that occur in the training data."""
    token_ids: set[int] = set()
    for ids in iterate_column(dataset, "ids"):
        token_ids.update(np.unique(ids).tolist())
    return token_ids


def count_supervised_tokens(dataset: "StoredFeatures | Dataset", target: Target) -> torch.Tensor:
    """Count how often each token of the target's vocabulary occurs in the training data at a
    position with a loss. Returns (vocab_size,) int64."""
    counts = np.zeros(target.vocab_size, dtype=np.int64)
    columns = zip(iterate_column(dataset, "ids"), iterate_column(dataset, "loss"), strict=True)
    for ids, loss in columns:
        counts = counts + np.bincount(ids[loss], minlength=target.vocab_size)
    return torch.from_numpy(counts)


def find_frequent_tokens(
    dataset: "StoredFeatures | Dataset", num_tokens: int, target: Target
) -> torch.Tensor:
    """Return the ids of the tokens that occur most often at training positions with a loss,
    (num_tokens,) int64, in ascending order. They become the drafter's reduced vocabulary, the only
    tokens that it scores.

    Special tokens are always included, because a drafter must be able to draft the end of an
    output.
    """
    counts = count_supervised_tokens(dataset, target)
    tokenizer: Any = target.tokenizer
    special_ids = {*target.eos_token_ids, *tokenizer.all_special_ids}
    counts[[token_id for token_id in special_ids if token_id < len(counts)]] = torch.iinfo(
        torch.int64
    ).max
    return counts.argsort(descending=True, stable=True)[:num_tokens].sort().values


def iterate_documents(dataset: "StoredFeatures | Dataset") -> Iterator[np.ndarray]:
    """Yield the token ids of each document of the training data, one array per document."""
    columns = (iterate_column(dataset, name) for name in ("ids", "positions", "documents"))
    for ids, positions, documents in zip(*columns, strict=True):
        # A document starts wherever the position is 0. Padding has position 0 and document -1.
        starts = np.flatnonzero(positions == 0)
        pieces = np.split(ids, starts[1:])
        for piece, start in zip(pieces, starts, strict=True):
            if documents[start] >= 0:
                yield piece


def write_ngrams(
    dataset: "StoredFeatures | Dataset", target: Target, run: Path, initial_ngrams: Path | None
) -> None:
    """Count the n-grams of the training data, and write the n-gram file to the run's folder. Do
    nothing if the folder already has such a file.

    initial_ngrams: the n-gram file of the existing drafter that the run starts from, or None. This
        file is copied, and nothing is counted, because the n-grams of a small data set would make
        poor draft trees.

    Raises RunAborted if the file cannot be written.
    """
    out = run / NGRAM_FILE_NAME
    if out.exists():
        return
    with abort_on_write_error(str(out)):
        if initial_ngrams is not None:
            with atomic_replace_file(out) as temporary:
                shutil.copyfile(initial_ngrams, temporary)
            return
        # Typed as Any, because `count_ngrams` expects lists of ids, and the documents are arrays.
        documents: Any = iterate_documents(dataset)
        # Typed as Any, because the digest is None without a tokenizer; here there is always a
        # tokenizer.
        digest: Any = target.tokenizer_digest
        count_ngrams(
            documents,
            target.vocab_size,
            default_ngram_order(target.vocab_size),
            out,
            digest,
            min_count=MIN_NGRAM_COUNT,
        )
