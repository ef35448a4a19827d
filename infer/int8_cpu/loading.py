"""Load targets with int8 weights, and quantise drafters.

A target is calibrated and quantised once, and its int8 weights are written to a cache folder. A
drafter is quantised without calibration each time it is loaded. The rest of `infer` uses this
module through `infer.targets.loading.load_int8_package`.
"""

import ctypes
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

from infer.int8_cpu import calibration
from infer.int8_cpu.modules import Int8Embedding, Int8Linear, quantise_linear
from infer.targets.loading import (
    INT8_QUANT_METHOD,
    get_local_weights_folder,
    list_weight_files,
    load_target,
)
from infer.targets.model_cache import derived_files_folder, get_or_create_cached_folder, save_model
from infer.targets.target import Target

__all__ = ["load_int8_target", "quantise_drafter", "quantise_linear"]


def quantise_drafter(drafter: nn.Module) -> None:
    """Replace the linear layers of a float32 drafter by int8 layers, in place.

    This changes the acceptance length but never the output, because the target verifies all drafted
    tokens. The conditional head and the confidence head are not quantised.
    """
    float_modules: set[nn.Module] = set()
    heads = cast(list[nn.Module | None], [drafter.conditional_head, drafter.confidence_head])
    for head in heads:
        if head is not None:
            float_modules.update(head.modules())
    for name, module in list(drafter.named_modules()):
        if type(module) is nn.Linear and module not in float_modules:
            codes_per_activation = 2 if name == "fc" else 1
            drafter.set_submodule(name, quantise_linear(module, codes_per_activation))
    drafter.quantised = True  # ty: ignore[invalid-assignment]

    # After loading, the heap of the C library contains ten times as much unused memory as the int8
    # codes need. malloc_trim returns it to the operating system. Only glibc has this function.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class Int8Config(QuantizationConfigMixin):
    """The `quantization_config` in the config.json of a target with int8 weights.

    digits: keys are names of quantised modules. Values are numbers of int8 codes per activation for
        linear layers, and 0 for embeddings. config.json uses the same name, digits.
    """

    def __init__(self, digits: dict[str, int], quant_method: str = INT8_QUANT_METHOD) -> None:
        self.digits = digits
        self.quant_method = quant_method  # ty: ignore[invalid-assignment]


class Int8Quantizer(HfQuantizer):
    """The quantizer of transformers for models with int8 layers, used to load and save them."""

    is_trainable = False

    def is_serializable(self) -> bool:
        return True

    def _process_model_before_weight_loading(self, model: nn.Module, **_: object) -> None:
        config = cast(Int8Config, self.quantization_config)
        for name, codes_per_activation in config.digits.items():
            module = model.get_submodule(name)
            if codes_per_activation:
                layer = cast(nn.Linear, module)
                has_bias = layer.bias is not None
                int8_module = Int8Linear(
                    layer.in_features, layer.out_features, has_bias, codes_per_activation
                )
            else:
                int8_module = Int8Embedding(*cast(nn.Embedding, module).weight.shape)
            model.set_submodule(name, int8_module)


# These registrations let transformers load models with int8 layers. The type checker is silenced,
# because the type stubs allow only classes of transformers as values.
AUTO_QUANTIZATION_CONFIG_MAPPING[INT8_QUANT_METHOD] = Int8Config  # ty: ignore[invalid-assignment]
AUTO_QUANTIZER_MAPPING[INT8_QUANT_METHOD] = Int8Quantizer  # ty: ignore[invalid-assignment]


