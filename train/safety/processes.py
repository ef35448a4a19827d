"""The processes of a run: how they start, agree, wait for each other, and notice that one of them has stopped.

A run that has begun and cannot go on raises `infer.utils.entry.Stopped`, one sentence, and leaves with exit code 3.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from infer.utils.entry import STOPPED, Stopped
from infer.utils.redact import redact_text

T = TypeVar("T")
PATIENCE = timedelta(days=1)  # of a collective: packing a large data set keeps the others waiting; `Watch` is stricter


def start_processes(device: torch.device) -> None:
    """Joins the process group that torchrun announced, or founds one of a single process."""
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
    """Lets the first process do something while the others wait. All return what it returned, or raise the error that
    it raised: none is left waiting for one that has gone."""
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


class Watch(threading.Thread):
    """Ends the run when nothing has gone on for `minutes`, and says which process the others wait for.

    Each process tells by `beat` where it is. A thread passes that on to the store that founded the process group, once
    a tick, and sees for how long there was nothing to pass on; a process that hangs in a collective, a read or a
    sleep is noticed whatever the backend. Time during which the whole process was suspended does not count.
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

    def beat(self, step: int, at: int, doing: str) -> None:
        """This process begins something: the `at`-th thing of a step. What comes later compares as larger."""
        self.place = (step, at, doing)

    def close(self) -> None:
        """The end of the watch."""
        self.over.set()
        self.join()

    def run(self) -> None:
        quiet, told, last = 0.0, None, time.monotonic()
        while not self.over.wait(self.tick):
            now = time.monotonic()
            quiet, last = quiet + min(now - last, 2 * self.tick), now
            if self.place is not told:
                quiet, told = 0.0, self.place
                if self.store is not None:
                    self.store.set(f"place/{self.rank}", repr(told))
            if quiet > self.limit:
                print(f"error: {redact_text(self.sentence())}", file=sys.stderr, flush=True)
                if self.rank == 0:
                    time.sleep(2 * self.tick)  # the store lives in this process: the others look there too
                os._exit(STOPPED)

    def sentence(self) -> str:
        """Who is behind, and with what."""
        places = {self.rank: repr(self.place)}
        with suppress(RuntimeError):  # the process that holds the store may be gone
            places |= {rank: self.store.get(f"place/{rank}").decode() for rank in range(self.world) if self.store}
        return stalled(places, self.world, self.limit / 60)


def stalled(places: dict[int, str], world: int, minutes: float) -> str:
    """The sentence about a stalled run, from the places that were heard of: rank -> "(step, at, 'doing')"."""
    read = {}
    for rank, place in places.items():
        step, at, doing = place.strip("()").split(", ", 2)
        read[rank] = ((int(step), int(at)), doing.strip("'"), int(step))
    order = {rank: where for rank, (where, _, _) in read.items()}
    behind = [rank for rank in order if order[rank] == min(order.values())]
    _, doing, step = read[behind[0]]
    who = "all processes" if len(behind) == world > 1 else ", ".join(f"rank {rank}" for rank in behind)
    waiting = [f"rank {rank} at {read[rank][1]}" for rank in order if rank not in behind]
    return (
        f"nothing has gone on for {minutes:g} minutes: {who} did not get through {doing} (step {step + 1})"
        + (f", waited for by {', '.join(waiting)}" if waiting else "")
        + "; the same command goes on from the newest checkpoint (guards.stall_minutes is how long is waited)"
    )
