"""The end of a run: which checkpoint is the best, and how it is evaluated."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import train.run.evaluation as run_evaluation
from infer.evaluation.acceptance import load_stored_reference
from infer.evaluation.results import (
    AcceptanceCounts,
    AcceptanceReference,
    Evaluation,
    MethodResult,
    PromptResult,
    write_result,
)


def make_evaluation(folder: Path, step: int, num_prompts: int, rounds: int) -> Evaluation:
    """Return an evaluation whose chain needs `rounds` rounds for each prompt."""
    prompt_results = [PromptResult(i, "any", 10, rounds, [0.1], 0) for i in range(num_prompts)]
    sums = {"tau_prompt_mean": 1.0, "tokens": 10, "seconds": 0.1, "tokens_per_second": 1.0}
    methods = [
        MethodResult(
            name,
            budget,
            tau,
            rounds=rounds,
            speedup=1.0,
            histogram=[9],
            prompts=prompt_results,
            identical=True,
            **sums,
        )
        for name, budget, tau in (("plain", 0, 1.0), ("chain", 3, 9 / rounds))
    ]
    options = {
        "target": "t",
        "device": "CPU",
        "dtype": "float32",
        "max_new_tokens": 9,
        "temperature": 0.0,
    }
    options |= {"samples": [], "block_size": 4, "methods": methods}
    return Evaluation(step=step, checkpoint=str(folder), prompts=num_prompts, **options)


@pytest.mark.parametrize("num_shared, best_step", [(8, 15), (1, 30)])
def test_the_best_checkpoint_is_evaluated_in_full(
    tmp_path, monkeypatch, capsys, num_shared, best_step
):
    """An earlier checkpoint that is better on the prompts that it shares with the last one gets a
    reference, for its model card and for `doctor`. With one shared prompt it is not chosen, and a
    line says why."""
    folders = {step: tmp_path / "checkpoints" / f"step-{step:08d}" for step in (15, 30)}

    def evaluate(folder: Path, is_last: bool) -> None:
        step = run_evaluation.parse_step(folder)
        num_prompts = 32 if is_last else num_shared
        result = make_evaluation(folder, step, num_prompts, rounds=3 if step == 15 else 5)
        reference = AcceptanceReference("float32", 4, AcceptanceCounts(1, [1, 0, 0]), [])
        (folder / "evaluation").mkdir(parents=True, exist_ok=True)
        write_result(
            folder / "evaluation" / "evaluation.json",
            replace(result, reference=reference if is_last else None),
        )

    for step, folder in folders.items():
        (folder / "drafter").mkdir(parents=True)
        evaluate(folder, step == 30)
    monkeypatch.setattr(run_evaluation, "run_on_first_process", lambda action: action())
    monkeypatch.setattr(
        run_evaluation,
        "evaluate_checkpoint",
        lambda run, folder, log, use_all_prompt_sets: evaluate(folder, use_all_prompt_sets),
    )
    monkeypatch.setattr(
        run_evaluation, "write_report", lambda folder, *rest: folder / "report.html"
    )
    (tmp_path / "config.json").write_text(
        json.dumps({"optim": {"batch": 1}, "data": {"length": 1, "source": "stdlib", "path": None}})
    )
    run_evaluation.evaluate_best_checkpoint_fully(SimpleNamespace(folder=tmp_path), None)
    run_evaluation.update_best_link_and_report(tmp_path)
    assert run_evaluation.find_best_checkpoint(tmp_path) == folders[best_step]
    assert load_stored_reference(tmp_path / "checkpoints" / "best") is not None
    run_evaluation.write_and_print_final_report(tmp_path, SimpleNamespace(finish_wandb_run=print))
    explained = f"evaluations share {num_shared} of" in capsys.readouterr().out
    assert explained == (best_step == 30)
