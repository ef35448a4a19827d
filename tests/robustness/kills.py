# ruff: noqa: E402
"""How often can a run be killed, at any moment, and go on as if nothing had happened?

    python tests/robustness/kills.py --kills 100 [--chats] [--saving]

A small run on the embedded target (24 steps, a checkpoint with its evaluation every 12, the
training state saved after every step) is killed with `kill -9` at random moments, begun again,
killed again, until it is finished; then the next one, until there were so many kills. A fifth of
the moments lie anywhere in an attempt, its start included, two fifths after its first step, two
fifths within the writing of a state. After each run every loss, every checkpoint's weights and
moments and every evaluated text must be those of a run that was never killed, bit by bit. One
process is forked for each attempt, from one that has imported everything, so that most of its life
is training.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # or this file's folder would be searched first
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

import train.loop as loop
from infer.evaluation.evaluate import describe_device
from infer.evaluation.results import Evaluation, read_result
from infer.utils.hydra_app import compose_options as composed
from train.config import TrainConfig
from train.run.checkpoints import checkpoints

STEPS = 24
# a small run that is compared bit by bit with another: precision=auto is timed, and may differ
# between them
SMALL = [
    "data.length=64",
    "anchors_per_sequence=4",
    "optim.batch_size=2",
    "optim.precision=float32",
    "drafter.layers=1",
]
SMALL += ["evaluation.prompts=1", "evaluation.max_prompt_tokens=8", "evaluation.max_new_tokens=6"]
SMALL += ["evaluation.budgets=[4]", f"optim.steps={STEPS}", "checkpoints=2"]
OPTIONS = [*SMALL, "data=jsonl", "save_interval_minutes=1e-6"]
MOMENTS = ("anywhere", "after a step", "after a step", "saving", "saving")
KEYS = ("step", "loss", "prefix", "agreement", "lr", "grad_norm")


def begin(config: TrainConfig, output: Path) -> int:
    """Forks a process that trains; its number."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with output.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        loop.train(config)
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)


def chat(number: int) -> dict:
    """Return a conversation of one to three turns; some of its answers were cut by a limit."""
    turns = []
    for turn in range(1 + number % 3):
        turns.append({"role": "user", "content": f"What is {number} + {turn}?"})
        answer = {"role": "assistant", "content": f"It is {number + turn}.\n" * (1 + number % 7)}
        turns.append(
            answer | ({"finish": "length"} if number % 11 == 0 and turn == number % 3 else {})
        )
    return {"messages": turns}


def left_by(run: Path) -> dict:
    """What must be the same: losses, weights, moments, evaluated texts."""
    log = run / "metrics.jsonl"
    files = [
        file
        for folder in checkpoints(run)
        for file in sorted(folder.rglob("*"))
        if file.suffix == ".safetensors"
    ]
    evaluations = {}
    for folder in checkpoints(run):
        found = read_result(folder / "evaluation" / "evaluation.json", Evaluation)
        methods = [(m.label, m.tau, m.rounds, m.histogram, m.identical) for m in found.methods]
        evaluations[folder.name] = (methods, found.samples)
    return {
        "losses": [
            [json.loads(line)[key] for key in KEYS] for line in log.read_text().splitlines()
        ],
        "files": {str(file.relative_to(run)): file.read_bytes() for file in files},
        "evaluations": evaluations,
        "best": os.readlink(run / "checkpoints" / "best"),
        "folders": sorted(path.name for path in (run / "checkpoints").iterdir()),
    }


def count_steps(run: Path) -> int:
    log = run / "metrics.jsonl"
    return len(log.read_text().splitlines()) if log.exists() else 0


def is_saving(run: Path) -> bool:
    folder = run / "checkpoints"
    return bool(list(folder.glob(".step-*")) or list(folder.glob(".rolling-*")))


def ended(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def wait(
    child: int, run: Path, before: int, chance: random.Random, length: float, kinds: tuple[str, ...]
) -> None:
    """Until a random moment of an attempt that begins after `before` steps, or its end; one of
    `kinds` of moments."""
    kind = chance.choice(kinds)
    step = 0 if kind == "anywhere" else before + chance.randint(1, max(1, STEPS - before))
    while not ended(child) and count_steps(run) < step:
        time.sleep(0.002)
    while kind == "saving" and not ended(child) and not is_saving(run):
        time.sleep(0.0005)
    until = time.monotonic() + chance.uniform(
        0, {"anywhere": length, "saving": 0.02}.get(kind, length / 10)
    )
    while not ended(child) and time.monotonic() < until:
        time.sleep(0.002)


def moment(run: Path, lines_before: int) -> str:
    """In which part of a run it was killed, from what lies there."""
    if is_saving(run):
        return "while saving"
    if count_steps(run) <= lines_before:
        return "while starting"
    if any(not (path / "evaluation" / "evaluation.json").exists() for path in checkpoints(run)):
        return "while evaluating"
    return "in or between steps"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=1e9, help="kill no more after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--saving", action="store_true", help="kill only while a state is written")
    parser.add_argument(
        "--chats", action="store_true", help="learn from conversations, up to 512 blocks each"
    )
    args = parser.parse_args()
    chance = random.Random(args.seed)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_DATASETS_CACHE"] = f"{folder}/cache"
        runs, output, data = (Path(folder) / name for name in ("runs", "output.txt", "rows.jsonl"))
        rows = [
            chat(i) if args.chats else {"text": f"def f{i}(x):\n    return x + {i * i}\n" * 9}
            for i in range(200)
        ]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))

        def options(name: str) -> TrainConfig:
            return composed(
                "train",
                TrainConfig,
                [*OPTIONS, f"name={name}", f"runs_dir={runs}", f"data.path={data}"],
            )

        for name in ("first", "whole"):  # the first one also packs the rows
            began = time.monotonic()
            child = begin(options(name), output)
            if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
                raise SystemExit(output.read_text())
            length = time.monotonic() - began
        whole = left_by(runs / "whole")
        assert left_by(runs / "first") == whole, "two runs that nobody killed differ"
        kills = 0
        finished = 0
        where = Counter()
        until = time.monotonic() + 60 * args.minutes
        while (killing := kills < args.kills and time.monotonic() < until) or (
            runs / "killed"
        ).exists():
            run = runs / "killed"
            before = count_steps(run)
            child = begin(options("killed"), output)
            if killing:
                wait(child, run, before, chance, length, ("saving",) if args.saving else MOMENTS)
                os.kill(child, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if status == -signal.SIGKILL:
                kills += 1
                where[moment(run, before)] += 1
                print(f"{kills} kills, {finished} runs finished", file=sys.stderr, flush=True)
            elif status:
                raise SystemExit(
                    f"an attempt ended with {status} after {kills} kills:\n{output.read_text()[-4000:]}"
                )
            else:
                found = left_by(run)
                wrong = [name for name in whole if found[name] != whole[name]]
                if wrong:
                    raise SystemExit(
                        f"after {kills} kills a finished run has other {', '.join(wrong)}"
                    )
                finished += 1
                shutil.rmtree(run)
    print(
        f"{describe_device(torch.device('cpu'))}, {os.cpu_count()} cores; a run takes {length:.1f} s unkilled"
    )
    print(
        f"{kills} kills with SIGKILL: "
        + ", ".join(f"{count} {name}" for name, count in where.most_common())
    )
    print(f"every one of {kills} next starts went on; {finished} runs were finished and compared:")
    print(
        "losses, weights, moments and evaluated texts equal those of a run that nobody killed, bit by bit"
    )


if __name__ == "__main__":
    main()
