"""Drafter folders: what is written is read back bit for bit, and what is wrong with a folder is named."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from infer import load_drafter, save_drafter
from infer.config import DrafterConfig
from infer.dflash import default_layer_ids, drafter_config


def test_round_trip_is_bit_equal(make_tiny, tmp_path):
    target, drafter = make_tiny(block_size=5)
    save_drafter(drafter, tmp_path)
    again = load_drafter(tmp_path)
    features, bonus = torch.randn(1, 6, 64), torch.tensor([3])
    outs = [d.draft(target, features, [6], bonus, d.state(1, 20)) for d in (drafter, again)]
    assert torch.equal(*outs)
    assert outs[0].shape == (1, 4, 97)
    assert not again.training
    assert not any(p.requires_grad for p in again.parameters())
    (tmp_path / "whole").mkdir()
    save_drafter(drafter, tmp_path / "whole" / "drafter")
    assert torch.equal(load_drafter(tmp_path / "whole").fc.weight, drafter.fc.weight)


def test_default_layers_are_the_published_ones():
    assert default_layer_ids(36, 5) == [1, 9, 17, 25, 33]
    assert default_layer_ids(10, 1) == [5]


def test_config_for_a_target_of_qwen3_4b_sizes():
    from transformers import Qwen3Config

    class Stub:
        config = Qwen3Config(
            hidden_size=2560,
            intermediate_size=9728,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=40960,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        )
        tokenizer = range(151669)

    config = drafter_config(DrafterConfig(layers=5, block_size=16), Stub())
    assert config.dflash_config == {
        "block_size": 16,
        "mask_token_id": 151669,
        "target_layer_ids": [1, 9, 17, 25, 33],
    }
    assert (config.block_size, config.num_target_layers, config.num_hidden_layers) == (16, 36, 5)
    for options, word in (
        ({"target_layer_ids": [1, 36]}, "layers 0 to 35"),
        ({"mask_token_id": 151936}, "0 to 151935"),
        ({"layers": 0}, "layers=0"),
        ({"block_size": 1}, "block_size=1"),
    ):
        with pytest.raises(ValueError, match=word):
            drafter_config(DrafterConfig(**options), Stub())
    Stub.tokenizer = range(151936)
    with pytest.raises(ValueError, match="mask_token_id"):
        drafter_config(DrafterConfig(), Stub())


def test_what_is_wrong_with_a_folder_is_named(make_tiny, tmp_path):
    _, drafter = make_tiny()
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        load_drafter(tmp_path)
    save_drafter(drafter, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    broken = {name: tensor for name, tensor in weights.items() if name != "norm.weight"}
    broken |= {"lm_head.weight": torch.zeros(2), "fc.weight": torch.zeros(3, 3)}
    save_file(broken, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing \['norm\.weight'\], unknown \['lm_head\.weight'\].*fc\.weight"):
        load_drafter(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="LlamaForCausalLM"):
        load_drafter(tmp_path)
