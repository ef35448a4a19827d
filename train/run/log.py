"""What a run says of its steps: metrics.jsonl, one line of JSON a step; the terminal's line;
Weights & Biases."""

import json
import math
import os
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from secrets import token_hex

import torch
import torch.distributed as dist

from infer.evaluation.results import Evaluation
from infer.utils.errors import disk
from infer.utils.files import atomic_write
from infer.utils.progress import Progress
from infer.utils.redact import redact, redact_text
from train.config import TrainConfig

METRICS = "metrics.jsonl"
WANDB_ID = "wandb_id"  # in the run's folder: a resumed run is the same run there
EARLY = 12  # steps after which a line says how long the rest takes; a third of a shorter run's


def finite(value: float) -> float | None:
    """A number as JSON has it; None for infinity and NaN."""
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class StepMetrics:
    """One step over all processes. Tensors on the device: reading them synchronises."""

    loss: torch.Tensor  # () weighted mean divergence, nats
    agreement: (
        torch.Tensor
    )  # (L,) share of supervised positions where drafter and target choose the same token
    # () drafts in a row that agree, plus one for the bonus token, mean over the batch's blocks: a
    # chain's τ on the training texts
    prefix: torch.Tensor
    grad_norm: torch.Tensor  # ()

    def numbers(self) -> dict:
        """The metrics as JSON has them."""
        return {
            "loss": finite(self.loss.item()),
            "prefix": self.prefix.item(),
            "agreement": self.agreement.tolist(),
            "grad_norm": finite(self.grad_norm.item()),
        }


class RunLog:
    """Writes the lines of a run, in its first process: into its folder, to the terminal, and where
    `wandb=true` to wandb; what goes wrong there does not stop a run."""

    def __init__(self, config: TrainConfig, folder: Path, done: int, total: int) -> None:
        """done: steps of the run so far, of `total`."""
        self.name = config.name
        self.folder = folder
        self.done = done
        self.total = total
        self.first = dist.get_rank() == 0
        self.progress = Progress("training", "steps", done, not self.first, sys.stdout)
        self.wandb = start_wandb(config, folder) if config.wandb and self.first else None

    def say(self, text: str) -> None:
        """Print a line of its own."""
        self.progress.say(text)

    def track(self, action: Callable) -> None:
        """Do something with wandb's run."""
        try:
            if self.wandb is not None:
                action(self.wandb)
        except Exception as error:  # noqa: BLE001
            print(redact_text(f"wandb stopped working and is left out from here on: {error}"))
            self.wandb = None

    def step(self, line: dict) -> None:
        """Write one step's line."""
        if not self.first:
            return
        with disk(f"{self.folder}/{METRICS}"), (self.folder / METRICS).open("a") as log:
            log.write(json.dumps(line) + "\n")
        flat = {
            key: value for key, value in line.items() if key != "agreement" and value is not None
        }
        flat |= {f"agreement/{i + 1}": share for i, share in enumerate(line["agreement"])}
        self.track(lambda run: run.log(flat, step=line["step"]))
        agreement = " ".join(f"{100 * share:.0f}" for share in line["agreement"][:8])
        loss = "not finite" if line["loss"] is None else f"{line['loss']:.3f}"
        speed = f"{line['tokens_per_second']:,.0f} tokens/s"
        note = f"loss {loss}, agreement by position {agreement} %, batch τ {line['prefix']:.2f}, {speed}"
        if line["step"] - self.done == min(EARLY, max(2, (self.total - self.done) // 3)):
            self.progress.last = 0.0  # a line now, whenever the last one was
        self.progress(line["step"], self.total, note)

    def summary(self, evaluation: Evaluation) -> None:
        """Log an evaluation's acceptance lengths and speedups to wandb."""
        figures = {}
        for method in evaluation.methods:
            name = f"{method.name}{method.budget or ''}"
            figures |= {f"tau/{name}": method.tau, f"speedup/{name}": method.speedup}
        self.track(
            lambda run: (run.log(figures, step=evaluation.step), run.summary.update(figures))
        )

    def close(self, page: Path | None) -> None:
        """Upload the report's page, if there is one, and end wandb's run."""

        def finish(run) -> None:
            import wandb

            if page is not None:
                run.log({"report": wandb.Html(page.read_text(encoding="utf-8"), inject=False)})
            run.finish()

        self.track(finish)


def read_log(run: Path) -> list[dict]:
    """Return the lines of metrics.jsonl."""
    file = run / METRICS
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def trim_log(path: Path, step: int) -> None:
    """Drop the lines of steps after `step`, which a resumed run does again, and a half-written last
    line."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        with suppress(ValueError, KeyError):
            if json.loads(line)["step"] <= step:
                kept.append(line)
    with disk(str(path)):
        atomic_write(path, "".join(line + "\n" for line in kept))


def peak_memory(device: torch.device) -> int:
    """Return the most bytes in use so far: of the allocator on CUDA, of the process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def start_wandb(config: TrainConfig, folder: Path):
    """Start a run of wandb, offline without a key; a resumed run is the same run there. No secret
    goes into its configuration, and neither the command line nor printed text is recorded. Return
    None if that does not work."""
    import wandb

    has_key = bool(os.environ.get("WANDB_API_KEY") or wandb.api.api_key)
    mode = os.environ.get("WANDB_MODE") or ("online" if has_key else "offline")
    place = folder / WANDB_ID
    name = place.read_text() if place.exists() else token_hex(4)
    try:
        run = wandb.init(
            id=name,
            resume="allow"
            if mode == "online"
            else None,  # offline, `wandb sync --append` joins the parts
            project=os.environ.get("WANDB_PROJECT", "blockdraft"),
            name=redact_text(config.name),
            dir=str(folder),
            config=redact(asdict(config)),
            mode=mode,
            settings=wandb.Settings(
                silent=True, console="off", x_disable_meta=True, disable_git=True
            ),
        )
        atomic_write(place, name)
    except Exception as error:  # noqa: BLE001  training goes on, whatever wandb raises
        print(redact_text(f"wandb is left out, WANDB_MODE=offline needs no network: {error}"))
        return None
    return run
