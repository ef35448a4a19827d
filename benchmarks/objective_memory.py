"""Extra peak memory and time of the objective: every logit at once, against chunks.

    python benchmarks/objective_memory.py                   # Qwen3-4B's head: 7,680 rows, 2,560 x 151,936
    python benchmarks/objective_memory.py --rows 512 --vocabulary 32000

Each way runs in a process of its own; its inputs are made and touched first, and what its peak adds to them is printed
(resident memory on the CPU, torch's allocator on CUDA). The naive way is measured at `--naive-rows` and scaled to
--rows where the machine could not hold it.
"""

import argparse
import resource
import subprocess
import sys
import time


def peak(device: str) -> float:
    """Highest memory so far, in GB."""
    import torch

    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def measure(way: str, rows: int, hidden_size: int, vocabulary: int, dtype: str, chunk: int, device: str) -> None:
    """Prints extra GB and seconds of one forward and backward pass."""
    import torch

    from train.config import ObjectiveConfig
    from train.objective import divergence

    kind = getattr(torch, dtype)
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device=device).normal_(0, scale, generator=generator)

    hidden = normal(rows, hidden_size).requires_grad_()
    teacher = normal(rows, hidden_size)
    head = normal(vocabulary, hidden_size, scale=hidden_size**-0.5)
    labels = torch.randint(vocabulary, (rows, 1), device=device)
    which, weights = torch.arange(rows, device=device)[:, None], torch.ones(rows, 1, device=device)
    # One small pass first, so that libraries' own buffers are not counted.
    divergence(hidden[:2], teacher, which[:2], labels[:2], weights[:2], head, ObjectiveConfig()).loss.backward()
    hidden.grad = torch.zeros_like(hidden)
    before, began = peak(device), time.perf_counter()
    if way == "chunked":
        divergence(hidden, teacher, which, labels, weights, head, ObjectiveConfig(chunk_rows=chunk)).loss.backward()
    else:
        log_q = (hidden @ head.T).float().log_softmax(-1)
        log_p = (teacher @ head.T).float().log_softmax(-1)
        torch.nn.functional.kl_div(log_q, log_p, reduction="sum", log_target=True).backward()
    if device == "cuda":
        torch.cuda.synchronize()
    print(peak(device) - before, time.perf_counter() - began)


def available_gb() -> float:
    """Free host memory, or infinity where it cannot be read."""
    try:
        with open("/proc/meminfo", encoding="utf-8") as lines:
            return next(int(line.split()[1]) * 1024 / 1e9 for line in lines if line.startswith("MemAvailable"))
    except OSError:
        return float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=7680)
    parser.add_argument("--hidden", type=int, default=2560)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--chunk", type=int, default=256, help="chunk_rows, as in conf")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--naive-rows", type=int, default=1024)
    parser.add_argument("--way", help="internal: measure one way in this process")
    args = parser.parse_args()
    shape = (args.hidden, args.vocabulary, args.dtype, args.chunk, args.device)
    if args.way:
        measure(args.way, args.rows, *shape)
        return
    print(f"{args.rows:,} rows, hidden {args.hidden:,}, vocabulary {args.vocabulary:,}, {args.dtype}, {args.device}\n")
    print(f"{'way':<22}{'rows run':>9}{'extra peak, GB':>16}{'seconds':>9}")
    needed = args.rows * args.vocabulary * 4 * 6 / 1e9  # both logits, log-softmaxes and their gradients
    fits = args.device == "cuda" or needed < 0.6 * available_gb()
    for way in ("chunked", "naive"):
        rows = args.rows if way == "chunked" or fits else min(args.rows, args.naive_rows)
        own = ["--rows", str(rows), "--hidden", str(args.hidden), "--vocabulary", str(args.vocabulary)]
        own += ["--dtype", args.dtype, "--chunk", str(args.chunk), "--device", args.device, "--way", way]
        out = subprocess.run([sys.executable, __file__, *own], capture_output=True, text=True, check=True).stdout
        gigabytes, seconds = map(float, out.split())
        scale = args.rows / rows
        name = way if scale == 1 else f"{way}, scaled x{scale:g}"
        print(f"{name:<22}{rows:>9,}{gigabytes * scale:>16.2f}{seconds * scale:>9.1f}", flush=True)


if __name__ == "__main__":
    main()
