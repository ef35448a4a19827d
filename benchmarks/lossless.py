"""Every method's output against plain decoding, and plain decoding against Hugging Face's generate,
token for token.

    python benchmarks/lossless.py runs/embedded-dflash/checkpoints/best [more drafters ...] --ngrams
    runs/ngrams

Plain decoding writes one text at a time, the methods `--rows` side by side. Prints a line for every
dtype, temperature, drafter and method: prompts, tokens compared, prompts that differ, how many of
these at a tie (infer/evaluation/lossless.py) and how many by a defect, τ. Exit code 1 for any
difference in float32, and any defect.
"""

import argparse

import torch
from inputs import add_prompts, prompts_of

from infer import DecodeOptions, load_drafter, load_target
from infer.api import decode
from infer.config import EngineConfig
from infer.evaluation.lossless import find_difference
from infer.evaluation.ruler import acceptance_length, counted


def engines(args: argparse.Namespace) -> list[EngineConfig]:
    """The ways of decoding that are compared."""
    found = [
        EngineConfig("chain", 1024),
        *(EngineConfig("ddtree", budget) for budget in args.budgets),
    ]
    if args.ngrams:
        found += [
            EngineConfig("continuity", 32, args.ngrams),
            EngineConfig("ddtree", 32, args.ngrams),
        ]
    return [*found, EngineConfig("static", 30)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("drafters", nargs="+", help="drafter folders or checkpoints")
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--ngrams", help="n-gram file, for continuity and ddtree+ngrams")
    add_prompts(parser)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--budgets", type=int, nargs="+", default=[1, 7, 64, 512])
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[10], help="prompts decoded together by the methods"
    )
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    args = parser.parse_args()
    failed = 0

    def report(name: str, rows: list[list[int]], length: float) -> None:
        nonlocal failed
        pairs = zip(prompts, rows, expected, strict=True)
        found = [
            find_difference(target, prompt, row, other, options) for prompt, row, other in pairs
        ]
        ties = found.count("tie")
        defects = found.count("defect")
        failed += ties + defects if dtype == "float32" else defects
        print(
            f"{name:<54}{len(rows):>8}{sum(map(len, rows)):>8}{ties + defects:>8}{ties:>6}{defects:>9}{length:>7.2f}",
            flush=True,
        )

    print(f"{'':<54}{'prompts':>8}{'tokens':>8}{'differ':>8}{'ties':>6}{'defects':>9}{'τ':>7}")
    for dtype in args.dtypes:
        target = load_target(args.target, dtype=dtype)
        prompts = prompts_of(args, target.tokenizer)
        drafters = [load_drafter(path, target.dtype) for path in args.drafters]
        for temperature in args.temperatures:
            options = DecodeOptions(
                args.new_tokens, temperature, seed=1, method="plain", max_num_seqs=1
            )
            expected = [text.ids for text in decode(target, None, prompts, options)]
            kind = f"{dtype}, {'greedy' if temperature == 0 else f'temperature {temperature:g}'}:"
            if temperature == 0:
                theirs = []
                for prompt in prompts:
                    ids = torch.tensor([prompt])
                    out = target.model.generate(
                        ids,
                        attention_mask=torch.ones_like(ids),
                        max_new_tokens=args.new_tokens,
                        do_sample=False,
                    )
                    theirs.append(out[0, len(prompt) :].tolist())
                report(f"{kind} transformers generate", theirs, 1.0)
            for drafter in drafters:
                for engine in engines(args):
                    if engine.method == "static" and temperature > 0:
                        continue  # the same distribution, not the same text
                    for rows in args.rows:
                        chosen = vars(engine) | {"rows": rows}
                        texts = decode(
                            target, drafter, prompts, DecodeOptions(**(vars(options) | chosen))
                        )
                        guided = (
                            "+continuity" if engine.ngrams and engine.method == "ddtree" else ""
                        )
                        nodes = "" if engine.method == "chain" else f" {engine.budget}"
                        report(
                            f"{kind} {engine.method}{guided}{nodes}, rows {rows}",
                            [text.ids for text in texts],
                            acceptance_length(counted(text.commits for text in texts))[0],
                        )
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
