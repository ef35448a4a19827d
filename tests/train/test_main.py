"""The way into training: which GPU a single process takes."""

import os
import re
from types import SimpleNamespace

import pytest
import torch

from train.config import TrainConfig
from train.run.log import StepLog
from train.safety.processes import own_gpu


@pytest.mark.parametrize(
    "visible, shown", [(None, "1"), ("4,6,7", "6"), ("GPU-a,GPU-b,GPU-c", "GPU-b")], ids=["all", "some", "by name"]
)
def test_a_named_gpu_is_the_only_one_that_training_sees(monkeypatch, visible, shown):
    """Whatever DeepSpeed counts by ranks, it is the one that the user named."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert own_gpu("cuda:1") == "cuda" and os.environ["CUDA_VISIBLE_DEVICES"] == shown
    with pytest.raises(ValueError, match="there are 3 GPUs"):
        own_gpu("cuda:3")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="several processes take a GPU each"):
        own_gpu("cuda:1")
    assert own_gpu("auto") == "auto"


def test_the_hub_is_asked_only_for_what_is_not_here(monkeypatch, tmp_path):
    """And a hub that does not answer is one sentence about both, before anything else is tried."""
    from infer.utils.entry import composed
    from train.run import reachable

    asked = []
    monkeypatch.setattr(reachable, "hub_answers", lambda: asked.append(1))
    here = ["target.path=embedded", "data=stdlib"]
    reachable.check_reachable(composed("train", TrainConfig, ["+model=qwen3-4b", *here]))
    assert not asked
    with pytest.raises(ValueError, match=r"data.path=some/chats: not on this machine.*give data=jsonl data.path="):
        chats = ["data=hub", "data.path=some/chats"]
        reachable.check_reachable(composed("train", TrainConfig, ["+model=qwen3-4b", "target.path=embedded", *chats]))
    with pytest.raises(ValueError, match=r"target.path=Qwen/Qwen3-4B and data.path=mlabonne/open-perfectblend: not"):
        reachable.check_reachable(composed("train", TrainConfig, ["+model=qwen3-4b"]))


def test_a_run_begins_with_target_data_and_what_it_takes(small, run_here, capsys, tmp_path):
    """`+model=qwen3-4b` with a stand-in for target and chats: four lines, before all others."""
    import json

    chats = tmp_path / "chats.jsonl"
    rows = [[{"role": "user", "content": f"x = {i}"}, {"role": "assistant", "content": "y = x"}] for i in range(100)]
    chats.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    bundle = ["data=jsonl", f"data.path={chats}", "document_anchors=3", "optim.steps=1"]
    run_here(small("+model=qwen3-4b", "target.path=embedded", "drafter=dflash-small", "optim=laptop", *bundle))
    target, data, takes, memory = capsys.readouterr().out.splitlines()[:4]
    assert target.startswith("target     embedded, ") and str(chats) in data and "tokens to learn from" in data
    assert takes == "run        1 steps of 2 rows, 4 blocks a row, at most 3 a document"
    assert re.match(r"memory     .* MB on each device at a step's peak, of .* GB; .* MB with recompute=true", memory)


def test_the_first_steps_say_how_long_the_rest_takes(tmp_path):
    for steps, told in ((72, "2.0 minutes"), (10, "14 seconds")):
        config, said = TrainConfig(), []
        config.optim.steps = steps
        log = StepLog(config, tmp_path, rows=10, full_rate=1.0)
        progress = SimpleNamespace(total=steps, say=said.append)
        for step in range(1, min(20, steps)):
            log.pending = [(step, 0.0, None)]
            assert log.due == (step == log.enough)  # which does not wait for log_every
            log.foretell(progress, step, 9.0 if step <= min(3, steps // 10) else 2.0)
        assert said == [f"about {told} left, by steps of 2,000 ms so far; without evaluations"]
    log.began -= 31
    assert log.due
