"""Complete runs: results do not depend on how a step is computed, nor on interruptions."""

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

from infer.ngrams.model import NGramModel
from infer.targets.loading import load_target
from infer.utils.hydra_app import compose_checked_options
from train import loop
from train.config import OptimConfig, TrainConfig
from train.optim import cosine_learning_rate
from train.run.checkpoints import (
    describe_checkpoint_damage,
    find_newest_resumable_folder,
    list_checkpoints,
    parse_step,
)
from train.run.log import trim_step_metrics

UNINTERRUPTED_RUN_OPTIONS = (
    "optim.steps=12",
    "optim.name=muon",
    "checkpoints=3",
    "optim.precision=bfloat16",
)


@pytest.fixture(scope="session")
def small(small_options) -> list[str]:
    """The options of a small run."""
    return [*small_options, "data.max_examples=100", "optim.precision=float32"]


@pytest.fixture(scope="session")
def start(start_command, small):
    """A function (runs folder, *overrides, processes=1) that starts a small run in new
    processes."""

    def start_run(runs: Path, *overrides: str, processes: int = 1):
        return start_command("train/main.py", [f"runs_dir={runs}", *small, *overrides], processes)

    return start_run


def read_complete_lines(run: Path) -> list[dict]:
    """Return the lines of metrics.jsonl, without a partially written one."""
    file = run / "metrics.jsonl"
    if not file.exists():
        return []
    return [
        json.loads(line)
        for line in file.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


@pytest.fixture(scope="session")
def uninterrupted_run(start, make_once) -> Path:
    """An uninterrupted run of 12 steps with checkpoints every 4."""

    def run(runs: Path) -> None:
        output = start(runs, "name=uninterrupted", *UNINTERRUPTED_RUN_OPTIONS).finish()
        for word in ("plain", "chain", "DDTree", "report.html", "tokens/s"):
            assert word in output

    return make_once("uninterrupted-run", run) / "uninterrupted"


def test_ctrl_c_ends_an_evaluation_at_once(small, run_here, monkeypatch, tmp_path):
    monkeypatch.setattr(
        "train.loop.evaluate_checkpoint", lambda *arguments: os.kill(os.getpid(), signal.SIGINT)
    )
    with pytest.raises(
        KeyboardInterrupt,
        match="is complete; the same command evaluates it and continues",
    ):
        run_here(
            compose_checked_options(
                "train",
                TrainConfig,
                [*small, f"runs_dir={tmp_path}", "optim.steps=1", "checkpoints=1"],
            )
        )


def assert_same_metrics(run: Path, other_run: Path) -> None:
    """Compare the metrics of all steps with a tolerance for rounding."""
    expected_lines = read_complete_lines(run)
    assert len(expected_lines) > 0
    for expected, actual in zip(expected_lines, read_complete_lines(other_run), strict=True):
        assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert actual["agreement"] == pytest.approx(expected["agreement"], abs=1e-6)
        assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


@pytest.fixture(scope="session")
def few_steps(start, make_once):
    """A function (drafter, steps) that returns the folder of a run of one process."""

    def train_once(drafter: str = "dflash-small", steps: int = 3) -> Path:
        options = [
            f"drafter={drafter}",
            "count_ngrams=false",
            "name=reference",
            "optim.name=adamw",
            f"optim.steps={steps}",
        ]
        return (
            make_once(f"{steps}-steps-{drafter}", lambda runs: start(runs, *options).finish())
            / "reference"
        )

    return train_once


@pytest.mark.parametrize(
    "drafter, processes, options",
    [
        ("dflash-small", 1, ["optim.micro_batch_size=1", "gradient_checkpointing=true"]),
        # the gradient of its output head is accumulated over micro-batches
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
    """With more micro-batches, more processes, a sharded state, or a sharded target."""
    reference_run = few_steps(drafter)
    name = "-".join(option.split("=")[-1] for option in [drafter, *options]) + str(processes)
    options = [f"drafter={drafter}", "count_ngrams=false", f"name={name}", *options]
    start(
        reference_run.parent, *options, "optim.name=adamw", "optim.steps=3", processes=processes
    ).finish()
    assert_same_metrics(reference_run, reference_run.parent / name)


@pytest.mark.robustness
def test_resuming_with_other_processes_and_zero_stages(start_command, small, few_steps, tmp_path):
    """A run is resumed four times, each time with another number of processes and another stage."""
    script = tmp_path / "all_states.py"
    script.write_text(
        "import train.main as main, train.run.checkpoints as checkpoints\n"
        "checkpoints.NUM_CHECKPOINTS_KEEPING_TRAINING_STATE = 5\n"
        "main.main()\n"
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
    completed_steps = 0
    for processes, stage in [(2, "zero3"), (1, "zero2"), (2, "zero1"), (1, "zero0"), (2, "zero2")]:
        output = start_command(
            str(script), [*options, f"deepspeed={stage}"], processes=processes
        ).finish()
        was_resumed = f"resuming after step {completed_steps}" in output
        assert was_resumed == (completed_steps > 0)
        assert_same_metrics(few_steps(steps=8), run)
        completed_steps = next(step for step in (2, 3, 5, 6, 8) if step > completed_steps)
        for folder in list_checkpoints(run):
            if parse_step(folder) > completed_steps:
                shutil.rmtree(folder)


def test_a_batch_with_no_anchor_changes_nothing(small, run_here, tmp_path):
    """Answers of one token each have no anchor, and a step must not divide by zero."""
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
        compose_checked_options(
            "train", TrainConfig, [*small, *options, "optim.steps=12", "self_check=false"]
        )
    )
    losses = [line["loss"] for line in read_complete_lines(run)]
    assert len(losses) == 12 and all(math.isfinite(loss) for loss in losses)
    assert min(losses) == 0 < max(losses)


def test_a_batch_that_cannot_be_divided_is_one_sentence(small, run_here):
    with pytest.raises(ValueError, match=r"^optim.batch_size=3 .*multiple of 2"):
        run_here(
            compose_checked_options(
                "train", TrainConfig, [*small, "optim.batch_size=3", "optim.micro_batch_size=2"]
            )
        )


def test_drafter_folder_is_the_public_layout(uninterrupted_run):
    """With exactly the keys and tensor names that serving engines read."""
    folder = uninterrupted_run / "checkpoints" / "best" / "drafter"
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
    assert (folder / "ngrams").read_bytes() == (uninterrupted_run / "ngrams").read_bytes()
    assert NGramModel.open(folder / "ngrams", load_target("embedded").tokenizer_digest).order == 6


def test_files_of_a_run_folder(uninterrupted_run):
    folders = sorted(path.name for path in (uninterrupted_run / "checkpoints").iterdir())
    assert folders == ["best", *(f"step-{step:08d}" for step in (4, 8, 12))]
    states = [
        path.parent.name for path in sorted(uninterrupted_run.glob("checkpoints/step-*/state"))
    ]
    assert states == ["step-00000008", "step-00000012"]
    evaluations = {
        path.parent.parent.name: json.loads(path.read_text())
        for path in uninterrupted_run.glob("checkpoints/step-*/evaluation/evaluation.json")
    }
    assert len(evaluations) == 3
    # although the training steps used bfloat16
    assert all(result["dtype"] == "float32" for result in evaluations.values())
    weights = load_file(
        uninterrupted_run / "checkpoints" / "best" / "drafter" / "model.safetensors"
    )
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    best = max(
        evaluations, key=lambda name: max(method["tau"] for method in evaluations[name]["methods"])
    )
    taus = {name: max(m["tau"] for m in evaluations[name]["methods"]) for name in evaluations}
    assert taus[(uninterrupted_run / "checkpoints" / "best").readlink().name] == taus[best]
    assert all(
        method["identical"] for result in evaluations.values() for method in result["methods"]
    )
    assert (uninterrupted_run / "report" / "report.html").read_text().count("<figcaption>") == 5


def test_a_finished_run_is_reported_again_and_never_overwritten(
    small, run_here, uninterrupted_run, capsys
):
    before = (uninterrupted_run / "metrics.jsonl").read_bytes()
    options = [
        *small,
        f"runs_dir={uninterrupted_run.parent}",
        "name=uninterrupted",
        *UNINTERRUPTED_RUN_OPTIONS,
    ]
    run_here(compose_checked_options("train", TrainConfig, options))
    assert "report.html" in capsys.readouterr().out
    with pytest.raises(ValueError, match="optim.lr differ"):
        run_here(compose_checked_options("train", TrainConfig, [*options, "optim.lr=0.1"]))
    assert (uninterrupted_run / "metrics.jsonl").read_bytes() == before


def test_minutes_are_wall_clock_time_unless_the_option_is_processor(
    small, run_here, monkeypatch, tmp_path
):
    """Each step sleeps half a second, which needs no processor time."""
    original_train_step = loop.train_step

    def sleep_and_train(*arguments):
        time.sleep(0.5)
        return original_train_step(*arguments)

    monkeypatch.setattr(loop, "train_step", sleep_and_train)
    options = [
        *small,
        f"runs_dir={tmp_path}",
        "optim.steps=1",
        "self_check=false",
        "evaluation.prompts=0",
    ]
    for clock in ("wall", "processor"):
        run_here(
            compose_checked_options(
                "train", TrainConfig, [*options, f"optim.clock={clock}", f"name={clock}"]
            )
        )
    wall_line = read_complete_lines(tmp_path / "wall")[-1]
    processor_line = read_complete_lines(tmp_path / "processor")[-1]
    assert wall_line["seconds"] > 0.5 > processor_line["seconds"]


def test_a_run_of_minutes_resumes_with_the_seconds_it_had(
    small, run_here, monkeypatch, tmp_path, capsys
):
    """The clock advances by one second at every reading, so that a step takes one second."""
    seconds = iter(range(1000))
    monkeypatch.setattr("train.loop.time.thread_time", lambda: next(seconds))
    options = [
        *small,
        "optim.clock=processor",
        f"runs_dir={tmp_path}",
        "optim.max_minutes=0.1",
        "optim.steps=99",
        "checkpoints=2",
        "self_check=false",
    ]
    config = compose_checked_options("train", TrainConfig, [*options, "evaluation.prompts=0"])
    run_here(replace(config, name="uninterrupted"))
    original_train_step = loop.train_step

    def interrupt_and_train(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        return original_train_step(*arguments)

    monkeypatch.setattr(loop, "train_step", interrupt_and_train)
    stopped = replace(config, name="stopped")
    with pytest.raises(SystemExit):
        run_here(stopped)
    assert "stopped by Ctrl-C after step 1" in capsys.readouterr().out
    assert len(read_complete_lines(tmp_path / "stopped")) == 1
    monkeypatch.setattr(loop, "train_step", original_train_step)
    run_here(stopped)

    def read_values(name: str) -> list[list[float]]:
        lines = read_complete_lines(tmp_path / name)
        return [[line["seconds"], line["lr"], line["loss"]] for line in lines]

    expected = read_values("uninterrupted")
    assert read_values("stopped") == expected
    assert [seconds for seconds, _, _ in expected] == [1, 2, 3, 4, 5, 6]
    folders = list_checkpoints(tmp_path / "uninterrupted")
    assert [parse_step(folder) for folder in folders] == [3, 6]


def test_damaged_checkpoints_are_reported_and_skipped(uninterrupted_run, tmp_path):
    run = tmp_path / "copy"
    # other tests replace the link to the best checkpoint
    ignored = shutil.ignore_patterns("best", ".*")
    shutil.copytree(uninterrupted_run / "checkpoints", run / "checkpoints", ignore=ignored)
    last = run / "checkpoints" / "step-00000012"
    assert find_newest_resumable_folder(run) == (last, [])
    state = last / "state" / "state.safetensors"
    data = bytearray(state.read_bytes())
    data[len(data) // 2] ^= 1
    state.write_bytes(data)
    assert describe_checkpoint_damage(last) == f"state/{state.name} is truncated or altered"
    checkpoint, skipped = find_newest_resumable_folder(run)
    assert checkpoint.name == "step-00000008"
    assert skipped == [
        f"skipped checkpoint step-00000012: state/{state.name} is truncated or altered"
    ]
    (checkpoint / "drafter" / "model.safetensors").unlink()
    assert find_newest_resumable_folder(run)[0] is None
    assert "drafter/model.safetensors is missing" in find_newest_resumable_folder(run)[1][1]


def test_the_log_is_trimmed_to_the_resumed_step(tmp_path):
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    trim_step_metrics(log, 2)
    assert log.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_learning_rate_warms_up_and_falls_along_a_cosine():
    optim = OptimConfig(lr=2.0, warmup_ratio=0.1)
    rates = torch.tensor([cosine_learning_rate(optim, step, 100) for step in range(100)])
    assert rates[:10].tolist() == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert rates.max() == 2.0
    assert (rates[10:].diff() < 0).all()
    assert rates[55].item() == pytest.approx(1.0)
    assert rates[-1] < 0.002
