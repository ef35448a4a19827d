"""Loading of some decoder layers of a target, which training from stored features and initialising
a drafter need. The other layers take no memory."""

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
    check_tensors,
    read_tensor_shapes,
)
from infer.targets.support import find_decoder, get_decoder_layers


def load_layer_weights(
    path: str,
    files: list[Path],
    model: PreTrainedModel,
    layers: Iterable[int],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Load embedding, head, last norm and the decoder layers `layers` of a model on the meta device
    from the safetensors `files` of the target at `path`.

    Layers that are not stored under their own parameter names (experts one by one) are skipped.
    Raises ValueError if embedding, head or norm are not, and for tensors that are missing, of
    another shape or not finite.
    """
    decoder_layers = get_decoder_layers(find_decoder(model))
    shapes = read_tensor_shapes(path, files)
    check_layer_indices(path, model, shapes)
    state_dict_names = model.state_dict().keys()  # these include buffers, which are not loaded
    needed = get_required_shapes(path, model, shapes)
    for i in layers:
        layer_shapes = parameter_shapes(model, decoder_layers[i])
        prefix = os.path.commonprefix([*layer_shapes])
        missing = [name for name in layer_shapes if name not in shapes]
        unexpected = [
            name for name in shapes if name.startswith(prefix) and name not in state_dict_names
        ]
        if missing and unexpected:  # stored under other names
            continue
        check_tensors(path, model, missing, (), unexpected)
        needed |= layer_shapes
    mismatched = [
        (name, shapes[name], shape) for name, shape in needed.items() if shapes[name] != shape
    ]
    check_tensors(path, model, (), mismatched, ())

    stored: dict[str, torch.Tensor] = {}
    for file in files:
        stored |= load_file(file)  # mapped into memory, not read
    weights = {name: stored[name].to(device, dtype, copy=True) for name in needed}
    check_finite(f"target.path={path}", weights.items())
    model.load_state_dict(weights, strict=False, assign=True)
    embedding = model.get_input_embeddings()
    scale = vars(embedding).get("scalar_embed_scale")
    if scale:  # Gemma's scale is in a buffer, which no file contains
        embedding.embed_scale = torch.tensor(scale, device=device)
    model.tie_weights()


def get_required_shapes(
    path: str, model: PreTrainedModel, shapes: Mapping[str, Shape]
) -> dict[str, Shape]:
    """Return the parameter shapes of a model's embedding, head and last norm, by name. Raises
    ValueError if one is not among the stored tensors `shapes` under its own name."""
    children = dict(find_decoder(model).named_children())
    if "norm" not in children:
        raise ValueError(
            f"target.path={path}: the target's last norm has another name: train without features="
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
                f"target.path={path}: the target's {title} ({missing[0]}) is not stored under its "
                f"own name: {DOWNLOAD_AGAIN_HINT}, or train without features="
            )
        required |= module_shapes
    return required


def check_layer_indices(path: str, model: PreTrainedModel, shapes: Mapping[str, Shape]) -> None:
    """Raise ValueError if the files contain decoder layers that the model does not have."""
    layers = get_decoder_layers(find_decoder(model))
    prefix = next(name for name, module in model.named_modules() if module is layers)
    pattern = re.compile(re.escape(prefix) + r"\.(\d+)\.")
    unexpected = []
    for name in shapes:
        match = pattern.match(name)
        if match is not None and int(match[1]) >= len(layers):
            unexpected.append(name)
    check_tensors(path, model, (), (), unexpected)


def parameter_shapes(model: nn.Module, module: nn.Module) -> dict[str, Shape]:
    """Return the shapes of the parameters of a model's submodule, by their names in the model."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)]: tuple(parameter.shape) for parameter in module.parameters()}
