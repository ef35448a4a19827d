"""How fast every way of decoding is, and where a round's time goes.

    python benchmarks/decode.py [runs/embedded-dflash/checkpoints/best] [--target ...]

First table: one text at a time; plain decoding, chain and DDTree by our engine, transformers' `generate`, and
transformers' own DFlash decoding with the same drafter. The methods take turns on every prompt, several times over, so
that a noisy machine is equally noisy for all; times are medians over the repeats. Second table: many texts at once.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from assisted import assisted

from data.prompts import held_out_prompts
from data.rows import DataConfig
from infer import DFlash, Engine, Target, load_drafter, load_target
from infer.config import EngineConfig, TextOptions
from infer.engine.sequence import STAGES, Sequence
from infer.evaluation.evaluate import describe_device, tau
from infer.evaluation.measuring import synchronised_clock

SHOWN = ("draft", "build", "verify", "commit")


@dataclass
class Run:
    """One method on all prompts, once for every repeat."""

    seconds: list[float] = field(default_factory=list)
    stages: list[dict[str, float]] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)  # of the last repeat
    texts: list[Sequence] = field(default_factory=list)


def by_engine(
    target: Target, drafter: DFlash, method: str, budget: int | str, args, rows: int, continuity: str | None = None
) -> Callable:
    """Decodes the given prompts with our engine, `rows` side by side; one engine for all calls."""
    clock = synchronised_clock(target.device)
    capacity = args.prompt_tokens + args.new_tokens
    engine = Engine(
        target,
        drafter,
        EngineConfig(method, budget, continuity, rows=rows, positions=None, compile=args.compile),
        capacity,
        clock,
    )
    options = TextOptions(max_new_tokens=args.new_tokens, ignore_eos=args.ignore_eos)

    def run(prompts: list[list[int]]) -> tuple[list[list[int]], dict[str, float], list[Sequence]]:
        before = dict(engine.seconds)
        texts = [engine.submit(prompt, options) for prompt in prompts]
        while engine.busy:
            engine.step()
        stages = {stage: engine.seconds[stage] - before[stage] for stage in STAGES}
        return [text.ids for text in texts], stages, texts

    return run


def by_transformers(target: Target, args, **settings: object) -> Callable:
    """Decodes prompt by prompt with Hugging Face's loop."""

    def run(prompts: list[list[int]]) -> tuple[list[list[int]], dict[str, float], list[Sequence]]:
        answers = []
        for prompt in prompts:
            ids = torch.tensor([prompt], device=target.device)
            mask = torch.ones_like(ids)
            out = target.model.generate(
                ids, attention_mask=mask, max_new_tokens=args.new_tokens, do_sample=False, **settings
            )
            answers.append(out[0, len(prompt) :].tolist())
        return answers, dict.fromkeys(STAGES, 0.0), []

    return run


def measure(methods: dict[str, Callable], chunks: list[list[list[int]]], repeats: int) -> dict[str, Run]:
    """All methods on all chunks of prompts, by turns."""
    runs = {name: Run() for name in methods}
    for repeat in range(repeats + 1):  # the first time warms up
        for run in runs.values():
            run.seconds.append(0.0)
            run.stages.append(dict.fromkeys(STAGES, 0.0))
            run.ids, run.texts = [], []
        for chunk in chunks[: 1 if repeat == 0 else None]:
            for name, decode in methods.items():
                began = time.perf_counter()
                ids, stages, texts = decode(chunk)
                run = runs[name]
                run.seconds[-1] += time.perf_counter() - began
                run.ids += ids
                run.texts += texts
                for stage, seconds in stages.items():
                    run.stages[-1][stage] += seconds
    for run in runs.values():
        del run.seconds[0], run.stages[0]
    return runs


