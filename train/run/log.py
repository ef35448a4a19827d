"""Log the metrics of a training run to metrics.jsonl (one line of JSON per step), to the terminal,
and to Weights & Biases (wandb)."""

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
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist

from infer.evaluation.results import Evaluation
from infer.utils.errors import abort_on_write_error
from infer.utils.files import atomic_write
from infer.utils.progress import Progress
from infer.utils.redact import redact, redact_text
from train.config import TrainConfig

if TYPE_CHECKING:
    import wandb

METRICS_FILE = "metrics.jsonl"
WANDB_ID_FILE = "wandb_id"  # the id with which a resumed run continues the same wandb run
# The first estimate of the remaining time is printed after this number of steps, or after a third
# of the run if a third is shorter.
STEPS_BEFORE_FIRST_TIME_ESTIMATE = 12


def finite_or_none(value: float) -> float | None:
    """Return the value, or None if it is infinite or NaN, because JSON has no such numbers."""
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of one training step, combined over all processes. They are tensors on the
    device, so reading a value waits until the device has computed it."""

    loss: torch.Tensor  # scalar: weighted mean of the training loss per token, in nats
    # of shape (drafted positions per block,): for each position, the share of training tokens for
    # which drafter and target choose the same token
    agreement: torch.Tensor
    # scalar: how many draft tokens from the start of a block match the target's choice, plus one
    # for the bonus token; mean over blocks. This is the acceptance length on the training texts.
    acceptance_length: torch.Tensor
    grad_norm: torch.Tensor  # scalar: gradient norm before clipping; NaN if the step was skipped

    def to_json(self) -> dict:
        """Return the metrics as values for JSON. A loss or norm that is not finite becomes None."""
        return {
            "loss": finite_or_none(self.loss.item()),
            "prefix": self.acceptance_length.item(),
            "agreement": self.agreement.tolist(),
            "grad_norm": finite_or_none(self.grad_norm.item()),
        }


class RunLog:
    """Writes a run's metrics to the run's folder, to the terminal, and to wandb. Only the first
    process writes. An error of wandb does not stop the run.

    completed_steps: number of steps completed before the run was resumed, 0 for a new run.
    total_steps: number of steps of the whole run.
    """

    def __init__(
        self, config: TrainConfig, folder: Path, completed_steps: int, total_steps: int
    ) -> None:
        self.name = config.name
        self.folder = folder
        self.completed_steps = completed_steps
        self.total_steps = total_steps
        self.is_first_process = dist.get_rank() == 0
        self.progress = Progress(
            "training", "steps", completed_steps, not self.is_first_process, sys.stdout
        )
        self.wandb_run = None
        if config.wandb and self.is_first_process:
            self.wandb_run = start_wandb(config, folder)

    def print_line(self, text: str) -> None:
        """Print a line that stays on the screen, above the progress line that is rewritten."""
        self.progress.print_line(text)

    def call_wandb(self, action: "Callable[[wandb.Run], object]") -> None:
        """Call `action` with the wandb run, if there is one. If `action` fails, print the error and
        stop using wandb."""
        if self.wandb_run is None:
            return
        try:
            action(self.wandb_run)
        except Exception as error:  # noqa: BLE001
            print(redact_text(f"wandb failed ({error}) and is not used from now on"))
            self.wandb_run = None

    def write_step(self, line: dict) -> None:
        """Write the metrics of one step to metrics.jsonl and wandb, and update the progress line.

        line: keys are names of metrics, as in metrics.jsonl
        """
        if not self.is_first_process:
            return
        with (
            abort_on_write_error(f"{self.folder}/{METRICS_FILE}"),
            (self.folder / METRICS_FILE).open("a") as log,
        ):
            log.write(json.dumps(line) + "\n")

        wandb_metrics = {}
        for key, value in line.items():
            if key != "agreement" and value is not None:
                wandb_metrics[key] = value
        for i, share in enumerate(line["agreement"]):
            wandb_metrics[f"agreement/{i + 1}"] = share
        self.call_wandb(lambda run: run.log(wandb_metrics, step=line["step"]))

        steps_since_start = line["step"] - self.completed_steps
        steps_of_start = self.total_steps - self.completed_steps
        if steps_since_start == min(STEPS_BEFORE_FIRST_TIME_ESTIMATE, max(2, steps_of_start // 3)):
            # `Progress` prints a line at intervals. This makes it print one now.
            self.progress.last_line_time = 0.0
        self.progress(line["step"], self.total_steps, format_metrics(line))

    def log_evaluation_to_wandb(self, evaluation: Evaluation) -> None:
        """Log the acceptance lengths and speedups of an evaluation to wandb."""
        metrics = {}
        for method in evaluation.methods:
            name = f"{method.name}{method.budget or ''}"
            metrics[f"tau/{name}"] = method.tau
            metrics[f"speedup/{name}"] = method.speedup

        def log_and_summarise(run: "wandb.Run") -> None:
            run.log(metrics, step=evaluation.step)
            run.summary.update(metrics)

        self.call_wandb(log_and_summarise)

    def finish_wandb_run(self, report_page: Path | None) -> None:
        """Upload the report to wandb and end the wandb run. report_page: the report's HTML file,
        None if there is no report."""

        def upload_and_finish(run: "wandb.Run") -> None:
            import wandb

            if report_page is not None:
                html = wandb.Html(report_page.read_text(encoding="utf-8"), inject=False)
                run.log({"report": html})
            run.finish()

        self.call_wandb(upload_and_finish)


def format_metrics(line: dict) -> str:
    """Return a step's metrics as text for the progress line."""
    agreement = " ".join(f"{100 * share:.0f}" for share in line["agreement"][:8])
    loss = "not finite" if line["loss"] is None else f"{line['loss']:.3f}"
    return (
        f"loss {loss}, agreement by position {agreement} %, batch τ {line['prefix']:.2f}, "
        f"{line['tokens_per_second']:,.0f} tokens/s"
    )


