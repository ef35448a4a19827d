"""Stored features: the target's hidden states of the training data, computed once, so that training
does not need the target's decoder layers.

    <out>/manifest.json   target, tokenizer, layers and data of the features, and every shard with
                          the checksums of its packed sequences
    <out>/shard-00000.safetensors
        ids, positions, documents, loss   (n, T) the packed sequences
        context (n, T, K, D), last (n, T, D)   bfloat16, or int8 with context_scale (n, T, K) and
                                               last_scale (n, T)

Shapes: n packed sequences, T tokens each, K feature layers of the target, D hidden size.

A shard is written under a temporary name, renamed, and then listed in the manifest. A run that was
stopped continues after the last listed shard.

The manifest contains its own SHA-256. When a folder is opened, the size of every shard is checked;
when a packed sequence is read, its CRC-32 is checked. This takes about a second per gigabyte, in
the thread that reads ahead.
"""

import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from data.packing import prepare_packed_dataset, refuse_empty_dataset
from data.rows import DataConfig
from infer.targets.identity import weights_digest
from infer.targets.target import Features, Target
from infer.utils.errors import abort_on_write_error, explain_interrupt
from infer.utils.files import (
    atomic_replace_file,
    atomic_write,
    json_digest,
    refuse_changed_settings,
    save_shared_safetensors,
)
from infer.utils.redact import redact
from infer.utils.renamed_options import translate_saved_config
from train.config import FeaturesConfig, TrainConfig

if TYPE_CHECKING:
    from datasets import Dataset

FEATURES_MANIFEST_FILE = "manifest.json"
OPTIONS_NOT_CHANGING_STORED_FEATURES = (
    "data.max_invalid_fraction",
)  # options that change no packed sequence
APPROXIMATE_FEATURE_SHARD_BYTES = 512 * 10**6  # approximately
STORED_FEATURE_INPUT_COLUMN_DTYPES = {
    "ids": torch.int32,
    "positions": torch.int32,
    "documents": torch.int32,
    "loss": torch.bool,
}
STORED_INPUT_COLUMN_BYTES_PER_TOKEN = 13  # of the columns above
BYTES_PER_FEATURE_VECTOR_SCALE = 4  # float32, of each int8 vector
MIN_INT8_FEATURE_VECTOR_RANGE = 1e-12  # lower bound of a vector's largest entry


