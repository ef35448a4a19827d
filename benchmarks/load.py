"""Is the budget that follows the load ever slower than the best of plain decoding and all fixed
budgets?

    python benchmarks/load.py runs/embedded-dflash/checkpoints/best/drafter --threads 2  # 12 minutes, quiet
    python benchmarks/load.py DRAFTER --clients 1 64 --minutes 4
    python benchmarks/load.py smollm2 --target smollm2 --quantization int8 --suite SUITES --threads
    2 --clients 1 8

As many clients as `--clients` says write texts of 16 to 64 tokens, as many side by side as the
server's default has rows. All ways write the same texts in a turn, one a client and at least eight,
other texts in the next turn, and every way keeps its engine: what `auto` learns, it keeps, and it
meets another load each turn. Before the first turn every engine writes sixteen texts. In a turn the
engines' steps alternate, the next one always by the engine that has used least time so far, so that
a machine that is faster in one second than in the next is so for all ways; every way's clock counts
its own steps alone.

The first three turns at each number of clients choose the best way other than `auto`, by the tokens
a second in all of them; what falls below 0.9 of the best leaves. The turns after them compare
`auto` with that way alone on texts that did not choose it: the best of many noisy figures would
flatter it. Numbers of clients take turns so that each has as much of the time.

Times are the processor's for one thread (`--threads`: wall-clock, for a quiet machine). Printed:
tokens a second of every way in the turns that choose (- after it left: of the first ones), the
chosen way, how many turns compare; tokens a second of `auto` over those of that way in the first
turn by itself, and in all turns that compare, with the interval of 95% (turns resampled); whether
all ways wrote the same texts; of plain decoding and `auto`, in the turns that choose, the
milliseconds to a text's first piece and between two pieces, the 50th and 99th percentile. Last: at
which numbers of clients the interval begins at 0.95 or above.
"""

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from inputs import add_prompts, add_target, prompts_of

from infer import Engine
from infer.cli import models
from infer.config import EngineConfig, TargetConfig, TextOptions
from infer.evaluation.ruler import FEWEST, interval

BUDGETS = (2, 4, 8, 16, 64)
WAYS = {"plain": ("plain", 1), "chain": ("chain", 7)} | {
    f"{nodes} nodes": ("ddtree", nodes) for nodes in BUDGETS
}
BESIDE = ("plain", "auto")  # whose waiting times are printed
# texts side by side at most; of a turn at least
ROWS = EngineConfig().max_num_seqs
LEAST = 8
CHOOSING = 3  # turns
LEAVES = 0.9  # of the best: a way that is slower is not compared any more
GOAL = 0.95


@dataclass
class Seen:
    """What a way did with a number of clients."""

    seconds: list[float] = field(default_factory=list)  # turn by turn
    firsts: list[float] = field(default_factory=list)  # milliseconds to a text's first piece
    pauses: list[float] = field(default_factory=list)  # and between two pieces


@dataclass
class Load:
    """A number of clients: which ways still take part, and what they did."""

    clients: int
    ways: list[str]
    seen: dict[str, Seen] = field(default_factory=lambda: defaultdict(Seen))
    tokens: list[int] = field(default_factory=list)  # turn by turn
    same: bool = True

    @property
    def compared(self) -> float:
        """Seconds of the turns that compare."""
        return sum(sum(seen.seconds[CHOOSING:]) for seen in self.seen.values())

    def speed(self, way: str) -> float:
        """Return the tokens a second of a way in the turns that choose, as far as it took part."""
        seconds = self.seen[way].seconds[:CHOOSING]
        return sum(self.tokens[: len(seconds)]) / sum(seconds)

    def choose(self) -> None:
        """Let ways leave that are slow; all but the best and `auto` after the last turn that
        chooses."""
        fixed = [way for way in self.ways if way != "auto"]
        best = max(fixed, key=self.speed)
        if len(self.tokens) < CHOOSING:
            self.ways = [
                way
                for way in self.ways
                if way in BESIDE or self.speed(way) > LEAVES * self.speed(best)
            ]
        elif len(self.tokens) == CHOOSING:
            self.ways = [best, "auto"]

    def ratio(self, turns: Sequence[int]) -> float:
        """Return the tokens a second of `auto` over those of the chosen way, in these turns."""
        best, auto = (self.seen[way].seconds for way in self.ways)
        return sum(best[turn] for turn in turns) / sum(auto[turn] for turn in turns)

    def interval(self) -> tuple[float, float]:
        """Return the interval of that ratio in the turns that compare; of a few turns nothing is
        known."""
        best, auto = (np.array(self.seen[way].seconds[CHOOSING:]) for way in self.ways)
        return tuple(
            interval(lambda drawn: best[drawn].sum(1) / auto[drawn].sum(1), len(best))
            or (0, np.inf)
        )


