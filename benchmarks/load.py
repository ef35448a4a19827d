"""Check that the automatic node budget is never slower than the best fixed method, by load.

    python benchmarks/load.py runs/embedded-dflash/checkpoints/best/drafter --threads 2
    python benchmarks/load.py DRAFTER --clients 1 64 --minutes 4
    python benchmarks/load.py smollm2 --target smollm2 --quantization int8 --suite SUITES \
        --threads 2 --rows 64 --clients 1 4 8 16 32 64 --budgets 2 4 8 16 --plot batch_size.svg

The methods are baseline decoding, a chain, DDTrees of fixed budgets, and `auto`, the budget that
follows the load. `--clients` requests of 16 to `--tokens` tokens run at once, up to `--rows`, by
default the server's default. In a turn all methods decode the same requests, at least eight and at
least one a client; the next turn has other requests. Every method keeps its engine between turns,
so that `auto` keeps what it has learnt although the load changes each turn. Before the first turn
every engine decodes `--rows` requests as a warm-up. In a turn the steps of the engines are
interleaved: the next step is always that of the engine that has used the least time, so that
changes of the machine's speed affect all methods alike. Every method's clock counts its own steps
only.

The first three turns at each number of clients select the best fixed method by tokens per second.
Methods below 0.9 of the best are dropped early. Later turns compare `auto` with the selected
method on requests that did not select it, since the best of several noisy results is biased
upwards. The numbers of clients take turns such that each gets the same time.

Times are processor times of one thread (`--threads`: wall-clock times, for a quiet machine). The
table has, for each number of clients: tokens per second of every method in the selecting turns
(for a dropped method, of its turns); the selected method; the number of comparing turns; the ratio
of tokens per second of `auto` and the selected method in the first turn, and in all comparing
turns with its 95 % interval (turns resampled); whether all methods gave the same outputs; and for
the baseline and `auto`, in the selecting turns, the 50th and 99th percentile of the milliseconds
to the first token and between two updates. The last line names the numbers of clients at which the
interval begins at 0.95 or above. `--plot` draws the tokens per second of every method.
"""

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from inputs import add_prompt_options, add_target_options, load_cli_prompts

from infer import Engine
from infer.cli import models
from infer.config import EngineConfig, SamplingOptions, TargetConfig
from infer.evaluation.charts import (
    DASH_PATTERNS,
    LINE_COLOURS,
    Chart,
    ChartLine,
    render_charts,
)
from infer.evaluation.metrics import MIN_PROMPTS_FOR_CONFIDENCE_INTERVAL, bootstrap_interval

DEFAULT_TREE_BUDGETS = [2, 4, 8, 16, 64]
LATENCY_METHODS = ("plain", "auto")  # methods whose latencies are printed
MIN_REQUESTS_PER_TURN = 8
SELECTING_TURNS = 3
MIN_RELATIVE_SPEED = 0.9  # of the best method; slower ones are dropped
SUFFICIENT_RATIO = 0.95

Request = tuple[list[int], SamplingOptions]  # prompt and options


@dataclass
class MethodTimes:
    """Times of a method at one number of clients."""

    seconds: list[float] = field(default_factory=list)  # of each turn
    first_token_milliseconds: list[float] = field(default_factory=list)  # of each request
    update_milliseconds: list[float] = field(default_factory=list)  # between two updates


@dataclass
class ClientLoad:
    """One number of clients: the methods that are still measured, and their times."""

    clients: int
    methods: list[str]
    times: dict[str, MethodTimes] = field(default_factory=lambda: defaultdict(MethodTimes))
    tokens: list[int] = field(default_factory=list)  # of each turn
    has_equal_outputs: bool = True

    @property
    def comparing_seconds(self) -> float:
        """Seconds of all methods in the comparing turns."""
        return sum(sum(times.seconds[SELECTING_TURNS:]) for times in self.times.values())

    def tokens_per_second(self, method: str) -> float:
        """Return the tokens per second of a method in its selecting turns."""
        seconds = self.times[method].seconds[:SELECTING_TURNS]
        return sum(self.tokens[: len(seconds)]) / sum(seconds)

    def drop_slow_methods(self) -> None:
        """Drop slow methods; after the last selecting turn keep only the best one and `auto`."""
        fixed_methods = [method for method in self.methods if method != "auto"]
        best = max(fixed_methods, key=self.tokens_per_second)
        if len(self.tokens) < SELECTING_TURNS:
            min_speed = MIN_RELATIVE_SPEED * self.tokens_per_second(best)
            self.methods = [
                method
                for method in self.methods
                if method in LATENCY_METHODS or self.tokens_per_second(method) > min_speed
            ]
        elif len(self.tokens) == SELECTING_TURNS:
            self.methods = [best, "auto"]

    def speed_ratio(self, turns: Sequence[int]) -> float:
        """Return the speed of `auto` relative to the selected method in these turns."""
        best, auto = (self.times[method].seconds for method in self.methods)
        return sum(best[turn] for turn in turns) / sum(auto[turn] for turn in turns)

    def ratio_interval(self) -> tuple[float, float]:
        """Return the 95 % interval of the speed ratio; (0, inf) if there are too few turns."""
        best, auto = (np.array(self.times[name].seconds[SELECTING_TURNS:]) for name in self.methods)
        limits = bootstrap_interval(
            lambda drawn: best[drawn].sum(1) / auto[drawn].sum(1), len(best)
        )
        low, high = limits or (0, np.inf)
        return low, high


