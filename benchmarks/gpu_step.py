"""Time training steps of Qwen3-8B's shape on a GPU: 3,072 tokens, 512 anchors, block 16.

    python benchmarks/gpu_step.py                          # minutes, most of them compiling; 80 GB
    python benchmarks/gpu_step.py --small                  # a small shape, to try the script

Weights are random. Prints the milliseconds of a step and of its parts (without the first steps,
which compile), the peak memory, and the memory that `plan` predicts. Fails if a loss is not finite,
if losses do not fall, or if the prediction is off by more than 15 %.
"""

import argparse
import math

import torch
from gpu import MODEL_SHAPES, exit_with_failures, nullgpu, record_failure, require_cuda
from train_step import STEP_PARTS, build_settings, run_steps

from infer.evaluation.evaluate import describe_device
from train import objective

STEP_OPTION_NAMES = (
    "vocabulary",
    "hidden",
    "intermediate",
    "layers",
    "heads",
    "kv_heads",
    "head_dim",
)
QWEN3_8B_STEP_OPTIONS = dict(zip(STEP_OPTION_NAMES, MODEL_SHAPES["qwen3-8b"], strict=True)) | {
    "drafter_layers": 5,
    "length": 3072,
    "anchors": 512,
}
SMALL_STEP_OPTIONS = dict(zip(STEP_OPTION_NAMES, MODEL_SHAPES["tiny"], strict=True)) | {
    "drafter_layers": 2,
    "length": 512,
    "anchors": 64,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    device = require_cuda()
    failures = []
    if nullgpu is not None:  # the stand-in cannot compute the sizes of a plan
        real_plan_rows = objective.plan_chunks

        def plan_all_rows(
            rows: torch.Tensor, weights: torch.Tensor, chunk: int
        ) -> objective.ChunkPlan:
            plan = real_plan_rows(torch.arange(rows.numel()), torch.ones(rows.numel()), chunk)
            return objective.ChunkPlan(
                *(field.to(rows.device) if torch.is_tensor(field) else field for field in plan)
            )

        objective.plan_chunks = plan_all_rows
    sizes = SMALL_STEP_OPTIONS if args.small else QWEN3_8B_STEP_OPTIONS
    result = run_steps(
        build_settings(
            device=device.type, compile=args.compile, steps=args.steps, way="ours", **sizes
        )
    )
    peak = result["peak_gb"]
    planned = sum(result["planned"].values()) / 1e9
    print(
        f"{describe_device(device)}, torch {torch.__version__}: "
        f"{sizes['length']} tokens, {sizes['anchors']} anchors"
    )
    columns = ("step", *STEP_PARTS)
    headings = "".join(f"{name:>11}" for name in columns)
    cells = [f"{result['milliseconds'].get(name, math.nan):>11.1f}" for name in columns]
    losses = " ".join(f"{loss:.0f}" for loss in result["losses"])
    print(f"{'':<14}{headings}")
    print(f"{'milliseconds':<14}{''.join(cells)}")
    print(f"peak {peak:.1f} GB, planned {planned:.1f} GB; losses {losses}")
    if not args.small:
        record_failure(
            abs(planned / peak - 1) < 0.15,
            f"planned {planned:.1f} GB, {peak:.1f} were needed",
            failures,
        )
    if nullgpu is None:
        record_failure(all(map(math.isfinite, result["losses"])), "a loss is not finite", failures)
        record_failure(result["losses"][-1] < result["losses"][0], "losses do not fall", failures)
    exit_with_failures(failures)


if __name__ == "__main__":
    main()
