"""How far what `./launch.sh plan` says of a step's time is from a run's own steps.

    python benchmarks/forecast.py                      # about two minutes
    python benchmarks/forecast.py --shapes default

In one process, by turns: steps of a run on its own rows, from its own target and drafter, and the steps that `plan`
measures, random ones of the same sizes. Beside them what 40 % of the rate of one large matrix product would be, which
is what `plan` says where it cannot measure. Wall and CPU seconds, medians over the steps.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from infer.evaluation.evaluate import describe_device
from infer.targets.loading import load_tokenizer
from infer.utils.entry import composed
from train.config import TrainConfig
from train.forecast import SHARE, random_steps
from train.loop import prefetch_of, prepare_run, train_step
from train.safety.processes import start_processes

SHAPES = {
    "default": [],
    "dart": ["drafter=dart"],
    "long": ["data=stdlib", "data.limit=100", "data.length=1024", "anchors=128", "optim.batch=2"],
    "vocabulary": ["data=stdlib", "data.limit=100", "data.length=512", "anchors=64", "drafter.block_size=16"],
}
SIZES = {"vocab_size": 32_000, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "head_dim": 64}


def foreign_target(folder: Path) -> Path:
    """Write a random target of a larger vocabulary."""
    config = Qwen3Config(**SIZES, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    load_tokenizer().save_pretrained(folder)
    return folder


def spent(step: Callable[[], object]) -> tuple[float, float]:
    """Return the wall and CPU seconds of a step."""
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - wall, time.process_time() - cpu


def compare(name: str, turns: int) -> None:
    """Print the line of a shape."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as held:
        own = [f"target.path={foreign_target(Path(folder) / 'target')}"] if name == "vocabulary" else []
        overrides = [*SHAPES[name], *own, f"runs_dir={folder}", "optim.steps=100000", "ngrams=false"]
        run = prepare_run(composed("train", TrainConfig, overrides), torch.device("cpu"), held)
        prefetch = held.enter_context(closing(prefetch_of(run)))
        planned = held.enter_context(random_steps(run.config, run.target.config, run.device, 10_000))

        def real() -> None:
            train_step(run.engine, run.target, prefetch(), run.config, lambda phase: None)

        seconds: dict[str, list[tuple[float, float]]] = {"run": [], "plan": []}
        for turn in range(turns + 1):
            for way, step in (("run", real), ("plan", planned)):
                found = [spent(step) for _ in range(4)]
                seconds[way] += found if turn else []  # the first ones touch their memory
        line = f"{name:<12}"
        for index in (0, 1):
            ours, plans = (statistics.median(each[index] for each in seconds[way]) for way in ("run", "plan"))
            line += f"{1000 * ours:>10.0f}{1000 * plans:>10.0f}{plans / ours:>8.2f}"
        print(line + f"{1000 * run.seconds / SHARE:>12.0f}{run.seconds / SHARE / ours:>8.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--turns", type=int, default=6)
    args = parser.parse_args()
    device = torch.device("cpu")
    start_processes(device)
    lines = [f"{describe_device(device)}, torch threads {torch.get_num_threads()}; milliseconds a step\n"]
    lines += [f"{'':<12}{'wall, run':>10}{'plan':>10}{'':>8}{'CPU, run':>10}{'plan':>10}{'':>8}{'at 40 %':>12}"]
    print("\n".join(lines))
    for name in args.shapes:
        compare(name, args.turns)


if __name__ == "__main__":
    main()
