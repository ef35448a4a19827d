"""Fuzzes decoding: random drafters, trees, budgets, rows, filters and options, token by token
against plain decoding of one text at a time.

    NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=/tmp/checked python tests/robustness/fuzz_trees.py --count
    3000

Compiled code that was cached without bounds checks has none: the flag needs a cache folder of its
own. The target is the embedded one's first four layers; drafters begin as copies of its layers, so
that drafts are right now and then. Fails (exit code 1) on an index out of bounds, any other error,
and a text that differs other than at a tie (infer/evaluation/lossless.py).
"""

import argparse
import json
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import cache, partial

import torch

from infer import load_target
from infer.api import decode
from infer.config import DecodeOptions, DrafterConfig, HeadConfig
from infer.drafters.base import new_drafter
from infer.drafters.lookup import Lookup
from infer.engine import budget
from infer.engine.sampling import derived_seed
from infer.evaluation.lossless import find_difference
from infer.int8_cpu import calibration
from infer.targets.loading import EMBEDDED
from infer.targets.target import Target

NGRAMS = EMBEDDED / "drafter" / "ngrams"
HEADS = [
    HeadConfig(),
    HeadConfig("selector", rank=8, top_k=16),
    HeadConfig("selector", rank=8, top_k=0),
]
HEADS += [HeadConfig("markov", kind=kind, rank=8) for kind in ("vanilla", "gated", "rnn")]
HEADS += [HeadConfig("swiglu"), HeadConfig("gru", rank=8, hidden_size=8)]
KINDS = [*range(len(HEADS)), "dart", "lookup", "none"]
SCHEMA = {"type": "array", "items": {"enum": ["red", "green", 1]}, "minItems": 1, "maxItems": 3}
GRAMMARS = [{"regex": "[a-c]{1,9}"}, {"regex": "x"}, {"json_schema": '{"type": "integer"}'}]
GRAMMARS += [{"json_schema": json.dumps(SCHEMA)}, {"grammar": 'start: "x" ("+" "x")* ";"'}]


def small_target(in_integers: bool) -> Target:
    """Return the embedded target's first four layers, in int8 if asked."""
    target = load_target("embedded", dtype="float32", device="cpu")
    model = target.model
    model.model.layers = model.model.layers[:4]
    model.config.num_hidden_layers = 4
    model.config.layer_types = model.config.layer_types[:4]
    if in_integers:
        calibration.quantise(
            model,
            (
                model(torch.randint(500, (8, 64), generator=torch.Generator().manual_seed(0)))
                for _ in "1"
            ),
        )
    return Target(model, target.tokenizer)


def drafter_of(target: Target, kind: int | str, block_size: int):
    """Return the drafter of a kind."""
    if kind in ("none", "lookup"):
        return Lookup(block_size) if kind == "lookup" else None
    dart = kind == "dart"
    places = (
        {"family": "dart", "layers": 1, "target_layer_ids": [0, 1, 2]}
        if dart
        else {"target_layer_ids": [1, 3]}
    )
    head = HeadConfig() if dart else HEADS[kind]
    drafter = new_drafter(
        DrafterConfig(**{"layers": 2} | places, block_size=block_size, head=head), target
    )
    generator = torch.Generator().manual_seed(block_size)
    drafter.initialize(target, generator, warm=True)
    for parameter in drafter.conditional_head.parameters() if drafter.head_row else ():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return drafter.eval().requires_grad_(False)


