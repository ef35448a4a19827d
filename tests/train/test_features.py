"""Stored features give the same losses as the target, and every damage is reported."""

import shutil
from dataclasses import replace

import pytest
import torch

from data.packing import load_packed_dataset, read_batch
from data.rows import DataConfig
from infer import load_target
from infer.config import DrafterConfig
from infer.drafters.build import create_drafter
from infer.drafters.dflash.model import DFlash
from train.batches import draw_blocks
from train.config import FeaturesConfig, TrainConfig
from train.features import (
    APPROXIMATE_FEATURE_SHARD_BYTES,
    StoredFeatures,
    dequantise_features,
    feature_dependencies,
    quantise_vectors,
    write_features,
)
from train.seeding import seeded_generator
from train.step import compute_block_loss

FEATURE_LAYERS = (1, 2)
FEATURE_DATA = DataConfig(length=64, max_examples=12)


@pytest.fixture(scope="module")
def bfloat16_target(shallow):
    """The shallow target in bfloat16."""
    return load_target(str(shallow), dtype="bfloat16", device="cpu")


@pytest.fixture(scope="module")
def dataset(bfloat16_target):
    return load_packed_dataset(
        FEATURE_DATA, bfloat16_target.tokenizer, bfloat16_target.tokenizer_digest
    ).select(range(12))


def make_config(out, **options) -> FeaturesConfig:
    return FeaturesConfig(out=str(out), data=replace(FEATURE_DATA), **options)


def ignore_progress(num_stored: int, total: int) -> None:
    pass


@pytest.fixture(scope="module")
def stored_folder(bfloat16_target, dataset, tmp_path_factory):
    """The folder of twelve packed sequences in three shards."""
    folder = tmp_path_factory.mktemp("features") / "bf16"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "train.features.count_stored_bytes", lambda *sizes: APPROXIMATE_FEATURE_SHARD_BYTES // 4
        )
        return write_features(
            make_config(folder), bfloat16_target, FEATURE_LAYERS, dataset, ignore_progress
        )


def test_bfloat16_features_give_the_bits_of_online_training(
    bfloat16_target, dataset, stored_folder
):
    stored = StoredFeatures(stored_folder)
    assert len(stored) == len(dataset) == 12
    assert len(stored.manifest["shards"]) == 3
    drafter = create_drafter(
        DrafterConfig(layers=1, target_layer_ids=list(FEATURE_LAYERS)), bfloat16_target
    )
    drafter.init_weights(seeded_generator(0))
    options = TrainConfig(anchors_per_sequence=6)
    for draw in (0, 5, 17):
        results = []
        for source in (dataset, stored):
            columns = read_batch(source, draw, 1, seed=0)
            drafter.zero_grad()
            result = compute_block_loss(
                drafter, bfloat16_target, columns, draw_blocks(columns, options, draw), options
            )
            result.loss.backward()
            gradients = (parameter.grad.clone() for parameter in drafter.parameters())
            results.append((result.loss.detach(), result.agrees, *gradients))
        assert all(torch.equal(online, cached) for online, cached in zip(*results, strict=True))
        assert results[0][0] > 0


def test_a_run_reads_only_its_feature_layers(bfloat16_target, stored_folder):
    all_layers = StoredFeatures(stored_folder)
    one_layer = StoredFeatures(stored_folder)
    layers = FEATURE_LAYERS[1:]
    one_layer.check_dependencies(
        feature_dependencies(make_config("unused"), bfloat16_target, layers)
    )
    one_layer.select_layers(layers)
    assert torch.equal(one_layer[[3]]["context"], all_layers[[3]]["context"][:, :, 1:])


def test_int8_features_are_close(bfloat16_target, dataset, tmp_path):
    out = write_features(
        make_config(tmp_path / "i8", store_dtype="int8"),
        bfloat16_target,
        FEATURE_LAYERS,
        dataset,
        ignore_progress,
    )
    columns = StoredFeatures(out)[[3, 4]]
    exact = bfloat16_target.compute_packed_features(
        columns["ids"], columns["positions"], columns["documents"], FEATURE_LAYERS
    )
    rounded = dequantise_features(columns, torch.bfloat16)
    for expected, actual in (
        (exact.layer_features, rounded.layer_features),
        (exact.last_hidden_states, rounded.last_hidden_states),
    ):
        assert expected.shape == actual.shape
        assert (expected - actual).float().norm() < 0.03 * expected.float().norm()
    assert quantise_vectors(torch.zeros(2, 4))[0].eq(0).all()


