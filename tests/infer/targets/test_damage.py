"""Damaged targets and damaged folders of the cache: one sentence and nothing loads, or made
again."""

import errno
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from infer import load_drafter, load_target
from infer.targets import model_cache
from infer.targets.checks import check_finite
from infer.targets.model_cache import CACHE_MANIFEST_FILE, get_or_create_cached_folder, save_model

WEIGHTS_FILE = "model.safetensors"
OUTPUT_PROJECTION = "model.layers.1.self_attn.o_proj.weight"
DAMAGED_FILES = (
    *("weights", "shards", "index", "config.json", "config values"),
    *("generation_config", "tokenizer.json", "tokenizer_config", "chat template"),
)


@pytest.fixture(scope="module")
def program(load_program):
    return load_program("damaged_targets")


@pytest.fixture(scope="module")
def targets(program, tmp_path_factory) -> Path:
    """Folders with a small random target: "single", of one file, and "shards". Read only."""
    folder = tmp_path_factory.mktemp("targets")
    program.make_targets(folder)
    return folder


@pytest.fixture
def copy(targets, tmp_path) -> Path:
    """A copy of the target of one file, which a test may damage."""
    return Path(shutil.copytree(targets / "single", tmp_path / "copy"))


@pytest.mark.parametrize("kind", DAMAGED_FILES)
def test_a_damaged_folder_is_one_sentence_and_does_not_load(program, targets, tmp_path, kind):
    assert set(program.DAMAGE_CASES) == {*DAMAGED_FILES}
    bugs = {}
    for name, damage in program.DAMAGE_CASES[kind].items():
        folder = tmp_path / "damaged"
        shutil.copytree(targets / ("shards" if kind in program.IN_SHARDS else "single"), folder)
        damage(folder)
        bugs[name] = program.check_load(folder, dtype="float32")
        shutil.rmtree(folder)
    assert not {name: bug for name, bug in bugs.items() if bug is not None}


def rewrite(folder: Path, change) -> None:
    """Write the tensors that `change` makes of those of a folder."""
    tensors = load_file(folder / WEIGHTS_FILE)
    save_file(change(tensors), folder / WEIGHTS_FILE, metadata={"format": "pt"})


def test_wrong_tensors_are_named_in_one_error(copy):
    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors["model.norm.weight"] = torch.ones(64)
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(2000)
        return {
            name: tensor
            for name, tensor in tensors.items()
            if not name.startswith("model.layers.1.self_attn.")
        }

    rewrite(copy, change)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"intermediate_size": 8}))
    with pytest.raises(ValueError) as refusal:
        load_target(str(copy), "float32", "cpu")
    message = str(refusal.value)
    assert message.startswith(f"target.path={copy}: ")
    assert (
        "6 are missing: model.layers.1.self_attn.k_norm.weight, " in message
        and " and 3 more" in message
    )
    assert (
        "7 are of another shape: model.layers.0.mlp.down_proj.weight ((32, 48), not (32, 8))"
        in message
    )
    assert "1 is unknown to the model: model.layers.0.self_attn.q_proj.bias" in message


@pytest.mark.parametrize(
    "name",
    [
        "mtp.fc.weight",
        "model.mtp_layers.0.weight",
        "model.layers.2.eh_proj.weight",
        "model.visual.blocks.0.weight",
        "vision_tower.patch.weight",
        "multi_modal_projector.linear.bias",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
    ],
)
def test_parts_that_a_text_model_does_not_have_may_be_in_the_files(copy, name):
    rewrite(copy, lambda tensors: tensors | {name: torch.ones(3)})
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    for layers in (None, (0, 1)):
        assert load_target(str(copy), "float32", "cpu", only_layers=layers).model


def test_one_layer_is_as_damaged_as_a_whole_model(program, copy, targets):
    """`only_layers` reads what it is asked for, and refuses that alone."""
    rewrite(
        copy,
        lambda tensors: {
            name: tensor for name, tensor in tensors.items() if name != OUTPUT_PROJECTION
        },
    )
    assert load_target(str(copy), "float32", "cpu", only_layers=(0,)).model
    assert "was loaded" not in (program.check_load(copy, dtype="float32", only_layers=(1,)) or "")
    shutil.copy(targets / "single" / WEIGHTS_FILE, copy)
    rewrite(
        copy,
        lambda tensors: tensors | {OUTPUT_PROJECTION: tensors[OUTPUT_PROJECTION].fill_(torch.inf)},
    )
    assert load_target(str(copy), "float32", "cpu", only_layers=(0,)).model
    assert "was loaded" not in (program.check_load(copy, dtype="float32", only_layers=(1,)) or "")


