"""The plan: parameters and operations counted by hand, memory as measured, one page before anything
is loaded."""

import importlib
import json
from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from omegaconf import OmegaConf
from transformers import AutoConfig

from infer.cli.data import DataCommand, run as show_data
from infer.config import DrafterConfig
from infer.drafters.base import config_for
from infer.drafters.families import FAMILIES
from infer.targets.loading import load_tokenizer
from infer.targets.support import refuse_unsupported
from train import plan
from train.config import TrainConfig
from train.plan import StepShape, step_memory, target_config, total_steps, with_recompute


def tiny(make_tiny, family="dflash"):
    target, drafter = make_tiny(block_size=4, family=family)
    config = TrainConfig(anchors_per_sequence=6)
    config.data.length = 32
    config.optim.batch_size = 2
    config.drafter.family = family
    config.drafter.layers = drafter.config.num_hidden_layers
    config.drafter.block_size = 4
    return target, drafter, config, StepShape(config, target.config)


LEAN = """
import ctypes, runpy, sys

for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD: what is freed is given back at once
    ctypes.CDLL(None).mallopt(option, 65536)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.robustness
def test_memory_is_as_planned_within_ten_percent(repo, start_command, tmp_path):
    (tmp_path / "lean.py").write_text(LEAN)
    shape = [
        "--hidden=128",
        "--vocabulary=2000",
        "--length=512",
        "--anchors=96",
        "--drafter-layers=3",
        "--block=8",
    ]
    command = [
        str(repo / "benchmarks" / "train_step.py"),
        *shape,
        "--way=ours",
        "--steps=1",
        "--threads=1",
    ]
    command += [
        "--device=cpu",
        "--precision=float32",
    ]  # the first bfloat16 products take memory of their own
    figures = json.loads(
        start_command(str(tmp_path / "lean.py"), command).finish().splitlines()[-1]
    )
    assert sum(figures["planned"].values()) / 1e9 == pytest.approx(figures["peak_gb"], rel=0.1)


PEAKS = {
    "8b": 30.27,
    "4b": 17.94,
    "1.7b": 9.12,
    "0.6b": 2.52,
    "long": 18.52,
    "many": 7.74,
    "hybrid": 15.88,
}
AGAIN = {
    "8b": 26.72,
    "4b": 14.69,
    "1.7b": 7.63,
    "long": 15.13,
    "many": 6.98,
    "hybrid": 12.83,
}  # with --recompute


@pytest.mark.parametrize(
    "name, again, peak",
    [(name, False, peak) for name, peak in PEAKS.items()]
    + [(name, True, peak) for name, peak in AGAIN.items()],
)
def test_memory_on_a_gpu_is_as_its_allocator_counted(repo, monkeypatch, name, again, peak):
    """GB at the peak of a step, from `python benchmarks/gpu_train_counts.py --layers 4 --passes 2`
    on the stand-in."""
    monkeypatch.syspath_prepend(str(repo / "benchmarks"))
    counts = importlib.import_module("gpu_train_counts")
    sizes = dict(zip(counts.FIELDS, counts.SHAPES[name], strict=True)) | {"num_hidden_layers": 4}
    config = counts.run_config(sizes, 2, again)
    planned = step_memory(
        StepShape(config, counts.target_config(sizes), rows=1), config, 1, 2, 2, True
    )
    assert sum(planned.values()) / 1e9 == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize("asked", [None, False, True])
def test_layers_are_computed_again_where_a_step_does_not_fit(make_tiny, asked):
    _, _, config, shape = tiny(make_tiny)
    config.gradient_checkpointing = asked
    ways = [replace(config, gradient_checkpointing=again) for again in (False, True)]
    without, with_it = (sum(step_memory(shape, way, 1, 4, 4, False).values()) for way in ways)
    assert with_it < without

    def chosen(room: float | None) -> tuple[bool, str]:
        found, line = with_recompute(config, shape, 1, 4, 4, False, room)
        return found.gradient_checkpointing, line

    assert chosen(2 * without)[0] == chosen(None)[0] == bool(asked)
    assert chosen(without)[0] == (asked is not False)  # a tenth stays free
    assert all(f"{size / 1e6:,.1f} MB" in chosen(without)[1] for size in (with_it, without))
    assert "may be too much" in chosen(with_it / 2)[1] and "may be too much" not in chosen(1e12)[1]


def work_of(config: TrainConfig) -> plan.Work:
    return plan.work_of(config, target_config(config))


def test_a_plan_needs_neither_weights_nor_a_network(start_command):
    command = ["plan", "+model=qwen3-8b", "target.shard=true", "target.device=cuda"]
    printed = start_command("infer/main.py", command, HF_HUB_OFFLINE="1", NPROC="8").finish()
    for words in (
        "8,190.7 million parameters",
        "8 GPU processes",
        "GB on each device",
        "activations",
        "a million tokens",
    ):
        assert words in printed


@pytest.mark.parametrize("device, kind", [("auto", "cpu"), ("cpu", "cpu"), ("cuda", "cuda")])
def test_a_plan_is_for_the_device_that_the_run_would_take(small, monkeypatch, device, kind):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    work = work_of(small(f"target.device={device}"))
    assert work.device.type == kind and (work.room is None) == (kind == "cuda")


def test_a_plan_counts_what_the_run_reads(small, tmp_path, capsys):
    """Rows and evaluations; the ids that `regenerate` writes beside an answer are no text."""
    file = tmp_path / "chats.jsonl"
    answer = {"role": "assistant", "content": "x = 1\n" * 9}
    answer |= {"token_ids": [*range(400)]}
    rows = [{"messages": [{"role": "user", "content": f"Question {i}"}, answer]} for i in range(30)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = small("data=jsonl", f"data.path={file}")
    tokenizer = load_tokenizer()
    packed = plan.rows_of(config, tokenizer).rows
    plan.print_plan(config)
    printed = capsys.readouterr().out
    assert (
        f"data       {len(packed)} rows" in printed
        and f"time       {total_steps(config, len(packed)):,} steps" in printed
    )
    assert "mask token 1 (<|mask|>)" in printed and "activations" in printed
    theirs = target_config(config)
    with pytest.raises(ValueError, match="drafter.mask_token_id=<id>"):
        plan.mask_of(config, theirs, tokenizer, Dataset.from_dict({"ids": [[*range(512)]]}))


def test_plan_data_and_training_count_alike(small, run_here, tmp_path, capsys):
    """140 of 1,000 chats have thoughts that the template cannot show, two lines are broken:
    training goes on."""
    answer = {"role": "assistant", "content": "x = 1\n" * 9}
    file = tmp_path / "chats.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": f"Question {i}"}, answer]} for i in range(1000)
    ]
    for i in range(500, 640):
        rows[i]["messages"][1] = answer | {"reasoning_content": "hm"}
    lines = [json.dumps(row) for row in rows]
    lines[701] = lines[702] = "broken"
    file.write_text("\n".join(lines))
    options = ["data=jsonl", f"data.path={file}", "data.max_examples=null"]
    config = small(*options, "optim.steps=1", "self_check=false", "evaluation.prompts=0")
    counted = []
    for run in (
        plan.print_plan,
        run_here,
        lambda config: show_data(DataCommand(0, data=config.data, target=config.target)),
    ):
        run(config)
        said = capsys.readouterr().out.splitlines()
        first = next(i for i, line in enumerate(said) if line.startswith("examples"))
        counted.append(said[first : first + 4])
    assert counted[0] == counted[1] == counted[2]
    assert counted[0][0] == "examples   1,000 read: 801 used, 60 held out, 137 excluded, 2 invalid"
    assert (
        counted[0][1] == "excluded   137: the chat template does not show the thought of an answer"
    )
    assert (
        counted[0][2] == "invalid    2: no JSON" and f"{file}, line 702: no JSON" in counted[0][3]
    )


def test_every_named_target_is_planned(repo):
    """conf/target/*.yaml: none is refused, and drafters have sizes for them."""
    named = sorted((repo / "conf" / "target").glob("*.yaml"))
    sizes = [given for file in named if (given := OmegaConf.load(file).get("model_config"))]
    assert len(sizes) > 18
    for given in sizes:
        theirs = AutoConfig.for_model(**OmegaConf.to_container(given))
        refuse_unsupported(theirs)
        for family in FAMILIES:
            options = DrafterConfig(family=family, mask_token_id=1, layers=1)
            config = config_for(options, None, theirs)
            assert config.intermediate_size > config.hidden_size / 2
            assert config.head_dim * config.num_attention_heads


def test_questions_are_planned_before_they_are_answered(small, tmp_path, capsys):
    file = tmp_path / "chats.jsonl"
    file.write_text(
        "".join(
            json.dumps({"messages": [{"role": "user", "content": f"{i}?"}]}) + "\n"
            for i in range(9)
        )
    )
    plan.print_plan(small("data=jsonl", f"data.path={file}"))
    printed = capsys.readouterr().out
    assert (
        "9 read: 0 used, 0 held out, 9 excluded" in printed
        and "9: no answer of the assistant" in printed
    )
    assert "time       unknown: questions without answers, ./launch.sh regenerate" in printed
    plan.print_plan(small("data=self", "data.path=null"))
    printed = capsys.readouterr().out
    assert "data=self has no rows yet" in printed and "activations" in printed
    file.write_text('{"no": "columns"}\n' * 9)
    with pytest.raises(
        ValueError,
        match="9 of 9 examples are invalid; data.max_invalid_fraction=0.05 allows 0. First: .*line 1: ",
    ):
        plan.print_plan(small("data=jsonl", f"data.path={file}"))
