"""Measure the speedup of a trained drafter on a GPU, on question sets.

    python benchmarks/gpu_speedup.py --target smollm2.gguf --drafter data/smollm2/drafter \
        --suites <folder> --questions 16 --out <folder>
    python benchmarks/gpu_speedup.py --device cpu --questions 1 --tokens 16 ...   # a try

It is `eval suite=files` for machines without hydra-core: the baseline (our engine without a
drafter), `generate` of transformers, a chain and DDTrees, in bfloat16. `--exact N` also decodes N
questions of each set in float32, and fails if an output differs from the baseline's.
"""

import argparse
from pathlib import Path

import torch
from gpu import exit_with_failures, record_failure

from data.suites import SuiteConfig, load_suite
from infer import load_drafter, load_target
from infer.config import EvaluationConfig
from infer.evaluation.published import format_suite
from infer.evaluation.results import SuiteResult
from infer.evaluation.suite import evaluate_suite


def evaluate_dtype(args: argparse.Namespace, dtype: str, questions: int) -> SuiteResult:
    """Decode the first questions of every set in a dtype; print and return the results."""
    target = load_target(args.target, dtype=dtype, device=args.device)
    drafter = load_drafter(args.drafter).to(target.device, target.dtype)
    suite = SuiteConfig("files", str(args.suites), max_questions=questions, temperatures=[0.0])
    evaluation = EvaluationConfig(
        budgets=args.budgets, max_new_tokens=args.tokens, ngrams="none", max_minutes=args.minutes
    )
    result = evaluate_suite(
        target, drafter, args.drafter, load_suite(suite), suite, evaluation, args.out / dtype, print
    )
    print(f"{dtype}\n{format_suite(result)}", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="smollm2", help="folder, GGUF file or name")
    parser.add_argument("--drafter", default="smollm2", help="folder or name")
    parser.add_argument("--suites", type=Path, required=True, help="folder of question sets")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--questions", type=int, default=16, help="questions of each set")
    parser.add_argument("--exact", type=int, default=0, help="questions of each set in float32")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each answer")
    parser.add_argument("--budgets", type=int, nargs="+", default=[15, 31, 63])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=4, help="time limit for each dtype")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    failures: list[str] = []
    evaluate_dtype(args, "bfloat16", args.questions)
    if args.exact:
        for each in evaluate_dtype(args, "float32", args.exact).sets:
            for method in each.result.engine_methods:
                description = f"{each.title}, {method.label}: other outputs in float32"
                record_failure(method.identical_outputs == each.answers, description, failures)
    exit_with_failures(failures)


if __name__ == "__main__":
    main()