class MethodTurn:
    """The requests of a turn in the engine of one method, `clients` at a time.

    All times are seconds of this engine's own steps.
    """

    def __init__(self, engine: Engine, clients: int, requests: list[Request]) -> None:
        self.engine = engine
        self.clients = clients
        self.requests = requests
        self.elapsed = 0.0
        # By sequence: the time of its submission, and of each update.
        self.times = {}

    @property
    def has_unfinished_sequences(self) -> bool:
        """Whether requests are left."""
        return self.engine.has_unfinished_sequences or len(self.times) < len(self.requests)

    def step(self) -> None:
        """Run one step of the engine; submit the next requests if it is idle."""
        submit_time = self.elapsed
        start = self.engine.clock()
        if not self.engine.has_unfinished_sequences:
            for request in self.requests[len(self.times) :][: self.clients]:
                self.times[self.engine.submit(*request)] = [submit_time]
        updated = self.engine.step()
        self.elapsed += self.engine.clock() - start
        for text in updated:
            self.times[text].append(self.elapsed)

    def record_times(self, method_times: MethodTimes) -> list[list[int]]:
        """Append the times of the finished turn to `method_times`; return the outputs."""
        if len(method_times.seconds) < SELECTING_TURNS:
            for times in self.times.values():
                method_times.first_token_milliseconds.append(1000 * (times[1] - times[0]))
                for before, after in pairwise(times[1:]):
                    method_times.update_milliseconds.append(1000 * (after - before))
        method_times.seconds.append(self.elapsed)
        return [text.ids for text in self.times]


def run_interleaved(turns: Collection[MethodTurn]) -> None:
    """Run all methods to their end, always a step of the one that has used the least time."""
    while busy := [turn for turn in turns if turn.has_unfinished_sequences]:
        min(busy, key=lambda turn: turn.elapsed).step()


def run_turn(load: ClientLoad, engines: dict[str, Engine], requests: list[Request]) -> None:
    """Run the next requests with all methods that are still measured."""
    number = len(load.tokens)
    count = max(load.clients, MIN_REQUESTS_PER_TURN)
    turn_requests = [requests[(number * count + i) % len(requests)] for i in range(count)]
    order = load.methods[:: -1 if number % 2 else 1]
    turns = {method: MethodTurn(engines[method], load.clients, turn_requests) for method in order}
    run_interleaved(turns.values())
    outputs = [turn.record_times(load.times[method]) for method, turn in turns.items()]
    load.has_equal_outputs &= all(other == outputs[0] for other in outputs)
    load.tokens.append(sum(map(len, outputs[0])))
    load.drop_slow_methods()


def list_cells(load: ClientLoad) -> list[str]:
    """Return the cells of a row of the table."""
    cells = [str(load.clients)]
    cells += [f"{load.tokens_per_second(method):.0f}" for method in load.times]
    cells += [load.methods[0], f"{len(load.tokens) - SELECTING_TURNS}"]
    cells.append(f"{load.speed_ratio([0]):.2f}")
    ratio = load.speed_ratio(range(SELECTING_TURNS, len(load.tokens)))
    low, high = load.ratio_interval()
    cells.append(f"{ratio:.3f}, {low:.3f} to {high:.3f}")
    cells.append("yes" if load.has_equal_outputs else "NO")
    for name in ("first_token_milliseconds", "update_milliseconds"):
        for method in LATENCY_METHODS:
            percentiles = statistics.quantiles(getattr(load.times[method], name), n=100)
            cells.append(f"{percentiles[49]:.0f}, {percentiles[98]:.0f}")
    return cells


