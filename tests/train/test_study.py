"""A study: runs like any other, the same texts for all, figures that decoding gives."""

import json

import pytest

from data.prompts import evaluation_prompts
from infer import load_drafter, load_target
from infer.api import decode
from infer.config import DecodeOptions
from infer.engine.loops import LONGEST_PERIOD
from train.config import TrainConfig
from train.run.checkpoints import checkpoints
from train.study import StudyCommand, study

HEAD = "drafter.block_size=4 head=markov"


@pytest.mark.robustness
def test_a_study_trains_what_is_new_and_says_what_decoding_would(
    small, small_options, run_here, monkeypatch, tmp_path, capsys
):
    trained = []
    monkeypatch.setattr(
        "train.study.train_apart", lambda run: trained.append(run.name) or run_here(run)
    )
    sizes = ["evaluation.prompts=6", "evaluation.max_new_tokens=20", "optim.steps=2"]
    base = [*small_options, *sizes]
    place = small().target.path
    for variants, seeds in (([""], 1), (["", HEAD], 2)):
        config = StudyCommand(
            base=base, variants=variants, seeds=seeds, out=str(tmp_path / "study")
        )
        config.check()
        study(config)
    with pytest.raises(ValueError, match="a study of another base"):
        StudyCommand(base=base[1:], out=config.out).check()
    assert trained == [
        f"{name}-{seed}" for seed in (0, 1) for name in ("base", "drafter.block_size_4_head_markov")
    ]
    table = capsys.readouterr().out
    assert (
        HEAD in table and "1.000" in table and "<svg" in (tmp_path / "study/study.svg").read_text()
    )

    run = tmp_path / "study" / trained[1]
    target = load_target(place)
    drafter = load_drafter(checkpoints(run)[-1])
    prompts = evaluation_prompts(small().data, target.tokenizer, 6, 8)
    found = json.loads((run / "study.json").read_text())["commits"]
    sizes = {
        "max_new_tokens": 20,
        "budget": 16,
        "ngrams": "none",
        "loop_period": LONGEST_PERIOD,
    }
    for method in ("chain", "ddtree"):
        texts = decode(
            target, drafter, [one.ids for one in prompts], DecodeOptions(method=method, **sizes)
        )
        assert [text.commits for text in texts] == found[method]


def test_variants_are_trained_for_the_same_processor_time():
    config = StudyCommand(base=["optim.max_minutes=5"])
    assert config.run_of("head=markov", 1).optim.clock == "processor"
    assert TrainConfig().optim.clock == "wall"


def test_a_variant_that_cannot_be_trained_is_named():
    with pytest.raises(
        ValueError, match=r"variants: head=nothing: In 'train': Could not find 'head/nothing'"
    ):
        StudyCommand(variants=["", "head=nothing"]).check()
