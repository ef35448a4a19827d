"""What training steps ask of a GPU: launches, waits, programs and memory, beside what `plan` says;
random weights.

    python benchmarks/gpu_train_counts.py                     # Qwen3-8B: 3,072 tokens, 512 anchors, eight passes a step
    python benchmarks/gpu_train_counts.py --shapes 0.6b 1.7b 4b long many hybrid
    python benchmarks/gpu_train_counts.py --layers 4          # targets of fewer layers
    python benchmarks/gpu_train_counts.py --recompute         # the drafter's layers computed again in the backward pass
    python benchmarks/gpu_train_counts.py --shapes tiny       # does the script work?

Steps are those of a run: `Prefetch`, `train_step`, DeepSpeed around the drafter. The first two
compile; the third is counted. Runs on the stand-in for a GPU too (`benchmarks/gpu.py`).
"""

import argparse
import gc
import sys
from collections import Counter
from dataclasses import dataclass

import torch
from gpu import Seen, finish, need_cuda, watch
from transformers import (
    PretrainedConfig,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from infer.config import DrafterConfig
from infer.drafters.base import Drafter, new_drafter
from infer.targets.target import Target
from train.batches import Prefetch
from train.config import ObjectiveConfig, TrainConfig
from train.engine import build_engine
from train.plan import StepShape, step_memory
from train.processes import start_processes
from train.step import train_step

FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
FIELDS += ("vocab_size", "drafter", "length", "anchors", "block", "hybrid")
SHAPES = {
    "8b": (4096, 12288, 36, 32, 8, 151_936, 5, 3072, 512, 16, False),
    "4b": (2560, 9728, 36, 32, 8, 151_936, 5, 3072, 512, 16, False),
    "1.7b": (2048, 6144, 28, 16, 8, 151_936, 5, 2048, 256, 16, False),
    "0.6b": (1024, 3072, 28, 16, 8, 151_936, 3, 1024, 128, 8, False),
    "long": (2560, 9728, 36, 32, 8, 151_936, 5, 8192, 512, 16, False),
    "many": (2560, 9728, 36, 32, 8, 32_000, 2, 4096, 1024, 8, False),
    "hybrid": (2560, 9216, 32, 16, 4, 151_936, 5, 3072, 512, 16, True),
    "tiny": (256, 512, 6, 4, 2, 2048, 2, 512, 64, 16, False),
}


class RandomRows:
    """Random rows, as `Prefetch` reads them, of so many documents each: one is the most work."""

    def __init__(self, count: int, length: int, vocabulary: int, documents: int = 1) -> None:
        generator = torch.Generator().manual_seed(0)
        each = -(-length // documents)
        numbers = torch.arange(length) // each
        self.columns = {
            "ids": torch.randint(vocabulary, (count, length), generator=generator),
            "positions": (torch.arange(length) - numbers * each).expand(count, -1),
            "documents": numbers.expand(count, -1),
            "loss": torch.ones(count, length, dtype=torch.bool),
        }

    def __len__(self) -> int:
        return len(self.columns["ids"])

    def __getitem__(self, indices: list[int]) -> dict[str, torch.Tensor]:
        return {name: column[indices] for name, column in self.columns.items()}


def target_config(sizes: dict) -> PretrainedConfig:
    """Return the config of a Qwen3, or of a Qwen3.5 with three recurrent layers in four."""
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


def run_config(sizes: dict, passes: int, recompute: bool = False, rows: int = 1) -> TrainConfig:
    """Return the configuration of a run of so many passes a step, of so many rows each."""
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


def build(sizes: dict, train: TrainConfig) -> tuple[Target, Drafter]:
    """Return a target and a drafter, both random."""
    config = target_config(sizes)
    with torch.device("cuda"):
        model = (Qwen3_5ForCausalLM if sizes["hybrid"] else Qwen3ForCausalLM)(config)
        target = Target(model.to(torch.bfloat16))
        drafter = new_drafter(train.drafter, target)
    return target, drafter


@dataclass(frozen=True)
class Asked:
    """What a step asked of the device."""

    seen: Seen
    passes: int
    peak: float  # GB, of the allocator
    planned: dict[str, float]  # bytes, by part


def third_step(sizes: dict, config: TrainConfig) -> Asked:
    """Return what the third step of a shape asks of the device."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    target, drafter = build(sizes, config)
    engine = build_engine(drafter, config, torch.device("cuda"))
    rows = RandomRows(
        4 * config.optim.batch_size, sizes["length"], sizes["vocab_size"], documents=3
    )
    prefetch = Prefetch(rows, config, range(3), pinned=True)
    for step in range(3):
        drawn = prefetch()
        if step < 2:
            train_step(drafter, engine, target, drawn, config)
            continue
        torch.cuda.reset_peak_memory_stats()
        with watch() as seen:
            train_step(drafter, engine, target, drawn, config)
    planned = step_memory(
        StepShape(config, target.model.config, config.optim.micro_batch_size), config, 1, 2, 2, True
    )
    passes = config.optim.batch_size // config.optim.micro_batch_size
    return Asked(seen, passes, torch.cuda.max_memory_allocated() / 1e9, planned)


def count(name: str, sizes: dict, config: TrainConfig) -> None:
    """Print what the third step of a shape asks of the device."""
    asked = third_step(sizes, config)
    counters = torch._dynamo.utils.counters
    seen = asked.seen
    passes = asked.passes
    whole = sum(asked.planned.values()) / 1e9
    layers = sizes["num_hidden_layers"]
    again = ", recomputed" if config.gradient_checkpointing else ""
    print(f"{name}: hidden {sizes['hidden_size']}, {layers} layers, {passes} passes{again}")
    print(f"  launches {seen.launches}, {seen.launches / passes:.0f} a pass")
    print(f"  waits    {len(seen.waits)}: {dict(Counter(seen.waits))}")
    print(f"  peak     {asked.peak:.2f} GB; planned {whole:.2f}, {whole / asked.peak:.3f} of it")
    print(
        "           "
        + ", ".join(f"{part} {size / 1e9:.2f}" for part, size in asked.planned.items())
    )
    print(
        f"  compiled {counters['stats']['unique_graphs']} programs, graph breaks {dict(counters['graph_break'])}"
    )
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=["8b"], choices=SHAPES)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--passes", type=int, default=8)
    parser.add_argument("--recompute", action="store_true")
    args = parser.parse_args()
    need_cuda()
    torch.cuda.set_device(0)
    start_processes(torch.device("cuda", 0))
    for name in args.shapes:
        sizes = dict(zip(FIELDS, SHAPES[name], strict=True))
        sizes |= {"num_hidden_layers": args.layers} if args.layers else {}
        count(name, sizes, run_config(sizes, args.passes, args.recompute))
        gc.collect()
        torch.cuda.empty_cache()
    finish([])


if __name__ == "__main__":
    main()
