"""A run's folder: its configuration, its lock, its log.

An existing run is continued or refused, never overwritten, and never written by two processes at once.
`check_run_folder` refuses before models load what can be known then; `open_run` makes the folder once all is loaded.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from infer.utils.entry import disk
from infer.utils.files import locked, refuse_other_settings, write_json
from infer.utils.redact import redact
from train.config import TrainConfig
from train.run.checkpoints import remove_partial
from train.run.sources import SOURCES, refuse_other_sources

# what may differ when a run is continued: nothing here changes what is learnt, beyond rounding
FREE = ("resume", "runs_dir", "keep_states", "save_minutes", "log_every", "tracking", "evaluation", "deepspeed")
FREE += (
    "guards",
    "ngrams",
    "optim.micro",
    "optim.precision",
    "compile",
    "recompute",
    "target.shard",
    "target.device",
    "data.num_proc",
)


def run_folder(config: TrainConfig) -> Path:
    return Path(config.runs_dir) / config.name


def plain(config: TrainConfig) -> dict:
    """Return the resolved configuration as JSON, without secrets: what is written and compared."""
    return json.loads(json.dumps(redact(asdict(config))))


def begun(run: Path) -> bool:
    """Return whether a run took a step: one that ended before that keeps nobody from using its name."""
    return any((run / name).exists() for name in ("metrics.jsonl", "checkpoints"))


def completed(known: dict, defaults: dict) -> dict:
    """Return a configuration with the default of every option that there was not yet when it was written, and without
    those that there are no more."""
    filled = dict(defaults)
    for key in known.keys() & defaults.keys():
        inside = isinstance(known[key], dict) and defaults[key]  # where there are no defaults, keys are free
        filled[key] = completed(known[key], inside) if inside else known[key]
    return filled


def refuse_another(config: TrainConfig, run: Path) -> None:
    """Raise ValueError when the folder holds a run of another configuration, or any run and resume=never."""
    file = run / "config.json"
    if not file.exists() or not begun(run):
        return
    if config.resume == "never":
        raise ValueError(f"{run} holds a run already: go on with it by resume=auto, or choose another name=")
    try:
        known = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is damaged: choose another name=, or restore it") from error
    message = f"{run} holds a run with another configuration ({{keys}} differ): choose another name="
    refuse_other_settings(completed(known, plain(TrainConfig())), plain(config), message, FREE)


def check_run_folder(config: TrainConfig) -> None:
    """Raise ValueError if the run folder is locked, read-only, holds another configuration or was copied with links
    followed. Changes nothing."""
    run = run_folder(config)
    refuse_another(config, run)
    for best in (run / "checkpoints" / "best", run / "checkpoints" / ".best"):
        if best.is_dir() and not best.is_symlink():
            raise ValueError(
                f"{best} is a folder where runs have a link to one of the checkpoints beside it, as in a copy that "
                "followed links: delete it, and the run makes the link again"
            )
    existing = next(folder for folder in (run, *run.absolute().parents) if folder.is_dir())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
        if existing == run:
            with locked(run / "lock", str(run), "name="):
                pass
    except OSError as error:
        raise ValueError(f"{run} cannot be written ({error.strerror or error}): choose another runs_dir=") from error


@contextmanager
def open_run(config: TrainConfig, learnt_from: dict) -> Iterator[Path]:
    """Create the run folder, write the resolved configuration and what is learnt from (`train.run.sources`), and hold
    its lock until the run ends. A run that ends before its first step leaves no folder. Rank 0 only."""
    run = run_folder(config)
    with disk(str(run)):
        run.mkdir(parents=True, exist_ok=True)
    with locked(run / "lock", str(run), "name="):
        refuse_another(config, run)
        if begun(run):
            refuse_other_sources(run, learnt_from)
        with disk(str(run)):
            if not begun(run):
                write_json(run / "config.json", plain(config))
                write_json(run / SOURCES, learnt_from)
            remove_partial(run)
        try:
            yield run
        finally:
            if not begun(run):
                for name in ("config.json", SOURCES, "lock"):
                    (run / name).unlink(missing_ok=True)
                with suppress(OSError):  # something else lies there
                    run.rmdir()
