"""Fuzz decoding with random drafters, trees, budgets, rows, filters and options.

Outputs are compared token by token with baseline decoding of one sequence at a time.

    NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=/tmp/checked python tests/robustness/fuzz_trees.py --count
    3000

The flag needs its own cache folder, since code that was compiled and cached without bounds checks
is used again. The target is the embedded one's first four layers. Drafters start as copies of its
layers, so that some drafts are right. Fails (exit code 1) on an index out of bounds, any other
error, and a text that differs other than at a tie (infer/evaluation/lossless.py).
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
from infer.api import decode_prompts
from infer.config import DecodeOptions, DrafterConfig, HeadConfig
from infer.drafters.build import create_drafter
from infer.drafters.lookup import PromptLookup
from infer.engine import round_cost
from infer.engine.sampling import derive_seed
from infer.evaluation.lossless import classify_difference
from infer.int8_cpu import calibration
from infer.targets.loading import EMBEDDED_TARGET_FOLDER
from infer.targets.target import Target

EMBEDDED_NGRAMS = EMBEDDED_TARGET_FOLDER / "drafter" / "ngrams"
FUZZED_HEADS = [
    HeadConfig(),
    HeadConfig("selector", rank=8, top_k=16),
    HeadConfig("selector", rank=8, top_k=0),
]
FUZZED_HEADS += [HeadConfig("markov", kind=kind, rank=8) for kind in ("vanilla", "gated", "rnn")]
FUZZED_HEADS += [HeadConfig("swiglu"), HeadConfig("gru", rank=8, hidden_size=8)]
FUZZED_DRAFTER_KINDS = [*range(len(FUZZED_HEADS)), "dart", "lookup", "none"]
COLOUR_SCHEMA = {
    "type": "array",
    "items": {"enum": ["red", "green", 1]},
    "minItems": 1,
    "maxItems": 3,
}
FUZZED_GRAMMARS = [{"regex": "[a-c]{1,9}"}, {"regex": "x"}, {"json_schema": '{"type": "integer"}'}]
FUZZED_GRAMMARS += [
    {"json_schema": json.dumps(COLOUR_SCHEMA)},
    {"grammar": 'start: "x" ("+" "x")* ";"'},
]


def build_four_layer_target(use_int8: bool) -> Target:
    """Return the embedded target's first four layers, in int8 if `use_int8`."""
    target = load_target("embedded", dtype="float32", device="cpu")
    model = target.model
    model.model.layers = model.model.layers[:4]
    model.config.num_hidden_layers = 4
    model.config.layer_types = model.config.layer_types[:4]
    if use_int8:
        calibration.quantise_model(
            model,
            (
                model(torch.randint(500, (8, 64), generator=torch.Generator().manual_seed(0)))
                for _ in "1"
            ),
        )
    return Target(model, target.tokenizer)


def build_drafter(target: Target, kind: int | str, block_size: int):
    """Return a drafter of FUZZED_DRAFTER_KINDS; None for "none"."""
    if kind in ("none", "lookup"):
        return PromptLookup(block_size) if kind == "lookup" else None
    dart = kind == "dart"
    layer_options = (
        {"family": "dart", "layers": 1, "target_layer_ids": [0, 1, 2]}
        if dart
        else {"target_layer_ids": [1, 3]}
    )
    head = HeadConfig() if dart else FUZZED_HEADS[kind]
    drafter = create_drafter(
        DrafterConfig(**{"layers": 2} | layer_options, block_size=block_size, head=head), target
    )
    generator = torch.Generator().manual_seed(block_size)
    drafter.initialize(target, generator, warm_start=True)
    for parameter in drafter.conditional_head.parameters() if drafter.head_spec else ():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return drafter.eval().requires_grad_(False)


