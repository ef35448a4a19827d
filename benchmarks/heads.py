"""Conditional heads on one backbone, of several seeds, trained for the same time: tokens a round.

    python benchmarks/heads.py prepare               # the backbone, training rows, the target's texts
    python benchmarks/heads.py frozen --seeds 0 1 2  # each head on the frozen backbone; "none": the backbone itself
    python benchmarks/heads.py joint --seeds 0 1 2   # then head and backbone together, as many seconds more
    python benchmarks/heads.py report                # tables

Greedy decoding is lossless: the target's text is known before anything is drafted. Texts are
replayed (infer/evaluation/replay.py), from features that are computed once for all drafters; τ is
exactly what decoding gives. What is measured already is left out, so that the work can be done in
pieces. Seconds are processor time of the one thread that trains, the same for every drafter.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.packing import batch, packed_rows
from data.prompts import evaluation_prompts
from data.rows import DataConfig
from infer import load_target
from infer.api import decode
from infer.config import DecodeOptions, DrafterConfig, HeadConfig
from infer.engine.loops import LONGEST_PERIOD
from infer.evaluation.replay import Order, features_of, replay
from infer.evaluation.ruler import acceptance_length
from infer.formats.checkpoint import load_drafter, save_drafter
from infer.targets.target import Features
from train.batches import draw_blocks, seeded
from train.blocks import Blocks
from train.config import ObjectiveConfig, OptimConfig, TrainConfig
from train.optim import learning_rate, make_optimizer, set_rate
from train.run.initial import initial_drafter, resolve_init
from train.step import draft_states, score

HEADS = {
    "none": HeadConfig(),
    "vanilla": HeadConfig("markov", rank=64, confidence_head=True),
    "gated": HeadConfig("markov", kind="gated", rank=64),
    "rnn": HeadConfig("markov", kind="rnn", rank=64),
    "selector": HeadConfig("selector", rank=64),
    "selector16": HeadConfig("selector", rank=64, top_k=16),
    "selector256": HeadConfig("selector", rank=256),
    "gated256": HeadConfig("markov", kind="gated", rank=256),
    "swiglu": HeadConfig("swiglu"),
    "gru": HeadConfig("gru", rank=64, hidden_size=64),
}
BUDGETS = (8, 16, 32, 64)
CACHED = 120  # blocks a row whose states a frozen drafter keeps; a step draws as many as it takes


@dataclass(frozen=True)
class Text:
    """What the target wrote behind a prompt, on its own."""

    ids: list[int]
    prompt: int  # tokens of the prompt; a round's bonus token stands there or further on
    context: torch.Tensor  # (T, F) features of the tapped layers


@dataclass(frozen=True)
class Taught:
    """A step's packed row, its blocks, what the target says, and the frozen drafter's states."""

    rows: dict[str, torch.Tensor]
    blocks: Blocks
    features: Features
    drafted: torch.Tensor | None = None  # (N * L, D)


def configured(init: Path, head: HeadConfig, joint: bool, seed: int) -> TrainConfig:
    """Return the configuration of a run with a head; joint ones are the default run's, with its
    weights."""
    config = TrainConfig(
        seed=seed,
        trainable="all" if joint else "head",
        anchors_per_sequence=40,
        drafter=DrafterConfig(init=str(init), head=head),
        objective=ObjectiveConfig(gamma=0.6 if joint else 1.0),
        optim=OptimConfig(name="muon", lr=2e-3 if joint else 1e-2, batch_size=1, steps=1000),
    )
    return replace(config, drafter=resolve_init(config.drafter, config.target))


def prepare(arguments: argparse.Namespace) -> None:
    """Write what all later stages share: texts, features of training rows, and the backbone."""
    target = load_target("embedded")
    data = DataConfig(source="embedded", length=256)
    start = load_drafter(
        arguments.checkpoint, torch.float32, target_layers=target.config.num_hidden_layers
    )
    layers = start.layer_ids
    arguments.folder.mkdir(parents=True, exist_ok=True)
    prompts = evaluation_prompts(data, target.tokenizer, arguments.prompts, 96, arguments.outside)
    options = DecodeOptions(
        arguments.tokens, method="plain", max_num_batched_tokens=None, loop_period=LONGEST_PERIOD
    )
    done = decode(target, None, [prompt.ids for prompt in prompts], options)
    texts = []
    for text in done:
        context = features_of(target, layers, (text.prompt, text.ids))
        texts.append(asdict(Text(text.prompt + text.ids, len(text.prompt), context)))
    torch.save(texts, arguments.folder / "texts.pt")
    dataset = packed_rows(data, target.tokenizer, target.tokenizer_digest)
    stored = []
    for first in range(0, arguments.rows, 8):
        rows = batch(dataset, first, 8, 0)
        found = target.packed_features(rows["ids"], rows["positions"], rows["documents"], layers)
        for i in range(8):
            one = {name: column[i : i + 1].clone() for name, column in rows.items()}
            stored.append((one, found.context[i : i + 1].clone(), found.last[i : i + 1].clone()))
    torch.save(stored, arguments.folder / "rows.pt")
    save_drafter(start.config, start.state_dict(), arguments.folder / "backbone")
    if start.head_row is not None:
        weights = {
            k: v
            for k, v in start.state_dict().items()
            if not k.startswith(start.head_row.attribute)
        }
        keys = {key.name for key in start.head_row.keys}
        start.config.dflash_config = {k: v for k, v in start.own.items() if k not in keys}
        save_drafter(start.config, weights, arguments.folder / "backbone")
        # marginals that were trained beside a head are not the best there are: the same backbone,
        # trained without
        config = configured(arguments.folder / "backbone", HEADS["none"], True, 0)
        drafter, steps = learn(config, target, stored, {}, arguments.backbone_seconds)
        save_drafter(drafter.config, drafter.state_dict(), arguments.folder / "backbone")
        print(f"backbone: {steps} steps without a head", flush=True)


def learn(config: TrainConfig, target, stored: list, cache: dict, seconds: float):
    """Return a drafter that was trained for so many seconds of processor time, and the steps that
    it took. A frozen drafter's states are computed once for all heads and seeds, by whether they
    stand before the last norm: `cache`."""
    drafter = initial_drafter(config, target)
    joint = config.trainable == "all"
    if not joint and drafter.conditional_head.raw not in cache:
        cache[drafter.conditional_head.raw] = states_of(drafter, config, target, stored)
    optimizer = make_optimizer(drafter, config.optim)
    steps = 0
    began = time.process_time()
    order = torch.randperm(len(stored), generator=seeded(config.seed, "order")).tolist()
    while (spent := time.process_time() - began) < seconds:
        set_rate(optimizer, learning_rate(config.optim, int(1000 * spent / seconds), 1000))
        number = order[steps % len(order)]
        steps = steps + 1
        if joint:
            rows, context, last = stored[number]
            one = Taught(rows, draw_blocks(rows, config, steps), Features(context, last))
        else:
            drawn = seeded(config.seed, steps, number)
            one = some_of(
                cache[drafter.conditional_head.raw][number], config.anchors_per_sequence, drawn
            )
        if not one.blocks.supervised.any():  # a row of short texts has no room for an anchor
            continue
        drafted = (
            draft_states(drafter, target, one.rows, one.blocks, one.features)
            if joint
            else one.drafted
        )
        found = score(drafter, drafted, target, one.rows, one.blocks, one.features, config)
        optimizer.zero_grad()
        (found.loss / one.blocks.supervised.sum()).backward()
        torch.nn.utils.clip_grad_norm_([p for p in drafter.parameters() if p.requires_grad], 1.0)
        optimizer.step()
    return drafter.eval().requires_grad_(False), steps


@torch.no_grad()
def states_of(drafter, config: TrainConfig, target, stored: list) -> list[Taught]:
    """Return every row with as many blocks as are kept, and the drafter's states."""
    found = []
    for i, (rows, context, last) in enumerate(stored):
        one = Taught(
            rows,
            draw_blocks(rows, replace(config, anchors_per_sequence=CACHED), i),
            Features(context, last),
        )
        drafted = draft_states(drafter, target, one.rows, one.blocks, one.features)
        found.append(replace(one, drafted=drafted))
    return found


