"""Measure a decoding round on a GPU, with random weights: stage times and device work.

    python benchmarks/gpu_round.py                         # Qwen3-4B's shape; minutes
    python benchmarks/gpu_round.py --shape qwen3-8b --rows 8
    python benchmarks/gpu_round.py --greedy-only --generate   # first table, and transformers
    python benchmarks/gpu_round.py --head selector         # with a conditional head
    python benchmarks/gpu_round.py --shape tiny            # a tiny shape, to try the script

First table: greedy rounds by method and nodes, each a CUDA graph. It has the milliseconds of the
whole round, also as a multiple of the time to read the weights, and of its stages, captured one by
one; kernels launched outside the graph, replayed graphs and host waits; kernels of the same round
without a graph; and the memory of caches and graphs relative to that of the caches.
Second table: device work and memory of rounds with sampling options.
Third: rounds of sequences of mixed lengths that come and go: what is still compiled or captured
after as many such rounds before. `--greedy-only` leaves out the second and third table.
`--generate` adds the milliseconds per token of transformers' `generate`: as it is, and with a
static cache and torch.compile.

Fails if a round is not one graph with at most 25 launches outside it and one wait; if, with 16
rows, memory is above 1.1 times the cache for up to 64 nodes; if mixed rounds never have 16 rows or
make plans or programs; and, on a device that computes, if captured rounds generate other tokens
than rounds without graphs.
"""

import argparse
import gc
import random

import torch
from gpu import (
    DeviceWork,
    build_random_models,
    count_device_work,
    exit_with_failures,
    measure_copy_bandwidth,
    measure_milliseconds,
    nullgpu,
    record_failure,
    require_cuda,
)

from infer import Engine
from infer.config import EngineConfig, SamplingOptions
from infer.engine.capture import CudaGraphs
from infer.engine.proposals import run_drafter
from infer.engine.runner import Runner
from infer.engine.sampling import SamplingTensors
from infer.engine.verification import SamplingBatch, count_chunk_nodes, walk
from infer.evaluation.evaluate import describe_device
from infer.trees.tree import DraftTree, Proposal

ROUND_METHODS = [
    ("plain", 0),
    ("chain", 15),
    *(("ddtree", nodes) for nodes in (15, 31, 63, 127)),
]
GENERATE_TOKENS = (16, 80)  # the difference of both times is that of 64 tokens
SAMPLING_CASES = {
    "sampled": {"temperature": 1.0},
    "top-k": {"temperature": 1.0, "top_k": 50},
    "top-p": {"temperature": 1.0, "top_p": 0.9},
    "min-p": {"temperature": 1.0, "min_p": 0.05},
    "penalty": {"repetition_penalty": 1.1},
    "logprobs": {"logprobs": 5},
}


def build_engine(target, drafter, method: str, nodes: int, args, compile: bool = True) -> Engine:
    """Return an engine for a method with a tree of `nodes` nodes."""
    options = EngineConfig(
        method, max(nodes, 1), max_num_seqs=args.rows, max_num_batched_tokens=None, compile=compile
    )
    return Engine(target, None if method == "plain" else drafter, options, args.capacity)


def fill_rows(engine: Engine, args, **text) -> Engine:
    """Submit a prompt for every row and run four rounds; return the engine.

    text: sampling options of the sequences
    """
    for row in range(args.rows):
        prompt = [2 + (7 * i + row) % 400 for i in range(args.context + row)]
        engine.submit(
            prompt,
            SamplingOptions(
                max_new_tokens=args.capacity - len(prompt) - 8, ignore_eos=True, **text
            ),
        )
    for _ in range(4):
        engine.step()
    return engine


