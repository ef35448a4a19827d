"""Compare conditional heads on one backbone, trained for the same time: tokens per round.

    python benchmarks/heads.py prepare               # backbone, training data, outputs
    python benchmarks/heads.py frozen --seeds 0 1 2  # each head on the frozen backbone
    python benchmarks/heads.py joint --seeds 0 1 2   # then head and backbone together
    python benchmarks/heads.py report                # tables

Greedy decoding is lossless, so that the target's outputs are known before anything is drafted. They
are replayed (infer/evaluation/replay.py) from features that are computed once for all drafters; τ
is exactly that of decoding. Drafters that are measured already are skipped, so that the work can be
split. Seconds are processor time of the one training thread, the same for every drafter.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from infer.evaluation.replay import ReplayVariant, extract_features, replay_sequences

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.packing import load_packed_dataset, read_batch
from data.prompts import select_evaluation_prompts
from data.rows import DataConfig
from infer import load_target
from infer.api import decode_prompts
from infer.config import DecodeOptions, DrafterConfig, HeadConfig
from infer.engine.repetition import MAX_LOOP_PERIOD_TOKENS
from infer.evaluation.replay import compute_acceptance_length_or_ratio
from infer.formats.checkpoint import load_drafter, save_drafter
from infer.targets.target import Features
from train.batches import draw_blocks
from train.blocks import Blocks
from train.config import ObjectiveConfig, OptimConfig, TrainConfig
from train.optim import cosine_learning_rate, make_optimizer, set_learning_rate
from train.run.initial import create_initial_drafter, resolve_drafter_options
from train.seeding import seeded_generator
from train.step import compute_drafter_states, compute_loss_from_states

COMPARED_HEAD_CONFIGS = {
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
HEAD_TREE_BUDGETS = (8, 16, 32, 64)
CACHED_BLOCKS_PER_SEQUENCE = 120  # drafted once by a frozen drafter; a step samples from them


@dataclass(frozen=True)
class TargetOutput:
    """Output of the target for a prompt."""

    ids: list[int]  # of prompt and output
    prompt: int  # tokens of the prompt
    context: torch.Tensor  # (T, F) context features


@dataclass(frozen=True)
class TrainingSample:
    """Packed sequence of a training step, its blocks, and the features of the target."""

    rows: dict[str, torch.Tensor]
    blocks: Blocks
    features: Features
    drafted: torch.Tensor | None = None  # (N * L, D) states of a frozen drafter


def build_train_config(init: Path, head: HeadConfig, joint: bool, seed: int) -> TrainConfig:
    """Return the configuration of a run with a head.

    init: folder of the drafter to start from
    joint: train head and backbone together, as the default run does
    """
    config = TrainConfig(
        seed=seed,
        trainable="all" if joint else "head",
        anchors_per_sequence=40,
        drafter=DrafterConfig(init=str(init), head=head),
        objective=ObjectiveConfig(gamma=0.6 if joint else 1.0),
        optim=OptimConfig(name="muon", lr=2e-3 if joint else 1e-2, batch_size=1, steps=1000),
    )
    return replace(config, drafter=resolve_drafter_options(config.drafter, config.target))


def prepare(arguments: argparse.Namespace) -> None:
    """Write what all later stages use: outputs, training features, and the backbone."""
    target = load_target("embedded")
    data = DataConfig(source="embedded", length=256)
    start = load_drafter(
        arguments.checkpoint, torch.float32, target_layers=target.config.num_hidden_layers
    )
    layers = start.layer_ids
    arguments.folder.mkdir(parents=True, exist_ok=True)
    prompts = select_evaluation_prompts(
        data, target.tokenizer, arguments.prompts, 96, arguments.external_prompts
    )
    options = DecodeOptions(
        arguments.tokens,
        method="plain",
        max_num_batched_tokens=None,
        loop_period=MAX_LOOP_PERIOD_TOKENS,
    )
    done = decode_prompts(target, None, [prompt.ids for prompt in prompts], options)
    texts = []
    for text in done:
        context = extract_features(target, layers, (text.prompt, text.ids))
        texts.append(asdict(TargetOutput(text.prompt + text.ids, len(text.prompt), context)))
    torch.save(texts, arguments.folder / "texts.pt")
    dataset = load_packed_dataset(data, target.tokenizer, target.tokenizer_digest)
    stored_rows = []
    for first in range(0, arguments.rows, 8):
        rows = read_batch(dataset, first, 8, 0)
        features = target.compute_packed_features(
            rows["ids"], rows["positions"], rows["documents"], layers
        )
        for i in range(8):
            columns = {name: column[i : i + 1].clone() for name, column in rows.items()}
            stored_rows.append(
                (
                    columns,
                    features.layer_features[i : i + 1].clone(),
                    features.last_hidden_states[i : i + 1].clone(),
                )
            )
    torch.save(stored_rows, arguments.folder / "rows.pt")
    save_drafter(start.config, start.state_dict(), arguments.folder / "backbone")
    if start.head_spec is not None:
        weights = {
            k: v
            for k, v in start.state_dict().items()
            if not k.startswith(start.head_spec.module_name)
        }
        keys = {key.name for key in start.head_spec.config_keys}
        start.config.dflash_config = {k: v for k, v in start.family_config.items() if k not in keys}
        save_drafter(start.config, weights, arguments.folder / "backbone")
        # Marginals that were trained together with a head are not the best ones. Train the same
        # backbone without it.
        config = build_train_config(
            arguments.folder / "backbone", COMPARED_HEAD_CONFIGS["none"], True, 0
        )
        drafter, steps = train_drafter(config, target, stored_rows, {}, arguments.backbone_seconds)
        save_drafter(drafter.config, drafter.state_dict(), arguments.folder / "backbone")
        print(f"backbone: {steps} steps without a head", flush=True)


def train_drafter(config: TrainConfig, target, stored_rows: list, cache: dict, seconds: float):
    """Train a drafter for some seconds of processor time; return it and the number of steps.

    cache: states of a frozen drafter, computed once for all heads and seeds; the key says whether
        they are taken before the last norm
    """
    drafter = create_initial_drafter(config, target)
    joint = config.trainable == "all"
    if not joint and drafter.conditional_head.raw not in cache:
        cache[drafter.conditional_head.raw] = compute_training_samples(
            drafter, config, target, stored_rows
        )
    optimizer = make_optimizer(drafter, config.optim)
    steps = 0
    start_time = time.process_time()
    order = torch.randperm(
        len(stored_rows), generator=seeded_generator(config.seed, "order")
    ).tolist()
    while (elapsed := time.process_time() - start_time) < seconds:
        set_learning_rate(
            optimizer, cosine_learning_rate(config.optim, int(1000 * elapsed / seconds), 1000)
        )
        number = order[steps % len(order)]
        steps = steps + 1
        if joint:
            rows, context, last = stored_rows[number]
            sample = TrainingSample(rows, draw_blocks(rows, config, steps), Features(context, last))
        else:
            generator_of_step = seeded_generator(config.seed, steps, number)
            sample = select_blocks(
                cache[drafter.conditional_head.raw][number],
                config.anchors_per_sequence,
                generator_of_step,
            )
        if not sample.blocks.supervised.any():  # a sequence of short texts may have no anchor
            continue
        drafted = sample.drafted
        if joint:
            drafted = compute_drafter_states(
                drafter, target, sample.rows, sample.blocks, sample.features
            )
        result = compute_loss_from_states(
            drafter, drafted, target, sample.rows, sample.blocks, sample.features, config
        )
        optimizer.zero_grad()
        (result.loss / sample.blocks.supervised.sum()).backward()
        torch.nn.utils.clip_grad_norm_([p for p in drafter.parameters() if p.requires_grad], 1.0)
        optimizer.step()
    return drafter.eval().requires_grad_(False), steps


@torch.no_grad()
def compute_training_samples(
    drafter, config: TrainConfig, target, stored_rows: list
) -> list[TrainingSample]:
    """Return every packed sequence with its cached blocks and their states by the drafter."""
    samples = []
    for i, (rows, context, last) in enumerate(stored_rows):
        sample = TrainingSample(
            rows,
            draw_blocks(rows, replace(config, anchors_per_sequence=CACHED_BLOCKS_PER_SEQUENCE), i),
            Features(context, last),
        )
        drafted = compute_drafter_states(
            drafter, target, sample.rows, sample.blocks, sample.features
        )
        samples.append(replace(sample, drafted=drafted))
    return samples


def select_blocks(sample: TrainingSample, count: int, generator: torch.Generator) -> TrainingSample:
    """Return a training sample with `count` random blocks of it."""
    selected_blocks = torch.randperm(CACHED_BLOCKS_PER_SEQUENCE, generator=generator)[:count]
    drafted = sample.drafted.unflatten(0, (CACHED_BLOCKS_PER_SEQUENCE, -1))[
        selected_blocks
    ].flatten(0, 1)
    return replace(
        sample,
        blocks=Blocks(*(column[:, selected_blocks] for column in vars(sample.blocks).values())),
        drafted=drafted,
    )


def count_rounds(drafter, target, texts: list[TargetOutput]) -> dict[str, list[int]]:
    """Return the rounds that every output takes, by budget."""
    orders = {str(budget): ReplayVariant("ddtree", budget) for budget in HEAD_TREE_BUDGETS}
    orders["chain"] = ReplayVariant("chain", drafter.block_size - 1)
    outputs = [(text.ids[: text.prompt], text.ids[text.prompt :]) for text in texts]
    replayed = replay_sequences(
        target, drafter, outputs, list(orders.values()), [text.context for text in texts]
    )
    return {
        name: [len(text.commits[order]) - 1 for text in replayed] for name, order in orders.items()
    }


@torch.no_grad()
def measure_and_record(
    arguments, target, drafter, mode: str, name: str, seed: int, steps: int
) -> None:
    """Measure a drafter and append a line to results.jsonl."""
    texts = [
        TargetOutput(**text)
        for text in torch.load(arguments.folder / "texts.pt", weights_only=True)
    ]
    rounds = count_rounds(drafter, target, texts)
    line = {"mode": mode, "head": name, "seed": seed, "steps": steps, "rounds": rounds}
    line["tokens"] = [len(text.ids) - text.prompt - 1 for text in texts]
    with (arguments.folder / "results.jsonl").open("a") as lines:
        lines.write(json.dumps(line) + "\n")
    taus = {k: round(sum(line["tokens"]) / sum(v), 3) for k, v in rounds.items()}
    print(f"{mode} {name} {seed}: {steps} steps, {taus}", flush=True)


def read_results(arguments: argparse.Namespace) -> list[dict]:
    """Return the measurements so far."""
    file = arguments.folder / "results.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def train_and_measure(arguments: argparse.Namespace) -> None:
    """Train and measure heads that are not measured yet, until the time is over."""
    start_time = time.monotonic()
    joint = arguments.stage == "joint"
    cache = {}
    target = load_target("embedded")
    stored_rows = torch.load(arguments.folder / "rows.pt", weights_only=True, mmap=True)
    done = {(result["mode"], result["head"], result["seed"]) for result in read_results(arguments)}
    for seed in arguments.seeds:
        for name in arguments.heads.split(","):
            if time.monotonic() - start_time > 60 * arguments.minutes:
                return print("not finished: run the same command again to continue", flush=True)
            if (arguments.stage, name, seed) in done:
                continue
            folder = arguments.folder / f"{arguments.stage}-{name}-{seed}"
            if folder.exists():
                drafter = load_drafter(folder)
                steps = int((folder / "steps").read_text())
            else:
                start = arguments.folder / (f"frozen-{name}-{seed}" if joint else "backbone")
                head = (
                    HeadConfig() if joint else COMPARED_HEAD_CONFIGS[name]
                )  # an existing head is kept
                config = build_train_config(start, head, joint or name == "none", seed)
                drafter, steps = train_drafter(
                    config, target, stored_rows, cache, arguments.seconds
                )
                save_drafter(drafter.config, drafter.state_dict(), folder)
                (folder / "steps").write_text(str(steps))
            measure_and_record(arguments, target, drafter, arguments.stage, name, seed, steps)


def report(arguments: argparse.Namespace) -> None:
    """Print tables: τ with intervals over prompts, seeds pooled; and the gain over no head."""
    runs_by_head: dict[tuple, list[dict]] = {}
    for result in read_results(arguments):
        runs_by_head.setdefault((result["mode"], result["head"]), []).append(result)
    for mode in ("frozen", "joint"):
        print(
            f"\n{mode}\n| head | seeds | steps | "
            + " | ".join(["chain", *map(str, HEAD_TREE_BUDGETS)])
            + " |"
        )
        for (group_mode, name), runs in runs_by_head.items():
            if group_mode == mode:
                baseline_runs = runs_by_head.get((mode, "none"))
                cells = [
                    format_cell(runs, baseline_runs, budget)
                    for budget in ("chain", *map(str, HEAD_TREE_BUDGETS))
                ]
                steps = sum(train_and_measure["steps"] for train_and_measure in runs) // len(runs)
                print(f"| {name} | {len(runs)} | {steps:,} | " + " | ".join(cells) + " |")


def format_cell(runs: list[dict], baseline_runs: list[dict] | None, budget: str) -> str:
    """Return τ with its interval, or its gain over no head with the interval over prompts."""
    sides = [
        (
            runs[0]["tokens"],
            np.mean([train_and_measure["rounds"][budget] for train_and_measure in side], 0),
        )
        for side in (runs, baseline_runs or runs)
    ]
    tokens_and_rounds, baseline_tokens_and_rounds = (
        np.stack(side, -1) for side in sides
    )  # (n, 2) tokens and rounds of every prompt
    tau, (low, high) = compute_acceptance_length_or_ratio(tokens_and_rounds)
    if baseline_runs is None or baseline_runs is runs:
        return f"{tau:.3f} ({low:.2f} to {high:.2f})"
    speedup, (low, high) = compute_acceptance_length_or_ratio(
        tokens_and_rounds, baseline_tokens_and_rounds
    )
    return (
        f"{tau:.3f} +{100 * (speedup - 1):.1f} % ({100 * (low - 1):.0f} to {100 * (high - 1):.0f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=("prepare", "frozen", "joint", "report"))
    parser.add_argument("--folder", type=Path, default=Path("runs/heads"))
    parser.add_argument(
        "--checkpoint",
        default="data/embedded/drafter",
        help="prepare: the drafter whose backbone is used",
    )
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--outside", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument(
        "--rows", type=int, default=800, help="prepare: packed sequences to train on"
    )
    parser.add_argument("--backbone-seconds", type=float, default=180)
    parser.add_argument("--heads", default=",".join(COMPARED_HEAD_CONFIGS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--seconds", type=float, default=30, help="processor time to train each drafter"
    )
    parser.add_argument(
        "--minutes", type=float, default=8, help="start no further drafter after this time"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    {"prepare": prepare, "report": report}.get(arguments.stage, train_and_measure)(arguments)


if __name__ == "__main__":
    main()
