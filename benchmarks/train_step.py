"""Compare speed and memory of our training step with a straightforward implementation.

    python benchmarks/train_step.py                  # small shapes, for a laptop
    python benchmarks/train_step.py --qwen3-4b      # Qwen3-4B's shapes, random weights, on a GPU

"reference": full logits of target and drafter, a dense mask, and autograd through log-softmax and
KL. "ours": `train.step.compute_block_loss`. Modules, packed sequences, blocks and optimiser are the
same; every line is measured in processes of its own. Memory is the peak above the usage before the
models were created, measured in a separate process that returns freed memory at once. Parts: the
target's forward pass; drafter and objective, each forward and backward; the optimiser.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import threading
import time

import torch

from infer.attention.masks import build_training_mask
from infer.config import DrafterConfig
from infer.drafters.build import create_drafter
from infer.drafters.dflash.model import DFlash
from infer.evaluation.evaluate import describe_device
from infer.evaluation.measurement import synchronised_clock
from infer.targets.target import Target
from train.batches import draw_blocks
from train.config import ObjectiveConfig, OptimConfig, TrainConfig
from train.engine import get_drafter_matmul_dtype, get_training_target_dtype
from train.objective import position_weights
from train.optim import make_optimizer
from train.step import compute_block_loss, compute_drafter_states, compute_loss_from_states
from train.step_memory import StepSizes, estimate_step_memory

STEP_PARTS = ("target", "drafter", "objective", "optimiser")


def build_models(args) -> tuple[Target, DFlash, dict[str, torch.Tensor], TrainConfig]:
    """Return a random target, a random drafter, a batch of random packed sequences and options."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    device = torch.device(args.device)
    train = TrainConfig(anchors_per_sequence=args.anchors, gradient_checkpointing=args.recompute)
    train.optim.precision = args.precision
    weight_dtype = get_training_target_dtype(train, device)
    heads = args.hidden // 64 if args.heads is None else args.heads
    config = Qwen3Config(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate or 3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        num_key_value_heads=args.kv_heads or max(1, heads // 2),
        head_dim=args.head_dim,
        max_position_embeddings=max(args.length, 4096),
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
        dtype=weight_dtype,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    with device:
        target = Target(Qwen3ForCausalLM(config).to(weight_dtype))
        build_parser = DrafterConfig(
            layers=args.drafter_layers, block_size=args.block, mask_token_id=args.vocabulary - 1
        )
        drafter = create_drafter(build_parser, target)
    ids = torch.randint(args.vocabulary, (args.batch, args.length), device=device)
    rows = {
        "ids": ids,
        "positions": torch.arange(args.length, device=device).expand_as(ids).contiguous(),
        "documents": torch.zeros_like(ids),
        "loss": torch.ones_like(ids, dtype=torch.bool),
    }
    objective = ObjectiveConfig(
        position_weights="exponential", gamma=7.0, chunk_rows=args.chunk_rows
    )
    train.drafter = build_parser
    train.objective = objective
    train.data.length = args.length
    train.optim.batch_size = args.batch
    drafter.recompute = args.recompute
    half = get_drafter_matmul_dtype(train, device) != torch.float32
    drafter.forward = torch.autocast(args.device, torch.bfloat16, enabled=half)(drafter.forward)
    if args.compile:
        drafter.compile(dynamic=False)
    return target, drafter, rows, train


def reference_loss(drafter, target, rows, blocks, config) -> torch.Tensor:
    """Return the loss of `compute_block_loss`, computed with full logits and a dense mask."""
    length = rows["ids"].shape[1]
    mask = torch.full(
        (length, length), float("-inf"), device=target.device, dtype=target.dtype
    ).triu(1)
    with torch.no_grad():
        out = target.model(
            rows["ids"],
            attention_mask=mask.expand(len(rows["ids"]), 1, -1, -1),
            output_hidden_states=True,
        )
    features = torch.cat([out.hidden_states[layer + 1] for layer in drafter.layer_ids], dim=-1)
    embedded, block_positions = drafter.prepare_training_inputs(
        target, rows["ids"], rows["positions"], blocks.anchors
    )
    slots = blocks.anchors.shape[1]
    allowed = build_training_mask(blocks.anchors, rows["documents"], drafter.block_size).dense
    hidden = drafter(features.float(), rows["positions"], embedded, block_positions, allowed)
    hidden = hidden.unflatten(1, (slots, drafter.block_size))[:, :, 1:]
    log_q = target.compute_logits(hidden.to(target.dtype)).float().log_softmax(-1)  # (B, N, L, V)
    log_p = out.logits.float().log_softmax(-1).flatten(0, 1)[blocks.teacher_rows]  # (B, N, L, V)
    kl = torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    weights = position_weights(config.objective, drafter.block_size - 1).to(target.device)
    return (kl * weights * blocks.supervised).sum()


def measure_after_warmup(args) -> dict:
    """Run one step as a warm-up, then return `run_steps`."""
    if args.device == "cpu":
        torch.set_num_threads(args.threads)
    run_steps(build_settings(**vars(args) | {"steps": 1}))
    # Code and the buffers of libraries are in memory now, and are not counted as peak memory.
    gc.collect()
    return run_steps(args)


def run_steps(args) -> dict:
    """Run training steps of one implementation and return the measurements.

    Keys: "milliseconds" by part (of "ours"; else only of a step and the optimiser),
    "tokens_per_second", "peak_gb", "planned" (predicted bytes by part), "losses".
    """
    clock = synchronised_clock(torch.device(args.device))
    memory = PeakMemory(args.device)
    target, drafter, rows, config = build_models(args)
    optimizer = make_optimizer(drafter, OptimConfig())
    times: dict[str, list[float]] = {part_name: [] for part_name in ("step", *STEP_PARTS)}
    losses = []
    for step in range(args.steps + 2):
        blocks = draw_blocks(rows, config, step * args.batch)
        start_time = clock()
        run = compute_block_loss if args.way == "ours" else reference_loss
        loss = run(drafter, target, rows, blocks, config)
        loss = getattr(loss, "loss", loss)
        (loss / blocks.supervised.sum()).backward()
        optimizer_start = clock()
        optimizer.step()
        optimizer.zero_grad()
        end_time = clock()
        times["step"].append(end_time - start_time)
        times["optimiser"].append(end_time - optimizer_start)
        losses.append(loss.item())
    peak_bytes = memory.stop_and_read()
    if args.way == "ours":
        for step in range(args.steps + 1):
            time_step_parts(
                drafter, target, rows, draw_blocks(rows, config, step), config, clock, times
            )
    shape = StepSizes(config, target.config)
    itemsize = target.dtype.itemsize
    planned = estimate_step_memory(shape, config, 1, itemsize, itemsize, args.device == "cuda")
    milliseconds = {
        part_name: 1000 * statistics.median(seconds[1:])
        for part_name, seconds in times.items()
        if seconds
    }
    return {
        "milliseconds": milliseconds,
        "tokens_per_second": args.batch * args.length / (milliseconds["step"] / 1000),
        "peak_gb": peak_bytes / 1e9,
        "planned": planned,
        "losses": losses,
    }


def time_step_parts(drafter, target, rows, blocks, config, clock, times) -> None:
    """Append the seconds of target, drafter and objective to `times`, run one after the other.

    Drafter and objective include their backward passes.
    """
    start_time = clock()
    features = target.compute_packed_features(
        rows["ids"], rows["positions"], rows["documents"], drafter.layer_ids
    )
    times["target"].append(clock() - start_time)
    start_time = clock()
    drafted = compute_drafter_states(drafter, target, rows, blocks, features)
    drafted.backward(torch.ones_like(drafted))
    drafter.zero_grad()
    times["drafter"].append(clock() - start_time)
    start_time = clock()
    loss = compute_loss_from_states(
        drafter, drafted.detach().requires_grad_(), target, rows, blocks, features, config
    ).loss
    loss.backward()
    times["objective"].append(clock() - start_time)


class PeakMemory:
    """Peak memory since this object was created.

    On CUDA it is that of the allocator; on a CPU a thread samples the resident memory.
    """

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.peak_bytes = 0
        self.is_stopped = False
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            return
        self.initial_bytes = self.read_resident_bytes()
        threading.Thread(target=self.sample_memory, daemon=True).start()

    @staticmethod
    def read_resident_bytes() -> int:
        """Return the resident memory of this process."""
        with open("/proc/self/statm", encoding="utf-8") as file:
            return int(file.read().split()[1]) * 4096

    def sample_memory(self) -> None:
        """Sample the resident memory every millisecond until `stop_and_read`."""
        while not self.is_stopped:
            self.peak_bytes = max(self.peak_bytes, self.read_resident_bytes() - self.initial_bytes)
            time.sleep(0.001)

    def stop_and_read(self) -> int:
        """Stop sampling; return the peak in bytes."""
        self.is_stopped = True
        return torch.cuda.max_memory_allocated() if self.cuda else self.peak_bytes


def run_in_new_process(arguments: list[str], environment: dict[str, str]) -> dict:
    """Run a Python script in a new process; return the JSON value of its last output line."""
    command = [sys.executable, *arguments]
    process = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | environment
    )
    if process.returncode:
        raise SystemExit(process.stderr)
    return json.loads(process.stdout.splitlines()[-1])


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = "Qwen3-4B's sizes, 3,072 tokens, 512 anchors, 5 drafter layers"
    parser.add_argument("--qwen3-4b", action="store_true", help=sizes)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--intermediate", type=int)
    parser.add_argument("--heads", type=int)
    parser.add_argument("--kv-heads", type=int)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--layers", type=int, default=8, help="layers of the target")
    parser.add_argument("--drafter-layers", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--anchors", type=int, default=64)
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--chunk-rows", type=int, default=256)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument(
        "--precision", default="auto", choices=["auto", "float32", "bfloat16"], help="of matmuls"
    )
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available()
    )
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        help="processes of each implementation, interleaved; medians are shown",
    )
    parser.add_argument("--ways", nargs="+", default=["reference", "ours"])
    parser.add_argument("--way", help=argparse.SUPPRESS)
    return parser


