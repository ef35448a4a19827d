"""compile=true beside compile=false on the CPU, where it changes nothing: seconds of the same rounds, interleaved.

    python benchmarks/compile_cpu.py                       # a minute

For every number of rows and room in the cache: the median of compile=true's seconds over compile=false's, and how many
graphs and compiled programs there were. Fails where there was one.
"""

import itertools
import statistics
import time

import torch
from gpu import check, finish, random_pair
from torch._dynamo.utils import counters

from infer import Engine
from infer.config import EngineConfig, TextOptions

ROUNDS = 30


def main() -> None:
    torch.set_num_threads(1)
    target, drafter = random_pair("tiny", torch.device("cpu"), torch.float32)
    faults: list[str] = []
    print(f"{'rows':>5}{'room':>7}{'time':>8}{'graphs':>8}{'programs':>10}")
    for rows, room in itertools.product((1, 4, 8, 16), (300, 1000, 4000)):
        engines = [
            Engine(target, drafter, EngineConfig("ddtree", 16, rows=rows, compile=each), room) for each in (False, True)
        ]
        for engine, row in itertools.product(engines, range(rows)):
            engine.submit([2 + row, 3, 4, 5], TextOptions(max_new_tokens=room - 8, ignore_eos=True))
        for engine in engines:
            engine.step()
        seconds: list[list[float]] = [[], []]
        for number in range(ROUNDS):
            for which in (0, 1) if number % 2 else (1, 0):
                began = time.process_time()
                engines[which].step()
                seconds[which].append(time.process_time() - began)
        ratio = statistics.median(with_it / without for without, with_it in zip(*seconds, strict=True))
        graphs, programs = len(engines[1].graphs.graphs), sum(counters["stats"].values())
        print(f"{rows:>5}{room:>7}{ratio:>8.3f}{graphs:>8}{programs:>10}", flush=True)
        check(graphs == programs == 0, f"{rows} rows, room {room}: {graphs} graphs, {programs} programs", faults)
    finish(faults)


if __name__ == "__main__":
    main()
