"""Measure the speedup of a trained drafter on a GPU, on question sets.

    python benchmarks/gpu_speedup.py --target smollm2.gguf --drafter data/smollm2/drafter \
        --suites <folder> --questions 16
    python benchmarks/gpu_speedup.py --device cpu --questions 1 --tokens 16 ...   # a try

It is `eval suite=files` without the command line, for machines without hydra-core: every question
is decoded by the baseline (our engine without a drafter), `generate` of transformers, a chain and
DDTrees, in changing order. The table has for each set and method: tokens per round, tokens per
second, the median speedup over the baseline with its 95 % interval, and how many outputs equal the
baseline's. `--exact N` then decodes N questions of each set in float32 and compares all outputs; it
fails if one differs.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch
from gpu import exit_with_failures, record_failure

from data.suites import SuiteConfig, load_suite
from infer import load_drafter, load_target
from infer.config import EvaluationConfig
from infer.evaluation.evaluate import describe_device
from infer.evaluation.measurement import VariantMeasurement, list_variants
from infer.evaluation.metrics import compute_median_speedup
from infer.evaluation.results import TRANSFORMERS_BASELINE_METHOD
from infer.evaluation.suite import answer_questions
from infer.evaluation.tables import format_interval, format_markdown_table

SPEEDUP_TABLE_COLUMNS = ("set", "method", "τ", "tokens/s", "speedup", "same outputs")


def list_tokens_per_second(measurement: VariantMeasurement) -> list[float]:
    """Return the tokens per second of each answer."""
    return [result.tokens / result.seconds[0] for result in measurement.prompt_results]


def list_rows(title: str, measurements: list[VariantMeasurement]) -> list[list[str]]:
    """Return a table row for each method of a question set."""
    baseline = measurements[0]
    rows = []
    for measurement in measurements:
        speeds = list_tokens_per_second(measurement)
        speedup, interval = compute_median_speedup(speeds, list_tokens_per_second(baseline))
        rounds = sum(result.rounds for result in measurement.prompt_results)
        tokens = sum(result.tokens - 1 for result in measurement.prompt_results)
        pairs = zip(measurement.sequences, baseline.sequences, strict=True)
        same = sum(sequence.ids == expected.ids for sequence, expected in pairs)
        variant = measurement.variant
        rows.append(
            [
                title,
                f"{variant.name} {variant.budget}" if variant.budget else variant.name,
                f"{tokens / max(1, rounds):.2f}",
                f"{sum(speeds) / len(speeds):.1f}",
                f"{speedup:.2f}{format_interval(interval)}",
                f"{same} of {len(speeds)}",
            ]
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="smollm2", help="folder, GGUF file or name")
    parser.add_argument("--drafter", default="smollm2", help="folder or name")
    parser.add_argument("--suites", type=Path, required=True, help="folder of question sets")
    parser.add_argument("--questions", type=int, default=16, help="questions of each set")
    parser.add_argument("--exact", type=int, default=0, help="questions of each set in float32")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each answer")
    parser.add_argument("--budgets", type=int, nargs="+", default=[15, 31, 63])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=4, help="time limit of the whole table")
    args = parser.parse_args()
    failures: list[str] = []
    torch.backends.cuda.matmul.allow_tf32 = False
    config = EvaluationConfig(
        budgets=args.budgets, max_new_tokens=args.tokens, ngrams="none", max_minutes=None
    )
    question_sets = load_suite(
        SuiteConfig("files", str(args.suites), max_questions=max(args.questions, args.exact))
    )
    end = time.monotonic() + 60 * args.minutes
    rows = []
    for dtype, count in (("bfloat16", args.questions), ("float32", args.exact)):
        if not count:
            continue
        target = load_target(args.target, dtype=dtype, device=args.device)
        drafter = load_drafter(args.drafter).to(target.device, target.dtype)
        print(f"{describe_device(target.device)}, torch {torch.__version__}, {dtype}", flush=True)
        for i, question_set in enumerate(question_sets):
            shortened = replace(question_set, chats=question_set.chats[:count])
            seconds = (end - time.monotonic()) / (len(question_sets) - i)
            measurements, _ = answer_questions(
                target,
                drafter,
                shortened,
                False,
                list_variants(drafter, config),
                lambda done, total: None,
                time.monotonic() + seconds,
            )
            set_rows = list_rows(f"{question_set.title}, {dtype}", measurements)
            print(format_markdown_table(SPEEDUP_TABLE_COLUMNS, set_rows), flush=True)
            rows += set_rows
            for measurement in measurements:
                is_ours = measurement.variant.name != TRANSFORMERS_BASELINE_METHOD.name
                pairs = zip(measurement.sequences, measurements[0].sequences, strict=True)
                equal = all(sequence.ids == expected.ids for sequence, expected in pairs)
                if dtype == "float32" and is_ours:
                    name = f"{question_set.title}, {measurement.variant.name}"
                    record_failure(equal, f"{name}: other outputs in float32", failures)
    print(format_markdown_table(SPEEDUP_TABLE_COLUMNS, rows))
    exit_with_failures(failures)


if __name__ == "__main__":
    main()
