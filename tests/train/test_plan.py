"""The plan of a run: memory as it was measured, printed before anything is loaded."""

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
from infer.drafters.build import build_drafter_config
from infer.drafters.families import DRAFTER_FAMILIES
from infer.targets.loading import load_tokenizer
from infer.targets.support import refuse_unsupported
from train import plan
from train.config import TrainConfig
from train.plan import count_total_steps, estimate_run_memory, load_target_config
from train.step_memory import StepSizes, choose_gradient_checkpointing, estimate_step_memory

# runs a script with an allocator that returns freed memory to the system at once
RETURN_MEMORY_PROGRAM = """
import ctypes, runpy, sys

for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
    ctypes.CDLL(None).mallopt(option, 65536)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.robustness
def test_memory_is_as_planned_within_ten_percent(repo, start_command, tmp_path):
    program = tmp_path / "return_memory.py"
    program.write_text(RETURN_MEMORY_PROGRAM)
    command = [
        str(repo / "benchmarks" / "train_step.py"),
        "--hidden=128",
        "--vocabulary=2000",
        "--length=512",
        "--anchors=96",
        "--drafter-layers=3",
        "--block=8",
        "--way=ours",
        "--steps=1",
        "--threads=1",
        "--device=cpu",
        "--precision=float32",  # the first bfloat16 products allocate additional memory
    ]
    output = start_command(str(program), command).finish()
    result = json.loads(output.splitlines()[-1])
    planned_gb = sum(result["planned"].values()) / 1e9
    assert planned_gb == pytest.approx(result["peak_gb"], rel=0.1)


# GB at the peak of a step, by shape
GPU_PEAK_GB = {
    "8b": 30.27,
    "4b": 17.94,
    "1.7b": 9.12,
    "0.6b": 2.52,
    "long": 18.52,
    "many": 7.74,
    "hybrid": 15.88,
}
RECOMPUTE_GPU_PEAK_GB = {
    "8b": 26.72,
    "4b": 14.69,
    "1.7b": 7.63,
    "long": 15.13,
    "many": 6.98,
    "hybrid": 12.83,
}


@pytest.mark.parametrize(
    "name, recompute, peak_gb",
    [(name, False, peak_gb) for name, peak_gb in GPU_PEAK_GB.items()]
    + [(name, True, peak_gb) for name, peak_gb in RECOMPUTE_GPU_PEAK_GB.items()],
)
def test_memory_on_a_gpu_is_as_its_allocator_counted(repo, monkeypatch, name, recompute, peak_gb):
    """The measurements are from `python benchmarks/gpu_train_counts.py --layers 4 --passes 2
    [--recompute]` with the simulated GPU."""
    monkeypatch.syspath_prepend(str(repo / "benchmarks"))
    counts = importlib.import_module("gpu_train_counts")
    sizes = dict(zip(counts.TRAIN_SHAPE_FIELDS, counts.TRAIN_SHAPES[name], strict=True)) | {
        "num_hidden_layers": 4
    }
    config = counts.build_train_config(sizes, 2, recompute)
    shape = StepSizes(config, counts.build_target_config(sizes), batch_size=1)
    planned = estimate_step_memory(shape, config, 1, 2, 2, True)
    assert sum(planned.values()) / 1e9 == pytest.approx(peak_gb, rel=0.1)


@pytest.mark.parametrize("option", [None, False, True])
def test_layers_are_recomputed_if_a_step_does_not_fit_otherwise(make_tiny, option):
    target, drafter = make_tiny(block_size=4, family="dflash")
    config = TrainConfig(anchors_per_sequence=6, gradient_checkpointing=option)
    config.data.length = 32
    config.optim.batch_size = 2
    config.drafter.layers = drafter.config.num_hidden_layers
    config.drafter.block_size = 4
    shape = StepSizes(config, target.config)

    def step_bytes(gradient_checkpointing: bool) -> float:
        memory = estimate_step_memory(
            shape, replace(config, gradient_checkpointing=gradient_checkpointing), 1, 4, 4, False
        )
        return sum(memory.values())

    def choose(device_bytes: float | None) -> tuple[bool, str]:
        chosen, line = choose_gradient_checkpointing(config, shape, 1, 4, 4, False, device_bytes)
        return chosen.gradient_checkpointing, line

    normal_bytes = step_bytes(gradient_checkpointing=False)
    recompute_bytes = step_bytes(gradient_checkpointing=True)
    assert recompute_bytes < normal_bytes
    assert choose(2 * normal_bytes)[0] == choose(None)[0] == bool(option)
    recompute, line = choose(normal_bytes)  # a tenth of the memory must stay free
    assert recompute == (option is not False)
    assert f"{normal_bytes / 1e6:,.1f} MB" in line
    assert f"{recompute_bytes / 1e6:,.1f} MB" in line
    assert "may not fit" in choose(recompute_bytes / 2)[1]
    assert "may not fit" not in choose(1e12)[1]


def test_a_plan_needs_neither_weights_nor_a_network(start_command):
    command = ["plan", "+model=qwen3-8b", "target.shard=true", "target.device=cuda"]
    printed = start_command("infer/main.py", command, HF_HUB_OFFLINE="1", NPROC="8").finish()
    for words in (
        "8,190.7 million parameters",
        "8 GPU processes",
        "GB on each device",
        "activations",
        "per million tokens",
    ):
        assert words in printed


@pytest.mark.parametrize("option, device_type", [("auto", "cpu"), ("cpu", "cpu"), ("cuda", "cuda")])
def test_a_plan_is_for_the_device_that_the_run_would_use(small, monkeypatch, option, device_type):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = small(f"target.device={option}")
    estimate = estimate_run_memory(config, load_target_config(config))
    assert estimate.device.type == device_type
    assert (estimate.device_bytes is None) == (device_type == "cuda")


def test_a_plan_counts_the_data_that_the_run_reads(small, tmp_path, capsys):
    """The token ids that `regenerate` writes beside an answer are not text."""
    file = tmp_path / "chats.jsonl"
    answer = {"role": "assistant", "content": "x = 1\n" * 9}
    answer |= {"token_ids": [*range(400)]}
    rows = [{"messages": [{"role": "user", "content": f"Question {i}"}, answer]} for i in range(30)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = small("data=jsonl", f"data.path={file}")
    tokenizer = load_tokenizer()
    dataset = plan.prepare_local_data(config, tokenizer).dataset
    plan.print_plan(config)
    printed = capsys.readouterr().out
    assert f"data       {len(dataset)} packed sequences" in printed
    assert f"time       {count_total_steps(config, len(dataset)):,} steps" in printed
    assert "mask token 1 (<|mask|>)" in printed and "activations" in printed
    hf_config = load_target_config(config)
    all_ids = Dataset.from_dict({"ids": [[*range(512)]]})
    with pytest.raises(ValueError, match="Set drafter.mask_token_id"):
        plan.describe_mask_token(config, hf_config, tokenizer, all_ids)


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

    def count_examples(command) -> list[str]:
        command(config)
        printed = capsys.readouterr().out.splitlines()
        first = next(i for i, line in enumerate(printed) if line.startswith("examples"))
        return printed[first : first + 4]

    def print_data(config) -> None:
        show_data(DataCommand(0, data=config.data, target=config.target))

    counts = count_examples(plan.print_plan)
    assert counts == count_examples(run_here) == count_examples(print_data)
    assert counts[0] == "examples   1,000 read: 801 used, 60 held out, 137 excluded, 2 invalid"
    assert counts[1] == "excluded   137: the chat template leaves out the reasoning of an answer"
    assert counts[2] == "invalid    2: not valid JSON"
    assert f"{file}, line 702: not valid JSON" in counts[3]


def test_every_named_target_is_planned(repo):
    """conf/target/*.yaml: none is refused, and drafters have sizes for them."""
    num_targets = 0
    for file in sorted((repo / "conf" / "target").glob("*.yaml")):
        sizes = OmegaConf.load(file).get("model_config")
        if not sizes:
            continue
        num_targets += 1
        hf_config = AutoConfig.for_model(**OmegaConf.to_container(sizes))
        refuse_unsupported(hf_config)
        for family in DRAFTER_FAMILIES:
            options = DrafterConfig(family=family, mask_token_id=1, layers=1)
            config = build_drafter_config(options, None, hf_config)
            assert config.intermediate_size > config.hidden_size / 2
            assert config.head_dim * config.num_attention_heads
    assert num_targets > 18


def test_questions_are_planned_before_they_are_answered(small, tmp_path, capsys):
    file = tmp_path / "chats.jsonl"
    chats = [{"messages": [{"role": "user", "content": f"{i}?"}]} for i in range(9)]
    file.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    plan.print_plan(small("data=jsonl", f"data.path={file}"))
    printed = capsys.readouterr().out
    assert "9 read: 0 used, 0 held out, 9 excluded" in printed
    assert "9: no answer of the assistant" in printed
    assert "time       unknown: the questions of the data have no answers yet" in printed
    plan.print_plan(small("data=self", "data.path=null"))
    printed = capsys.readouterr().out
    assert "data=self has no examples yet" in printed and "activations" in printed
    file.write_text('{"no": "columns"}\n' * 9)
    with pytest.raises(
        ValueError,
        match=(
            "9 of 9 examples are invalid; data.max_invalid_fraction=0.05 allows 0. First: .*line "
            "1: "
        ),
    ):
        plan.print_plan(small("data=jsonl", f"data.path={file}"))
