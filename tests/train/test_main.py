"""The way into training: which GPU a single process takes."""

import os

import pytest
import torch

from train.config import TrainConfig
from train.main import on_own_gpu


@pytest.mark.parametrize(
    "visible, shown", [(None, "1"), ("4,6,7", "6"), ("GPU-a,GPU-b,GPU-c", "GPU-b")], ids=["all", "some", "by name"]
)
def test_a_named_gpu_is_the_only_one_that_training_sees(monkeypatch, visible, shown):
    """Whatever DeepSpeed counts by ranks, it is the one that the user named."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    config = TrainConfig()
    config.target.device = "cuda:1"
    assert on_own_gpu(config).target.device == "cuda" and os.environ["CUDA_VISIBLE_DEVICES"] == shown
    config.target.device = "cuda:3"
    with pytest.raises(ValueError, match="there are 3 GPUs"):
        on_own_gpu(config)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="several processes take a GPU each"):
        on_own_gpu(config)
    config.target.device = "auto"
    assert on_own_gpu(config) is config
