"""The processes of a training run: their start, values that all processes share, signals, and a
watchdog that ends a process without progress.

If a run has started and cannot continue, `infer.utils.errors.RunAborted` is raised with a message
for the user, and the process exits with code 3.
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
from infer.utils.errors import EXIT_CODE_RUN_ABORTED, RunAborted, set_interrupt_message
from infer.utils.interrupts import INTERRUPT_WATCHER
from infer.utils.progress import HEARTBEAT

Result = TypeVar("Result")
# This timeout is long, because all processes wait while one of them prepares the data.
# `StallWatchdog` ends a run without progress earlier.
COLLECTIVE_TIMEOUT = timedelta(days=1)
MAX_WATCHDOG_INTERVAL_SECONDS = 5.0


def select_device(device: str) -> torch.device:
    """Return the device of this training process, and make it the current device if it is a GPU.

    device: the value of the option target.device. Raises ValueError for a GPU with a number, for
    example cuda:1, because training uses all visible GPUs.
    """
    device_type, _, number = device.partition(":")
    if device_type == "cuda" and number:
        raise ValueError(
            f"target.device={device} is not allowed, because training uses all visible GPUs: use "
            f"target.device=cuda and set the environment variable CUDA_VISIBLE_DEVICES={number}"
        )
    resolved = resolve_device(device)
    if resolved.type == "cuda":
        resolved = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(resolved)
    return resolved


def start_process_group(device: torch.device) -> None:
    """Initialise torch.distributed. A process that torchrun started joins torchrun's process group;
    any other process becomes a group of one. device: the device of this process."""
    if device.type == "cpu":
        # Without this variable, DeepSpeed searches for an accelerator and prints a warning.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    # Without this entry, DeepSpeed compiles a shared-memory operation for CPUs, and the compilation
    # fails if ninja or g++ is not installed.
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
    """Call `action` in the first process only, and return its result in all processes.

    All processes must call this function together. If `action` raises an error, all processes raise
    an error. If only the first process raised it, the other processes would wait for this process
    forever.
    """
    outcome: list = [None, None]  # [result of `action`, error that `action` raised]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except Exception as error:  # noqa: BLE001
            outcome[1] = error
    if dist.get_world_size() > 1:
        # Not every exception can be pickled. RunAborted and ValueError can. An error of any other
        # type is sent as a RunAborted that contains its description.
        error = outcome[1]
        if error is not None and type(error) not in (RunAborted, ValueError):
            description = f"{type(error).__name__}: {error}"
            print(f"error in the process of rank 0: {description}", file=sys.stderr)
            outcome[1] = RunAborted(description)
        dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


@dataclass
class StopFlag:
    """Records the signal (for example Ctrl-C) that asked the training run to stop. `signal_number`
    is None until this process receives a signal."""

    signal_number: int | None = None

    @property
    def signal_name(self) -> str:
        """The name of the signal for a message, for example Ctrl-C or SIGTERM."""
        if self.signal_number is None:
            return "a signal to another process"
        if self.signal_number == signal.SIGINT:
            return "Ctrl-C"
        return signal.Signals(self.signal_number).name


def install_signal_handlers() -> StopFlag:
    """Install signal handlers with which Ctrl-C, SIGTERM and SIGUSR1 stop a training run after the
    current step. Return the flag that the handlers set.

    The training loop must read the flag after each step. If it is set, the loop saves the run and
    exits with code 0, or with code 130 after Ctrl-C. A second Ctrl-C stops the run at once, without
    saving. Cluster schedulers send SIGTERM or SIGUSR1 before they preempt a job.
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
            plan = "the current step is finished"
        else:
            plan = "all processes finish the same step within seconds"
        message = (
            f"\nCtrl-C: {plan}, then the run is saved. Press Ctrl-C again to stop at once, "
            "without saving\n"
        )
        os.write(2, message.encode())

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, handle_signal)
    return flag


def restore_signal_handlers() -> None:
    """Restore Python's default handlers of Ctrl-C, SIGTERM and SIGUSR1."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)


def all_reduce_max(values: Sequence[float], device: torch.device) -> list[float]:
    """Return the element-wise maximum of `values` over all processes. All processes get the same
    result, so that decisions based on it are the same."""
    largest = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()


@contextmanager
def allow_immediate_interrupt(advice: str) -> Generator[None]:
    """Within the `with` block, let Ctrl-C end the process at once instead of after the current
    training step. Use this block where nothing has to be saved.

    advice: a sentence that tells the user how to continue. It is printed after Ctrl-C.
    """
    previous_handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    graceful = INTERRUPT_WATCHER.interrupts_to_ignore
    INTERRUPT_WATCHER.interrupts_to_ignore = 0
    try:
        with set_interrupt_message(advice):
            yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)
        INTERRUPT_WATCHER.interrupts_to_ignore = graceful


class StallWatchdog(threading.Thread):
    """A thread that prints an error and ends the process if the process has made no progress for
    `minutes`.

    Without this thread, a process that hangs in a collective operation or in a read would let all
    other processes wait forever. Time in which the process was suspended does not count. Set
    `stop_event` to end the thread.
    """

    def __init__(self, minutes: float) -> None:
        super().__init__(daemon=True)
        self.minutes = minutes
        self.interval_seconds = min(MAX_WATCHDOG_INTERVAL_SECONDS, 6 * minutes)
        self.stop_event = threading.Event()
        self.start()

    def run(self) -> None:
        """Check at regular intervals whether HEARTBEAT (the record of the process's last activity)
        has changed. End the process if it has not changed for `minutes`."""
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
        """Print the process's last activity, and end the process with exit code 3."""
        print(
            f"error: the process of rank {dist.get_rank()} has made no progress for "
            f"{self.minutes:g} minutes (stall_timeout_minutes). Its last activity is "
            f"'{HEARTBEAT.activity}'. The same command continues from the newest checkpoint",
            file=sys.stderr,
            flush=True,
        )
        # Wait, so that the watchdogs of the other processes can print their messages first.
        time.sleep(2 * self.interval_seconds)
        os._exit(EXIT_CODE_RUN_ABORTED)
