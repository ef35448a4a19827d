"""Find a drafter's folder, locally or on the Hugging Face hub, and read its config.json and the
headers of its weight files. The tensors are loaded later, by `DrafterFolder.load`."""

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
from infer.utils.files import json_digest, read_small_regular_file

MAX_JSON_BYTES = 64 << 20
# Path of the drafter within the folder of a training checkpoint, and within the folder of a
# training run.
DRAFTER_SUBFOLDERS = ("drafter", "checkpoints/best/drafter")
# Drafters that are part of this repository. Keys are the targets' names, values the folders.
BUNDLED_DRAFTERS = {
    "embedded": EMBEDDED_TARGET_FOLDER,
    "smollm2": EMBEDDED_TARGET_FOLDER.parent / "smollm2",
}
WEIGHTS_FILE_NAME = "model.safetensors"
WEIGHTS_INDEX_NAME = "model.safetensors.index.json"
# The weight of an `Int8Linear` is stored as three tensors: int8 values, a scale per output, and a
# factor per input. `DrafterFolder` lists them as one `StoredTensor` that has the dtype
# INT8_LINEAR_WEIGHT_DTYPE and the name of the int8 values.
INT8_LINEAR_WEIGHT_DTYPE = "codes"
INT8_LINEAR_TENSOR_SUFFIXES = ("codes", "scales", "smooth")
INT8_LINEAR_TENSOR_DTYPES = ["I8", "F32", "F32"]


@dataclass(frozen=True)
class StoredTensor:
    """Name, dtype and shape of a tensor in a safetensors file. The tensor itself is not loaded."""

    file: Path
    name: str  # name of the tensor in the file
    # F32, BF16, I64, BOOL, ..., as safetensors writes it; INT8_LINEAR_WEIGHT_DTYPE for the weight
    # of an `Int8Linear`
    dtype: str
    shape: tuple[int, ...]
    # load only this number of rows from the start of the tensor; None means all rows
    num_rows_to_load: int | None = None

    def load(self, opened: Any) -> torch.Tensor:
        """Load the tensor. `opened` is the tensor's file, opened by `safe_open`. The weight of an
        `Int8Linear` is dequantized."""
        if self.num_rows_to_load is not None:
            return opened.get_slice(self.name)[: self.num_rows_to_load]
        if self.dtype != INT8_LINEAR_WEIGHT_DTYPE:
            return opened.get_tensor(self.name)
        layer = self.name.removesuffix(INT8_LINEAR_TENSOR_SUFFIXES[0])
        codes, scales, smooth = (
            opened.get_tensor(layer + name) for name in INT8_LINEAR_TENSOR_SUFFIXES
        )
        return codes * scales[:, None] * smooth


