"""Hydra's sweeps, a user's own configuration, and runs that are trained again from their own
folder."""

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest

from train.sweep import sweep_table

SHORT = [
    "drafter.layers=1",
    "optim.steps=2",
    "optim.batch_size=2",
    "data.max_examples=20",
    "self_check=false",
    "count_ngrams=false",
]
SHORT += [
    "evaluation.prompts=1",
    "evaluation.external_prompts=0",
    "evaluation.sampling_temperature=null",
    "evaluation.max_new_tokens=4",
]
SHORT += ["checkpoints=1", "evaluation.budgets=[3]"]


@pytest.fixture
def own_files(tmp_path):
    """A user's folder of configuration, in a folder that is no checkout."""
    files = {
        "experiment/short": "# @package _global_\ndefaults:\n  - override /target: small\n  - override /data: tickets\n"
        "name: short\ndrafter:\n  layers: 1\noptim:\n  steps: 2\n",
        "target/small": "path: embedded\n",
        "data/tickets": "source: jsonl\npath: answers.jsonl\n",
    }
    for name, text in files.items():
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / f"{name}.yaml").write_text(text)
    (tmp_path / "answers.jsonl").write_text('{"text": "x = 1"}\n')
    return tmp_path


def run(command, cwd, pythonpath, code=0, **more):
    """What a command prints on stdout."""
    environment = os.environ | {"PYTHONPATH": str(pythonpath), "OMP_NUM_THREADS": "1"} | more
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr[-3000:]
    return done.stdout


def test_a_users_own_configuration_is_found_from_any_folder(repo, own_files):
    """Its experiment, target and data, together and each alone; what is typed counts most."""
    train = [sys.executable, repo / "train" / "main.py", "--config-dir", "mine"]
    text = run([*train, "+experiment=short", "optim.steps=3", "--cfg", "job"], own_files, repo)
    assert re.search(r"^name: short$", text, re.MULTILINE)
    assert "  steps: 3" in text and "  source: jsonl" in text and "  path: answers.jsonl" in text
    text = run(
        [*train, "+model=hf", "target=small", "data=tickets", "--cfg", "job"], own_files, repo
    )
    assert "anchors_per_document: 512" in text and "  path: embedded" in text
    text = run([*train, "+experiment=short", "--help"], own_files, repo)
    assert "experiment: fine-tune, objectives, short" in text
    search = [
        sys.executable,
        repo / "train" / "main.py",
        "hydra.searchpath=[file://mine]",
        "+experiment=short",
    ]
    assert "  path: answers.jsonl" in run([*search, "--cfg", "job"], own_files, repo)
    (own_files / "mine" / "first.yaml").write_text(
        "defaults: [train, {override drafter: dflash}, _self_]\nseed: 5\n"
    )
    text = run([*train, "--config-name", "first", "--cfg", "job"], own_files, repo)
    assert "seed: 5" in text and "  block_size: 16" in text
    assert sorted(path.name for path in own_files.iterdir()) == ["answers.jsonl", "mine"]


@pytest.mark.robustness
def test_a_users_own_configuration_is_found_from_a_pip_installation(repo, own_files, tmp_path):
    installed = tmp_path / "installed"
    archive = subprocess.run(
        ["git", "archive", "HEAD"], cwd=repo, capture_output=True, check=True
    ).stdout
    (tmp_path / "source").mkdir()
    subprocess.run(["tar", "x", "-C", tmp_path / "source"], input=archive, check=True)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    subprocess.run([*pip, "--target", installed, tmp_path / "source"], check=True)
    command = [
        sys.executable,
        "-m",
        "infer",
        "train",
        "--config-dir",
        "mine",
        "+experiment=short",
        "--cfg",
        "job",
    ]
    text = run(command, own_files, installed)
    assert "name: short" in text and "  path: answers.jsonl" in text
    command = [sys.executable, "-m", "infer", "plan", "+model=qwen3-4b", "--cfg", "job"]
    assert "Qwen/Qwen3-4B" in run(command, own_files, installed)


LAUNCHERS = [
    [],
    pytest.param(
        ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=10"],
        marks=pytest.mark.skipif(
            importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher") is None
            if importlib.util.find_spec("hydra_plugins")
            else True,
            reason="hydra-submitit-launcher is not installed: pip install 'blockdraft[sweep]'",
        ),
    ),
]


@pytest.mark.robustness
@pytest.mark.parametrize("launcher", LAUNCHERS, ids=["one after the other", "submitit"])
def test_a_sweep_trains_all_combinations_and_prints_their_table(repo, tmp_path, launcher):
    """Two objectives and two seeds; a second time it finds all four trained."""
    swept = [
        "objective=annealed-kl,lk",
        "seed=0,1",
        "hydra.sweep.subdir=${objective.divergence}-${seed}",
    ]
    command = [sys.executable, repo / "train" / "main.py", "-m", *SHORT, *swept, *launcher]
    for _ in range(2):
        printed = run(command, tmp_path, repo)
        table = printed[printed.index("Runs in runs/sweep") :]
        assert sorted(re.findall(r"^\| (\S+-\d) ", table, re.MULTILINE)) == [
            "kl-0",
            "kl-1",
            "lk-0",
            "lk-1",
        ]
        assert table.rstrip().endswith(sweep_table(tmp_path / "runs" / "sweep").splitlines()[-1])
    for name in ("kl-0", "kl-1", "lk-0", "lk-1"):
        config = json.loads((tmp_path / "runs" / "sweep" / name / "config.json").read_text())
        assert (config["objective"]["divergence"], config["seed"]) == (name[:2], int(name[-1]))
        steps = (tmp_path / "runs" / "sweep" / name / "metrics.jsonl").read_text().splitlines()
        assert len(steps) == 2


@pytest.mark.robustness
def test_a_runs_saved_configuration_trains_it_again(repo, tmp_path):
    train = [sys.executable, repo / "train" / "main.py"]
    run([*train, *SHORT, "name=first", "seed=7"], tmp_path, repo)
    run(
        [*train, "--config-dir", "runs/first", "--config-name", "config", "name=again"],
        tmp_path,
        repo,
    )
    first, again = (
        json.loads((tmp_path / "runs" / name / "config.json").read_text())
        for name in ("first", "again")
    )
    assert again.pop("name") == "again" and first.pop("name") == "first" and first == again
    losses = [
        (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        for name in ("first", "again")
    ]
    assert [[json.loads(line)["loss"] for line in lines] for lines in losses][0] == [
        json.loads(line)["loss"] for line in losses[1]
    ]
    said = subprocess.run(
        [*train, *SHORT, "name=first", "seed=8"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(repo)},
        capture_output=True,
        text=True,
    )
    assert said.returncode == 2 and "another configuration (seed differ)" in said.stderr
    assert json.loads((tmp_path / "runs" / "first" / "config.json").read_text())["seed"] == 7
