"""The processes of a run: how they start, agree, wait for each other, and notice that one of them has stopped.

A run that has begun and cannot go on raises `infer.utils.entry.Stopped`, one sentence, and leaves with exit code 3.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from infer.utils.entry import STOPPED, Stopped, going_on
from infer.utils.interrupts import INTERRUPTS
from infer.utils.progress import HEARTBEAT
from infer.utils.redact import redact_text

T = TypeVar("T")
PATIENCE = timedelta(
    days=1
)  # of a collective: packing a large data set keeps the others waiting; `StallWatch` is stricter
BETWEEN = 3.0  # seconds, about, until processes agree again


def own_gpu(device: str) -> str:
    """Where `device` names one GPU, cuda:1, show this process that one only, and return cuda: DeepSpeed counts its GPUs
    by ranks. Raises ValueError for a GPU that there is not, and for several processes, which would all ask for the same
    one."""
    kind, _, number = device.partition(":")
    if kind != "cuda" or not number:
        return device
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError(
            f"target.device={device}: several processes take a GPU each; leave it away, or start one, "
            "NPROC=1 ./launch.sh ..."
        )
    count = torch.cuda.device_count()  # reads no more than a list: CUDA itself is not initialised yet
    if int(number) >= count > 0:
        raise ValueError(f"target.device={device}: there are {count} GPUs, counted from 0")
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = seen.split(",")[int(number)] if seen and count else number
    return kind


def start_processes(device: torch.device) -> None:
    """Join the process group that torchrun announced, or found one of a single process."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # it would search, and warn
    import deepspeed

    # Otherwise DeepSpeed compiles a shared-memory operation on the CPU, and fails without ninja and g++.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in alone.items()})
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        deepspeed.init_distributed(backend, verbose=False, timeout=PATIENCE)


def first_only(action: Callable[[], T]) -> T:
    """Let the first process do something while the others wait. All return what it returned, or raise the error that
    it raised, so that none waits for a process that has gone."""
    outcome: list = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except Exception as error:  # noqa: BLE001
            outcome[1] = error
    if dist.get_world_size() > 1:
        kind = type(outcome[1])  # what crosses to other processes is plain: not every error can be sent
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
    def is_set(self) -> bool:
        return self.number is not None

    @property
    def name(self) -> str:
        """Return what the user knows the signal as."""
        if self.number is None:
            return "a signal to another process"
        return "Ctrl-C" if self.number == signal.SIGINT else signal.Signals(self.number).name


def catch_signals() -> StopFlag:
    """Let Ctrl-C, SIGTERM and SIGUSR1 (a scheduler's preemption) set a flag: the step ends, is saved, and the run stops
    with exit code 0, after Ctrl-C with 130. A second Ctrl-C stops at once, without saving."""
    flag = StopFlag()
    INTERRUPTS.graceful = 1

    def handler(number: int, frame: object) -> None:
        flag.number = number
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if os.environ.get("RANK", "0") == "0":
                alone = os.environ.get("WORLD_SIZE", "1") == "1"
                ends = "ending this step" if alone else "all processes end the same step within seconds"
                os.write(2, f"\nCtrl-C: {ends}, then saving; once more stops at once\n".encode())

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, handler)
    return flag


class Agreed(NamedTuple):
    """What all processes do after the same step."""

    stop: bool
    save: bool


class Meetings:
    """The steps after which processes agree what to do: every few seconds, and at most `most` steps apart, as it takes
    a synchronisation. One process alone decides after every step."""

    def __init__(self, done: int, most: int, device: torch.device) -> None:
        """done: steps of the run so far."""
        self.last, self.met, self.most, self.device = done, time.monotonic(), most, device
        self.next = done + 1

    def due(self, step: int) -> bool:
        """Whether the processes agree after this step: the same in all of them."""
        return step >= self.next

    def agree(self, step: int, stop: bool, save: bool) -> Agreed:
        """Let all processes stop if one was asked to, and save if it is due in the first."""
        self.next = step + 1
        if dist.get_world_size() == 1:
            return Agreed(stop, save)
        now, first = time.monotonic(), dist.get_rank() == 0
        apart = min(self.most, 1 + int(BETWEEN * (step - self.last) / max(now - self.met, 1e-6)))
        flags = torch.tensor([float(stop), float(save and first), float(apart * first)], device=self.device)
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        stops, saves, apart = flags.tolist()
        self.last, self.met, self.next = step, now, step + int(apart)
        return Agreed(bool(stops), bool(saves))


