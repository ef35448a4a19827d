"""Decoding by this checkout, by another one, and by transformers, with the same weights and prompts, by turns.

    python benchmarks/against.py runs/embedded-dflash/checkpoints/best/drafter --other ../at-8ca1fa3

Every checkout decodes in a process of its own, whose only API are `load_target`, `load_drafter` and `generate`; prompt
by prompt the ways take turns, so that a noisy machine is equally noisy for all. Times are the processor's for a
process of one thread (`--threads`: wall-clock, for a quiet machine). Printed: tokens a second, the median over prompts
of the ratio to the first way with its interval of 95% (bootstrap), and whether all texts are the same.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
WAYS = ("plain", "chain", "ddtree 8", "ddtree 16", "ddtree 64")


def work(drafter: str, new_tokens: int, threads: int) -> None:
    """Answer lines `[way, prompt]` of standard input with `[seconds, ids]`."""
    import torch

    from infer import generate, load_drafter, load_target

    torch.set_num_threads(max(1, threads))
    clock = time.perf_counter if threads else time.thread_time
    target, drafter = load_target("embedded", device="cpu"), load_drafter(drafter)
    theirs = None
    for line in sys.stdin:
        way, prompt = json.loads(line)
        method, _, budget = way.partition(" ")
        if method == "transformers":
            inputs = torch.tensor([prompt])
            settings = {}
            if budget == "DFlash":
                from benchmarks.decode import transformers_drafter

                theirs = theirs or transformers_drafter(drafter, target)
                settings = {"assistant_model": theirs, "speculation_type": "dflash"}
            began = clock()
            settings |= {"attention_mask": torch.ones_like(inputs), "max_new_tokens": new_tokens, "do_sample": False}
            ids = target.model.generate(inputs, **settings)[0, len(prompt) :].tolist()
        else:
            settings = {"method": method, "budget": int(budget or 7), "rows": 1, "max_new_tokens": new_tokens}
            began = clock()
            ids = generate(target, None if method == "plain" else drafter, prompt, **settings).ids
        print(json.dumps([clock() - began, ids]), flush=True)


def start(checkout: Path, args: argparse.Namespace) -> subprocess.Popen:
    command = [sys.executable, __file__, str(Path(args.drafter).resolve()), "--work", f"--threads={args.threads}"]
    command += [f"--new-tokens={args.new_tokens}"]
    count = str(max(1, args.threads))
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=checkout, env=environment, stdin=pipe, stdout=pipe, stderr=None, text=True)


def ask(worker: subprocess.Popen, way: str, prompt: list[int]) -> tuple[float, list[int]]:
    worker.stdin.write(json.dumps([way, prompt]) + "\n")
    worker.stdin.flush()
    seconds, ids = json.loads(worker.stdout.readline())
    return seconds, ids


def interval(ratios: list[float]) -> tuple[float, float]:
    """Of the median, 95%, from a thousand resamplings."""
    dice = random.Random(0)
    medians = sorted(statistics.median(dice.choices(ratios, k=len(ratios))) for _ in range(1000))
    return medians[25], medians[975]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter", nargs="?", default="runs/embedded-dflash/checkpoints/best/drafter")
    parser.add_argument("--other", type=Path, help="another checkout of this repository")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=0, help="0: processor time of one thread")
    parser.add_argument("--ways", nargs="+", default=["transformers", "transformers DFlash", *WAYS])
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        return work(args.drafter, args.new_tokens, args.threads)

    sys.path.insert(0, str(HERE))
    from data.prompts import held_out_prompts
    from data.rows import DataConfig
    from infer import load_target

    prompts = held_out_prompts(DataConfig(), load_target("embedded").tokenizer, args.prompts, 96)
    workers = {"": start(HERE, args)} | ({"other: ": start(args.other, args)} if args.other else {})
    rows = [(side, way) for side in workers for way in args.ways if not (side and way.startswith("transformers"))]
    for side, way in rows:
        ask(workers[side], way, prompts[0])  # warms up
    done: dict[tuple[str, str], list[tuple[float, list[int]]]] = {row: [] for row in rows}
    for prompt in prompts:
        for side, way in rows:
            done[side, way].append(ask(workers[side], way, prompt))
    first = done[rows[0]]
    print(f"{len(prompts)} prompts, {args.new_tokens} new tokens, {args.threads or 'processor time of one'} threads")
    print(f"{'':<22}{'tokens/s':>9}{'ratio':>7}{'95%':>14}{'other':>7}{'95%':>14}{'same':>6}")
    for side, way in rows:
        found = done[side, way]
        line = f"{side + way:<22}{sum(len(i) for _, i in found) / sum(s for s, _ in found):>9.0f}"
        bases = [first] + ([done["other: ", way]] if not side and ("other: ", way) in done else [])
        for base in bases:
            ratios = [b / s for (s, _), (b, _) in zip(found, base, strict=True)]
            low, high = interval(ratios)
            line += f"{statistics.median(ratios):>7.2f}{f'{low:.2f} to {high:.2f}':>14}"
        line += " " * (21 * (2 - len(bases)))
        print(line + f"{'yes' if [i for _, i in found] == [i for _, i in first] else 'NO':>6}")
    for worker in workers.values():
        worker.stdin.close()
        worker.wait()


if __name__ == "__main__":
    main()
