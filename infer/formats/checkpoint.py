"""Load and save drafters. A drafter is stored as a folder with `config.json` and
`model.safetensors`.

Several projects publish drafters, each with its own layout (config keys and tensor names). Drafters
are loaded from every layout that their family can read. They are saved in one layout per family;
for DFlash, this is the DFlash authors' layout, which serving engines read.
"""

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
from infer.formats.layouts import (
    find_folder_problems,
    parse_drafter_config,
    rename_and_unpad_tensors,
)
from infer.targets.checks import check_finite
from infer.targets.loading import load_int8_package
from infer.utils.files import atomic_write

# Optional file beside the weights, with n-gram counts that improve the scores of draft trees.
NGRAM_FILE_NAME = "ngrams"


def save_drafter(config: Qwen3Config, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Write a drafter's config.json and model.safetensors to `folder`.

    config: `drafter.config`. weights: `drafter.state_dict()`, in any dtype.
    """
    write_drafter_folder(build_public_config(config), weights, folder)


def write_drafter_folder(config: dict, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Write `config` to config.json and `weights` to model.safetensors in a drafter's folder, with
    digests that detect damage (`infer.formats.integrity`).

    Keys and tensor names are written as they are, so they may be those of any project.
    """
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
    """Load a drafter in any layout (config keys and tensor names) that a drafter family can read.

    folder: a path or an id on the Hugging Face hub, see `find_drafter_folder`; or "lookup" for
        prompt lookup
    dtype: the dtype of the weights; None means the stored dtype
    device: the device of the weights
    target_layers: the target's number of layers, needed only if config.json does not list the
        target layers that the drafter reads, as in the published DART drafters
    quantization: "none", or "int8" for int8 weights (`infer.int8_cpu`), which need float32 on the
        CPU
    sliding_window: the drafter's attention reads at most this number of last positions, see
        `limit_attention_window`; None means no limit

    If the folder contains an n-gram file, its path is stored in the drafter's `ngram_path`. Warns
    if config.json was changed after the weights were saved.

    Raises FileNotFoundError if there is no drafter. Raises ValueError if int8 is not possible with
    this dtype or device, or if the sliding window is invalid. Also raises ValueError for config
    keys or tensors that are missing, unknown, wrong or not finite, and lists all of them.
    """
    if str(folder) == PROMPT_LOOKUP_FAMILY.name:
        return PromptLookup()
    if quantization == "int8":
        is_cpu = torch.device(device).type == "cpu"
        if dtype not in (None, torch.float32) or not is_cpu:
            raise ValueError(
                "drafter.quantization=int8 requires float32 on the CPU: use target.device=cpu "
                "target.dtype=auto"
            )
    opened, reading = open_checked_folder(folder, target_layers)
    drafter = cast(Drafter, reading.build_drafter("cpu"))
    if reading.padded_vocab_size is not None and "d2t" in opened.tensors:
        require_zero_d2t(folder, opened.load({"d2t"})["d2t"])

    weights = opened.load({*drafter.state_dict()})
    if drafter.d2t is not None:
        check_draft_vocabulary(folder, weights["d2t"], reading.config_kwargs["vocab_size"])
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
        # The drafter has a copy of the weights; free this memory before the quantisation
        del weights
        load_int8_package().quantise_drafter(drafter)
    return drafter


def open_checked_folder(
    folder: str | Path, target_layers: int | None
) -> tuple[DrafterFolder, ParsedConfig]:
    """Open a drafter's folder, check it, and translate its config keys and tensor names to those of
    this project. Return the folder with the translated names, and the translated config.

    folder: a path or an id on the Hugging Face hub. target_layers: see `load_drafter`.

    Raises FileNotFoundError if there is no drafter, and ValueError with a list of all problems of
    the folder. Warns if config.json was changed after the weights were saved, or is ambiguous.
    """
    opened = open_drafter_folder(folder)
    if not opened.config or not opened.tensors:
        subfolders = ""
        if str(opened.path) == str(folder):
            subfolders = f" (the folder has no subfolder {' or '.join(DRAFTER_SUBFOLDERS)} either)"
        problems = "; ".join(opened.problems)
        raise FileNotFoundError(
            f"{opened.path} contains no drafter: {problems}{subfolders}; give the folder of a "
            "drafter"
        )

    reading = parse_drafter_config(opened, target_layers)
    problems = find_folder_problems(opened, reading)
    if problems:
        raise ValueError(f"{folder}: {'; '.join(problems)}")
    if opened.config_changed:
        warnings.warn(
            f"{folder}/config.json was changed after the weights were saved; unless you changed "
            "the file yourself, copy the folder again",
            stacklevel=3,
        )
    for doubt in reading.warnings:
        warnings.warn(f"{folder}: {doubt}", stacklevel=3)
    return rename_and_unpad_tensors(opened, reading), reading


def check_draft_vocabulary(folder: str | Path, d2t: torch.Tensor, vocabulary_size: int) -> None:
    """Raise ValueError unless `d2t` maps all tokens of the drafter's reduced vocabulary to distinct
    tokens of the target's vocabulary.

    folder: the drafter's folder, for the message
    d2t: (draft_vocab_size,), for each draft token, the target's token id minus the draft token's id
    """
    tokens = d2t.long() + torch.arange(len(d2t))
    is_inside = ((tokens >= 0) & (tokens < vocabulary_size)).all()
    if not is_inside or len(tokens.unique()) < len(tokens):
        raise ValueError(
            f"{folder}: the tensor d2t maps two draft tokens to the same target token, or a "
            f"draft token to an id that the target does not have (ids are 0 to "
            f"{vocabulary_size - 1}); copy the drafter again"
        )


def require_zero_d2t(folder: str | Path, d2t: torch.Tensor) -> None:
    """Raise ValueError unless `d2t` is zero everywhere, which means that the drafter uses the
    target's token ids. Called for a drafter whose vocabulary is larger than the target's, because
    it is padded.

    folder: the drafter's folder, for the message
    d2t: for each draft token, the target's token id minus the draft token's id
    """
    if d2t.any():
        raise ValueError(
            f"{folder}: draft_vocab_size is more than vocab_size, and the tensor d2t is not zero "
            "everywhere. Such a drafter is supported only if d2t is zero, which maps every token "
            "to itself"
        )