def test_experts_that_are_stored_one_by_one_are_the_models_own(copy):
    sizes = {
        "vocab_size": 512,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "head_dim": 8,
        "num_experts": 4,
    }
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 16,
        "num_experts_per_tok": 2,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes, **heads))
    model.save_pretrained(copy)
    assert any(".experts.3.up_proj" in name for name in load_file(copy / WEIGHTS_FILE))
    loaded = load_target(str(copy), "float32", "cpu").model
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True)
    )
    assert load_target(
        str(copy), "float32", "cpu", only_layers=(0,)
    ).model  # and such a layer is left out
    missing = "model.layers.1.mlp.experts.3.up_proj.weight"
    rewrite(
        copy, lambda tensors: {name: tensor for name, tensor in tensors.items() if name != missing}
    )
    with pytest.raises(ValueError, match=r"target\.path="):
        load_target(str(copy), "float32", "cpu")


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_found_in_every_dtype(dtype, value):
    tensor = torch.full((7, 300), 60_000.0).to(
        dtype
    )  # of float16 and bfloat16 the sum alone overflows
    check_finite("here", [("weight", tensor), ("ids", torch.tensor([1]))])
    if dtype == torch.float8_e4m3fn:
        value = float("nan")  # which is all that it has
    tensor[3, 7] = torch.tensor(value).to(dtype)
    with pytest.raises(
        ValueError, match="^here: 1 of the 2,100 values of weight are NaN or infinite"
    ):
        check_finite("here", [("weight", tensor)])


def test_a_drafter_that_is_not_finite_is_refused(make_tiny, tmp_path):
    from infer import save_drafter

    _, drafter = make_tiny()
    weights = drafter.state_dict()
    save_drafter(drafter.config, weights, tmp_path)
    load_drafter(tmp_path)
    weights["fc.weight"][0, 0] = torch.nan
    save_drafter(drafter.config, weights, tmp_path)
    with pytest.raises(ValueError, match="1 of the .* values of fc.weight are NaN or infinite"):
        load_drafter(tmp_path)


# Folders of the cache.


def write_source(source: str, folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text('{"a": 1}')
    (folder / WEIGHTS_FILE).write_bytes(source.encode() * 100)


def create_folder(folder: Path, source: str = "weights") -> bool:
    """Ask for a folder of the cache; return whether it was made for that."""
    opened = []
    get_or_create_cached_folder(
        folder, "making it", lambda: opened.append(source) or source, write_source
    )
    return bool(opened)


FOLDER_DAMAGES = {
    "weights cut": lambda folder: (folder / WEIGHTS_FILE).write_bytes(b"weights" * 99),
    "weights emptied": lambda folder: (folder / WEIGHTS_FILE).write_bytes(b""),
    "weights changed": lambda folder: (folder / WEIGHTS_FILE).write_bytes(
        b"weightz" + b"weights" * 99
    ),
    "weights gone": lambda folder: (folder / WEIGHTS_FILE).unlink(),
    "config changed": lambda folder: (folder / "config.json").write_text('{"a": 2}'),
    "file more": lambda folder: (folder / "adapter.json").write_text("{}"),
    "no manifest": lambda folder: (folder / CACHE_MANIFEST_FILE).unlink(),
    "manifest cut": lambda folder: (folder / CACHE_MANIFEST_FILE).write_text('{"files": {'),
    "manifest of another kind": lambda folder: (folder / CACHE_MANIFEST_FILE).write_text(
        '{"files": [1]}'
    ),
    "a link to nothing": lambda folder: [
        (folder / WEIGHTS_FILE).unlink(),
        (folder / WEIGHTS_FILE).symlink_to("nothing"),
    ],
}


@pytest.mark.parametrize("name", FOLDER_DAMAGES)
def test_a_damaged_folder_of_the_cache_is_made_again_which_one_line_says(tmp_path, capsys, name):
    folder = tmp_path / "cache" / "model"
    assert create_folder(folder) and not create_folder(folder)
    assert capsys.readouterr().err == "making it\n"
    FOLDER_DAMAGES[name](folder)
    assert create_folder(folder) and not create_folder(folder)
    message = capsys.readouterr().err
    assert (
        message.startswith("making it, again: ")
        and message.count("\n") == 1
        and "the existing folder" in message
    )
    assert (folder / WEIGHTS_FILE).read_bytes() == b"weights" * 100
    assert {file.name for file in folder.parent.iterdir()} == {"model", ".model.lock"}


def test_a_large_file_is_compared_in_many_places(tmp_path, monkeypatch):
    monkeypatch.setattr(model_cache, "CHECKSUM_BLOCK_BYTES", 16)
    monkeypatch.setattr(model_cache, "MAX_CHECKSUM_BLOCKS", 4)
    file = tmp_path / "file"
    checksums = set()
    for position in (None, 0, 15, 250, 510, 760):
        content = bytearray(1000)
        if position is not None:
            content[position] = 1
        file.write_bytes(content)
        checksums.add(model_cache.sampled_file_checksum(file))
    assert len(checksums) == 6


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        ),
        Exception("No space left on device (os error 28)"),  # of tokenizers
    ],
)
def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path, error):
    class Model:
        def save_pretrained(self, folder: Path) -> None:
            write_source("half", folder)
            raise error

    folder = tmp_path / "cache" / "model"
    with pytest.raises(
        OSError, match="could not be written: .*No space left on device.*; free some"
    ) as failure:
        get_or_create_cached_folder(
            folder, "making it", lambda: None, lambda _, fresh: save_model(Model(), None, fresh)
        )
    assert str(folder) in str(failure.value) and not isinstance(failure.value, FileNotFoundError)
    assert [file.name for file in folder.parent.iterdir()] == [".model.lock"]
