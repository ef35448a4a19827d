"""`--multirun`: one run for every combination of the given values, then one table and picture of all.

    ./launch.sh --multirun objective.gamma=0.5,0.6,0.7 optim.lr=2e-3,4e-3

Each run is what `./launch.sh` does with one combination, with its own processes, in runs/<name>/<combination>. A
stopped sweep goes on with the run that it was in; finished runs are not done again.
"""

import os
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path

from infer.utils.entry import composed, fail
from infer.utils.files import atomic_write
from infer.utils.interrupts import interrupted
from infer.utils.overrides import hydra_overrides, quote
from train.config import TrainConfig

LAUNCH = Path(__file__).resolve().parent.parent.parent / "launch.sh"


def combinations(arguments: list[str]) -> list[list[str]]:
    """Return the overrides of every run, from Hydra's own sweep syntax (`a=1,2`, `choice(...)`, `range(...)`). Raises
    ValueError for one that Hydra cannot read, or if nothing is swept."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    given = [argument for argument in arguments if argument not in ("--multirun", "-m")]
    given = hydra_overrides(TrainConfig, given, sweep=True)
    try:
        parsed = OverridesParser.create().parse_overrides(given)
    except HydraException as error:
        raise ValueError(str(error).strip().splitlines()[0]) from error
    choices = []
    for override in parsed:
        if override.is_sweep_override():
            choices.append([f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()])
        else:
            choices.append([override.input_line])
    if all(len(values) == 1 for values in choices):
        raise ValueError("--multirun: no override has several values, as in objective.gamma=0.5,0.6,0.7")
    return [list(values) for values in product(*choices)]


def label(overrides: list[str], all_runs: list[list[str]]) -> str:
    """Return the name of a run within its sweep: the overrides that are not the same in all runs."""
    own = [override for i, override in enumerate(overrides) if any(run[i] != override for run in all_runs)]
    return ",".join(override.lstrip("+") for override in own).replace("/", "_").replace(" ", "")


def sweep(arguments: list[str]) -> None:
    """Run all combinations. A run that fails is reported and left out of the table; the exit code is then 1."""
    try:
        runs = combinations(arguments)
        checked = [composed("train", TrainConfig, overrides) for overrides in runs]  # all, before any starts
    except ValueError as error:
        fail(str(error))
    configs = {label(one, runs): (one, config) for one, config in zip(runs, checked, strict=True)}
    finished, failed = {}, []
    for number, (name, (overrides, config)) in enumerate(configs.items(), 1):
        folder = Path(config.runs_dir) / config.name
        print(f"\n== {number} of {len(configs)}: {name}", flush=True)
        command = [*run_command(), *overrides, f"runs_dir={folder}", f"name={quote(name)}"]
        with subprocess.Popen(command, env=os.environ | {"LAUNCH_PYTHON": sys.executable}) as started:
            code = await_run(started)
        if code:
            failed.append(name)
        else:
            finished[name] = folder / name
    if finished:
        compare(finished, folder)
    if failed:
        print(f"{len(failed)} of {len(configs)} runs failed: {'; '.join(failed)}", file=sys.stderr)
        raise SystemExit(1)


def run_command() -> list[str]:
    """Return the command that trains, its overrides left out. launch.sh starts a process for each GPU; a package that
    was installed has none."""
    if LAUNCH.is_file():
        return [str(LAUNCH), "train"]
    return [sys.executable, "-P", "-m", "infer.main", "train"]  # -P: the user's folder may have a data/ of its own


def await_run(run: subprocess.Popen) -> int:
    """Return the exit code of a run. After Ctrl-C, end the sweep once the run, which got it too, has saved."""
    asked = []
    before = signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))
    try:
        code = run.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:
        interrupted(KeyboardInterrupt("the run has saved; the same command goes on from there"))
    return code


def compare(runs: dict[str, Path], folder: Path) -> None:
    """Print every run's best checkpoint side by side, with accuracy by position on held-out text and acceptance
    lengths: runs/<name>/sweep.md."""
    from infer.evaluation.ruler import best_of
    from infer.evaluation.tables import markdown, speed
    from train.run.hooks import evaluations_of

    best = {name: best_of(found) for name, run in runs.items() if (found := evaluations_of(run))}
    if not best:
        return
    names = [method.label for method in next(iter(best.values())).drafting]
    shown = range(min(6, *(len(result.accuracy) for result in best.values())))
    heads = [f"α-{i + 1}" for i in shown] + [f"τ {name}" for name in names]  # α: DART table 4's accuracy by position
    rows = []
    for name, result in sorted(best.items(), key=lambda item: -item[1].best_tau):
        found = {method.label: method.tau for method in result.methods}
        cells = [name, str(result.step), *(f"{100 * result.accuracy[i]:.1f}%" for i in shown)]
        cells += [f"{found.get(method, float('nan')):.2f}" for method in names]
        rows.append([*cells, speed(result.fastest), "yes" if result.same_output else "no"])
    table = markdown(["run", "step", *heads, "best speedup", "same output"], rows, last="---")
    atomic_write(folder / "sweep.md", table + "\n")
    print(f"\n{table}\n\ntable    {folder / 'sweep.md'}")
