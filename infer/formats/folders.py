"""A drafter's folder: find it, and read its config.json and the headers of its weight files,
without loading tensors."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from infer.formats.integrity import digest_tensors
from infer.targets.loading import EMBEDDED_TARGET_FOLDER
from infer.utils.files import json_digest, read_limited_text

MAX_JSON_BYTES = 64 << 20
# where the drafter is in a checkpoint's folder, and in a run's
DRAFTER_SUBFOLDERS = ("drafter", "checkpoints/best/drafter")
# targets whose drafters are in the repository
BUNDLED_DRAFTERS = {
    "embedded": EMBEDDED_TARGET_FOLDER,
    "smollm2": EMBEDDED_TARGET_FOLDER.parent / "smollm2",
}
WEIGHTS_FILE_NAME = "model.safetensors"
WEIGHTS_INDEX_NAME = "model.safetensors.index.json"
# An `Int8Linear` is stored as three tensors, which are read as one weight. Its dtype is INT8_DTYPE,
# and its name is that of the first tensor.
INT8_DTYPE = "codes"
INT8_TENSOR_NAMES = ("codes", "scales", "smooth")
INT8_STORED_DTYPES = ["I8", "F32", "F32"]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as the header of its file describes it."""

    file: Path
    name: str  # in the file
    dtype: str  # F32, BF16, I64, BOOL, ...; INT8_DTYPE for the weight of an `Int8Linear`
    shape: tuple[int, ...]
    rows: int | None = None  # only these first rows are read; None: all

    def load(self, opened: Any) -> torch.Tensor:
        """Return the tensor. `opened`: its file, opened by `safe_open`."""
        if self.rows is not None:
            return opened.get_slice(self.name)[: self.rows]
        if self.dtype != INT8_DTYPE:
            return opened.get_tensor(self.name)
        layer = self.name.removesuffix(INT8_TENSOR_NAMES[0])
        codes, scales, smooth = (opened.get_tensor(layer + name) for name in INT8_TENSOR_NAMES)
        return codes * scales[:, None] * smooth


@dataclass(frozen=True)
class DrafterFolder:
    """The content of a drafter's folder."""

    path: Path
    config: dict
    tensors: dict[str, StoredTensor]
    problems: list[str]  # sentences on what could not be read
    config_changed: bool = False  # config.json is not the one that the weights were saved with

    def load(self, names: set[str]) -> dict[str, torch.Tensor]:
        """Load the tensors of these names, on the host. Raises ValueError for a file whose weights
        changed after they were saved."""
        weights: dict[str, torch.Tensor] = {}
        for file in sorted({self.tensors[name].file for name in names}):
            with safe_open(file, "pt") as opened:
                saved = (opened.metadata() or {}).get("sha256")
                if saved is not None and saved != digest_tensors(opened.keys(), opened.get_tensor):
                    raise ValueError(
                        f"{file} is altered: its weights are not those that were saved; copy it "
                        "again"
                    )
                for name in names:
                    tensor = self.tensors[name]
                    if tensor.file == file:
                        weights[name] = tensor.load(opened)
        return weights

    def rename_tensors(self, new_names: Mapping[str, str]) -> "DrafterFolder":
        """Return the folder with tensors under other names. `new_names`: by the name in the
        file."""
        tensors = {new_names.get(name, name): tensor for name, tensor in self.tensors.items()}
        return replace(self, tensors=tensors)

    def remove_padding(self, padded_rows: int | None, vocabulary_size: int) -> "DrafterFolder":
        """Return the folder with only the first `vocabulary_size` rows of the tensors that have
        `padded_rows` rows; unchanged if `padded_rows` is None."""
        if padded_rows is None:
            return self
        tensors = dict(self.tensors)
        for name, tensor in self.tensors.items():
            if tensor.shape[:1] == (padded_rows,) and tensor.dtype != INT8_DTYPE:
                shape = (vocabulary_size, *tensor.shape[1:])
                tensors[name] = replace(tensor, shape=shape, rows=vocabulary_size)
        return replace(self, tensors=tensors)


def find_drafter_folder(path: str | Path) -> Path:
    """Return a drafter's folder.

    path: the folder itself, a training checkpoint, a run (its best checkpoint is taken), a name in
        BUNDLED_DRAFTERS, or an id on the model hub (its JSON and safetensors files are downloaded)

    Raises FileNotFoundError if there is none.
    """
    folder = BUNDLED_DRAFTERS.get(str(path)) or Path(path)
    for subfolder in DRAFTER_SUBFOLDERS:
        if (folder / subfolder).is_dir():
            return folder / subfolder
    if folder.is_dir():
        return folder
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(path)):
        raise FileNotFoundError(
            f"{path} is no folder, and no name on the model hub either: checkpoint=<a drafter's "
            "folder>, or checkpoint=lookup, which needs none"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors"]))
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"{path}: found neither as a local folder nor on the model hub from here. "
            "Download the drafter once where there is a network, then give its folder"
        ) from error


