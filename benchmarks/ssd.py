"""Self speculative decoding of a masked diffusion model: is the text step by step's, how many passes, how long.

    python benchmarks/ssd.py runs/embedded-diffusion/model [--parts identical tables]

"identical" decodes many held-out prompts with both cache policies, several block lengths, and drafts of 1 to 5 tokens,
in float32, one text at a time and many side by side, and counts texts that differ from step by step's, one at a time,
in any write; exit code 1 if there are any. docs/results/ssd.txt has "--parts identical --length 16 --prompt-tokens 24".
"tables" are those of `./launch.sh eval target.path=<the model>`, for the first block length.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import torch

from data.prompts import held_out_prompts
from data.rows import DataConfig
from infer.config import DecodeOptions, EvaluationConfig, MaskedConfig
from infer.evaluation.evaluate import Variant, measure
from infer.evaluation.masked import evaluate_masked, masked_options
from infer.evaluation.tables import table
from infer.masked.engine import MaskedEngine
from infer.masked.model import MaskedModel, load_masked
from infer.masked.passes import Task


@torch.inference_mode()
def rounding(model: MaskedModel, prompt: list[int], options: DecodeOptions) -> float:
    """The largest difference between a state's logits alone and among seven others."""
    engine = MaskedEngine(model, replace(options, method="steps", rows=1), len(prompt) + options.max_new_tokens)
    text = engine.submit(prompt, options)
    engine.step()
    plan = engine.passes.plan(text)
    states = [frozenset([(plan.masked[0], token)]) for token in range(3, 10)]

    def logits(among: list) -> torch.Tensor:
        chosen = [frozenset(), *among]
        asked = engine.passes.asked(text, plan, chosen)
        return engine.passes.logits([Task(text, plan, chosen, asked)])[: len(asked[0])]

    return (logits([]) - logits(states)).nan_to_num().abs().max().item()


def variants_to_compare(options: DecodeOptions, rows: Sequence[int]) -> list[Variant]:
    """Return step by step, then for every number of texts side by side chains of 1 to 5 drafts, swapped drafts,
    trees."""
    kinds = [("greedy", length) for length in (1, 2, 3, 4, 5)] + [("mixed", 4), ("tree", 4), ("guided", "auto")]
    ssd = replace(options, method="ssd", nodes=8)
    return [Variant("steps", 1, replace(options, method="steps"))] + [
        Variant(order, ssd.nodes, replace(ssd, order=order, draft_length=x, rows=count))
        for count in rows
        for order, x in kinds
    ]


def progress(done: int, total: int) -> None:
    print(f"\r{done}/{total}", end="\n" if done == total else "", file=sys.stderr, flush=True)


def identical(model: MaskedModel, prompts: list[list[int]], policies: list[DecodeOptions], rows: Sequence[int]) -> int:
    """How many texts differ from step by step's, which are written alone; prints lines for every policy."""
    print("blocks  cache   rows  prompts  tokens  ways  texts  differ  rounding of logits", flush=True)
    differ = 0
    for options in policies:
        plain, *drafted = measure(model, None, variants_to_compare(options, rows), prompts, progress)
        noise = max(rounding(model, prompt, options) for prompt in prompts[:8])
        for count in rows:
            some, wrong = [one for one in drafted if one.variant.options.rows == count], 0
            for one in some:
                for index, (done, steps) in enumerate(zip(one.texts, plain.texts, strict=True)):
                    if done.writes != steps.writes:
                        wrong += 1
                        print(f"prompt {index} differs with {one.variant.options}", flush=True)
            print(
                f"{options.block_length:>6}  {options.cache:<6}{count:>6}{len(prompts):>9}"
                f"{int(plain.total('written')):>8}{len(some):>6}{len(some) * len(prompts):>7}{wrong:>8}{noise:>20.1e}",
                flush=True,
            )
            differ += wrong
    return differ


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a masked model's folder")
    parser.add_argument("--parts", nargs="+", default=["identical", "tables"])
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--table-prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--caches", nargs="+", default=["dual", "none"])
    parser.add_argument("--blocks", type=int, nargs="+", default=[8, 4, 16])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 2, 3, 4, 5], help="of drafts, in the tables")
    parser.add_argument("--orders", nargs="+", default=["greedy", "mixed", "tree", "guided"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16], help="texts side by side, for identical")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--source", default="embedded", help="of the prompts: embedded or stdlib")
    args = parser.parse_args()
    model = load_masked(args.model, dtype="float32")
    count = max(args.prompts if "identical" in args.parts else 0, args.table_prompts)
    prompts = held_out_prompts(DataConfig(source=args.source), model.tokenizer, count, args.prompt_tokens)
    evaluation = EvaluationConfig(max_new_tokens=args.length, temperature=args.temperature)
    policies = [
        masked_options(evaluation, MaskedConfig(block_length=block, cache=cache))
        for block, cache in product(args.blocks, args.caches)
    ]
    differ = identical(model, prompts[: args.prompts], policies, args.rows) if "identical" in args.parts else 0
    for options in policies[: len(args.caches) if "tables" in args.parts else 0]:
        some = prompts[: args.table_prompts]
        result = evaluate_masked(model, some, options, args.lengths, args.orders, progress=progress)
        print(f"\n{table(result)}", flush=True)
        differ += sum(result.prompts - method.same for method in result.methods)
    raise SystemExit(1 if differ else 0)


if __name__ == "__main__":
    main()
