"""Stored features: the target's hidden states of the training rows, computed once, so that training
needs no target.

    <out>/manifest.json   what was stored (target, tokenizer, layers, data), and every shard with its
                          rows' checksums
    <out>/shard-00000.safetensors
        ids, positions, documents, loss   (n, T) the packed rows
        context (n, T, K, D), last (n, T, D)   bfloat16, or int8 with context_scale (n, T, K) and
                                               last_scale (n, T)

n rows, T packed length, K tapped layers, D hidden size. A shard is written aside, then renamed,
then
listed: a run that was stopped goes on after the last listed one.

The manifest carries its own SHA-256; a shard's size is compared when the folder is opened, and
every row with its CRC-32 whenever it is read, about a second a gigabyte, in the thread that reads
ahead.
"""

import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from data.packing import prepare_rows, refuse_no_rows
from data.rows import DataConfig
from infer.targets.identity import weights_digest
from infer.targets.target import Features, Target
from infer.utils.errors import disk, going_on
from infer.utils.files import (
    atomic_write,
    json_digest,
    refuse_other_settings,
    replacing,
    save_readable,
)
from infer.utils.redact import redact
from infer.utils.renamed_options import translate_saved_config
from train.config import FeaturesConfig, TrainConfig

MANIFEST = "manifest.json"
NO_INFLUENCE = ("data.max_invalid_fraction",)  # options that change no row
SHARD = 512 * 10**6  # bytes, about
COLUMNS = {
    "ids": torch.int32,
    "positions": torch.int32,
    "documents": torch.int32,
    "loss": torch.bool,
}


