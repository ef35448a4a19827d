"""The checkpoints of a run. The folder of a checkpoint is either complete or absent.

    <run>/checkpoints/step-00000300/
        drafter/        config.json and model.safetensors, in the format that serving engines read;
                        with count_ngrams=true, also the n-gram file
        state/          state.safetensors has the float32 weights and optimiser moments, unsharded;
                        manifest.json has the step, and the size and SHA-256 of every file of the
                        checkpoint
        evaluation/     evaluation.json, written after the checkpoint; failed.txt instead if the
                        evaluation failed
    <run>/checkpoints/rolling-00000347/state/
    <run>/checkpoints/best -> step-...

A folder rolling-<step> holds a rolling state: a training state without a drafter. It is saved every
few minutes, and when a signal stops the run. The next checkpoint or rolling state replaces it.

A checkpoint is first written to a folder with a hidden name and synced to the disk. Then the folder
is renamed. If the process is killed, the checkpoint is therefore absent or complete.

Nothing else has to be saved. The order of the data, the positions at which training blocks start,
and the learning rate all follow from the seed and the step.
"""

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from infer.drafters.base import Drafter
from infer.formats.checkpoint import NGRAM_FILE_NAME, save_drafter
from infer.utils.errors import abort_on_write_error
from infer.utils.files import (
    atomic_create_folder,
    atomic_replace_file,
    file_digest,
    fsync_path,
    write_json,
)
from train.engine import gather_training_state
from train.processes import run_on_first_process

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

CHECKPOINT_MANIFEST_FILE = "manifest.json"
CHECKPOINT_TRAINING_STATE_FILE = "state.safetensors"
# Number of newest checkpoints that keep their training state. Older ones keep only the drafter and
# the evaluation.
NUM_CHECKPOINTS_KEEPING_TRAINING_STATE = 2


def checkpoint_folder(run: Path, step: int) -> Path:
    """Return the path of the checkpoint that is saved after `step` training steps."""
    return run / "checkpoints" / f"step-{step:08d}"


def list_checkpoints(run: Path) -> list[Path]:
    """Return the run's checkpoint folders, oldest first, including damaged ones."""
    return list_numbered_folders(run / "checkpoints", "step")


def list_rolling_states(run: Path) -> list[Path]:
    """Return the folders of the run's rolling states (training states without a drafter), oldest
    first, including damaged ones."""
    return list_numbered_folders(run / "checkpoints", "rolling")


def list_numbered_folders(parent: Path, name: str) -> list[Path]:
    """Return the folders in `parent` that are named <name>-<step>, sorted by step. Folders with
    other names, for example a user's copy of a checkpoint, are ignored."""
    folders = []
    for path in parent.glob(f"{name}-*"):
        if re.fullmatch(rf"{name}-[0-9]+", path.name) and path.is_dir():
            folders.append(path)
    return sorted(folders, key=parse_step)


def parse_step(folder: Path) -> int:
    """Return the training step in a folder name such as step-00000300 or rolling-00000347."""
    return int(folder.name.rpartition("-")[2])


def build_manifest_entry(path: Path) -> dict:
    """Return the size in bytes and the SHA-256 of a file, as its entry in a checkpoint's
    manifest.json."""
    return {"bytes": path.stat().st_size, "sha256": file_digest(path)}


def save_checkpoint(
    run: Path, step: int, drafter: Drafter, engine: "DeepSpeedEngine", dtype: torch.dtype
) -> Path:
    """Save a checkpoint with the training state and the drafter. Return the checkpoint's folder.

    dtype: the dtype of the saved drafter. All processes must call this function together. If the
    checkpoint cannot be written, all processes raise RunAborted, and no partial checkpoint remains.
    """
    state = gather_training_state(drafter, engine)
    folder = checkpoint_folder(run, step)
    return run_on_first_process(
        lambda: _write_checkpoint(folder, step, state, (drafter.config, dtype))
    )


def save_rolling_state(run: Path, step: int, drafter: Drafter, engine: "DeepSpeedEngine") -> Path:
    """Save the training state without the drafter (a rolling state), and remove the previous
    rolling state. Return the folder of the new one. All processes must call this function
    together."""
    state = gather_training_state(drafter, engine)
    folder = run / "checkpoints" / f"rolling-{step:08d}"
    return run_on_first_process(lambda: _write_checkpoint(folder, step, state, None))


