"""Which targets can be trained for on which GPUs, by the memory that `./launch.sh plan` computes: one Markdown table.

    python benchmarks/sizes.py

A cell is the first of WAYS whose peak leaves a tenth of the GPU free, and that peak. Nothing is loaded, no GPU is
needed; how far the plan is from what was measured stands in docs/results/README.md.
"""

import torch

from infer.main import COMMANDS
from infer.utils.entry import CONF, composed
from train.engine import compute_dtype
from train.plan import shape_of, step_memory, target_config

GPUS = (24, 48, 80, 141)  # GB
WAYS = (
    ("alone", 1, []),
    ("recompute", 1, ["recompute=true"]),
    ("features", 1, ["recompute=true"]),  # stored ones: the target is not in memory
    ("8 x zero2", 8, ["recompute=true", "deepspeed=zero2"]),
    ("8 x zero3, shard", 8, ["recompute=true", "deepspeed=zero3", "target.shard=true"]),
)


def peak(model: str, way: str, processes: int, overrides: list[str]) -> float:
    """Return the bytes on one device at a step's peak, in bfloat16 on CUDA."""
    config = composed("train", COMMANDS["train"].options_class(), [f"+model={model}", *overrides])
    config.features = "stored" if way == "features" else None
    shape = shape_of(config, target_config(config), rows=1)
    product = compute_dtype(config, torch.device("cuda")).itemsize
    return sum(step_memory(shape, config, processes, 2, product, cuda=True).values())


def main() -> None:
    heads = ["target", *(f"{size} GB" for size in GPUS)]
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    for model in sorted(file.stem for file in (CONF / "target").glob("*.yaml") if file.stem != "hf"):
        try:
            peaks = {way: peak(model, way, *rest) / 1e9 for way, *rest in WAYS}
        except FileNotFoundError:  # conf/target has no sizes of it, and its own config is not at hand
            continue
        cells = []
        for size in GPUS:
            fits = [f"{way}, {found:.0f} GB" for way, found in peaks.items() if found <= 0.9 * size]
            cells.append(fits[0] if fits else "-")
        print(f"| {model} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
