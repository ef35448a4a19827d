"""How long trees that ask an n-gram model take to build on one CPU core: microseconds a round, medians, batch 1.

    python benchmarks/continuity.py runs/ngrams [runs/embedded-dart/checkpoints/best]

Marginals and contexts are those of a real drafter's rounds on held-out prompts, 8 drafted positions (a shorter block's
last position is repeated). "search": from the 25 likeliest tokens of every position, beam 20, as in DART appendix D;
"whole": from the marginals, the top-25 and the tree's tensors included. "again" repeats the search on the same round:
the n-gram file's pages are then in the core's cache.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from data.prompts import held_out_prompts
from data.rows import DataConfig
from infer import load_drafter, load_target
from infer.config import DecodeOptions, EngineConfig
from infer.engine.engine import Engine
from infer.evaluation.evaluate import describe_device
from infer.ngrams.model import NGram
from infer.trees import guided
from infer.trees.continuity import AUTHORS, BEAM, RANKS, choices, continuity, guided_ddtree, judge, likeliest, of_row
from infer.trees.ddtree import ddtree
from infer.trees.tree import Proposal

LENGTH = 8


class Recorder:
    """A drafter that remembers what it drafted, and for which text."""

    def __init__(self, drafter) -> None:
        self.drafter, self.block_size, self.layer_ids = drafter, drafter.block_size, drafter.layer_ids
        self.engine: Engine | None = None
        self.rounds: list[tuple[list[int], torch.Tensor]] = []

    def __getattr__(self, name: str):
        return getattr(self.drafter, name)

    def draft(self, target, bonus, state) -> torch.Tensor:
        marginals = self.drafter.draft(target, bonus, state)
        for text, row in zip(self.engine.writing, marginals, strict=True):
            row = torch.cat([row, row[-1:].expand(LENGTH, -1)])[:LENGTH]
            self.rounds.append((text.prompt + text.ids, row[None].clone()))
        return marginals


def microseconds(run: Callable[[], object]) -> float:
    mark = time.perf_counter()
    run()
    return 1e6 * (time.perf_counter() - mark)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ngram")
    parser.add_argument("checkpoint", nargs="?", default="runs/embedded-dart/checkpoints/best")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--budgets", type=int, nargs="+", default=[16, 59, 128])
    args = parser.parse_args()
    torch.set_num_threads(1)
    target = load_target("embedded", "float32", "cpu")
    drafter, model = Recorder(load_drafter(args.checkpoint)), NGram.open(args.ngram, target.tokenizer_digest)
    prompts = held_out_prompts(DataConfig(), target.tokenizer, args.prompts, 96)
    drafter.engine = Engine(target, drafter, EngineConfig("ddtree", 16, rows=16), 96 + 64)
    for prompt in prompts:
        drafter.engine.submit(prompt, DecodeOptions(64))
    while drafter.engine.busy:
        drafter.engine.step()

    print(
        f"{describe_device(target.device)}; {len(drafter.rounds)} rounds, {LENGTH} positions, {RANKS} tokens each, "
        f"beam {BEAM}; n-grams of order {model.order}, {sum(model.nodes):,} of them, vocabulary {model.vocabulary}"
    )
    print(f"{'tree':<22}{'nodes':>6}{'search':>9}{'again':>8}{'whole':>8}")
    for budget in args.budgets:
        times: dict[str, list[float]] = {}
        nodes, kept, scores = np.empty((3, budget), np.int64), np.empty(budget, np.float32), np.empty(budget)
        for ids, marginals in drafter.rounds:
            bonus, end = torch.tensor(ids[-1:]), np.array(ids)
            proposal = Proposal(bonus, marginals, budget, model, [ids], ends=target.end_ids)
            tokens, guide = likeliest(proposal, AUTHORS.unigrams), of_row(choices(proposal), 0)
            beamed, judged = of_row(tokens, 0), of_row(judge(tokens, AUTHORS, target.end_ids), 0)
            common = model.arrays, model.order
            counted = model.arrays, model.tokens, model.order, marginals.shape[-1]
            for name, runs in {
                "continuity": (
                    lambda: guided.beam(*common, AUTHORS.epsilon, beamed, judged, end, BEAM, nodes, kept),  # noqa: B023
                    lambda: continuity(proposal),  # noqa: B023
                ),
                "DDTree + continuity": (
                    lambda: guided.best_first(*counted, 1.0, guide, end, nodes, scores),  # noqa: B023
                    lambda: guided_ddtree(proposal),  # noqa: B023
                ),
                "DDTree": (None, lambda: ddtree(proposal)),  # noqa: B023
            }.items():
                for column, run in zip(("search", "again", "whole"), (runs[0], runs[0], runs[1]), strict=True):
                    if run is not None:
                        times.setdefault(f"{name} {column}", []).append(microseconds(run))
        for name in ("continuity", "DDTree + continuity", "DDTree"):
            medians = [times.get(f"{name} {column}") for column in ("search", "again", "whole")]
            cells = [f"{statistics.median(values):.0f}" if values else "-" for values in medians]
            print(f"{name:<22}{budget:>6}{cells[0]:>9}{cells[1]:>8}{cells[2]:>8}")


if __name__ == "__main__":
    main()
