"""Self speculative decoding of a masked diffusion model: is the text step by step's, how many passes, how long.

    python benchmarks/ssd.py runs/embedded-diffusion/model

For both cache policies and several block lengths: the tables of `./launch.sh diffuse evaluate=true` on held-out
prompts, in float32. Block lengths other than the first get two draft lengths and no mixed order. Exit code 1 if any
text differs.
"""

import argparse
import sys

import torch

from data.prompts import held_out_prompts
from data.rows import DataConfig
from infer.config import MaskedOptions
from infer.evaluate_masked import evaluate_masked, table
from infer.masked import MaskedModel, load_masked
from infer.masked_pass import DualCache, Rows


@torch.inference_mode()
def rounding(model: MaskedModel, prompt: list[int], options: MaskedOptions) -> float:
    """The largest difference between a state's logits alone and among seven others."""
    ids = torch.tensor(prompt + [model.mask_token_id] * options.length, device=model.device)
    passes = (Rows if options.cache == "none" else DualCache)(model, options, ids)
    masked = list(range(len(prompt) + 1, len(ids)))
    passes.plan([len(prompt), *masked], len(prompt))
    passes.run([frozenset()], passes.plan([len(prompt), *masked], len(prompt)))  # a full pass first
    ids[len(prompt)] = prompt[-1]
    passes.wrote(1)
    plan = passes.plan(masked, len(prompt))
    states = [frozenset([(masked[0], token)]) for token in range(3, 10)]
    alone, among = (passes.run([frozenset(), *others], plan).logits[0] for others in ([], states))
    return (alone - among).nan_to_num().abs().max().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a masked model's folder")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--caches", nargs="+", default=["dual", "none"])
    parser.add_argument("--blocks", type=int, nargs="+", default=[8, 4, 16])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--orders", nargs="+", default=["greedy", "mixed", "tree", "guided"])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--source", default="embedded", help="of the prompts: embedded or stdlib")
    args = parser.parse_args()
    model = load_masked(args.model, dtype="float32")
    prompts = held_out_prompts(DataConfig(source=args.source), model.tokenizer, args.prompts, args.prompt_tokens)
    differ = 0
    for block in args.blocks:
        for cache in args.caches:
            options = MaskedOptions(args.length, block, args.temperature, cache=cache)
            first = block == args.blocks[0]
            lengths = args.lengths if first else args.lengths[1::2]
            orders = args.orders if first else [order for order in args.orders if order in ("greedy", "guided")]

            def progress(done: int, total: int) -> None:
                print(f"\r{done}/{total}", end="\n" if done == total else "", file=sys.stderr, flush=True)

            result = evaluate_masked(model, prompts, options, lengths, orders, progress=progress)
            print(f"\n{table(result)}; alone and among others logits differ by", end=" ")
            print(f"{max(rounding(model, prompt, options) for prompt in prompts[:8]):.1e} at most", flush=True)
            differ += sum(way["differ"] for way in result["ways"])
    print(f"\n{differ} texts differ")
    raise SystemExit(1 if differ else 0)


if __name__ == "__main__":
    main()