def build_settings(**overrides) -> argparse.Namespace:
    """Return what `build` and `steps` read, for other scripts: the command's defaults but for what
    is given. Raises TypeError for a name that is no option."""
    arguments = build_parser().parse_args([])
    if unknown_names := overrides.keys() - vars(arguments).keys():
        raise TypeError(f"no options of train_step.py: {', '.join(sorted(unknown_names))}")
    vars(arguments).update(overrides)
    return arguments


def main() -> None:
    args = build_parser().parse_args()
    if args.qwen3_4b:
        sizes = {
            "hidden": 2560,
            "intermediate": 9728,
            "heads": 32,
            "kv_heads": 8,
            "head_dim": 128,
            "layers": 36,
        }
        vars(args).update(sizes, vocabulary=151_936, drafter_layers=5, length=3072, anchors=512)
    if args.way:
        print(json.dumps(measure_after_warmup(args)))
        return
    # With these settings the allocator returns freed memory to the system at once.
    low_memory = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    peaks = {}
    for implementation in args.ways:
        command = [*sys.argv, "--way", implementation, "--steps", "1"]
        peaks[implementation] = run_in_new_process(command, low_memory)["peak_gb"]

    runs: dict[str, list[dict]] = {implementation: [] for implementation in args.ways}
    for _ in range(args.repeats):
        for implementation in args.ways:
            run = run_in_new_process([*sys.argv, "--way", implementation], {})
            runs[implementation].append(run | {"peak_gb": peaks[implementation]})
    print_table(args, runs)
    if {"reference", "ours"} <= runs.keys():
        print_comparison(runs["reference"], runs["ours"])
    if runs.get("ours"):
        print_planned_memory(runs["ours"][0])


