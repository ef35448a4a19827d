"""Weights & Biases and TensorBoard: what a run leaves there, and that nothing there stops a run."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import train.run.tracking as tracking
from infer.evaluation.results import Evaluation, MethodResult, PromptResult, write_result
from train.config import TrackingConfig, TrainConfig
from train.run.hooks import finish_report
from train.run.tracking import Tracker

METHODS = [
    {"name": "plain", "budget": 0, "tau": 1.0, "speedup": 1.0, "rounds": 9, "histogram": [9]},
    {"name": "chain", "budget": 3, "tau": 1.8, "speedup": 1.2, "rounds": 5, "histogram": [1, 4]},
    {"name": "ddtree", "budget": 16, "tau": 2.5, "speedup": 1.5, "rounds": 4, "histogram": [0, 4]},
]
REST = {"tau_prompt_mean": 1.0, "tokens": 10, "seconds": 0.1, "tokens_per_second": 100.0, "stage_seconds": {}}
FIGURES = {
    "tau/plain": 1.0,
    "speedup/plain": 1.0,
    "tau/chain3": 1.8,
    "speedup/chain3": 1.2,
    "tau/ddtree16": 2.5,
    "speedup/ddtree16": 1.5,
}


def evaluation_of(step: int, checkpoint: Path, more: float = 0.0) -> Evaluation:
    """An evaluation with METHODS, the acceptance length of drafts larger by `more`."""
    prompts = [PromptResult(i, "any", i, 10, 3 if more else 4, [0.1], 0) for i in range(8)]
    methods = [
        MethodResult(
            **method | REST | {"tau": method["tau"] + more * bool(method["budget"])}, identical=True, prompts=prompts
        )
        for method in METHODS
    ]
    return Evaluation(
        step=step,
        checkpoint=str(checkpoint),
        methods=methods,
        block_size=4,
        samples=[],
        accuracy=[],
        target="t",
        device="CPU",
        dtype="float32",
        prompts=2,
        rows=1,
        prompt_tokens=8,
        max_new_tokens=9,
        temperature=0.0,
    )


class Run:
    """A run that remembers its artifacts; the artifacts are wandb's own."""

    def __init__(self) -> None:
        self.artifacts = []

    def log_artifact(self, artifact, aliases) -> None:
        self.artifacts.append((artifact, aliases))

    def log(self, *arguments, **options) -> None:
        pass

    def finish(self) -> None:
        pass


@pytest.fixture
def finished(tmp_path):
    """A run's folder with two evaluated checkpoints, the first of which is the better one."""
    for step, more in ((3, 0.5), (6, 0.0)):
        folder = tmp_path / "run" / "checkpoints" / f"step-{step:08d}"
        for name in ("drafter", "evaluation", "state"):
            (folder / name).mkdir(parents=True)
        (folder / "drafter" / "config.json").write_text(json.dumps({"step": step}))
        (folder / "drafter" / "model.safetensors").write_bytes(b"weights")
        (folder / "state" / "state.safetensors").write_bytes(b"not for others")
        write_result(folder / "evaluation" / "evaluation.json", evaluation_of(step, folder, more))
    return tmp_path / "run"


@pytest.fixture
def tracker(monkeypatch):
    """(run, artifacts) -> a tracker of that run."""

    def make(run: object, artifacts: bool) -> Tracker:
        monkeypatch.setattr(tracking, "start_wandb", lambda config, folder: run)
        config = TrainConfig(name="mine", tracking=TrackingConfig(wandb=True, artifacts=artifacts))
        return Tracker(config, Path("nowhere"), enabled=True)

    return make


def finish(run: Path, tracker: Tracker) -> None:
    """The end of a run."""
    finish_report(run, tracker)
    tracker.close()


def test_the_best_drafter_goes_there_with_its_numbers(finished, tracker):
    run = Run()
    finish(finished, tracker(run, artifacts=True))
    ((artifact, aliases),) = run.artifacts
    assert (artifact.name.split(":")[0], artifact.type, aliases) == ("mine", "model", ["best"])
    better = {key: value + 0.5 * key.startswith(("tau/chain", "tau/dd")) for key, value in FIGURES.items()}
    assert artifact.metadata == {"step": 3} | better
    assert sorted(artifact.manifest.entries) == ["config.json", "model.safetensors"]
    local = artifact.manifest.entries["config.json"].local_path
    assert json.loads(Path(local).read_text()) == {"step": 3}


def test_nothing_goes_there_unasked(finished, tracker):
    run = Run()
    finish(finished, tracker(run, artifacts=False))
    assert run.artifacts == []
    with pytest.raises(ValueError, match=r"tracking\.artifacts=true needs tracking=wandb"):
        TrainConfig(tracking=TrackingConfig(artifacts=True)).check()


def test_a_failure_there_stops_nothing(finished, tracker, capsys):
    class Broken(Run):
        def log_artifact(self, artifact, aliases):
            raise OSError("disk full")

    broken = tracker(Broken(), artifacts=True)
    finish(finished, broken)
    assert not broken.thread.is_alive()
    output = capsys.readouterr().out
    assert "wandb stopped working and is left out from here on: disk full" in output
    assert "report.html" in output  # the run ends as it would have without
    broken.artifact(finished / "gone", evaluation_of(1, finished))
    broken.close()


def test_offline_an_artifact_is_kept_for_later(tmp_path, start_command):
    """wandb itself, without a network; in a process of its own: a second run in one process may write nothing."""
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "model.safetensors").write_bytes(b"weights")
    write_result(tmp_path / "evaluation.json", evaluation_of(3, tmp_path))
    (tmp_path / "script.py").write_text(f"""
from pathlib import Path
from infer.evaluation.report import write_report
from infer.evaluation.results import Evaluation, read_result
from train.config import TrackingConfig, TrainConfig
from train.run.tracking import Tracker
config = TrainConfig(name="mine", tracking=TrackingConfig(wandb=True, artifacts=True))
tracker = Tracker(config, Path({str(tmp_path)!r}), enabled=True)
evaluation = read_result(Path({str(tmp_path / "evaluation.json")!r}), Evaluation)
tracker.artifact(Path({str(tmp_path / "drafter")!r}), evaluation)
tracker.report(write_report(Path({str(tmp_path / "report")!r}), [evaluation]).parent, evaluation)
tracker.close()
""")
    places = {"WANDB_CACHE_DIR": str(tmp_path / "cache"), "WANDB_DATA_DIR": str(tmp_path / "data")}
    printed = start_command(str(tmp_path / "script.py"), [], **places, WANDB_MODE="offline").finish()
    assert "wandb stopped working" not in printed
    (record,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert b"model.safetensors" in record.read_bytes()
    assert f"to send it: wandb sync {record.parent}\n" in printed
    assert record.parent.name.endswith((tmp_path / "wandb_id").read_text())
    media = {path.parent.name: path for path in record.parent.glob("files/media/*/*")}
    assert set(media) == {"html", "table"} and "What this drafter gains" in media["html"].read_text()


def test_a_resumed_run_is_the_same_run_there(tmp_path, monkeypatch):
    calls = []
    module = ModuleType("wandb")
    module.api, module.Settings = SimpleNamespace(api_key="0123456789"), lambda **options: options
    module.init = lambda **options: calls.append(options) or Run()
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for folder in (tmp_path, tmp_path, tmp_path / "other"):
        folder.mkdir(exist_ok=True)
        Tracker(TrainConfig(tracking=TrackingConfig(wandb=True)), folder, enabled=True).close()
    ids = [options["id"] for options in calls]
    assert ids[0] == ids[1] != ids[2] and all(options["resume"] == "allow" for options in calls)