def make_int8_folder(
    path: str, load: Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerBase]]
) -> str:
    """Return the cache folder with the int8 weights of a target. The first call writes the folder.

    path: folder of the float32 model
    load: function that returns the float32 model and its tokenizer. It is called only if the cache
        folder does not exist yet.

    Raises the exceptions of `load`, and OSError if the cache folder cannot be written.
    """
    source = Path(path)
    source_files = []
    for file in sorted(source.glob("*")):
        status = file.stat()
        source_files.append((file.name, status.st_size, status.st_mtime_ns))
    calibration_settings = [
        INT8_QUANT_METHOD,
        calibration.INT8_CALIBRATION_SEQUENCE_COUNT,
        calibration.INT8_CALIBRATION_TOKENS_PER_SEQUENCE,
        calibration.SMOOTHQUANT_ALPHAS,
        calibration.MAX_ERROR_WITH_ONE_ACTIVATION_CODE,
    ]
    cache_key = repr([*calibration_settings, str(source.resolve()), source_files])
    folder = derived_files_folder(f"{source.name}-int8", cache_key)

    def write_folder(loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase], folder: Path) -> None:
        model, tokenizer = loaded
        samples = calibration.iterate_calibration_passes(model, tokenizer)
        codes_per_activation = calibration.quantise_model(model, samples)
        config = Int8Config(codes_per_activation)
        model.config.tie_word_embeddings = False
        model.config.quantization_config = config
        model.hf_quantizer = Int8Quantizer(config)  # ty: ignore[invalid-assignment]
        save_model(model, tokenizer, folder)

    message = f"writing {path} in int8 to {folder}; this is done once"
    return str(get_or_create_cached_folder(folder, message, load, write_folder))


def load_int8_target(
    path: str, trust_remote_code: bool, chat_template_kwargs: Mapping[str, object] | None
) -> Target:
    """Load a target with int8 weights.

    The first call quantises the target and writes it to a cache folder. Later calls load it from
    this folder. The arguments are those of `infer.targets.loading.load_target`.
    """

    def load_float_model() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        target = load_target(path, "float32", "cpu", trust_remote_code)
        model = target.model
        return model, cast(PreTrainedTokenizerBase, target.tokenizer)

    folder = make_int8_folder(get_local_weights_folder(path), load_float_model)
    target = load_target(folder, "float32", "cpu", trust_remote_code, None, chat_template_kwargs)
    target.name = path
    pack_weights_and_map_codes(target, list_weight_files(folder))
    return target


def pack_weights_and_map_codes(target: Target, files: list[Path]) -> None:
    """Rearrange the memory of an int8 target that was just loaded.

    files: the safetensors files of the target

    The parameters of all decoder layers are copied to a few blocks of memory, one for each name and
    dtype of a parameter. A recording of kernel calls (recording.py) then has to reference only a
    few blocks. The weights of layers that read the same hidden states are adjacent in a block.

    The int8 codes of the embedding and of the language model head are memory-mapped again. This
    frees the memory pages that were read during loading.
    """
    layers = cast(nn.ModuleList, target.decoder.layers)
    parameters_by_kind = defaultdict(list)
    for name, parameter in layers.named_parameters():
        parameters_by_kind[name.rpartition(".")[2], parameter.dtype].append(parameter)
    for parameters in parameters_by_kind.values():
        block = torch.cat([parameter.flatten() for parameter in parameters])
        sizes = [parameter.numel() for parameter in parameters]
        for parameter, block_slice in zip(parameters, block.split(sizes), strict=True):
            parameter.data = block_slice.view_as(parameter)

    layer_parameter_ids = {id(parameter) for parameter in layers.parameters()}
    other_parameters = {
        name: parameter
        for name, parameter in target.model.named_parameters()
        if id(parameter) not in layer_parameter_ids
    }
    for parameter in other_parameters.values():
        if parameter.is_floating_point():
            parameter.data = parameter.clone()

    # These properties are cached. They are computed before the codes are memory-mapped, because the
    # computation would read the mapped files into memory.
    target.kernel_decoder, target.cache_shapes  # noqa: B018
    for file in files:
        for name, tensor in load_file(file).items():  # maps the file without reading it
            if tensor.dtype == torch.int8 and name in other_parameters:
                other_parameters[name].data = tensor
    target.weight_watcher.take_snapshot()
