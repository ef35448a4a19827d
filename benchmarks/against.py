"""Decoding by this checkout, by another and by transformers, same weights and prompts, by turns.

    python benchmarks/against.py runs/embedded-dflash/checkpoints/best/drafter --other ../at-8ca1fa3

Every checkout decodes in a process of its own, whose only API are `load_target`, `load_drafter` and `generate`; prompt
by prompt the ways take turns, so that a noisy machine is equally noisy for all. Times are the processor's for a
process of one thread (`--threads`: wall-clock, for a quiet machine). Printed: tokens a second; the median over prompts
of the ratio to transformers' `generate`, to its DFlash decoding, to our plain decoding and to the same way by the other
checkout, each with its interval of 95% (bootstrap); and whether all texts are the same.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
WAYS = ("plain", "chain", "ddtree 8", "ddtree 16", "ddtree 64")
TEXT = " text"  # behind a way's name: its trees ask the text's own n-grams, which other checkouts may not know
OURS = (*WAYS, "ddtree 8 text", "ddtree 16 text", "ddtree 64 text")
BASES = {"generate": "transformers", "its DFlash": "transformers DFlash", "plain": "plain"}  # what ratios are to


def work(args: argparse.Namespace) -> None:
    """Answer lines `[way, prompt]` of standard input with `[seconds, ids]`."""
    import torch

    from infer import generate, load_drafter, load_target

    threads, new_tokens = args.threads, args.new_tokens
    torch.set_num_threads(max(1, threads))
    clock = time.perf_counter if threads else time.thread_time
    target, drafter = load_target(args.target, device="cpu", dtype="float32"), load_drafter(args.drafter)
    theirs = None
    for line in sys.stdin:
        way, prompt = json.loads(line)
        method, _, budget = way.removesuffix(TEXT).partition(" ")
        if method == "transformers":
            inputs = torch.tensor([prompt])
            settings = {}
            if budget == "DFlash":
                from assisted import assisted

                theirs = theirs or assisted(target, drafter)
                if theirs is None:
                    raise SystemExit("transformers cannot run this drafter: leave out the way `transformers DFlash`")
                settings = dict(theirs)
            began = clock()
            settings |= {"attention_mask": torch.ones_like(inputs), "max_new_tokens": new_tokens, "do_sample": False}
            ids = target.model.generate(inputs, **settings)[0, len(prompt) :].tolist()
        else:
            settings = {"method": method, "budget": int(budget or 7), "rows": 1, "max_new_tokens": new_tokens}
            settings |= {"continuity": TEXT.strip()} if way.endswith(TEXT) else {}
            began = clock()
            ids = generate(target, None if method == "plain" else drafter, prompt, **settings).ids
        print(json.dumps([clock() - began, ids]), flush=True)


def start(checkout: Path, args: argparse.Namespace) -> subprocess.Popen:
    command = [sys.executable, __file__, str(Path(args.drafter).resolve()), "--work", f"--threads={args.threads}"]
    command += [f"--new-tokens={args.new_tokens}", f"--target={args.target}"]
    count = str(max(1, args.threads))
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=checkout, env=environment, stdin=pipe, stdout=pipe, stderr=None, text=True)


def ask(worker: subprocess.Popen, way: str, prompt: list[int]) -> tuple[float, list[int]]:
    worker.stdin.write(json.dumps([way, prompt]) + "\n")
    worker.stdin.flush()
    seconds, ids = json.loads(worker.stdout.readline())
    return seconds, ids


def ratio(found: list[tuple[float, list[int]]], base: list[tuple[float, list[int]]]) -> str:
    """Return the median over prompts of how much faster they were decoded, and its interval."""
    return median([theirs / ours for (ours, _), (theirs, _) in zip(found, base, strict=True)])


def median(ratios: Sequence[float]) -> str:
    """Return the median of ratios (P,) with its interval."""
    import numpy as np

    from infer.evaluation.ruler import interval  # the workers' checkouts have none, so not above

    ratios = np.asarray(ratios)
    known = interval(lambda drawn: np.median(ratios[drawn], axis=1), len(ratios))
    return f"{np.median(ratios):.2f}" + ("" if known is None else " ({:.2f} to {:.2f})".format(*known))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter", nargs="?", default="runs/embedded-dflash/checkpoints/best/drafter")
    parser.add_argument("--target", default=str(HERE / "data/embedded"), help="folder of the target")
    parser.add_argument("--other", type=Path, help="another checkout of this repository")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=0, help="0: processor time of one thread")
    parser.add_argument("--ways", nargs="+", default=["transformers", "transformers DFlash", *OURS])
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        return work(args)

    sys.path.insert(0, str(HERE))
    from data.prompts import held_out_prompts
    from data.rows import DataConfig
    from infer import load_target

    prompts = held_out_prompts(DataConfig(), load_target(args.target).tokenizer, args.prompts, 96)
    workers = {"": start(HERE, args)} | ({"other: ": start(args.other, args)} if args.other else {})
    rows = [(side, way) for side in workers for way in args.ways if not side or way in WAYS]
    for side, way in rows:
        ask(workers[side], way, prompts[0])  # warms up
    done: dict[tuple[str, str], list[tuple[float, list[int]]]] = {row: [] for row in rows}
    for prompt in prompts:
        for side, way in rows:
            done[side, way].append(ask(workers[side], way, prompt))
    clock = f"{args.threads} threads" if args.threads else "processor time of one thread"
    print(f"{len(prompts)} prompts, {args.new_tokens} new tokens, {clock}; ratios to")
    bases = [(name, way) for name, way in BASES.items() if ("", way) in done]
    columns = [*(name for name, _ in bases), *(["the other's"] if args.other else [])]
    print(f"{'':<22}{'tokens/s':>9}" + "".join(f"{name:>22}" for name in columns) + f"{'same':>6}")
    for side, way in rows:
        found = done[side, way]
        line = f"{side + way:<22}{sum(len(i) for _, i in found) / sum(s for s, _ in found):>9.0f}"
        beside = [("", base) for _, base in bases] + ([("other: ", way.removesuffix(TEXT))] if args.other else [])
        shown = (ratio(found, done[base]) if base in done and base != (side, way) else "" for base in beside)
        line += "".join(f"{each:>22}" for each in shown)
        print(line + f"{'yes' if [i for _, i in found] == [i for _, i in done[rows[0]]] else 'NO':>6}")
    for worker in workers.values():
        worker.stdin.close()
        worker.wait()


if __name__ == "__main__":
    main()
