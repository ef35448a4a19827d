"""Stored features: the same losses as online, nothing else in memory, every damage named."""

import shutil
from dataclasses import replace

import pytest
import torch

from data.packing import batch, packed_rows
from data.rows import DataConfig
from infer import load_target
from infer.config import DrafterConfig
from infer.drafters.base import new_drafter
from infer.drafters.dflash.model import DFlash
from train.batches import draw_blocks, seeded
from train.config import FeaturesConfig, TrainConfig
from train.features import (
    SHARD,
    StoredRows,
    dependencies,
    quantise,
    stored_features,
    write_features,
)
from train.step import block_loss

LAYERS = (1, 2)
DATA = DataConfig(length=64, max_examples=12)


@pytest.fixture(scope="module")
def half(shallow):
    """The shallow target in bfloat16."""
    return load_target(str(shallow), dtype="bfloat16", device="cpu")


@pytest.fixture(scope="module")
def dataset(half):
    return packed_rows(DATA, half.tokenizer, half.tokenizer_digest).select(range(12))


def config(out, **options) -> FeaturesConfig:
    return FeaturesConfig(out=str(out), data=replace(DATA), **options)


@pytest.fixture(scope="module")
def stored(half, dataset, tmp_path_factory):
    """Twelve rows in three shards."""
    folder = tmp_path_factory.mktemp("features") / "bf16"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.features.row_bytes", lambda *sizes: SHARD // 4)
        return write_features(config(folder), half, LAYERS, dataset, lambda done, total: None)


def test_bfloat16_features_give_the_bits_of_online_training(half, dataset, stored):
    rows = StoredRows(stored)
    assert len(rows) == len(dataset) == 12
    assert len(rows.manifest["shards"]) == 3
    drafter = new_drafter(DrafterConfig(layers=1, target_layer_ids=list(LAYERS)), half)
    drafter.init_weights(seeded(0))
    options = TrainConfig(anchors_per_sequence=6)
    for draw in (0, 5, 17):
        results = []
        for source in (dataset, rows):
            columns = batch(source, draw, 1, seed=0)
            drafter.zero_grad()
            result = block_loss(
                drafter, half, columns, draw_blocks(columns, options, draw), options
            )
            result.loss.backward()
            gradients = (parameter.grad.clone() for parameter in drafter.parameters())
            results.append((result.loss.detach(), result.agree, *gradients))
        assert all(torch.equal(online, cached) for online, cached in zip(*results, strict=True))
        assert results[0][0] > 0


def test_a_run_takes_the_layers_that_it_taps(half, stored):
    whole = StoredRows(stored)
    part = StoredRows(stored)
    part.check(dependencies(config("unused"), half, LAYERS[1:]))
    assert torch.equal(part[[3]]["context"], whole[[3]]["context"][:, :, 1:])


def test_eight_bits_are_close(half, dataset, tmp_path):
    out = write_features(
        config(tmp_path / "i8", store_dtype="int8"), half, LAYERS, dataset, lambda done, total: None
    )
    columns = StoredRows(out)[[3, 4]]
    exact = half.packed_features(columns["ids"], columns["positions"], columns["documents"], LAYERS)
    near = stored_features(columns, torch.bfloat16)
    for a, b in ((exact.context, near.context), (exact.last, near.last)):
        assert a.shape == b.shape
        assert (a - b).float().norm() < 0.03 * a.float().norm()
    assert quantise(torch.zeros(2, 4))[0].eq(0).all()


def test_a_drafter_starts_alike_from_a_target_of_few_layers(half, shallow):
    layers = DFlash.warm_layers(LAYERS, 1, half.config)
    part = load_target(str(shallow), dtype="bfloat16", device="cpu", only_layers=layers)
    assert [next(layer.parameters()).is_meta for layer in part.body.layers].count(False) == 1
    options = DrafterConfig(layers=1, target_layer_ids=list(LAYERS))
    drafters = [new_drafter(options, target) for target in (half, part)]
    assert all(d.warm_start(target) for d, target in zip(drafters, (half, part), strict=True))
    assert all(
        torch.equal(a, b) for a, b in zip(*(d.state_dict().values() for d in drafters), strict=True)
    )


def test_a_stopped_writer_goes_on(half, dataset, stored, tmp_path, monkeypatch):
    monkeypatch.setattr("train.features.row_bytes", lambda *sizes: SHARD // 4)

    def stop(done: int, total: int) -> None:
        if done == 8:
            raise KeyboardInterrupt

    options = config(tmp_path / "again")
    with pytest.raises(KeyboardInterrupt):
        write_features(options, half, LAYERS, dataset, stop)
    with pytest.raises(ValueError, match="not finished"):
        StoredRows(options.out)
    (tmp_path / "again" / ".shard-00002.safetensors").write_bytes(b"half a shard")
    seen = []
    write_features(options, half, LAYERS, dataset, lambda done, total: seen.append(done))
    assert seen == [12]
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == sorted(
        p.name for p in stored.iterdir()
    )
    for path in stored.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()
    with pytest.raises(ValueError, match="another layers"):
        write_features(options, half, (1, 3), dataset, lambda done, total: None)


def test_every_damage_is_named(stored, tmp_path):
    """A flipped bit anywhere in a shard (header, every column), a lost byte, a lost file."""
    folder = tmp_path / "copy"
    shutil.copytree(stored, folder)
    file = folder / "shard-00001.safetensors"
    good = file.read_bytes()
    places = [
        0,
        3,
        9,
        40,
        *torch.randint(len(good), (120,), generator=seeded(3)).tolist(),
        len(good) - 1,
    ]
    for place in places:
        bad = bytearray(good)
        bad[place] ^= 1 << place % 8
        file.write_bytes(bad)
        with pytest.raises(ValueError, match=r"shard-00001\.safetensors is .*altered"):
            rows = StoredRows(folder)
            rows[list(range(12))]
    file.write_bytes(good[:-1])
    with pytest.raises(ValueError, match=r"shard-00001\.safetensors is truncated"):
        StoredRows(folder)
    file.unlink()
    with pytest.raises(ValueError, match=r"shard-00001\.safetensors is missing"):
        StoredRows(folder)
    text = (folder / "manifest.json").read_text()
    for was, now in (
        ('"rows": 12', '"rows": 8'),
        ("checksums", "checksuns"),
        ('"store"', '"stone"'),
        ("}", ""),
    ):
        (folder / "manifest.json").write_text(text.replace(was, now, 1))
        with pytest.raises(ValueError, match="manifest.json is damaged"):
            StoredRows(folder)


def test_features_of_something_else_are_refused(half, stored):
    options = TrainConfig(data=replace(DATA))
    rows = StoredRows(stored)
    rows.check(dependencies(options, half, LAYERS))
    with pytest.raises(ValueError, match="another layers"):
        rows.check(dependencies(options, half, (0, 2)))
    options.data.max_invalid_fraction = 0.5  # decides no row
    rows.check(dependencies(options, half, LAYERS))
    options.data.length = 32
    with pytest.raises(ValueError, match="another data"):
        rows.check(dependencies(options, half, LAYERS))
    options.target.quantization = "int8"
    with pytest.raises(ValueError, match=r"another target\.quantization"):
        rows.check(dependencies(options, half, LAYERS))
