"""Stored features: the target's hidden states of the training data. They are computed once, so that
training does not need the target's decoder layers.

    <out>/manifest.json   what the features were computed from (target, tokenizer, layers and data),
                          and the list of shards with a checksum of every packed sequence
    <out>/shard-00000.safetensors
        ids, positions, documents, loss   (n, T) the packed sequences
        context   (n, T, K, D) hidden states of the target layers that the drafter reads
        last      (n, T, D) last hidden states of the target
        context_scale (n, T, K), last_scale (n, T)   with store_dtype=int8: scale of each vector

Shapes: n packed sequences of a shard, T tokens each, K target layers, D hidden size.

A shard is written under a temporary name, renamed, and then listed in the manifest. If the command
is stopped, the same command continues after the last listed shard.

The manifest contains a SHA-256 of its other content. When a folder is opened, the size of every
shard is checked. When a packed sequence is read, its CRC-32 is checked. The CRC-32 takes about a
second per gigabyte, in the background thread that prepares the next training step.
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
from infer.utils.errors import abort_on_write_error, set_interrupt_message
from infer.utils.files import (
    atomic_replace_file,
    atomic_write,
    json_digest,
    refuse_changed_settings,
    save_world_readable_safetensors,
)
from infer.utils.redact import redact
from infer.utils.renamed_options import rename_old_options
from train.config import FeaturesConfig, TrainConfig

if TYPE_CHECKING:
    from datasets import Dataset

FEATURES_MANIFEST_FILE = "manifest.json"
# Options that may differ between stored features and the training run that uses them, because they
# do not change the packed sequences.
OPTIONS_NOT_CHANGING_STORED_FEATURES = ("data.max_invalid_fraction",)
# Size of a shard. A shard can be larger, because it has at least one packed sequence.
APPROXIMATE_FEATURE_SHARD_BYTES = 512 * 10**6
# Columns of the packed sequences that a shard stores. Keys are column names, values are the dtypes
# in the shard.
STORED_FEATURE_INPUT_COLUMN_DTYPES = {
    "ids": torch.int32,
    "positions": torch.int32,
    "documents": torch.int32,
    "loss": torch.bool,
}
STORED_INPUT_COLUMN_BYTES_PER_TOKEN = 13  # three int32 columns and one bool column
BYTES_PER_FEATURE_VECTOR_SCALE = 4  # a float32 scale for each int8 vector
# Lower bound for the largest absolute entry of a vector in int8 quantization. It prevents a scale
# of 0.
MIN_INT8_FEATURE_VECTOR_MAX_ABS = 1e-12


def quantise_vectors(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise hidden states (..., hidden_size) to int8, with one float32 scale per vector. Return
    the int8 vectors and the scales (...,).

    The scale is chosen so that the largest absolute entry of a vector becomes 127.
    """
    scale = states.abs().amax(-1).float().clamp(min=MIN_INT8_FEATURE_VECTOR_MAX_ABS) / 127
    return (states.float() / scale[..., None]).round_().to(torch.int8), scale


def dequantise_features(batch: dict[str, torch.Tensor], dtype: torch.dtype) -> Features:
    """Convert the stored hidden states of the target to `dtype` and return them as `Features`.

    batch: the columns of B packed sequences, from `StoredFeatures`.

    The hidden states of the layers that the drafter reads are concatenated,
    (B, num_tokens, num_layers * hidden_size). The last hidden states have the shape
    (B, num_tokens, hidden_size).
    """

    def dequantise_column(name: str) -> torch.Tensor:
        states = batch[name]
        if f"{name}_scale" in batch:
            states = states * batch[f"{name}_scale"][..., None]
        return states.to(dtype)

    return Features(dequantise_column("context").flatten(2), dequantise_column("last"))


def feature_dependencies(
    config: FeaturesConfig | TrainConfig, target: Target, layers: tuple[int, ...]
) -> dict:
    """Return a dictionary that describes what stored features (hidden states of the target) are
    computed from: target weights, tokenizer, target layers and data options.

    layers: numbers of the target layers whose hidden states are stored. The dictionary is saved in
    manifest.json. Training compares it with the dictionary of the training run.
    """
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


def count_stored_bytes(length: int, num_layers: int, hidden_size: int, store_dtype: str) -> int:
    """Return how many bytes a packed sequence of `length` tokens needs in the stored features.

    num_layers: number of target layers whose hidden states are stored, besides the last hidden
    states. store_dtype: their dtype, 'bfloat16' or 'int8'.
    """
    vector_bytes = {
        "bfloat16": 2 * hidden_size,
        "int8": hidden_size + BYTES_PER_FEATURE_VECTOR_SCALE,
    }[store_dtype]
    return length * ((num_layers + 1) * vector_bytes + STORED_INPUT_COLUMN_BYTES_PER_TOKEN)


