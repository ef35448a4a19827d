"""A drafter's folder: where it is, its config.json, and what tensors it holds, without loading
any."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from infer.formats.integrity import tensor_digest
from infer.targets.loading import EMBEDDED
from infer.utils.files import json_digest, read_text

LARGEST_JSON = 64 << 20  # bytes
INNER = (
    "drafter",
    "checkpoints/best/drafter",
)  # where a drafter lies in a checkpoint's folder, in a run's
# targets whose drafters lie in the repository
SHIPPED = {"embedded": EMBEDDED, "smollm2": EMBEDDED.parent / "smollm2"}
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# of an `Int8Linear`; they are read as the weight they stand for
CODED = "codes"
PARTS = ("codes", "scales", "smooth")


@dataclass(frozen=True)
class Stored:
    """A tensor as its file's header describes it."""

    file: Path
    name: str  # in the file
    dtype: str  # F32, BF16, I64, BOOL, ...; CODED: its parts are in the file
    shape: tuple[int, ...]
    rows: int | None = None  # of the stored tensor, these first ones alone are read; None: all

    def load(self, opened: safe_open) -> torch.Tensor:
        """Return the tensor from its opened file."""
        if self.rows is not None:
            return opened.get_slice(self.name)[: self.rows]
        if self.dtype != CODED:
            return opened.get_tensor(self.name)
        codes, scales, smooth = (
            opened.get_tensor(self.name.removesuffix(CODED) + part) for part in PARTS
        )
        return codes * scales[:, None] * smooth


@dataclass(frozen=True)
class Folder:
    """The content of a folder. `problems`: sentences on what could not be read; `edited`:
    config.json is not the one that the weights were saved with."""

    path: Path
    config: dict
    tensors: dict[str, Stored]
    problems: list[str]
    edited: bool = False

    def load(self, names: set[str]) -> dict[str, torch.Tensor]:
        """Load the tensors of these names, on the host. Raises ValueError for a file that is not
        what was saved."""
        weights: dict[str, torch.Tensor] = {}
        for file in sorted({self.tensors[name].file for name in names}):
            with safe_open(file, "pt") as opened:
                saved = (opened.metadata() or {}).get("sha256")
                if saved is not None and saved != tensor_digest(opened.keys(), opened.get_tensor):
                    raise ValueError(
                        f"{file} is altered: its weights are not those that were saved; copy it again"
                    )
                there = {
                    name: self.tensors[name] for name in names if self.tensors[name].file == file
                }
                weights |= {name: stored.load(opened) for name, stored in there.items()}
        return weights

    def renamed(self, names: dict[str, str]) -> "Folder":
        """Return the folder with tensors under other names, from those stored to ours."""
        tensors = {names.get(name, name): stored for name, stored in self.tensors.items()}
        return replace(self, tensors=tensors)

    def without_padding(self, padded_rows: int | None, rows: int) -> "Folder":
        """Return the folder with the first `rows` rows alone of the tensors that have
        `padded_rows`; as it is where `padded_rows` is None."""
        tensors = {
            name: replace(stored, shape=(rows, *stored.shape[1:]), rows=rows)
            if padded_rows is not None
            and stored.shape[:1] == (padded_rows,)
            and stored.dtype != CODED
            else stored
            for name, stored in self.tensors.items()
        }
        return replace(self, tensors=tensors)


def find_folder(path: str | Path) -> Path:
    """Return a drafter's folder: a local one, the `drafter` in a training checkpoint's or in the
    best checkpoint of a run's, that of a target in SHIPPED by its name, or a hub id's, of which
    JSON and safetensors files are downloaded. Raises FileNotFoundError where there is none."""
    folder = SHIPPED.get(str(path)) or Path(path)
    for inner in INNER:
        if (folder / inner).is_dir():
            return folder / inner
    if folder.is_dir():
        return folder
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(path)):
        raise FileNotFoundError(
            f"{path} is no folder, and no name on the model hub either: checkpoint=<a drafter's folder>, "
            "or checkpoint=lookup, which needs none"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors"]))
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"{path}: found neither as a local folder nor on the model hub from here. "
            "Download the drafter once where there is a network, then give its folder"
        ) from error


