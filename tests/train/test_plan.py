"""The plan: parameters and operations counted by hand, memory as measured, one page before anything is loaded."""

import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from omegaconf import OmegaConf
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from data.packing import packed_rows
from infer.attention.masks import block_mask
from infer.config import DrafterConfig, TargetConfig
from infer.drafters.base import config_for
from infer.targets.support import refuse_unsupported
from train import forecast
from train.batches import draw_blocks
from train.config import TrainConfig
from train.plan import in_time, recompute_of, shape_of, step_memory, step_operations


def tiny(make_tiny, family="dflash"):
    target, drafter = make_tiny(block_size=4, family=family)
    config = TrainConfig(anchors=6)
    config.data.length, config.optim.batch = 32, 2
    config.drafter.family, config.drafter.layers = family, drafter.config.num_hidden_layers
    config.drafter.block_size = 4
    return target, drafter, config, shape_of(config, target.config)


@pytest.mark.parametrize("family", ["dflash", "dart"])
def test_parameters_are_counted(make_tiny, family):
    target, drafter, _, shape = tiny(make_tiny, family)
    assert shape.target_parameters == sum(p.numel() for p in target.model.parameters())
    assert shape.drafter_parameters == sum(p.numel() for p in drafter.parameters())
    assert shape.target_ends == 2 * 97 * 32


@pytest.mark.parametrize("family", ["dflash", "dart"])
def test_operations_are_what_torch_counts(make_tiny, family):
    """All products of the drafter's step; of attention, the plan leaves out what the mask hides."""
    target, drafter, config, shape = tiny(make_tiny, family)
    ids = torch.randint(90, (2, 32))
    rows = {"ids": ids, "positions": torch.arange(32).expand(2, -1), "documents": torch.zeros_like(ids)}
    rows["loss"] = torch.ones_like(ids, dtype=torch.bool)
    blocks = draw_blocks(rows, config, 0)
    features = torch.randn(2, 32, drafter.fc.in_features)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        starts = (blocks.anchors - drafter.anchor_offset).clamp(min=0)
        width, causal = drafter.num_queries, drafter.attention_patterns[0][0]
        mask = block_mask(starts, rows["documents"], width, causal).dense
        inputs = drafter.inputs(target, ids, rows["positions"], blocks.anchors)
        drafter(features, rows["positions"], *inputs, mask).sum().backward()
    counted = counter.get_total_flops()
    queries = 6 * drafter.num_queries
    hidden = 12 * shape.layers * (2 * queries) * (32 - 32 / 2 + queries - 4) * 32  # attention to keys that it hides
    assert step_operations(shape)["drafter"] == pytest.approx(counted - hidden, rel=0.02)