def _write_checkpoint(
    folder: Path,
    step: int,
    state: dict[str, torch.Tensor],
    drafter: tuple[Qwen3Config, torch.dtype] | None,
) -> Path:
    """Write a checkpoint, or a training state without a drafter. Then remove the older training
    states that are no longer needed. Return `folder`.

    state: the training state, from `gather_training_state`. drafter: config and dtype of the
    drafter to save; None if only the training state is saved.
    """
    run = folder.parent.parent
    with abort_on_write_error(f"{folder.name} of {run}"):
        # Only the folder checkpoints/ is created. If the run's folder was deleted, mkdir fails and
        # ends the run.
        folder.parent.mkdir(exist_ok=True)
        with atomic_create_folder(folder) as partial:
            (partial / "state").mkdir()
            save_file(state, partial / "state" / CHECKPOINT_TRAINING_STATE_FILE)
            if drafter is not None:
                config, dtype = drafter
                save_drafter(config, _extract_drafter_weights(state, dtype), partial / "drafter")
                if (run / NGRAM_FILE_NAME).is_file():
                    shutil.copyfile(run / NGRAM_FILE_NAME, partial / "drafter" / NGRAM_FILE_NAME)

            files = {}
            for path in sorted(partial.rglob("*")):
                if path.is_file():
                    files[path.relative_to(partial).as_posix()] = build_manifest_entry(path)
            manifest = {"step": step, "files": files}
            write_json(partial / "state" / CHECKPOINT_MANIFEST_FILE, manifest)

            # Sync the log before the checkpoint appears: a run that resumes from this checkpoint
            # needs the log's lines up to this step.
            for path in partial.rglob("*"):
                fsync_path(path)
            log = run / "metrics.jsonl"
            if log.exists():
                fsync_path(log)
            shutil.rmtree(folder, ignore_errors=True)
        fsync_path(folder.parent)
    remove_superseded_states(run, step)
    return folder


def _extract_drafter_weights(
    state: dict[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return the drafter's weights and buffers from a training state. Floating-point tensors are
    converted to `dtype`."""
    weights = {}
    for name, tensor in state.items():
        if "/" not in name:  # keys with a slash belong to the optimiser's state
            weights[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return weights


def remove_superseded_states(run: Path, step: int) -> None:
    """Remove the training states that are not needed once the training state of `step` is saved.

    The newest NUM_CHECKPOINTS_KEEPING_TRAINING_STATE checkpoints up to `step` keep their training
    state. Rolling states (folders rolling-<step>) that are older are removed. If `step` is a
    checkpoint, all rolling states are removed. Checkpoints newer than `step` are damaged, because
    the run is resumed from the newest undamaged one. They stay until the run overwrites them. If
    the process is killed during the removal, the next start of the run finishes the removal.
    """
    checkpoints = [folder for folder in list_checkpoints(run) if parse_step(folder) <= step]
    for folder in checkpoints[:-NUM_CHECKPOINTS_KEEPING_TRAINING_STATE]:
        shutil.rmtree(folder / "state", ignore_errors=True)
    for folder in list_rolling_states(run):
        if parse_step(folder) < step or checkpoint_folder(run, step).exists():
            shutil.rmtree(folder, ignore_errors=True)


def remove_partial_checkpoints(run: Path) -> None:
    """Remove the unfinished checkpoint folders that a killed run has left behind."""
    folder = run / "checkpoints"
    (folder / ".best").unlink(missing_ok=True)
    for partial in (*folder.glob(".step-*"), *folder.glob(".rolling-*")):
        shutil.rmtree(partial, ignore_errors=True)


def describe_checkpoint_damage(folder: Path) -> str | None:
    """Compare the files of a checkpoint with the sizes and digests in its manifest. Return a text
    about the first difference, or None if all files match."""
    manifest = folder / "state" / CHECKPOINT_MANIFEST_FILE
    if not manifest.is_file():
        return "has no training state"
    try:
        files = dict(json.loads(manifest.read_text())["files"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return "its manifest cannot be read"
    if f"state/{CHECKPOINT_TRAINING_STATE_FILE}" not in files:
        return f"its manifest does not list state/{CHECKPOINT_TRAINING_STATE_FILE}"
    for name, expected in files.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if build_manifest_entry(folder / name) != expected:
            return f"{name} is truncated or altered"
    return None


def find_newest_resumable_folder(run: Path) -> tuple[Path | None, list[str]]:
    """Return the newest undamaged folder from which the run can be resumed, and messages for the
    user about newer folders that are damaged.

    The folder contains a checkpoint, or a training state without a drafter. None is returned in
    place of a folder if all are damaged or there are none. Each message says why a folder was
    skipped.
    """
    skipped = []
    folders = [*list_checkpoints(run), *list_rolling_states(run)]
    for folder in sorted(folders, key=parse_step, reverse=True):
        damage = describe_checkpoint_damage(folder)
        if damage is None:
            return folder, skipped
        skipped.append(f"skipped checkpoint {folder.name}: {damage}")
    return None, skipped


def load_training_state(folder: Path | None) -> dict[str, torch.Tensor]:
    """Load the training state (weights and optimiser moments) from a checkpoint folder.

    folder: from `find_newest_resumable_folder`, which has checked the files. If `folder` is None,
    an empty dictionary is returned. See `train.engine.collect_unsharded_state` for the keys.
    """
    if folder is None:
        return {}
    return load_file(folder / "state" / CHECKPOINT_TRAINING_STATE_FILE)


def link_best_checkpoint(run: Path, best: Path) -> None:
    """Make the symbolic link checkpoints/best point to the folder `best`, atomically."""
    with atomic_replace_file(run / "checkpoints" / "best") as temporary:
        temporary.symlink_to(best.name)
