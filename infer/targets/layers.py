"""Conversion of a target's Hugging Face layers to layers of our own decoder
(`infer.targets.kernel_decoder`). This module decides which layers our decoder supports, and builds
our layers from their weights."""

from collections.abc import Callable
from copy import copy
from pkgutil import resolve_name
from typing import Any, cast

import torch
from torch import nn
from transformers.activations import ACT2FN

from infer.kernels import reference
from infer.kernels.operands import (
    SILU_COEFFICIENTS,
    TANH_GELU_COEFFICIENTS,
    Activation,
    LinearWeights,
    RMSNormWeights,
)
from infer.kernels.table import Kernels
from infer.targets.kernel_decoder import DecoderLayer, GatedMLP, KernelDecoder
from infer.targets.support import get_decoder_layers

# Names of the norms in a Llama decoder layer.
LLAMA_NORM_NAMES = {"input_layernorm", "post_attention_layernorm"}
# Names of the norms in a decoder layer of Gemma 2 and 3, which also normalises the outputs of
# attention and MLP.
GEMMA2_NORM_NAMES = LLAMA_NORM_NAMES | {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
# Two results differ only by rounding if their relative difference is at most this number.
ROUNDING_RTOL_BY_DTYPE = {torch.float64: 1e-9, torch.float32: 1e-4}
LOW_PRECISION_RTOL = 0.05  # like ROUNDING_RTOL_BY_DTYPE, for 16-bit dtypes and int8 weights
COEFFICIENTS_BY_ACTIVATION = {
    nn.SiLU: SILU_COEFFICIENTS,
    type(ACT2FN["silu"]): SILU_COEFFICIENTS,
    type(ACT2FN["gelu_pytorch_tanh"]): TANH_GELU_COEFFICIENTS,
}


class UnsupportedLayer(Exception):
    """Raised if our own decoder does not support a layer. The message names the unsupported
    component."""


def equals_up_to_rounding(
    actual: torch.Tensor, expected: torch.Tensor, int8: bool = False, residual_norm: float = 0.0
) -> bool:
    """Return whether two tensors of the same shape differ only by rounding.

    int8: whether the tensors were computed with int8 weights
    residual_norm: norm of the residual stream, if each tensor was computed as the difference of two
        residual streams. The rounding error of such a difference grows with this norm, and so does
        the tolerance.
    """
    rtol = LOW_PRECISION_RTOL
    if not int8:
        rtol = ROUNDING_RTOL_BY_DTYPE.get(expected.dtype, LOW_PRECISION_RTOL)
    tolerance = rtol * expected.norm() + torch.finfo(expected.dtype).eps * residual_norm
    return bool((actual - expected).norm() <= tolerance)


def select_output_features(linear: nn.Module, output_ids: torch.Tensor) -> nn.Module:
    """Return a linear layer that computes only the outputs `output_ids` of `linear`. The selected
    weights, floats or int8 codes, are copied.

    output_ids: (num_selected,) int64, indices of the outputs to compute
    """
    selected = copy(linear)
    selected._parameters = linear._parameters.copy()
    for name, weight in linear.named_parameters():
        if name != "smooth":  # `smooth` (of int8 layers) has one entry per input, not per output
            selected_weight = nn.Parameter(weight.data[output_ids], requires_grad=False)
            selected._parameters[name] = selected_weight
    return selected


def is_joinable_linear(module: nn.Module) -> bool:
    """Return whether `join_linears` supports a module: nn.Linear, or a linear layer with int8
    weights, whose class has the methods `can_join` and `join` (`infer.int8_cpu.modules`)."""
    return type(module) is nn.Linear or hasattr(module, "can_join")


def join_linears(modules: list[nn.Module]) -> object:
    """Join several linear layers with the same input, so that one matmul computes all of them.
    Return the joined weights in the form that `Kernels.linear` takes.

    The weights of the modules become views of the joined weights, so that no additional memory is
    used. Raises UnsupportedLayer if the modules cannot be joined.
    """
    first: Any = modules[0]
    if hasattr(first, "can_join"):
        if not first.can_join(modules):
            raise UnsupportedLayer(
                "our decoder does not support int8 layers that read the same input but quantise it "
                "with different scales or bit widths"
            )
        return first.join(modules, join_in_place)
    if any(type(module) is not nn.Linear for module in modules):
        raise UnsupportedLayer(
            f"our decoder does not support projections of the class {type(first).__name__}"
        )
    linears = cast(list[nn.Linear], modules)
    bias = None
    if first.bias is not None:
        bias = join_in_place([linear.bias for linear in linears])
    return LinearWeights(
        join_in_place([cast(nn.Parameter, linear.weight) for linear in linears]).t(), bias
    )


def join_linear_copies(modules: list[nn.Module]) -> object:
    """Join several linear layers with the same input and without bias, so that one matmul computes
    all of them. Return the joined weights in the form that `Kernels.linear` takes. They are copies;
    the layers keep their own weights."""
    first: Any = modules[0]
    if hasattr(first, "can_join"):
        return first.join(modules, torch.cat)
    linears = cast(list[nn.Linear], modules)
    return LinearWeights(torch.cat([linear.weight for linear in linears]).detach().t())


def join_in_place(parameters: list[nn.Parameter]) -> torch.Tensor:
    """Concatenate several parameters along their first axis, and make the parameters views of the
    concatenated tensor. Return this tensor.

    The concatenated tensor therefore takes no additional memory, and later writes to the parameters
    are visible in it. Parameters that are already adjacent in memory are not moved.
    """
    first = parameters[0].data
    first_storage = first.untyped_storage().data_ptr()
    expected_address = first.data_ptr()
    adjacent = True
    for parameter in parameters:
        same_storage = parameter.untyped_storage().data_ptr() == first_storage
        follows = parameter.is_contiguous() and parameter.data_ptr() == expected_address
        adjacent = adjacent and same_storage and follows
        expected_address += parameter.numel() * parameter.element_size()
    sizes = [len(parameter) for parameter in parameters]
    if adjacent:
        return first.as_strided((sum(sizes), *first.shape[1:]), first.stride())
    # Leave the caller's inference mode, because tensors created in it cannot be written to later.
    with torch.inference_mode(False):
        joined = torch.cat([parameter.data for parameter in parameters])
        for parameter, view in zip(parameters, joined.split(sizes), strict=True):
            parameter.data = view
    return joined


def convert_norm(module: nn.Module) -> RMSNormWeights:
    """Convert a norm module to the weights of an RMS norm. Raises UnsupportedLayer if the module
    computes anything else.

    A module of an unknown class is run on random hidden states. Its outputs must be those of an RMS
    norm that multiplies by the weight, or of one that multiplies by the weight plus 1 (Gemma).
    """
    weight = dict(module.named_parameters()).get("weight")
    attributes = vars(module)
    eps = attributes.get("variance_epsilon", attributes.get("eps"))
    if weight is not None and type(module) is nn.RMSNorm:
        return RMSNormWeights(weight, eps)
    if weight is not None and eps is not None:
        generator = torch.Generator().manual_seed(0)
        states = torch.randn(2, len(weight), generator=generator).to(weight)
        for norm in (RMSNormWeights(weight, eps), RMSNormWeights(weight.float() + 1, eps)):
            if equals_up_to_rounding(reference.rms_norm(states, norm), module(states)):
                return norm
    raise UnsupportedLayer(
        f"our decoder does not support norms of the class {type(module).__name__}"
    )


def convert_mlp(module: nn.Module, kernels: Kernels) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function from normalised hidden states to an MLP's output, both (num_positions,
    hidden_size). The function is a `GatedMLP` if possible, otherwise a call of the module
    itself."""
    children = dict(module.named_children())
    activation = children.get("act_fn", children.get("activation_fn"))
    names = ["gate_up_proj"] if "gate_up_proj" in children else ["gate_proj", "up_proj"]
    projections = [children[name] for name in names if name in children]
    is_gated = activation is not None and len(projections) == len(names)
    if is_gated and all(is_joinable_linear(layer) and layer.bias is None for layer in projections):
        function = cast(Callable[[torch.Tensor], torch.Tensor], activation)
        coefficients = COEFFICIENTS_BY_ACTIVATION.get(type(activation))
        return GatedMLP(
            kernels,
            join_linears(projections),
            Activation(function, coefficients),
            join_linears([children["down_proj"]]),
        )

    def run_module(states: torch.Tensor) -> torch.Tensor:
        output = module(states[None])
        if isinstance(output, tuple):  # some mixtures of experts return (output, router scores)
            output = output[0]
        return output[0]

    return run_module


def convert_layer(
    module: nn.Module, layer_type: str, num_heads: int, num_key_heads: int, kernels: Kernels
) -> DecoderLayer:
    """Convert a Hugging Face decoder layer to a layer of our own decoder. Raises UnsupportedLayer
    with the name of the component that our decoder does not support.

    layer_type: the layer's attention type, for example sliding_attention
    """
    children = {
        name: child for name, child in module.named_children() if type(child) is not nn.Dropout
    }
    norm_names = children.keys() - {"self_attn", "mlp"}
    has_all_children = children.keys() >= {"self_attn", "mlp"}
    if norm_names not in (LLAMA_NORM_NAMES, GEMMA2_NORM_NAMES) or not has_all_children:
        raise UnsupportedLayer(
            f"our decoder does not support layers with the submodules {', '.join(sorted(children))}"
        )
    attention: Any = children["self_attn"]
    mlp_norm = children["post_attention_layernorm"]
    output_norms = None
    if norm_names == GEMMA2_NORM_NAMES:
        mlp_norm = children["pre_feedforward_layernorm"]
        output_norms = (
            convert_norm(children["post_attention_layernorm"]),
            convert_norm(children["post_feedforward_layernorm"]),
        )
    attention_children = dict(attention.named_children())
    names = ["q_proj", "k_proj", "v_proj"]
    if "qkv_proj" in attention_children:
        names = ["qkv_proj"]
    projections = [attention_children[name] for name in names if name in attention_children]
    if len(projections) < len(names):
        raise UnsupportedLayer(
            "our decoder does not know the names of the projections in attention modules of the "
            f"class {type(attention).__name__}"
        )
    # Convert the norms first. If one is not supported, this raises an exception before
    # `join_linears` below has moved weights.
    qk_norm = convert_qk_norm(attention, num_heads, num_key_heads)
    return DecoderLayer(
        kernels=kernels,
        layer_type=layer_type,
        num_heads=num_heads,
        num_key_heads=num_key_heads,
        attention_norm=convert_norm(children["input_layernorm"]),
        mlp_norm=convert_norm(mlp_norm),
        output_norms=output_norms,
        qkv=join_linears(projections),
        qk_norm=qk_norm,
        attention_output=join_linears([attention.o_proj]),
        mlp=convert_mlp(children["mlp"], kernels),
        attention_scale=attention.scaling,
        residual_scale=vars(module).get("residual_multiplier", 1.0),
        uses_rope=bool(vars(attention).get("use_rope", True)),
    )


def convert_qk_norm(attention: Any, num_heads: int, num_key_heads: int) -> RMSNormWeights | None:
    """Return one norm for all query heads and key heads of a Hugging Face attention module. Its
    weight has the shape (1, num_heads + num_key_heads, head_size). Return None if the module does
    not normalise queries and keys. Raises UnsupportedLayer for a norm over several heads
    together."""
    children = dict(attention.named_children())
    if "q_norm" not in children:
        return None
    query_norm = convert_norm(children["q_norm"])
    key_norm = convert_norm(children["k_norm"])
    if any(len(norm.weight) != attention.head_dim for norm in (query_norm, key_norm)):
        raise UnsupportedLayer(
            "our decoder does not support query or key norms over several heads together"
        )
    query_weight = query_norm.weight.expand(num_heads, -1)
    key_weight = key_norm.weight.expand(num_key_heads, -1)
    return RMSNormWeights(torch.cat([query_weight, key_weight])[None], query_norm.eps)


def build_kernel_decoder(
    decoder: nn.Module,
    layer_types: list[str],
    num_heads: int,
    num_key_heads: int,
    embed: Callable[[torch.Tensor], torch.Tensor],
    kernels: Kernels,
) -> KernelDecoder:
    """Convert a Hugging Face decoder to our own decoder.

    layer_types: the attention type of every layer
    embed: maps token ids to the input of the first layer
    kernels: the operations that our decoder runs on

    Raises UnsupportedLayer with the name of the component that our decoder does not support.
    """
    children = dict(decoder.named_children())
    layers = [
        convert_layer(module, layer_type, num_heads, num_key_heads, kernels)
        for module, layer_type in zip(get_decoder_layers(decoder), layer_types, strict=True)
    ]
    decoder_class = select_decoder_class(layers, kernels)
    return decoder_class(
        kernels, layers, convert_norm(children["norm"]), embed, children["rotary_emb"]
    )


def select_decoder_class(layers: list[DecoderLayer], kernels: Kernels) -> type[KernelDecoder]:
    """Return the decoder class for `layers`. It is `kernels.recording_decoder`, a class that
    replays recorded operations, if this is set and all layers can be recorded. Otherwise it is
    `KernelDecoder`."""
    if kernels.recording_decoder is not None and all(layer.is_recordable for layer in layers):
        return resolve_name(kernels.recording_decoder)
    return KernelDecoder
