"""Conditional heads in a run: trained with the drafter or alone, saved, decoded, and refused with
incompatible options."""

import pytest
import torch

from infer import load_drafter, load_target
from infer.config import DrafterConfig, HeadConfig
from infer.drafters.build import create_drafter
from infer.drafters.heads.table import read_head_options
from infer.formats.checkpoint import save_drafter
from infer.formats.export import export_drafter
from train.config import check_conditional_head_options
from train.run.initial import resolve_drafter_options

GATED_HEAD_OPTIONS = [
    "head=markov",
    "drafter.head.kind=gated",
    "drafter.head.rank=8",
    "drafter.head.confidence_head=true",
]


def test_a_head_is_trained_with_the_drafter_and_then_alone(small, run_here, shallow, tmp_path):
    """Each run includes the self-check (train/selfcheck.py) and an evaluation.

    The second run starts from an export in another project's layout.
    """
    joint_run = run_here(
        small(
            *GATED_HEAD_OPTIONS,
            "objective=dspark",
            "drafter.sample_from_anchor=true",
            "optim.steps=2",
        )
    )
    first = load_drafter(joint_run / "checkpoints" / "best")
    assert HeadConfig(**read_head_options(first.family_config)) == HeadConfig(
        "markov", "gated", 8, confidence_head=True
    )
    changed = {name for name, weight in first.named_parameters() if weight.abs().sum() > 0}
    assert {
        "markov_head.markov_w2.weight",
        "confidence_head.proj.weight",
        "confidence_head.proj.bias",
    } <= changed
    export_drafter(first, "dspark", load_target(str(shallow)), tmp_path / "dspark")
    head_only_options = [
        "name=head-only",
        f"drafter.init={tmp_path}/dspark",
        "trainable=head",
        "objective.chunk_rows=7",
    ]
    head_only_options += ["drafter.sample_from_anchor=true", "optim.name=muon", "optim.steps=2"]
    after = load_drafter(run_here(small(*head_only_options)) / "checkpoints" / "best")
    for name, weight in first.state_dict().items():
        trained = name.startswith(("markov_head.", "confidence_head."))
        assert torch.equal(weight, after.state_dict()[name]) != trained, name


def test_darts_layer_takes_a_head(small, run_here):
    """Its output head is trained together with the conditional head."""
    options = [
        "drafter=dart",
        "head=markov",
        "drafter.head.rank=8",
        "drafter.block_size=5",
        "optim.steps=2",
    ]
    drafter = load_drafter(run_here(small(*options)) / "checkpoints" / "best")
    assert HeadConfig(**read_head_options(drafter.family_config)) == HeadConfig("markov", rank=8)
    assert drafter.family.name == "dart"
    assert drafter.markov_head.markov_w2.weight.abs().sum() > 0


def test_a_drafter_without_a_head_gets_one(small, run_here, shallow, tmp_path):
    drafter = create_drafter(DrafterConfig(layers=1), load_target(str(shallow)))
    drafter.init_weights(torch.Generator().manual_seed(2))
    save_drafter(drafter.config, drafter.state_dict(), tmp_path / "headless")
    options = [
        f"drafter.init={tmp_path}/headless",
        "trainable=head",
        "head=selector",
        "drafter.head.rank=8",
    ]
    options += ["drafter.head.top_k=16", "objective=dflash2", "optim.steps=1"]
    after = load_drafter(run_here(small(*options)) / "checkpoints" / "best")
    assert HeadConfig(**read_head_options(after.family_config)) == HeadConfig(
        "selector", rank=8, top_k=16
    )
    assert all(
        torch.equal(weight, after.state_dict()[name])
        for name, weight in drafter.state_dict().items()
    )


@pytest.mark.parametrize(
    "options, message",
    [
        (["trainable=head"], "with drafter.init="),
        (["head=markov", "deepspeed=zero3"], "head=markov does not support deepspeed.stage=3"),
        (["objective.marginal_weight=1"], "objective.marginal_weight=1.0 needs head=markov"),
        (["head=swiglu", "objective.marginal_weight=1"], "and head=swiglu is given"),
        (["drafter=dart", "drafter.causal=true"], "drafter=dart does not have this option"),
        (["drafter=dart", "drafter.sliding_window=64"], "drafter=dart does not have this option"),
        (["drafter.sliding_window=7"], "give at least drafter.block_size=8"),
        (["trainable=everything"], "trainable=everything"),
    ],
)
def test_invalid_options_are_refused_before_anything_is_loaded(small, options, message):
    with pytest.raises(ValueError, match=message):
        small(*options)


def test_options_that_contradict_the_folder_are_refused_before_a_model_is_loaded(
    small, shallow, tmp_path
):
    target = load_target(str(shallow))
    for name, head in (
        ("headless", HeadConfig()),
        ("gru", HeadConfig("gru", rank=8, hidden_size=8)),
    ):
        drafter = create_drafter(DrafterConfig(layers=1, head=head), target)
        save_drafter(drafter.config, drafter.state_dict(), tmp_path / name)

    def resolve_head(*options):
        config = small(*options)
        config.drafter = resolve_drafter_options(config.drafter, config.target)
        check_conditional_head_options(config)
        return config.drafter.head

    assert resolve_head(f"drafter.init={tmp_path}/gru") == HeadConfig("gru", rank=8, hidden_size=8)
    with pytest.raises(ValueError, match="already has a conditional head"):
        resolve_head(f"drafter.init={tmp_path}/gru", "head=markov")
    with pytest.raises(ValueError, match="the drafter has no conditional head"):
        resolve_head(f"drafter.init={tmp_path}/headless", "trainable=head")
    with pytest.raises(ValueError, match="head=gru does not support deepspeed.stage=3"):
        resolve_head(f"drafter.init={tmp_path}/gru", "deepspeed=zero3")
