"""The table of drafter families: its rows and the classes that they name agree, and options read it
without torch."""

import pytest
import torch

from infer.config import DrafterConfig
from infer.drafters.base import Drafter
from infer.drafters.families import FAMILIES, FORMATS
from train.config import TrainConfig


@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_and_its_class_agree(name):
    family = FAMILIES[name]
    drafter = family.load()
    assert issubclass(drafter, Drafter) and drafter.family is family and family.name == name
    assert drafter.writers.keys() == family.formats.keys() - {"gguf"} <= FORMATS.keys()


def test_options_are_checked_by_the_table():
    """Before torch is loaded: tests/test_conf.py."""
    with pytest.raises(ValueError, match=f"drafter.family=medusa: use {' or '.join(FAMILIES)}"):
        DrafterConfig(family="medusa").check()


def test_dart_has_one_layer():
    with pytest.raises(ValueError, match="drafter.layers=2: a DART drafter has 1 layer "):
        DrafterConfig(family="dart").check()


def test_dart_allows_only_its_zero_stages():
    config = TrainConfig(drafter=DrafterConfig(family="dart", layers=1))
    config.deepspeed.stage = 3
    with pytest.raises(
        ValueError,
        match="drafter=dart needs weights whole that deepspeed.stage=3 cuts up: use 0, 1, 2",
    ):
        config.check()
    config.drafter = DrafterConfig()
    config.check()


def test_a_drafter_with_broken_weights_can_be_tried(make_tiny):
    """Decoding reads a drafter's layers as they are, whatever they compute."""
    target, drafter = make_tiny()
    with torch.no_grad():
        for layer in drafter.layers:
            layer.self_attn.q_norm.weight.fill_(torch.nan)
    assert drafter.state(1, 20).decoder.layers
