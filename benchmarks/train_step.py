"""Speed and memory of one training step, ours beside a straightforward one.

    python benchmarks/train_step.py                                   the reference shapes, on a laptop
    python benchmarks/train_step.py --qwen3-4b                        Qwen3-4B's shapes, random weights (a GPU)

"reference": the target's full logits, a dense mask, the drafter's full logits, autograd through
log-softmax and KL. "ours": what `train.step.block_loss` does. Same modules, rows, blocks and
optimiser; every line has a process of its own. Memory: the most in use above what there was before
the models, in one more process of each, which gives freed memory back at once. Parts: the target's
pass; the drafter, forward and backward; the objective, forward and backward; the optimiser.
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

from infer.attention.masks import block_mask
from infer.config import DrafterConfig
from infer.drafters.base import new_drafter
from infer.drafters.dflash.model import DFlash
from infer.evaluation.evaluate import describe_device
from infer.evaluation.measuring import synchronised_clock
from infer.targets.target import Target
from train.batches import draw_blocks
from train.config import ObjectiveConfig, OptimConfig, TrainConfig
from train.engine import compute_dtype, target_dtype
from train.objective import position_weights
from train.optim import make_optimizer
from train.plan import StepShape, step_memory
from train.step import block_loss, draft_states, score

PARTS = ("target", "drafter", "objective", "optimiser")


def build(args) -> tuple[Target, DFlash, dict[str, torch.Tensor], TrainConfig]:
    """A random target, a random drafter, a batch of random rows."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    device = torch.device(args.device)
    train = TrainConfig(anchors_per_sequence=args.anchors, gradient_checkpointing=args.recompute)
    train.optim.precision = args.precision
    kind = target_dtype(train, device)
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
        dtype=kind,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    with device:
        target = Target(Qwen3ForCausalLM(config).to(kind))
        options = DrafterConfig(
            layers=args.drafter_layers, block_size=args.block, mask_token_id=args.vocabulary - 1
        )
        drafter = new_drafter(options, target)
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
    train.drafter = options
    train.objective = objective
    train.data.length = args.length
    train.optim.batch_size = args.batch
    drafter.recompute = args.recompute
    half = compute_dtype(train, device) != torch.float32
    drafter.forward = torch.autocast(args.device, torch.bfloat16, enabled=half)(drafter.forward)
    if args.compile:
        drafter.compile(dynamic=False)
    return target, drafter, rows, train


def reference_loss(drafter, target, rows, blocks, config) -> torch.Tensor:
    """The same loss the plain way."""
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
    embedded, block_positions = drafter.inputs(
        target, rows["ids"], rows["positions"], blocks.anchors
    )
    slots = blocks.anchors.shape[1]
    allowed = block_mask(blocks.anchors, rows["documents"], drafter.block_size).dense
    hidden = drafter(features.float(), rows["positions"], embedded, block_positions, allowed)
    hidden = hidden.unflatten(1, (slots, drafter.block_size))[:, :, 1:]
    log_q = target.head(hidden.to(target.dtype)).float().log_softmax(-1)  # (B, N, L, V)
    log_p = out.logits.float().log_softmax(-1).flatten(0, 1)[blocks.teacher_rows]  # (B, N, L, V)
    kl = torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    weights = position_weights(config.objective, drafter.block_size - 1).to(target.device)
    return (kl * weights * blocks.supervised).sum()


def one(args) -> dict:
    """Steps of one way: milliseconds a step, by part where they can be told apart, and peak
    memory."""
    if args.device == "cpu":
        torch.set_num_threads(args.threads)
    steps(settings(**vars(args) | {"steps": 1}))
    gc.collect()  # libraries' own buffers, which grow with a product, and code are in memory now, and not counted
    return steps(args)


def steps(args) -> dict:
    """The steps themselves."""
    clock = synchronised_clock(torch.device(args.device))
    memory = Memory(args.device)
    target, drafter, rows, config = build(args)
    optimizer = make_optimizer(drafter, OptimConfig())
    times: dict[str, list[float]] = {part: [] for part in ("step", *PARTS)}
    losses = []
    for step in range(args.steps + 2):
        blocks = draw_blocks(rows, config, step * args.batch)
        began = clock()
        run = block_loss if args.way == "ours" else reference_loss
        loss = run(drafter, target, rows, blocks, config)
        loss = getattr(loss, "loss", loss)
        (loss / blocks.supervised.sum()).backward()
        before = clock()
        optimizer.step()
        optimizer.zero_grad()
        ended = clock()
        times["step"].append(ended - began)
        times["optimiser"].append(ended - before)
        losses.append(loss.item())
    peak = memory.peak()
    if args.way == "ours":
        for step in range(args.steps + 1):
            measure_parts(
                drafter, target, rows, draw_blocks(rows, config, step), config, clock, times
            )
    shape = StepShape(config, target.config)
    bytes_each = target.dtype.itemsize
    planned = step_memory(shape, config, 1, bytes_each, bytes_each, args.device == "cuda")
    figures = {
        part: 1000 * statistics.median(seconds[1:]) for part, seconds in times.items() if seconds
    }
    return {
        "milliseconds": figures,
        "tokens_per_second": args.batch * args.length / (figures["step"] / 1000),
        "peak_gb": peak / 1e9,
        "planned": planned,
        "losses": losses,
    }


