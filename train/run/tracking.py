"""Weights & Biases, if asked for. It never stops or delays a run; without a key or network it works offline."""

import os
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from queue import Full, Queue
from secrets import token_hex

from infer.evaluation.results import Evaluation
from infer.utils.files import atomic_write
from infer.utils.redact import redact, redact_text
from train.config import TrainConfig

WAITING = 10_000  # messages that may wait for a slow or hanging server; when there are more, wandb is left out
WANDB_ID = "wandb_id"  # in the run's folder: a resumed run is the same run there
PATIENCE = 60.0  # seconds that the end of a run waits for unsent messages


def start_wandb(config: TrainConfig, folder: Path):
    """Start a run of wandb, online or else offline; return None if neither works. No secret goes into its
    configuration, and neither the command line nor printed text is recorded."""
    import wandb

    has_key = bool(os.environ.get("WANDB_API_KEY") or wandb.api.api_key)
    wished = os.environ.get("WANDB_MODE") or ("online" if has_key else "offline")
    place = folder / WANDB_ID
    name = place.read_text() if place.exists() else token_hex(4)
    for mode in dict.fromkeys((wished, "offline")):
        try:
            run = wandb.init(
                id=name,
                resume="allow" if mode == "online" else None,  # offline, `wandb sync --append` joins the parts
                project=redact_text(config.tracking.project),
                name=redact_text(config.name),
                dir=str(folder),
                config=redact(asdict(config)),
                mode=mode,
                settings=wandb.Settings(
                    init_timeout=30, silent=True, console="off", x_disable_meta=True, disable_git=True
                ),
            )
            atomic_write(place, name)
            return run
        except Exception as error:  # noqa: BLE001  training goes on, whatever wandb raises
            print(redact_text(f"wandb ({mode}) is not available: {error}"))
    return None


class Tracker:
    """Logs to wandb when `tracking.wandb` is on; otherwise does nothing. A thread of its own talks to wandb, so that
    training only queues a message."""

    def __init__(self, config: TrainConfig, folder: Path, enabled: bool) -> None:
        self.config, self.folder = config, folder
        self.messages: Queue[Callable | None] = Queue(maxsize=WAITING)
        self.thread: threading.Thread | None = None
        if enabled and config.tracking.wandb:
            self.thread = threading.Thread(target=self._work, daemon=True)
            self.thread.start()

    def _work(self) -> None:
        try:
            run = start_wandb(self.config, self.folder)
            while run is not None and (action := self.messages.get()) is not None:
                action(run)
            if run is not None:
                run.finish()
                tell_sync(self.folder)
        except Exception as error:  # noqa: BLE001
            print(redact_text(f"wandb stopped working and is left out from here on: {error}"))

    def _send(self, action: Callable | None) -> None:
        if self.thread is None or not self.thread.is_alive():
            return
        try:
            self.messages.put_nowait(action)
        except Full:
            print(f"wandb has not taken {WAITING:,} messages, and is left out from here on")
            self.thread = None

    def log(self, line: dict) -> None:
        """Log one step's metrics, as they are written to metrics.jsonl."""
        flat = {key: value for key, value in line.items() if not isinstance(value, list) and value is not None}
        flat |= {f"agreement/{i + 1}": share for i, share in enumerate(line["agreement"])}
        self._send(lambda run: run.log(flat, step=line["step"]))

    def summary(self, evaluation: Evaluation) -> None:
        """Log an evaluation's acceptance lengths and speedups."""
        figures = figures_of(evaluation)
        self._send(lambda run: (run.log(figures, step=evaluation.step), run.summary.update(figures)))

    def report(self, folder: Path, evaluation: Evaluation) -> None:
        """Upload the report: its page, the table of methods, and the samples."""

        def upload(run) -> None:
            import wandb

            columns = ["name", "budget", "tau", "tau_interval", "tokens_per_second", "speedup", "speedup_interval"]
            rows = [[str(getattr(method, column)) for column in columns] for method in evaluation.methods]
            texts = [[sample.prompt, sample.completion, str(sample.accepted)] for sample in evaluation.samples]
            logged = {"methods": wandb.Table(columns=columns, data=rows)}
            logged["samples"] = wandb.Table(columns=["prompt", "completion", "tokens by round"], data=texts)
            logged["report"] = wandb.Html((folder / "report.html").read_text(encoding="utf-8"), inject=False)
            run.log(logged)

        self._send(upload)

    def close(self) -> None:
        """Wait until everything is sent, at most PATIENCE seconds."""
        self._send(None)
        if self.thread is not None:
            self.thread.join(PATIENCE)
            if self.thread.is_alive():
                print(f"wandb has not answered for {PATIENCE:.0f} seconds, and is left behind")


def tell_sync(folder: Path) -> None:
    """Print how to send what wandb wrote offline."""
    name = (folder / WANDB_ID).read_text() if (folder / WANDB_ID).exists() else ""
    parts = sorted(folder.glob(f"wandb/offline-run-*-{name}"))
    if parts:
        print(
            f"wandb       offline; to send it: wandb sync {'--append ' * (len(parts) > 1)}{' '.join(map(str, parts))}"
        )


def figures_of(evaluation: Evaluation) -> dict[str, float]:
    """Return acceptance length and speedup of every method."""
    figures = {}
    for method in evaluation.methods:
        name = f"{method.name}{method.budget or ''}"
        figures |= {f"tau/{name}": method.tau, f"speedup/{name}": method.speedup}
    return figures