def draw_case(random_numbers: random.Random) -> tuple[int | str, int, DecodeOptions, bool]:
    """Draw a drafter's kind, its block size, options, and whether a processor leaves one token."""
    kind = random_numbers.choice(FUZZED_DRAFTER_KINDS)
    method = (
        "plain"
        if kind == "none"
        else random_numbers.choice(["chain", "ddtree", "ddtree", "ddtree", "continuity", "static"])
    )
    files = {
        "continuity": [str(EMBEDDED_NGRAMS)],
        "ddtree": ["none", "text", str(EMBEDDED_NGRAMS), str(EMBEDDED_NGRAMS)],
    }
    filters = {
        "temperature": random_numbers.choice([0.0, 0.3, 1.0, 1.0, 5.0]),
        "top_k": random_numbers.choice([0, 0, 1, 2, 50]),
        "top_p": random_numbers.choice([1.0, 1.0, 0.9, 0.1, 1e-6]),
        "min_p": random_numbers.choice([0.0, 0.0, 0.1, 1.0]),
        "repetition_penalty": random_numbers.choice([1.0, 1.0, 0.7, 1.5]),
        "seed": random_numbers.randrange(10**6),
    }
    ends = {
        "logprobs": random_numbers.choice([None, None, 0, 3]),
        "loop_period": random_numbers.choice([0, 0, 8]),
    }
    ends |= {"stop": random_numbers.choice([[], [], ["\n"], ["e", "self."]])}
    if random_numbers.random() < 0.2:
        ends |= random_numbers.choice(FUZZED_GRAMMARS)
    ranked = method in ("chain", "ddtree")
    engine = {
        "budget": "auto"
        if ranked and random_numbers.random() < 0.15
        else random_numbers.choice([1, 2, 3, 7, 16, 33, 64, 100, 256]),
        "ngrams": random_numbers.choice(files.get(method, ["none"])),
        "max_num_seqs": random_numbers.randint(1, 4),
        "max_num_batched_tokens": random_numbers.choice([None, 1, 30, 144]),
        "prefix_cache_mib": random_numbers.choice([0, 0, 1]),
    }
    engine["width"] = random_numbers.choice([1, 2, 5])
    if method == "static":
        engine["budget"] = max(engine["budget"], engine["width"])
    options = DecodeOptions(
        random_numbers.randint(1, 14), method=method, **filters, **ends, **engine
    )
    return kind, random_numbers.choice([2, 3, 5, 8, 16]), options, random_numbers.random() < 0.05


def allow_one_token(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Allow one token after each token, as a logits processor."""
    return torch.full_like(scores, -torch.inf).index_fill_(
        1, (7 * ids[:, -1] + 1) % scores.shape[1], 0.0
    )


def compare_with_baseline(
    target: Target,
    drafters: Callable,
    random_numbers: random.Random,
    case: tuple[int | str, int, DecodeOptions, bool],
) -> tuple[str, str]:
    """Decode one combination; return what came of it, and of faults where and how."""
    kind, block_size, options, alone = case
    prompts = [
        [random_numbers.randrange(500) for _ in range(random_numbers.randint(1, 30))]
        for _ in range(random_numbers.randint(1, 3))
    ]
    prompts = [prompt * random_numbers.choice([1, 1, 3]) for prompt in prompts]
    processors = (
        [allow_one_token]
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
    seeds = [derive_seed(options.seed, number) for number in range(len(prompts))]
    try:
        options.check()
        pairs = zip(prompts, seeds, strict=True)
        expected = [
            decode_prompts(target, None, [p], plain, seeds=[s], processors=processors)[0]
            for p, s in pairs
        ]
        outputs = decode_prompts(
            target, drafters(kind, block_size), prompts, options, processors=processors
        )
        for output, expected_output in zip(outputs, expected, strict=True):
            if (
                output.ids != expected_output.ids
                or output.finish_reason != expected_output.finish_reason
            ):
                why = (
                    None
                    if processors
                    else classify_difference(
                        target, output.prompt, output.ids, expected_output.ids, output.options
                    )
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
    round_cost.calibrate = partial(round_cost.calibrate, repeats=1)
    target = build_four_layer_target(args.int8)
    came = Counter()
    start_time = time.monotonic()
    drafters = cache(partial(build_drafter, target))
    for number in range(args.first, args.first + args.count):
        random_numbers = random.Random(number)
        case = draw_case(random_numbers)
        result, why = compare_with_baseline(target, drafters, random_numbers, case)
        came[result] += 1
        if result != "equal":
            print(f"{number}: {result}: {case}\n{why}", flush=True)
        if sum(came.values()) % 200 == 0:
            print(
                f"{sum(came.values())} in {time.monotonic() - start_time:.0f} s: {dict(came)}",
                flush=True,
            )
    failures = sum(came.values()) - came["equal"] - (0 if args.int8 else came["tie"])
    print(
        f"{args.count} combinations: "
        f"{', '.join(f'{count} {name}' for name, count in came.items())}\n{failures} faults"
    )
    raise SystemExit(1 if failures else 0)


if __name__ == "__main__":
    main()
