"""Conditional heads in a run: trained with the drafter or alone, saved, decoded, and refused where
they cannot be."""

import pytest
import torch

from infer import load_drafter, load_target
from infer.config import DrafterConfig, HeadConfig
from infer.drafters.base import new_drafter
from infer.drafters.heads.table import head_options
from infer.formats.checkpoint import save_drafter
from infer.formats.export import export_drafter
from train.config import check_head_training
from train.run.initial import resolve_init

GATED = [
    "head=markov",
    "drafter.head.kind=gated",
    "drafter.head.rank=8",
    "drafter.head.confidence_head=true",
]


def test_a_head_is_trained_with_the_drafter_and_then_alone(small, run_here, shallow, tmp_path):
    """Each run checks itself before its first step (train/selfcheck.py) and decodes at its end. The
    second begins from an export in another project's layout."""
    both = run_here(
        small(*GATED, "objective=dspark", "drafter.sample_from_anchor=true", "optim.steps=2")
    )
    first = load_drafter(both / "checkpoints" / "best")
    assert HeadConfig(**head_options(first.own)) == HeadConfig(
        "markov", "gated", 8, confidence_head=True
    )
    changed = {name for name, weight in first.named_parameters() if weight.abs().sum() > 0}
    assert {
        "markov_head.markov_w2.weight",
        "confidence_head.proj.weight",
        "confidence_head.proj.bias",
    } <= changed
    export_drafter(first, "dspark", load_target(str(shallow)), tmp_path / "dspark")
    alone = [
        "name=alone",
        f"drafter.init={tmp_path}/dspark",
        "trainable=head",
        "objective.chunk_rows=7",
    ]
    alone += ["drafter.sample_from_anchor=true", "optim.name=muon", "optim.steps=2"]
    after = load_drafter(run_here(small(*alone)) / "checkpoints" / "best")
    for name, weight in first.state_dict().items():
        trained = name.startswith(("markov_head.", "confidence_head."))
        assert torch.equal(weight, after.state_dict()[name]) != trained, name


def test_darts_layer_takes_a_head(small, run_here):
    """Its own head is trained beside the conditional one."""
    options = [
        "drafter=dart",
        "head=markov",
        "drafter.head.rank=8",
        "drafter.block_size=5",
        "optim.steps=2",
    ]
    drafter = load_drafter(run_here(small(*options)) / "checkpoints" / "best")
    assert HeadConfig(**head_options(drafter.own)) == HeadConfig("markov", rank=8)
    assert drafter.family.name == "dart"
    assert drafter.markov_head.markov_w2.weight.abs().sum() > 0


def test_a_drafter_without_a_head_is_given_one(small, run_here, shallow, tmp_path):
    drafter = new_drafter(DrafterConfig(layers=1), load_target(str(shallow)))
    drafter.init_weights(torch.Generator().manual_seed(2))
    save_drafter(drafter.config, drafter.state_dict(), tmp_path / "plain")
    options = [
        f"drafter.init={tmp_path}/plain",
        "trainable=head",
        "head=selector",
        "drafter.head.rank=8",
    ]
    options += ["drafter.head.top_k=16", "objective=dflash2", "optim.steps=1"]
    after = load_drafter(run_here(small(*options)) / "checkpoints" / "best")
    assert HeadConfig(**head_options(after.own)) == HeadConfig("selector", rank=8, top_k=16)
    assert all(
        torch.equal(weight, after.state_dict()[name])
        for name, weight in drafter.state_dict().items()
    )


@pytest.mark.parametrize(
    "options, word",
    [
        (["trainable=head"], "give drafter.init="),
        (["head=markov", "deepspeed=zero3"], "head=markov needs weights whole"),
        (["objective.marginal_weight=1"], "objective.marginal_weight=1.0 is for head=markov"),
        (["head=swiglu", "objective.marginal_weight=1"], "not for head=swiglu"),
        (["drafter=dart", "drafter.causal=true"], "drafter=dart has no such thing"),
        (["drafter=dart", "drafter.sliding_window=64"], "drafter=dart has no such thing"),
        (["drafter.sliding_window=7"], "give at least drafter.block_size=8"),
        (["trainable=everything"], "trainable=everything"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_loads(small, options, word):
    with pytest.raises(ValueError, match=word):
        small(*options)


def test_what_the_folder_says_is_refused_before_a_model_loads(small, shallow, tmp_path):
    target = load_target(str(shallow))
    for name, head in (("plain", HeadConfig()), ("gru", HeadConfig("gru", rank=8, hidden_size=8))):
        drafter = new_drafter(DrafterConfig(layers=1, head=head), target)
        save_drafter(drafter.config, drafter.state_dict(), tmp_path / name)

    def resolved(*options):
        config = small(*options)
        config.drafter = resolve_init(config.drafter, config.target)
        check_head_training(config)
        return config.drafter.head

    assert resolved(f"drafter.init={tmp_path}/gru") == HeadConfig("gru", rank=8, hidden_size=8)
    with pytest.raises(ValueError, match="has a conditional head already"):
        resolved(f"drafter.init={tmp_path}/gru", "head=markov")
    with pytest.raises(ValueError, match="the drafter has no conditional head"):
        resolved(f"drafter.init={tmp_path}/plain", "trainable=head")
    with pytest.raises(ValueError, match="head=gru needs weights whole"):
        resolved(f"drafter.init={tmp_path}/gru", "deepspeed=zero3")