@dataclass(frozen=True)
class DrafterFolder:
    """The content of a drafter's folder: its config, and the names and shapes of its tensors, which
    are loaded only by `load`."""

    path: Path
    config: dict  # content of config.json; {} if the file cannot be read
    tensors: dict[str, StoredTensor]  # keys are the tensors' names
    problems: list[str]  # sentences that describe missing, unreadable and unexpected files
    config_changed: bool = False  # whether config.json was changed after the weights were saved

    def load(self, names: set[str]) -> dict[str, torch.Tensor]:
        """Load the tensors with the given names into CPU memory.

        Raises ValueError if the weights in a file were changed after they were saved.
        """
        weights: dict[str, torch.Tensor] = {}
        for file in sorted({self.tensors[name].file for name in names}):
            with safe_open(file, "pt") as opened:
                saved = (opened.metadata() or {}).get("sha256")
                if saved is not None and saved != digest_tensors(opened.keys(), opened.get_tensor):
                    raise ValueError(
                        f"{file} is altered: the SHA-256 of its weights differs from the one that "
                        "was stored with them; copy the file again"
                    )
                for name in names:
                    tensor = self.tensors[name]
                    if tensor.file == file:
                        weights[name] = tensor.load(opened)
        return weights

    def rename_tensors(self, new_names: Mapping[str, str]) -> "DrafterFolder":
        """Return a copy of this object in which tensors have new names. Nothing changes on disk.

        new_names: keys are old names, values are new names; other tensors keep their names
        """
        tensors = {new_names.get(name, name): tensor for name, tensor in self.tensors.items()}
        return replace(self, tensors=tensors)

    def remove_padding(self, padded_rows: int | None, vocabulary_size: int) -> "DrafterFolder":
        """Return a copy of this object in which the vocabulary has no padding: of each tensor with
        `padded_rows` rows, `load` then loads only the first `vocabulary_size` rows.

        padded_rows: size of the padded vocabulary; None if there is no padding
        """
        if padded_rows is None:
            return self
        tensors = dict(self.tensors)
        for name, tensor in self.tensors.items():
            if tensor.shape[:1] == (padded_rows,) and tensor.dtype != INT8_LINEAR_WEIGHT_DTYPE:
                shape = (vocabulary_size, *tensor.shape[1:])
                tensors[name] = replace(tensor, shape=shape, num_rows_to_load=vocabulary_size)
        return replace(self, tensors=tensors)


def find_drafter_folder(path: str | Path) -> Path:
    """Return the local folder with a drafter's config.json and weights, downloading it if needed.

    `path` may be one of the following:
    - the folder itself
    - the folder of a training checkpoint
    - the folder of a training run, which stands for its best checkpoint
    - a name in BUNDLED_DRAFTERS
    - an id on the Hugging Face hub; JSON and safetensors files are downloaded

    Raises FileNotFoundError if there is no such folder.
    """
    folder = BUNDLED_DRAFTERS.get(str(path)) or Path(path)
    for subfolder in DRAFTER_SUBFOLDERS:
        if (folder / subfolder).is_dir():
            return folder / subfolder
    if folder.is_dir():
        return folder
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(path)):
        raise FileNotFoundError(
            f"{path} is neither a folder nor an id on the Hugging Face hub: use "
            "checkpoint=<folder of a drafter>, or checkpoint=lookup (prompt lookup), which needs "
            "no drafter"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors"]))
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"{path}: found neither as a local folder nor on the Hugging Face hub. Without a "
            "network, download the drafter on another machine and pass the path of the folder"
        ) from error


def open_drafter_folder(path: str | Path) -> DrafterFolder:
    """Read config.json and the headers of the weight files of a drafter's folder.

    path: a folder or an id on the Hugging Face hub, see `find_drafter_folder`

    Raises FileNotFoundError if there is no folder. All other problems are listed in the field
    `problems` of the result.
    """
    folder = find_drafter_folder(path)
    problems: list[str] = []
    config = _read_json_object(folder / "config.json", problems)
    file_names = _list_weight_files(folder, problems)
    if file_names:
        other_names = find_other_weights(folder, file_names)
        if other_names:
            problems.append(
                f"these files contain tensors that would not be loaded: {', '.join(other_names)}; "
                "move them to another folder if they do not belong to the drafter"
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
            "the folder contains mask_embedding.pt, a separate embedding of the mask token, which "
            "this project's drafters do not support"
        )
    return DrafterFolder(folder, config, tensors, problems, config_changed)


def _read_json_object(file: Path, problems: list[str]) -> dict:
    """Read a JSON file whose content is an object. If this fails, add a sentence to `problems` and
    return {}."""
    try:
        content = json.loads(read_small_regular_file(file, MAX_JSON_BYTES))
        if type(content) is dict:
            return content
        problems.append(f"{file.name} does not contain a JSON object")
    except FileNotFoundError:
        problems.append(f"{file.name} is missing")
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{file.name} cannot be read: {error}")
    return {}


