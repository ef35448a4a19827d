"""What happens at the end of a run: which checkpoint is taken, and what is measured of it."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import train.run.evaluation as hooks
from infer.evaluation.acceptance import find_reference
from infer.evaluation.results import (
    Acceptance,
    Evaluation,
    MethodResult,
    PromptResult,
    Reference,
    write_result,
)


def evaluation(folder: Path, step: int, prompts: int, rounds: int) -> Evaluation:
    took = [PromptResult(i, "any", 10, rounds, [0.1], 0) for i in range(prompts)]
    sums = {"tau_prompt_mean": 1.0, "tokens": 10, "seconds": 0.1, "tokens_per_second": 1.0}
    methods = [
        MethodResult(
            name,
            budget,
            tau,
            rounds=rounds,
            speedup=1.0,
            histogram=[9],
            prompts=took,
            identical=True,
            **sums,
        )
        for name, budget, tau in (("plain", 0, 1.0), ("chain", 3, 9 / rounds))
    ]
    shared = {
        "target": "t",
        "device": "CPU",
        "dtype": "float32",
        "max_new_tokens": 9,
        "temperature": 0.0,
    }
    shared |= {"samples": [], "block_size": 4, "methods": methods}
    return Evaluation(step=step, checkpoint=str(folder), prompts=prompts, **shared)


@pytest.mark.parametrize("shared, best", [(8, 15), (1, 30)])
def test_the_best_checkpoint_is_evaluated_in_full(tmp_path, monkeypatch, capsys, shared, best):
    """An earlier checkpoint that is better by what it shares with the last one has a reference in
    the end, for its card and for doctor; one that shares a prompt is not chosen, and that is
    said."""
    folders = {step: tmp_path / "checkpoints" / f"step-{step:08d}" for step in (15, 30)}

    def evaluate(run: Path, folder: Path, last: bool) -> None:
        step = hooks.step_of(folder)
        result = evaluation(folder, step, 32 if last else shared, rounds=3 if step == 15 else 5)
        reference = Reference("float32", 4, Acceptance(1, [1, 0, 0]), [])
        (folder / "evaluation").mkdir(parents=True, exist_ok=True)
        write_result(
            folder / "evaluation" / "evaluation.json",
            replace(result, reference=reference if last else None),
        )

    for step, folder in folders.items():
        (folder / "drafter").mkdir(parents=True)
        evaluate(tmp_path, folder, step == 30)
    monkeypatch.setattr(hooks, "first_only", lambda action: action())
    monkeypatch.setattr(
        hooks,
        "evaluate_checkpoint",
        lambda run, folder, log, last: evaluate(run.folder, folder, last),
    )
    monkeypatch.setattr(hooks, "write_report", lambda folder, *rest: folder / "report.html")
    (tmp_path / "config.json").write_text(
        json.dumps({"optim": {"batch": 1}, "data": {"length": 1, "source": "stdlib", "path": None}})
    )
    hooks.evaluate_best(SimpleNamespace(folder=tmp_path), None)
    hooks.update_report(tmp_path)
    assert hooks.best_checkpoint(tmp_path) == folders[best]
    assert find_reference(tmp_path / "checkpoints" / "best") is not None
    hooks.finish_report(tmp_path, SimpleNamespace(close=print))
    assert (f"evaluations share {shared} of" in capsys.readouterr().out) == (best == 30)