def quantise(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors (..., D) as int8 and the scale of each, (...,) float32: the largest entry becomes
    127."""
    scale = states.abs().amax(-1).float().clamp(min=1e-12) / 127
    return (states.float() / scale[..., None]).round_().to(torch.int8), scale


def stored_features(rows: dict[str, torch.Tensor], dtype: torch.dtype) -> Features:
    """Return the features of a batch of stored rows: context (B, T, K*D), last (B, T, D), in
    `dtype`."""

    def whole(name: str) -> torch.Tensor:
        states = rows[name]
        if f"{name}_scale" in rows:
            states = states * rows[f"{name}_scale"][..., None]
        return states.to(dtype)

    return Features(whole("context").flatten(2), whole("last"))


def dependencies(
    config: FeaturesConfig | TrainConfig, target: Target, layers: tuple[int, ...]
) -> dict:
    """Return what stored features depend on; training from them is refused if one of these
    differs."""
    known = {
        "target": {
            "path": config.target.path,
            "weights": weights_digest(config.target.path),
            "layers": target.config.num_hidden_layers,
            "quantization": config.target.quantization,
        },
        "tokenizer": target.tokenizer_digest,
        "layers": list(layers),
        "data": asdict(config.data),
    }
    return redact(known)


def row_bytes(length: int, layers: int, hidden: int, store: str) -> int:
    """Bytes of one stored row."""
    each = 2 * hidden if store == "bfloat16" else hidden + 4
    return length * ((layers + 1) * each + 13)


@torch.no_grad()
def write_features(
    config: FeaturesConfig, target: Target, layers: tuple[int, ...], dataset, advance
) -> Path:
    """Store the features of all packed rows; `advance(rows done, rows)` after every shard. Goes on
    with what a stopped run left. Raises ValueError when the folder holds features of something
    else."""
    out = Path(config.out)
    known = dependencies(config, target, layers)
    out.mkdir(parents=True, exist_ok=True)
    manifest = {
        "format": 1,
        "store": config.store_dtype,
        **known,
        "rows": len(dataset),
        "length": config.data.length,
    }
    manifest["shards"] = []
    if (out / MANIFEST).exists():
        found = read_manifest(out)
        found |= translate_saved_config({"data": found["data"]})
        message = f"{out} holds features of another {{keys}}: choose another out="
        refuse_other_settings(found, manifest, message, free=("shards", "sha256", *NO_INFLUENCE))
        manifest = found
    hidden = target.config.hidden_size
    count = max(1, SHARD // row_bytes(config.data.length, len(layers), hidden, config.store_dtype))
    for stale in out.glob(".shard-*"):
        stale.unlink()
    done = sum(shard["rows"] for shard in manifest["shards"])
    while done < len(dataset):
        part = range(done, min(done + count, len(dataset)))
        rows = [with_features(target, layers, dataset[i], config.store_dtype) for i in part]
        tensors = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        name = f"shard-{len(manifest['shards']):05d}.safetensors"
        with disk(f"{name} of {out}"), replacing(out / name) as fresh:
            save_readable(tensors, fresh)
        entry = {"file": name, "rows": len(rows), "bytes": (out / name).stat().st_size}
        manifest["shards"].append(entry | {"checksums": [checksum(row) for row in rows]})
        write_manifest(out, manifest)
        done += len(rows)
        advance(done, len(dataset))
    return out


def with_features(
    target: Target, layers: tuple[int, ...], row: dict[str, torch.Tensor], store: str
) -> dict:
    """Run the target over a packed row of (T,) columns; return it with its features, on the
    host."""
    ids, positions, documents = (
        row[name][None].to(target.device) for name in ("ids", "positions", "documents")
    )
    features = target.packed_features(ids, positions, documents, layers)
    context = features.context[0].unflatten(-1, (len(layers), -1))  # (T, K, D)
    out = {name: row[name].to(kind) for name, kind in COLUMNS.items()}
    for name, value in (("context", context), ("last", features.last[0])):
        if store == "int8":
            value, scale = quantise(value)
            out[f"{name}_scale"] = scale.cpu()
        out[name] = value.to(torch.int8 if store == "int8" else torch.bfloat16).cpu()
    return out


def checksum(row: dict[str, torch.Tensor]) -> int:
    """CRC-32 of a row's columns, in the order of their names."""
    value = 0
    for name in sorted(row):
        value = zlib.crc32(row[name].contiguous().view(torch.uint8).numpy(), value)
    return value


def manifest_digest(manifest: dict) -> str:
    """Return the SHA-256 of a manifest without its own digest."""
    return json_digest({key: value for key, value in manifest.items() if key != "sha256"})


def write_manifest(folder: Path, manifest: dict) -> None:
    """Write the manifest with its own digest, atomically."""
    with disk(f"{MANIFEST} of {folder}"):
        atomic_write(
            folder / MANIFEST, json.dumps(manifest | {"sha256": manifest_digest(manifest)}) + "\n"
        )


def read_manifest(folder: Path) -> dict:
    """Return the manifest, after checking that it is what was written. Raises ValueError or
    FileNotFoundError."""
    file = folder / MANIFEST
    if not file.is_file():
        raise FileNotFoundError(
            f"features={folder}: no {MANIFEST} there; ./launch.sh features out={folder} writes one"
        )
    try:
        manifest = json.loads(file.read_text())
        sound = manifest["format"] == 1 and manifest["sha256"] == manifest_digest(manifest)
    except (ValueError, KeyError, TypeError, RecursionError):
        sound = False
    if not sound:
        raise ValueError(f"{file} is damaged, or was written by another version")
    defaults = asdict(DataConfig())  # an earlier version had other options
    known = {key: value for key, value in manifest["data"].items() if key in defaults}
    return manifest | {"data": defaults | known}


class StoredRows:
    """The rows of a features folder, by number: what `data.packing.batch` draws from. Only the rows
    that are asked for are read into memory."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        shards = self.manifest["shards"]
        if sum(shard["rows"] for shard in shards) < self.manifest["rows"]:
            raise ValueError(
                f"{self.folder} is not finished: the same ./launch.sh features command goes on with it"
            )
        for shard in shards:
            file = self.folder / shard["file"]
            if not file.is_file():
                raise ValueError(f"{file} is missing")
            if file.stat().st_size != shard["bytes"]:
                raise ValueError(
                    f"{file} is truncated or altered: {file.stat().st_size} bytes of {shard['bytes']}"
                )
        self._places = [(n, i) for n, shard in enumerate(shards) for i in range(shard["rows"])]
        self._open: dict[int, object] = {}  # shards that were read from
        self._chosen: list[int] | None = (
            None  # of the stored layers, those that a run taps; None: all
        )

    def check(self, expected: dict) -> None:
        """Raise ValueError, naming what differs, unless the features are what `dependencies` says
        that a run needs, or have more layers: rows then have the run's."""
        known = {key: self.manifest[key] for key in expected}
        known |= translate_saved_config({"data": known["data"]})
        layers = expected["layers"]
        # once not recorded
        known["target"] = {"quantization": expected["target"]["quantization"]} | known["target"]
        if {*layers} <= {*known["layers"]}:
            self._chosen, known["layers"] = (
                [known["layers"].index(layer) for layer in layers],
                layers,
            )
        message = f"{self.folder} has features of another {{keys}}"
        refuse_other_settings(known, expected, message, NO_INFLUENCE)

    def column_parts(self, name: str) -> Iterator[np.ndarray]:
        """Yield a column of all rows, shard by shard, (entries,) each."""
        for shard in self.manifest["shards"]:
            with safe_open(self.folder / shard["file"], "pt") as opened:
                yield opened.get_tensor(name).flatten().numpy()

    def __len__(self) -> int:
        return len(self._places)

    def _row(self, index: int) -> dict[str, torch.Tensor]:
        number, i = self._places[index]
        shard = self.manifest["shards"][number]
        file = self.folder / shard["file"]
        try:
            if number not in self._open:
                self._open[number] = safe_open(file, "pt")
            opened = self._open[number]
            row = {name: opened.get_slice(name)[i] for name in opened.keys()}  # noqa: SIM118
            if not {*COLUMNS, "context", "last"} <= row.keys():
                raise ValueError(f"its columns are {', '.join(row)}")
        except (SafetensorError, OSError, IndexError, ValueError) as error:
            raise ValueError(f"{file} is truncated or altered ({error})") from error
        if checksum(row) != shard["checksums"][i]:
            raise ValueError(f"{file} is altered: its row {i} is not what was stored")
        return row

    def __getitem__(self, indices: list[int]) -> dict[str, torch.Tensor]:
        rows = [self._row(index) for index in indices]
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        if self._chosen is not None:
            batch |= {
                name: batch[name][:, :, self._chosen]
                for name in batch
                if name.startswith("context")
            }
        return {
            name: value.long() if value.dtype == torch.int32 else value
            for name, value in batch.items()
        }


def store_features(config: FeaturesConfig) -> None:
    """`./launch.sh features`: packs the data and runs the target. Says how much it will be
    first."""
    from infer.drafters.base import tapped_layers
    from infer.targets.loading import open_target
    from infer.utils.progress import Progress
    from train.run.initial import resolve_init

    config = replace(config, drafter=resolve_init(config.drafter, config.target))
    target = open_target(config.target)
    layers = tapped_layers(config.drafter, target.config)
    tokenizer = target.tokenizer
    digest = target.tokenizer_digest
    prepared = prepare_rows(config.data, tokenizer, digest, Progress("tokenising", "texts"))
    refuse_no_rows(prepared.counts)
    dataset = prepared.rows
    size = len(dataset) * row_bytes(
        config.data.length, len(layers), target.config.hidden_size, config.store_dtype
    )
    print(*prepared.counts.lines(), sep="\n")
    print(
        f"{len(dataset):,} rows of {config.data.length} tokens, {size / 1e9:,.2f} GB in {config.out}",
        flush=True,
    )
    with going_on(f"{config.out} has whole shards, the same command goes on behind them"):
        out = write_features(config, target, layers, dataset, Progress("features", "rows"))
    print(f"train from them: ./launch.sh features={out} and the same target, drafter and data")
