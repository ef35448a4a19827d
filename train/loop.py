"""The training loop, which trains a drafter for a frozen target. step.py computes a single step."""

import signal
import time
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path

import torch.distributed as dist

from data.packing import get_shuffled_index
from infer.utils.errors import RunAborted
from infer.utils.interrupts import EXIT_CODE_INTERRUPTED
from infer.utils.progress import HEARTBEAT
from train.batches import BatchPrefetcher
from train.config import TrainConfig
from train.engine import compute_micro_batch_sizes
from train.optim import set_learning_rate
from train.processes import (
    StallWatchdog,
    all_reduce_max,
    allow_immediate_interrupt,
    install_signal_handlers,
    restore_signal_handlers,
    run_on_first_process,
    select_device,
    start_process_group,
)
from train.run.checkpoints import checkpoint_folder, save_checkpoint, save_rolling_state
from train.run.evaluation import (
    evaluate_best_checkpoint_fully,
    evaluate_checkpoint,
    write_and_print_final_report,
)
from train.run.folder import open_run_folder
from train.run.log import RunLog, peak_memory_bytes, read_step_metrics
from train.run.prepare import prepare_run
from train.run.state import RunState, resolve_config
from train.step import train_step

# A step whose loss or gradient is not finite is skipped. The run ends after this number of skipped
# steps in a row.
MAX_CONSECUTIVE_SKIPPED_STEPS = 5
# maximum number of packed sequences that the message about a skipped step lists
MAX_ROWS_LISTED_FOR_SKIPPED_STEP = 16


def train(config: TrainConfig) -> Path:
    """Train a drafter as configured and return the run's folder.

    Raises ValueError or FileNotFoundError, before the first step, for invalid options or data.
    Raises RunAborted if a run that has started cannot continue.
    """
    device = select_device(config.target.device)
    start_process_group(device)
    # raises ValueError if the batch cannot be divided evenly among the processes
    compute_micro_batch_sizes(config, dist.get_world_size())
    config = resolve_config(config, device)
    with ExitStack() as stack:
        folder = run_on_first_process(lambda: stack.enter_context(open_run_folder(config)))
        run = prepare_run(config, device, folder)
        watchdog = StallWatchdog(config.stall_timeout_minutes)
        stack.callback(watchdog.stop_event.set)
        stack.callback(restore_signal_handlers)
        return run_steps(run)


def run_steps(run: RunState) -> Path:
    """Take all remaining training steps of a new or resumed run, save and evaluate its checkpoints,
    and return its folder."""
    config = run.config
    schedule = run.schedule
    log = RunLog(config, run.folder, schedule.completed_steps, schedule.estimated_steps)
    for line in run.notes:
        log.print_line(line)
    evaluate_interrupted_checkpoint(run, log)

    # Until now, Ctrl-C ended the process at once. From here on, it stops the run after a step.
    stop_flag = install_signal_handlers()
    steps = count(schedule.completed_steps)
    if config.optim.max_minutes is None:
        steps = range(schedule.completed_steps, schedule.estimated_steps)
    prefetcher = BatchPrefetcher(run.dataset, config, steps, pinned=run.device.type == "cuda")
    saved_at = time.perf_counter()
    skipped_steps = 0
    stop = False
    with closing(prefetcher):
        while not schedule.is_finished:
            metrics = run_step(run, prefetcher, log)
            step = metrics["step"]
            skipped_steps = count_consecutive_skips(run, metrics, skipped_steps, log)

            # All processes must take the same decisions: whether to stop, and whether to save. They
            # stop or save if at least one process wants to.
            minutes_since_save = (time.perf_counter() - saved_at) / 60
            save_due = (
                config.save_interval_minutes is not None
                and minutes_since_save > config.save_interval_minutes
            )
            stop, save_due, seconds = all_reduce_max(
                [stop_flag.signal_number is not None, save_due, metrics["seconds"]], run.device
            )
            checkpoint_due = schedule.advance(seconds)

            if checkpoint_due or save_due or stop:
                saved = save_run(run, checkpoint_due)
                # If the run stops now, the checkpoint is evaluated when the run is resumed.
                if checkpoint_due and not stop:
                    with allow_immediate_interrupt(
                        f"the checkpoint {saved} is complete; the same command evaluates it and "
                        "continues"
                    ):
                        evaluate_newest_checkpoint(run, log)
                saved_at = time.perf_counter()
            if stop:
                log.print_line(
                    f"The run was stopped by {stop_flag.signal_name} after step {step} and saved "
                    f"in {saved}. The same command continues from there"
                )
                break

    report_finished_run(run, log)
    if stop:  # the process exits, so that a sweep of several runs ends, too
        raise SystemExit(EXIT_CODE_INTERRUPTED if stop_flag.signal_number == signal.SIGINT else 0)
    return run.folder


def evaluate_interrupted_checkpoint(run: RunState, log: RunLog) -> None:
    """Evaluate the checkpoint from which a run is resumed, unless it already has an evaluation. It
    has none if the run was stopped before or during the evaluation."""
    folder = checkpoint_folder(run.folder, run.schedule.completed_steps)
    if folder.exists() and not (folder / "evaluation/evaluation.json").exists():
        evaluate_newest_checkpoint(run, log)