def quantise_vectors(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return vectors (..., D) as int8, and the scale of each vector, (...,) float32. The largest
    entry of a vector becomes 127."""
    scale = states.abs().amax(-1).float().clamp(min=MIN_INT8_FEATURE_VECTOR_RANGE) / 127
    return (states.float() / scale[..., None]).round_().to(torch.int8), scale


def dequantise_features(batch: dict[str, torch.Tensor], dtype: torch.dtype) -> Features:
    """Return the features of a batch of stored sequences in `dtype`: context (B, T, K*D) and last
    (B, T, D)."""

    def dequantise_column(name: str) -> torch.Tensor:
        states = batch[name]
        if f"{name}_scale" in batch:
            states = states * batch[f"{name}_scale"][..., None]
        return states.to(dtype)

    return Features(dequantise_column("context").flatten(2), dequantise_column("last"))


def feature_dependencies(
    config: FeaturesConfig | TrainConfig, target: Target, layers: tuple[int, ...]
) -> dict:
    """Return what stored features depend on, as written to the manifest. Training is refused with
    features whose dependencies differ. layers: ids of the target's feature layers."""
    dependencies = {
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
    return cast(dict, redact(dependencies))


def count_stored_bytes(length: int, num_layers: int, hidden_size: int, store: str) -> int:
    """Return the bytes of one stored sequence of `length` tokens. store: bfloat16 or int8."""
    vector_bytes = {
        "bfloat16": 2 * hidden_size,
        "int8": hidden_size + BYTES_PER_FEATURE_VECTOR_SCALE,
    }[store]
    return length * ((num_layers + 1) * vector_bytes + STORED_INPUT_COLUMN_BYTES_PER_TOKEN)


@torch.no_grad()
def write_features(
    config: FeaturesConfig,
    target: Target,
    layers: tuple[int, ...],
    dataset: "Dataset",
    report_progress: Callable[[int, int], None],
) -> Path:
    """Store the features of all packed sequences and return the folder.

    A run that was stopped is continued. `report_progress(stored sequences, all sequences)` is
    called after every shard. Raises ValueError if the folder holds features with other
    dependencies.
    """
    out = Path(config.out)
    dependencies = feature_dependencies(config, target, layers)
    out.mkdir(parents=True, exist_ok=True)
    manifest: dict[str, Any] = {
        "format": 1,
        "store": config.store_dtype,
        **dependencies,
        "rows": len(dataset),
        "length": config.data.length,
        "shards": [],
    }
    if (out / FEATURES_MANIFEST_FILE).exists():
        existing = read_manifest(out)
        existing |= translate_saved_config({"data": existing["data"]})
        message = f"{out} holds features of another {{keys}}: choose another out="
        refuse_changed_settings(
            existing,
            manifest,
            message,
            ignored_prefixes=("shards", "sha256", *OPTIONS_NOT_CHANGING_STORED_FEATURES),
        )
        manifest = existing

    sequence_bytes = count_stored_bytes(
        config.data.length, len(layers), target.config.hidden_size, config.store_dtype
    )
    shard_size = max(1, APPROXIMATE_FEATURE_SHARD_BYTES // sequence_bytes)
    for temporary in out.glob(".shard-*"):  # of a run that was killed
        temporary.unlink()
    num_stored = sum(shard["rows"] for shard in manifest["shards"])
    while num_stored < len(dataset):
        rows = []
        for index in range(num_stored, min(num_stored + shard_size, len(dataset))):
            rows.append(compute_stored_row(target, layers, dataset[index], config.store_dtype))
        write_shard(out, manifest, rows)
        num_stored += len(rows)
        report_progress(num_stored, len(dataset))
    return out


def write_shard(out: Path, manifest: dict, rows: list[dict[str, torch.Tensor]]) -> None:
    """Write one shard of stored sequences, add it to the manifest and write the manifest."""
    tensors = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    name = f"shard-{len(manifest['shards']):05d}.safetensors"
    with abort_on_write_error(f"{name} of {out}"), atomic_replace_file(out / name) as temporary:
        save_shared_safetensors(tensors, temporary)
    manifest["shards"].append(
        {
            "file": name,
            "rows": len(rows),
            "bytes": (out / name).stat().st_size,
            "checksums": [compute_row_checksum(row) for row in rows],
        }
    )
    write_manifest(out, manifest)


def compute_stored_row(
    target: Target, layers: tuple[int, ...], row: dict[str, torch.Tensor], store: str
) -> dict[str, torch.Tensor]:
    """Run the target on a packed sequence, columns (T,), and return it with its features, on the
    host."""
    ids = row["ids"][None].to(target.device)
    positions = row["positions"][None].to(target.device)
    documents = row["documents"][None].to(target.device)
    features = target.compute_packed_features(ids, positions, documents, layers)
    context = features.context[0].unflatten(-1, (len(layers), -1))  # (T, K, D)

    stored = {
        name: row[name].to(dtype) for name, dtype in STORED_FEATURE_INPUT_COLUMN_DTYPES.items()
    }
    for name, states in (("context", context), ("last", features.last_hidden_states[0])):
        if store == "int8":
            states, scale = quantise_vectors(states)
            stored[f"{name}_scale"] = scale.cpu()
            stored[name] = states.cpu()
        else:
            stored[name] = states.to(torch.bfloat16).cpu()
    return stored


def compute_row_checksum(row: dict[str, torch.Tensor]) -> int:
    """Return the CRC-32 of a stored sequence's columns, sorted by name."""
    checksum = 0
    for name in sorted(row):
        checksum = zlib.crc32(row[name].contiguous().view(torch.uint8).numpy(), checksum)
    return checksum


def manifest_digest(manifest: dict) -> str:
    """Return the SHA-256 of a manifest without its own digest."""
    return json_digest({key: value for key, value in manifest.items() if key != "sha256"})


def write_manifest(folder: Path, manifest: dict) -> None:
    """Write the manifest with its own digest, atomically."""
    complete = manifest | {"sha256": manifest_digest(manifest)}
    with abort_on_write_error(f"{FEATURES_MANIFEST_FILE} of {folder}"):
        atomic_write(folder / FEATURES_MANIFEST_FILE, json.dumps(complete) + "\n")


def read_manifest(folder: Path) -> dict:
    """Return the manifest of a features folder. Raises FileNotFoundError if there is none, and
    ValueError if it is damaged."""
    file = folder / FEATURES_MANIFEST_FILE
    if not file.is_file():
        raise FileNotFoundError(
            f"features={folder}: no {FEATURES_MANIFEST_FILE} there; ./launch.sh features "
            f"out={folder} writes one"
        )
    try:
        manifest = json.loads(file.read_text())
        is_valid = manifest["format"] == 1 and manifest["sha256"] == manifest_digest(manifest)
    except (ValueError, KeyError, TypeError, RecursionError):
        is_valid = False
    if not is_valid:
        raise ValueError(f"{file} is damaged, or was written by another version")

    # earlier versions had other data options
    options = asdict(DataConfig())
    for key, value in manifest["data"].items():
        if key in options:
            options[key] = value
    return manifest | {"data": options}


class StoredFeatures:
    """The packed sequences of a features folder, as a data set that is read on demand.

    `data.packing.read_batch` draws batches from it by index. Raises ValueError if the folder is
    incomplete or damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        shards = self.manifest["shards"]
        if sum(shard["rows"] for shard in shards) < self.manifest["rows"]:
            raise ValueError(
                f"{self.folder} is not finished: the same ./launch.sh features command continues it"
            )
        for shard in shards:
            file = self.folder / shard["file"]
            if not file.is_file():
                raise ValueError(f"{file} is missing")
            num_bytes = file.stat().st_size
            if num_bytes != shard["bytes"]:
                raise ValueError(
                    f"{file} is truncated or altered: {num_bytes} bytes of {shard['bytes']}"
                )

        self._locations = []  # (shard number, row in the shard) of every packed sequence
        for number, shard in enumerate(shards):
            self._locations += [(number, row) for row in range(shard["rows"])]
        self._open_shards: dict[int, Any] = {}
        # positions of the selected layers among the stored ones; None: all stored layers
        self._selected_layers: list[int] | None = None

    def check_dependencies(self, dependencies: dict) -> None:
        """Raise ValueError, naming the differences, unless these features were computed with
        `dependencies` (see `feature_dependencies`). The folder may have more layers."""
        stored = {key: self.manifest[key] for key in dependencies}
        stored |= translate_saved_config({"data": stored["data"]})
        # early versions did not record the quantization
        quantization = dependencies["target"]["quantization"]
        stored["target"] = {"quantization": quantization} | stored["target"]
        if set(dependencies["layers"]) <= set(stored["layers"]):
            stored["layers"] = dependencies["layers"]
        message = f"{self.folder} has features of another {{keys}}"
        refuse_changed_settings(stored, dependencies, message, OPTIONS_NOT_CHANGING_STORED_FEATURES)

    def select_layers(self, layers: tuple[int, ...]) -> None:
        """Let sequences have the features of these layers only. All must be stored."""
        stored_layers = self.manifest["layers"]
        self._selected_layers = [stored_layers.index(layer) for layer in layers]

    def iterate_column(self, name: str) -> Iterator[np.ndarray]:
        """Yield a column of all packed sequences as one flat array per shard."""
        for shard in self.manifest["shards"]:
            with safe_open(self.folder / shard["file"], "pt") as opened:
                yield opened.get_tensor(name).flatten().numpy()

    def __len__(self) -> int:
        return len(self._locations)

    def _read_row(self, index: int) -> dict[str, torch.Tensor]:
        """Return one stored sequence. Raises ValueError if it is damaged."""
        shard_number, row_number = self._locations[index]
        shard = self.manifest["shards"][shard_number]
        file = self.folder / shard["file"]
        try:
            if shard_number not in self._open_shards:
                self._open_shards[shard_number] = safe_open(file, "pt")
            opened = self._open_shards[shard_number]
            row = {}
            for name in opened.keys():  # noqa: SIM118
                row[name] = opened.get_slice(name)[row_number]
            if not {*STORED_FEATURE_INPUT_COLUMN_DTYPES, "context", "last"} <= row.keys():
                raise ValueError(f"its columns are {', '.join(row)}")
        except (SafetensorError, OSError, IndexError, ValueError) as error:
            raise ValueError(f"{file} is truncated or altered ({error})") from error
        if compute_row_checksum(row) != shard["checksums"][row_number]:
            raise ValueError(f"{file} is altered: the checksum of its row {row_number} differs")
        return row

    def __getitem__(self, indices: list[int]) -> dict[str, torch.Tensor]:
        """Return a batch of stored sequences, columns (B, T, ...)."""
        rows = [self._read_row(index) for index in indices]
        batch = {}
        for name in rows[0]:
            column = torch.stack([row[name] for row in rows])
            if self._selected_layers is not None and name.startswith("context"):
                column = column[:, :, self._selected_layers]
            if column.dtype == torch.int32:
                column = column.long()
            batch[name] = column
        return batch


def store_features(config: FeaturesConfig) -> None:
    """Run `./launch.sh features`: prepare the data, print the size of the features, and compute and
    store them."""
    from infer.drafters.build import choose_feature_layers
    from infer.targets.loading import load_configured_target
    from infer.utils.progress import Progress
    from train.run.initial import resolve_drafter_options

    config = replace(config, drafter=resolve_drafter_options(config.drafter, config.target))
    target = load_configured_target(config.target)
    layers = choose_feature_layers(config.drafter, target.config)
    digest = target.tokenizer_digest
    assert digest is not None and target.tokenizer is not None
    progress = Progress("tokenising", "texts")
    prepared = prepare_packed_dataset(config.data, target.tokenizer, digest, progress)
    refuse_empty_dataset(prepared.counts)
    dataset = prepared.dataset
    assert dataset is not None

    sequence_bytes = count_stored_bytes(
        config.data.length, len(layers), target.config.hidden_size, config.store_dtype
    )
    gigabytes = len(dataset) * sequence_bytes / 1e9
    print(*prepared.counts.format_lines(), sep="\n")
    print(
        f"{len(dataset):,} rows of {config.data.length} tokens, {gigabytes:,.2f} GB in "
        f"{config.out}",
        flush=True,
    )
    with explain_interrupt(
        f"{config.out} has complete shards; the same command continues after them"
    ):
        out = write_features(config, target, layers, dataset, Progress("features", "rows"))
    print(f"to train from them: ./launch.sh features={out} and the same target, drafter and data")
