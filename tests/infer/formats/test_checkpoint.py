"""Drafter folders: what is written is read back bit for bit, and what is wrong with a folder is
named."""

import shutil

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from infer import load_drafter, load_target, save_drafter
from infer.attention.masks import build_training_mask
from infer.config import DrafterConfig
from infer.drafters.build import build_drafter_config, choose_mask_token
from infer.drafters.dflash.model import DFlash


def test_default_layers_are_the_published_ones():
    assert DFlash.default_layer_ids(36, 5) == [1, 9, 17, 25, 33]
    assert DFlash.default_layer_ids(24, 2) == [5, 13, 21]
    assert DFlash.default_layer_ids(10, 1) == [5]


def test_config_for_a_target_of_qwen3_4b_sizes():
    from transformers import Qwen3Config

    class Tokens:
        mask_token_id = None

        def __len__(self) -> int:
            return 151669

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
        tokenizer = Tokens()
        eos_token_ids = frozenset()

    config = build_drafter_config(DrafterConfig(layers=5, block_size=16), Stub())
    assert config.dflash_config == {
        "block_size": 16,
        "mask_token_id": 151669,
        "target_layer_ids": [1, 9, 17, 25, 33],
    }
    assert (config.block_size, config.num_target_layers, config.num_hidden_layers) == (16, 36, 5)
    for options, word in (
        ({"target_layer_ids": [1, 36]}, "use layers of the target, 0 to 35"),
        ({"mask_token_id": 151936}, "0 to 151935"),
        ({"layers": 0}, "layers=0"),
        ({"block_size": 1}, "block_size=1"),
    ):
        with pytest.raises(ValueError, match=word):
            build_drafter_config(DrafterConfig(**options), Stub())


SPECIAL_TOKENS = ["<repo_name>", "<file_sep>", "<empty_output>"]


@pytest.mark.parametrize(
    "special, names, padding, used, expected",
    [
        (["<s>"], {}, 3, [], "beyond"),  # Qwen, gpt-oss, LFM2, OLMo: the vocabulary is padded
        (["<mask>"], {"mask_token": "<mask>"}, 3, [], "<mask>"),
        (
            ["<|reserved_special_token_1|>", "<|reserved_special_token_0|>"],
            {},
            0,
            [],
            "<|reserved_special_token_1|>",
        ),
        (["<pad>", "<unused0>", "<unused1>"], {"pad_token": "<pad>"}, 0, [], "<unused0>"),  # Gemma
        (["<s>", "[INST]", "<SPECIAL_20>", "<SPECIAL_21>"], {}, 0, [], "<SPECIAL_20>"),  # Nemotron
        (
            ["[BOS]", "<|reserved_token_163601|>"],
            {"bos_token": "[BOS]"},
            0,
            [],
            "<|reserved_token_163601|>",
        ),  # Kimi
        (["<pad>"], {"pad_token": "<pad>"}, 0, [], "<pad>"),  # which ends nothing
        (SPECIAL_TOKENS, {"pad_token": "<end>"}, 0, [], "<empty_output>"),  # SmolLM2
        (SPECIAL_TOKENS, {}, 0, ["<empty_output>"], "<file_sep>"),
        (
            ["<unk>", *SPECIAL_TOKENS[:1]],
            {"unk_token": "<unk>", "chat_template": "x <repo_name> y"},
            0,
            [],
            None,
        ),
        ([], {}, 0, [], None),
        ([], {}, 0, ["d"], "c"),  # only the data say which one is free
        ([], {}, 0, list("abcd"), ValueError),
    ],
)
def test_the_mask_token_is_one_that_the_data_do_not_use(special, names, padding, used, expected):
    vocabulary = {token: i for i, token in enumerate([*"abcd", "<end>"])}
    plain = Tokenizer(models.BPE(vocabulary, []))
    plain.add_special_tokens(["<end>", *special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>", **names)
    size = len(tokenizer) + padding
    ends = {vocabulary["<end>"]}
    used_ids = [tokenizer.convert_tokens_to_ids(token) for token in used]
    if expected in (None, ValueError):
        with pytest.raises(ValueError, match="Set drafter.mask_token_id"):
            choose_mask_token(tokenizer, size, ends, (lambda: used_ids) if used else None)
        return
    mask = choose_mask_token(tokenizer, size, ends, (lambda: used_ids) if used else None)
    assert (
        tokenizer.convert_ids_to_tokens(mask) if mask < len(tokenizer) else "beyond"
    ) == expected


@pytest.mark.parametrize("fusion", [None, True])
def test_warm_start_makes_the_first_layer_the_targets_own(make_tiny, fusion):
    """A drafter of one layer, tapped below the target's last one and fed that layer's inputs in
    blocks of one token, then is the target's last layer: its logits are the target's."""
    target, drafter = make_tiny(depth=4, layers=1, target_layer_ids=[2], layer_fusion=fusion)
    assert drafter.warm_start(target)
    ids = torch.randint(97, (1, 20))
    positions = torch.arange(20)[None]
    with torch.no_grad():
        out = target.model(ids, output_hidden_states=True)
        mask = build_training_mask(positions, torch.zeros_like(ids), block_size=1)
        features = out.hidden_states[3]
        hidden = drafter(features, positions, features, positions, mask)
        assert torch.allclose(target.compute_logits(hidden), out.logits, atol=1e-4)


@pytest.mark.parametrize("anchor", [None, True])
@pytest.mark.parametrize("block_size", [2, 3, 5, 6, 8])
def test_a_drafter_with_convolutions_starts_warm_at_every_block_size(make_tiny, block_size, anchor):
    options = {"target_layer_ids": [1], "conv_kernel_size": 2, "sample_from_anchor": anchor}
    target, drafter = make_tiny(depth=4, layers=1, block_size=block_size, **options)
    drafter.initialize(target, torch.Generator().manual_seed(0), warm_start=True)
    assert torch.equal(
        drafter.layers[0].self_attn.v_proj.weight, target.decoder.layers[2].self_attn.v_proj.weight
    )


def test_a_runs_folder_is_its_best_checkpoint(make_tiny, tmp_path):
    from infer.utils.checkpoint_run import read_run_config

    (tmp_path / "config.json").write_text('{"target": 1}')
    with pytest.raises(
        FileNotFoundError,
        match="safetensors is missing.*no subfolder drafter or checkpoints/best/drafter",
    ):
        load_drafter(tmp_path)
    best, (_, drafter) = tmp_path / "checkpoints" / "best", make_tiny()
    save_drafter(drafter.config, drafter.state_dict(), best / "drafter")
    assert load_drafter(tmp_path).block_size == load_drafter(best).block_size == drafter.block_size
    assert read_run_config(str(tmp_path)) == read_run_config(str(best)) == {"target": 1}


def test_a_target_that_is_a_file_or_lacks_its_config_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="this folder contains no config.json"):
        load_target(str(tmp_path))
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(
        ValueError, match="model.safetensors is a file; give the model's folder or a GGUF file"
    ):
        load_target(str(file))


def test_a_broken_tokenizer_is_not_called_missing(repo, tmp_path):
    for file in (repo / "data" / "embedded").glob("*.json"):
        shutil.copy(file, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{broken")
    with pytest.raises(ValueError, match="property name"):
        load_target(str(tmp_path))
    with pytest.raises(FileNotFoundError, match="neither as a local folder"):
        load_target(str(tmp_path / "nothing"))
