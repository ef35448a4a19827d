"""Checkpoints of a run: whole or absent, newest first, best marked.

    <run>/checkpoints/step-00000300/
        drafter/        config.json, model.safetensors: the public layout, what serving engines read;
                        ngrams, with ngrams=true
        state/          state.safetensors: float32 weights and the optimiser's moments, whole, whatever
                        processes and ZeRO stage wrote it; manifest.json: step, size and sha256 of
                        every file of the checkpoint
        evaluation/     evaluation.json and the report, written after the checkpoint; failed.txt if that
                        did not work
    <run>/checkpoints/rolling-00000347/state/
    <run>/checkpoints/best -> step-...

Between checkpoints, every few minutes and when a signal stops the run, a rolling one keeps the
training state and nothing else; the next one of either kind takes its place. Each is written into a
hidden sibling folder, synced, given its manifest and renamed, so that a kill at any moment leaves
either none or a whole one. There is no other state: data order, anchors and learning rate are pure
functions of seed and step.
"""

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from infer.drafters.base import Drafter
from infer.formats.checkpoint import NGRAMS, save_drafter
from infer.utils.errors import disk
from infer.utils.files import file_digest, replacing, replacing_folder, sync, write_json
from train.engine import training_state
from train.processes import first_only

MANIFEST = "manifest.json"
STATE = "state.safetensors"
KEPT = 2  # newest checkpoints that keep their training state; drafters and evaluations always stay


def checkpoint_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def checkpoints(run: Path) -> list[Path]:
    """Return the run's checkpoint folders, oldest first, damaged ones included."""
    return numbered_folders(run / "checkpoints", "step")


def rolling(run: Path) -> list[Path]:
    """Return the rolling training states, oldest first, damaged ones included."""
    return numbered_folders(run / "checkpoints", "rolling")


def numbered_folders(parent: Path, name: str) -> list[Path]:
    """Return the folders called `name`-<step>, by step. Whatever else lies there, such as a copy
    with a name of the user's, belongs to nobody and is left alone."""
    folders = [
        path for path in parent.glob(f"{name}-*") if re.fullmatch(rf"{name}-[0-9]+", path.name)
    ]
    return sorted((path for path in folders if path.is_dir()), key=step_of)


def step_of(folder: Path) -> int:
    """Return the step in the name of a folder of `checkpoints` or `rolling`."""
    return int(folder.name.rpartition("-")[2])


def _digest(path: Path) -> dict:
    return {"bytes": path.stat().st_size, "sha256": file_digest(path)}


def save(run: Path, step: int, drafter: Drafter, engine, dtype: torch.dtype | None = None) -> Path:
    """Save a checkpoint, the training state and the drafter (in `dtype`), or without a dtype a
    rolling state in place of the one before; return the finished folder. Called by every process;
    engine: the one around the drafter. Raises Stopped in all processes if the checkpoint cannot be
        written; nothing
    half-written is left then."""
    state = training_state(drafter, engine)
    folder = (
        run / "checkpoints" / f"rolling-{step:08d}"
        if dtype is None
        else checkpoint_folder(run, step)
    )

    def write() -> Path:
        _write(folder, step, state, dtype and (drafter.config, dtype))
        tidy(run, step)
        return folder

    return first_only(write)


def _write(
    final: Path,
    step: int,
    state: dict[str, torch.Tensor],
    drafter: tuple[Qwen3Config, torch.dtype] | None,
) -> None:
    """Write the folder `final` with a training state, a drafter if its configuration and dtype are
    given, and a manifest."""
    run = final.parent.parent
    with disk(f"{final.name} of {run}"):
        final.parent.mkdir(
            exist_ok=True
        )  # but not the run's folder: where that vanished, the run ends
        with replacing_folder(final) as partial:
            (partial / "state").mkdir()
            save_file(state, partial / "state" / STATE)
            if drafter is not None:
                config, dtype = drafter
                weights = {name: tensor for name, tensor in state.items() if "/" not in name}
                weights |= {
                    name: weight.to(dtype)
                    for name, weight in weights.items()
                    if weight.is_floating_point()
                }
                save_drafter(config, weights, partial / "drafter")
                if (run / NGRAMS).is_file():
                    shutil.copyfile(run / NGRAMS, partial / "drafter" / NGRAMS)
            files = [path for path in sorted(partial.rglob("*")) if path.is_file()]
            manifest = {path.relative_to(partial).as_posix(): _digest(path) for path in files}
            write_json(partial / "state" / MANIFEST, {"step": step, "files": manifest})
            log = run / "metrics.jsonl"  # has all steps up to this one: on the disk before it
            for path in (*partial.rglob("*"), *[log] * log.exists()):
                sync(path)
            shutil.rmtree(final, ignore_errors=True)
        sync(final.parent)


def tidy(run: Path, step: int) -> None:
    """Remove the states that the one of `step` makes superfluous; after a kill in the middle of it,
    the next start does. Newer checkpoints are damaged; they are kept until overwritten."""
    for old in [folder for folder in checkpoints(run) if step_of(folder) <= step][:-KEPT]:
        shutil.rmtree(old / "state", ignore_errors=True)
    for old in rolling(run):
        if step_of(old) < step or checkpoint_folder(run, step).exists():
            shutil.rmtree(old, ignore_errors=True)


def remove_partial(run: Path) -> None:
    """Remove what a killed run left half-written."""
    (run / "checkpoints" / ".best").unlink(missing_ok=True)
    for partial in (
        *(run / "checkpoints").glob(".step-*"),
        *(run / "checkpoints").glob(".rolling-*"),
    ):
        shutil.rmtree(partial, ignore_errors=True)


def find_damage(folder: Path) -> str | None:
    """Describe the first fault of a checkpoint; None if every file matches its manifest."""
    manifest = folder / "state" / MANIFEST
    if not manifest.is_file():
        return "has no training state"
    try:
        expected = dict(json.loads(manifest.read_text())["files"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return "its manifest cannot be read"
    if f"state/{STATE}" not in expected:
        return f"its manifest names no state/{STATE}"
    for name, digest in expected.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if _digest(folder / name) != digest:
            return f"{name} is truncated or altered"
    return None


def newest(run: Path) -> tuple[Path | None, list[str]]:
    """Return the newest undamaged checkpoint or rolling state, or None, and a sentence about every
    newer one."""
    skipped = []
    for folder in sorted((*checkpoints(run), *rolling(run)), key=step_of, reverse=True):
        problem = find_damage(folder)
        if problem is None:
            return folder, skipped
        skipped.append(f"skipped checkpoint {folder.name}: {problem}")
    return None, skipped


def load(folder: Path | None) -> dict[str, torch.Tensor]:
    """Return a checkpoint's training state, as `train.engine.training_state` took it; nothing
    without one. Its files were checked by `newest`."""
    return load_file(folder / "state" / STATE) if folder is not None else {}


def mark_best(run: Path, best: Path) -> None:
    """Point checkpoints/best at the best checkpoint, atomically."""
    link = run / "checkpoints" / "best"
    with replacing(link) as fresh:
        fresh.symlink_to(best.name)
