"""A run with a reduced vocabulary: the most frequent tokens are counted, trained, saved and
resumed."""

from collections import Counter

import pytest
import torch

from data.packing import load_packed_dataset
from infer import load_drafter, load_target
from train.run.checkpoints import find_newest_resumable_folder, load_training_state
from train.run.log import read_step_metrics


@pytest.mark.parametrize(
    "options",
    [
        ["head=selector", "drafter.head.rank=8"],
        pytest.param(["drafter=dart", "deepspeed=zero2"], marks=pytest.mark.robustness),
    ],
)
def test_the_tokens_are_the_most_frequent_ones(small, run_here, shallow, tmp_path, capsys, options):
    """The run includes the self-check (train/selfcheck.py) and an evaluation."""
    config = small(*options, "drafter.draft_vocab_size=60", "optim.steps=2")
    run = run_here(config)
    target = load_target(str(shallow))
    counts = Counter()
    for row in load_packed_dataset(config.data, target.tokenizer, target.tokenizer_digest):
        counts.update(row["ids"][row["loss"]].tolist())
    special = {*target.tokenizer.all_special_ids, *target.eos_token_ids}
    by_frequency = sorted(range(512), key=lambda token: (-counts[token], token))
    frequent = [token for token in by_frequency if token not in special]
    expected = sorted([*special, *frequent][:60])
    drafter = load_drafter(run / "checkpoints" / "best")
    assert drafter.vocabulary.tokens.tolist() == expected
    percent = 100 * sum(counts[token] for token in expected) / counts.total()
    line = f"vocabulary 60 of 512 tokens, which cover {percent:.1f} % of the tokens to learn from"
    assert line in capsys.readouterr().out
    state = load_training_state(find_newest_resumable_folder(run)[0])
    assert state["d2t"].dtype == torch.int64
    again = small(*options, "name=again", f"drafter.init={run}/checkpoints/best", "optim.steps=1")
    trained_again = load_drafter(run_here(again) / "checkpoints" / "best")
    assert trained_again.vocabulary.tokens.tolist() == expected
    # resumed from its last checkpoint
    assert run_here(config) == run
    assert len(read_step_metrics(run)) == 2


def test_a_vocabulary_larger_than_the_targets_is_refused_before_the_target_loads(
    small, run_here, monkeypatch
):
    monkeypatch.setattr("train.run.state.load_configured_target", None)
    with pytest.raises(
        ValueError, match=r"drafter\.draft_vocab_size=513: the target has 512 tokens"
    ):
        run_here(small("drafter.draft_vocab_size=513"))
    with pytest.raises(
        ValueError, match=r"drafter\.draft_vocab_size=513: the target has 512 tokens"
    ):
        run_here(small("drafter.draft_vocab_size=513", "drafter.init=embedded", "drafter.layers=2"))
