"""Drafters on disk: a folder of `config.json` and `model.safetensors`, for DFlash the public one that serving engines
read, is written; what others write is read too."""

import json
import warnings
from pathlib import Path

import torch
from transformers import Qwen3Config

from infer.drafters.base import Drafter
from infer.drafters.families import CLASSES
from infer.formats.folders import open_folder
from infer.formats.integrity import save_weights
from infer.formats.layouts import problems_of, read

KEYS = (  # of config.json, in this order
    "architectures",
    "auto_map",
    "model_type",
    "block_size",
    "dflash_config",
    "dart_config",
    "num_target_layers",
    "num_hidden_layers",
    "layer_types",
    "use_sliding_window",
    "sliding_window",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "max_position_embeddings",
    "vocab_size",
    "draft_vocab_size",
    "tie_word_embeddings",
)


def config_dict(config: Qwen3Config) -> dict:
    """config.json with exactly the keys of the public layout; what the dataclass adds would only confuse its
    readers."""
    rope = dict(config.rope_parameters)
    everything = config.to_dict() | {"model_type": "qwen3", "rope_theta": rope.pop("rope_theta")}
    everything |= {"architectures": config.architectures, "auto_map": getattr(config, "auto_map", None)}
    everything["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    if "sliding_attention" not in config.layer_types:
        for key in ("use_sliding_window", "sliding_window"):
            everything[key] = None
    return {key: everything[key] for key in KEYS if everything.get(key) is not None}


def save_drafter(config: Qwen3Config, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Writes config.json and model.safetensors: `drafter.config` and `drafter.state_dict()`, in any dtype."""
    write_folder(config_dict(config), weights, folder)


def write_folder(config: dict, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """A drafter's folder in any layout, with digests (`infer.formats.integrity`)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    save_weights(weights, folder / "model.safetensors", config)


def load_drafter(
    folder: str | Path,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    target_layers: int | None = None,
) -> Drafter:
    """Reads a drafter in any of the layouts that `infer.formats.layouts` knows: from a local folder, that of a training
    checkpoint (which holds one in `drafter/`), or from the model hub by its id. `target_layers`, how many layers the
    target has, is needed for a config that does not say which ones are tapped (DART's published ones).

    Raises FileNotFoundError when there is none, ValueError naming every key of the config and every tensor that is
    missing, unknown or wrong. Warns where config.json is not the one that the weights were saved with: somebody may
    have changed it on purpose.
    """
    opened = open_folder(folder)
    if not opened.config or not opened.tensors:
        raise FileNotFoundError(f"{folder} is no drafter: {'; '.join(opened.problems)}")
    reading = read(opened, target_layers)
    problems = problems_of(opened, reading)
    if problems:
        raise ValueError(f"{folder}: {'; '.join(problems)}")
    if opened.edited:
        warnings.warn(
            f"{folder}/config.json was changed after its weights were saved; copy it again unless that was you",
            stacklevel=2,
        )
    drafter = CLASSES[reading.family](reading.config())
    names = drafter.state_dict().keys()
    weights = opened.load({*names} | (opened.tensors.keys() & {"t2d"} if drafter.d2t is not None else set()))
    if drafter.d2t is not None:
        check_vocabulary(folder, weights["d2t"], weights.pop("t2d", None), reading.options["vocab_size"])
    drafter.load_state_dict(weights)
    kind = dtype or weights["norm.weight"].dtype
    return drafter.to(device, kind).eval().requires_grad_(False)


def check_vocabulary(folder: str | Path, d2t: torch.Tensor, t2d: torch.Tensor | None, vocabulary: int) -> None:
    """Raises ValueError unless d2t (rows,), offsets, names different tokens, and those that t2d (V,) bool marks, if it
    is there."""
    tokens = d2t.long() + torch.arange(len(d2t))
    if len(d2t) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
        raise ValueError(f"{folder}: d2t leads to tokens outside the vocabulary, 0 to {vocabulary - 1}")
    if len(tokens.unique()) < len(tokens):
        raise ValueError(f"{folder}: d2t leads twice to the same token")
    if t2d is not None:
        marked = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, tokens, True)
        if t2d.shape != marked.shape or not torch.equal(t2d.bool(), marked):
            raise ValueError(f"{folder}: t2d marks other tokens than d2t leads to")