def test_sharding_offload_and_stored_features_take_less(make_tiny):
    _, _, config, shape = tiny(make_tiny)

    def total(**changes) -> float:
        plan = TrainConfig(**({"anchors": 6} | {k: v for k, v in changes.items() if k in ("features", "recompute")}))
        plan.deepspeed.stage, plan.target.shard = changes.get("stage", 0), changes.get("shard", False)
        plan.deepspeed.offload, plan.optim.batch = changes.get("offload", False), 64  # gradients wait for more passes
        return sum(step_memory(shape, plan, 4, 4, 4, cuda=False).values())

    assert total(stage=2) < total(stage=1) < total()
    assert total(stage=3) < total(stage=2)
    assert total(stage=2, offload=True) < total(stage=2)
    assert total(features="x") < total()
    assert total(recompute=True) < total()


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(
            ["--hidden=256", "--vocabulary=16000", "--length=256", "--anchors=48"], marks=pytest.mark.robustness
        ),
        ["--hidden=128", "--vocabulary=2000", "--length=512", "--anchors=96", "--drafter-layers=3", "--block=8"],
    ],
)
def test_memory_is_as_planned_within_ten_percent(repo, shape):
    command = [
        sys.executable,
        str(repo / "benchmarks" / "train_step.py"),
        *shape,
        "--way=ours",
        "--steps=1",
        "--threads=1",
    ]
    command += ["--device=cpu", "--precision=float32"]  # the first bfloat16 products take memory of their own
    lean = {"PYTHONPATH": str(repo), "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=os.environ | lean, capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    assert sum(figures["planned"].values()) / 1e9 == pytest.approx(figures["peak_gb"], rel=0.1)


def test_other_scripts_take_the_same_steps(repo, monkeypatch):
    """benchmarks/gpu_step.py gives `train_step` sizes and leaves the other options to it."""
    monkeypatch.syspath_prepend(str(repo / "benchmarks"))
    monkeypatch.setattr(sys, "argv", ["gpu_step.py", "--small", "--no-compile", "--steps=1"])
    gpu_step = importlib.import_module("gpu_step")
    monkeypatch.setattr(gpu_step, "need_cuda", lambda: torch.device("cpu"))
    sizes = {"hidden": 64, "intermediate": 64, "heads": 2, "kv_heads": 2, "head_dim": 32, "vocabulary": 100}
    sizes |= {"length": 64, "anchors": 8, "layers": 4, "drafter_layers": 1}
    monkeypatch.setattr(gpu_step, "SMALL", sizes)
    with pytest.raises(SystemExit) as ended:
        gpu_step.main()
    assert not ended.value.code  # losses fell


PEAKS = {"8b": 30.27, "4b": 17.94, "1.7b": 9.12, "0.6b": 2.52, "long": 18.52, "many": 7.74, "hybrid": 15.88}
AGAIN = {"8b": 26.72, "4b": 14.69, "1.7b": 7.63, "long": 15.13, "many": 6.98, "hybrid": 12.83}  # with --recompute


@pytest.mark.parametrize(
    "name, again, peak",
    [(name, False, peak) for name, peak in PEAKS.items()] + [(name, True, peak) for name, peak in AGAIN.items()],
)
def test_memory_on_a_gpu_is_as_its_allocator_counted(repo, monkeypatch, name, again, peak):
    """GB at the peak of a step, from `python benchmarks/gpu_train_counts.py --layers 4 --passes 2` on the stand-in."""
    monkeypatch.syspath_prepend(str(repo / "benchmarks"))
    counts = importlib.import_module("gpu_train_counts")
    sizes = dict(zip(counts.FIELDS, counts.SHAPES[name], strict=True)) | {"num_hidden_layers": 4}
    config = counts.run_config(sizes, 2, again)
    planned = step_memory(shape_of(config, counts.target_config(sizes), rows=1), config, 1, 2, 2, True)
    assert sum(planned.values()) / 1e9 == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize("asked", [None, False, True])
def test_layers_are_computed_again_where_a_step_does_not_fit(make_tiny, asked):
    _, _, config, shape = tiny(make_tiny)
    config.recompute = asked

    def choose(room: float | None):
        return recompute_of(shape, config, 1, 4, 4, False, room)

    known = choose(None)
    assert known.with_it < known.without
    assert choose(2 * known.without).chosen == choose(None).chosen == bool(asked)
    assert choose(known.without).chosen == (asked is not False)  # a tenth stays free
    for size in (known.with_it, known.without):
        assert f"{size / 1e6:,.1f} MB" in str(choose(known.without))
    assert "may be too much" in str(choose(known.with_it / 2)) and "may be too much" not in str(choose(1e12))


def test_time_is_by_the_rate_of_the_device_or_an_h100s(small, capsys):
    work = forecast.work_of(small("target.device=cpu"))
    forecast.print_time(work, 240, 4000)
    printed = capsys.readouterr().out
    assert "240 steps: about" in printed and "if they reach 40 % of this machine's cpu" in printed
    assert "1 evaluation of at most 4,000 tokens, every way of decoding counted" in printed
    forecast.print_time(replace(work, recompute=replace(work.recompute, room=None)), 10**9, None)
    seconds = 10**9 * sum(work.operations.values()) / (0.4 * 989e12)
    said = capsys.readouterr().out
    assert f"about {in_time(seconds)} without" in said and "an H100" in said


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


@pytest.mark.parametrize("device, room, kind", [("auto", 1e12, "cpu"), ("auto", 1e5, "cuda"), ("cuda", 1e12, "cuda")])
def test_a_plan_is_for_the_device_that_the_run_would_take(small, monkeypatch, device, room, kind):
    """Without a GPU: the CPU, unless the run has no room there, whatever the target is called."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(forecast, "device_memory", lambda device, processes: room)
    assert forecast.work_of(small(f"target.device={device}")).device.type == kind


def test_data_are_counted_as_training_reads_them(small, tmp_path):
    """In the target's own tokens; the ids that `regenerate` writes beside an answer are no text."""
    file, said = tmp_path / "chats.jsonl", "x = 1\n" * 9
    for extra in ({}, {"token_ids": [*range(400)]}):
        answer = {"role": "assistant", "content": said} | extra
        rows = [{"messages": [{"role": "user", "content": f"Question {i}"}, answer]} for i in range(30)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = small("data=jsonl", f"data.path={file}")
        tokenizer = forecast.tokenizer_at_hand(config.target)
        trained = packed_rows(config.data, tokenizer, str(extra))
        sample = forecast.sample_data(config, tokenizer)
        assert sample.tokens == sum(int((row["documents"] >= 0).sum()) for row in trained)
        assert round(sample.tokens / sample.fill / config.data.length) == len(trained)
        guessed = forecast.sample_data(config, None).tokens
        assert guessed < 27 * (len(said) + 60) / 4
    options = config.evaluation
    decoded = forecast.evaluated_tokens(config, tokenizer)
    assert decoded >= 5 * options.max_new_tokens * options.prompts
    config.checkpoints += 4
    assert forecast.evaluated_tokens(config, tokenizer) > decoded


def test_a_plan_names_the_mask_token(small):
    work, tokenizer = forecast.work_of(small("target.device=cpu")), forecast.tokenizer_at_hand(TargetConfig())
    assert forecast.mask_of(work, tokenizer, None) == ", mask token 1 (<|mask|>)"
    assert forecast.mask_of(work, tokenizer, forecast.Sample(used={1})) == ", mask token 2 (<|pad|>)"
    with pytest.raises(ValueError, match="drafter.mask_token_id=<id>"):
        forecast.mask_of(work, tokenizer, forecast.Sample(used={*range(512)}))


def test_a_plan_refuses_what_the_run_would(start_command):
    said = start_command("infer/main.py", ["plan", "optim.batch=3"], NPROC="2").finish(code=2)
    assert "optim.batch=3" in said and "Traceback" not in said


def test_every_named_target_is_planned(repo):
    """conf/target/*.yaml: none is refused, and drafters have sizes for them."""
    named = sorted((repo / "conf" / "target").glob("*.yaml"))
    sizes = [given for file in named if (given := OmegaConf.load(file).get("sizes"))]
    assert len(sizes) > 18
    for given in sizes:
        theirs = AutoConfig.for_model(**OmegaConf.to_container(given))
        refuse_unsupported(theirs)
        for family in ("dflash", "dart"):
            options = DrafterConfig(family=family, mask_token_id=1, layers=1)
            config = config_for(options, None, theirs)
            assert config.intermediate_size > config.hidden_size / 2 and config.head_dim * config.num_attention_heads
