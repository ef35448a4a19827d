"""Greedy and sampled decoding against plain decoding and Hugging Face's own generate, token for token.

    python benchmarks/lossless.py runs/embedded-dflash/checkpoints/best [more drafters ...]

Prints a line for every drafter, method and budget: prompts, tokens compared, prompts that differ, τ. Exit code 1
if any differs.
"""

import argparse

import torch

from data.prompts import held_out_prompts
from data.rows import DataConfig
from infer import DecodeOptions, load_drafter, load_target
from infer.decode import decode
from infer.evaluate import tau


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafters", nargs="+", help="drafter folders or checkpoints")
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--prompt-tokens", type=int, default=96)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--budgets", type=int, nargs="+", default=[1, 7, 64, 512])
    parser.add_argument("--batch", type=int, default=10, help="prompts decoded together by our engine")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    args = parser.parse_args()
    target = load_target(args.target, dtype="float32")
    prompts = held_out_prompts(DataConfig(), target.tokenizer, args.prompts, args.prompt_tokens)
    failed = 0

    def ours(drafter, method: str, budget: int, temperature: float):
        options = DecodeOptions(args.new_tokens, temperature, seed=1, method=method, budget=budget, rows=args.batch)
        return decode(target, drafter, prompts, options)

    def report(name: str, block: object, rows: list[list[int]], expected: list[list[int]], length: float) -> None:
        nonlocal failed
        wrong = sum(row != other for row, other in zip(rows, expected, strict=True))
        failed += wrong
        tokens = sum(map(len, rows))
        print(f"{name:<34}{block:>6}{len(rows):>9}{tokens:>9}{wrong:>8}{length:>7.2f}", flush=True)

    print(f"{'method':<34}{'block':>6}{'prompts':>9}{'tokens':>9}{'differ':>8}{'τ':>7}")
    drafters = [load_drafter(path, torch.float32) for path in args.drafters]
    for temperature in args.temperatures:
        expected = [row.ids for row in ours(None, "plain", 1, temperature)]
        if temperature == 0:
            theirs = []
            for prompt in prompts:
                ids = torch.tensor([prompt])
                out = target.model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=args.new_tokens, do_sample=False
                )
                theirs.append(out[0, len(prompt) :].tolist())
            report("transformers generate, greedy", "-", theirs, expected, 1.0)
        for drafter in drafters:
            for method, budget in [("chain", drafter.block_size), *(("ddtree", b) for b in args.budgets)]:
                rows = ours(drafter, method, budget, temperature)
                name = f"{method} {budget if method == 'ddtree' else ''} temperature {temperature:g}"
                report(name, drafter.block_size, [row.ids for row in rows], expected, tau(rows))
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
