"""Which device a name stands for, and what is said where it cannot be used."""

import subprocess

import pytest
import torch

from infer.targets import loading
from infer.targets.loading import resolve_device


@pytest.fixture
def no_cuda(monkeypatch):
    """(GPUs that nvidia-smi lists, what torch was built for) -> torch without CUDA that it can use."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def make(listed: int, built: str | None) -> None:
        said = "".join(f"GPU {i}: A GPU (UUID: GPU-{i})\n  MIG 1g Device 0: (UUID: MIG-{i})\n" for i in range(listed))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.version, "cuda", built)
        monkeypatch.setattr(
            loading.subprocess, "run", lambda command, **options: subprocess.CompletedProcess(command, 0, said)
        )

    return make


def test_gpus_that_torch_cannot_use_are_not_left_idle_in_silence(no_cuda, monkeypatch):
    no_cuda(2, "13.0")
    with pytest.raises(ValueError, match=r"lists 2 GPUs, .*built for CUDA 13\.0.*driver is older.*target\.device=cpu"):
        resolve_device("auto")
    assert resolve_device("cpu") == torch.device("cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert resolve_device("auto") == torch.device("cpu")


def test_auto_is_the_cpu_where_there_is_no_gpu(no_cuda):
    no_cuda(0, "13.0")
    assert resolve_device("auto") == torch.device("cpu")


@pytest.mark.parametrize(("built", "says"), [(None, "a build without CUDA"), ("12.8", "is built for CUDA 12.8")])
def test_a_device_that_cannot_be_used_is_a_sentence(no_cuda, built, says):
    no_cuda(0, built)
    for name in ("cuda", "cuda:1"):
        with pytest.raises(ValueError, match=f"^target.device={name}: torch .*{says}"):
            resolve_device(name)
    with pytest.raises(ValueError, match="target.device=gpu: torch knows no such device"):
        resolve_device("gpu")


def test_a_gpu_that_is_not_there_is_a_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert resolve_device("cuda:0") == torch.device("cuda:0")
    with pytest.raises(ValueError, match="target.device=cuda:1: there are 1 GPUs"):
        resolve_device("cuda:1")
