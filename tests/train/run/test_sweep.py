"""--multirun: every combination once, one table at the end, wrong ones before any starts."""

import json
import os
import subprocess
import sys

import pytest

from train.run.sweep import combinations, label


def test_all_combinations_in_hydras_syntax():
    runs = combinations(["-m", "a=1,2", "b=x", "+c.d=choice(3,4)", "e=[1,2]"])
    assert runs == [[f"a={a}", "b=x", f"+c.d={d}", "e=[1,2]"] for a in (1, 2) for d in (3, 4)]
    assert label(runs[1], runs) == "a=1,c.d=4"
    assert combinations(["n=range(1,4)"]) == [["n=1"], ["n=2"], ["n=3"]]
    for wrong in (["a=1"], ["a=(1,"], []):
        with pytest.raises(ValueError):
            combinations(wrong)


def multirun(repo, runs, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(repo / "train" / "main.py"), "--multirun", f"runs_dir={runs}", *arguments]
    environment = os.environ | {"PYTHONPATH": str(repo)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def test_a_sweep_ends_in_one_table(repo, tmp_path):
    file = tmp_path / "texts.jsonl"
    rows = [{"text": f"def f{i}(x):\n    return x + {i * i}\n" * (3 + i % 9)} for i in range(100)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = [
        "data=jsonl",
        f"data.path={file}",
        "data.length=64",
        "anchors=4",
        "drafter.layers=1",
        "evaluation.prompts=1",
    ]
    small += ["evaluation.prompt_tokens=8", "evaluation.max_new_tokens=6", "evaluation.budgets=[4]", "optim.steps=3"]
    done = multirun(repo, tmp_path / "runs", *small, "checkpoints=1", "objective.gamma=0.5,0.7")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "runs" / "embedded-dflash"
    table = (folder / "sweep.md").read_text().splitlines()
    assert len(table) == 4 and "τ DDTree 4" in table[0]
    for gamma in ("0.5", "0.7"):
        assert any(f"| objective.gamma={gamma} | 3 |" in line for line in table)
        assert (folder / f"objective.gamma={gamma}" / "checkpoints" / "best").exists()
    assert (folder / "sweep.png").stat().st_size > 1000
    assert table[0] in done.stdout


def test_a_wrong_combination_is_found_before_any_run(repo, tmp_path):
    done = multirun(repo, tmp_path, "objective.gamma=0.5,-1")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "gamma=-1" in done.stderr
    assert not list(tmp_path.iterdir())
