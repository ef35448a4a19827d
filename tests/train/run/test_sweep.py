"""--multirun: every combination once, one table at the end, wrong ones before any starts."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest

import train.run.sweep
from train.run.sweep import combinations, label, sweep


def test_all_combinations_in_hydras_syntax():
    runs = combinations(["-m", "a=1,2", "b=x", "+c.d=choice(3,4)", "e=[1,2]"])
    assert runs == [[f"a={a}", "b=x", f"+c.d={d}", "e=[1,2]"] for a in (1, 2) for d in (3, 4)]
    assert label(runs[1], runs) == "a=1,c.d=4"
    assert combinations(["n=range(1,4)"]) == [["n=1"], ["n=2"], ["n=3"]]
    for wrong in (["a=1"], ["a=(1,"], []):
        with pytest.raises(ValueError):
            combinations(wrong)


class Started:
    """What `sweep` starts, as `subprocess.Popen`: the command of launch.sh, without it and already imported."""

    def __init__(self, start_command, command: list[str], env: dict[str, str]) -> None:
        assert command[:2] == [str(train.run.sweep.LAUNCH), "train"] and env["LAUNCH_PYTHON"] == sys.executable
        self.command = start_command("train/main.py", command[2:])

    def __enter__(self) -> "Started":
        return self

    def __exit__(self, *_) -> None:
        self.command.finish()

    def wait(self) -> int:
        return self.command.wait()


def test_a_sweep_ends_in_one_table(start_command, shallow, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train.run.sweep, "subprocess", SimpleNamespace(Popen=partial(Started, start_command)))
    file = tmp_path / "texts.jsonl"
    rows = [{"text": f"def f{i}(x):\n    return x + {i * i}\n" * (3 + i % 9)} for i in range(100)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = [
        f"target.path={shallow}",
        "data=jsonl",
        f"data.path={file}",
        "data.length=64",
        "anchors=4",
        "drafter.layers=1",
        "evaluation.prompts=1",
    ]
    small += [
        "evaluation.prompt_tokens=8",
        "evaluation.max_new_tokens=6",
        "evaluation.budgets=[4]",
        "evaluation.outside=0",
        "evaluation.sampled=null",
        "optim.batch=2",
        "optim.steps=3",
    ]
    sweep(["--multirun", f"runs_dir={tmp_path / 'runs'}", *small, "checkpoints=1", "objective.gamma=0.5,0.7"])
    folder = tmp_path / "runs" / "embedded-dflash"
    table = (folder / "sweep.md").read_text().splitlines()
    assert len(table) == 4 and "τ DDTree + n-grams 4" in table[0]
    for gamma in ("0.5", "0.7"):
        assert any(f"| objective.gamma={gamma} | 3 |" in line for line in table)
        assert (folder / f"objective.gamma={gamma}" / "checkpoints" / "best").exists()
    assert table[0] in capsys.readouterr().out


def test_ctrl_c_ends_the_sweep_once_the_run_has_saved(monkeypatch, tmp_path):
    """The run gets the signal, too, and takes its time; no other is started."""
    started = []

    class Interrupted:
        def __init__(self, command: list[str], env: dict[str, str]) -> None:
            started.append(command)

        def __enter__(self) -> "Interrupted":
            return self

        def __exit__(self, *_) -> None:
            pass

        def wait(self) -> int:
            os.kill(os.getpid(), signal.SIGINT)
            started.append("saved")
            return 130

    def interrupted(error: KeyboardInterrupt) -> None:
        assert "the same command goes on" in str(error)
        raise SystemExit(130)

    monkeypatch.setattr(train.run.sweep, "subprocess", SimpleNamespace(Popen=Interrupted))
    monkeypatch.setattr(train.run.sweep, "interrupted", interrupted)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # an earlier test may have left its own
    with pytest.raises(SystemExit, match="130"):
        sweep(["--multirun", f"runs_dir={tmp_path}", "objective.gamma=0.5,0.7"])
    assert len(started) == 2 and started[1] == "saved" and "objective.gamma=0.5" in started[0]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_wrong_combination_is_found_before_any_run(start_command, tmp_path):
    command = ["--multirun", f"runs_dir={tmp_path}", "objective.gamma=0.5,-1"]
    said = start_command("train/main.py", command).finish(code=2)
    assert said.count("\n") == 1 and "gamma=-1" in said
    assert not list(tmp_path.iterdir())


def test_a_package_without_launch_sh_starts_its_own_command(repo, tmp_path, monkeypatch):
    """As from a wheel, in a folder with a data/ of its own, which is not imported."""
    assert train.run.sweep.run_command() == [str(train.run.sweep.LAUNCH), "train"]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "__init__.py").write_text("raise RuntimeError")
    monkeypatch.setattr(train.run.sweep, "LAUNCH", tmp_path / "launch.sh")
    command = [*train.run.sweep.run_command(), "optim.steps=-1"]
    environment = os.environ | {"PYTHONPATH": str(repo)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "optim.steps=-1" in done.stderr
