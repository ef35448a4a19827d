"""Count the launches, host waits, compiled programs and memory of training steps on a GPU.

    python benchmarks/gpu_train_counts.py                     # Qwen3-8B, eight passes a step
    python benchmarks/gpu_train_counts.py --shapes 0.6b 1.7b 4b long many hybrid
    python benchmarks/gpu_train_counts.py --layers 4          # targets of fewer layers
    python benchmarks/gpu_train_counts.py --recompute         # recompute the drafter's layers
    python benchmarks/gpu_train_counts.py --shapes tiny       # a tiny shape, to try the script

Weights are random. Steps are those of a run: `BatchPrefetcher`, `train_step`, and the drafter
wrapped by DeepSpeed. The first two compile; the third is counted, and its memory is compared with
what `plan` predicts. The script also runs on the stand-in for a GPU (`benchmarks/gpu.py`).
"""

import argparse
import gc
import sys
from collections import Counter
from dataclasses import dataclass

import torch
from gpu import DeviceWork, count_device_work, exit_with_failures, require_cuda
from transformers import (
    PretrainedConfig,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from infer.config import DrafterConfig
from infer.drafters.base import Drafter
from infer.drafters.build import create_drafter
from infer.targets.target import Target
from train.batches import BatchPrefetcher
from train.config import ObjectiveConfig, TrainConfig
from train.engine import build_engine
from train.plan import StepSizes
from train.processes import start_process_group
from train.step import train_step
from train.step_memory import estimate_step_memory

TRAIN_SHAPE_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
TRAIN_SHAPE_FIELDS += ("vocab_size", "drafter", "length", "anchors", "block", "hybrid")
TRAIN_SHAPES = {
    "8b": (4096, 12288, 36, 32, 8, 151_936, 5, 3072, 512, 16, False),
    "4b": (2560, 9728, 36, 32, 8, 151_936, 5, 3072, 512, 16, False),
    "1.7b": (2048, 6144, 28, 16, 8, 151_936, 5, 2048, 256, 16, False),
    "0.6b": (1024, 3072, 28, 16, 8, 151_936, 3, 1024, 128, 8, False),
    "long": (2560, 9728, 36, 32, 8, 151_936, 5, 8192, 512, 16, False),
    "many": (2560, 9728, 36, 32, 8, 32_000, 2, 4096, 1024, 8, False),
    "hybrid": (2560, 9216, 32, 16, 4, 151_936, 5, 3072, 512, 16, True),
    "tiny": (256, 512, 6, 4, 2, 2048, 2, 512, 64, 16, False),
}


class RandomPackedDataset:
    """Data set of random packed sequences, as `BatchPrefetcher` reads it.

    documents: documents in each sequence; with one, attention is most expensive
    """

    def __init__(self, print_counts: int, length: int, vocabulary: int, documents: int = 1) -> None:
        generator = torch.Generator().manual_seed(0)
        document_length = -(-length // documents)
        numbers = torch.arange(length) // document_length
        self.columns = {
            "ids": torch.randint(vocabulary, (print_counts, length), generator=generator),
            "positions": (torch.arange(length) - numbers * document_length).expand(
                print_counts, -1
            ),
            "documents": numbers.expand(print_counts, -1),
            "loss": torch.ones(print_counts, length, dtype=torch.bool),
        }

    def __len__(self) -> int:
        return len(self.columns["ids"])

    def __getitem__(self, indices: list[int]) -> dict[str, torch.Tensor]:
        return {name: column[indices] for name, column in self.columns.items()}


def build_target_config(sizes: dict) -> PretrainedConfig:
    """Return the config of a Qwen3, or of a hybrid Qwen3.5 (three of four layers are recurrent)."""
    config = {
        name: sizes[name]
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
    }
    config |= {name: sizes[name] for name in ("num_attention_heads", "num_key_value_heads")}
    config |= {"head_dim": 128, "max_position_embeddings": 40_960, "tie_word_embeddings": False}
    config |= {
        "eos_token_id": None,
        "bos_token_id": None,
        "dtype": torch.bfloat16,
        "attn_implementation": "sdpa",
    }
    if not sizes["hybrid"]:
        return Qwen3Config(**config)
    return Qwen3_5TextConfig(**config, linear_num_value_heads=32, linear_num_key_heads=16)


def build_train_config(
    sizes: dict, passes: int, recompute: bool = False, rows: int = 1
) -> TrainConfig:
    """Return a training configuration.

    passes: forward and backward passes of a step
    rows: packed sequences of a pass
    """
    options = DrafterConfig(
        layers=sizes["drafter"], block_size=sizes["block"], mask_token_id=sizes["vocab_size"] - 1
    )
    train = TrainConfig(
        anchors_per_sequence=sizes["anchors"], drafter=options, gradient_checkpointing=recompute
    )
    train.objective = ObjectiveConfig(position_weights="exponential", gamma=7.0)
    train.data.length = sizes["length"]
    train.optim.batch_size = passes * rows
    train.optim.micro_batch_size = rows
    return train


def build_random_models(sizes: dict, train: TrainConfig) -> tuple[Target, Drafter]:
    """Return a target and a drafter with random weights."""
    config = build_target_config(sizes)
    with torch.device("cuda"):
        model = (Qwen3_5ForCausalLM if sizes["hybrid"] else Qwen3ForCausalLM)(config)
        target = Target(model.to(torch.bfloat16))
        drafter = create_drafter(train.drafter, target)
    return target, drafter


@dataclass(frozen=True)
class StepMeasurement:
    """Device work and memory of a training step."""

    work: DeviceWork
    passes: int
    peak: float  # GB, according to the allocator
    planned: dict[str, float]  # predicted bytes by part


def measure_third_step(sizes: dict, config: TrainConfig) -> StepMeasurement:
    """Run three steps of a shape; return the measurements of the third."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    target, drafter = build_random_models(sizes, config)
    engine = build_engine(drafter, config, torch.device("cuda"))
    rows = RandomPackedDataset(
        4 * config.optim.batch_size, sizes["length"], sizes["vocab_size"], documents=3
    )
    prefetch = BatchPrefetcher(rows, config, range(3), pinned=True)
    for step in range(3):
        drawn = prefetch()
        if step < 2:
            train_step(drafter, engine, target, drawn, config)
            continue
        torch.cuda.reset_peak_memory_stats()
        with count_device_work() as work:
            train_step(drafter, engine, target, drawn, config)
    planned = estimate_step_memory(
        StepSizes(config, target.model.config, config.optim.micro_batch_size), config, 1, 2, 2, True
    )
    passes = config.optim.batch_size // config.optim.micro_batch_size
    return StepMeasurement(work, passes, torch.cuda.max_memory_allocated() / 1e9, planned)


def print_counts(name: str, sizes: dict, config: TrainConfig) -> None:
    """Print the measurements of the third step of a shape."""
    measurement = measure_third_step(sizes, config)
    counters = torch._dynamo.utils.counters
    work = measurement.work
    passes = measurement.passes
    planned_gb = sum(measurement.planned.values()) / 1e9
    layers = sizes["num_hidden_layers"]
    again = ", recomputed" if config.gradient_checkpointing else ""
    print(f"{name}: hidden {sizes['hidden_size']}, {layers} layers, {passes} passes{again}")
    print(f"  launches {work.launches}, {work.launches / passes:.0f} a pass")
    print(f"  waits    {len(work.waits)}: {dict(Counter(work.waits))}")
    print(
        f"  peak     {measurement.peak:.2f} GB; planned {planned_gb:.2f}, "
        f"{planned_gb / measurement.peak:.3f} of it"
    )
    print(
        "           "
        + ", ".join(f"{part} {size / 1e9:.2f}" for part, size in measurement.planned.items())
    )
    print(
        f"  compiled {counters['stats']['unique_graphs']} programs, graph breaks "
        f"{dict(counters['graph_break'])}"
    )
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=["8b"], choices=TRAIN_SHAPES)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--passes", type=int, default=8)
    parser.add_argument("--recompute", action="store_true")
    args = parser.parse_args()
    require_cuda()
    torch.cuda.set_device(0)
    start_process_group(torch.device("cuda", 0))
    for name in args.shapes:
        sizes = dict(zip(TRAIN_SHAPE_FIELDS, TRAIN_SHAPES[name], strict=True))
        sizes |= {"num_hidden_layers": args.layers} if args.layers else {}
        print_counts(name, sizes, build_train_config(sizes, args.passes, args.recompute))
        gc.collect()
        torch.cuda.empty_cache()
    exit_with_failures([])


if __name__ == "__main__":
    main()
