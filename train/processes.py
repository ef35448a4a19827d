"""The processes of a run: how they start, agree, wait for each other, and notice that one of them
has stopped.

A run that has begun and cannot go on raises `infer.utils.errors.Stopped`, one sentence, and leaves
with exit code 3.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from infer.targets.loading import resolve_device
from infer.utils.errors import STOPPED, Stopped, going_on
from infer.utils.interrupts import INTERRUPTS
from infer.utils.progress import HEARTBEAT

T = TypeVar("T")
PATIENCE = timedelta(
    days=1
)  # of a collective: packing keeps the others waiting; `StallWatch` is stricter


def own_device(device: str) -> torch.device:
    """Return this process's device. Raises ValueError where one GPU is named: DeepSpeed counts
    those that it sees."""
    kind, _, number = device.partition(":")
    if kind == "cuda" and number:
        raise ValueError(
            f"target.device={device}: training takes the GPUs it sees, give CUDA_VISIBLE_DEVICES={number}"
        )
    found = resolve_device(device)
    if found.type == "cuda":
        found = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(found)
    return found


def start_processes(device: torch.device) -> None:
    """Join the process group that torchrun announced, or found one of a single process."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # it would search, and warn
    import deepspeed

    # Otherwise DeepSpeed compiles a shared-memory operation on the CPU, and fails without ninja and
    # g++.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        alone = {
            "RANK": 0,
            "LOCAL_RANK": 0,
            "WORLD_SIZE": 1,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        os.environ.update({name: str(value) for name, value in alone.items()})
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        deepspeed.init_distributed(backend, verbose=False, timeout=PATIENCE)


def first_only(action: Callable[[], T]) -> T:
    """Let the first process do something while the others wait. All return what it returned, or
    raise the error that it raised, so that none waits for a process that has gone."""
    outcome: list = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except Exception as error:  # noqa: BLE001
            outcome[1] = error
    if dist.get_world_size() > 1:
        kind = type(
            outcome[1]
        )  # what crosses to other processes is plain: not every error can be sent
        if outcome[1] is not None and kind not in (Stopped, ValueError):
            print(f"error in the first process: {kind.__name__}: {outcome[1]}", file=sys.stderr)
            outcome[1] = Stopped(f"{kind.__name__}: {outcome[1]}")
        dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


@dataclass
class StopFlag:
    """Whether a signal asked the run to stop: `number` is the signal's."""

    number: int | None = None

    @property
    def name(self) -> str:
        """Return what the user knows the signal as."""
        if self.number is None:
            return "a signal to another process"
        return "Ctrl-C" if self.number == signal.SIGINT else signal.Signals(self.number).name


def catch_signals() -> StopFlag:
    """Let Ctrl-C, SIGTERM and SIGUSR1 (a scheduler's preemption) set a flag: the step ends, is
    saved, and the run stops with exit code 0, after Ctrl-C with 130. A second Ctrl-C stops at once,
    without saving."""
    flag = StopFlag()
    INTERRUPTS.graceful = 1

    def handler(number: int, frame: object) -> None:
        flag.number = number
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if os.environ.get("RANK", "0") == "0":
                alone = os.environ.get("WORLD_SIZE", "1") == "1"
                ends = (
                    "ending this step"
                    if alone
                    else "all processes end the same step within seconds"
                )
                os.write(2, f"\nCtrl-C: {ends}, then saving; once more stops at once\n".encode())

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, handler)
    return flag


def release_signals() -> None:
    """Give signals back the meaning that they have outside of a training run."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)


def agreed(values: Sequence[float], device: torch.device) -> list[float]:
    """Return the largest of all processes' values, of each: what one has to do, all do."""
    largest = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()


@contextmanager
def stopped_at_once(how: str) -> Iterator[None]:
    """Let Ctrl-C end the process at once within the block, where there is nothing to save; `how`
    says how to go on."""
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)
    graceful = INTERRUPTS.graceful
    INTERRUPTS.graceful = 0
    try:
        with going_on(how):
            yield
    finally:
        signal.signal(signal.SIGINT, ours)
        INTERRUPTS.graceful = graceful


class StallWatch(threading.Thread):
    """Ends a process in which nothing has gone on for `minutes`, and says what it was at: it may
    hang in a collective, a read or a sleep, and so do the others that wait for it. Time during
    which it was suspended does not count."""

    def __init__(self, minutes: float) -> None:
        super().__init__(daemon=True)
        self.minutes, self.tick = minutes, min(5.0, 6 * minutes)
        self.over = threading.Event()  # set: the watch ends
        self.start()

    def run(self) -> None:
        quiet = 0.0
        seen = None
        while not self.over.wait(self.tick):
            now = HEARTBEAT.what, HEARTBEAT.since
            quiet = quiet + self.tick if now == seen else 0.0
            seen = now
            if quiet > 60 * self.minutes:
                print(
                    f"error: rank {dist.get_rank()}: nothing has gone on for {self.minutes:g} minutes at "
                    f"{HEARTBEAT.what}; the same command goes on from the newest checkpoint (stall_minutes is how long "
                    "is waited)",
                    file=sys.stderr,
                    flush=True,
                )
                time.sleep(2 * self.tick)  # the others say what they are at, too
                os._exit(STOPPED)
