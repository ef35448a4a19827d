"""Tokens a second under load: plain decoding, fixed budgets and the budget that follows the load, by turns.

    python benchmarks/load.py runs/embedded-dflash/checkpoints/best/drafter --clients 1 4 16 64
    python benchmarks/load.py DRAFTER --minutes 12 --threads 2      # a quiet machine

A turn goes through all numbers of clients, and the ways take turns at each: they write the same texts of 16 to 64
tokens, one a client and at least eight one after the other, other texts in the next turn, as many side by side as the
server's default has rows. Every way keeps its engine, so that `auto` goes on from what it knows, and meets another load
each time. Times are the processor's for one thread (`--threads`: wall-clock, for a quiet machine). Printed: tokens a
second of every way; of `auto` the median over turns of its ratio to each of the others, with its interval of 95%
(bootstrap); whether all wrote the same texts; and of `auto` and plain decoding the milliseconds to a text's first piece
and between two pieces, the 50th and 99th percentile.
"""

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from against import interval

from data.prompts import held_out_prompts
from data.rows import DataConfig
from infer import Engine, load_drafter, load_target
from infer.config import EngineConfig, TextOptions

WAYS = {"plain": ("plain", 1), "chain": ("chain", 7), "ddtree 16": ("ddtree", 16), "ddtree 64": ("ddtree", 64)}
BESIDE = ("plain", "auto")  # whose waiting times are printed
ROWS, LEAST = EngineConfig().rows, 8  # texts side by side at most; of a turn at least


@dataclass
class Seen:
    """What a way did with a number of clients, turn by turn."""

    speeds: list[float] = field(default_factory=list)  # tokens a second
    texts: list[list[list[int]]] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)  # milliseconds to a text's first piece
    pauses: list[float] = field(default_factory=list)  # and between two pieces


def write(engine: Engine, clients: int, asked: list[tuple[list[int], TextOptions]], seen: Seen) -> None:
    """Write the texts that are asked for, as many at a time as there are clients, and note what it took."""
    took, texts = 0.0, []
    for start in range(0, len(asked), clients):
        began = engine.clock()
        times = {engine.submit(*each): [began] for each in asked[start : start + clients]}
        while engine.busy:
            for text in engine.step():
                times[text].append(engine.clock())
        took += engine.clock() - began
        texts += [text.ids for text in times]
        seen.firsts += [1000 * (time[1] - time[0]) for time in times.values()]
        seen.pauses += [1000 * (after - before) for time in times.values() for before, after in pairwise(time[1:])]
    seen.texts.append(texts)
    seen.speeds.append(sum(map(len, texts)) / took)


def row(clients: int, seen: dict[str, Seen]) -> str:
    """Return a line of the table."""
    cells = [f"{statistics.median(each.speeds):.0f}" for each in seen.values()]
    for way in list(seen)[:-1]:
        ratios = [a / b for a, b in zip(seen["auto"].speeds, seen[way].speeds, strict=True)]
        cells.append("{:.2f}, {:.2f} to {:.2f}".format(statistics.median(ratios), *interval(ratios)))
    cells.append("yes" if all(each.texts == seen["auto"].texts for each in seen.values()) else "NO")
    for what in ("firsts", "pauses"):
        for way in BESIDE:
            cuts = statistics.quantiles(getattr(seen[way], what), n=100)
            cells.append(f"{cuts[49]:.0f}, {cuts[98]:.0f}")
    return f"{clients:<8}" + "".join(f"{cell:>23}" for cell in cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter", nargs="?", default="runs/embedded-dflash/checkpoints/best/drafter")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), help="beside auto and plain")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--minutes", type=float, help="as many turns as end by then, and two at least")
    parser.add_argument("--threads", type=int, default=0, help="0: processor time of one thread")
    args = parser.parse_args()
    torch.set_num_threads(max(1, args.threads))
    clock = time.perf_counter if args.threads else time.thread_time
    target, drafter = load_target("embedded", device="cpu"), load_drafter(args.drafter)
    prompts = held_out_prompts(DataConfig(), target.tokenizer, 64, 64)
    asked = [(ids, TextOptions(max_new_tokens=16 + 29 * i % 49, ignore_eos=True)) for i, ids in enumerate(prompts)]
    ways = {way: WAYS[way] for way in dict.fromkeys(["plain", *args.ways])} | {"auto": ("ddtree", "auto")}
    engines = {
        way: Engine(target, drafter, EngineConfig(method, budget, rows=ROWS), 128, clock)
        for way, (method, budget) in ways.items()
    }
    for engine in engines.values():  # warms up
        write(engine, ROWS, asked[:ROWS], Seen())
    seen = {clients: {way: Seen() for way in ways} for clients in args.clients}
    began, turn, spent = time.monotonic(), 0, 0.0
    while turn < args.turns if args.minutes is None else turn < 2 or spent * (turn + 1) / turn <= 60 * args.minutes:
        for clients in args.clients:
            count = max(clients, LEAST)
            texts = [asked[(turn * count + i) % len(asked)] for i in range(count)]
            for way in list(ways)[:: -1 if turn % 2 else 1]:
                write(engines[way], clients, texts, seen[clients][way])
        turn, spent = turn + 1, time.monotonic() - began
        print(f"{turn} turns, {spent:.0f} s", file=sys.stderr, flush=True)
    columns = [*ways, *(f"auto / {way}, 95%" for way in ways if way != "auto"), "same"]
    columns += [f"{way}, {what}" for what in ("first", "pause") for way in BESIDE]
    print(f"{'clients':<8}" + "".join(f"{name:>23}" for name in columns))
    for clients, of_ways in seen.items():
        print(row(clients, of_ways))


if __name__ == "__main__":
    main()