def open_folder(path: str | Path) -> Folder:
    """Read config.json and the headers of the weight files. Raises FileNotFoundError where there is
    no folder; faults inside one are among its problems."""
    folder = find_folder(path)
    problems: list[str] = []
    config = _json(folder / "config.json", problems)
    tensors: dict[str, Stored] = {}
    edited = False
    files = _files(folder, problems)
    if files and (others := other_weights(folder, files)):
        named = ", ".join(others)
        problems.append(
            f"{named}: tensors that would be left out; move the file elsewhere if it is not the drafter's"
        )
    for name in files:
        found, saved = _header(folder / name, problems)
        edited = edited or saved not in (None, json_digest(config))
        tensors |= found
    if (folder / "mask_embedding.pt").exists():
        problems.append(
            "mask_embedding.pt holds a mask embedding of its own, which this project's drafters lack"
        )
    return Folder(folder, config, tensors, problems, edited)


def _json(file: Path, problems: list[str]) -> dict:
    try:
        content = json.loads(read_text(file, LARGEST_JSON))
        if type(content) is dict:
            return content
        problems.append(f"{file.name} is no JSON object")
    except FileNotFoundError:
        problems.append(f"{file.name} is missing")
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{file.name} cannot be read: {error}")
    return {}


def _files(folder: Path, problems: list[str]) -> list[str]:
    """Return the names of the weight files: one, or those of an index."""
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    if not (folder / INDEX).is_file():
        problems.append(f"{WEIGHTS} is missing, and so is {INDEX}")
        return []
    places = _json(folder / INDEX, problems).get("weight_map")
    if type(places) is not dict:
        problems.append(f"{INDEX} has no weight_map")
        return []
    found = []
    for file in sorted({str(file) for file in places.values()}):
        if (
            re.fullmatch(r"[\w-][\w.-]*\.safetensors", file) and (folder / file).is_file()
        ):  # nothing outside this folder
            found.append(file)
        else:
            problems.append(f"{INDEX} names {file!r}, which is no safetensors file of this folder")
    return found


def other_weights(folder: Path, files: list[str]) -> list[str]:
    """Return the names of safetensors files in the folder and one level below it that are not among
    `files`. A folder below that has a config.json of its own is another model's."""
    found = [*folder.glob("*.safetensors"), *folder.glob("*/*.safetensors")]
    models = [
        path for path in found if path.parent != folder and (path.parent / "config.json").exists()
    ]
    names = {path.relative_to(folder).as_posix() for path in found if path not in models}
    return sorted(names - {*files})


def _header(file: Path, problems: list[str]) -> tuple[dict[str, Stored], str | None]:
    """Return a weight file's tensors, and the digest of the config.json that it was saved with."""
    try:
        with safe_open(file, "pt") as opened:
            saved = (opened.metadata() or {}).get("config_sha256")
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            found = {
                name: Stored(file, name, s.get_dtype(), tuple(s.get_shape()))
                for name, s in slices.items()
            }
            return _join_parts(found), saved
    except (SafetensorError, OSError) as error:
        problems.append(f"{file.name} is truncated or altered ({error})")
        return {}, None


def _join_parts(found: dict[str, Stored]) -> dict[str, Stored]:
    """Return a file's tensors with weights in the place of codes that have their scales and
    factors."""
    for layer in [name.removesuffix(CODED) for name in found if name.endswith(f".{CODED}")]:
        parts = [found[layer + part] for part in PARTS if layer + part in found]
        codes = parts[0]
        shapes = [size for part in parts[1:] for size in part.shape]
        if [part.dtype for part in parts] == ["I8", "F32", "F32"] and shapes == list(codes.shape):
            found = {name: stored for name, stored in found.items() if stored not in parts}
            found[f"{layer}weight"] = replace(codes, dtype=CODED)
    return found
