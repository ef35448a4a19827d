"""The table of drafter families: its entries agree with the classes that they name, and options are
checked against it."""

import pytest
import torch

from infer.config import DrafterConfig
from infer.drafters.base import Drafter
from infer.drafters.families import DRAFTER_FAMILIES, EXPORT_FORMATS
from train.config import TrainConfig


@pytest.mark.parametrize("name", DRAFTER_FAMILIES)
def test_an_entry_and_its_class_agree(name):
    family = DRAFTER_FAMILIES[name]
    drafter_class = family.load()
    assert issubclass(drafter_class, Drafter)
    assert drafter_class.family is family
    assert family.name == name
    # The gguf format is written in another format, for llama.cpp's converter.
    assert drafter_class.export_writers.keys() == family.formats.keys() - {"gguf"}
    assert drafter_class.export_writers.keys() <= EXPORT_FORMATS.keys()


def test_unknown_families_are_refused():
    """tests/test_conf.py checks that this happens before torch is imported."""
    allowed = " or ".join(DRAFTER_FAMILIES)
    with pytest.raises(ValueError, match=f"drafter.family=medusa: use {allowed}"):
        DrafterConfig(family="medusa").check()


def test_dart_has_one_layer():
    with pytest.raises(ValueError, match="drafter.layers=2: a DART drafter has 1 layer;"):
        DrafterConfig(family="dart").check()


def test_dart_allows_only_its_zero_stages():
    config = TrainConfig(drafter=DrafterConfig(family="dart", layers=1))
    config.deepspeed.stage = 3
    message = "which drafter=dart does not support; allowed values of deepspeed.stage: 0, 1, 2"
    with pytest.raises(ValueError, match=message):
        config.check()
    config.drafter = DrafterConfig()
    config.check()


def test_a_drafter_with_weights_that_are_not_finite_can_be_decoded_with(make_tiny):
    """Reading a drafter's layers for decoding does not run them."""
    _, drafter = make_tiny()
    with torch.no_grad():
        for layer in drafter.layers:
            layer.self_attn.q_norm.weight.fill_(torch.nan)
    assert drafter.allocate_state(1, 20).decoder.layers
