"""Loading: targets in int8, which are written once into the cache; and drafters, whose weights are
rounded to nearest.

The rest of `infer` comes here through `infer.targets.loading.int8_package`.
"""

import ctypes
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

from infer.int8_cpu import calibration
from infer.int8_cpu.modules import Int8Embedding, Int8Linear, round_linear
from infer.targets.loading import INT8_METHOD, load_target, model_folder, weight_files
from infer.targets.model_cache import cache_folder, make_once, save_model
from infer.targets.target import Target

__all__ = ["load_int8_target", "quantise_drafter", "round_linear"]


def quantise_drafter(drafter: nn.Module) -> None:
    """Put codes in the place of a float32 drafter's linear layers, in place, for decoding.

    A drafter need not be exact: what rounding changes is acceptance, never a text. Conditional
    heads stay."""
    head = drafter.conditional_head, drafter.confidence_head
    kept = {part for module in head if module is not None for part in module.modules()}
    for name, module in list(drafter.named_modules()):
        if type(module) is nn.Linear and module not in kept:
            drafter.set_submodule(name, round_linear(module, 2 if name == "fc" else 1))
    drafter.quantised = True
    with suppress(
        OSError, AttributeError
    ):  # loading leaves ten times what the codes take with the C library
        ctypes.CDLL(None).malloc_trim(0)


class Int8Config(QuantizationConfigMixin):
    """What a config.json says of the codes: the `digits` of every linear layer, 0 of an
    embedding."""

    def __init__(self, digits: dict[str, int], quant_method: str = INT8_METHOD) -> None:
        self.digits = digits
        self.quant_method = quant_method


class Int8Quantizer(HfQuantizer):
    """Has transformers load and store such models as any other."""

    is_trainable = False

    def is_serializable(self) -> bool:
        return True

    def _process_model_before_weight_loading(self, model: nn.Module, **_: object) -> None:
        for name, digits in self.quantization_config.digits.items():
            old = model.get_submodule(name)
            if digits:
                new = Int8Linear(old.in_features, old.out_features, old.bias is not None, digits)
            else:
                new = Int8Embedding(*old.weight.shape)
            model.set_submodule(name, new)


AUTO_QUANTIZATION_CONFIG_MAPPING[INT8_METHOD], AUTO_QUANTIZER_MAPPING[INT8_METHOD] = (
    Int8Config,
    Int8Quantizer,
)


def int8_folder(path: str, load: Callable[[], tuple[nn.Module, object]]) -> str:
    """Return the folder, in the cache, of a target in int8, made once from the model and tokenizer
    that `load` gives in float32. Raises what `load` raises, and OSError as `make_once`."""
    source = Path(path)
    parts = [
        (file.name, file.stat().st_size, file.stat().st_mtime_ns)
        for file in sorted(source.glob("*"))
    ]
    how = [
        INT8_METHOD,
        calibration.TEXTS,
        calibration.LENGTH,
        calibration.ALPHAS,
        calibration.LOSES,
    ]
    folder = cache_folder(f"{source.name}-int8", repr([*how, str(source.resolve()), parts]))

    def make(loaded: tuple[nn.Module, object], folder: Path) -> None:
        model, tokenizer = loaded
        digits = calibration.quantise(model, calibration.own_texts(model, tokenizer))
        model.config.tie_word_embeddings = False
        model.config.quantization_config = config = Int8Config(digits)
        model.hf_quantizer = Int8Quantizer(config)
        save_model(model, tokenizer, folder)

    return str(make_once(folder, f"writing {path} in integers, once, into {folder}", load, make))


def load_int8_target(
    path: str, trust_remote_code: bool, told: Mapping[str, object] | None
) -> Target:
    """Load a target in int8 codes, which are written the first time."""

    def whole() -> tuple[nn.Module, object]:
        target = load_target(path, "float32", "cpu", trust_remote_code)
        return target.model, target.tokenizer

    folder = int8_folder(model_folder(path), whole)
    target = load_target(folder, "float32", "cpu", trust_remote_code, None, told)
    target.name = path
    settle(target, weight_files(folder))
    return target


def settle(target: Target, files: list[Path]) -> None:
    """Give the decoder layers of an int8 target just loaded memory of their own, a block for each
    kind of parameter, so that a recording looks at few storages and layers that read the same
    states lie one behind the other. Embedding and head are mapped from the files anew: no page that
    this reads stays."""
    kinds = defaultdict(list)
    for name, parameter in target.body.layers.named_parameters():
        kinds[name.rpartition(".")[2], parameter.dtype].append(parameter)
    for parameters in kinds.values():
        block = torch.cat([parameter.flatten() for parameter in parameters])
        sizes = [parameter.numel() for parameter in parameters]
        for parameter, part in zip(parameters, block.split(sizes), strict=True):
            parameter.data = part.view_as(parameter)
    inside = {id(parameter) for parameter in target.body.layers.parameters()}
    outside = {name: p for name, p in target.model.named_parameters() if id(p) not in inside}
    for parameter in filter(torch.is_floating_point, outside.values()):
        parameter.data = parameter.clone()
    target.lean, target.shapes  # noqa: B018
    for file in files:
        for name, tensor in load_file(file).items():  # mapped, not read
            if tensor.dtype == torch.int8 and name in outside:
                outside[name].data = tensor
    target.watch.note()
