"""A drafter of the most frequent tokens in a run: counted, trained, saved, gone on from."""

from collections import Counter

import pytest
import torch

from data.packing import packed_rows
from infer import load_drafter, load_target
from train.run.checkpoints import load, newest
from train.run.log import read_log


@pytest.mark.parametrize(
    "options",
    [
        ["head=selector", "drafter.head.rank=8"],
        pytest.param(["drafter=dart", "deepspeed=zero2"], marks=pytest.mark.robustness),
    ],
)
def test_the_tokens_are_the_most_frequent_ones(small, run_here, shallow, tmp_path, capsys, options):
    """The run checks itself before its first step (train/selfcheck.py), and decodes at its end."""
    config = small(*options, "drafter.draft_vocab_size=60", "optim.steps=2")
    run = run_here(config)
    target = load_target(str(shallow))
    counts = Counter()
    for row in packed_rows(config.data, target.tokenizer, target.tokenizer_digest):
        counts.update(row["ids"][row["loss"]].tolist())
    special = {*target.tokenizer.all_special_ids, *target.end_ids}
    frequent = [
        token
        for token in sorted(range(512), key=lambda id: (-counts[id], id))
        if token not in special
    ]
    expected = sorted([*special, *frequent][:60])
    drafter = load_drafter(run / "checkpoints" / "best")
    assert drafter.vocabulary.tokens.tolist() == expected
    share = 100 * sum(counts[token] for token in expected) / counts.total()
    assert (
        f"vocabulary 60 of 512 tokens: {share:.1f} % of those to learn from"
        in capsys.readouterr().out
    )
    state = load(newest(run)[0])
    assert state["d2t"].dtype == torch.int64
    again = small(*options, "name=again", f"drafter.init={run}/checkpoints/best", "optim.steps=1")
    assert (
        load_drafter(run_here(again) / "checkpoints" / "best").vocabulary.tokens.tolist()
        == expected
    )
    assert run_here(config) == run and len(read_log(run)) == 2  # gone on from its last checkpoint


def test_more_tokens_than_there_are_are_refused_before_the_target_loads(
    small, run_here, monkeypatch
):
    monkeypatch.setattr("train.run.state.open_target", None)
    with pytest.raises(
        ValueError, match=r"drafter\.draft_vocab_size=513: the target has 512 tokens"
    ):
        run_here(small("drafter.draft_vocab_size=513"))
    with pytest.raises(
        ValueError, match=r"drafter\.draft_vocab_size=513: the target has 512 tokens"
    ):
        run_here(small("drafter.draft_vocab_size=513", "drafter.init=embedded", "drafter.layers=2"))
