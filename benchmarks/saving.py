"""What saving costs a run: steps of the default run in stretches of ten seconds, with a save in every second one.

    python benchmarks/saving.py                    # about two minutes
    python benchmarks/saving.py --pairs 12

Stretches take turns in one process: the same steps, one stretch without a save, one that begins with a save of the
training state (copied, then written, hashed and synced by another thread while the steps go on). Printed: wall and CPU
seconds of either kind, the median of the pairs' ratios and its interval.
"""

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path

import torch
from against import interval

from infer.utils.entry import composed
from train.config import TrainConfig
from train.loop import prefetch_of, prepare_run, train_step
from train.run.checkpoints import Writer, save_rolling
from train.safety.processes import start_processes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="of a stretch")
    args = parser.parse_args()
    start_processes(torch.device("cpu"))
    seconds: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as held:
        run = prepare_run(
            composed("train", TrainConfig, [f"runs_dir={folder}", "optim.steps=100000"]), torch.device("cpu"), held
        )
        (Path(run.folder) / "metrics.jsonl").touch()
        writer, prefetch = held.enter_context(closing(Writer())), held.enter_context(closing(prefetch_of(run)))
        numbers = iter(range(1, 1 << 30))

        def steps(count: int) -> None:
            for _ in range(count):
                next(numbers)
                train_step(run.engine, run.target, prefetch(), run.config, lambda phase: None)

        began = time.perf_counter()
        steps(20)
        count = max(1, round(20 * args.seconds / (time.perf_counter() - began)))
        for i in range(2 * args.pairs):
            saving = i % 2 != i // 2 % 2  # either comes first as often
            wall, cpu = time.perf_counter(), time.process_time()
            if saving:
                save_rolling(run.folder, next(numbers), run.engine, writer)
            steps(count)
            writer.close()
            seconds[saving].append((time.perf_counter() - wall, time.process_time() - cpu))
    print(f"{count} steps a stretch, {args.pairs} pairs; torch threads {torch.get_num_threads()}")
    for saving, name in ((False, "without"), (True, "with")):
        wall, cpu = (statistics.median(column) for column in zip(*seconds[saving], strict=True))
        print(f"{name:<8} a save: {wall:.2f} s, {cpu:.2f} CPU s")
    for index, name in enumerate(("wall", "CPU")):
        ratios = [b[index] / a[index] for a, b in zip(seconds[False], seconds[True], strict=True)]
        low, middle, high = (f"{100 * (r - 1):+.1f}" for r in sorted([statistics.median(ratios), *interval(ratios)]))
        print(f"{name}: {middle} % with saving (95 %: {low} to {high}; pairs {min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
