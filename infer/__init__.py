"""Lossless speculative decoding with block-diffusion drafters, and decoding of masked diffusion
models, which need no drafter.

With a drafter, use `load_target`, `load_drafter` and `generate`. With a masked diffusion model, use
`load_masked` and `generate`. This package needs torch, transformers, safetensors, numpy and numba.
Its public names are imported on first use, so that `infer.config` can be imported without torch.
infer/main.py is the entry point of the commands.
"""

from importlib import import_module
from typing import Any

from infer.utils.optional import explain_missing_module, is_installed

# Keys are modules, values are the public names that each module defines.
_PUBLIC_NAMES = {
    "infer.api": ("Generation", "generate", "open_engine", "stream"),
    "infer.config": ("DecodeOptions", "DrafterConfig", "EngineConfig"),
    "infer.drafters.dart.model": ("DART",),
    "infer.drafters.dflash.model": ("DFlash",),
    "infer.engine.engine": ("Engine",),
    "infer.engine.sequence": ("DecodeStats",),
    "infer.formats.checkpoint": ("load_drafter", "save_drafter"),
    "infer.masked.config": ("MaskedOptions",),
    "infer.masked.model": ("MaskedModel", "load_masked"),
    "infer.targets.loading": ("load_target",),
    "infer.targets.target": ("Target",),
}
_MODULE_OF_NAME = {name: module for module, names in _PUBLIC_NAMES.items() for name in names}
__all__ = [name for name, module in _MODULE_OF_NAME.items() if is_installed(module)]


def __getattr__(name: str) -> Any:
    """Import the module that defines a public name of `infer`, and return the named object.

    Python calls this function for an attribute of `infer` that is not defined in this file.
    """
    if name == "__version__":
        return import_module("infer.utils.installation").package_version()
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module 'infer' has no attribute '{name}'")
    module = _MODULE_OF_NAME[name]
    missing_message = explain_missing_module(module, f"infer.{name}")
    if missing_message is not None:
        raise ImportError(missing_message)
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    """List the public names, for tab completion and help()."""
    return sorted({*globals(), *__all__})
