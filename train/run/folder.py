"""A run's folder: its configuration, its lock, what it learns from, and the n-grams of that.

An existing run is continued or refused, never overwritten, and never written by two processes at
once. A path says neither what is there today nor what was there when the run was begun: target and
training rows are known by content.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from omegaconf import OmegaConf

from infer.formats.checkpoint import NGRAMS
from infer.ngrams.count import count_ngrams, usual_order
from infer.targets.identity import target_identity
from infer.targets.target import Target
from infer.utils.errors import disk
from infer.utils.files import atomic_write, locked, refuse_other_settings, replacing, write_json
from infer.utils.redact import redact
from infer.utils.renamed_options import translate_saved_config
from train.config import TrainConfig
from train.features import StoredRows
from train.run.checkpoints import remove_partial
from train.run.log import METRICS, WANDB_ID

if TYPE_CHECKING:
    from datasets import Dataset

CONFIG = "config.json"
SOURCES = "sources.json"
HYDRA_CONFIG = "config.yaml"  # the same for Hydra: --config-dir <run> --config-name config
THRESHOLD = (
    2  # n-grams seen once are two thirds of the file, and trees are no better for them: LOG.md
)
# what may differ when a run is continued: nothing here changes what is learnt, beyond rounding
FREE = (
    "runs_dir",
    "save_interval_minutes",
    "wandb",
    "evaluation",
    "deepspeed",
    "count_ngrams",
    "compile",
    "gradient_checkpointing",
    "self_check",
)
FREE += (
    "stall_timeout_minutes",
    "optim.micro_batch_size",
    "optim.precision",
    "target.shard",
    "target.device",
)
FREE += ("data.max_invalid_fraction", "optim.clock")
# options of earlier versions, and their values with which a run goes on as it began
GONE = {
    "target": {"adapter": None},
    "objective": {"alpha": 0.5, "confidence": 1.0},
    "optim": {"weight_decay": 0.0},
}


def run_folder(config: TrainConfig) -> Path:
    return Path(config.runs_dir) / config.name


def plain(config: TrainConfig) -> dict:
    """Return the resolved configuration as JSON, without secrets: what is written."""
    return json.loads(json.dumps(redact(asdict(config))))


def compared(config: TrainConfig) -> dict:
    """Return the same with what earlier versions had options for."""
    return {
        key: value | GONE[key] if key in GONE else value for key, value in plain(config).items()
    }


def begun(run: Path) -> bool:
    """Return whether a run took a step: one that ended before that keeps nobody from using its
    name."""
    return any((run / name).exists() for name in (METRICS, "checkpoints"))


def completed(known: dict, defaults: dict) -> dict:
    """Return a configuration with the default of every option that there was not yet when it was
    written, and without those that there are no more."""
    filled = dict(defaults)
    for key in known.keys() & defaults.keys():
        inside = (
            isinstance(known[key], dict) and defaults[key]
        )  # where there are no defaults, keys are free
        filled[key] = completed(known[key], inside) if inside else known[key]
    return filled


def recorded(file: Path) -> dict:
    """Return what a run wrote when it was begun. Raises ValueError where it is damaged."""
    try:
        return dict(json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is damaged: choose another name=, or restore it") from error


def refuse_another(config: TrainConfig, run: Path) -> None:
    """Raise ValueError when the folder holds a run of another configuration."""
    if (run / CONFIG).exists() and begun(run):
        known = completed(translate_saved_config(recorded(run / CONFIG)), compared(TrainConfig()))
        message = (
            f"{run} holds a run with another configuration ({{keys}} differ): choose another name="
        )
        refuse_other_settings(known, compared(config), message, FREE)


@contextmanager
def open_run(config: TrainConfig) -> Iterator[Path]:
    """Create the run's folder and hold its lock until the run ends. A run that ends before its
    first step leaves no folder. Raises ValueError if it is locked, read-only, holds another
    configuration or was copied with links followed. Rank 0 only."""
    run = run_folder(config)
    for best in (run / "checkpoints" / "best", run / "checkpoints" / ".best"):
        if best.is_dir() and not best.is_symlink():
            raise ValueError(
                f"{best} is a folder where runs have a link to one of the checkpoints beside it, as in a copy that "
                "followed links: delete it, and the run makes the link again"
            )
    with ExitStack() as held:
        try:
            run.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(run / "lock", str(run), "name="))
        except OSError as error:
            raise ValueError(
                f"{run} cannot be written ({error.strerror}): choose another runs_dir="
            ) from error
        try:
            refuse_another(config, run)
            yield run
        finally:
            if not begun(run):
                for name in (CONFIG, HYDRA_CONFIG, SOURCES, NGRAMS, WANDB_ID, "lock"):
                    (run / name).unlink(missing_ok=True)
                with suppress(OSError):  # something else lies there
                    run.rmdir()


def begin_run(run: Path, config: TrainConfig, learnt_from: dict) -> None:
    """Write the resolved configuration and what the run learns from (`sources`), or raise
    ValueError if the run was begun with another target or other rows. A run of an earlier version,
    which has no record, gets one."""
    with disk(str(run)):
        if begun(run) and (run / SOURCES).exists():
            refuse_other_settings(
                recorded(run / SOURCES),
                learnt_from,
                f"{run} was begun with other contents under the same paths ({{keys}} differ), and rows held out then "
                "might be learnt from now: restore them, or choose another name=",
            )
        else:
            write_json(run / SOURCES, learnt_from)
        if not begun(run):
            write_json(run / CONFIG, plain(config))
            defaults = {"defaults": ["train", "_self_"]}
            atomic_write(
                run / HYDRA_CONFIG, OmegaConf.to_yaml(OmegaConf.create(defaults | plain(config)))
            )
        remove_partial(run)


def sources(path: str, target: Target, rows: "StoredRows | Dataset") -> dict:
    """Return what identifies a target (at `path`) and the training rows; about a second for a
    gigabyte of tokens."""
    return {
        "target": target_identity(path, target.tokenizer_digest),
        "data": {"rows": len(rows), "content": rows_digest(rows)},
    }


def rows_digest(rows: "StoredRows | Dataset") -> str:
    """Return a digest of all rows' tokens, in order, and of which of them carry loss. Stored
    features and the rows that they were made of have the same one."""
    digest = hashlib.sha256()
    for name, kind in (("ids", np.int64), ("loss", np.bool_)):
        for part in column_parts(rows, name):
            digest.update(np.ascontiguousarray(part, dtype=kind))
    return digest.hexdigest()


def column_parts(rows: "StoredRows | Dataset", name: str) -> Iterator[np.ndarray]:
    """Yield the entries of a column of all rows, one (entries,) piece after the other."""
    if isinstance(rows, StoredRows):
        yield from rows.column_parts(name)
        return
    for chunk in rows.data.column(name).chunks:  # pyarrow's, memory-mapped
        yield chunk.flatten().to_numpy(zero_copy_only=False)


def used_ids(rows: "StoredRows | Dataset") -> set[int]:
    """Return the token ids that training rows have."""
    return {int(id) for part in column_parts(rows, "ids") for id in np.unique(part)}


def learnt_counts(rows: "StoredRows | Dataset", target: Target) -> torch.Tensor:
    """Return how often training rows have each token where it may be learnt from, (V,) int64."""
    size = target.vocabulary
    columns = zip(column_parts(rows, "ids"), column_parts(rows, "loss"), strict=True)
    return torch.from_numpy(sum(np.bincount(ids[loss], minlength=size) for ids, loss in columns))


def frequent_tokens(rows: "StoredRows | Dataset", number: int, target: Target) -> torch.Tensor:
    """Return the ids (number,) int64, ascending, of the tokens that training rows have most often
    to learn from, and of the special ones, however often: those that end texts must be drafted."""
    ranks = learnt_counts(rows, target)
    special = {*target.end_ids, *target.tokenizer.all_special_ids}
    ranks[[id for id in special if id < len(ranks)]] = torch.iinfo(torch.int64).max
    return ranks.argsort(descending=True, stable=True)[:number].sort().values


def documents(rows: "StoredRows | Dataset") -> Iterator[np.ndarray]:
    """Yield the token ids of the documents of packed rows, whose positions begin at 0."""
    columns = (column_parts(rows, name) for name in ("ids", "positions", "documents"))
    for ids, positions, numbers in zip(*columns, strict=True):
        starts = np.flatnonzero(positions == 0)
        pieces = np.split(ids, starts[1:])
        yield from (
            piece for piece, start in zip(pieces, starts, strict=True) if numbers[start] >= 0
        )


def count_rows(
    rows: "StoredRows | Dataset", target: Target, run: Path, earlier: Path | None
) -> None:
    """Count the rows' n-grams into the run's folder, unless they are there; a drafter that brought
    some along keeps those: few answers alone would make poor trees. Raises Stopped where the file
    cannot be written."""
    out = run / NGRAMS
    if out.exists():
        return
    with disk(str(out)):
        if earlier is not None:
            with replacing(out) as fresh:
                shutil.copyfile(earlier, fresh)
        else:
            order = usual_order(target.vocabulary)
            digest = target.tokenizer_digest
            count_ngrams(
                documents(rows), target.vocabulary, order, out, digest, threshold=THRESHOLD
            )
