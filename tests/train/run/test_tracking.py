"""Weights & Biases: what a run leaves there, and that nothing there stops a run."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

from infer.evaluation.results import Evaluation, MethodResult, PromptResult, write_result
from train.config import TrackingConfig, TrainConfig
from train.run.tracking import Tracker

METHODS = [
    {"name": "plain", "budget": 0, "tau": 1.0, "speedup": 1.0, "rounds": 9, "histogram": [9]},
    {"name": "chain", "budget": 3, "tau": 1.8, "speedup": 1.2, "rounds": 5, "histogram": [1, 4]},
    {"name": "ddtree", "budget": 16, "tau": 2.5, "speedup": 1.5, "rounds": 4, "histogram": [0, 4]},
]
REST = {"tau_prompt_mean": 1.0, "tokens": 10, "seconds": 0.1, "tokens_per_second": 100.0, "stage_seconds": {}}


def evaluation_of(step: int, checkpoint: Path) -> Evaluation:
    """An evaluation with METHODS."""
    prompts = [PromptResult(i, "any", i, 10, 4, [0.1], 0) for i in range(8)]
    methods = [MethodResult(**method | REST, identical=True, prompts=prompts) for method in METHODS]
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


def test_offline_the_report_is_kept_for_later(tmp_path, start_command):
    """wandb itself, without a network; in a process of its own: a second run in one process may write nothing."""
    write_result(tmp_path / "evaluation.json", evaluation_of(3, tmp_path))
    (tmp_path / "script.py").write_text(f"""
from pathlib import Path
from infer.evaluation.report import write_report
from infer.evaluation.results import Evaluation, read_result
from train.config import TrackingConfig, TrainConfig
from train.run.tracking import Tracker
config = TrainConfig(name="mine", tracking=TrackingConfig(wandb=True))
tracker = Tracker(config, Path({str(tmp_path)!r}), enabled=True)
evaluation = read_result(Path({str(tmp_path / "evaluation.json")!r}), Evaluation)
tracker.summary(evaluation)
tracker.report(write_report(Path({str(tmp_path / "report")!r}), [evaluation]).parent, evaluation)
tracker.close()
""")
    places = {"WANDB_CACHE_DIR": str(tmp_path / "cache"), "WANDB_DATA_DIR": str(tmp_path / "data")}
    printed = start_command(str(tmp_path / "script.py"), [], **places, WANDB_MODE="offline").finish()
    assert "wandb stopped working" not in printed
    (record,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert b"tau/ddtree16" in record.read_bytes()
    assert f"to send it: wandb sync {record.parent}\n" in printed
    assert record.parent.name.endswith((tmp_path / "wandb_id").read_text())
    media = {path.parent.name: path for path in record.parent.glob("files/media/*/*")}
    assert set(media) == {"html", "table"} and "What this drafter gains" in media["html"].read_text()


def test_a_resumed_run_is_the_same_run_there(tmp_path, monkeypatch):
    calls = []
    module = ModuleType("wandb")
    module.api, module.Settings = SimpleNamespace(api_key="0123456789"), lambda **options: options
    module.init = lambda **options: calls.append(options) or SimpleNamespace(finish=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for folder in (tmp_path, tmp_path, tmp_path / "other"):
        folder.mkdir(exist_ok=True)
        Tracker(TrainConfig(tracking=TrackingConfig(wandb=True)), folder, enabled=True).close()
    ids = [options["id"] for options in calls]
    assert ids[0] == ids[1] != ids[2] and all(options["resume"] == "allow" for options in calls)
