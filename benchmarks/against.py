"""Decoding by this checkout, another one, transformers and llama.cpp: the same prompts, by turns.

    python benchmarks/against.py [DRAFTER] --target FOLDER --suite QUESTIONS --gguf FILE --threads 2
    python benchmarks/against.py runs/embedded-dflash/checkpoints/best/drafter --other ../at-8ca1fa3

Every side decodes in a process of its own; prompt by prompt the ways take turns, so that a noisy
machine is equally noisy for all. `text 8` is a DDTree that asks the text's own n-grams; `rows 64`
plain decoding of so many texts at once behind 16 tokens, past their end tokens, the time to the
first token taken off; `prompt 512` computes so many tokens (of both `--repeats` turns); `pass 17`
is one pass over so many tokens behind a prompt, with the choice behind each. Times are the
processor's for a process of one thread (`--threads`: wall-clock, for a quiet machine).

The first table has medians over turns, with their intervals of 95% (bootstrap): tokens a second, of
a pass milliseconds; how many times faster than transformers (float32), llama.cpp and the other
checkout at the same, drafting ways than plain decoding there; the ratio to the side's own plain
decoding, of a pass what it costs in plain passes; whether all texts are our plain decoding's (other
weights or arithmetic write others). The second says where the time of our rounds goes. The way
`DFlash` is transformers' own, with our drafter. Of the other checkout `load_target`, `load_drafter`
and `generate` are used. A side that is not installed is left out, with the reason.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

HERE = Path(__file__).resolve().parents[1]
WAYS = (
    "plain",
    "chain",
    *(f"{tree} {budget}" for tree in ("ddtree", "text") for budget in (8, 16, 64)),
)
WAYS += ("rows 1", "rows 64", "prompt 512", "pass 1", "pass 9", "pass 17", "pass 33", "pass 65")
METHODS = {
    "chain": "chain",
    "ddtree": "ddtree",
    "text": "ddtree",
}  # by a way's first word, its kind
UNDRAFTED = {"plain", "rows", "prompt", "pass"}
SHOWN = ("draft", "build", "verify", "commit")
STAGES: dict[str, float] = {}  # of a worker's last text: seconds, and its rounds

Ids = list[list[int]]
Prepare = Callable[
    [str, Ids, int], Callable[[], Ids]
]  # way, prompts, new tokens -> what is timed -> new ids


class Turn(NamedTuple):
    """What one turn of a way took."""

    speed: float  # tokens a second, or passes
    seconds: float
    ids: Ids
    stages: dict[str, float]


def ours(args: argparse.Namespace) -> Prepare:
    """Decoding by the checkout that PYTHONPATH names."""
    from infer import generate, load_drafter, load_target

    told = {"quantization": args.quantization} if args.quantization and args.side == "ours" else {}
    target = load_target(args.target, device="cpu", dtype=args.dtype, **told)
    drafter = load_drafter(args.drafter, target.dtype) if args.drafter else None

    def prepare(way: str, prompts: Ids, count: int) -> Callable[[], Ids]:
        kind, _, number = way.partition(" ")
        if kind == "pass":
            return one_pass(target, prompts[0], int(number))
        settings = {
            "method": METHODS.get(kind, "plain"),
            "max_num_seqs": len(prompts),
            "max_new_tokens": count,
        }
        settings |= (
            {"budget": int(number) if number.isdigit() else number or 7} if kind in METHODS else {}
        )
        settings |= {"ngrams": "text"} if kind == "text" else {}
        settings |= {"clock": args.clock} if args.side == "ours" else {}
        settings |= {"positions": None, "ignore_eos": True} if kind in ("rows", "prompt") else {}

        def decode() -> Ids:
            texts = generate(target, drafter if kind in METHODS else None, prompts, **settings)
            STAGES.update(texts[0].stats.stage_seconds, rounds=texts[0].stats.rounds)
            return [text.ids for text in texts]

        return decode

    return prepare


def one_pass(target, ids: list[int], count: int) -> Callable[[], Ids]:
    """Return the pass over the last `count` ids as a chain of nodes behind the others."""
    from infer.engine.choices import likeliest
    from infer.trees.tree import DraftTree

    cache = target.cache(1, len(ids))
    depths = torch.arange(count)[None]
    with cache.add(1) as row:
        target.extend([ids[:-count]], row, ())
    tree = DraftTree(
        torch.tensor([ids[-count:]]), (depths - 1).clamp(min=0), depths, depths.float(), count - 1
    )
    ancestors = tree.ancestors()
    return lambda: likeliest(target, target.verify(tree, ancestors, cache).last).tolist()


def transformers(args: argparse.Namespace) -> Prepare:
    """Decoding by Hugging Face's `generate` and its DFlash assistant, float32."""
    from assisted import assisted
    from transformers import DynamicCache

    from infer import load_drafter, load_target

    target = load_target(args.target, device="cpu", dtype="float32")
    model = target.model
    theirs = {}
    if args.drafter and "DFlash" in args.ways:
        theirs = assisted(target, load_drafter(args.drafter))
        if theirs is None:
            raise ImportError("it cannot run this drafter: leave out the way `DFlash`")

    def prepare(way: str, prompts: Ids, count: int) -> Callable[[], Ids]:
        kind, _, number = way.partition(" ")
        if kind == "pass":
            ids = torch.tensor(prompts)
            cache = DynamicCache(config=model.config)
            model(ids[:, : -int(number)], past_key_values=cache, logits_to_keep=1)
            return lambda: (
                model(ids[:, -int(number) :], past_key_values=cache).logits.argmax(-1).tolist()
            )
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.arange(width) >= torch.tensor([[width - len(prompt)] for prompt in prompts])
        settings = {
            "attention_mask": mask.long(),
            "do_sample": False,
            "pad_token_id": 0,
            "max_new_tokens": count,
        }
        settings |= (
            {"eos_token_id": [model.config.vocab_size]} if kind == "rows" else {}
        )  # one that cannot come
        settings |= theirs if kind == "DFlash" else {}
        return lambda: model.generate(ids, **settings)[:, width:].tolist()

    return prepare


