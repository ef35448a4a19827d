"""One node budget for sixteen rows against the same budget for each: tokens a round and a second, the same texts.

    python benchmarks/joint.py --checkpoint embedded

Held-out prompts and some from outside the data, greedy and sampled ones in turn, wait in one queue, so that all rows
are always in work; what is written once the queue is empty does not count, as few rows are left then. Engines take
turns step by step, so that the machine's other work disturbs all alike. Seconds are processor time.
"""

import argparse
import random
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.prompts import evaluation_prompts
from data.rows import DataConfig
from infer import Engine, load_drafter, load_target
from infer.config import EngineConfig, TextOptions
from infer.engine.loops import LONGEST_PERIOD


class Run:
    """An engine with its queue, and what it wrote while the queue was not empty."""

    def __init__(self, target, drafter, options: EngineConfig, queue: list, capacity: int) -> None:
        self.engine = Engine(target, drafter, options, capacity)
        self.texts = [self.engine.submit(prompt, text) for prompt, text in queue]
        self.seconds, self.written, self.rounds, self.row_rounds = 0.0, 0, 0, 0

    def step(self) -> None:
        """Step once; count the step if texts still wait behind it."""
        before, began = sum(len(text.ids) for text in self.texts), time.process_time()
        self.engine.step()
        spent = time.process_time() - began
        if self.engine.waiting:
            self.seconds, self.rounds = self.seconds + spent, self.rounds + 1
            self.written += sum(len(text.ids) for text in self.texts) - before
            self.row_rounds += len(self.engine.writing)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", default="embedded")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--budgets", nargs="+", default=["4", "8", "16"], help="nodes a row, or auto")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0, help="of the queue's order")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    target, drafter = load_target("embedded"), load_drafter(arguments.checkpoint)
    data = DataConfig(source="embedded", length=256)
    prompts = evaluation_prompts(data, target.tokenizer, arguments.prompts, 96, arguments.prompts // 2)
    random.Random(arguments.seed).shuffle(prompts)
    shared = {"max_new_tokens": arguments.tokens, "loop_period": LONGEST_PERIOD}
    queue = [(p.ids, TextOptions(**shared, temperature=arguments.temperature, seed=i)) for i, p in enumerate(prompts)]
    common = {"rows": arguments.rows, "positions": None}
    settings = {"plain": EngineConfig("plain", **common)}
    for budget in arguments.budgets:
        nodes = budget if budget == "auto" else int(budget)
        settings[f"{budget} each"] = EngineConfig(budget=nodes, **common)
        settings[f"{budget} joint"] = EngineConfig(budget=nodes, joint=True, **common)
    capacity = 96 + arguments.tokens
    for one in settings.values():  # what only the first rounds cost is paid before anything counts
        warm = Run(target, None if one.method == "plain" else drafter, one, queue[:2], capacity)
        while warm.engine.busy:
            warm.step()
    runs = {
        name: Run(target, None if name == "plain" else drafter, one, queue, capacity) for name, one in settings.items()
    }
    while any(run.engine.busy for run in runs.values()):
        for run in runs.values():
            if run.engine.busy:
                run.step()
    print(f"{len(queue)} texts of {arguments.tokens} tokens, {arguments.rows} rows, T = {arguments.temperature}")
    print(f"{'nodes a row':<12}{'tokens a row and round':>24}{'ms a round':>12}{'tokens/s':>10}  same texts")
    expected = [text.ids for text in runs["plain"].texts]
    for name, run in runs.items():
        same = [text.ids for text in run.texts] == expected
        rates = run.written / run.row_rounds, 1000 * run.seconds / run.rounds, run.written / run.seconds
        print(f"{name:<12}{rates[0]:>24.3f}{rates[1]:>12.1f}{rates[2]:>10.1f}  {'yes' if same else 'NO'}", flush=True)


if __name__ == "__main__":
    main()
