"""Hydra: sweeps, a user's configuration files, and a run repeated from its saved configuration."""

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest

from train.sweep import format_sweep_table

SHORT_RUN_OPTIONS = [
    "drafter.layers=1",
    "optim.steps=2",
    "optim.batch_size=2",
    "data.max_examples=20",
    "self_check=false",
    "count_ngrams=false",
]
SHORT_RUN_OPTIONS += [
    "evaluation.prompts=1",
    "evaluation.external_prompts=0",
    "evaluation.sampling_temperature=null",
    "evaluation.max_new_tokens=4",
]
SHORT_RUN_OPTIONS += ["checkpoints=1", "evaluation.budgets=[3]"]


@pytest.fixture
def user_folder(tmp_path):
    """A folder outside the repository with a user's configuration files."""
    files = {
        "experiment/short": "# @package _global_\ndefaults:\n"
        "  - override /target: small\n  - override /data: tickets\n"
        "name: short\ndrafter:\n  layers: 1\noptim:\n  steps: 2\n",
        "target/small": "path: embedded\n",
        "data/tickets": "source: jsonl\npath: answers.jsonl\n",
    }
    for name, text in files.items():
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / f"{name}.yaml").write_text(text)
    (tmp_path / "answers.jsonl").write_text('{"text": "x = 1"}\n')
    return tmp_path


def run(command, cwd, pythonpath) -> str:
    """Run a command and return its standard output."""
    environment = os.environ | {"PYTHONPATH": str(pythonpath), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout


def test_a_users_configuration_is_found_from_any_folder(repo, user_folder):
    """Experiment, target and data, together and separately. The command line overrides them."""
    train = [sys.executable, repo / "train" / "main.py", "--config-dir", "mine"]
    text = run([*train, "+experiment=short", "optim.steps=3", "--cfg", "job"], user_folder, repo)
    assert re.search(r"^name: short$", text, re.MULTILINE)
    assert "  steps: 3" in text and "  source: jsonl" in text and "  path: answers.jsonl" in text
    text = run(
        [*train, "+model=hf", "target=small", "data=tickets", "--cfg", "job"], user_folder, repo
    )
    assert "anchors_per_document: 512" in text and "  path: embedded" in text
    text = run([*train, "+experiment=short", "--help"], user_folder, repo)
    assert "experiment: fine-tune, objectives, short" in text
    search = [
        sys.executable,
        repo / "train" / "main.py",
        "hydra.searchpath=[file://mine]",
        "+experiment=short",
    ]
    assert "  path: answers.jsonl" in run([*search, "--cfg", "job"], user_folder, repo)
    (user_folder / "mine" / "first.yaml").write_text(
        "defaults: [train, {override drafter: dflash}, _self_]\nseed: 5\n"
    )
    text = run([*train, "--config-name", "first", "--cfg", "job"], user_folder, repo)
    assert "seed: 5" in text and "  block_size: 16" in text
    assert sorted(path.name for path in user_folder.iterdir()) == ["answers.jsonl", "mine"]


@pytest.mark.robustness
def test_a_users_configuration_is_found_from_a_pip_installation(repo, user_folder, tmp_path):
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
    text = run(command, user_folder, installed)
    assert "name: short" in text and "  path: answers.jsonl" in text
    command = [sys.executable, "-m", "infer", "plan", "+model=qwen3-4b", "--cfg", "job"]
    assert "Qwen/Qwen3-4B" in run(command, user_folder, installed)


SWEEP_LAUNCHERS = [
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
@pytest.mark.parametrize("launcher", SWEEP_LAUNCHERS, ids=["one after the other", "submitit"])
def test_a_sweep_trains_all_combinations_and_prints_their_table(repo, tmp_path, launcher):
    """Two objectives and two seeds. The second time, all four runs are finished already."""
    sweep_options = [
        "objective=annealed-kl,lk",
        "seed=0,1",
        "hydra.sweep.subdir=${objective.divergence}-${seed}",
    ]
    command = [
        sys.executable,
        repo / "train" / "main.py",
        "-m",
        *SHORT_RUN_OPTIONS,
        *sweep_options,
        *launcher,
    ]
    for _ in range(2):
        printed = run(command, tmp_path, repo)
        table = printed[printed.index("The runs in runs/sweep") :]
        names = sorted(re.findall(r"^\| (\S+-\d) ", table, re.MULTILINE))
        assert names == ["kl-0", "kl-1", "lk-0", "lk-1"]
        last_line = format_sweep_table(tmp_path / "runs" / "sweep").splitlines()[-1]
        assert table.rstrip().endswith(last_line)
    for name in ("kl-0", "kl-1", "lk-0", "lk-1"):
        config = json.loads((tmp_path / "runs" / "sweep" / name / "config.json").read_text())
        assert (config["objective"]["divergence"], config["seed"]) == (name[:2], int(name[-1]))
        steps = (tmp_path / "runs" / "sweep" / name / "metrics.jsonl").read_text().splitlines()
        assert len(steps) == 2


@pytest.mark.robustness
def test_a_run_is_repeated_from_its_saved_configuration(repo, tmp_path):
    train = [sys.executable, repo / "train" / "main.py"]
    run([*train, *SHORT_RUN_OPTIONS, "name=first", "seed=7"], tmp_path, repo)
    run(
        [*train, "--config-dir", "runs/first", "--config-name", "config", "name=repeated"],
        tmp_path,
        repo,
    )

    def read_run(name: str) -> tuple[dict, list[float]]:
        config = json.loads((tmp_path / "runs" / name / "config.json").read_text())
        assert config.pop("name") == name
        lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        return config, [json.loads(line)["loss"] for line in lines]

    assert read_run("first") == read_run("repeated")
    process = subprocess.run(
        [*train, *SHORT_RUN_OPTIONS, "name=first", "seed=8"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(repo)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 2
    assert "another configuration (seed differ)" in process.stderr
    assert json.loads((tmp_path / "runs" / "first" / "config.json").read_text())["seed"] == 7