def reserved_bytes() -> int:
    """Return the bytes that torch's allocator holds and cannot free."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def build_tree_and_ancestors(runner: Runner, proposal: Proposal) -> tuple[DraftTree, torch.Tensor]:
    """Return the draft tree of a proposal and its ancestor mask."""
    tree = runner.build_tree(proposal)
    return tree, tree.build_ancestor_mask()


@torch.inference_mode()
def time_stages(engine: Engine, nodes: int) -> dict[str, float]:
    """Return the milliseconds of the stages of a round, each captured as a graph of its own."""
    target = engine.target
    runner = engine.runner
    memory = runner.batch_state
    rows = len(engine.scheduler.running)
    graphs = CudaGraphs(target.device, runner.graphs.models)
    milliseconds_by_stage = {}

    def time_stage(name: str, function) -> object:
        for _ in range(3):
            result = graphs.run(name, function)
        milliseconds_by_stage[name] = measure_milliseconds(lambda: graphs.run(name, function))
        return result

    with memory.cache.fix_batch_size(rows):
        proposal = Proposal(memory.bonus_tokens, None)
        sampling_batch = SamplingBatch(
            SamplingTensors.from_options([], 1, memory.bonus_tokens.device),
            memory.bonus_tokens,
            1,
            1,
            None,
        )
        if memory.draft_state is not None:
            with memory.draft_state.cache.fix_batch_size(rows):
                proposal = time_stage(
                    "draft",
                    lambda: run_drafter(
                        memory, nodes, engine.options, runner.ngram_model, (), sampling_batch
                    ),
                )
        tree, ancestors = time_stage("tree", lambda: build_tree_and_ancestors(runner, proposal))
        features = time_stage(
            "verify", lambda: target.verify(tree, ancestors, memory.cache, memory.feature_layers)
        )
        pieces = features.last_hidden_states.split(count_chunk_nodes(rows), 1)
        chosen = time_stage(
            "head",
            lambda: torch.cat([target.compute_logits(part).argmax(-1) for part in pieces], 1),
        )
        time_stage("walk", lambda: walk(tree, chosen, ancestors))
    return milliseconds_by_stage


def print_greedy_table(
    target, drafter, args, weight_read_milliseconds: float, failures: list[str]
) -> None:
    """Print the table of greedy rounds and check them."""
    names = ("draft", "tree", "verify", "head", "walk")
    print(f"{'':<12}{'ms':>8}{'x reading':>10}" + "".join(f"{name:>8}" for name in names), end="")
    print(f"{'launches':>10}{'graphs':>8}{'waits':>7}{'kernels':>8}{'memory':>8}{'same':>6}")
    for method, nodes in ROUND_METHODS:
        name = f"{method} {nodes}" if nodes else method
        engine = build_engine(target, drafter, method, nodes, args)
        memory = fill_and_measure_memory(engine, args)
        with count_device_work() as work:
            engine.step()
        captured_ids = [list(text.ids) for text in engine.scheduler.running]
        round_milliseconds = measure_milliseconds(engine.step)
        stage_milliseconds = time_stages(engine, nodes)
        del engine

        uncaptured = build_engine(target, drafter, method, nodes, args, compile=False)
        fill_rows(uncaptured, args)
        with count_device_work() as uncaptured_work:
            uncaptured.step()
        same = "-"
        if nullgpu is None:
            writing = uncaptured.scheduler.running
            while min(len(text.ids) for text in writing) < max(map(len, captured_ids)):
                uncaptured.step()
            pairs = zip(writing, captured_ids, strict=True)
            is_equal = all(text.ids[: len(ids)] == ids for text, ids in pairs)
            same = "yes" if is_equal else "NO"
            record_failure(
                is_equal,
                f"{method} {nodes}: captured rounds generate other tokens than uncaptured ones",
                failures,
            )
        ratio = round_milliseconds / weight_read_milliseconds
        print(f"{name:<12}{round_milliseconds:>8.2f}{ratio:>10.2f}", end="")
        print("".join(f"{stage_milliseconds.get(stage, 0):>8.2f}" for stage in names), end="")
        print(f"{work.launches:>10}{work.graphs:>8}{len(work.waits):>7}", end="")
        print(f"{uncaptured_work.launches:>8}{memory:>8.3f}{same:>6}", flush=True)
        check_device_work(name, work, failures)
        if nodes <= 64:
            check_memory_ratio(name, memory, args, failures)


def fill_and_measure_memory(engine: Engine, args, **text) -> float:
    """Fill all rows; return the memory of caches and graphs relative to that of the caches."""
    memory = engine.runner.batch_state
    cache = sum(
        part.cache.buffer.nbytes for part in (memory, memory.draft_state) if part is not None
    )
    before = reserved_bytes()
    fill_rows(engine, args, **text)
    return 1 + (reserved_bytes() - before) / cache


def check_memory_ratio(name: str, memory: float, args, failures: list[str]) -> None:
    """Record a failure if graphs of 16 rows take too much memory beyond the caches."""
    if args.shape != "tiny" and args.rows >= 16:
        record_failure(memory <= 1.1, f"{name}: {memory:.3f} times the cache", failures)


def check_device_work(name: str, work: DeviceWork, failures: list[str]) -> None:
    """Record a failure for each limit of device work that a round exceeds."""
    record_failure(work.graphs == 1, f"{name}: {work.graphs} graphs replayed, not 1", failures)
    record_failure(
        work.launches <= 25,
        f"{name}: {work.launches} launches outside the graph, more than 25",
        failures,
    )
    record_failure(len(work.waits) == 1, f"{name}: waits at {work.waits}", failures)


def time_generate(target, args, **options) -> float:
    """Return the milliseconds per token of transformers' `generate`, prefill excluded.

    options: further arguments of `generate`
    """
    prompt = torch.tensor([[2 + 7 * i % 400 for i in range(args.context)]], device=target.device)

    def generate(tokens: int) -> None:
        target.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            **options,
        )

    few, many = GENERATE_TOKENS
    generate(many)  # compiles
    milliseconds = [measure_milliseconds(lambda n=n: generate(n), 5) for n in (few, many)]
    return (milliseconds[1] - milliseconds[0]) / (many - few)


def print_generate(target, args) -> None:
    """Print the milliseconds per token of transformers' `generate`."""
    print(f"transformers.generate: {time_generate(target, args):.2f} ms a token", flush=True)
    if nullgpu is None:
        static = time_generate(target, args, cache_implementation="static")
        print(f"transformers.generate, static cache, compiled: {static:.2f} ms a token", flush=True)


