"""What a training step costs as its sizes grow: context, anchors, batch, vocabulary, ranks.

    python benchmarks/scale.py           # CPU: CPU seconds and peak memory of a step, about five minutes
    python benchmarks/scale.py --gpu     # a GPU, or the stand-in of benchmarks/gpu.py: launches, waits and peak memory

One size of a small shape is doubled at a time, the others stay. Each point has a process of its own on a CPU: CPU
seconds are the least over some steps, one thread; memory the most in use above what there was before the models, in
another process that gives freed memory back at once. Behind each figure stands the exponent from the point before: 1 is
linear, 0 no growth; costs that do not depend on a size pull it below. Beside them the step's useful operations
(`train.plan`): seconds whose exponent is 0.2 above theirs are marked, and all else that is 0.2 above linear. Ranks:
processes that train together (ZeRO 2, one row each), CPU seconds of each.
"""

import argparse
import gc
import json
import math
import os
import socket
import time
from multiprocessing import get_context

from again import run_again

BASE = {"length": 512, "anchors": 32, "batch": 1, "vocabulary": 4096}
SIZES = {"length": (512, 1024, 2048, 4096), "anchors": (32, 64, 128, 256), "batch": (1, 2, 4, 8)}
SIZES |= {"vocabulary": (4096, 16_384, 65_536)}
REAL_BASE = {"length": 2048, "anchors": 256, "batch": 1, "vocabulary": 128_000}
REAL = {"length": (1024, 2048, 4096), "anchors": (128, 256, 512), "batch": (1, 2, 4)}
REAL |= {"vocabulary": (32_000, 64_000, 128_000)}
RANKS = (1, 2, 4)
FIXED = {"hidden": 128, "head_dim": 32, "layers": 4, "block": 8}  # of the small shape
STEEP = 0.2


def measure(sizes: dict, steps: int) -> dict:
    """Return the least CPU seconds of a step and the peak in GB of a shape, in this process."""
    import torch
    import train_step as script
    from train_beside import whole_step

    torch.set_num_threads(1)
    alike = {"device": "cpu", "compile": False, "way": "ours"}
    tiny = {"hidden": 64, "vocabulary": 100, "length": 32, "anchors": 4, "layers": 4, "block": 8, "head_dim": 32}
    whole_step(script, script.settings(**alike, **tiny), None)()  # libraries' own buffers are in memory now
    memory, seconds = script.Memory("cpu"), []
    asked = script.settings(**alike, **FIXED, **sizes)
    step = whole_step(script, asked, None)
    for _ in range(steps + 1):
        began = time.process_time()
        step()
        seconds.append(time.process_time() - began)
    peak = memory.peak() / 1e9
    target, _, _, config = script.build(asked)
    work = sum(script.step_operations(script.shape_of(config, target.config)).values()) / 1e9
    return {"GFLOP": work, "CPU s": min(seconds[1:]), "GB": peak}


def on_cpu(sizes: dict) -> dict:
    """Measure a point in processes of its own."""
    more = [__file__, "--point", json.dumps(sizes)]
    lean = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    return run_again(more, {}) | {"GB": run_again([*more, "--steps", "1"], lean)["GB"]}


