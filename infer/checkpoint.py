"""Drafters on disk: a folder of `config.json` and `model.safetensors`; for DFlash the public one that serving engines
read."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from infer.drafter import Drafter
from infer.families import ARCHITECTURES, CLASSES

MODEL_MODE = 0o644  # safetensors writes 0600, which other users' engines cannot read


def config_dict(config: Qwen3Config) -> dict:
    """config.json with exactly the keys of the public layout; what the dataclass adds would only confuse its
    readers."""
    keys = [
        "architectures",
        "auto_map",
        "model_type",
        "block_size",
        "dflash_config",
        "dart_config",
        "num_target_layers",
        "num_hidden_layers",
        "layer_types",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "rope_theta",
        "max_position_embeddings",
        "vocab_size",
        "tie_word_embeddings",
    ]
    everything = config.to_dict() | {"model_type": "qwen3", "rope_theta": config.rope_parameters["rope_theta"]}
    everything["architectures"] = config.architectures
    if hasattr(config, "auto_map"):
        everything["auto_map"] = config.auto_map
    return {key: everything[key] for key in keys if key in everything}


def save_drafter(config: Qwen3Config, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Writes config.json and model.safetensors: `drafter.config` and `drafter.state_dict()`, in any dtype."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_dict(config), indent=2) + "\n")
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(MODEL_MODE)


def load_drafter(folder: str | Path, dtype: torch.dtype | None = None, device: str | torch.device = "cpu") -> Drafter:
    """Reads a drafter folder (or the folder of a training checkpoint that holds one in `drafter/`).

    Raises FileNotFoundError when it is none, ValueError naming the tensors that are missing, unknown or misshapen.
    """
    folder = Path(folder)
    if (folder / "drafter").is_dir():
        folder = folder / "drafter"
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} is no drafter: {name} is missing")
    raw = json.loads((folder / "config.json").read_text())
    family = ARCHITECTURES.get(str((raw.get("architectures") or [None])[0]))
    if family is None:
        known = " or ".join(f"['{name}']" for name in ARCHITECTURES)
        raise ValueError(f"{folder}: architectures is {raw.get('architectures')}, expected {known}")
    kept = {key: value for key, value in raw.items() if key not in ("auto_map", "model_type", "rope_theta")}
    rope = {"rope_type": "default", "rope_theta": float(raw["rope_theta"])}
    if "auto_map" in raw:
        kept["auto_map"] = raw["auto_map"]
    config = Qwen3Config(**kept, rope_parameters=rope)
    weights = load_file(folder / "model.safetensors")
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in CLASSES[family](config).state_dict().items()}
    missing, unknown = sorted(shapes.keys() - weights.keys()), sorted(weights.keys() - shapes.keys())
    wrong = [name for name in shapes.keys() & weights.keys() if shapes[name] != weights[name].shape]
    if missing or unknown or wrong:
        raise ValueError(f"{folder}/model.safetensors: missing {missing}, unknown {unknown}, of wrong shape {wrong}")
    drafter = CLASSES[family](config)
    drafter.load_state_dict(weights)
    kind = dtype or weights["norm.weight"].dtype
    return drafter.to(device, kind).eval().requires_grad_(False)