def some_of(one: Taught, count: int, generator: torch.Generator) -> Taught:
    """Return a row with `count` of its blocks."""
    picked = torch.randperm(CACHED, generator=generator)[:count]
    drafted = one.drafted.unflatten(0, (CACHED, -1))[picked].flatten(0, 1)
    return replace(
        one,
        blocks=Blocks(*(part[:, picked] for part in vars(one.blocks).values())),
        drafted=drafted,
    )


def measure(drafter, target, texts: list[Text]) -> dict[str, list[int]]:
    """Return how many rounds every text takes, by budget."""
    orders = {str(budget): Order("ddtree", budget) for budget in BUDGETS}
    orders["chain"] = Order("chain", drafter.block_size - 1)
    written = [(text.ids[: text.prompt], text.ids[text.prompt :]) for text in texts]
    found = replay(
        target, drafter, written, list(orders.values()), [text.context for text in texts]
    )
    return {
        name: [len(text.commits[order]) - 1 for text in found] for name, order in orders.items()
    }


@torch.no_grad()
def record(arguments, target, drafter, mode: str, name: str, seed: int, steps: int) -> None:
    """Measure a drafter: a line in results.jsonl."""
    texts = [Text(**text) for text in torch.load(arguments.folder / "texts.pt", weights_only=True)]
    rounds = measure(drafter, target, texts)
    line = {"mode": mode, "head": name, "seed": seed, "steps": steps, "rounds": rounds}
    line["tokens"] = [len(text.ids) - text.prompt - 1 for text in texts]
    with (arguments.folder / "results.jsonl").open("a") as lines:
        lines.write(json.dumps(line) + "\n")
    shown = {k: round(sum(line["tokens"]) / sum(v), 3) for k, v in rounds.items()}
    print(f"{mode} {name} {seed}: {steps} steps, {shown}", flush=True)