@torch.no_grad()
def write_features(
    config: FeaturesConfig,
    target: Target,
    layers: tuple[int, ...],
    dataset: "Dataset",
    report_progress: Callable[[int, int], None],
) -> Path:
    """Compute the target's hidden states for all packed sequences of `dataset`, store them in the
    folder `config.out`, and return the folder.

    layers: numbers of the target layers whose hidden states are stored. report_progress: called
    after every shard with the number of stored sequences and the number of all sequences.

    If the folder already has some of the shards, only the missing shards are computed. Raises
    ValueError if the folder's shards were computed with another target, other layers or other data.
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
        existing |= rename_old_options({"data": existing["data"]})
        message = (
            f"out={out} has features that were computed with another {{keys}}: choose another "
            "folder with out="
        )
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
    for temporary in out.glob(".shard-*"):  # left by a command that was killed
        temporary.unlink()
    num_stored = sum(shard["rows"] for shard in manifest["shards"])
    while num_stored < len(dataset):
        rows = []
        for index in range(num_stored, min(num_stored + shard_size, len(dataset))):
            rows.append(compute_stored_row(target, layers, dataset[index], config.store_dtype))
        append_shard_to_manifest(out, manifest, rows)
        num_stored += len(rows)
        report_progress(num_stored, len(dataset))
    return out


def append_shard_to_manifest(
    out: Path, manifest: dict, rows: list[dict[str, torch.Tensor]]
) -> None:
    """Write packed sequences and their hidden states to the next shard file in the folder `out`.
    Then add the shard to `manifest` and write the manifest.

    rows: for each sequence, the result of `compute_stored_row`.
    """
    tensors = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    name = f"shard-{len(manifest['shards']):05d}.safetensors"
    with abort_on_write_error(f"{name} of {out}"), atomic_replace_file(out / name) as temporary:
        save_world_readable_safetensors(tensors, temporary)
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
    target: Target, layers: tuple[int, ...], row: dict[str, torch.Tensor], stored_dtype: str
) -> dict[str, torch.Tensor]:
    """Run the target on a packed sequence. Return the columns that are stored for it, in host
    memory: its inputs and the target's hidden states.

    layers: numbers of the target layers whose hidden states are stored.
    row: the columns of the packed sequence, (num_tokens,) each.
    stored_dtype: dtype of the stored hidden states, 'bfloat16' or 'int8'.
    """
    ids = row["ids"][None].to(target.device)
    positions = row["positions"][None].to(target.device)
    documents = row["documents"][None].to(target.device)
    features = target.compute_packed_features(ids, positions, documents, layers)
    # (num_tokens, num_layers, hidden_size)
    context = features.layer_features[0].unflatten(-1, (len(layers), -1))

    stored = {
        name: row[name].to(dtype) for name, dtype in STORED_FEATURE_INPUT_COLUMN_DTYPES.items()
    }
    for name, states in (("context", context), ("last", features.last_hidden_states[0])):
        if stored_dtype == "int8":
            states, scale = quantise_vectors(states)
            stored[f"{name}_scale"] = scale.cpu()
            stored[name] = states.cpu()
        else:
            stored[name] = states.to(torch.bfloat16).cpu()
    return stored


def compute_row_checksum(row: dict[str, torch.Tensor]) -> int:
    """Return the CRC-32 of a stored packed sequence. It covers all columns of the sequence, in the
    order of the columns' names."""
    checksum = 0
    for name in sorted(row):
        checksum = zlib.crc32(row[name].contiguous().view(torch.uint8).numpy(), checksum)
    return checksum


def manifest_digest(manifest: dict) -> str:
    """Return the SHA-256 of a manifest's content, without the entry `sha256`."""
    return json_digest({key: value for key, value in manifest.items() if key != "sha256"})


def write_manifest(folder: Path, manifest: dict) -> None:
    """Write manifest.json atomically, and add the SHA-256 of the other content as the entry
    `sha256`."""
    complete = manifest | {"sha256": manifest_digest(manifest)}
    with abort_on_write_error(f"{FEATURES_MANIFEST_FILE} of {folder}"):
        atomic_write(folder / FEATURES_MANIFEST_FILE, json.dumps(complete) + "\n")


def read_manifest(folder: Path) -> dict:
    """Return the manifest of a folder with stored features. Raises FileNotFoundError if the folder
    has no manifest, and ValueError if the manifest is damaged."""
    file = folder / FEATURES_MANIFEST_FILE
    if not file.is_file():
        raise FileNotFoundError(
            f"features={folder}: this folder has no {FEATURES_MANIFEST_FILE}, so it has no stored "
            f"features. ./launch.sh features out={folder} writes them"
        )
    try:
        manifest = json.loads(file.read_text())
        is_valid = manifest["format"] == 1 and manifest["sha256"] == manifest_digest(manifest)
    except (ValueError, KeyError, TypeError, RecursionError):
        is_valid = False
    if not is_valid:
        raise ValueError(
            f"{file} is damaged, or was written by another version of this program: delete its "
            "folder and store the features again with ./launch.sh features"
        )

    # A manifest of an earlier version can have other data options. Unknown options are dropped, and
    # missing options get their defaults.
    options = asdict(DataConfig())
    for key, value in manifest["data"].items():
        if key in options:
            options[key] = value
    return manifest | {"data": options}