def measure_parts(drafter, target, rows, blocks, config, clock, times) -> None:
    """The target's pass, drafter and objective, one after the other, each with its backward
    pass."""
    began = clock()
    features = target.packed_features(
        rows["ids"], rows["positions"], rows["documents"], drafter.layer_ids
    )
    times["target"].append(clock() - began)
    began = clock()
    drafted = draft_states(drafter, target, rows, blocks, features)
    drafted.backward(torch.ones_like(drafted))
    drafter.zero_grad()
    times["drafter"].append(clock() - began)
    began = clock()
    loss = score(
        drafter, drafted.detach().requires_grad_(), target, rows, blocks, features, config
    ).loss
    loss.backward()
    times["objective"].append(clock() - began)


class Memory:
    """The most memory in use since this was made: the allocator's on CUDA; on the host, samples of
    the process's."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.most = 0
        self.ended = False
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            return
        self.base = self.resident()
        threading.Thread(target=self.watch, daemon=True).start()

    @staticmethod
    def resident() -> int:
        with open("/proc/self/statm", encoding="utf-8") as file:
            return int(file.read().split()[1]) * 4096

    def watch(self) -> None:
        while not self.ended:
            self.most = max(self.most, self.resident() - self.base)
            time.sleep(0.001)

    def peak(self) -> int:
        self.ended = True
        return torch.cuda.max_memory_allocated() if self.cuda else self.most


def run_again(arguments: list[str], environment: dict[str, str]) -> dict:
    """Run a script in a process of its own; return the JSON of its last line."""
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | environment
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def options() -> argparse.ArgumentParser:
    """Return the command's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = "its sizes, 3,072 tokens, 512 anchors, 5 drafter layers"
    parser.add_argument("--qwen3-4b", action="store_true", help=sizes)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--intermediate", type=int)
    parser.add_argument("--heads", type=int)
    parser.add_argument("--kv-heads", type=int)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--layers", type=int, default=8, help="of the target")
    parser.add_argument("--drafter-layers", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--anchors", type=int, default=64)
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--chunk-rows", type=int, default=256)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument(
        "--precision", default="auto", choices=["auto", "float32", "bfloat16"], help="of products"
    )
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available()
    )
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument(
        "--repeats", type=int, default=3, help="processes of each way, by turns; medians are shown"
    )
    parser.add_argument("--ways", nargs="+", default=["reference", "ours"])
    parser.add_argument("--way", help=argparse.SUPPRESS)
    return parser


def settings(**given) -> argparse.Namespace:
    """Return what `build` and `steps` read, for other scripts: the command's defaults but for what
    is given. Raises TypeError for a name that is no option."""
    found = options().parse_args([])
    if unknown := given.keys() - vars(found).keys():
        raise TypeError(f"no options of train_step.py: {', '.join(sorted(unknown))}")
    vars(found).update(given)
    return found


def main() -> None:
    args = options().parse_args()
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
        print(json.dumps(one(args)))
        return
    lean = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    peaks = {
        way: run_again([*sys.argv, "--way", way, "--steps", "1"], lean)["peak_gb"]
        for way in args.ways
    }
    runs: dict[str, list[dict]] = {way: [] for way in args.ways}
    for _ in range(args.repeats):
        for way in args.ways:
            runs[way].append(run_again([*sys.argv, "--way", way], {}) | {"peak_gb": peaks[way]})
    print(
        f"{describe_device(torch.device(args.device))}: hidden {args.hidden}, vocabulary {args.vocabulary}, "
        f"{args.batch} x {args.length} tokens, {args.anchors} anchors, block {args.block}, "
        f"target {args.layers} layers, drafter {args.drafter_layers}\n"
    )
    print(
        f"{'':<12}{'tokens/s':>10}{'peak GB':>9}{'ms/step':>9}" + "".join(f"{p:>11}" for p in PARTS)
    )
    for way, some in runs.items():
        parts = {
            p: statistics.median(run["milliseconds"].get(p, float("nan")) for run in some)
            for p in ("step", *PARTS)
        }
        speed, peak = (
            statistics.median(run[key] for run in some) for key in ("tokens_per_second", "peak_gb")
        )
        line = f"{way:<12}{speed:>10.0f}{peak:>9.3f}{parts['step']:>9.1f}"
        print(line + "".join(f"{parts[p]:>11.1f}" for p in PARTS))
    if {"reference", "ours"} <= runs.keys():
        pairs = list(zip(runs["reference"], runs["ours"], strict=True))
        speed = statistics.median(o["tokens_per_second"] / r["tokens_per_second"] for r, o in pairs)
        memory = statistics.median(o["peak_gb"] / r["peak_gb"] for r, o in pairs)
        error = max(
            abs(a / b - 1)
            for a, b in zip(pairs[0][0]["losses"], pairs[0][1]["losses"], strict=True)
        )
        print(
            f"\nours: {speed:.2f} times the speed, {memory:.2f} of the memory; losses differ by at most {error:.1e}"
        )
    ours = runs.get("ours", [None])[0]
    if ours:
        whole = sum(ours["planned"].values()) / 1e9
        print(
            "planned, GB: "
            + ", ".join(f"{part} {size / 1e9:.3f}" for part, size in ours["planned"].items())
        )
        print(f"planned in all: {whole:.3f} GB, {whole / ours['peak_gb']:.2f} of what was measured")


if __name__ == "__main__":
    main()
