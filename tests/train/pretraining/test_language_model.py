"""The embedded target's pre-training: what its windows hold, and the loss that leads out of loops."""

import math
from itertools import islice

import pytest
import torch

from data.corpus import stdlib_documents, stdlib_prose
from train.pretraining.config import PretrainConfig
from train.pretraining.language_model import Loop, LoopWindows, loop_loss, pretrain


def test_loop_loss_is_what_the_paper_says() -> None:
    """Against a loop over rows and tokens; no gradient reaches the text that is repeated."""
    torch.manual_seed(0)
    logits = torch.randn(3, 20, 7, requires_grad=True)
    ids, marks = torch.randint(7, (3, 20)), torch.tensor([[5, 2], [11, 4], [9, 1]])  # positions of a window of 21
    probability = logits.softmax(-1)
    terms = []
    for row, (begin, period) in enumerate(marks.tolist()):
        for at in range(begin - 1, 20):
            now, before = (probability[row, t, ids[row, t]] for t in (at, at - period))
            terms.append(-math.log(1 - abs(now.item() - 0.3 * before.item())))
    loss = loop_loss(logits, ids, marks, 0.3)
    assert loss.item() == pytest.approx(sum(terms) / len(terms), rel=1e-5)
    loss.backward()
    assert all(not logits.grad[row, : begin - 1].any() for row, begin in enumerate(marks[:, 0]))
    assert logits.grad[0, 4:].abs().sum(-1).all()


def test_loop_windows_repeat_from_where_they_say() -> None:
    windows = LoopWindows(torch.randint(500, (2000,)), 256, torch.Generator().manual_seed(1))
    windows.found.append(Loop(torch.tensor([9, *[4, 5, 6] * 4]), 4, 3))
    texts, marks = windows.batch(6)
    assert texts.shape == (6, 257)
    for text, (begin, period) in zip(texts, marks.tolist(), strict=True):
        assert torch.equal(text[begin:], text[begin - period : -period])
    assert texts[0, :5].tolist() == [9, 4, 5, 6, 4] and marks[0].tolist() == [4, 3]


def test_prose_is_held_out_with_its_module(monkeypatch) -> None:
    some = {split: list(islice(stdlib_documents(split), 25)) for split in ("train", "held_out")}
    monkeypatch.setattr("data.corpus.stdlib_documents", some.__getitem__)
    held = [document.name for document in stdlib_prose("held_out")]
    train = {document.name for document in stdlib_prose("train")}
    assert len(held) > 20 and not train & set(held)
    assert "argparse.py:questions" in train | set(held) and any(name.startswith("reference:") for name in held)


def test_a_model_is_trained_gone_on_with_and_answers(tmp_path, monkeypatch) -> None:
    """Two steps from random weights, one more from the folder they wrote."""
    page = [document for document in stdlib_prose("train") if document.name == "argparse.py:questions"]
    for name in ("stdlib_documents", "stdlib_prose"):
        monkeypatch.setattr(f"train.pretraining.language_model.{name}", lambda split: page)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8, "length": 256}
    common = {"compile": False, "batch": 2, "loops": 2, "answers": 3, "prompt_tokens": 16, "answer_tokens": 8, **sizes}
    first = pretrain(PretrainConfig(out=str(tmp_path / "a"), steps=2, **common))
    common["loops"] = 0
    again = pretrain(PretrainConfig(out=str(tmp_path / "b"), init=str(tmp_path / "a"), steps=1, **common))
    assert again["held_out_loss"] < first["held_out_loss"] + 0.5
    assert (tmp_path / "a/tokenizer.json").read_bytes() == (tmp_path / "b/tokenizer.json").read_bytes()
    assert (tmp_path / "b/answers.jsonl").read_text().count('"response"') >= 1
