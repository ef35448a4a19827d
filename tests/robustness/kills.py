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

KILLS_REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[0] = str(KILLS_REPOSITORY)  # or this file's folder would be searched first
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

import train.loop as loop
from infer.evaluation.evaluate import describe_device
from infer.evaluation.results import Evaluation, read_result
from infer.utils.hydra_app import compose_checked_options as composed
from train.config import TrainConfig
from train.run.checkpoints import list_checkpoints

KILLED_RUN_STEPS = 24
# a small run that is compared bit by bit with another: precision=auto is timed, and may differ
# between them
COMPARED_RUN_OPTIONS = [
    "data.length=64",
    "anchors_per_sequence=4",
    "optim.batch_size=2",
    "optim.precision=float32",
    "drafter.layers=1",
]
COMPARED_RUN_OPTIONS += [
    "evaluation.prompts=1",
    "evaluation.max_prompt_tokens=8",
    "evaluation.max_new_tokens=6",
]
COMPARED_RUN_OPTIONS += [
    "evaluation.budgets=[4]",
    f"optim.steps={KILLED_RUN_STEPS}",
    "checkpoints=2",
]
KILLED_RUN_OPTIONS = [*COMPARED_RUN_OPTIONS, "data=jsonl", "save_interval_minutes=1e-6"]
KILL_MOMENTS = ("anywhere", "after a step", "after a step", "saving", "saving")
KILLED_RUN_METRICS = ("step", "loss", "prefix", "agreement", "lr", "grad_norm")


def fork_run(config: TrainConfig, output: Path) -> int:
    """Fork a process that trains; return its id."""
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


def build_chat(number: int) -> dict:
    """Return a conversation of one to three turns; some of its answers were cut by a limit."""
    turns = []
    for turn in range(1 + number % 3):
        turns.append({"role": "user", "content": f"What is {number} + {turn}?"})
        answer = {"role": "assistant", "content": f"It is {number + turn}.\n" * (1 + number % 7)}
        turns.append(
            answer | ({"finish": "length"} if number % 11 == 0 and turn == number % 3 else {})
        )
    return {"messages": turns}


def read_run_results(run: Path) -> dict:
    """Return the results that must be equal: losses, weights, moments, evaluations."""
    log = run / "metrics.jsonl"
    files = [
        file
        for folder in list_checkpoints(run)
        for file in sorted(folder.rglob("*"))
        if file.suffix == ".safetensors"
    ]
    evaluations = {}
    for folder in list_checkpoints(run):
        results = read_result(folder / "evaluation" / "evaluation.json", Evaluation)
        methods = [(m.label, m.tau, m.rounds, m.histogram, m.identical) for m in results.methods]
        evaluations[folder.name] = (methods, results.samples)
    return {
        "losses": [
            [json.loads(line)[key] for key in KILLED_RUN_METRICS]
            for line in log.read_text().splitlines()
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


def has_ended(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def wait_for_moment(
    child: int,
    run: Path,
    before: int,
    random_numbers: random.Random,
    length: float,
    kinds: tuple[str, ...],
) -> None:
    """Wait until a random moment of an attempt, or its end.

    before: steps that were done before the attempt
    length: seconds of a whole run
    kinds: kinds of moments, of KILL_MOMENTS
    """
    kind = random_numbers.choice(kinds)
    step = (
        0
        if kind == "anywhere"
        else before + random_numbers.randint(1, max(1, KILLED_RUN_STEPS - before))
    )
    while not has_ended(child) and count_steps(run) < step:
        time.sleep(0.002)
    while kind == "saving" and not has_ended(child) and not is_saving(run):
        time.sleep(0.0005)
    deadline = time.monotonic() + random_numbers.uniform(
        0, {"anywhere": length, "saving": 0.02}.get(kind, length / 10)
    )
    while not has_ended(child) and time.monotonic() < deadline:
        time.sleep(0.002)


def describe_moment(run: Path, lines_before: int) -> str:
    """Return in which phase a run was killed, judged by its files."""
    if is_saving(run):
        return "while saving"
    if count_steps(run) <= lines_before:
        return "while starting"
    if any(
        not (path / "evaluation" / "evaluation.json").exists() for path in list_checkpoints(run)
    ):
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
    random_numbers = random.Random(args.seed)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_DATASETS_CACHE"] = f"{folder}/cache"
        runs, output, data = (Path(folder) / name for name in ("runs", "output.txt", "rows.jsonl"))
        rows = [
            build_chat(i) if args.chats else {"text": f"def f{i}(x):\n    return x + {i * i}\n" * 9}
            for i in range(200)
        ]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))

        def options(name: str) -> TrainConfig:
            return composed(
                "train",
                TrainConfig,
                [*KILLED_RUN_OPTIONS, f"name={name}", f"runs_dir={runs}", f"data.path={data}"],
            )

        for name in ("first", "whole"):  # the first one also packs the rows
            start_time = time.monotonic()
            child = fork_run(options(name), output)
            if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
                raise SystemExit(output.read_text())
            length = time.monotonic() - start_time
        reference = read_run_results(runs / "whole")
        assert read_run_results(runs / "first") == reference, "two runs that nobody killed differ"
        kills = 0
        finished = 0
        kills_by_moment = Counter()
        deadline = time.monotonic() + 60 * args.minutes
        while (killing := kills < args.kills and time.monotonic() < deadline) or (
            runs / "killed"
        ).exists():
            run = runs / "killed"
            before = count_steps(run)
            child = fork_run(options("killed"), output)
            if killing:
                wait_for_moment(
                    child,
                    run,
                    before,
                    random_numbers,
                    length,
                    ("saving",) if args.saving else KILL_MOMENTS,
                )
                os.kill(child, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if status == -signal.SIGKILL:
                kills += 1
                kills_by_moment[describe_moment(run, before)] += 1
                print(f"{kills} kills, {finished} runs finished", file=sys.stderr, flush=True)
            elif status:
                raise SystemExit(
                    f"an attempt ended with {status} after {kills} "
                    f"kills:\n{output.read_text()[-4000:]}"
                )
            else:
                results = read_run_results(run)
                wrong = [name for name in reference if results[name] != reference[name]]
                if wrong:
                    raise SystemExit(
                        f"after {kills} kills a finished run has other {', '.join(wrong)}"
                    )
                finished += 1
                shutil.rmtree(run)
    print(
        f"{describe_device(torch.device('cpu'))}, {os.cpu_count()} cores; a run takes {length:.1f} "
        "s unkilled"
    )
    print(
        f"{kills} kills with SIGKILL: "
        + ", ".join(f"{count} {name}" for name, count in kills_by_moment.most_common())
    )
    print(f"every one of {kills} next starts went on; {finished} runs were finished and compared:")
    print(
        "losses, weights, moments and evaluated texts equal those of a run that nobody killed, bit "
        "by bit"
    )


if __name__ == "__main__":
    main()