def run_step(run: RunState, prefetcher: BatchPrefetcher, log: RunLog) -> dict:
    """Take the next training step, write its metrics to the log, and return them.

    Keys of the returned dictionary are, for example, "step" (counted from 1), "loss" and "lr".
    """
    config = run.config
    schedule = run.schedule
    step = schedule.completed_steps + 1
    use_processor_time = run.device.type == "cpu" and config.optim.clock == "processor"
    schedule_clock = time.thread_time if use_processor_time else time.perf_counter
    start_time = time.perf_counter()
    schedule_start = schedule_clock()

    HEARTBEAT.set_activity(f"training: step {step}, reading its packed sequences")
    micro_batches = prefetcher.next_step()
    HEARTBEAT.set_activity(f"training: step {step}")
    rate = schedule.learning_rate
    assert run.engine.optimizer is not None
    set_learning_rate(run.engine.optimizer, rate)
    metrics = train_step(run.drafter, run.engine, run.target, micro_batches, config)
    metric_values = metrics.to_json()  # waits until the device has finished the step

    tokens = config.optim.batch_size * config.data.length
    line = {
        "step": step,
        "seconds": schedule.completed_seconds + schedule_clock() - schedule_start,
        "lr": rate,
        "tokens_per_second": tokens / (time.perf_counter() - start_time),
        "peak_gb": peak_memory_bytes(run.device) / 1e9,
        **metric_values,
    }
    log.total_steps = schedule.estimated_steps
    log.write_step(line)
    return line


def count_consecutive_skips(run: RunState, metrics: dict, skipped_before: int, log: RunLog) -> int:
    """Return how many steps in a row were skipped, up to and including the newest step. Return 0 if
    the newest step was not skipped.

    A step is skipped if its loss or gradient is not finite; `metrics["grad_norm"]` is then None.

    metrics: the metrics of the newest step, from `run_step`. skipped_before: the result of this
    function for the step before the newest one.

    If the newest step was skipped, the indices of its packed sequences are printed. Raises
    RunAborted if MAX_CONSECUTIVE_SKIPPED_STEPS steps in a row were skipped.
    """
    if metrics["grad_norm"] is not None:
        return 0
    step = metrics["step"]
    batch = run.config.optim.batch_size
    rows = []
    for i in range(min(batch, MAX_ROWS_LISTED_FOR_SKIPPED_STEP)):
        index = (step - 1) * batch + i
        rows.append(str(get_shuffled_index(index, len(run.dataset), run.config.seed)))
    subject = "loss and gradient are" if metrics["loss"] is None else "gradient is"
    message = (
        f"step {step} is skipped, because its {subject} not finite. The step used these packed "
        f"sequences of the training data: {', '.join(rows)}"
    )
    skipped = skipped_before + 1
    if skipped == MAX_CONSECUTIVE_SKIPPED_STEPS:
        raise RunAborted(
            f"{message}. {skipped} steps in a row were skipped, so the run ends. A skipped step "
            "does not change weights and optimiser state. Try optim.precision=float32, a lower "
            "optim.lr, or other data"
        )
    log.print_line(message)
    return skipped


def save_run(run: RunState, is_checkpoint: bool) -> Path:
    """Save the run after its last completed step, and return the folder that was written.

    is_checkpoint: whether to save a checkpoint: the drafter and the training state. Otherwise only
    the training state is saved, from which the run can be resumed.
    """
    step = run.schedule.completed_steps
    HEARTBEAT.set_activity(f"training: step {step}, saving")
    if is_checkpoint:
        return save_checkpoint(run.folder, step, run.drafter, run.engine, run.decoding_dtype)
    return save_rolling_state(run.folder, step, run.drafter, run.engine)


def evaluate_newest_checkpoint(run: RunState, log: RunLog) -> None:
    """Decode held-out prompts with the newest checkpoint, and add the results to the run's report.
    After the run's last step, also evaluate the best checkpoint."""
    if not run.config.evaluation.prompts:
        return
    step = run.schedule.completed_steps
    is_last = run.schedule.is_finished
    HEARTBEAT.set_activity(f"evaluating step {step}")
    evaluate_checkpoint(run, checkpoint_folder(run.folder, step), log, is_last)
    if is_last:
        evaluate_best_checkpoint_fully(run, log)


def report_finished_run(run: RunState, log: RunLog) -> None:
    """Print how many steps of the run were skipped, and write the run's final report."""
    log.progress.end_open_line()
    skipped_steps = 0
    if dist.get_rank() == 0:
        skipped_steps = sum(line["grad_norm"] is None for line in read_step_metrics(run.folder))
    if skipped_steps:
        log.print_line(
            f"{skipped_steps} of {run.schedule.completed_steps} steps were skipped, because their "
            "loss or gradient was not finite"
        )
    run_on_first_process(lambda: write_and_print_final_report(run.folder, log))
    dist.barrier()
