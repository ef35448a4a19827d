"""The plan: parameters and operations counted by hand, memory as measured, one page before anything is loaded."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from train.blocks import block_mask
from train.config import TrainConfig
from train.loop import draw_blocks
from train.plan import shape_of, step_memory, step_operations


def small(make_tiny):
    target, drafter = make_tiny(block_size=4)
    config = TrainConfig(anchors=6)
    config.data.length, config.optim.batch = 32, 2
    config.drafter.layers, config.drafter.block_size = 2, 4
    return target, drafter, config, shape_of(config, target.config)


def test_parameters_are_counted(make_tiny):
    target, drafter, _, shape = small(make_tiny)
    assert shape.target_parameters == sum(p.numel() for p in target.model.parameters())
    assert shape.drafter_parameters == sum(p.numel() for p in drafter.parameters())
    assert shape.target_ends == 2 * 97 * 32


def test_operations_are_what_torch_counts(make_tiny):
    """All products of the drafter's step; of attention, the plan leaves out what the mask hides."""
    _, drafter, config, shape = small(make_tiny)
    ids = torch.randint(90, (2, 32))
    rows = {"ids": ids, "positions": torch.arange(32).expand(2, -1), "documents": torch.zeros_like(ids)}
    rows["loss"] = torch.ones_like(ids, dtype=torch.bool)
    blocks = draw_blocks(rows, config, 0)
    features, embedded = torch.randn(2, 32, 2 * 32), torch.randn(2, 6 * 4, 32)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        mask = block_mask(blocks.anchors, rows["documents"], 4)
        drafter(features, rows["positions"], embedded, blocks.positions, mask).sum().backward()
    counted = counter.get_total_flops()
    hidden = 12 * 2 * (2 * 24) * (32 - 32 / 2 + 24 - 4) * 32  # attention to keys that the mask hides
    assert step_operations(shape)["drafter"] == pytest.approx(counted - hidden, rel=0.02)


def test_sharding_offload_and_stored_features_take_less(make_tiny):
    _, _, config, shape = small(make_tiny)

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
        ["--hidden=256", "--vocabulary=16000", "--length=256", "--anchors=48"],
        ["--hidden=128", "--vocabulary=2000", "--length=512", "--anchors=96", "--drafter-layers=3", "--block=8"],
    ],
)
def test_memory_is_as_planned_within_ten_percent(repo, shape):
    command = [sys.executable, str(repo / "benchmarks" / "train.py"), *shape, "--way=ours", "--steps=1", "--device=cpu"]
    lean = {"PYTHONPATH": str(repo), "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=os.environ | lean, capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    assert sum(figures["planned"].values()) / 1e9 == pytest.approx(figures["peak_gb"], rel=0.1)


def test_a_plan_needs_neither_weights_nor_a_network(repo):
    command = [sys.executable, str(repo / "train" / "plan.py"), "+model=qwen3-8b", "target.shard=true"]
    environment = os.environ | {"PYTHONPATH": str(repo), "HF_HUB_OFFLINE": "1", "NPROC": "8"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    for words in (
        "8,190.7 million parameters",
        "8 GPU processes",
        "GB on each device",
        "activations",
        "a million tokens",
    ):
        assert words in done.stdout


def test_a_plan_refuses_what_the_run_would(repo):
    command = [sys.executable, str(repo / "train" / "plan.py"), "optim.batch=3"]
    environment = os.environ | {"PYTHONPATH": str(repo), "NPROC": "2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "optim.batch=3" in done.stderr and "Traceback" not in done.stderr
