"""Conditional heads on one frozen drafter, or trained with it: tokens a round by head, tree and candidates.

    python benchmarks/heads.py --checkpoint runs/embedded-dflash/checkpoints/best
    python benchmarks/heads.py --checkpoint ... --heads none,selector --steps 600 --continuity runs/ngrams
    python benchmarks/heads.py --build

Each head is trained on the drafter, frozen (or all of it, --joint, as is the drafter without a head), for --steps
optimiser steps of the command's own recipe. Then held-out prompts are decoded; τ does not depend on how busy the
machine is. `--build` times the trees alone: microseconds to build one from a table, one thread.
"""

import argparse
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.packing import batch, packed_rows
from data.prompts import held_out_prompts
from data.rows import DataConfig
from infer import load_target
from infer.api import decode
from infer.config import DecodeOptions, DrafterConfig, HeadConfig
from infer.drafters.heads.table import HEADS as TABLE
from infer.evaluation.evaluate import tau
from infer.targets.target import Features
from infer.trees.conditional import best_first, by_depth
from train.batches import draw_blocks
from train.blocks import Blocks
from train.config import ObjectiveConfig, OptimConfig, TrainConfig
from train.loop import draft_states, score
from train.optim import learning_rate, make_optimizer, set_rate
from train.run.initial import initial_drafter, resolve_init

HEADS = {
    "none": HeadConfig(),
    "vanilla": HeadConfig("markov", rank=64),
    "gated": HeadConfig("markov", kind="gated", rank=64),
    "rnn": HeadConfig("markov", kind="rnn", rank=64),
    "selector": HeadConfig("selector", rank=64),
    "selector16": HeadConfig("selector", rank=64, top_k=16),
    "swiglu": HeadConfig("swiglu"),
    "gru": HeadConfig("gru", rank=64, hidden=64),
}


CORRECTING = [name for name, row in TABLE.items() if row.corrects]


@dataclass(frozen=True)
class Taught:
    """A step's packed row, its blocks, what the target says, and the frozen drafter's states."""

    rows: dict[str, torch.Tensor]
    blocks: Blocks
    features: Features
    drafted: torch.Tensor  # (N * L, D)


def configured(arguments: argparse.Namespace, head: HeadConfig) -> TrainConfig:
    """Return the configuration of a run with a head."""
    config = TrainConfig(
        seed=arguments.seed,
        train="all" if arguments.joint or head.name == "none" else "head",
        anchors=40,
        drafter=DrafterConfig(init=arguments.checkpoint, head=head),
        objective=ObjectiveConfig(
            divergence=arguments.divergence,
            gamma=arguments.gamma,
            unary=arguments.unary * (head.name in CORRECTING),
        ),
        optim=OptimConfig(name="muon", lr=arguments.lr, batch=1, steps=arguments.steps),
    )
    return replace(config, drafter=resolve_init(config.drafter, config.target))


def teach(config: TrainConfig, target, drafter, dataset, step: int) -> Taught:
    """Compute a step's row."""
    rows = batch(dataset, step, 1, config.seed)
    blocks = draw_blocks(rows, config, step)
    features = target.packed_features(rows["ids"], rows["positions"], rows["documents"], drafter.layer_ids)
    return Taught(rows, blocks, features, draft_states(drafter, target, rows, blocks, features))


def train_head(arguments: argparse.Namespace, head: HeadConfig, target, dataset, cache: dict[bool, list[Taught]]):
    """Return a drafter with the head trained, or all of it, and the seconds that took. A frozen drafter's states are
    computed once, for all heads: `cache`, by whether states stand before the last norm."""
    config = configured(arguments, head)
    drafter = initial_drafter(config, target)
    frozen, began = config.train == "head", time.perf_counter()
    if head.name != "none" or arguments.joint:
        optimizer = make_optimizer(drafter, config.optim)
        if frozen and drafter.conditional_head.raw not in cache:
            with torch.no_grad():
                states = [teach(config, target, drafter, dataset, step) for step in range(arguments.rows)]
            cache[drafter.conditional_head.raw] = states
            began = time.perf_counter()
        for step in range(arguments.steps):
            set_rate(optimizer, learning_rate(config.optim, step, arguments.steps))
            if frozen:
                taught = cache[drafter.conditional_head.raw][step % arguments.rows]
            else:
                taught = teach(config, target, drafter, dataset, step)
            if not taught.blocks.supervised.any():  # a row of short texts has no room for an anchor
                continue
            found = score(drafter, taught.drafted, target, taught.rows, taught.blocks, taught.features, config)
            optimizer.zero_grad()
            (found.loss / taught.blocks.supervised.sum()).backward()
            torch.nn.utils.clip_grad_norm_([p for p in drafter.parameters() if p.requires_grad], 1.0)
            optimizer.step()
    return drafter.eval().requires_grad_(False), time.perf_counter() - began


