"""A decoding round on a GPU: its stages against the time of reading the weights, and what it asks
of the device.

    python benchmarks/gpu_round.py                         # Qwen3-4B's shape, bfloat16, random weights; minutes
    python benchmarks/gpu_round.py --shape qwen3-8b --rows 8
    python benchmarks/gpu_round.py --head selector         # with a conditional head
    python benchmarks/gpu_round.py --shape tiny            # does the script work?

First table: greedy rounds by method and nodes, each a CUDA graph; milliseconds of the whole and of
its stages, captured one by one; kernels launched outside the graph, graphs replayed, waits; kernels
of the same round without a graph; memory of caches and graphs over that of the caches alone.
Second: counts and memory of rounds with other options.
Third: rounds of texts that come and go with mixed lengths, after as many others: what was still
    made.

Fails where a round is not one graph with at most 25 launches beside it and one wait; where, with 16
rows, memory is above 1.1 times the cache up to 64 nodes; where mixed rounds never have 16 rows or
make plans or programs; and where a device that computes takes other tokens in captured rounds than
in launched ones.
"""

import argparse
import gc
import random

import torch
from gpu import Seen, bandwidth, check, finish, milliseconds, need_cuda, nullgpu, random_pair, watch

from infer import Engine
from infer.config import EngineConfig, TextOptions
from infer.engine.capture import Graphs
from infer.engine.choices import RowsAsked, piece, walk
from infer.engine.runner import Runner, propose
from infer.engine.sampling import Sampling
from infer.evaluation.evaluate import describe_device
from infer.trees.tree import DraftTree, Proposal

METHODS = [
    ("plain", 0),
    ("chain", 15),
    *(("ddtree", nodes) for nodes in (16, 32, 64, 128, 256, 512)),
]
OPTIONS = {
    "sampled": {"temperature": 1.0},
    "top-k": {"temperature": 1.0, "top_k": 50},
    "top-p": {"temperature": 1.0, "top_p": 0.9},
    "min-p": {"temperature": 1.0, "min_p": 0.05},
    "penalty": {"repetition_penalty": 1.1},
    "logprobs": {"logprobs": 5},
}


def make(target, drafter, method: str, nodes: int, args, compile: bool = True) -> Engine:
    options = EngineConfig(
        method, max(nodes, 1), max_num_seqs=args.rows, max_num_batched_tokens=None, compile=compile
    )
    return Engine(target, None if method == "plain" else drafter, options, args.capacity)


def begin(engine: Engine, args, **text) -> Engine:
    """Return the engine in the middle of a text in every row."""
    for row in range(args.rows):
        prompt = [2 + (7 * i + row) % 400 for i in range(args.context + row)]
        engine.submit(
            prompt,
            TextOptions(max_new_tokens=args.capacity - len(prompt) - 8, ignore_eos=True, **text),
        )
    for _ in range(4):
        engine.step()
    return engine