def llama_cpp(args: argparse.Namespace) -> Prepare:
    """Decoding by llama.cpp, through the low-level interface of llama-cpp-python."""
    import llama_cpp as lib
    import numpy as np

    if not args.gguf:
        raise ImportError("no --gguf")
    silent = lib.llama_log_callback(lambda *said: None)
    lib.llama_log_set(silent, None)
    model = lib.llama_model_load_from_file(args.gguf.encode(), lib.llama_model_default_params())
    words = lib.llama_model_get_vocab(model)
    contexts = {}
    batch = lib.llama_batch_init(4096, 0, 1)
    size = (lib.llama_vocab_n_tokens(words),)

    def context_of(rows: int) -> object:
        if rows not in contexts:
            settings = lib.llama_context_default_params()
            settings.n_seq_max, settings.n_ctx = (
                rows,
                max(1024, rows * (args.longest + args.new_tokens)),
            )
            settings.n_threads = settings.n_threads_batch = max(1, args.threads)
            contexts[rows] = silent, lib.llama_init_from_model(model, settings)
        context = contexts[rows][1]
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        return context

    def run(
        context: object, tokens: Sequence[tuple[int, int, int]], asked: Sequence[int]
    ) -> list[int]:
        """Compute tokens (sequence, position, id); return the likeliest ids behind those that are
        asked for."""
        batch.n_tokens = len(tokens)
        for i, (row, position, token) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = (
                token,
                position,
                1,
                row,
            )
            batch.logits[i] = i in asked
        if lib.llama_decode(context, batch):
            raise SystemExit("llama.cpp refused a batch")
        return [
            int(np.ctypeslib.as_array(lib.llama_get_logits_ith(context, i), size).argmax())
            for i in asked
        ]

    def write(context: object, prompts: Ids, count: int, past_end: bool) -> Ids:
        texts = [
            run(context, [(i, *pair) for pair in enumerate(p)], [len(p) - 1])
            for i, p in enumerate(prompts)
        ]
        while len(texts[0]) < count and (
            past_end or not lib.llama_vocab_is_eog(words, texts[0][-1])
        ):
            ends = [(i, len(prompts[i]) + len(text) - 1, text[-1]) for i, text in enumerate(texts)]
            for text, token in zip(texts, run(context, ends, range(len(texts))), strict=True):
                text.append(token)
        return texts

    def prepare(way: str, prompts: Ids, count: int) -> Callable[[], Ids]:
        kind, _, number = way.partition(" ")
        context = context_of(len(prompts))
        if kind != "pass":
            return partial(write, context, prompts, count, kind == "rows")
        tokens = [(0, *pair) for pair in enumerate(prompts[0])]
        start = len(prompts[0]) - int(number)
        run(context, tokens[:start], [start - 1])
        return lambda: [run(context, tokens[start:], range(int(number)))]

    return prepare