def measure(arguments: argparse.Namespace, target, drafter, prompts: list[list[int]]) -> list[str]:
    """Return τ of the chain and of the trees, for every number of candidates that is asked for."""
    cells = []

    def run(**options) -> float:
        options = DecodeOptions(
            arguments.tokens,
            arguments.temperature,
            seed=1,
            rows=8,
            positions=None,  # else trees of rows side by side are cut
            continuity=arguments.continuity,
            **options,
        )
        return tau(decode(target, drafter, prompts, options))

    if arguments.continuity is None:
        cells.append(f"chain {run(method='chain', budget=512):.3f}")
    for candidates in arguments.candidates if drafter.head_row else arguments.candidates[:1]:
        found = [f"{run(budget=budget, candidates=candidates):.3f}" for budget in arguments.budgets]
        cells.append(f"M={candidates} " + " ".join(found))
    return cells


def build_times() -> None:
    """Print microseconds of a build from a table, best and median of many."""

    class Steps:
        recurrent = False

        def __init__(self, length: int, count: int) -> None:
            generator = torch.Generator().manual_seed(0)
            scores = torch.randn(1, length, count, count, generator=generator).mul(2).log_softmax(-1)
            self.tokens = torch.arange(count).expand(1, length, count).contiguous()
            self.table = scores[:, 0, 0], scores[:, 1:].contiguous()

        def begin(self):
            return self.table[0][:, None], None

        def extend(self, slot, which, memory):
            rows = which[..., None].expand(-1, -1, self.tokens.shape[-1])
            return self.table[1][:, slot - 1].gather(1, rows), None

    torch.set_num_threads(1)
    print("positions  candidates  nodes   heap, best / median   depth by depth, median   (microseconds)")
    for length, count, budget in ((7, 16, 16), (7, 32, 64), (15, 32, 64), (15, 64, 256)):
        steps, seconds = Steps(length, count), {}
        for search in (best_first, by_depth):
            samples = []
            for _ in range(400):
                began = time.perf_counter()
                search(steps, budget)
                samples.append(time.perf_counter() - began)
            seconds[search] = min(samples) * 1e6, sorted(samples)[len(samples) // 2] * 1e6
        heap, depth = seconds[best_first], seconds[by_depth]
        print(f"{length:9} {count:11} {budget:6}   {heap[0]:9.1f} / {heap[1]:6.1f} {depth[1]:23.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", default="runs/embedded-dflash/checkpoints/best")
    parser.add_argument("--heads", default=",".join(HEADS))
    parser.add_argument("--joint", action="store_true", help="train the backbone too")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--divergence", default="kl")
    parser.add_argument("--gamma", type=float, default=1.0, help="weight of a position against the one before it")
    parser.add_argument(
        "--rows", type=int, default=400, help="packed rows whose states a frozen drafter's heads learn from"
    )
    parser.add_argument("--unary", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--budgets", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--candidates", type=int, nargs="+", default=[32])
    parser.add_argument("--continuity", help="an n-gram file: DDTree + continuity")
    parser.add_argument("--build", action="store_true", help="time the trees alone")
    arguments = parser.parse_args()
    if arguments.build:
        return build_times()
    target, data = load_target("embedded"), DataConfig(source="embedded", length=256)
    dataset = packed_rows(data, target.tokenizer, target.tokenizer_digest)
    prompts = held_out_prompts(data, target.tokenizer, arguments.prompts, 96)
    print(f"{len(prompts)} prompts, {arguments.tokens} tokens, budgets {arguments.budgets}", flush=True)
    cache: dict[bool, list[Taught]] = {}
    for name in arguments.heads.split(","):
        drafter, seconds = train_head(arguments, HEADS[name], target, dataset, cache)
        head = drafter.conditional_head
        size = sum(parameter.numel() for parameter in head.parameters()) if head is not None else 0
        cells = measure(arguments, target, drafter, prompts)
        print(f"{name:10} {size:8,} parameters, {seconds:4.0f} s  " + " | ".join(cells), flush=True)


if __name__ == "__main__":
    main()
