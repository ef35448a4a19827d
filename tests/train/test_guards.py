"""Numbers that are not finite: skipped alike at every stage, kept, replayed; losses that jump; the start's self-check."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

import train.loop as loop
from infer.config import DrafterConfig
from train.config import GuardsConfig, ReplayConfig, TrainConfig
from train.engine import training_state
from train.features import write_features
from train.guards import Spikes
from train.objective import RowLoss
from train.processes import Stopped
from train.replay import replay
from train.run_folder import logged


def poisoned(bad: dict[int, str], states: list):
    """`train_step`, whose loss or gradient is not finite in the given steps; the state before and after each is kept."""
    plain, loss_of = loop.train_step, loop.block_loss
    count = [0]

    def step(engine, *rest):
        count[0] += 1
        how = bad.get(count[0])

        def block_loss(*arguments) -> RowLoss:
            found = loss_of(*arguments)
            if how is None:
                return found
            factor = {"loss": math.inf, "gradient": 1.0}[how]
            if how == "gradient":
                found.loss.register_hook(lambda gradient: gradient * math.nan)
            return RowLoss(found.loss * factor, found.rows, found.agree)

        before = training_state(engine)
        loop.block_loss = block_loss
        metrics = plain(engine, *rest)
        loop.block_loss = loss_of
        states.append((before, training_state(engine)))
        return metrics

    return step


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_that_is_not_finite_changes_nothing_at_any_stage(small, run_here, monkeypatch, stage):
    states: list = []
    monkeypatch.setattr(loop, "train_step", poisoned({2: "loss", 4: "gradient"}, states))
    run = run_here(small("optim.steps=5", f"deepspeed.stage={stage}", "guards.self_check=false"))
    for number, (before, after) in enumerate(states, 1):
        same = all(torch.equal(before[name], after[name]) for name in before)
        assert same == (number in (2, 4)), number
        assert all(value.isfinite().all() for value in after.values())
    lines = logged(run)
    assert [line["step"] for line in lines if line["grad_norm"] is None] == [2, 4]
    assert [line["step"] for line in lines if line["loss"] is None] == [2]
    assert [path.name for path in sorted((run / "skipped").iterdir())] == ["step-00000002", "step-00000004"]
    kept = load_file(run / "skipped" / "step-00000004" / "weights.safetensors")
    assert all(torch.equal(value, states[3][0][name]) for name, value in kept.items())