def speed_line(name: str, run: Run, plain: Run) -> str:
    """Tokens a second, ratio to plain decoding (a median of the repeats' ratios), τ, and a round's milliseconds."""
    tokens = sum(map(len, run.ids))
    ratio = statistics.median(p / s for p, s in zip(plain.seconds, run.seconds, strict=True))
    line = f"{name:<26}{tokens / statistics.median(run.seconds):>8.0f}{ratio:>8.2f}x"
    if not run.texts:
        return line + f"{'':>47}{'yes' if run.ids == plain.ids else 'NO':>6}"
    rounds = sum(text.stats.rounds for text in run.texts)
    spent = {stage: 1000 * statistics.median(stages[stage] for stages in run.stages) / rounds for stage in SHOWN}
    inside = [seconds - stages["prefill"] for seconds, stages in zip(run.seconds, run.stages, strict=True)]
    whole = 1000 * statistics.median(inside) / rounds
    other = whole - sum(spent.values())
    loss = 100 * (whole - spent["draft"] - spent["verify"]) / whole
    line += f"{tau(run.texts):>7.2f}" + "".join(f"{spent[stage]:>8.2f}" for stage in SHOWN)
    return line + f"{other:>7.2f}{loss:>6.1f}%{'yes' if run.ids == plain.ids else 'NO':>6}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter", nargs="?", default="runs/embedded-dflash/checkpoints/best")
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=96)
    parser.add_argument("--new-tokens", type=int, default=128)
    budgets = [16, 32, 64, 128, 256, 512, "auto"]  # auto compiles a dozen shapes if it is compiled
    parser.add_argument(
        "--budgets",
        type=lambda text: text if text == "auto" else int(text),
        nargs="+",
        default=budgets,
        help="nodes, or auto",
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--batch-budget", type=int, default=16, help="DDTree nodes in the second table")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="default: on CUDA only")
    parser.add_argument("--continuity", help="n-gram file: DDTree is measured with it too")
    args = parser.parse_args()

    drafter = load_drafter(args.drafter)
    target = load_target(args.target)
    drafter = drafter.to(target.device, target.dtype)
    prompts = held_out_prompts(DataConfig(), target.tokenizer, max(args.prompts, *args.rows), args.prompt_tokens)
    print(f"{describe_device(target.device)}, {str(target.dtype).removeprefix('torch.')}, block {drafter.block_size}")

    methods = {"plain": by_engine(target, None, "plain", 1, args, 1)}
    methods["chain"] = by_engine(target, drafter, "chain", drafter.block_size - 1, args, 1)
    for budget in args.budgets:
        methods[f"DDTree {budget}"] = by_engine(target, drafter, "ddtree", budget, args, 1)
    for budget in args.budgets if args.continuity else []:
        methods[f"DDTree {budget} + continuity"] = by_engine(
            target, drafter, "ddtree", budget, args, 1, args.continuity
        )
    methods["transformers generate"] = by_transformers(target, args)
    if (theirs := assisted(target, drafter)) is not None:
        methods["transformers DFlash"] = by_transformers(target, args, **theirs)
    runs = measure(methods, [[prompt] for prompt in prompts[: args.prompts]], args.repeats)
    print(f"\none text at a time: {args.prompts} prompts, {args.new_tokens} new tokens, {args.repeats} repeats")
    print(
        f"{'':<26}{'tokens/s':>8}{'speedup':>9}{'τ':>7}"
        + "".join(f"{stage:>8}" for stage in SHOWN)
        + f"{'other':>7}{'loop':>7}{'same':>6}"
    )
    print("(draft, build, verify, commit, other: milliseconds a round; loop: share of a round that is no model pass)")
    for name, run in runs.items():
        print(speed_line(name, run, runs["plain"]))

    many = prompts[: max(args.rows)]
    print(f"\nmany texts: {len(many)} prompts, tokens a second of all rows together")
    print(f"{'':<26}" + "".join(f"{f'{rows} rows':>10}" for rows in args.rows) + f"{'gain':>8}{'same':>6}")
    for name, method, budget in (("plain", "plain", 1), (f"DDTree {args.batch_budget}", "ddtree", args.batch_budget)):
        batched = {
            rows: by_engine(target, None if method == "plain" else drafter, method, budget, args, rows)
            for rows in args.rows
        }
        done = measure(batched, [many], args.repeats)
        speeds = [sum(map(len, run.ids)) / statistics.median(run.seconds) for run in done.values()]
        same = all(run.ids == done[args.rows[0]].ids for run in done.values())
        line = f"{name:<26}" + "".join(f"{speed:>10.0f}" for speed in speeds)
        print(line + f"{speeds[-1] / speeds[0]:>7.2f}x{'yes' if same else 'NO':>6}")


if __name__ == "__main__":
    main()
