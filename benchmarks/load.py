"""Tokens a second under load: plain decoding, fixed budgets and the budget that follows the load, by turns.

    python benchmarks/load.py runs/embedded-dflash/checkpoints/best/drafter --clients 1 4 16 64

For every number of clients the ways take turns; each turn writes one text of 16 to 64 tokens a client, as many side by
side as the server's default has rows, and every way keeps its engine, so that `auto` goes on from what it knows. Times
are the processor's for one thread (`--threads`: wall-clock, for a quiet machine). Printed: tokens a second of every
way; of `auto` the median ratio to the best of the others, turn by turn, with its interval of 95% (bootstrap); and of
`auto` and plain decoding the milliseconds to a text's first piece and between two pieces, the 50th and 99th percentile.
"""

import argparse
import statistics
import time
from itertools import pairwise

import torch
from against import interval

from data.prompts import held_out_prompts
from data.rows import DataConfig
from infer import Engine, load_drafter, load_target
from infer.config import EngineConfig, TextOptions

WAYS = {"plain": ("plain", 1), "chain": ("chain", 7), "ddtree 16": ("ddtree", 16), "ddtree 64": ("ddtree", 64)}
ROWS = EngineConfig().rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter", nargs="?", default="runs/embedded-dflash/checkpoints/best/drafter")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), help="beside auto")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--threads", type=int, default=0, help="0: processor time of one thread")
    args = parser.parse_args()
    torch.set_num_threads(max(1, args.threads))
    clock = time.perf_counter if args.threads else time.thread_time
    target, drafter = load_target("embedded", device="cpu"), load_drafter(args.drafter)
    prompts = held_out_prompts(DataConfig(), target.tokenizer, 64, 64)
    options = [TextOptions(max_new_tokens=16 + 29 * i % 49, ignore_eos=True) for i in range(64)]

    def write(engine: Engine, clients: int) -> tuple[float, list[list[int]], list[list[float]]]:
        """Return tokens a second, the texts, and when pieces of them came."""
        began = clock()
        texts = [engine.submit(prompts[i % 64], options[i % 64]) for i in range(clients)]
        times = {text: [began] for text in texts}
        while engine.busy:
            for text in engine.step():
                times[text].append(clock())
        tokens = sum(len(text.ids) for text in texts)
        return tokens / (clock() - began), [text.ids for text in texts], list(times.values())

    ways = {way: WAYS[way] for way in args.ways} | {"auto": ("ddtree", "auto")}
    columns = [*ways, "auto / best", "95%", "same"]
    columns += [f"{way}, {what}" for what in ("first", "pause") for way in ("plain", "auto")]
    print(f"{'clients':<8}" + "".join(f"{name:>14}" for name in columns))
    for clients in args.clients:
        engines = {
            way: Engine(target, drafter, EngineConfig(method, budget, rows=ROWS), 128, clock)
            for way, (method, budget) in ways.items()
        }
        speeds, texts, firsts, pauses = ({way: [] for way in ways} for _ in range(4))
        for turn in range(args.turns + 1):
            for way, engine in engines.items():
                speed, texts[way], times = write(engine, clients)
                if turn:  # the first warms up
                    speeds[way].append(speed)
                    firsts[way] += [1000 * (time[1] - time[0]) for time in times]
                    pauses[way] += [1000 * (after - before) for time in times for before, after in pairwise(time[1:])]
        medians = {way: statistics.median(found) for way, found in speeds.items()}
        best = max(args.ways, key=medians.get)
        ratios = [a / b for a, b in zip(speeds["auto"], speeds[best], strict=True)]
        between = "{:.2f} to {:.2f}".format(*interval(ratios))
        same = "yes" if all(found == texts["plain"] for found in texts.values()) else "NO"
        cells = [f"{medians[way]:.0f}" for way in ways] + [f"{statistics.median(ratios):.2f}", between, same]
        for found in (firsts, pauses):
            cuts = [statistics.quantiles(found[way], n=100) for way in ("plain", "auto")]
            cells += [f"{cut[49]:.0f}, {cut[98]:.0f}" for cut in cuts]
        print(f"{clients:<8}" + "".join(f"{cell:>14}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
