"""Tokens a second under load: plain decoding, fixed budgets and the budget that follows the load, by turns.

    python benchmarks/load.py runs/embedded-dflash/checkpoints/best/drafter --clients 1 4 16 64

For every number of clients the ways take turns; each turn writes one text a client, as many side by side as the
server's default has rows, and all rows of one way keep their engine, so that `auto` goes on from what it knows. Times
are the processor's for one thread (`--threads`: wall-clock, for a quiet machine). Printed: tokens a second of every
way, and of `auto` the median ratio to the best of the others in the same turn.
"""

import argparse
import statistics
import time

import torch

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
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--threads", type=int, default=0, help="0: processor time of one thread")
    args = parser.parse_args()
    torch.set_num_threads(max(1, args.threads))
    clock = time.perf_counter if args.threads else time.thread_time
    target, drafter = load_target("embedded", device="cpu"), load_drafter(args.drafter)
    prompts = held_out_prompts(DataConfig(), target.tokenizer, 64, 64)
    options = TextOptions(max_new_tokens=args.new_tokens, ignore_eos=True)

    def write(engine: Engine, clients: int) -> tuple[float, list[list[int]]]:
        began = clock()
        texts = [engine.submit(prompts[i % len(prompts)], options) for i in range(clients)]
        while engine.busy:
            engine.step()
        return clients * args.new_tokens / (clock() - began), [text.ids for text in texts]

    ways = WAYS | {"auto": ("ddtree", "auto")}
    print(f"{'clients':<8}" + "".join(f"{way:>11}" for way in ways) + f"{'auto / best':>13}{'same':>6}")
    for clients in args.clients:
        engines = {
            way: Engine(target, drafter, EngineConfig(method, budget, rows=ROWS), 64 + args.new_tokens, clock)
            for way, (method, budget) in ways.items()
        }
        speeds, texts = {way: [] for way in ways}, {}
        for turn in range(args.turns + 1):
            for way, engine in engines.items():
                speed, texts[way] = write(engine, clients)
                if turn:  # the first warms up
                    speeds[way].append(speed)
        medians = {way: statistics.median(found) for way, found in speeds.items()}
        best = max(WAYS, key=medians.get)
        ratio = statistics.median(a / b for a, b in zip(speeds["auto"], speeds[best], strict=True))
        same = "yes" if all(found == texts["plain"] for found in texts.values()) else "NO"
        line = f"{clients:<8}" + "".join(f"{medians[way]:>11.0f}" for way in ways)
        print(line + f"{ratio:>13.2f}{same:>6}", flush=True)


if __name__ == "__main__":
    main()
