"""Load and save drafters: folders with `config.json` and `model.safetensors`. They are read in
every layout that a family knows, and written in the family's own layout. For DFlash that is the
public one, which serving engines read."""

import json
import warnings
from pathlib import Path
from typing import cast

import torch
from transformers import Qwen3Config

from infer.drafters.base import Drafter, limit_attention_window
from infer.drafters.config_keys import ParsedConfig, build_public_config
from infer.drafters.families import PROMPT_LOOKUP_FAMILY
from infer.drafters.lookup import PromptLookup
from infer.formats.folders import DRAFTER_SUBFOLDERS, DrafterFolder, open_drafter_folder
from infer.formats.integrity import save_weights_with_digests
from infer.formats.layouts import find_folder_problems, normalise_tensors, read_layout
from infer.targets.checks import check_finite
from infer.targets.loading import load_int8_package
from infer.utils.files import atomic_write

NGRAM_FILE_NAME = "ngrams"  # beside the weights: an n-gram file for trees


def save_drafter(config: Qwen3Config, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Write config.json and model.safetensors. `config` and `weights` are `drafter.config` and
    `drafter.state_dict()`, in any dtype."""
    write_drafter_folder(build_public_config(config), weights, folder)


def write_drafter_folder(config: dict, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Write a drafter's folder in any layout, with digests (`infer.formats.integrity`)."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / "config.json", json.dumps(config, indent=2) + "\n")
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    save_weights_with_digests(contiguous, folder / "model.safetensors", config)


def load_drafter(
    folder: str | Path,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    target_layers: int | None = None,
    quantization: str = "none",
    sliding_window: int | None = None,
) -> Drafter | PromptLookup:
    """Load a drafter in any layout that a family knows.

    folder: a local folder, a training checkpoint (which holds the drafter in `drafter/`), an id on
        the model hub, or "lookup" for prompt lookup
    dtype: of the weights; None: as stored
    target_layers: the target's number of layers, needed for a config without the ids of the feature
        layers (DART's published ones)
    quantization: "none" or "int8" (`infer.int8_cpu`), for float32 on the CPU
    window: see `infer.drafters.base.limit_attention_window`

    An n-gram file beside the weights is used by engines. Warns if config.json was changed after the
    weights were saved.

    Raises FileNotFoundError if there is no drafter. Raises ValueError for int8 on other devices,
    for a window that does not fit, and with every config key and tensor that is missing, unknown,
    wrong or not finite."""
    if str(folder) == PROMPT_LOOKUP_FAMILY.name:
        return PromptLookup()
    if quantization == "int8":
        is_cpu = torch.device(device).type == "cpu"
        if dtype not in (None, torch.float32) or not is_cpu:
            raise ValueError(
                "drafter.quantization=int8 is for float32 on the CPU: use target.device=cpu "
                "target.dtype=auto"
            )
    opened, reading = open_checked_folder(folder, target_layers)
    drafter = cast(Drafter, reading.build_drafter("cpu"))
    if reading.padded_rows is not None and "d2t" in opened.tensors:
        check_padded_vocabulary(folder, opened.load({"d2t"})["d2t"])

    weights = opened.load({*drafter.state_dict()})
    if drafter.d2t is not None:
        check_draft_vocabulary(folder, weights["d2t"], reading.options["vocab_size"])
    check_finite(str(folder), weights.items())
    drafter.load_state_dict(weights)
    ngram_file = opened.path / NGRAM_FILE_NAME
    drafter.ngram_path = ngram_file if ngram_file.is_file() else None

    if quantization == "int8":
        dtype = torch.float32
    drafter.to(device, dtype or weights["norm.weight"].dtype).eval().requires_grad_(False)
    if sliding_window is not None:
        limit_attention_window(drafter, sliding_window)
    if quantization == "int8":
        del weights  # quantisation needs the memory
        load_int8_package().quantise_drafter(drafter)
    return drafter


def open_checked_folder(
    folder: str | Path, target_layers: int | None
) -> tuple[DrafterFolder, ParsedConfig]:
    """Open a drafter's folder and read its config, with tensors under our names. Raises
    FileNotFoundError and ValueError as `load_drafter` does, and gives its warnings."""
    opened = open_drafter_folder(folder)
    if not opened.config or not opened.tensors:
        subfolders = ""
        if str(opened.path) == str(folder):
            subfolders = f" (and there is neither {' nor '.join(DRAFTER_SUBFOLDERS)} in it)"
        problems = "; ".join(opened.problems)
        raise FileNotFoundError(f"{opened.path} is no drafter: {problems}{subfolders}")

    reading = read_layout(opened, target_layers)
    problems = find_folder_problems(opened, reading)
    if problems:
        raise ValueError(f"{folder}: {'; '.join(problems)}")
    if opened.config_changed:
        warnings.warn(
            f"{folder}/config.json was changed after its weights were saved; copy it again unless "
            "that was you",
            stacklevel=3,
        )
    for doubt in reading.warnings:
        warnings.warn(f"{folder}: {doubt}", stacklevel=3)
    return normalise_tensors(opened, reading), reading


def check_draft_vocabulary(folder: str | Path, d2t: torch.Tensor, vocabulary_size: int) -> None:
    """Raise ValueError unless d2t (draft vocabulary,), offsets from draft ids to token ids, gives
    different tokens of the vocabulary."""
    tokens = d2t.long() + torch.arange(len(d2t))
    is_inside = ((tokens >= 0) & (tokens < vocabulary_size)).all()
    if not is_inside or len(tokens.unique()) < len(tokens):
        raise ValueError(
            f"{folder}: d2t leads twice to a token, or outside the vocabulary, 0 to "
            f"{vocabulary_size - 1}"
        )


def check_padded_vocabulary(folder: str | Path, d2t: torch.Tensor) -> None:
    """Raise ValueError unless d2t (V,), offsets from the ids of a padded vocabulary to token ids,
    is zero everywhere."""
    if d2t.any():
        raise ValueError(
            f"{folder}: draft_vocab_size is more than vocab_size, and d2t is not zero: a d2t that "
            "maps ids to other tokens can only be read if draft_vocab_size is at most vocab_size"
        )