def read_results(arguments: argparse.Namespace) -> list[dict]:
    """Return what was measured so far."""
    file = arguments.folder / "results.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def run(arguments: argparse.Namespace) -> None:
    """Train and measure heads, until the time is over; what is there already is left out."""
    began = time.monotonic()
    joint = arguments.stage == "joint"
    cache = {}
    target = load_target("embedded")
    stored = torch.load(arguments.folder / "rows.pt", weights_only=True, mmap=True)
    done = {(one["mode"], one["head"], one["seed"]) for one in read_results(arguments)}
    for seed in arguments.seeds:
        for name in arguments.heads.split(","):
            if time.monotonic() - began > 60 * arguments.minutes:
                return print("more is to be done: the same command goes on", flush=True)
            if (arguments.stage, name, seed) in done:
                continue
            folder = arguments.folder / f"{arguments.stage}-{name}-{seed}"
            if folder.exists():
                drafter = load_drafter(folder)
                steps = int((folder / "steps").read_text())
            else:
                start = arguments.folder / (f"frozen-{name}-{seed}" if joint else "backbone")
                head = HeadConfig() if joint else HEADS[name]  # a drafter that has one keeps it
                config = configured(start, head, joint or name == "none", seed)
                drafter, steps = learn(config, target, stored, cache, arguments.seconds)
                save_drafter(drafter.config, drafter.state_dict(), folder)
                (folder / "steps").write_text(str(steps))
            record(arguments, target, drafter, arguments.stage, name, seed, steps)


def report(arguments: argparse.Namespace) -> None:
    """Print tables: τ with intervals over prompts, seeds pooled; the gain over no head."""
    grouped: dict[tuple, list[dict]] = {}
    for one in read_results(arguments):
        grouped.setdefault((one["mode"], one["head"]), []).append(one)
    for mode in ("frozen", "joint"):
        print(
            f"\n{mode}\n| head | seeds | steps | "
            + " | ".join(["chain", *map(str, BUDGETS)])
            + " |"
        )
        for (kind, name), runs in grouped.items():
            if kind == mode:
                base = grouped.get((mode, "none"))
                cells = [cell(runs, base, budget) for budget in ("chain", *map(str, BUDGETS))]
                steps = sum(run["steps"] for run in runs) // len(runs)
                print(f"| {name} | {len(runs)} | {steps:,} | " + " | ".join(cells) + " |")


def cell(runs: list[dict], base: list[dict] | None, budget: str) -> str:
    """Return τ, and its gain over no head with the interval that it would have over other
    prompts."""
    sides = [
        (runs[0]["tokens"], np.mean([run["rounds"][budget] for run in side], 0))
        for side in (runs, base or runs)
    ]
    own, others = (np.stack(side, -1) for side in sides)  # (n, 2) tokens and rounds of every prompt
    tau, (low, high) = acceptance_length(own)
    if base is None or base is runs:
        return f"{tau:.3f} ({low:.2f} to {high:.2f})"
    gain, (low, high) = acceptance_length(own, others)
    return f"{tau:.3f} +{100 * (gain - 1):.1f} % ({100 * (low - 1):.0f} to {100 * (high - 1):.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=("prepare", "frozen", "joint", "report"))
    parser.add_argument("--folder", type=Path, default=Path("runs/heads"))
    parser.add_argument(
        "--checkpoint", default="data/embedded/drafter", help="prepare: what becomes the backbone"
    )
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--outside", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rows", type=int, default=800, help="prepare: packed rows to learn from")
    parser.add_argument("--backbone-seconds", type=float, default=180)
    parser.add_argument("--heads", default=",".join(HEADS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--seconds", type=float, default=30, help="of processor time, to train each"
    )
    parser.add_argument("--minutes", type=float, default=8, help="begin nothing new after so many")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    {"prepare": prepare, "report": report}.get(arguments.stage, run)(arguments)


if __name__ == "__main__":
    main()