def one_rank(rank: int, world: int, port: int, answers) -> None:
    """Take steps together with other processes; answer the least CPU seconds of one."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    import torch
    from transformers import Qwen3Config

    from train.config import TrainConfig
    from train.forecast import random_steps

    torch.set_num_threads(1)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": FIXED["head_dim"]}
    width = {"hidden_size": FIXED["hidden"], "intermediate_size": 3 * FIXED["hidden"]}
    theirs = Qwen3Config(**heads, **width, num_hidden_layers=FIXED["layers"], vocab_size=BASE["vocabulary"])
    config, seconds = TrainConfig(anchors=BASE["anchors"]), []
    config.data.length, config.optim.batch, config.deepspeed.stage = BASE["length"], world, 2
    config.drafter.block_size = FIXED["block"]
    with random_steps(config, theirs, torch.device("cpu"), 8) as step:
        for _ in range(8):
            began = time.process_time()
            step()
            seconds.append(time.process_time() - began)
    answers.put(min(seconds[2:]))
    answers.close()
    answers.join_thread()
    os._exit(0)  # a finished gloo process sometimes aborts in its exit handlers


def together(world: int) -> dict:
    """Return the mean CPU seconds of a step, of each of so many processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=one_rank, args=(rank, world, port, answers)) for rank in range(world)]
    for process in ranks:
        process.start()
    found = [answers.get(timeout=300) for _ in ranks]
    for process in ranks:
        process.join()
    return {"CPU s of each": sum(found) / world}


def on_gpu(sizes: dict) -> dict:
    """Return what a step of two passes asks of the device: Qwen3-1.7B's other sizes, four layers. GB: the allocator's
    peak beside weights, gradients and moments."""
    import torch
    from gpu_train_counts import FIELDS, SHAPES, run_config, third_step

    own = dict(zip(FIELDS, SHAPES["1.7b"], strict=True)) | {"num_hidden_layers": 4}
    own |= {"length": sizes["length"], "anchors": sizes["anchors"], "vocab_size": sizes["vocabulary"]}
    asked = third_step(own, run_config(own, 2, rows=sizes["batch"]))
    gc.collect()
    torch.cuda.empty_cache()
    state = sum(asked.planned[part] for part in ("target", "drafter", "gradients", "optimiser")) / 1e9
    launches = asked.seen.launches / asked.passes
    return {"launches a pass": launches, "waits": len(asked.seen.waits), "GB beside weights": asked.peak - state}


def start_gpu() -> None:
    """Found the process group that training steps need."""
    import torch
    from gpu import need_cuda

    from train.safety.processes import start_processes

    need_cuda()
    torch.cuda.set_device(0)
    start_processes(torch.device("cuda", 0))


def table(name: str, points: dict[int, dict]) -> None:
    """Print the points of one size, with the exponents between neighbours."""
    kinds = list(next(iter(points.values())))
    print(f"\n| {name} | " + " | ".join(f"{kind} | exponent" for kind in kinds) + " |")
    print("| ---: |" + " ---: |" * (2 * len(kinds)))
    before: tuple[int, dict] | None = None
    for size, found in points.items():
        line, allowed = f"| {size:,} |", 1.0 + STEEP
        for kind, value in found.items():
            exponent = ""
            if before is not None and value > 0 < before[1][kind]:
                power = math.log(value / before[1][kind]) / math.log(size / before[0])
                steep = kind != "GFLOP" and power > allowed
                exponent = f"{power:.2f}" + " **steep**" * steep
                allowed = (power if kind == "GFLOP" else 1.0) + STEEP  # the seconds stand behind the operations
            line += (f" {value:,.0f} |" if value >= 100 or kind == "waits" else f" {value:.3f} |") + f" {exponent} |"
        print(line, flush=True)
        before = size, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=[*SIZES, "ranks"], choices=[*SIZES, "ranks"])
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--point", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.point:
        print(json.dumps(measure(json.loads(args.point), args.steps)))
        return
    base, values, run = (REAL_BASE, REAL, on_gpu) if args.gpu else (BASE, SIZES, on_cpu)
    if args.gpu:
        start_gpu()
    elif "ranks" in args.sizes:
        table("ranks", {world: together(world) for world in RANKS})
    known: dict[str, dict] = {}  # the base is a point of every size
    for name in (name for name in args.sizes if name != "ranks"):
        points = {value: base | {name: value} for value in values[name]}
        for sizes in points.values():
            key = json.dumps(sizes)
            known[key] = known.get(key) or run(sizes)
        table(name, {value: known[json.dumps(sizes)] for value, sizes in points.items()})


if __name__ == "__main__":
    main()
