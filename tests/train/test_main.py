"""The training command: which GPUs it uses, and its first lines."""

import errno
import json
import re

import pytest

import train.main
from train.processes import select_device


def test_a_gpu_with_a_number_is_refused():
    """DeepSpeed assigns the visible GPUs to ranks."""
    with pytest.raises(ValueError, match="environment variable CUDA_VISIBLE_DEVICES=1"):
        select_device("cuda:1")


def test_a_run_prints_its_overview_first(small, run_here, capsys, tmp_path):
    """Five lines, before all others; `+model=qwen3-4b` with another target and other data."""
    chats = tmp_path / "chats.jsonl"
    messages = [
        [{"role": "user", "content": f"x = {i}"}, {"role": "assistant", "content": "y = x"}]
        for i in range(100)
    ]
    chats.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in messages))
    options = ["data=jsonl", f"data.path={chats}", "anchors_per_document=3", "optim.steps=1"]
    run_here(
        small(
            "+model=qwen3-4b",
            "target.path=embedded",
            "drafter=dflash-small",
            "optim=laptop",
            *options,
        )
    )
    target, data, counts, steps, memory = capsys.readouterr().out.splitlines()[:5]
    assert counts == "examples   14 read: 12 used, 2 held out, 0 excluded, 0 invalid"
    assert target.startswith("target     embedded, ")
    assert str(chats) in data and "tokens to learn from" in data
    assert re.fullmatch(
        r"run        1 steps of 2 rows, 4 blocks per row and at most 3 per document, "
        r"matmuls in (bfloat16|float32)",
        steps,
    )
    assert re.match(
        r"memory     .* MB on each device at the peak of a step, of .* GB; "
        r".* MB with gradient_checkpointing=true",
        memory,
    )


class ProcessExitError(Exception):
    """Raised in place of ending the process."""


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS], ids=["full", "read-only"])
def test_any_disk_error_in_a_run_is_one_sentence(monkeypatch, capsys, tmp_path, code):
    """Also for files that data sets, caches and reports write."""

    def fail_to_train(config) -> None:
        raise OSError(code, "a reason", "runs/a/report")

    def end_process(code: int) -> None:
        raise ProcessExitError(code)

    monkeypatch.setattr("train.loop.train", fail_to_train)
    monkeypatch.setattr(train.main.os, "_exit", end_process)
    with pytest.raises(ProcessExitError, match="^3$"):
        train.main.main([f"runs_dir={tmp_path}"])
    assert capsys.readouterr().err == f"error: [Errno {code}] a reason: 'runs/a/report'\n"