def open_drafter_folder(path: str | Path) -> DrafterFolder:
    """Read config.json and the headers of the weight files. `path`: as in `find_drafter_folder`.
    Raises FileNotFoundError if there is no folder; other problems are collected in the result."""
    folder = find_drafter_folder(path)
    problems: list[str] = []
    config = _read_json_object(folder / "config.json", problems)
    file_names = _list_weight_files(folder, problems)
    if file_names:
        other_names = find_other_weights(folder, file_names)
        if other_names:
            problems.append(
                f"{', '.join(other_names)}: tensors that would be left out; move the file "
                "elsewhere if it is not the drafter's"
            )

    tensors: dict[str, StoredTensor] = {}
    config_changed = False
    for file_name in file_names:
        file_tensors, config_digest = _read_header(folder / file_name, problems)
        tensors |= file_tensors
        if config_digest is not None and config_digest != json_digest(config):
            config_changed = True
    if (folder / "mask_embedding.pt").exists():
        problems.append(
            "mask_embedding.pt holds a separate mask embedding, which this project's drafters "
            "do not have"
        )
    return DrafterFolder(folder, config, tensors, problems, config_changed)


def _read_json_object(file: Path, problems: list[str]) -> dict:
    """Return the object in a JSON file; an empty one, and a problem, if it cannot be read."""
    try:
        content = json.loads(read_limited_text(file, MAX_JSON_BYTES))
        if type(content) is dict:
            return content
        problems.append(f"{file.name} is no JSON object")
    except FileNotFoundError:
        problems.append(f"{file.name} is missing")
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{file.name} cannot be read: {error}")
    return {}


def _list_weight_files(folder: Path, problems: list[str]) -> list[str]:
    """Return the names of the weight files: the only one, or those in the index."""
    if (folder / WEIGHTS_FILE_NAME).is_file():
        return [WEIGHTS_FILE_NAME]
    if not (folder / WEIGHTS_INDEX_NAME).is_file():
        problems.append(f"{WEIGHTS_FILE_NAME} is missing, and so is {WEIGHTS_INDEX_NAME}")
        return []
    weight_map = _read_json_object(folder / WEIGHTS_INDEX_NAME, problems).get("weight_map")
    if type(weight_map) is not dict:
        problems.append(f"{WEIGHTS_INDEX_NAME} has no weight_map")
        return []

    file_names = []
    for file_name in sorted({str(file_name) for file_name in weight_map.values()}):
        # The pattern keeps paths inside this folder.
        is_safe = re.fullmatch(r"[\w-][\w.-]*\.safetensors", file_name)
        if is_safe and (folder / file_name).is_file():
            file_names.append(file_name)
        else:
            problems.append(
                f"{WEIGHTS_INDEX_NAME} names {file_name!r}, which is no safetensors file of this "
                "folder"
            )
    return file_names


def find_other_weights(folder: Path, file_names: list[str]) -> list[str]:
    """Return the safetensors files in the folder, and in its direct subfolders, that are not among
    `file_names`. Subfolders with a config.json are other models and are skipped."""
    other_names = []
    for path in (*folder.glob("*.safetensors"), *folder.glob("*/*.safetensors")):
        is_other_model = path.parent != folder and (path.parent / "config.json").exists()
        name = path.relative_to(folder).as_posix()
        if not is_other_model and name not in file_names:
            other_names.append(name)
    return sorted(other_names)


def _read_header(file: Path, problems: list[str]) -> tuple[dict[str, StoredTensor], str | None]:
    """Return the tensors of a weight file, and the digest of the config.json that it was saved
    with, None if it has no digest."""
    try:
        with safe_open(file, "pt") as opened:
            config_digest = (opened.metadata() or {}).get("config_sha256")
            tensors = {}
            for name in opened.keys():  # noqa: SIM118
                header = opened.get_slice(name)
                shape = tuple(header.get_shape())
                tensors[name] = StoredTensor(file, name, header.get_dtype(), shape)
    except (SafetensorError, OSError) as error:
        problems.append(f"{file.name} is truncated or altered ({error})")
        return {}, None
    return _merge_int8_tensors(tensors), config_digest


def _merge_int8_tensors(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Replace each group of codes, scales and factors by the weight that they represent. Incomplete
    groups stay as they are."""
    merged = dict(tensors)
    codes_name, *_ = INT8_TENSOR_NAMES
    for name, codes in tensors.items():
        if not name.endswith(f".{codes_name}"):
            continue
        layer = name.removesuffix(codes_name)
        group_names = [layer + each for each in INT8_TENSOR_NAMES if layer + each in tensors]
        group = [tensors[each] for each in group_names]
        vector_sizes = [size for tensor in group[1:] for size in tensor.shape]
        has_dtypes = [tensor.dtype for tensor in group] == INT8_STORED_DTYPES
        if has_dtypes and vector_sizes == list(codes.shape):
            for group_name in group_names:
                del merged[group_name]
            merged[f"{layer}weight"] = replace(codes, dtype=INT8_DTYPE)
    return merged
