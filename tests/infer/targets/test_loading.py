"""Which device a name stands for, and what is said where it cannot be used."""

import pytest
import torch

from infer.targets import loading
from infer.targets.loading import resolve_device


@pytest.fixture
def no_cuda(monkeypatch, tmp_path):
    """A machine with a GPU, whose torch has no CUDA that it can use."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(loading, "NVIDIA_DEVICE_FILE", tmp_path)


def test_gpus_that_torch_cannot_use_are_not_left_idle_in_silence(no_cuda, monkeypatch):
    with pytest.raises(
        ValueError, match=r"no GPU that torch .*can use; install .*target\.device=cpu"
    ):
        resolve_device("auto")
    assert resolve_device("cpu") == torch.device("cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert resolve_device("auto") == torch.device("cpu")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(loading, "NVIDIA_DEVICE_FILE", loading.NVIDIA_DEVICE_FILE / "none")
    assert resolve_device("auto") == torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "says"),
    [("cuda:1", "no GPU that torch"), ("gpu", "not a torch device"), ("mps", "no Metal GPU")],
)
def test_a_device_that_cannot_be_used_is_a_sentence(no_cuda, monkeypatch, name, says):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ValueError, match=f"^target.device={name}: .*{says}"):
        resolve_device(name)


def test_a_gpu_that_is_not_there_is_a_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert resolve_device("cuda:0") == torch.device("cuda:0")
    with pytest.raises(ValueError, match="target.device=cuda:1: this machine has 1 GPUs"):
        resolve_device("cuda:1")
