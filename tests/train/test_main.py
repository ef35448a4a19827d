"""The way into training: which GPUs it takes, what it says first."""

import errno
import json
import re

import pytest

import train.main
from train.processes import own_device


def test_a_named_gpu_is_refused_with_what_to_give():
    """DeepSpeed counts the GPUs that it sees by ranks."""
    with pytest.raises(ValueError, match="give CUDA_VISIBLE_DEVICES=1"):
        own_device("cuda:1")


def test_a_run_begins_with_target_data_and_what_it_takes(small, run_here, capsys, tmp_path):
    """`+model=qwen3-4b` with a stand-in for target and chats: five lines, before all others."""
    chats = tmp_path / "chats.jsonl"
    rows = [
        [{"role": "user", "content": f"x = {i}"}, {"role": "assistant", "content": "y = x"}]
        for i in range(100)
    ]
    chats.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    bundle = ["data=jsonl", f"data.path={chats}", "anchors_per_document=3", "optim.steps=1"]
    run_here(
        small(
            "+model=qwen3-4b",
            "target.path=embedded",
            "drafter=dflash-small",
            "optim=laptop",
            *bundle,
        )
    )
    target, data, counts, takes, memory = capsys.readouterr().out.splitlines()[:5]
    assert counts == "examples   14 read: 12 used, 2 held out, 0 excluded, 0 invalid"
    assert (
        target.startswith("target     embedded, ")
        and str(chats) in data
        and "tokens to learn from" in data
    )
    said = r"run        1 steps of 2 rows, 4 blocks a row, at most 3 a document, products in (bfloat16|float32)"
    assert re.fullmatch(said, takes)  # the sooner of the two, where the processor multiplies both
    assert re.match(
        r"memory     .* MB on each device at a step's peak, of .* GB; .* MB with gradient_checkpointing=true",
        memory,
    )


class Exited(Exception):
    """Takes the place of the end of the process."""


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS], ids=["full", "read-only"])
def test_a_disk_that_fails_anywhere_in_a_run_is_a_sentence(monkeypatch, capsys, tmp_path, code):
    """Not only where a file of the run is written: data sets, caches and reports write too."""

    def train_onto_it(config) -> None:
        raise OSError(code, "a reason", "runs/a/report")

    def end_process(code: int) -> None:
        raise Exited(code)

    monkeypatch.setattr("train.loop.train", train_onto_it)
    monkeypatch.setattr(train.main.os, "_exit", end_process)
    with pytest.raises(Exited, match="^3$"):
        train.main.main([f"runs_dir={tmp_path}"])
    assert capsys.readouterr().err == f"error: [Errno {code}] a reason: 'runs/a/report'\n"
