"""Lossless decoding with block-diffusion drafters: `load_target`, `load_drafter`, `generate`; and of masked diffusion
models that draft for themselves: `load_masked`, `generate`.

Needs torch, transformers and safetensors only. Names are imported on first use, so that `infer.config` stays light.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infer.api import Generation, generate, stream
    from infer.config import DecodeOptions, DrafterConfig, EngineConfig
    from infer.drafters.dart.model import DART
    from infer.drafters.dflash.model import DFlash
    from infer.engine.engine import Engine, open_engine
    from infer.engine.sequence import DecodeStats
    from infer.formats.checkpoint import load_drafter, save_drafter
    from infer.masked.model import MaskedModel, load_masked
    from infer.targets.loading import load_target
    from infer.targets.target import Target

_HOME = {
    "Generation": "infer.api",
    "generate": "infer.api",
    "stream": "infer.api",
    "load_drafter": "infer.formats.checkpoint",
    "save_drafter": "infer.formats.checkpoint",
    "DART": "infer.drafters.dart.model",
    "DecodeOptions": "infer.config",
    "DrafterConfig": "infer.config",
    "EngineConfig": "infer.config",
    "DecodeStats": "infer.engine.sequence",
    "Engine": "infer.engine.engine",
    "open_engine": "infer.engine.engine",
    "DFlash": "infer.drafters.dflash.model",
    "MaskedModel": "infer.masked.model",
    "load_masked": "infer.masked.model",
    "Target": "infer.targets.target",
    "load_target": "infer.targets.loading",
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
