"""What the GPU scripts share: random models at real shapes, and what a piece of code asks of the
device.

On a GPU torch's profiler counts launches. Where a module `nullgpu` can be imported, the device is a
stand-in that counts launches, copies, waits, plans and graphs and computes nothing: numbers are
then meaningless, and checks of them are off.
"""

import statistics
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3Config, Qwen3ForCausalLM

from infer import DFlash, Target
from infer.config import DrafterConfig, HeadConfig
from infer.drafters.base import new_drafter
from infer.drafters.heads.table import RECURRENT_KINDS
from infer.engine.runner import Runner

try:
    import nullgpu
except ImportError:
    nullgpu = None

SHAPES = {  # `FIELDS` of the published models, and of a small one
    "qwen3-4b": (151936, 2560, 9728, 36, 32, 8, 128),
    "qwen3-8b": (151936, 4096, 12288, 36, 32, 8, 128),
    "tiny": (512, 64, 128, 6, 4, 2, 32),
}
FIELDS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
FIELDS += ("num_attention_heads", "num_key_value_heads", "head_dim")


@dataclass
class Seen:
    """What a piece of code asked of the device."""

    launches: int = 0  # kernels and copies on the device, graphs left out
    graphs: int = 0  # replayed
    plans: int = 0  # of cuDNN's attention
    waits: tuple[str, ...] = ()  # where the host waited for the device


def need_cuda() -> torch.device:
    """Return the device; end the script where there is none."""
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device here")
    if nullgpu is not None:
        pretend()
    return torch.device("cuda")


def pretend() -> None:
    """Let comparisons pass and rounds commit a few tokens, on a device that computes nothing."""
    from infer.kernels import validation
    from infer.targets import layers, target

    layers.close = target.close = lambda *compared: True
    validation.CHECKS = dict.fromkeys(validation.CHECKS, lambda operation, device: "")
    # its results have as many entries as the device says; what lies on the host is computed
    distinct = torch.Tensor.unique_consecutive
    places = torch.Tensor.nonzero

    def every(tensor: torch.Tensor) -> torch.Tensor:
        return torch.arange(len(tensor), device=tensor.device)

    def pairs(ids: torch.Tensor, **asked) -> tuple[torch.Tensor, torch.Tensor]:
        return (ids, every(ids)) if ids.is_cuda else distinct(ids, **asked)

    def where(flags: torch.Tensor, **asked) -> torch.Tensor:
        return every(flags)[:, None] if flags.is_cuda else places(flags, **asked)

    torch.Tensor.unique_consecutive = pairs
    torch.Tensor.nonzero = where
    finite = torch.isfinite  # or no training step would be taken

    def asked(tensor: torch.Tensor) -> torch.Tensor:
        return finite(tensor) if tensor.ndim else torch.tensor(finite(tensor).item() or True)

    torch.isfinite = asked
    to_host = Runner._to_host
    rounds = iter(range(1 << 60))

    def some(runner: Runner, packet: torch.Tensor) -> list[list[float]]:
        rows = to_host(runner, packet)
        count = 1 + next(rounds) % 4
        width = runner.length + 1
        return [[min(count, width), 5, *([7] * (len(row) - 2))] for row in rows]

    Runner._to_host = some


def random_pair(
    shape: str, device: torch.device, dtype: torch.dtype, seed: int = 0, head: str = "none"
) -> tuple[Target, DFlash]:
    """Return a target of a shape with random weights and a DFlash drafter of five layers for it,
    with a conditional
    head: a row of the table of heads, or a kind of the Markov head."""
    torch.manual_seed(seed)
    sizes = dict(zip(FIELDS, SHAPES[shape], strict=True))
    config = Qwen3Config(
        **sizes,
        tie_word_embeddings=True,
        eos_token_id=None,
        attn_implementation="sdpa",
        dtype=dtype,
    )
    with torch.device(device):
        target = Target(Qwen3ForCausalLM(config).to(dtype))
        layers = 2 if shape == "tiny" else 5
        chosen = HeadConfig("markov", kind=head) if head in RECURRENT_KINDS else HeadConfig(head)
        options = DrafterConfig(layers=layers, block_size=16, mask_token_id=1, head=chosen)
        drafter = new_drafter(options, target).to(dtype).requires_grad_(False)
    return target, drafter


@contextmanager
def watch() -> Iterator[Seen]:
    """Count what the code inside asks of the device."""
    seen = Seen()
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if nullgpu is not None:
            with nullgpu.record() as record:
                yield seen
            seen.launches, seen.graphs = record.kernels(), record.n("graph")
            seen.plans = record.n("mark", "cudnn plan")
        else:
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
                yield seen
            counts = {event.key: event.count for event in record.key_averages()}
            launchers = (
                "cudaLaunchKernel",
                "cudaLaunchKernelExC",
                "cuLaunchKernel",
                "cuLaunchKernelEx",
            )
            seen.launches = sum(counts.get(name, 0) for name in (*launchers, "cudaMemsetAsync"))
            seen.graphs = counts.get("cudaGraphLaunch", 0)
    torch.cuda.set_sync_debug_mode("default")
    said = {id(warning): str(warning.message) for warning in caught}
    found = [
        one for one in caught if "synchroniz" in said[id(one)] and "prototype" not in said[id(one)]
    ]
    seen.waits = tuple(
        f"{warning.filename.rsplit('/', 1)[-1]}:{warning.lineno}" for warning in found
    )


def milliseconds(function: Callable[[], object], repeats: int = 20) -> float:
    """Return how long a piece of work takes on the device, the median."""
    samples = []
    for _ in range(repeats):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        function()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end))
    return statistics.median(samples)


def bandwidth(device: torch.device, size: int = 2**30) -> float:
    """Return the bytes a second that a copy moves, reading and writing counted."""
    source = torch.zeros(size // 4, device=device)
    sink = torch.empty_like(source)
    return 2 * size / max(milliseconds(lambda: sink.copy_(source)), 1e-6) * 1000


def check(good: bool, what: str, faults: list[str]) -> None:
    """Note a fault and go on: a script ends with all of them."""
    if not good:
        faults.append(what)
        print(f"  FAULT: {what}", flush=True)


def finish(faults: list[str]) -> None:
    """End the script: exit status 1 where something failed."""
    print(f"\n{len(faults)} faults" if faults else "\nall checks passed")
    raise SystemExit(bool(faults))
