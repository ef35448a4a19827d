"""What saving costs a run: short stretches of the default run's steps, with a save in every second one.

    python benchmarks/saving.py                    # about eight minutes
    python benchmarks/saving.py --pairs 20         # about one

Stretches take turns in one process: the same number of steps, one stretch without a save, one that begins with a save
of the training state as a run makes it (copied, then written, hashed and synced by another thread meanwhile).
What a pair differs by is one save; that over ten seconds is what a run pays that saves every ten seconds. Stretches are
short, because what a save costs does not grow with them and what else a machine does would hide it. Printed: the mean
of the pairs' differences in wall and CPU seconds with its interval (bootstrap over the pairs), and what a save is made
of, counted: bytes, and the wall and CPU seconds of each of its parts.
"""

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np
import torch

from infer.evaluation.ruler import interval
from infer.utils.entry import composed
from train.config import TrainConfig
from train.loop import Run, prefetch_of, prepare_run, train_step
from train.run import checkpoints
from train.run.checkpoints import STATE, Writer, rolling, save_rolling
from train.safety.processes import start_processes

EVERY = 10.0  # seconds between two saves of the run that the goal speaks of
PARTS = {"training_state": "copy the state (the step waits)", "save_file": "write", "_digest": "hash", "sync": "sync"}


@contextmanager
def counted_parts() -> Iterator[dict[str, list[tuple[float, float]]]]:
    """Collect the wall and CPU seconds that each part of a save takes in its own thread."""
    found, plain = defaultdict(list), {name: getattr(checkpoints, name) for name in PARTS}

    def timed(name: str) -> Callable:
        def part(*given):
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return plain[name](*given)
            finally:
                found[name].append((time.perf_counter() - wall, time.thread_time() - cpu))

        return part

    for name in PARTS:
        setattr(checkpoints, name, timed(name))
    yield found
    for name, function in plain.items():
        setattr(checkpoints, name, function)


def stretches(run: Run, steps: Callable[[], None], pairs: int) -> dict[str, list[float]]:
    """Return by how much a stretch with a save exceeds its neighbour without: wall and CPU seconds of each pair."""
    excess: dict[str, list[float]] = {"wall": [], "CPU": []}
    with closing(Writer()) as writer:
        for pair in range(pairs):
            found = {}
            for saving in (pair % 2 == 0, pair % 2 == 1):  # either comes first as often
                wall, cpu = time.perf_counter(), time.process_time()
                if saving:
                    save_rolling(run.folder, pair + 1, run.engine, writer)
                steps()
                writer.close()
                found[saving] = time.perf_counter() - wall, time.process_time() - cpu
            for name, with_it, without in zip(excess, found[True], found[False], strict=True):
                excess[name].append(with_it - without)
    return excess


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=160)
    parser.add_argument("--seconds", type=float, default=1.3, help="of a stretch, about")
    parser.add_argument("overrides", nargs="*", help="of the run")
    args = parser.parse_args()
    start_processes(torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as held, counted_parts() as parts:
        overrides = [f"runs_dir={folder}", "optim.steps=1000000", "ngrams=false", *args.overrides]
        run = prepare_run(composed("train", TrainConfig, overrides), torch.device("cpu"), held)
        (Path(run.folder) / "metrics.jsonl").touch()
        prefetch = held.enter_context(closing(prefetch_of(run)))

        def steps(count: int) -> None:
            for _ in range(count):
                train_step(run.engine, run.target, prefetch(), run.config, lambda phase: None)

        steps(5)
        began = time.perf_counter()
        steps(10)
        count = max(1, round(10 * args.seconds / (time.perf_counter() - began)))
        excess = stretches(run, lambda: steps(count), args.pairs)
        size = (rolling(Path(run.folder))[-1] / "state" / STATE).stat().st_size
    print(f"\n{args.pairs} pairs of {count} steps; torch threads {torch.get_num_threads()}; state {size / 1e6:.1f} MB")
    for name, values in excess.items():
        each = 1000 * np.array(values)
        middle = each.mean()
        low, high = interval(lambda drawn, each=each: each[drawn].mean(1), len(each)) or (-np.inf, np.inf)
        share, least, most = (value / 10 / EVERY for value in (middle, low, high))
        print(
            f"{name + ' of a save':<14}{middle:>8.1f} ms (95 %: {low:.1f} to {high:.1f}); every {EVERY:.0f} seconds: "
            f"{share:+.2f} % (95 %: {least:+.2f} to {most:+.2f})"
        )
    print(f"{'':<34}{'times a save':>13}{'wall ms':>9}{'CPU ms':>9}")
    for name, words in PARTS.items():
        wall, cpu = (1000 * sum(column) / args.pairs for column in zip(*parts[name], strict=True))
        print(f"{words:<34}{len(parts[name]) / args.pairs:>13.1f}{wall:>9.1f}{cpu:>9.1f}")


if __name__ == "__main__":
    main()
