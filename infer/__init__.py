"""Lossless decoding with block-diffusion drafters: `load_target`, `load_drafter`, `generate`; and of masked diffusion
models that draft for themselves: `load_masked`, `generate`.

Needs torch, transformers and safetensors only. Names are imported on first use, so that `infer.config` stays light.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infer.api import Generation, generate, stream
    from infer.checkpoint import load_drafter, save_drafter
    from infer.config import DecodeOptions, DrafterConfig, EngineConfig
    from infer.dart import DART
    from infer.decode import Engine, open_engine
    from infer.dflash import DFlash
    from infer.masked import MaskedModel, load_masked
    from infer.target import Target, load_target
    from infer.text import DecodeStats

_HOME = {
    "Generation": "infer.api",
    "generate": "infer.api",
    "stream": "infer.api",
    "load_drafter": "infer.checkpoint",
    "save_drafter": "infer.checkpoint",
    "DART": "infer.dart",
    "DecodeOptions": "infer.config",
    "DrafterConfig": "infer.config",
    "EngineConfig": "infer.config",
    "DecodeStats": "infer.text",
    "Engine": "infer.decode",
    "open_engine": "infer.decode",
    "DFlash": "infer.dflash",
    "MaskedModel": "infer.masked",
    "load_masked": "infer.masked",
    "Target": "infer.target",
    "load_target": "infer.target",
}
__all__ = [
    "DART",
    "DFlash",
    "DecodeOptions",
    "DecodeStats",
    "DrafterConfig",
    "Engine",
    "EngineConfig",
    "Generation",
    "MaskedModel",
    "Target",
    "generate",
    "load_drafter",
    "load_masked",
    "load_target",
    "open_engine",
    "save_drafter",
    "stream",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'infer' has no attribute '{name}'")
    return getattr(import_module(_HOME[name]), name)
