"""Checkpoints of a run. A checkpoint folder is either complete or absent.

    <run>/checkpoints/step-00000300/
        drafter/        config.json and model.safetensors, in the public layout that serving engines
                        read; ngrams, with ngrams=true
        state/          state.safetensors: float32 weights and optimiser moments, complete for any
                        number of processes and ZeRO stage; manifest.json: the step, and size and
                        SHA-256 of every file of the checkpoint
        evaluation/     evaluation.json and the report, written after the checkpoint; failed.txt if
                        the evaluation failed
    <run>/checkpoints/rolling-00000347/state/
    <run>/checkpoints/best -> step-...

A rolling state is a training state without a drafter. It is saved every few minutes and when a
signal stops the run, and replaced by the next checkpoint or rolling state.

A folder is written under a hidden name, synced, given its manifest, and renamed. If the process is
killed, the folder is therefore absent or complete. There is no other state: the order of the data,
the anchors and the learning rate are pure functions of seed and step.
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
# so many newest checkpoints keep their training state; all keep drafter and evaluation
CHECKPOINTS_KEEPING_TRAINING_STATE = 2


def checkpoint_folder(run: Path, step: int) -> Path:
    """Return the path of a checkpoint's folder."""
    return run / "checkpoints" / f"step-{step:08d}"


def list_checkpoints(run: Path) -> list[Path]:
    """Return the run's checkpoint folders, oldest first, including damaged ones."""
    return list_numbered_folders(run / "checkpoints", "step")


def list_rolling_states(run: Path) -> list[Path]:
    """Return the folders of rolling training states, oldest first, including damaged ones."""
    return list_numbered_folders(run / "checkpoints", "rolling")


def list_numbered_folders(parent: Path, name: str) -> list[Path]:
    """Return the folders named `name`-<step>, sorted by step. Folders with other names, for example
    a user's copy of a checkpoint, are ignored."""
    folders = []
    for path in parent.glob(f"{name}-*"):
        if re.fullmatch(rf"{name}-[0-9]+", path.name) and path.is_dir():
            folders.append(path)
    return sorted(folders, key=parse_step)


def parse_step(folder: Path) -> int:
    """Return the step in the name of a checkpoint or rolling state."""
    return int(folder.name.rpartition("-")[2])


def build_manifest_entry(path: Path) -> dict:
    """Return a file's entry in the manifest: size and SHA-256."""
    return {"bytes": path.stat().st_size, "sha256": file_digest(path)}


def save_checkpoint(
    run: Path, step: int, drafter: Drafter, engine: "DeepSpeedEngine", dtype: torch.dtype
) -> Path:
    """Save a checkpoint with the training state, and the drafter in `dtype`. Return its folder.

    All processes call it together. Raises Stopped in all of them if the checkpoint cannot be
    written; no partial checkpoint remains.
    """
    state = gather_training_state(drafter, engine)
    folder = checkpoint_folder(run, step)
    return run_on_first_process(
        lambda: _write_checkpoint(folder, step, state, (drafter.config, dtype))
    )


def save_rolling_state(run: Path, step: int, drafter: Drafter, engine: "DeepSpeedEngine") -> Path:
    """Save the training state in place of the previous rolling state. Otherwise like
    `save_checkpoint`."""
    state = gather_training_state(drafter, engine)
    folder = run / "checkpoints" / f"rolling-{step:08d}"
    return run_on_first_process(lambda: _write_checkpoint(folder, step, state, None))


def _write_checkpoint(
    folder: Path,
    step: int,
    state: dict[str, torch.Tensor],
    drafter: tuple[Qwen3Config, torch.dtype] | None,
) -> Path:
    """Write a folder with a training state, a manifest, and a drafter if its config and dtype are
    given. Then remove superseded states. Return the folder."""
    run = folder.parent.parent
    with abort_on_write_error(f"{folder.name} of {run}"):
        # `parents` is not set: if the run's folder was deleted, the run must end
        folder.parent.mkdir(exist_ok=True)
        with atomic_create_folder(folder) as partial:
            (partial / "state").mkdir()
            save_file(state, partial / "state" / CHECKPOINT_TRAINING_STATE_FILE)
            if drafter is not None:
                config, dtype = drafter
                save_drafter(config, _select_weights(state, dtype), partial / "drafter")
                if (run / NGRAM_FILE_NAME).is_file():
                    shutil.copyfile(run / NGRAM_FILE_NAME, partial / "drafter" / NGRAM_FILE_NAME)

            files = {}
            for path in sorted(partial.rglob("*")):
                if path.is_file():
                    files[path.relative_to(partial).as_posix()] = build_manifest_entry(path)
            manifest = {"step": step, "files": files}
            write_json(partial / "state" / CHECKPOINT_MANIFEST_FILE, manifest)

            # the log must be on the disk first, because resuming needs its lines up to this step
            for path in partial.rglob("*"):
                fsync_path(path)
            log = run / "metrics.jsonl"
            if log.exists():
                fsync_path(log)
            shutil.rmtree(folder, ignore_errors=True)
        fsync_path(folder.parent)
    remove_superseded_states(run, step)
    return folder


def _select_weights(state: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the drafter's weights and buffers of a training state, floating-point ones in
    `dtype`."""
    weights = {}
    for name, tensor in state.items():
        if "/" not in name:  # names with a slash belong to the optimiser
            weights[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return weights


def remove_superseded_states(run: Path, step: int) -> None:
    """Remove training states that the one of `step` supersedes. If the process is killed meanwhile,
    the next start finishes it. Newer checkpoints are damaged ones; they stay until overwritten."""
    checkpoints = [folder for folder in list_checkpoints(run) if parse_step(folder) <= step]
    for folder in checkpoints[:-CHECKPOINTS_KEEPING_TRAINING_STATE]:
        shutil.rmtree(folder / "state", ignore_errors=True)
    for folder in list_rolling_states(run):
        if parse_step(folder) < step or checkpoint_folder(run, step).exists():
            shutil.rmtree(folder, ignore_errors=True)


def remove_partial_checkpoints(run: Path) -> None:
    """Remove partially written folders of a killed run."""
    folder = run / "checkpoints"
    (folder / ".best").unlink(missing_ok=True)
    for partial in (*folder.glob(".step-*"), *folder.glob(".rolling-*")):
        shutil.rmtree(partial, ignore_errors=True)


def describe_damage(folder: Path) -> str | None:
    """Describe the first defect of a checkpoint; None if every file matches the manifest."""
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


def find_newest_checkpoint(run: Path) -> tuple[Path | None, list[str]]:
    """Return the newest undamaged checkpoint or rolling state, None if there is none, and one line
    about every newer, damaged one."""
    skipped = []
    folders = [*list_checkpoints(run), *list_rolling_states(run)]
    for folder in sorted(folders, key=parse_step, reverse=True):
        damage = describe_damage(folder)
        if damage is None:
            return folder, skipped
        skipped.append(f"skipped checkpoint {folder.name}: {damage}")
    return None, skipped


def load_training_state(folder: Path | None) -> dict[str, torch.Tensor]:
    """Return a checkpoint's training state (see `train.engine.gather_training_state`), which
    `find_newest_checkpoint` has checked; empty for None."""
    if folder is None:
        return {}
    return load_file(folder / "state" / CHECKPOINT_TRAINING_STATE_FILE)


def link_best_checkpoint(run: Path, best: Path) -> None:
    """Point the link checkpoints/best to the best checkpoint, atomically."""
    with atomic_replace_file(run / "checkpoints" / "best") as temporary:
        temporary.symlink_to(best.name)