def read_step_metrics(run: Path) -> list[dict]:
    """Return the metrics of all logged steps of a run: one dictionary per line of metrics.jsonl."""
    file = run / METRICS_FILE
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def trim_step_metrics(path: Path, step: int) -> None:
    """Remove from metrics.jsonl the lines of steps after `step`, and a partially written last line.

    path: the file metrics.jsonl. A resumed run takes the steps after `step` again.
    """
    if not path.exists():
        return
    lines = []
    for line in path.read_text().splitlines():
        with suppress(ValueError, KeyError):  # the last line may be written only partially
            if json.loads(line)["step"] <= step:
                lines.append(line)
    with abort_on_write_error(str(path)):
        atomic_write(path, "".join(line + "\n" for line in lines))


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory use of this process since its start, in bytes. On a GPU, only the
    memory that PyTorch allocated on it counts; on the CPU, the memory of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # macOS reports bytes, Linux KiB


def start_wandb(config: TrainConfig, folder: Path) -> "wandb.Run | None":
    """Start a wandb run and return it; return None if wandb cannot start. Without an API key, wandb
    runs offline.

    A resumed training run continues its earlier wandb run. The configuration is sent without
    secrets. The command line and printed text are not sent.
    """
    import wandb

    has_key = bool(os.environ.get("WANDB_API_KEY") or wandb.api.api_key)
    default_mode = "online" if has_key else "offline"
    mode = cast(
        "Literal['online', 'offline', 'disabled', 'shared']",
        os.environ.get("WANDB_MODE") or default_mode,
    )
    id_file = folder / WANDB_ID_FILE
    run_id = id_file.read_text() if id_file.exists() else token_hex(4)
    # wandb can continue only an online run. If an offline run is resumed, `wandb sync --append`
    # joins its parts later.
    resume: Literal["allow"] | None = "allow" if mode == "online" else None
    try:
        run = wandb.init(
            id=run_id,
            resume=resume,
            project=os.environ.get("WANDB_PROJECT", "blockdraft"),
            name=redact_text(config.name),
            dir=str(folder),
            config=cast(dict[str, Any], redact(asdict(config))),
            mode=mode,
            settings=wandb.Settings(
                silent=True, console="off", x_disable_meta=True, disable_git=True
            ),
        )
        atomic_write(id_file, run_id)
    except Exception as error:  # noqa: BLE001  an error of wandb must not stop training
        message = (
            f"wandb could not be started and is not used ({error}). With the environment variable "
            "WANDB_MODE=offline, wandb needs no network"
        )
        print(redact_text(message))
        return None
    return run