SIDES = {"ours": ours, "transformers": transformers, "llama.cpp": llama_cpp, "other": ours}
KNOWN = {
    "ours": UNDRAFTED | {*METHODS},
    "transformers": UNDRAFTED | {"DFlash"},
    "llama.cpp": UNDRAFTED,
}
KNOWN["other"] = {"plain", "chain", "ddtree"}


@torch.no_grad()
def work(args: argparse.Namespace) -> None:
    """Say why this side cannot be had, or null; then answer lines `[way, prompts, new tokens]` of
    standard input."""
    torch.set_num_threads(max(1, args.threads))
    args.clock = clock = time.perf_counter if args.threads else time.thread_time
    try:
        prepare = SIDES[args.side](args)
    except ImportError as error:
        return print(json.dumps(str(error)), flush=True)
    print("null", flush=True)
    for line in sys.stdin:
        timed = prepare(*json.loads(line))
        began = clock()
        ids = timed()
        print(json.dumps([clock() - began, ids, STAGES]), flush=True)


def kind_of(way: str) -> str:
    return way.partition(" ")[0]


def start(side: str, args: argparse.Namespace) -> subprocess.Popen:
    checkout = args.other if side == "other" else HERE
    count = str(max(1, args.threads))
    environment = os.environ | {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count}
    environment["PYTHONPATH"] = os.pathsep.join([str(checkout), os.environ.get("PYTHONPATH", "")])
    command = [
        sys.executable,
        __file__,
        "--work",
        json.dumps(vars(args) | {"side": side}, default=str),
    ]
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def ask(worker: subprocess.Popen, way: str, prompts: Ids, count: int) -> Turn:
    worker.stdin.write(json.dumps([way, prompts, count]) + "\n")
    worker.stdin.flush()
    seconds, ids, stages = json.loads(worker.stdout.readline())
    done = {"prompt": len(prompts[0]), "pass": 1}.get(kind_of(way), sum(map(len, ids)))
    if kind_of(way) == "rows" and count > 1:
        seconds = seconds - ask(worker, way, prompts, 1).seconds
        done = done - len(ids)
    return Turn(done / seconds, seconds, ids, stages)


def material(way: str, turn: int, prompts: Ids, context: int) -> Ids:
    """Return the prompts of a way's turn: one, several at once, or one of a length."""
    kind, _, number = way.partition(" ")
    if kind == "rows":
        return [prompts[(turn + i) % len(prompts)][-16:] for i in range(int(number))]
    if kind not in ("prompt", "pass"):
        return [prompts[turn]]
    tokens = sum(prompts, [])
    length = int(number) + (context if kind == "pass" else 0)
    return [[tokens[(turn * length + i) % len(tokens)] for i in range(length)]]


def median(values: Sequence[float]) -> str:
    """Return the median of values (P,) with its interval."""
    import numpy as np

    from infer.evaluation.ruler import interval  # the other checkout may have none, so not above

    values = np.asarray(values)
    known = interval(lambda drawn: np.median(values[drawn], axis=1), len(values)) or ()
    middle, *ends = (
        f"{value:.{1 if np.median(values) >= 10 else 2}f}" for value in (np.median(values), *known)
    )
    return middle + (f" ({' to '.join(ends)})" if ends else "")


def cell(found: list[Turn], base: list[Turn] | None) -> str:
    """Return how many times faster one was than the other."""
    base = None if base is found else base
    return f"{median([a.speed / b.speed for a, b in zip(found, base, strict=False)]) if base else '':>24}"