def draw(dice: random.Random) -> tuple[int | str, int, DecodeOptions, bool]:
    """Draw a drafter's kind, its block size, options, and whether a processor leaves one token."""
    kind = dice.choice(KINDS)
    method = (
        "plain"
        if kind == "none"
        else dice.choice(["chain", "ddtree", "ddtree", "ddtree", "continuity", "static"])
    )
    files = {"continuity": [str(NGRAMS)], "ddtree": ["none", "text", str(NGRAMS), str(NGRAMS)]}
    filters = {
        "temperature": dice.choice([0.0, 0.3, 1.0, 1.0, 5.0]),
        "top_k": dice.choice([0, 0, 1, 2, 50]),
        "top_p": dice.choice([1.0, 1.0, 0.9, 0.1, 1e-6]),
        "min_p": dice.choice([0.0, 0.0, 0.1, 1.0]),
        "repetition_penalty": dice.choice([1.0, 1.0, 0.7, 1.5]),
        "seed": dice.randrange(10**6),
    }
    ends = {"logprobs": dice.choice([None, None, 0, 3]), "loop_period": dice.choice([0, 0, 8])}
    ends |= {"stop": dice.choice([[], [], ["\n"], ["e", "self."]])}
    if dice.random() < 0.2:
        ends |= dice.choice(GRAMMARS)
    ranked = method in ("chain", "ddtree")
    engine = {
        "budget": "auto"
        if ranked and dice.random() < 0.15
        else dice.choice([1, 2, 3, 7, 16, 33, 64, 100, 256]),
        "ngrams": dice.choice(files.get(method, ["none"])),
        "max_num_seqs": dice.randint(1, 4),
        "max_num_batched_tokens": dice.choice([None, 1, 30, 144]),
        "prefix_cache_mib": dice.choice([0, 0, 1]),
    }
    engine["width"] = dice.choice([1, 2, 5])
    if method == "static":
        engine["budget"] = max(engine["budget"], engine["width"])
    options = DecodeOptions(dice.randint(1, 14), method=method, **filters, **ends, **engine)
    return kind, dice.choice([2, 3, 5, 8, 16]), options, dice.random() < 0.05


def one_token(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A logits processor that allows one token behind each."""
    return torch.full_like(scores, -torch.inf).index_fill_(
        1, (7 * ids[:, -1] + 1) % scores.shape[1], 0.0
    )


def judge(
    target: Target,
    drafters: Callable,
    dice: random.Random,
    drawn: tuple[int | str, int, DecodeOptions, bool],
) -> tuple[str, str]:
    """Decode one combination; return what came of it, and of faults where and how."""
    kind, block_size, options, alone = drawn
    prompts = [
        [dice.randrange(500) for _ in range(dice.randint(1, 30))] for _ in range(dice.randint(1, 3))
    ]
    prompts = [prompt * dice.choice([1, 1, 3]) for prompt in prompts]
    processors = (
        [one_token]
        if alone and not (options.regex or options.json_schema or options.grammar)
        else []
    )
    texts = vars(options) | {
        "method": "plain",
        "budget": 1,
        "ngrams": None,
        "max_num_seqs": 1,
        "prefix_cache_mib": 0,
    }
    plain = DecodeOptions(**texts)
    seeds = [derived_seed(options.seed, number) for number in range(len(prompts))]
    try:
        options.check()
        pairs = zip(prompts, seeds, strict=True)
        wanted = [
            decode(target, None, [p], plain, seeds=[s], processors=processors)[0] for p, s in pairs
        ]
        found = decode(target, drafters(kind, block_size), prompts, options, processors=processors)
        for ours, theirs in zip(found, wanted, strict=True):
            if ours.ids != theirs.ids or ours.finish != theirs.finish:
                why = (
                    None
                    if processors
                    else find_difference(target, ours.prompt, ours.ids, theirs.ids, ours.options)
                )
                return ("tie" if why == "tie" else "differs"), str(why)
    except Exception as error:
        bounds = isinstance(error, IndexError) and "out of bounds" in str(error)
        return ("out of bounds" if bounds else "error"), traceback.format_exc(limit=-3)
    return "equal", ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1000, help="combinations")
    parser.add_argument(
        "--int8", action="store_true", help="the target in int8, where a tie is a fault too"
    )
    parser.add_argument(
        "--first", type=int, default=0, help="the first combination's number, which is its seed"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    budget.calibrate = partial(budget.calibrate, repeats=1)
    target = small_target(args.int8)
    came = Counter()
    began = time.monotonic()
    drafters = cache(partial(drafter_of, target))
    for number in range(args.first, args.first + args.count):
        dice = random.Random(number)
        drawn = draw(dice)
        result, why = judge(target, drafters, dice, drawn)
        came[result] += 1
        if result != "equal":
            print(f"{number}: {result}: {drawn}\n{why}", flush=True)
        if sum(came.values()) % 200 == 0:
            print(
                f"{sum(came.values())} in {time.monotonic() - began:.0f} s: {dict(came)}",
                flush=True,
            )
    faults = sum(came.values()) - came["equal"] - (0 if args.int8 else came["tie"])
    print(
        f"{args.count} combinations: {', '.join(f'{many} {name}' for name, many in came.items())}\n{faults} faults"
    )
    raise SystemExit(1 if faults else 0)


if __name__ == "__main__":
    main()