def test_a_drafter_starts_the_same_from_a_target_with_few_layers(bfloat16_target, shallow):
    layers = DFlash.choose_warm_start_layers(FEATURE_LAYERS, 1, bfloat16_target.config)
    partial_target = load_target(str(shallow), dtype="bfloat16", device="cpu", only_layers=layers)
    loaded = [not next(layer.parameters()).is_meta for layer in partial_target.decoder.layers]
    assert loaded.count(True) == 1
    options = DrafterConfig(layers=1, target_layer_ids=list(FEATURE_LAYERS))
    drafter = create_drafter(options, bfloat16_target)
    partial_drafter = create_drafter(options, partial_target)
    assert drafter.warm_start(bfloat16_target)
    assert partial_drafter.warm_start(partial_target)
    partial_state = partial_drafter.state_dict()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, partial_state[name])


def test_a_stopped_run_is_continued(bfloat16_target, dataset, stored_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "train.features.count_stored_bytes", lambda *sizes: APPROXIMATE_FEATURE_SHARD_BYTES // 4
    )

    def stop(num_stored: int, total: int) -> None:
        if num_stored == 8:
            raise KeyboardInterrupt

    options = make_config(tmp_path / "again")
    with pytest.raises(KeyboardInterrupt):
        write_features(options, bfloat16_target, FEATURE_LAYERS, dataset, stop)
    with pytest.raises(ValueError, match="has the hidden states of only some packed sequences"):
        StoredFeatures(options.out)
    (tmp_path / "again" / ".shard-00002.safetensors").write_bytes(b"half a shard")
    reported = []
    write_features(
        options,
        bfloat16_target,
        FEATURE_LAYERS,
        dataset,
        lambda num_stored, total: reported.append(num_stored),
    )
    assert reported == [12]
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == sorted(
        p.name for p in stored_folder.iterdir()
    )
    for path in stored_folder.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()
    with pytest.raises(ValueError, match="another layers"):
        write_features(options, bfloat16_target, (1, 3), dataset, ignore_progress)


def test_every_damage_is_reported(stored_folder, tmp_path):
    """A flipped bit anywhere in a shard (header, every column), a lost byte, a lost file."""
    folder = tmp_path / "copy"
    shutil.copytree(stored_folder, folder)
    file = folder / "shard-00001.safetensors"
    content = file.read_bytes()
    offsets = [
        0,
        3,
        9,
        40,
        *torch.randint(len(content), (120,), generator=seeded_generator(3)).tolist(),
        len(content) - 1,
    ]
    for offset in offsets:
        damaged = bytearray(content)
        damaged[offset] ^= 1 << offset % 8
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"shard-00001\.safetensors is .*altered"):
            stored = StoredFeatures(folder)
            stored[list(range(12))]
    file.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=r"shard-00001\.safetensors is truncated"):
        StoredFeatures(folder)
    file.unlink()
    with pytest.raises(ValueError, match=r"shard-00001\.safetensors is missing"):
        StoredFeatures(folder)
    text = (folder / "manifest.json").read_text()
    for original, replacement in (
        ('"rows": 12', '"rows": 8'),
        ("checksums", "checksuns"),
        ('"store"', '"stone"'),
        ("}", ""),
    ):
        (folder / "manifest.json").write_text(text.replace(original, replacement, 1))
        with pytest.raises(ValueError, match="manifest.json is damaged"):
            StoredFeatures(folder)


def test_features_with_other_dependencies_are_refused(bfloat16_target, stored_folder):
    options = TrainConfig(data=replace(FEATURE_DATA))
    stored = StoredFeatures(stored_folder)
    stored.check_dependencies(feature_dependencies(options, bfloat16_target, FEATURE_LAYERS))
    with pytest.raises(ValueError, match="another layers"):
        stored.check_dependencies(feature_dependencies(options, bfloat16_target, (0, 2)))
    options.data.max_invalid_fraction = 0.5  # changes no packed sequence
    stored.check_dependencies(feature_dependencies(options, bfloat16_target, FEATURE_LAYERS))
    options.data.length = 32
    with pytest.raises(ValueError, match="another data"):
        stored.check_dependencies(feature_dependencies(options, bfloat16_target, FEATURE_LAYERS))
    options.target.quantization = "int8"
    with pytest.raises(ValueError, match=r"another target\.quantization"):
        stored.check_dependencies(feature_dependencies(options, bfloat16_target, FEATURE_LAYERS))
