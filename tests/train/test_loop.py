"""Runs as a user starts them: exact resume after kills and signals, independence of the number of
processes."""

import json
import math
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from infer.ngrams.model import NGram
from infer.targets.loading import load_target
from infer.utils.hydra_app import compose_options as composed
from train import loop
from train.config import OptimConfig, TrainConfig
from train.optim import learning_rate
from train.run.checkpoints import checkpoints, find_damage, newest, step_of
from train.run.log import trim_log

WHOLE = ("optim.steps=12", "optim.name=muon", "checkpoints=3", "optim.precision=bfloat16")


@pytest.fixture(scope="session")
def small(small_options) -> list[str]:
    """The options of a small run."""
    return [*small_options, "data.max_examples=100", "optim.precision=float32"]


@pytest.fixture(scope="session")
def start(start_command, small):
    """(runs folder, *overrides, processes=1) -> a small run that has begun, in processes of its
    own."""

    def begin(runs: Path, *overrides: str, processes: int = 1):
        return start_command("train/main.py", [f"runs_dir={runs}", *small, *overrides], processes)

    return begin


def lines(run: Path) -> list[dict]:
    file = run / "metrics.jsonl"
    if not file.exists():
        return []
    return [
        json.loads(line)
        for line in file.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


@pytest.fixture(scope="session")
def whole_run(start, make_once) -> Path:
    """An uninterrupted run of 12 steps with checkpoints every 4."""

    def run(runs: Path) -> None:
        output = start(runs, "name=whole", *WHOLE).finish()
        for word in ("plain", "chain", "DDTree", "report.html", "tokens/s"):
            assert word in output

    return make_once("whole-run", run) / "whole"


def test_ctrl_c_ends_an_evaluation_at_once(small, run_here, monkeypatch, tmp_path):
    monkeypatch.setattr(
        "train.loop.evaluate_checkpoint", lambda *all, **more: os.kill(os.getpid(), signal.SIGINT)
    )
    with pytest.raises(
        KeyboardInterrupt,
        match="is whole, and the same command evaluates it and goes on from there",
    ):
        run_here(
            composed(
                "train",
                TrainConfig,
                [*small, f"runs_dir={tmp_path}", "optim.steps=1", "checkpoints=1"],
            )
        )


def same_losses(run: Path, other: Path) -> None:
    """Within 1e-5, over all steps."""
    assert len(lines(run)) == len(lines(other)) > 0
    for line, twin in zip(lines(run), lines(other), strict=True):
        assert twin["loss"] == pytest.approx(line["loss"], rel=1e-5)
        assert twin["agreement"] == pytest.approx(line["agreement"], abs=1e-6)
        assert twin["grad_norm"] == pytest.approx(line["grad_norm"], rel=1e-4)


@pytest.fixture(scope="session")
def few_steps(start, make_once):
    """(drafter, steps) -> a run of one process."""

    def once(drafter: str = "dflash-small", steps: int = 3) -> Path:
        options = [
            f"drafter={drafter}",
            "count_ngrams=false",
            "name=one",
            "optim.name=adamw",
            f"optim.steps={steps}",
        ]
        return (
            make_once(f"{steps}-steps-{drafter}", lambda runs: start(runs, *options).finish())
            / "one"
        )

    return once


@pytest.mark.parametrize(
    "drafter, processes, options",
    [
        ("dflash-small", 1, ["optim.micro_batch_size=1", "gradient_checkpointing=true"]),
        # its own head's gradient adds up over passes
        pytest.param(
            "dart",
            1,
            ["optim.micro_batch_size=1", "gradient_checkpointing=true"],
            marks=pytest.mark.robustness,
        ),
        pytest.param("dflash-small", 2, ["deepspeed=zero1"], marks=pytest.mark.robustness),
        pytest.param(
            "dflash-small",
            2,
            ["deepspeed=zero2", "target.shard=true"],
            marks=pytest.mark.robustness,
        ),
        pytest.param(
            "dart", 2, ["deepspeed=zero2", "target.shard=true"], marks=pytest.mark.robustness
        ),
        pytest.param(
            "dflash-small",
            2,
            ["deepspeed=zero3", "deepspeed.offload=true"],
            marks=pytest.mark.robustness,
        ),
    ],
)
def test_losses_do_not_depend_on_how_a_step_is_computed(
    start, few_steps, drafter, processes, options
):
    """Same rows a step: more passes, more processes, sharded state, sharded target."""
    one = few_steps(drafter)
    name = "-".join(option.split("=")[-1] for option in [drafter, *options]) + str(processes)
    options = [f"drafter={drafter}", "count_ngrams=false", f"name={name}", *options]
    start(one.parent, *options, "optim.name=adamw", "optim.steps=3", processes=processes).finish()
    same_losses(one, one.parent / name)


@pytest.mark.robustness
def test_goes_on_with_other_processes_and_stages(start_command, small, few_steps, tmp_path):
    """Stopped four times, each time gone on with by another number of processes and another ZeRO
    stage."""
    script = tmp_path / "all_states.py"
    script.write_text(
        "import train.main as main, train.run.checkpoints as checkpoints\ncheckpoints.KEPT = 5\nmain.main()\n"
    )
    options = [
        f"runs_dir={tmp_path}",
        *small,
        "name=moved",
        "optim.name=adamw",
        "optim.steps=8",
        "checkpoints=5",
    ]
    run = tmp_path / "moved"
    done = 0
    for processes, stage in [(2, "zero3"), (1, "zero2"), (2, "zero1"), (1, "zero0"), (2, "zero2")]:
        output = start_command(
            str(script), [*options, f"deepspeed={stage}"], processes=processes
        ).finish()
        assert (f"going on after step {done}" in output) == (done > 0)
        same_losses(few_steps(steps=8), run)
        done = next(step for step in (2, 3, 5, 6, 8) if step > done)
        for folder in checkpoints(run):
            if step_of(folder) > done:
                shutil.rmtree(folder)


def test_a_batch_with_no_anchor_changes_nothing(small, run_here, tmp_path):
    """Answers of one token each: nothing can be drafted, no step may divide by it."""
    turns = [
        ("user", "a question, "),
        ("assistant", "x"),
        ("user", " and more, "),
        ("assistant", "y"),
    ]
    chat = [{"role": role, "content": content} for role, content in turns]
    rows = [{"messages": [{"role": "user", "content": f"{i} "}, *chat[1:]]} for i in range(30)]
    rows[5]["messages"][-1] = {"role": "assistant", "content": "an answer of some length, once"}
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = [
        f"runs_dir={tmp_path}",
        "data=jsonl",
        f"data.path={tmp_path / 'a.jsonl'}",
        "optim.batch_size=1",
    ]
    run = run_here(
        composed("train", TrainConfig, [*small, *options, "optim.steps=12", "self_check=false"])
    )
    found = lines(run)
    assert len(found) == 12 and all(math.isfinite(line["loss"]) for line in found)
    assert min(line["loss"] for line in found) == 0 < max(line["loss"] for line in found)


def test_rows_that_cannot_be_shared_are_one_sentence(small, run_here):
    with pytest.raises(ValueError, match=r"^optim.batch_size=3 .*multiple of 2"):
        run_here(
            composed(
                "train", TrainConfig, [*small, "optim.batch_size=3", "optim.micro_batch_size=2"]
            )
        )


def test_drafter_folder_is_the_public_layout(whole_run):
    """Keys and tensor names exactly as serving engines read them."""
    folder = whole_run / "checkpoints" / "best" / "drafter"
    config = json.loads((folder / "config.json").read_text())
    assert config == {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 8,
        "dflash_config": {"block_size": 8, "mask_token_id": 1, "target_layer_ids": [2]},
        "num_target_layers": 4,
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "hidden_size": 192,
        "intermediate_size": 384,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "vocab_size": 512,
        "tie_word_embeddings": False,
    }
    assert (folder / "model.safetensors").stat().st_mode & 0o777 == 0o644
    assert (folder / "ngrams").read_bytes() == (whole_run / "ngrams").read_bytes()
    assert NGram.open(folder / "ngrams", load_target("embedded").tokenizer_digest).order == 6


def test_run_folder_explains_itself(whole_run):
    folders = sorted(path.name for path in (whole_run / "checkpoints").iterdir())
    assert folders == ["best", *(f"step-{step:08d}" for step in (4, 8, 12))]
    states = [path.parent.name for path in sorted(whole_run.glob("checkpoints/step-*/state"))]
    assert states == ["step-00000008", "step-00000012"]
    evaluations = {
        path.parent.parent.name: json.loads(path.read_text())
        for path in whole_run.glob("checkpoints/step-*/evaluation/evaluation.json")
    }
    assert len(evaluations) == 3
    assert all(
        result["dtype"] == "float32" for result in evaluations.values()
    )  # the steps' products are bfloat16
    weights = load_file(whole_run / "checkpoints" / "best" / "drafter" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    best = max(
        evaluations, key=lambda name: max(method["tau"] for method in evaluations[name]["methods"])
    )
    taus = {name: max(m["tau"] for m in evaluations[name]["methods"]) for name in evaluations}
    assert taus[(whole_run / "checkpoints" / "best").readlink().name] == taus[best]
    assert all(
        method["identical"] for result in evaluations.values() for method in result["methods"]
    )
    assert (whole_run / "report" / "report.html").read_text().count("<figcaption>") == 5


def test_finished_run_is_shown_again_and_never_overwritten(small, run_here, whole_run, capsys):
    before = (whole_run / "metrics.jsonl").read_bytes()
    options = [*small, f"runs_dir={whole_run.parent}", "name=whole", *WHOLE]
    run_here(composed("train", TrainConfig, options))
    assert "report.html" in capsys.readouterr().out
    with pytest.raises(ValueError, match="optim.lr differ"):
        run_here(composed("train", TrainConfig, [*options, "optim.lr=0.1"]))
    assert (whole_run / "metrics.jsonl").read_bytes() == before


def test_minutes_are_of_the_wall_clock_unless_processor_time_is_asked_for(
    small, run_here, monkeypatch, tmp_path
):
    """Each step waits half a second, which takes no processor time."""
    plain = loop.train_step
    monkeypatch.setattr(loop, "train_step", lambda *given: [time.sleep(0.5), plain(*given)][1])
    own = [
        *small,
        f"runs_dir={tmp_path}",
        "optim.steps=1",
        "self_check=false",
        "evaluation.prompts=0",
    ]
    for clock in ("wall", "processor"):
        run_here(composed("train", TrainConfig, [*own, f"optim.clock={clock}", f"name={clock}"]))
    wall, processor = (lines(tmp_path / clock)[-1]["seconds"] for clock in ("wall", "processor"))
    assert wall > 0.5 > processor


def test_a_run_of_minutes_goes_on_where_its_time_was(
    small, run_here, monkeypatch, tmp_path, capsys
):
    """By a clock that says a second more whenever it is asked, so that a step takes one."""
    seconds = iter(range(1000))
    monkeypatch.setattr("train.loop.time.thread_time", lambda: next(seconds))
    own = [
        *small,
        "optim.clock=processor",
        f"runs_dir={tmp_path}",
        "optim.max_minutes=0.1",
        "optim.steps=99",
        "checkpoints=2",
        "self_check=false",
    ]
    config = composed("train", TrainConfig, [*own, "evaluation.prompts=0"])
    run_here(replace(config, name="whole"))
    plain = loop.train_step

    def ends(*given):
        os.kill(os.getpid(), signal.SIGINT)
        return plain(*given)

    monkeypatch.setattr(loop, "train_step", ends)
    stopped = replace(config, name="stopped")
    with pytest.raises(SystemExit):
        run_here(stopped)
    assert "stopped by Ctrl-C after step 1" in capsys.readouterr().out
    assert len(lines(tmp_path / "stopped")) == 1
    monkeypatch.setattr(loop, "train_step", plain)
    run_here(stopped)
    whole, rejoined = (
        [[x["seconds"], x["lr"], x["loss"]] for x in lines(tmp_path / n)]
        for n in ("whole", "stopped")
    )
    assert whole == rejoined and [x[0] for x in whole] == [1, 2, 3, 4, 5, 6]
    assert [step_of(folder) for folder in checkpoints(tmp_path / "whole")] == [3, 6]


def test_damaged_checkpoints_are_named_and_skipped(whole_run, tmp_path):
    run = tmp_path / "copy"
    others = shutil.ignore_patterns(
        "best", ".*"
    )  # a finished run that is shown again links its best anew
    shutil.copytree(whole_run / "checkpoints", run / "checkpoints", ignore=others)
    last = run / "checkpoints" / "step-00000012"
    assert newest(run) == (last, [])
    state = last / "state" / "state.safetensors"
    data = bytearray(state.read_bytes())
    data[len(data) // 2] ^= 1
    state.write_bytes(data)
    assert find_damage(last) == f"state/{state.name} is truncated or altered"
    found, skipped = newest(run)
    assert found.name == "step-00000008"
    assert skipped == [
        f"skipped checkpoint step-00000012: state/{state.name} is truncated or altered"
    ]
    (found / "drafter" / "model.safetensors").unlink()
    assert newest(run)[0] is None
    assert "drafter/model.safetensors is missing" in newest(run)[1][1]


def test_log_is_trimmed_to_the_resumed_step(tmp_path):
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    trim_log(log, 2)
    assert log.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_learning_rate_warms_up_and_falls_along_a_cosine():
    optim = OptimConfig(lr=2.0, warmup_ratio=0.1)
    rates = torch.tensor([learning_rate(optim, step, 100) for step in range(100)])
    assert rates[:10].tolist() == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert rates.max() == 2.0
    assert (rates[10:].diff() < 0).all()
    assert rates[55].item() == pytest.approx(1.0)
    assert rates[-1] < 0.002
