"""Check on a GPU that rounds of every model of conf/target run as one CUDA graph.

    python benchmarks/gpu_targets.py                       # a minute
    python benchmarks/gpu_targets.py --only qwen3.5-4b,gpt-oss-20b

Each model has its own architecture and tiny sizes, with random weights. A row has, for baseline
decoding and for DDTree with 7 nodes: whether rounds were recorded as CUDA graphs; kernels launched
outside the graph, replayed graphs and host waits of one round; and, on a device that computes,
whether the tokens are those of rounds without a CUDA graph. Fails if a round is not one graph with
one wait.
"""

import argparse
import warnings
from pathlib import Path

import torch
import yaml
from gpu import count_device_work, exit_with_failures, nullgpu, record_failure, require_cuda
from targets import build_tiny_config, build_tiny_model

from infer import Engine, Target
from infer.config import DrafterConfig, EngineConfig, SamplingOptions
from infer.drafters.build import create_drafter

TARGET_CONFIGS = Path(__file__).resolve().parent.parent / "conf" / "target"
METHODS_AND_NODES = [("plain", 1), ("ddtree", 7)]
WARM_UP_ROUNDS = 4


def read_model_types(names: list[str]) -> dict[str, str]:
    """Return the model type of each target configuration that has one, by its name."""
    model_types = {}
    for path in sorted(TARGET_CONFIGS.glob("*.yaml")):
        sizes = (yaml.safe_load(path.read_text()) or {}).get("model_config")
        if sizes and (not names or path.stem in names):
            model_types[path.stem] = sizes["model_type"]
    return model_types


def run_rounds(target, drafter, method: str, nodes: int, compile: bool):
    """Return the tokens after a few rounds, the device work of one more, and the warnings."""
    options = EngineConfig(method, nodes, max_num_seqs=1, compile=compile, ngrams="none")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = Engine(target, None if method == "plain" else drafter, options, 120)
        prompt = [2 + 7 * i % 90 for i in range(12)]
        sequence = engine.submit(prompt, SamplingOptions(max_new_tokens=90, ignore_eos=True))
        for _ in range(WARM_UP_ROUNDS):
            engine.step()
        with count_device_work() as work:
            engine.step()
    messages = [str(each.message) for each in caught]
    reasons = [message for message in messages if "could not be recorded" in message]
    return sequence.ids, work, reasons


def check_target(name: str, model_type: str, device: torch.device, failures: list[str]) -> None:
    """Print the row of a target and record its failures."""
    model = build_tiny_model(build_tiny_config(model_type)).to(device, torch.bfloat16)
    target = Target(model)
    options = DrafterConfig(layers=1, block_size=8, mask_token_id=1)
    drafter = create_drafter(options, target).to(device, torch.bfloat16)
    for method, nodes in METHODS_AND_NODES:
        ids, work, reasons = run_rounds(target, drafter, method, nodes, compile=True)
        same = "-"
        if nullgpu is None:
            eager_ids, _, _ = run_rounds(target, drafter, method, nodes, compile=False)
            count = min(len(ids), len(eager_ids))
            same = "yes" if ids[:count] == eager_ids[:count] else "NO"
        decoder = "transformers" if target.kernel_decoder is None else "ours"
        print(
            f"{name:<34}{decoder:<14}{method:<8}{work.launches:>9}{work.graphs:>8}"
            f"{len(work.waits):>7}{same:>6}  {' '.join(reasons)[:120]}",
            flush=True,
        )
        is_one_graph = work.graphs == 1 and len(work.waits) == 1 and not reasons
        record_failure(is_one_graph, f"{name}, {method}: {work}", failures)
        record_failure(same != "NO", f"{name}, {method}: other tokens", failures)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="names of files in conf/target, separated by commas")
    args = parser.parse_args()
    device = require_cuda()
    failures: list[str] = []
    print(f"{'target':<34}{'layers':<14}{'':<8}{'launches':>9}{'graphs':>8}{'waits':>7}{'same':>6}")
    model_types = read_model_types(args.only.split(",") if args.only else [])
    for name, model_type in model_types.items():
        try:
            check_target(name, model_type, device, failures)
        except Exception as error:  # noqa: BLE001 one target does not end the script
            record_failure(False, f"{name}: {type(error).__name__}: {str(error)[:200]}", failures)
    exit_with_failures(failures)


if __name__ == "__main__":
    main()
