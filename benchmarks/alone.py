"""What is a drafter worth beside the n-grams it carries? DDTree's trees of both, and of the n-grams alone.

    python benchmarks/alone.py data/embedded/drafter runs/embedded-dflash/checkpoints/best/drafter --threads 2

Prompt by prompt the ways take turns. Printed, for held-out prompts and for texts from outside the data: tokens a round,
the median over prompts of how much faster than our plain decoding a way is, and how much faster a drafter is than its
n-grams alone, each with its interval of 95% (bootstrap). Times are the processor's for one thread (`--threads`:
wall-clock, for a quiet machine).
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch
from against import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.prompts import evaluation_prompts
from data.rows import DataConfig
from infer import load_drafter, load_target
from infer.api import decode
from infer.config import DecodeOptions
from infer.drafters.lookup import Lookup
from infer.engine.loops import LONGEST_PERIOD


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafters", nargs="+", help="folders with n-grams beside the weights")
    parser.add_argument("--budget", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--outside", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=0, help="0: processor time of one thread")
    args = parser.parse_args()
    torch.set_num_threads(max(1, args.threads))
    clock = time.perf_counter if args.threads else time.thread_time

    target = load_target("embedded")
    prompts = evaluation_prompts(DataConfig(), target.tokenizer, args.prompts, 96, args.outside)
    shared = {"max_new_tokens": args.new_tokens, "loop_period": LONGEST_PERIOD, "positions": None}
    ways = {"plain": (None, DecodeOptions(method="plain", **shared))}
    for folder in args.drafters:
        drafter = load_drafter(folder, target.dtype)
        ways[folder] = drafter, DecodeOptions(budget=args.budget, **shared)
        alone = DecodeOptions(budget=args.budget, continuity=str(drafter.ngrams), **shared)
        ways[f"{folder}, n-grams alone"] = Lookup(drafter.block_size), alone

    seconds, commits = {way: [] for way in ways}, {way: [] for way in ways}  # commits: (tokens, rounds)
    for number, prompt in enumerate([prompts[0], *prompts]):  # the first warms up
        for way in list(ways)[:: 1 if number % 2 else -1]:
            began = clock()
            text = decode(target, ways[way][0], [prompt.ids], ways[way][1])[0]
            if number:
                seconds[way].append(clock() - began)
                commits[way].append((len(text.ids) - 1, text.stats.rounds))
    outside = np.array([prompt.beside is not None for prompt in prompts])
    for name, chosen in (("held-out prompts", ~outside), ("texts from outside", outside)):
        if not chosen.any():
            continue
        print(f"{chosen.sum()} {name}")
        took = {way: np.array(each)[chosen] for way, each in seconds.items()}
        for way in ways:
            tokens, rounds = np.array(commits[way])[chosen].sum(0)
            line = f"  {way}: τ {tokens / rounds:.2f}, {median(took['plain'] / took[way])} times plain decoding"
            beside = took.get(f"{way}, n-grams alone")
            print(line + ("" if beside is None else f", {median(beside / took[way])} times its n-grams alone"))


if __name__ == "__main__":
    main()
