from infer.api import (
    Generation as Generation,
    generate as generate,
    open_engine as open_engine,
    stream as stream,
)
from infer.config import (
    DecodeOptions as DecodeOptions,
    DrafterConfig as DrafterConfig,
    EngineConfig as EngineConfig,
)
from infer.drafters.dart.model import DART as DART
from infer.drafters.dflash.model import DFlash as DFlash
from infer.engine.engine import Engine as Engine
from infer.engine.sequence import DecodeStats as DecodeStats
from infer.formats.checkpoint import load_drafter as load_drafter, save_drafter as save_drafter
from infer.masked.config import MaskedOptions as MaskedOptions
from infer.masked.model import MaskedModel as MaskedModel, load_masked as load_masked
from infer.targets.loading import load_target as load_target
from infer.targets.target import Target as Target

__version__: str