def _list_weight_files(folder: Path, problems: list[str]) -> list[str]:
    """Return the names of the folder's weight files: model.safetensors if it exists, or else the
    files listed in model.safetensors.index.json. Add a sentence to `problems` for each file that is
    missing."""
    if (folder / WEIGHTS_FILE_NAME).is_file():
        return [WEIGHTS_FILE_NAME]
    if not (folder / WEIGHTS_INDEX_NAME).is_file():
        problems.append(f"{WEIGHTS_FILE_NAME} is missing, and so is {WEIGHTS_INDEX_NAME}")
        return []
    weight_map = _read_json_object(folder / WEIGHTS_INDEX_NAME, problems).get("weight_map")
    if type(weight_map) is not dict:
        problems.append(f"{WEIGHTS_INDEX_NAME} has no object weight_map")
        return []

    file_names = []
    for file_name in sorted({str(file_name) for file_name in weight_map.values()}):
        # The pattern allows no slashes, so that the index file cannot name files outside this
        # folder.
        is_safe = re.fullmatch(r"[\w-][\w.-]*\.safetensors", file_name)
        if is_safe and (folder / file_name).is_file():
            file_names.append(file_name)
        else:
            problems.append(
                f"{WEIGHTS_INDEX_NAME} names {file_name!r}, but this folder contains no such "
                "safetensors file"
            )
    return file_names


def find_other_weights(folder: Path, file_names: list[str]) -> list[str]:
    """Return the safetensors files in a folder and its direct subfolders that are not in
    `file_names`, as paths relative to the folder.

    A subfolder with a config.json is skipped, because it contains another model.
    """
    other_names = []
    for path in (*folder.glob("*.safetensors"), *folder.glob("*/*.safetensors")):
        is_other_model = path.parent != folder and (path.parent / "config.json").exists()
        name = path.relative_to(folder).as_posix()
        if not is_other_model and name not in file_names:
            other_names.append(name)
    return sorted(other_names)


def _read_header(file: Path, problems: list[str]) -> tuple[dict[str, StoredTensor], str | None]:
    """Read the header of a weight file.

    Returns the file's tensors (keys are their names), and the digest of the config.json with which
    the file was saved, or None if the file has no digest. If the file cannot be read, a sentence is
    added to `problems`, and ({}, None) is returned.
    """
    try:
        with safe_open(file, "pt") as opened:
            config_digest = (opened.metadata() or {}).get("config_sha256")
            tensors = {}
            for name in opened.keys():  # noqa: SIM118
                header = opened.get_slice(name)
                shape = tuple(header.get_shape())
                tensors[name] = StoredTensor(file, name, header.get_dtype(), shape)
    except (SafetensorError, OSError) as error:
        problems.append(f"{file.name} is truncated or altered ({error}); copy the file again")
        return {}, None
    return _merge_int8_tensors(tensors), config_digest


def _merge_int8_tensors(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Replace the three stored tensors of each `Int8Linear` (int8 values, scales, input factors) by
    one entry for the layer's weight. Keys of the dictionaries are names of tensors.

    If one of the three is missing or has the wrong dtype or shape, the layer's entries stay as they
    are.
    """
    merged = dict(tensors)
    codes_name, *_ = INT8_LINEAR_TENSOR_SUFFIXES
    for name, codes in tensors.items():
        if not name.endswith(f".{codes_name}"):
            continue
        layer = name.removesuffix(codes_name)
        group_names = [
            layer + each for each in INT8_LINEAR_TENSOR_SUFFIXES if layer + each in tensors
        ]
        group = [tensors[each] for each in group_names]
        vector_sizes = [size for tensor in group[1:] for size in tensor.shape]
        has_dtypes = [tensor.dtype for tensor in group] == INT8_LINEAR_TENSOR_DTYPES
        if has_dtypes and vector_sizes == list(codes.shape):
            for group_name in group_names:
                del merged[group_name]
            merged[f"{layer}weight"] = replace(codes, dtype=INT8_LINEAR_WEIGHT_DTYPE)
    return merged
