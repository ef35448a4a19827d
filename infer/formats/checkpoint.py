"""Drafters on disk: folders of `config.json` and `model.safetensors`, read in every layout that a
family knows, written in the family's own one (for DFlash the public one, which serving engines
read)."""

import json
import warnings
from pathlib import Path

import torch
from transformers import Qwen3Config

from infer.drafters.base import Drafter, narrow
from infer.drafters.config_keys import config_dict
from infer.drafters.families import LOOKUP
from infer.drafters.lookup import Lookup
from infer.formats.folders import INNER, open_folder
from infer.formats.integrity import save_weights
from infer.formats.layouts import as_read, find_problems, read
from infer.targets.checks import check_finite
from infer.targets.loading import int8_package
from infer.utils.files import atomic_write

NGRAMS = "ngrams"  # beside the weights: an n-gram file for trees


def save_drafter(config: Qwen3Config, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Write config.json and model.safetensors: `drafter.config` and `drafter.state_dict()`, in any
    dtype."""
    write_folder(config_dict(config), weights, folder)


def write_folder(config: dict, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Write a drafter's folder in any layout, with digests (`infer.formats.integrity`)."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / "config.json", json.dumps(config, indent=2) + "\n")
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    save_weights(weights, folder / "model.safetensors", config)


def load_drafter(
    folder: str | Path,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    target_layers: int | None = None,
    quantization: str = "none",
    sliding_window: int | None = None,
) -> Drafter | Lookup:
    """Load a drafter in any layout that a family knows: from a local folder, that of a training
    checkpoint (which holds one in `drafter/`), or from the model hub by its id; "lookup": the
    text's own n-grams. `target_layers`, how many layers the target has, is needed for a config that
    does not say which ones are tapped (DART's published ones). `quantization`: none or int8
    (`infer.int8_cpu`), for float32 on the CPU. `sliding_window`: see `infer.drafters.base.narrow`.

    Raises FileNotFoundError when there is none, ValueError naming every key of the config and every
    tensor that is missing, unknown, wrong or not finite, for int8 elsewhere, and for a window that
    does not fit. An n-gram file beside the weights goes with them: engines open it. Warns where
    config.json is not the one that the weights were saved with: somebody may have changed it on
    purpose.
    """
    if str(folder) == LOOKUP.name:
        return Lookup()
    if quantization == "int8" and (
        dtype not in (None, torch.float32) or torch.device(device).type != "cpu"
    ):
        raise ValueError(
            "drafter.quantization=int8 is for float32 on the CPU: use target.device=cpu target.dtype=auto"
        )
    opened = open_folder(folder)
    if not opened.config or not opened.tensors:
        tried = (
            ""
            if str(opened.path) != str(folder)
            else f" (and there is neither {' nor '.join(INNER)} in it)"
        )
        raise FileNotFoundError(f"{opened.path} is no drafter: {'; '.join(opened.problems)}{tried}")
    reading = read(opened, target_layers)
    if problems := find_problems(opened, reading):
        raise ValueError(f"{folder}: {'; '.join(problems)}")
    if opened.edited:
        warnings.warn(
            f"{folder}/config.json was changed after its weights were saved; copy it again unless that was you",
            stacklevel=2,
        )
    opened = as_read(opened, reading)
    drafter = reading.drafter("cpu")
    for doubt in reading.doubts:
        warnings.warn(f"{folder}: {doubt}", stacklevel=2)
    if reading.padded_rows is not None and "d2t" in opened.tensors:
        check_padding(folder, opened.load({"d2t"})["d2t"])
    weights = opened.load({*drafter.state_dict()})
    if drafter.d2t is not None:
        check_vocabulary(folder, weights["d2t"], reading.options["vocab_size"])
    check_finite(str(folder), weights.items())
    drafter.load_state_dict(weights)
    drafter.ngrams = opened.path / NGRAMS if (opened.path / NGRAMS).is_file() else None
    kind = torch.float32 if quantization == "int8" else dtype or weights["norm.weight"].dtype
    drafter.to(device, kind).eval().requires_grad_(False)
    if sliding_window is not None:
        narrow(drafter, sliding_window)
    if quantization == "int8":
        del weights
        int8_package().quantise_drafter(drafter)
    return drafter


def check_vocabulary(folder: str | Path, d2t: torch.Tensor, vocabulary: int) -> None:
    """Raise ValueError unless d2t (rows,), offsets, names different tokens of the vocabulary."""
    tokens = d2t.long() + torch.arange(len(d2t))
    if not ((tokens >= 0) & (tokens < vocabulary)).all() or len(tokens.unique()) < len(tokens):
        raise ValueError(
            f"{folder}: d2t leads twice to a token, or outside the vocabulary, 0 to {vocabulary - 1}"
        )


def check_padding(folder: str | Path, d2t: torch.Tensor) -> None:
    """Raise ValueError unless d2t (V,), offsets of a padded vocabulary's tokens, leaves each where
    it is."""
    if d2t.any():
        raise ValueError(
            f"{folder}: draft_vocab_size is more than vocab_size, and d2t, which gives the head's rows other tokens, "
            "can only be read for fewer rows than tokens"
        )