def print_table(args: argparse.Namespace, runs: dict[str, list[dict]]) -> None:
    """Print the medians of every implementation's runs."""
    print(
        f"{describe_device(torch.device(args.device))}: "
        f"hidden {args.hidden}, vocabulary {args.vocabulary}, "
        f"{args.batch} x {args.length} tokens, {args.anchors} anchors, block {args.block}, "
        f"target {args.layers} layers, drafter {args.drafter_layers}\n"
    )
    part_headings = "".join(f"{name:>11}" for name in STEP_PARTS)
    print(f"{'':<12}{'tokens/s':>10}{'peak GB':>9}{'ms/step':>9}{part_headings}")
    for implementation, results in runs.items():
        milliseconds = {}
        for name in ("step", *STEP_PARTS):
            values = [run["milliseconds"].get(name, float("nan")) for run in results]
            milliseconds[name] = statistics.median(values)
        speed = statistics.median(run["tokens_per_second"] for run in results)
        peak = statistics.median(run["peak_gb"] for run in results)
        cells = "".join(f"{milliseconds[name]:>11.1f}" for name in STEP_PARTS)
        print(f"{implementation:<12}{speed:>10.0f}{peak:>9.3f}{milliseconds['step']:>9.1f}{cells}")


def print_comparison(reference_runs: list[dict], our_runs: list[dict]) -> None:
    """Print the ratios of speed and memory, and the largest relative difference of losses."""
    pairs = list(zip(reference_runs, our_runs, strict=True))
    speed = statistics.median(
        ours["tokens_per_second"] / reference["tokens_per_second"] for reference, ours in pairs
    )
    memory = statistics.median(ours["peak_gb"] / reference["peak_gb"] for reference, ours in pairs)
    first_losses = zip(reference_runs[0]["losses"], our_runs[0]["losses"], strict=True)
    error = max(abs(reference / ours - 1) for reference, ours in first_losses)
    print(
        f"\nours: {speed:.2f} times the speed, {memory:.2f} of the memory; "
        f"losses differ by at most {error:.1e}"
    )


def print_planned_memory(run: dict) -> None:
    """Print the memory that `plan` predicts, by part, and its ratio to the measured peak."""
    planned_gb = sum(run["planned"].values()) / 1e9
    sizes = [f"{name} {size / 1e9:.3f}" for name, size in run["planned"].items()]
    print("planned, GB: " + ", ".join(sizes))
    print(
        f"planned in all: {planned_gb:.3f} GB, "
        f"{planned_gb / run['peak_gb']:.2f} of what was measured"
    )


if __name__ == "__main__":
    main()
