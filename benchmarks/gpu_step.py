"""Training steps at Qwen3-8B's shape on a GPU, with random weights: 3,072 tokens, 512 anchors,
block 16.

    python benchmarks/gpu_step.py                          # minutes, most of them compiling; 80 GB
    python benchmarks/gpu_step.py --small                  # does the script work?

Prints milliseconds of a step and of its parts (the first steps, which compile, left out), and peak
memory beside what `plan` says. Fails where a loss is not finite, where losses do not fall, and
where the plan is off by more than 15 %.
"""

import argparse
import math

import torch
from gpu import SHAPES, check, finish, need_cuda, nullgpu
from train_step import PARTS, settings, steps

from infer.evaluation.evaluate import describe_device
from train import objective

NAMES = ("vocabulary", "hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim")
SIZES = dict(zip(NAMES, SHAPES["qwen3-8b"], strict=True)) | {
    "drafter_layers": 5,
    "length": 3072,
    "anchors": 512,
}
SMALL = dict(zip(NAMES, SHAPES["tiny"], strict=True)) | {
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
    device = need_cuda()
    faults = []
    if nullgpu is not None:  # sizes that the device would have to compute
        plan = objective.plan_rows

        def every_row(rows: torch.Tensor, weights: torch.Tensor, chunk: int) -> objective.RowPlan:
            found = plan(torch.arange(rows.numel()), torch.ones(rows.numel()), chunk)
            return objective.RowPlan(
                *(part.to(rows.device) if torch.is_tensor(part) else part for part in found)
            )

        objective.plan_rows = every_row
    sizes = SMALL if args.small else SIZES
    found = steps(
        settings(device=device.type, compile=args.compile, steps=args.steps, way="ours", **sizes)
    )
    peak = found["peak_gb"]
    planned = sum(found["planned"].values()) / 1e9
    print(
        f"{describe_device(device)}, torch {torch.__version__}: {sizes['length']} tokens, {sizes['anchors']} anchors"
    )
    print(f"{'':<14}" + "".join(f"{part:>11}" for part in ("step", *PARTS)))
    print(
        f"{'milliseconds':<14}"
        + "".join(f"{found['milliseconds'].get(p, math.nan):>11.1f}" for p in ("step", *PARTS))
    )
    print(
        f"peak {peak:.1f} GB, planned {planned:.1f} GB; losses {' '.join(f'{loss:.0f}' for loss in found['losses'])}"
    )
    if not args.small:
        check(
            abs(planned / peak - 1) < 0.15,
            f"planned {planned:.1f} GB, {peak:.1f} were needed",
            faults,
        )
    if nullgpu is None:
        check(all(map(math.isfinite, found["losses"])), "a loss is not finite", faults)
        check(found["losses"][-1] < found["losses"][0], "losses do not fall", faults)
    finish(faults)


if __name__ == "__main__":
    main()