RATIO_COLUMN = "auto / best, 95%"


def list_columns(methods: Sequence[str]) -> list[str]:
    """Return the headings of the table."""
    latencies = [f"{name}, {what}" for what in ("first", "pause") for name in LATENCY_METHODS]
    return ["clients", *methods, "best", "turns", "first turn", RATIO_COLUMN, "same", *latencies]


def format_cells(cells: Sequence[str], columns: Sequence[str]) -> str:
    """Return a line of the table, with columns as wide as their headings need."""
    widths = [24 if name == RATIO_COLUMN else max(9, len(name) + 2) for name in columns]
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def build_chart(loads: Sequence[ClientLoad]) -> Chart:
    """Return a chart of the tokens per second of every method, by number of sequences."""
    lines = []
    for i, method in enumerate(loads[0].times):
        points = [(load.clients, load.tokens_per_second(method)) for load in loads]
        colour = LINE_COLOURS[i % len(LINE_COLOURS)]
        dash = DASH_PATTERNS[i % len(DASH_PATTERNS)]
        lines.append(ChartLine(method, points, colour, dash=dash))
    title = "tokens per second of all sequences together"
    return Chart(title, "sequences decoded together", "tokens/s", lines, logarithmic_x=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "drafter", nargs="?", default="runs/embedded-dflash/checkpoints/best/drafter"
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument(
        "--minutes", type=float, default=12, help="time limit; at least five turns compare"
    )
    parser.add_argument("--threads", type=int, default=0, help="0: processor time of one thread")
    add_target_options(parser)
    add_prompt_options(parser)
    parser.set_defaults(prompts=64, prompt_tokens=64)
    parser.add_argument("--rows", type=int, default=EngineConfig().max_num_seqs)
    parser.add_argument("--budgets", type=int, nargs="+", default=DEFAULT_TREE_BUDGETS)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of the longest request")
    parser.add_argument("--plot", type=Path, help="SVG file to write")
    args = parser.parse_args()
    start_time = time.monotonic()
    torch.set_num_threads(max(1, args.threads))
    clock = time.perf_counter if args.threads else time.thread_time
    target_config = TargetConfig(
        args.target, dtype=args.dtype, device="cpu", quantization=args.quantization or "none"
    )
    target, drafter = models.load_target_and_drafter(target_config, args.drafter)
    prompts = load_cli_prompts(args, target.tokenizer)
    capacity = max(map(len, prompts)) + args.tokens
    requests = [
        (ids, SamplingOptions(max_new_tokens=16 + 29 * i % (args.tokens - 15), ignore_eos=True))
        for i, ids in enumerate(prompts)
    ]
    # (decoding.method, budget) by name
    methods = {"plain": ("plain", 1), "chain": ("chain", 7)}
    methods |= {f"{nodes} nodes": ("ddtree", nodes) for nodes in args.budgets}
    methods["auto"] = ("ddtree", "auto")
    engines = {}
    for name, (method, budget) in methods.items():
        options = EngineConfig(method, budget, max_num_seqs=args.rows)
        engines[name] = Engine(target, drafter, options, capacity, clock)

    warm_up_requests = requests[: args.rows]
    run_interleaved(
        [MethodTurn(engine, args.rows, warm_up_requests) for engine in engines.values()]
    )
    loads = [ClientLoad(clients, [*engines]) for clients in args.clients]
    for turn in range(SELECTING_TURNS + MIN_PROMPTS_FOR_CONFIDENCE_INTERVAL):
        for load in loads:
            run_turn(load, engines, requests)
        print(
            f"{turn + 1} turns, {time.monotonic() - start_time:.0f} s", file=sys.stderr, flush=True
        )
    while time.monotonic() - start_time < 60 * args.minutes - 10:
        run_turn(min(loads, key=lambda load: load.comparing_seconds), engines, requests)
    columns = list_columns([*methods])
    print(format_cells(columns, columns))
    for load in loads:
        print(format_cells(list_cells(load), columns))
    if args.plot:
        args.plot.write_text(render_charts([build_chart(loads)]))
    sufficient = [load.clients for load in loads if load.ratio_interval()[0] >= SUFFICIENT_RATIO]
    print(
        f"auto reaches {SUFFICIENT_RATIO} of the best at {sufficient or 'no number of'} clients "
        f"of {args.clients}"
    )


if __name__ == "__main__":
    main()
