"""Move and change the weights of an int8 target while it decodes, and compare with a new process.

    HF_HUB_OFFLINE=1 python tests/robustness/moved_weights.py --sequences 200 --target embedded

Each sequence of operations is random: `share_memory`, `p.data = p.data.clone()` of all parameters
or of some, `load_state_dict(assign=True)`, `.to(dtype)` and back, partial writes through `.data`,
new Targets of the same model; between them, and in the middle of sequences that are being decoded,
greedy outputs are recorded together with the weights. At the end another process loads the weights
of every check and decodes the same prompt. A partial write through `.data` during a sequence is
guaranteed to take effect in the next sequence only, and checked there. Without --target a small
random Llama is used. Fails (exit code 1) if an output differs.
"""

import argparse
import json
import random
import subprocess
import sys
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from bits import build_small_int8_target
from safetensors.torch import load_file, save_file

from infer import Engine, generate, load_target
from infer.config import EngineConfig, SamplingOptions
from infer.targets.target import Target

NEW_TOKENS = 12
BURST_STEPS = 4  # decode steps before an operation in the middle of a sequence


def share_memory(model: torch.nn.Module, random_numbers: random.Random) -> None:
    model.share_memory()


def clone_all(model: torch.nn.Module, random_numbers: random.Random) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def clone_random_tensors(model: torch.nn.Module, random_numbers: random.Random) -> None:
    parameters = list(model.parameters())
    for parameter in random_numbers.sample(
        parameters, random_numbers.randint(1, len(parameters) // 2)
    ):
        parameter.data = parameter.data.clone()


def assign_state(model: torch.nn.Module, random_numbers: random.Random) -> None:
    """Load a state dict without copying it, after some of its values were changed."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name in random_numbers.sample(sorted(state), random_numbers.randint(0, 4)):
        if state[name].is_floating_point():
            state[name] *= 0.5 + random_numbers.random()
    model.load_state_dict(state, assign=True)


def round_trip(model: torch.nn.Module, random_numbers: random.Random) -> None:
    model.to(random_numbers.choice([torch.float64, torch.bfloat16])).to(torch.float32)


def write_partially(model: torch.nn.Module, random_numbers: random.Random) -> None:
    """Write to a part of a parameter through `.data`, as peft does; PyTorch does not notice it."""
    parameter = random_numbers.choice(list(model.parameters()))
    flat = parameter.data.view(-1)
    start = random_numbers.randrange(len(flat))
    tensors = flat[start : start + random_numbers.randint(1, max(1, len(flat) // 4))]
    if parameter.dtype == torch.int8:
        tensors.copy_(-tensors)
    else:
        tensors.mul_(0.3 + random_numbers.random())


WEIGHT_OPERATIONS = [
    share_memory,
    clone_all,
    clone_random_tensors,
    assign_state,
    round_trip,
    write_partially,
    write_partially,
]


def list_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers; a state dict lacks the rotary frequencies."""
    return {
        name: tensor.data for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }


@dataclass
class Checks:
    """Outputs that another process must repeat, and the weights that they belong to."""

    folder: Path
    cases: list[dict] = field(default_factory=list)

    def add(self, name: str, model: torch.nn.Module, prompt: list[int], output: list[int]) -> None:
        tensors = {key: tensor.clone() for key, tensor in list_tensors(model).items()}
        save_file(tensors, self.folder / f"{len(self.cases)}.safetensors")
        self.cases.append({"name": name, "prompt": prompt, "output": output})


def decode_greedily(target: Target, prompt: list[int], count: int = NEW_TOKENS) -> list[int]:
    return generate(target, None, prompt, method="plain", max_new_tokens=count, ignore_eos=True).ids


def run_sequence(number: int, base: torch.nn.Module, checks: Checks) -> None:
    """Run one random sequence of operations on a copy of the base model."""
    random_numbers = random.Random(number)
    model = deepcopy(base)
    targets = [Target(model)]
    for step in range(random_numbers.randint(2, 6)):
        if random_numbers.random() < 0.3:
            targets = [*targets[-1:], Target(model)]
        operation = random_numbers.choice(WEIGHT_OPERATIONS)
        name = f"sequence {number}, step {step}, {operation.__name__}, {len(targets)} targets"
        prompt = [random_numbers.randrange(300) for _ in range(random_numbers.randint(3, 40))]
        if random_numbers.random() < 0.5:
            engine = Engine(
                random_numbers.choice(targets), None, EngineConfig("plain", prefix_cache_mib=1), 128
            )
            sequence = engine.submit(
                prompt, SamplingOptions(max_new_tokens=NEW_TOKENS, ignore_eos=True)
            )
            for _ in range(random_numbers.randint(1, BURST_STEPS)):
                engine.step()
            before = len(sequence.ids)
            operation(model, random_numbers)
            while engine.has_unfinished_sequences:
                engine.step()
            if operation is not write_partially:
                checks.add(
                    f"{name}, midway", model, prompt + sequence.ids[:before], sequence.ids[before:]
                )
        else:
            operation(model, random_numbers)
        if random_numbers.random() < 0.8:
            checks.add(name, model, prompt, decode_greedily(random_numbers.choice(targets), prompt))


def verify(folder: Path, base: torch.nn.Module) -> int:
    """Decode every case with newly loaded weights; print and count the outputs that differ."""
    faults = 0
    for number, case in enumerate(json.loads((folder / "cases.json").read_text())):
        model = deepcopy(base)
        saved = load_file(folder / f"{number}.safetensors")
        for name, tensor in list_tensors(model).items():
            tensor.copy_(saved[name])
        expected = decode_greedily(Target(model), case["prompt"], len(case["output"]))
        if expected != case["output"]:
            faults += 1
            print(f"{case['name']}: {case['output']}, expected {expected}")
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", help="a model's folder or name")
    parser.add_argument("--sequences", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="number of the first sequence")
    parser.add_argument("--verify", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    base = (
        load_target(args.target, quantization="int8") if args.target else build_small_int8_target()
    ).model
    if args.verify:
        raise SystemExit(1 if verify(args.verify, base) else 0)
    faults = 0
    for first in range(args.first, args.first + args.sequences, 20):
        with TemporaryDirectory() as folder:
            checks = Checks(Path(folder))
            for number in range(first, min(first + 20, args.first + args.sequences)):
                run_sequence(number, base, checks)
            (checks.folder / "cases.json").write_text(json.dumps(checks.cases))
            named = ["--target", args.target] if args.target else []
            done = subprocess.run(
                [sys.executable, __file__, *named, "--verify", folder],
                capture_output=True,
                text=True,
            )
            faults += len(done.stdout.splitlines()) if done.returncode == 1 else 0
            assert done.returncode in (0, 1) and (done.returncode == 0 or done.stdout), done.stderr
            print(
                f"{number + 1 - args.first} sequences, {len(checks.cases)} outputs checked in the "
                "last 20",
                flush=True,
            )
            print(done.stdout, end="", flush=True)
    print(f"{faults} faults")
    raise SystemExit(1 if faults else 0)


if __name__ == "__main__":
    main()
