"""A drafter's folder holds digests of its weights and its config: whatever is altered is named."""

import json
import random
import warnings

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from infer import load_drafter, save_drafter


@pytest.fixture
def folder(make_tiny, tmp_path):
    _, drafter = make_tiny()
    save_drafter(
        drafter.config,
        {n: t.bfloat16() for n, t in drafter.state_dict().items()},
        tmp_path / "drafter",
    )
    return tmp_path / "drafter"


def test_every_flipped_bit_is_named_or_changes_nothing(folder):
    """Also one in a weight, which other readers of the format do not notice."""
    generator = random.Random(0)
    expected = load_drafter(folder)
    named_count = 0
    for number in range(120):
        file = folder / ("config.json" if number % 3 == 0 else "model.safetensors")
        content = file.read_bytes()
        position = generator.randrange(1500 if number % 2 else len(content)) % len(content)
        file.write_bytes(
            content[:position]
            + bytes([content[position] ^ 1 << generator.randrange(8)])
            + content[position + 1 :]
        )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                loaded = load_drafter(folder)
        except (ValueError, FileNotFoundError, UserWarning) as error:
            assert str(folder) in str(error) or file.name in str(error)
            named_count += 1
        else:  # a space in config.json, or a letter in the name of a digest
            assert loaded.config.to_dict() == expected.config.to_dict()
            assert all(
                torch.equal(*pair)
                for pair in zip(loaded.parameters(), expected.parameters(), strict=True)
            )
        file.write_bytes(content)
    assert named_count > 100


def test_a_changed_config_is_named_and_a_folder_without_digests_is_accepted(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))  # laid out in another way
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_drafter(folder)
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    with pytest.warns(UserWarning, match=r"config\.json was changed after the weights were saved"):
        assert load_drafter(folder).config.rms_norm_eps == 1e-5
    save_file(
        load_file(folder / "model.safetensors"),
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    load_drafter(folder)  # without digests there is nothing to compare
    with safe_open(folder / "model.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


@pytest.mark.parametrize(
    "key, value", [("num_hidden_layers", 10**9), ("block_size", 10**30), ("vocab_size", 2**62)]
)
def test_sizes_too_large_to_be_true_cost_nothing(folder, key, value):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(ValueError, match=f"{key} exceeds the limit of"):
        load_drafter(folder)
