"""Shared code of the GPU scripts: random models of real shapes, and counters of device work.

On a GPU torch's profiler counts kernel launches. If a module `nullgpu` can be imported, the device
is a stand-in that counts launches, copies, host waits, attention plans and graphs but computes
nothing: numbers are then meaningless and are not checked.
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
from infer.drafters.build import create_drafter
from infer.drafters.heads.table import MARKOV_HEAD_KINDS
from infer.engine.runner import Runner

try:
    import nullgpu
except ImportError:
    nullgpu = None

# Values of MODEL_SHAPE_FIELDS of the published models, and of a small one.
MODEL_SHAPES = {
    "qwen3-4b": (151936, 2560, 9728, 36, 32, 8, 128),
    "qwen3-8b": (151936, 4096, 12288, 36, 32, 8, 128),
    "tiny": (512, 64, 128, 6, 4, 2, 32),
}
MODEL_SHAPE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


@dataclass
class DeviceWork:
    """Work that a piece of code gave to the device."""

    launches: int = 0  # kernels and device copies outside of graphs
    graphs: int = 0  # CUDA graphs that were replayed
    plans: int = 0  # execution plans of cuDNN's attention
    waits: tuple[str, ...] = ()  # "file:line" of each wait of the host for the device


def require_cuda() -> torch.device:
    """Return the CUDA device; end the script if there is none."""
    if not torch.cuda.is_available():
        raise SystemExit("this script needs a CUDA device")
    if nullgpu is not None:
        patch_null_gpu()
    return torch.device("cuda")


def patch_null_gpu() -> None:
    """Make code run to its end on a device that computes nothing.

    Comparisons pass, operations with data-dependent shapes get a fixed shape, losses are finite,
    and every round commits a few tokens.
    """
    from infer.kernels import validation
    from infer.targets import layers, target

    layers.equals_up_to_rounding = target.equals_up_to_rounding = lambda *compared: True
    validation.KERNEL_CHECKS_BY_OPERATION = dict.fromkeys(
        validation.KERNEL_CHECKS_BY_OPERATION, lambda operation, device: ""
    )
    real_unique_consecutive = torch.Tensor.unique_consecutive
    real_nonzero = torch.Tensor.nonzero
    real_isfinite = torch.isfinite
    real_to_host = Runner._copy_to_host
    round_numbers = iter(range(1 << 60))

    # Tensors on the host are computed as usual.
    def all_indices(tensor: torch.Tensor) -> torch.Tensor:
        return torch.arange(len(tensor), device=tensor.device)

    def fake_unique_consecutive(
        ids: torch.Tensor, **arguments
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if ids.is_cuda:
            return ids, all_indices(ids)
        return real_unique_consecutive(ids, **arguments)

    def fake_nonzero(flags: torch.Tensor, **arguments) -> torch.Tensor:
        if flags.is_cuda:
            return all_indices(flags)[:, None]
        return real_nonzero(flags, **arguments)

    def fake_isfinite(tensor: torch.Tensor) -> torch.Tensor:
        finite = real_isfinite(tensor)
        return finite if tensor.ndim else torch.tensor(finite.item() or True)

    def fake_packet(runner: Runner, packet: torch.Tensor) -> list[list[float]]:
        rows = real_to_host(runner, packet)
        committed = 1 + next(round_numbers) % 4
        width = runner.draft_length + 1
        return [[min(committed, width), 5, *([7] * (len(row) - 2))] for row in rows]

    torch.Tensor.unique_consecutive = fake_unique_consecutive
    torch.Tensor.nonzero = fake_nonzero
    torch.isfinite = fake_isfinite
    Runner._copy_to_host = fake_packet


def build_random_models(
    shape: str, device: torch.device, dtype: torch.dtype, seed: int = 0, head: str = "none"
) -> tuple[Target, DFlash]:
    """Return a target of a shape with random weights, and a DFlash drafter for it.

    shape: one of MODEL_SHAPES; the drafter of "tiny" has two layers, others have five
    head: the drafter's conditional head, a name of the table of heads or a kind of the Markov head
    """
    torch.manual_seed(seed)
    sizes = dict(zip(MODEL_SHAPE_FIELDS, MODEL_SHAPES[shape], strict=True))
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
        if head in MARKOV_HEAD_KINDS:
            head_config = HeadConfig("markov", kind=head)
        else:
            head_config = HeadConfig(head)
        options = DrafterConfig(layers=layers, block_size=16, mask_token_id=1, head=head_config)
        drafter = create_drafter(options, target).to(dtype).requires_grad_(False)
    return target, drafter


@contextmanager
def count_device_work() -> Iterator[DeviceWork]:
    """Count the device work of the code inside the context."""
    work = DeviceWork()
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if nullgpu is not None:
            with nullgpu.record() as record:
                yield work
            work.launches = record.kernels()
            work.graphs = record.n("graph")
            work.plans = record.n("mark", "cudnn plan")
        else:
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
                yield work
            counts = {event.key: event.count for event in record.key_averages()}
            launchers = (
                "cudaLaunchKernel",
                "cudaLaunchKernelExC",
                "cuLaunchKernel",
                "cuLaunchKernelEx",
            )
            work.launches = sum(counts.get(name, 0) for name in (*launchers, "cudaMemsetAsync"))
            work.graphs = counts.get("cudaGraphLaunch", 0)
    torch.cuda.set_sync_debug_mode("default")
    waits = []
    for warning in caught:
        message = str(warning.message)
        if "synchroniz" in message and "prototype" not in message:
            waits.append(f"{warning.filename.rsplit('/', 1)[-1]}:{warning.lineno}")
    work.waits = tuple(waits)


def measure_milliseconds(function: Callable[[], object], repeats: int = 20) -> float:
    """Return the median time of a function on the device, in milliseconds."""
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


def measure_copy_bandwidth(device: torch.device, size: int = 2**30) -> float:
    """Return the bytes per second that a copy reads and writes.

    size: bytes of the copied tensor
    """
    source = torch.zeros(size // 4, device=device)
    destination = torch.empty_like(source)
    milliseconds = measure_milliseconds(lambda: destination.copy_(source))
    return 2 * size / max(milliseconds, 1e-6) * 1000


def record_failure(is_good: bool, description: str, failures: list[str]) -> None:
    """Append `description` to the failures and print it, unless `is_good`."""
    if not is_good:
        failures.append(description)
        print(f"  FAILED: {description}", flush=True)


def exit_with_failures(failures: list[str]) -> None:
    """End the script, with exit code 1 if something failed."""
    print(f"\n{len(failures)} failures" if failures else "\nall checks passed")
    raise SystemExit(bool(failures))