@contextmanager
def stopped_at_once(how: str) -> Iterator[None]:
    """Let Ctrl-C end the process at once within the block, where there is nothing to save; `how` says how to go on."""
    ours, graceful = signal.signal(signal.SIGINT, signal.default_int_handler), INTERRUPTS.graceful
    INTERRUPTS.graceful = 0
    try:
        with going_on(how):
            yield
    finally:
        signal.signal(signal.SIGINT, ours)
        INTERRUPTS.graceful = graceful


class StallWatch(threading.Thread):
    """Ends the run when no process reports progress for `minutes`, and names the process that the others wait for.

    Each process reports its phase. A thread passes that on to the store that founded the process group, once a tick,
    and measures for how long there was nothing to pass on; a process that hangs in a collective, a read or a sleep is
    noticed whatever the backend. Time during which the whole process was suspended does not count.
    """

    def __init__(self, minutes: float) -> None:
        super().__init__(daemon=True)
        self.limit = 60 * minutes
        self.tick = min(5.0, self.limit / 10)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.place = (0, 0, "starting")
        self.over = threading.Event()
        self.store = None
        if self.world > 1:
            self.store = dist.distributed_c10d._get_default_store().clone()  # a connection of its own
            self.store.set(f"place/{self.rank}", repr(self.place))
        self.start()

    def begin_step(self, step: int, phase: str) -> None:
        """Report that this process begins a step, counted from 1, with its first phase."""
        self.place = (step - 1, 0, phase)
        HEARTBEAT.at(f"training: step {step}, {phase}")

    def report_progress(self, phase: str) -> None:
        """Report that this process begins a phase of the step, or is still advancing in it. All processes have the
        same phases in the same order, so that places can be compared: a later one is larger."""
        step, number, current = self.place
        HEARTBEAT.at(f"training: step {step + 1}, {phase}")
        self.place = (step, number + (phase != current), phase)

    def close(self) -> None:
        """End the watch."""
        self.over.set()
        self.join()

    def run(self) -> None:
        quiet, sent, last = 0.0, None, time.monotonic()
        while not self.over.wait(self.tick):
            now = time.monotonic()
            quiet, last = quiet + min(now - last, 2 * self.tick), now
            if self.place is not sent:
                quiet, sent = 0.0, self.place
                if self.store is not None:
                    self.store.set(f"place/{self.rank}", repr(sent))
            if quiet > self.limit:
                print(f"error: {redact_text(self.sentence())}", file=sys.stderr, flush=True)
                if self.rank == 0:
                    time.sleep(2 * self.tick)  # the store lives in this process: the others look there too
                os._exit(STOPPED)

    def sentence(self) -> str:
        """Name the processes that are behind, and their phases."""
        places = {self.rank: repr(self.place)}
        with suppress(RuntimeError):  # the process that holds the store may be gone
            places |= {rank: self.store.get(f"place/{rank}").decode() for rank in range(self.world) if self.store}
        return stalled(places, self.world, self.limit / 60)


def stalled(places: dict[int, str], world: int, minutes: float) -> str:
    """Return the sentence about a stalled run, from the places that are known: rank -> "(step, number, 'phase')"."""
    where, phases = {}, {}
    for rank, place in places.items():
        step, number, phase = place.strip("()").split(", ", 2)
        where[rank], phases[rank] = (int(step), int(number)), phase.strip("'")
    behind = [rank for rank in where if where[rank] == min(where.values())]
    who = "all processes" if len(behind) == world > 1 else ", ".join(f"rank {rank}" for rank in behind)
    waiting = [f"rank {rank} at {phases[rank]}" for rank in where if rank not in behind]
    return (
        f"nothing has gone on for {minutes:g} minutes: {who} did not get through {phases[behind[0]]} "
        f"(step {where[behind[0]][0] + 1})"
        + (f", waited for by {', '.join(waiting)}" if waiting else "")
        + "; the same command goes on from the newest checkpoint (guards.stall_minutes is how long is waited)"
    )
