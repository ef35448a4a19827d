"""A study trains ordinary runs, and its results on shared texts equal those of decoding."""

import json

import pytest

from data.prompts import select_evaluation_prompts
from infer import load_drafter, load_target
from infer.api import decode_prompts
from infer.config import DecodeOptions
from infer.engine.repetition import MAX_LOOP_PERIOD_TOKENS
from train.config import TrainConfig
from train.run.checkpoints import list_checkpoints
from train.study import StudyCommand, run_study

HEAD_VARIANT = "drafter.block_size=4 head=markov"


@pytest.mark.robustness
def test_a_study_trains_new_runs_and_measures_what_decoding_gives(
    small, small_options, run_here, monkeypatch, tmp_path, capsys
):
    trained = []
    monkeypatch.setattr(
        "train.study.train_in_subprocess", lambda run: trained.append(run.name) or run_here(run)
    )
    sizes = ["evaluation.prompts=6", "evaluation.max_new_tokens=20", "optim.steps=2"]
    base = [*small_options, *sizes]
    target_path = small().target.path
    for variants, seeds in (([""], 1), (["", HEAD_VARIANT], 2)):
        config = StudyCommand(
            base=base, variants=variants, seeds=seeds, out=str(tmp_path / "study")
        )
        config.check()
        run_study(config)
    with pytest.raises(ValueError, match="a study with another base"):
        StudyCommand(base=base[1:], out=config.out).check()
    assert trained == [
        f"{name}-{seed}" for seed in (0, 1) for name in ("base", "drafter.block_size_4_head_markov")
    ]
    table = capsys.readouterr().out
    assert HEAD_VARIANT in table and "1.000" in table
    assert "<svg" in (tmp_path / "study/study.svg").read_text()

    run = tmp_path / "study" / trained[1]
    target = load_target(target_path)
    drafter = load_drafter(list_checkpoints(run)[-1])
    prompts = select_evaluation_prompts(small().data, target.tokenizer, 6, 8)
    commits = json.loads((run / "study.json").read_text())["commits"]
    sizes = {
        "max_new_tokens": 20,
        "budget": 16,
        "ngrams": "none",
        "loop_period": MAX_LOOP_PERIOD_TOKENS,
    }
    for method in ("chain", "ddtree"):
        prompt_ids = [prompt.ids for prompt in prompts]
        outputs = decode_prompts(target, drafter, prompt_ids, DecodeOptions(method=method, **sizes))
        assert [output.commits for output in outputs] == commits[method]


def test_variants_are_trained_for_the_same_processor_time():
    config = StudyCommand(base=["optim.max_minutes=5"])
    assert config.compose_run("head=markov", 1).optim.clock == "processor"
    assert TrainConfig().optim.clock == "wall"


def test_a_variant_that_cannot_be_trained_is_named():
    with pytest.raises(
        ValueError, match=r"head=nothing is invalid: In 'train': Could not find 'head/nothing'"
    ):
        StudyCommand(variants=["", "head=nothing"]).check()
