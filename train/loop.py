"""The training loop: frozen target in, trained drafter out. One step of it: step.py."""

import signal
import time
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path

import torch.distributed as dist

from data.packing import row_index
from infer.utils.errors import Stopped
from infer.utils.interrupts import INTERRUPTED
from infer.utils.progress import HEARTBEAT
from train.batches import Prefetch
from train.config import TrainConfig
from train.engine import micro_batch
from train.optim import set_rate
from train.processes import (
    StallWatch,
    agreed,
    catch_signals,
    first_only,
    own_device,
    release_signals,
    start_processes,
    stopped_at_once,
)
from train.run.checkpoints import checkpoint_folder, save
from train.run.evaluation import evaluate_best, evaluate_checkpoint, finish_report
from train.run.folder import open_run
from train.run.log import RunLog, peak_memory, read_log
from train.run.prepare import prepare_run
from train.run.state import RunState, settled
from train.step import train_step

MOST_SKIPPED = 5  # steps in a row with a loss or gradient that is not finite; that many end the run


def train(config: TrainConfig) -> Path:
    """Train a drafter from a checked configuration; return the run's folder.

    Raises ValueError or FileNotFoundError with a sentence for what the user can mend before
    anything is begun, Stopped for what ends a run that was begun.
    """
    device = own_device(config.target.device)
    start_processes(device)
    micro_batch(config, dist.get_world_size())  # raises if the rows cannot be shared evenly
    config = settled(config, device)
    with ExitStack() as held:
        folder = first_only(lambda: held.enter_context(open_run(config)))
        run = prepare_run(config, device, folder)
        held.callback(StallWatch(config.stall_timeout_minutes).over.set)
        held.callback(release_signals)
        return run_steps(run)


def run_steps(run: RunState) -> Path:
    """Take the remaining steps, with their log, checkpoints and evaluations; return the run's
    folder."""
    course = run.course
    log = RunLog(run.config, run.folder, course.step, course.total)
    for line in run.notes:
        log.say(line)
    here = checkpoint_folder(run.folder, course.step)
    if here.exists() and not (here / "evaluation/evaluation.json").exists():
        evaluate(run, log)  # the run was stopped between saving and evaluating
    stopping = catch_signals()  # until here Ctrl-C ends the run at once
    steps = (
        range(course.step, course.total) if course.optim.max_minutes is None else count(course.step)
    )
    ahead = Prefetch(run.dataset, run.config, steps, pinned=run.device.type == "cuda")
    saved_at = time.perf_counter()
    skipped = 0
    stop = False
    with closing(ahead) as prefetch:
        while not course.over:
            metrics = take_one(run, prefetch, log)
            step = metrics["step"]
            skipped = count_skipped(run, step, metrics, skipped, log)
            minutes = (time.perf_counter() - saved_at) / 60
            due = (
                run.config.save_interval_minutes is not None
                and minutes > run.config.save_interval_minutes
            )
            stop, save_due, spent = agreed(
                [stopping.number is not None, due, metrics["seconds"]], run.device
            )
            whole = course.advance(spent)
            if whole or stop or save_due:
                HEARTBEAT.at(f"training: step {step}, saving")
                saved = save(
                    run.folder, step, run.drafter, run.engine, run.dtype if whole else None
                )
                if whole and not stop:  # else the same command evaluates it
                    with stopped_at_once(
                        f"{saved} is whole, and the same command evaluates it and goes on from there"
                    ):
                        evaluate(run, log)
                saved_at = time.perf_counter()
            if stop:
                how = f"saved {saved}; the same command goes on from there"
                log.say(f"stopped by {stopping.name} after step {step}; {how}")
                break
    finish(run, log)
    if stop:  # a sweep ends with it
        raise SystemExit(INTERRUPTED if stopping.number == signal.SIGINT else 0)
    return run.folder


def take_one(run: RunState, prefetch: Prefetch, log: RunLog) -> dict:
    """Take a step, counted from 1, and write its line; return that."""
    began = time.perf_counter()
    config = run.config
    course = run.course
    step = course.step + 1
    processor_time = run.device.type == "cpu" and config.optim.clock == "processor"
    clock = time.thread_time if processor_time else time.perf_counter
    before = clock()
    HEARTBEAT.at(f"training: step {step}, reading its rows")
    rows = prefetch()
    HEARTBEAT.at(f"training: step {step}")
    rate = set_rate(run.engine.optimizer, course.rate)
    numbers = train_step(run.drafter, run.engine, run.target, rows, config).numbers()
    speed = config.optim.batch_size * config.data.length / (time.perf_counter() - began)
    cost = {"tokens_per_second": speed, "peak_gb": peak_memory(run.device) / 1e9}
    line = {
        "step": step,
        "seconds": course.seconds + clock() - before,
        "lr": rate,
        **cost,
        **numbers,
    }
    log.total = course.total
    log.step(line)
    return line


def count_skipped(run: RunState, step: int, line: dict, before: int, log: RunLog) -> int:
    """Return how many steps were skipped in a row, `before` up to the last one, and name the rows
    of this one if it was. Raises Stopped after too many."""
    if line["grad_norm"] is not None:
        return 0
    first = (step - 1) * run.config.optim.batch_size
    count = run.config.optim.batch_size
    shown = [
        str(row_index(first + i, len(run.dataset), run.config.seed)) for i in range(min(count, 16))
    ]
    which = "loss and gradient are" if line["loss"] is None else "gradient is"
    what = f"step {step} is skipped: its {which} not finite; its rows of the training set are {', '.join(shown)}"
    if before + 1 == MOST_SKIPPED:
        raise Stopped(
            f"{what}. That were {MOST_SKIPPED} in a row; weights and moments are as they were before the first of "
            "them: optim.precision=float32, a lower optim.lr or other data may help"
        )
    log.say(what)
    return before + 1


def evaluate(run: RunState, log: RunLog) -> None:
    """Decode held-out prompts with the checkpoint of the step that was taken, and update the
    report."""
    step = run.course.step
    over = run.course.over
    if not run.config.evaluation.prompts:
        return
    HEARTBEAT.at(f"evaluating step {step}")
    evaluate_checkpoint(run, checkpoint_folder(run.folder, step), log, last=over)
    if over:
        evaluate_best(run, log)


def finish(run: RunState, log: RunLog) -> None:
    """Report skipped steps and write the last report."""
    log.progress.close()
    lost = (
        sum(line["grad_norm"] is None for line in read_log(run.folder))
        if dist.get_rank() == 0
        else 0
    )
    if lost:
        log.say(
            f"{lost} of {run.course.step} steps were skipped, as their loss or gradient was not finite"
        )
    first_only(lambda: finish_report(run.folder, log))
    dist.barrier()