def show(done: dict[tuple[str, str], list[Turn]]) -> None:
    """Print the table of what was measured by side and way."""
    beside = [side for side in SIDES if side != "ours" and (side, "plain") in done]
    heads = "".join(f"{f'to {name}':>24}" for name in (*beside, "own plain"))
    print(f"{'':<28}{'tokens/s, ms':>24}{heads}{'same':>6}")
    for (side, way), found in done.items():
        text = kind_of(way) in {"plain", "DFlash", *METHODS}
        of_pass = kind_of(way) == "pass"
        speeds = [1000 / one.speed if of_pass else one.speed for one in found]
        line = f"{f'{side}: {way}':<28}{median(speeds):>24}"
        plain = [done[name, "plain"] if text else None for name in beside]
        for name, base in zip(beside, plain, strict=True):
            line += cell(found, done.get((name, way), base))
        own = done.get((side, "pass 1" if of_pass else "plain"))
        line += cell(own, found) if of_pass and own else cell(found, own)
        known = [one.ids for one in done.get(("ours", "plain"), [])]
        same = "yes" if [one.ids for one in found] == known else "NO"
        print(line + (f"{same:>6}" if text else ""))


def show_rounds(done: dict[tuple[str, str], list[Turn]]) -> None:
    """Print where the time of our rounds goes."""
    print(
        f"\n{'milliseconds a round':<28}{'τ':>6}"
        + "".join(f"{name:>9}" for name in (*SHOWN, "other"))
    )
    for (side, way), found in done.items():
        if side == "ours" and kind_of(way) in ("plain", *METHODS):
            rounds = sum(one.stages["rounds"] for one in found)
            spent = [1000 / rounds * sum(one.stages[stage] for one in found) for stage in SHOWN]
            other = 1000 / rounds * sum(one.seconds - one.stages["prefill"] for one in found) - sum(
                spent
            )
            tau = sum(len(one.ids[0]) - 1 for one in found) / rounds
            print(f"{way:<28}{tau:>6.2f}" + "".join(f"{each:>9.2f}" for each in (*spent, other)))


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        return work(argparse.Namespace(**json.loads(sys.argv[2])))
    sys.path.insert(0, str(HERE))
    from inputs import add_prompts, add_target, prompts_of

    from infer.targets.loading import load_tokenizer

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("drafter", nargs="?", help="none: undrafted ways alone")
    parser.add_argument("--other", type=Path, help="another checkout of this repository")
    parser.add_argument("--gguf", help="the target for llama.cpp")
    parser.add_argument("--threads", type=int, default=0, help="0: processor time of one thread")
    parser.add_argument("--repeats", type=int, default=5, help="turns of rows and prompts")
    parser.add_argument("--ways", nargs="+", default=WAYS)
    parser.add_argument("--sides", nargs="+", default=list(SIDES))
    parser.add_argument("--new-tokens", type=int, default=64)
    add_target(parser)
    add_prompts(parser)
    args = parser.parse_args()
    prompts = prompts_of(args, load_tokenizer(args.target))
    args.longest = max(map(len, prompts))
    workers = {side: start(side, args) for side in args.sides if side != "other" or args.other}
    for side, worker in [*workers.items()]:
        if why := json.loads(worker.stdout.readline()):
            print(f"{side} is left out: {why}")
            del workers[side]
    ways = [way for way in args.ways if args.drafter or kind_of(way) in UNDRAFTED]
    rows = [(side, way) for way in ways for side in workers if kind_of(way) in KNOWN[side]]
    done: dict[tuple[str, str], list[Turn]] = {row: [] for row in rows}
    for turn in range(-1, len(prompts)):  # the first one warms up
        for (side, way), found in done.items():
            if turn < args.repeats or way == "rows 1" or kind_of(way) not in ("rows", "prompt"):
                given = material(way, max(turn, 0), prompts, args.prompt_tokens)
                one = ask(
                    workers[side], way, given, 1 if kind_of(way) == "prompt" else args.new_tokens
                )
                found += [one] if turn >= 0 else []
    print(
        f"{len(prompts)} prompts, {args.new_tokens} new tokens, threads: {args.threads or 'processor time of one'}"
    )
    show(done)
    show_rounds(done)
    for worker in workers.values():
        worker.stdin.close()
        worker.wait()


if __name__ == "__main__":
    main()
