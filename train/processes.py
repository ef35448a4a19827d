"""The processes of a run: start, collective decisions, signals, and a watchdog for stalls.

A run that has started and cannot continue raises `infer.utils.errors.RunAborted` with one sentence,
and exits with code 3.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from infer.targets.loading import resolve_device
from infer.utils.errors import EXIT_CODE_RUN_ABORTED, RunAborted, explain_interrupt
from infer.utils.interrupts import INTERRUPT_WATCHER
from infer.utils.progress import HEARTBEAT

Result = TypeVar("Result")
# Long, because the other processes wait while one prepares the data; `StallWatchdog` is stricter.
COLLECTIVE_TIMEOUT = timedelta(days=1)
MAX_WATCHDOG_INTERVAL_SECONDS = 5.0


def select_device(device: str) -> torch.device:
    """Return this process's device. Raises ValueError for a GPU with a number, because DeepSpeed
    uses all visible GPUs."""
    device_type, _, number = device.partition(":")
    if device_type == "cuda" and number:
        raise ValueError(
            f"target.device={device}: training uses all visible GPUs; set "
            f"CUDA_VISIBLE_DEVICES={number} instead"
        )
    resolved = resolve_device(device)
    if resolved.type == "cuda":
        resolved = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(resolved)
    return resolved


def start_process_group(device: torch.device) -> None:
    """Join torchrun's process group, or create a group of a single process."""
    if device.type == "cpu":
        # otherwise DeepSpeed searches for an accelerator and prints a warning
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    # Otherwise DeepSpeed compiles a shared-memory operation on a CPU, which fails without ninja and
    # g++.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            free_port = probe.getsockname()[1]
        os.environ.update(
            {
                "RANK": "0",
                "LOCAL_RANK": "0",
                "WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(free_port),
            }
        )
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        deepspeed.init_distributed(backend, verbose=False, timeout=COLLECTIVE_TIMEOUT)


def run_on_first_process(action: Callable[[], Result]) -> Result:
    """Call a function in the first process and return its result in all processes.

    If it raises an error, all processes raise one, so that none waits for a process that has ended.
    """
    outcome: list = [None, None]  # result, error
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except Exception as error:  # noqa: BLE001
            outcome[1] = error
    if dist.get_world_size() > 1:
        # not every exception can be pickled: other types are sent as Stopped
        error = outcome[1]
        if error is not None and type(error) not in (RunAborted, ValueError):
            description = f"{type(error).__name__}: {error}"
            print(f"error in the first process: {description}", file=sys.stderr)
            outcome[1] = RunAborted(description)
        dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


@dataclass
class StopFlag:
    """Set by a signal that asks the run to stop."""

    signal_number: int | None = None

    @property
    def signal_name(self) -> str:
        """The signal's name as users know it."""
        if self.signal_number is None:
            return "a signal to another process"
        if self.signal_number == signal.SIGINT:
            return "Ctrl-C"
        return signal.Signals(self.signal_number).name


def install_signal_handlers() -> StopFlag:
    """Let Ctrl-C, SIGTERM and SIGUSR1 (a scheduler's preemption) stop the run after the current
    step; return the flag that they set.

    The run is then saved and exits with code 0, or 130 after Ctrl-C. A second Ctrl-C stops at once,
    without saving.
    """
    flag = StopFlag()
    INTERRUPT_WATCHER.interrupts_to_ignore = 1

    def handle_signal(number: int, frame: object) -> None:
        flag.signal_number = number
        if number != signal.SIGINT:
            return
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if os.environ.get("RANK", "0") != "0":
            return
        if os.environ.get("WORLD_SIZE", "1") == "1":
            plan = "this step is finished"
        else:
            plan = "all processes finish the same step within seconds"
        message = f"\nCtrl-C: {plan}, then the run is saved; press it again to stop at once\n"
        os.write(2, message.encode())

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, handle_signal)
    return flag


def restore_signal_handlers() -> None:
    """Restore the default signal handlers."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)


def all_reduce_max(values: Sequence[float], device: torch.device) -> list[float]:
    """Return, for each value, the largest one of all processes, so that all decide alike."""
    largest = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()


@contextmanager
def allow_immediate_interrupt(advice: str) -> Generator[None]:
    """Within the block, let Ctrl-C end the process at once, because there is nothing to save.

    advice: printed then; how to continue.
    """
    previous_handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    graceful = INTERRUPT_WATCHER.interrupts_to_ignore
    INTERRUPT_WATCHER.interrupts_to_ignore = 0
    try:
        with explain_interrupt(advice):
            yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)
        INTERRUPT_WATCHER.interrupts_to_ignore = graceful


class StallWatchdog(threading.Thread):
    """End the process if it has made no progress for `minutes`, and print what it was doing.

    A process can hang in a collective, a read or a sleep, and all other processes then wait for it.
    Time in which the process was suspended does not count. Set `stop_event` to end the watchdog.
    """

    def __init__(self, minutes: float) -> None:
        super().__init__(daemon=True)
        self.minutes = minutes
        self.interval_seconds = min(MAX_WATCHDOG_INTERVAL_SECONDS, 6 * minutes)
        self.stop_event = threading.Event()
        self.start()

    def run(self) -> None:
        """Compare the heartbeat with the previous one at every interval."""
        stalled_seconds = 0.0
        previous_heartbeat = None
        while not self.stop_event.wait(self.interval_seconds):
            heartbeat = (HEARTBEAT.activity, HEARTBEAT.since)
            if heartbeat == previous_heartbeat:
                stalled_seconds += self.interval_seconds
            else:
                stalled_seconds = 0.0
            previous_heartbeat = heartbeat
            if stalled_seconds > 60 * self.minutes:
                self.end_process()

    def end_process(self) -> None:
        """Print what the process was doing and end it with exit code 3."""
        print(
            f"error: rank {dist.get_rank()}: no progress for {self.minutes:g} minutes "
            "(stall_minutes) at "
            f"{HEARTBEAT.activity}; the same command continues from the newest checkpoint",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(2 * self.interval_seconds)  # the other processes print their state, too
        os._exit(EXIT_CODE_RUN_ABORTED)
