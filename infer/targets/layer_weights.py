"""Load only some decoder layers of a target, so that the layers that are not needed take no memory.
This is enough for training from stored hidden states, and for initialising a drafter from the
target's layers."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from infer.targets.checks import (
    DOWNLOAD_AGAIN_HINT,
    Shape,
    check_finite,
    read_tensor_shapes,
    refuse_tensor_errors,
)
from infer.targets.support import find_decoder, get_decoder_layers


def load_layers_embedding_and_head(
    path: str,
    files: list[Path],
    model: PreTrainedModel,
    layers: Iterable[int],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Fill the embedding, the head, the final norm and some decoder layers of `model` with the
    target's weights. `model` is on the meta device, and the decoder layers that are not loaded stay
    there.

    path: the target's path, for error messages
    files: the target's safetensors files
    layers: indices of the decoder layers to load

    A decoder layer is skipped if the files store it under other parameter names than the model's,
    for example if each expert of a mixture of experts is stored as a separate tensor. Raises
    ValueError if the embedding, head or norm is stored under another name, or if a tensor is
    missing, has another shape or is not finite.
    """
    decoder_layers = get_decoder_layers(find_decoder(model))
    shapes = read_tensor_shapes(path, files)
    refuse_extra_layers(path, model, shapes)
    state_dict_names = model.state_dict().keys()  # also contains buffers, which are not loaded
    needed = get_embedding_head_and_norm_shapes(path, model, shapes)
    for i in layers:
        layer_shapes = parameter_shapes(model, decoder_layers[i])
        prefix = os.path.commonprefix([*layer_shapes])
        missing = [name for name in layer_shapes if name not in shapes]
        unexpected = [
            name for name in shapes if name.startswith(prefix) and name not in state_dict_names
        ]
        if missing and unexpected:  # the files store the layer under other names
            continue
        refuse_tensor_errors(path, model, missing, (), unexpected)
        needed |= layer_shapes
    mismatched = [
        (name, shapes[name], shape) for name, shape in needed.items() if shapes[name] != shape
    ]
    refuse_tensor_errors(path, model, (), mismatched, ())

    stored: dict[str, torch.Tensor] = {}
    for file in files:
        stored |= load_file(file)  # memory-maps the file; nothing is read yet
    weights = {name: stored[name].to(device, dtype, copy=True) for name in needed}
    check_finite(f"target.path={path}", weights.items())
    model.load_state_dict(weights, strict=False, assign=True)
    embedding = model.get_input_embeddings()
    scale = vars(embedding).get("scalar_embed_scale")
    if scale:  # Gemma's embedding scale is not in the files
        embedding.embed_scale = torch.tensor(scale, device=device)
    model.tie_weights()


def get_embedding_head_and_norm_shapes(
    path: str, model: PreTrainedModel, shapes: Mapping[str, Shape]
) -> dict[str, Shape]:
    """Return the shapes of the parameters in a model's embedding, head and final norm, by parameter
    name.

    path: the target's path, for error messages
    shapes: the shape of every tensor in the weight files, by tensor name

    Raises ValueError if the weight files do not contain one of these parameter names.
    """
    children = dict(find_decoder(model).named_children())
    if "norm" not in children:
        raise ValueError(
            f"target.path={path}: the target's last norm is not named `norm`, so it cannot be "
            "loaded without the rest of the model; set features=null to train with the whole "
            "target in memory"
        )
    modules = {"embedding": model.get_input_embeddings(), "last norm": children["norm"]}
    head = model.get_output_embeddings()
    if head is not None and not model.config.get_text_config().tie_word_embeddings:
        modules["head"] = head
    required = {}
    for title, module in modules.items():
        module_shapes = parameter_shapes(model, module)
        missing = [name for name in module_shapes if name not in shapes]
        if missing:
            raise ValueError(
                f"target.path={path}: the weight files contain no tensor {missing[0]}, which is "
                f"the target's {title}; {DOWNLOAD_AGAIN_HINT}, or set features=null to train with "
                "the whole target in memory"
            )
        required |= module_shapes
    return required


def refuse_extra_layers(path: str, model: PreTrainedModel, shapes: Mapping[str, Shape]) -> None:
    """Raise ValueError if the weight files contain decoder layers that the model does not have.

    path: the target's path, for the error message
    shapes: the shape of every tensor in the weight files, by tensor name
    """
    layers = get_decoder_layers(find_decoder(model))
    prefix = next(name for name, module in model.named_modules() if module is layers)
    pattern = re.compile(re.escape(prefix) + r"\.(\d+)\.")
    unexpected = []
    for name in shapes:
        match = pattern.match(name)
        if match is not None and int(match[1]) >= len(layers):
            unexpected.append(name)
    refuse_tensor_errors(path, model, (), (), unexpected)


def parameter_shapes(model: nn.Module, module: nn.Module) -> dict[str, Shape]:
    """Return the shapes of the parameters of `module`, which is a submodule of `model`. The keys
    are the parameters' names in `model`."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)]: tuple(parameter.shape) for parameter in module.parameters()}
