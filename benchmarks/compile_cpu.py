"""compile=true beside compile=false on the CPU, where it changes nothing: seconds of the same rounds, interleaved.

    python benchmarks/compile_cpu.py                       # a minute

For every number of rows and room in the cache: the median of compile=true's seconds over compile=false's, and how many
graphs and compiled programs there were; then the same of 50 texts of mixed lengths. Fails where there was one.
"""

import itertools
import random
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
        report(f"{rows:>5}{room:>7}{ratio:>8.3f}", engines[1], faults)
    dice, engine = random.Random(0), Engine(target, drafter, EngineConfig("ddtree", 16, rows=8, compile=True), 1000)
    for _ in range(50):
        prompt = [2 + dice.randrange(400) for _ in range(dice.randrange(1, 600))]
        engine.submit(prompt, TextOptions(max_new_tokens=dice.randrange(1, 60)))
    while engine.busy:
        engine.step()
    report(f"{'50 texts of mixed':<20}", engine, faults)
    finish(faults)


def report(what: str, engine: Engine, faults: list[str]) -> None:
    graphs, programs = len(engine.graphs.graphs), sum(counters["stats"].values())
    print(f"{what}{graphs:>8}{programs:>10}", flush=True)
    check(graphs == programs == 0, f"{what}: {graphs} graphs, {programs} programs", faults)


if __name__ == "__main__":
    main()