class StoredFeatures:
    """A data set of packed sequences with stored hidden states of the target. They are read on
    demand from a folder that `./launch.sh features` wrote.

    `data.packing.read_batch` reads batches from this data set. The constructor raises ValueError
    if the folder is incomplete or damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        shards = self.manifest["shards"]
        if sum(shard["rows"] for shard in shards) < self.manifest["rows"]:
            raise ValueError(
                f"{self.folder} has the hidden states of only some packed sequences: run the same "
                "./launch.sh features command again to compute the others"
            )
        for shard in shards:
            file = self.folder / shard["file"]
            if not file.is_file():
                raise ValueError(
                    f"{file} is missing: restore it, or store the features again with ./launch.sh "
                    "features in a new folder"
                )
            num_bytes = file.stat().st_size
            if num_bytes != shard["bytes"]:
                raise ValueError(
                    f"{file} is truncated or altered: it has {num_bytes} bytes, and the manifest "
                    f"says {shard['bytes']}. Restore it, or store the features again with "
                    "./launch.sh features in a new folder"
                )

        # for every packed sequence, a tuple of its shard's number and its index in the shard
        self._locations = []
        for number, shard in enumerate(shards):
            self._locations += [(number, row) for row in range(shard["rows"])]
        self._open_shards: dict[int, Any] = {}
        # Indices, in the list of stored layers, of the layers to return. None returns all.
        self._selected_layers: list[int] | None = None

    def check_dependencies(self, dependencies: dict) -> None:
        """Raise ValueError if a training run cannot use the stored hidden states: if they were
        computed with another target, tokenizer or data, or lack layers that the run needs. The
        error names the differences.

        dependencies: the result of `feature_dependencies` for the training run. The folder may have
        more layers than the run needs.
        """
        stored = {key: self.manifest[key] for key in dependencies}
        stored |= rename_old_options({"data": stored["data"]})
        # Manifests of early versions do not record the target's quantization. In this case, assume
        # that it is the same.
        quantization = dependencies["target"]["quantization"]
        stored["target"] = {"quantization": quantization} | stored["target"]
        if set(dependencies["layers"]) <= set(stored["layers"]):
            stored["layers"] = dependencies["layers"]
        message = (
            f"{self.folder} has features that were computed with another {{keys}}: use the "
            "options that they were stored with, or store features again with ./launch.sh "
            "features in a new folder"
        )
        refuse_changed_settings(stored, dependencies, message, OPTIONS_NOT_CHANGING_STORED_FEATURES)

    def select_layers(self, layers: tuple[int, ...]) -> None:
        """Let this data set return only the hidden states of these target layers from now on.

        layers: numbers of target layers. Each must be among the stored layers.
        """
        stored_layers = self.manifest["layers"]
        self._selected_layers = [stored_layers.index(layer) for layer in layers]

    def iterate_column(self, name: str) -> Iterator[np.ndarray]:
        """Yield all values of a column, as one flat array per shard. name: the column, for example
        "ids"."""
        for shard in self.manifest["shards"]:
            with safe_open(self.folder / shard["file"], "pt") as opened:
                yield opened.get_tensor(name).flatten().numpy()

    def __len__(self) -> int:
        return len(self._locations)

    def _read_row(self, index: int) -> dict[str, torch.Tensor]:
        """Return the columns of one packed sequence. Raises ValueError if its file is damaged."""
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
                raise ValueError(f"columns are missing; the file has only {', '.join(row)}")
        except (SafetensorError, OSError, IndexError, ValueError) as error:
            raise ValueError(
                f"{file} is truncated or altered ({error}): restore it, or store the features "
                "again with ./launch.sh features in a new folder"
            ) from error
        if compute_row_checksum(row) != shard["checksums"][row_number]:
            raise ValueError(
                f"{file} is altered: the checksum of its packed sequence {row_number} differs "
                "from the manifest. Restore the file, or store the features again with "
                "./launch.sh features in a new folder"
            )
        return row

    def __getitem__(self, indices: list[int]) -> dict[str, torch.Tensor]:
        """Return the packed sequences with these indices. Keys are column names, values have the
        shape (number of indices, tokens per sequence, ...)."""
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
    """Run `./launch.sh features`: prepare the data, print the size of the target's hidden states,
    and compute and store them."""
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
        f"{len(dataset):,} packed sequences of {config.data.length} tokens, {gigabytes:,.2f} GB "
        f"in {config.out}",
        flush=True,
    )
    with set_interrupt_message(
        f"the shards in {config.out} are complete; the same command continues after the last one"
    ):
        out = write_features(config, target, layers, dataset, Progress("features", "rows"))
    print(
        f"To train from these hidden states, run ./launch.sh features={out} with the same options "
        "for target, drafter and data"
    )