class Part:
    """A way's part of a turn: the texts that are asked for, as many at a time as there are clients.
    All times are seconds of its own steps."""

    def __init__(
        self, engine: Engine, clients: int, asked: list[tuple[list[int], TextOptions]]
    ) -> None:
        self.engine = engine
        self.clients = clients
        self.asked = asked
        # by text: when it was asked for, and when it grew
        self.took = 0.0
        self.times = {}

    @property
    def busy(self) -> bool:
        return self.engine.busy or len(self.times) < len(self.asked)

    def step(self) -> None:
        began = self.took
        mark = self.engine.clock()
        if not self.engine.busy:
            for each in self.asked[len(self.times) :][: self.clients]:
                self.times[self.engine.submit(*each)] = [began]
        grown = self.engine.step()
        self.took += self.engine.clock() - mark
        for text in grown:
            self.times[text].append(self.took)

    def note(self, seen: Seen) -> list[list[int]]:
        """Note what it took, once it is done; return the texts."""
        times = self.times.values()
        if len(seen.seconds) < CHOOSING:
            seen.firsts += [1000 * (time[1] - time[0]) for time in times]
            seen.pauses += [
                1000 * (after - before) for time in times for before, after in pairwise(time[1:])
            ]
        seen.seconds.append(self.took)
        return [text.ids for text in self.times]


def write(parts: Collection[Part]) -> None:
    """Let all parts write their texts, a step at a time, of the part that is behind."""
    while busy := [part for part in parts if part.busy]:
        min(busy, key=lambda part: part.took).step()


def take_turn(
    load: Load, engines: dict[str, Engine], asked: list[tuple[list[int], TextOptions]]
) -> None:
    """Let all ways that still take part write the next texts."""
    turn = len(load.tokens)
    count = max(load.clients, LEAST)
    texts = [asked[(turn * count + i) % len(asked)] for i in range(count)]
    order = load.ways[:: -1 if turn % 2 else 1]
    parts = {way: Part(engines[way], load.clients, texts) for way in order}
    write(parts.values())
    written = [part.note(load.seen[way]) for way, part in parts.items()]
    load.same &= all(each == written[0] for each in written)
    load.tokens.append(sum(map(len, written[0])))
    load.choose()


def row(load: Load) -> str:
    """Return a line of the table."""
    cells = [f"{load.speed(way):.0f}" for way in load.seen]
    cells += [load.ways[0], f"{len(load.tokens) - CHOOSING}", f"{load.ratio([0]):.2f}"]
    compared = range(CHOOSING, len(load.tokens))
    cells.append("{:.3f}, {:.3f} to {:.3f}".format(load.ratio(compared), *load.interval()))
    cells.append("yes" if load.same else "NO")
    for what in ("firsts", "pauses"):
        for way in BESIDE:
            cuts = statistics.quantiles(getattr(load.seen[way], what), n=100)
            cells.append(f"{cuts[49]:.0f}, {cuts[98]:.0f}")
    return "".join(f"{cell:>{WIDTH[i]}}" for i, cell in enumerate([str(load.clients), *cells]))


COLUMNS = [*WAYS, "auto", "best", "turns", "first turn", "auto / best, 95%", "same"]
COLUMNS += [f"{way}, {what}" for what in ("first", "pause") for way in BESIDE]
WIDTH = [7, *(max(9, len(name) + 2) for name in COLUMNS)]
WIDTH[1 + COLUMNS.index("auto / best, 95%")] = 24


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "drafter", nargs="?", default="runs/embedded-dflash/checkpoints/best/drafter"
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument(
        "--minutes", type=float, default=12, help="it ends by then, after five turns that compare"
    )
    parser.add_argument("--threads", type=int, default=0, help="0: processor time of one thread")
    add_target(parser)
    add_prompts(parser)
    parser.set_defaults(prompts=64, prompt_tokens=64)
    args = parser.parse_args()
    began = time.monotonic()
    torch.set_num_threads(max(1, args.threads))
    clock = time.perf_counter if args.threads else time.thread_time
    place = TargetConfig(
        args.target, dtype=args.dtype, device="cpu", quantization=args.quantization or "none"
    )
    target, drafter = models.load(place, args.drafter)
    prompts = prompts_of(args, target.tokenizer)
    capacity = max(map(len, prompts)) + 64
    asked = [
        (ids, TextOptions(max_new_tokens=16 + 29 * i % 49, ignore_eos=True))
        for i, ids in enumerate(prompts)
    ]
    engines = {
        way: Engine(
            target, drafter, EngineConfig(method, budget, max_num_seqs=ROWS), capacity, clock
        )
        for way, (method, budget) in (WAYS | {"auto": ("ddtree", "auto")}).items()
    }
    write([Part(engine, ROWS, asked[:ROWS]) for engine in engines.values()])  # warms up
    loads = [Load(clients, [*engines]) for clients in args.clients]
    for turn in range(CHOOSING + FEWEST):
        for load in loads:
            take_turn(load, engines, asked)
        print(f"{turn + 1} turns, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    while time.monotonic() - began < 60 * args.minutes - 10:
        take_turn(min(loads, key=lambda load: load.compared), engines, asked)
    print("".join(f"{name:>{WIDTH[i]}}" for i, name in enumerate(["clients", *COLUMNS])))
    for load in loads:
        print(row(load))
    held = [load.clients for load in loads if load.interval()[0] >= GOAL]
    print(f"auto reaches {GOAL} of the best at {held or 'no number of'} clients of {args.clients}")


if __name__ == "__main__":
    main()
