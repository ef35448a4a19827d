"""Check every method's output against baseline decoding, and that against transformers' generate.

    python benchmarks/lossless.py runs/embedded-dflash/checkpoints/best [more drafters ...] \
        --ngrams runs/ngrams

Baseline decoding generates one sequence at a time, the methods `--rows` sequences together. Prints
a line for every dtype, temperature, drafter and method: prompts; tokens compared; outputs that
differ; how many of these at a tie (infer/evaluation/lossless.py), and how many by a bug; τ. The
exit code is 1 for any difference in float32, and for any bug.
"""

import argparse

import torch
from inputs import add_prompt_options, load_cli_prompts

from infer import DecodeOptions, load_drafter, load_target
from infer.api import decode_prompts
from infer.config import EngineConfig
from infer.evaluation.lossless import classify_difference
from infer.evaluation.metrics import compute_acceptance_length_or_ratio, count_tokens_and_rounds


def list_compatible_engines(args: argparse.Namespace) -> list[EngineConfig]:
    """Return the methods that are compared, with their budgets."""
    engines = [EngineConfig("chain", 1024)]
    engines += [EngineConfig("ddtree", budget) for budget in args.budgets]
    if args.ngrams:
        engines += [
            EngineConfig("continuity", 32, args.ngrams),
            EngineConfig("ddtree", 32, args.ngrams),
        ]
    return [*engines, EngineConfig("static", 30)]


def generate_with_transformers(target, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Return the greedy outputs of Hugging Face's `generate`, one prompt at a time."""
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
        )
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("drafters", nargs="+", help="drafter folders or checkpoints")
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--ngrams", help="n-gram file, for continuity and ddtree+ngrams")
    add_prompt_options(parser)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--budgets", type=int, nargs="+", default=[1, 7, 64, 512])
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[10], help="sequences that a method decodes together"
    )
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    args = parser.parse_args()
    failures = 0

    def report(name: str, outputs: list[list[int]], length: float) -> None:
        nonlocal failures
        differences = [
            classify_difference(target, prompt, output, expected, options)
            for prompt, output, expected in zip(prompts, outputs, baseline_outputs, strict=True)
        ]
        ties = differences.count("tie")
        bugs = differences.count("defect")
        failures += ties + bugs if dtype == "float32" else bugs
        print(
            f"{name:<54}{len(outputs):>8}{sum(map(len, outputs)):>8}"
            f"{ties + bugs:>8}{ties:>6}{bugs:>9}{length:>7.2f}",
            flush=True,
        )

    print(f"{'':<54}{'prompts':>8}{'tokens':>8}{'differ':>8}{'ties':>6}{'defects':>9}{'τ':>7}")
    for dtype in args.dtypes:
        target = load_target(args.target, dtype=dtype)
        prompts = load_cli_prompts(args, target.tokenizer)
        drafters = [load_drafter(path, target.dtype) for path in args.drafters]
        for temperature in args.temperatures:
            options = DecodeOptions(
                args.new_tokens, temperature, seed=1, method="plain", max_num_seqs=1
            )
            baseline_outputs = [text.ids for text in decode_prompts(target, None, prompts, options)]
            sampling = "greedy" if temperature == 0 else f"temperature {temperature:g}"
            label = f"{dtype}, {sampling}:"
            if temperature == 0:
                outputs = generate_with_transformers(target, prompts, args.new_tokens)
                report(f"{label} transformers generate", outputs, 1.0)
            for drafter in drafters:
                for engine in list_compatible_engines(args):
                    # A sampled static tree has the same distribution, not the same output.
                    if engine.method == "static" and temperature > 0:
                        continue
                    for rows in args.rows:
                        settings = vars(options) | vars(engine) | {"rows": rows}
                        texts = decode_prompts(target, drafter, prompts, DecodeOptions(**settings))
                        has_ngrams = engine.ngrams and engine.method == "ddtree"
                        method = engine.method + ("+continuity" if has_ngrams else "")
                        if engine.method != "chain":
                            method += f" {engine.budget}"
                        tau = compute_acceptance_length_or_ratio(
                            count_tokens_and_rounds(text.commits for text in texts)
                        )[0]
                        report(f"{label} {method}, rows {rows}", [text.ids for text in texts], tau)
    raise SystemExit(1 if failures else 0)


if __name__ == "__main__":
    main()
