"""The families of drafters by name: which one a configuration or a checkpoint asks for."""

from types import ModuleType

from transformers import PretrainedConfig

from infer.config import DrafterConfig
from infer.drafters import dart, dflash
from infer.drafters.base import Drafter
from infer.targets.target import Target

MODULES: dict[str, ModuleType] = {"dflash": dflash, "dart": dart}
CLASSES: dict[str, type[Drafter]] = {"dflash": dflash.DFlash, "dart": dart.DART}


def new_drafter(options: DrafterConfig, target: Target) -> Drafter:
    """A drafter for a target, without weights yet. Raises ValueError for options that do not fit the target."""
    return CLASSES[options.family](MODULES[options.family].drafter_config(options, target))


def tapped_layers(options: DrafterConfig, theirs: PretrainedConfig) -> tuple[int, ...]:
    """The target's layers that the drafter listens to, from the target's config. Raises ValueError for others."""
    return MODULES[options.family].tapped_layers(options, theirs)


def warm_layers(options: DrafterConfig, layer_ids: tuple[int, ...], target_layers: int) -> range:
    """The target's layers that the drafter can start as."""
    return MODULES[options.family].warm_layers(layer_ids, options.layers, target_layers)