def reserved() -> int:
    """Return the bytes that torch holds and cannot give back."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def build(runner: Runner, proposal: Proposal) -> tuple[DraftTree, torch.Tensor]:
    tree = runner.build(proposal)
    return tree, tree.ancestors()


@torch.inference_mode()
def stages(engine: Engine, nodes: int) -> dict[str, float]:
    """Return milliseconds of the parts of a round, each a graph of its own."""
    target, runner, memory = engine.target, engine.runner, engine.runner.memory
    rows = len(engine.scheduler.writing)
    graphs = Graphs(target.device, runner.graphs.models)
    found = {}

    def timed(name: str, function) -> object:
        for _ in range(3):
            result = graphs.run(name, function)
        found[name] = milliseconds(lambda: graphs.run(name, function))
        return result

    with memory.cache.fixed(rows):
        proposal = Proposal(memory.bonus, None)
        asked = RowsAsked(Sampling.of([], 1, memory.bonus.device), memory.bonus, 1, 1, None)
        if memory.state is not None:
            with memory.state.cache.fixed(rows):
                proposal = timed(
                    "draft", lambda: propose(memory, nodes, engine.options, runner.ngram, (), asked)
                )
        tree, ancestors = timed("tree", lambda: build(runner, proposal))
        features = timed(
            "verify", lambda: target.verify(tree, ancestors, memory.cache, memory.layers)
        )
        pieces = features.last.split(piece(rows), 1)
        chosen = timed(
            "head", lambda: torch.cat([target.head(part).argmax(-1) for part in pieces], 1)
        )
        timed("walk", lambda: walk(tree, chosen, ancestors))
    return found


def greedy_table(target, drafter, args, floor: float, faults: list[str]) -> None:
    names = ("draft", "tree", "verify", "head", "walk")
    print(f"{'':<12}{'ms':>8}{'x reading':>10}" + "".join(f"{name:>8}" for name in names), end="")
    print(f"{'launches':>10}{'graphs':>8}{'waits':>7}{'kernels':>8}{'memory':>8}{'same':>6}")
    for method, nodes in METHODS:
        engine = make(target, drafter, method, nodes, args)
        memory = begun_memory(engine, args)
        with watch() as seen:
            engine.step()
        texts = [list(text.ids) for text in engine.scheduler.writing]
        whole = milliseconds(engine.step)
        parts = stages(engine, nodes)
        del engine
        same = "-"
        launched = begin(make(target, drafter, method, nodes, args, compile=False), args)
        with watch() as apart:
            launched.step()
        if nullgpu is None:
            writing = launched.scheduler.writing
            while min(len(text.ids) for text in writing) < max(map(len, texts)):
                launched.step()
            agree = all(
                text.ids[: len(ids)] == ids for text, ids in zip(writing, texts, strict=True)
            )
            same = "yes" if agree else "NO"
            check(
                agree,
                f"{method} {nodes}: captured rounds write other texts than launched ones",
                faults,
            )
        name = f"{method} {nodes}" if nodes else method
        print(f"{name:<12}{whole:>8.2f}{whole / floor:>10.2f}", end="")
        print("".join(f"{parts.get(part, 0):>8.2f}" for part in names), end="")
        print(f"{seen.launches:>10}{seen.graphs:>8}{len(seen.waits):>7}", end="")
        print(f"{apart.launches:>8}{memory:>8.3f}{same:>6}", flush=True)
        check_round(name, seen, faults)
        if nodes <= 64:
            check_memory(name, memory, args, faults)


def begun_memory(engine: Engine, args, **text) -> float:
    """Begin a text in every row; return the memory of caches and graphs over that of the caches."""
    memory = engine.runner.memory
    cache = sum(part.cache.buffer.nbytes for part in (memory, memory.state) if part is not None)
    before = reserved()
    begin(engine, args, **text)
    return 1 + (reserved() - before) / cache


def check_memory(name: str, memory: float, args, faults: list[str]) -> None:
    """Note where 16 rows take too much more than their caches."""
    if args.shape != "tiny" and args.rows >= 16:
        check(memory <= 1.1, f"{name}: {memory:.3f} times the cache", faults)


def check_round(name: str, seen: Seen, faults: list[str]) -> None:
    """Note what a round asked too much of the device."""
    check(seen.graphs == 1, f"{name}: {seen.graphs} graphs replayed, not 1", faults)
    check(
        seen.launches <= 25,
        f"{name}: {seen.launches} launches beside the graph, more than 25",
        faults,
    )
    check(len(seen.waits) == 1, f"{name}: waits at {seen.waits}", faults)


def options_table(target, drafter, args, faults: list[str]) -> None:
    print(f"\n{'ddtree 64':<12}{'launches':>10}{'graphs':>8}{'waits':>7}{'memory':>8}")
    for name, text in {**OPTIONS, "static": {}, "static sampled": {"temperature": 1.0}}.items():
        method = "static" if name.startswith("static") else "ddtree"
        engine = make(target, drafter, method, 14 if method == "static" else 64, args)
        memory = begun_memory(engine, args, **text)
        with watch() as seen:
            engine.step()
        print(
            f"{name:<15}{seen.launches:>7}{seen.graphs:>8}{len(seen.waits):>7}{memory:>8.3f}",
            flush=True,
        )
        del engine
        check_round(name, seen, faults)
        check_memory(name, memory, args, faults)


def programs() -> int:
    """Return how many programs Triton has made of our kernels."""
    from infer.kernels import triton_attention, triton_search

    kernels = triton_attention._attend, triton_attention._join, triton_search._search
    return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())


def mixed(target, drafter, args, faults: list[str]) -> None:
    """Texts of all lengths come and go in 16 rows."""
    dice = random.Random(0)
    options = EngineConfig("ddtree", 64, max_num_seqs=16)
    engine = Engine(target, drafter, options, args.capacity)
    rows = set()

    def run() -> None:
        for _ in range(24):  # a crowd with short prompts, so that all rows are soon in use
            engine.submit([2, 3, 4], TextOptions(max_new_tokens=300, ignore_eos=True))
        for _ in range(args.rounds):
            if dice.random() < 0.4:
                prompt = [
                    2 + dice.randrange(400) for _ in range(dice.randrange(1, args.capacity // 2))
                ]
                engine.submit(
                    prompt, TextOptions(max_new_tokens=dice.randrange(1, 300), ignore_eos=True)
                )
            engine.step()
            rows.add(len(engine.scheduler.writing))

    run()
    before = programs()
    graphs = len(engine.runner.graphs.graphs)
    with watch() as seen:
        run()
    made = {"plans": seen.plans, "programs": programs() - before}
    more = len(engine.runner.graphs.graphs) - graphs
    print(f"\n{args.rounds} rounds of {min(rows)} to {max(rows)} rows, mixed lengths: ", end="")
    print(f"{graphs} and {more} graphs, {made}")
    check(max(rows) == 16, f"mixed rounds have {max(rows)} rows at most, not 16", faults)
    check(not any(made.values()), f"mixed rounds made {made}", faults)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=["qwen3-4b", "qwen3-8b", "tiny"], default="qwen3-4b")
    parser.add_argument(
        "--head",
        default="none",
        help="a conditional head of the drafter: selector, gated, rnn, ...",
    )
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--capacity", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=500, help="of mixed lengths")
    args = parser.parse_args()
    device = need_cuda()
    faults = []
    dtype = torch.float32 if args.shape == "tiny" else torch.bfloat16
    target, drafter = random_pair(args.shape, device, dtype, head=args.head)
    weights = sum(parameter.nbytes for parameter in target.model.parameters())
    speed = bandwidth(device)
    floor = 1000 * weights / speed
    print(
        f"{describe_device(device)}, {args.shape}, {dtype}, {weights / 1e9:.2f} GB of weights, {args.rows} rows",
        end="",
    )
    print(
        f", {args.context} positions; copies at {speed / 1e9:.0f} GB/s: reading the weights takes {floor:.2f} ms"
    )
    if nullgpu is not None:
        print("a stand-in for a GPU that computes nothing: times are meaningless, counts are not")
    greedy_table(target, drafter, args, floor, faults)
    options_table(target, drafter, args, faults)
    mixed(target, drafter, args, faults)
    finish(faults)


if __name__ == "__main__":
    main()