def print_sampling_table(target, drafter, args, failures: list[str]) -> None:
    """Print the table of rounds with sampling options and check them."""
    print(f"\n{'ddtree 64':<12}{'launches':>10}{'graphs':>8}{'waits':>7}{'memory':>8}")
    for name, text in {
        **SAMPLING_CASES,
        "static": {},
        "static sampled": {"temperature": 1.0},
    }.items():
        method = "static" if name.startswith("static") else "ddtree"
        engine = build_engine(target, drafter, method, 14 if method == "static" else 64, args)
        memory = fill_and_measure_memory(engine, args, **text)
        with count_device_work() as work:
            engine.step()
        print(
            f"{name:<15}{work.launches:>7}{work.graphs:>8}{len(work.waits):>7}{memory:>8.3f}",
            flush=True,
        )
        del engine
        check_device_work(name, work, failures)
        check_memory_ratio(name, memory, args, failures)


def count_triton_programs() -> int:
    """Return how many programs Triton has compiled from our kernels."""
    from infer.kernels import triton_attention, triton_search

    kernels = (
        triton_attention._attend_split,
        triton_attention._combine_splits,
        triton_search._search_tree,
    )
    return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())


def check_mixed_rounds(target, drafter, args, failures: list[str]) -> None:
    """Run sequences of mixed lengths in 16 rows, and check that nothing is compiled again."""
    random_numbers = random.Random(0)
    options = EngineConfig("ddtree", 64, max_num_seqs=16)
    engine = Engine(target, drafter, options, args.capacity)
    rows = set()

    def run() -> None:
        for _ in range(24):  # short prompts, so that all rows are soon in use
            engine.submit([2, 3, 4], SamplingOptions(max_new_tokens=300, ignore_eos=True))
        for _ in range(args.rounds):
            if random_numbers.random() < 0.4:
                prompt = [
                    2 + random_numbers.randrange(400)
                    for _ in range(random_numbers.randrange(1, args.capacity // 2))
                ]
                engine.submit(
                    prompt,
                    SamplingOptions(
                        max_new_tokens=random_numbers.randrange(1, 300), ignore_eos=True
                    ),
                )
            engine.step()
            rows.add(len(engine.scheduler.running))

    run()
    before = count_triton_programs()
    graphs = len(engine.runner.graphs.graphs)
    with count_device_work() as work:
        run()
    new_objects = {"plans": work.plans, "programs": count_triton_programs() - before}
    more = len(engine.runner.graphs.graphs) - graphs
    print(f"\n{args.rounds} rounds of {min(rows)} to {max(rows)} rows, mixed lengths: ", end="")
    print(f"{graphs} and {more} graphs, {new_objects}")
    record_failure(max(rows) == 16, f"mixed rounds have {max(rows)} rows at most, not 16", failures)
    record_failure(not any(new_objects.values()), f"mixed rounds made {new_objects}", failures)


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
    parser.add_argument("--greedy-only", action="store_true")
    parser.add_argument("--generate", action="store_true")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--capacity", type=int, default=4096)
    parser.add_argument(
        "--rounds", type=int, default=500, help="rounds with sequences of mixed lengths"
    )
    args = parser.parse_args()
    device = require_cuda()
    failures = []
    dtype = torch.float32 if args.shape == "tiny" else torch.bfloat16
    target, drafter = build_random_models(args.shape, device, dtype, head=args.head)
    weights = sum(parameter.nbytes for parameter in target.model.parameters())
    speed = measure_copy_bandwidth(device)
    weight_read_milliseconds = 1000 * weights / speed
    print(
        f"{describe_device(device)}, {args.shape}, {dtype}, {weights / 1e9:.2f} GB of weights, "
        f"{args.rows} rows",
        end="",
    )
    print(
        f", {args.context} positions; copies at {speed / 1e9:.0f} GB/s: reading the weights takes "
        f"{weight_read_milliseconds:.2f} ms"
    )
    if nullgpu is not None:
        print("a stand-in for a GPU that computes nothing: times are meaningless, counts are not")
    print_greedy_table(target, drafter, args, weight_read_milliseconds, failures)
    if args.generate:
        print_generate(target, args)
    if not args.greedy_only:
        print_sampling_table(target, drafter, args, failures)
        check_mixed_rounds(target, drafter, args, failures)
    exit_with_failures(failures)


if __name__ == "__main__":
    main()
