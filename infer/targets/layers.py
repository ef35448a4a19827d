"""Reading a target's own layers for the lean pass (`infer.targets.lean`): which it expresses, and
their weights.

D hidden size, H query heads, K key heads, E head size.
"""

from collections.abc import Callable
from copy import copy
from pkgutil import resolve_name

import torch
from torch import nn
from transformers.activations import ACT2FN

from infer.kernels import reference
from infer.kernels.operands import (
    SILU_COEFFICIENTS,
    TANH_GELU_COEFFICIENTS,
    Activation,
    Linear,
    Norm,
)
from infer.kernels.table import Kernels
from infer.targets.lean import GatedMLP, Layer, LeanDecoder

PLAIN = {"input_layernorm", "post_attention_layernorm"}  # norms of a layer of Llama's kind
SANDWICH = PLAIN | {
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
}  # of Gemma 2's: before and after
ROUNDING = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
}  # the most that rounding changes a result, relative
COARSE = 0.05  # the same in 16 bits
ACTIVATION_COEFFICIENTS = {
    nn.SiLU: SILU_COEFFICIENTS,
    type(ACT2FN["silu"]): SILU_COEFFICIENTS,
    type(ACT2FN["gelu_pytorch_tanh"]): TANH_GELU_COEFFICIENTS,
}


class UnknownLayer(Exception):
    """A layer is built in a way that this pass does not express; the message names the part."""


def close(
    ours: torch.Tensor, theirs: torch.Tensor, coarse: bool = False, onto: float = 0.0
) -> bool:
    """Return whether two results differ by rounding only; `coarse`: of codes. `onto`: the norm of
    what both were added to, which was rounded with them."""
    within = (COARSE if coarse else ROUNDING.get(theirs.dtype, COARSE)) * theirs.norm()
    return bool((ours - theirs).norm() <= within + torch.finfo(theirs.dtype).eps * onto)


def some_outputs(linear: nn.Module, which: torch.Tensor) -> nn.Module:
    """Return a linear layer, of floats or of int8 codes, with copies of some outputs (R,) of
    another."""
    part = copy(linear)
    part._parameters = linear._parameters.copy()
    for name, weight in linear.named_parameters():
        if name != "smooth":  # of inputs
            part._parameters[name] = nn.Parameter(weight.data[which], requires_grad=False)
    return part


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer that `join_linears` takes: of floats, or of codes,
    whose class has `joins` and `join` (`infer.int8_cpu.weights`)."""
    return type(module) is nn.Linear or hasattr(module, "joins")


def join_linears(modules: list[nn.Module]) -> object:
    """Return the operand of linear layers that read the same states. Each module's weight becomes a
    view of its part, so that this takes no memory. Raises UnknownLayer for modules that cannot be
    joined."""
    first = modules[0]
    if hasattr(first, "joins"):
        if not first.joins(modules):
            raise UnknownLayer(
                "int8 codes whose activations have other factors or digits in layers side by side"
            )
        return first.join(modules, join_in_place)
    if any(type(module) is not nn.Linear for module in modules):
        raise UnknownLayer(f"projections of another class ({type(first).__name__})")
    bias = None
    if first.bias is not None:
        bias = join_in_place([module.bias for module in modules])
    return Linear(join_in_place([module.weight for module in modules]).t(), bias)


def join_copies(modules: list[nn.Module]) -> object:
    """Return the operand of linear layers without biases that read the same states, over copies of
    their weights."""
    if hasattr(modules[0], "joins"):
        return modules[0].join(modules, torch.cat)
    return Linear(torch.cat([module.weight for module in modules]).detach().t())


def join_in_place(parts: list[nn.Parameter]) -> torch.Tensor:
    """Return parameters (R_i, ...) as one tensor (sum of R_i, ...) whose views they become, so that
    it takes no memory of its own and sees what is written to them. Parameters that lie one behind
    the other already stay where they are."""
    whole = parts[0].data
    expected = whole.data_ptr()
    adjacent = True
    for part in parts:
        same_storage = part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        adjacent = (
            adjacent and same_storage and part.is_contiguous() and part.data_ptr() == expected
        )
        expected += part.numel() * part.element_size()
    rows = [len(part) for part in parts]
    if adjacent:
        return whole.as_strided((sum(rows), *whole.shape[1:]), whole.stride())
    with torch.inference_mode(
        False
    ):  # whoever decodes may, but nobody could write to the parameters afterwards
        whole = torch.cat([part.data for part in parts])
        for part, view in zip(parts, whole.split(rows), strict=True):
            part.data = view
    return whole


def read_norm(module: nn.Module) -> Norm:
    """Read a norm module as an RMS norm. Raises UnknownLayer for any other."""
    weight = dict(module.named_parameters()).get("weight")
    facts = vars(module)
    eps = facts.get("variance_epsilon", facts.get("eps"))
    if type(module) is nn.RMSNorm:
        return Norm(weight, eps)
    if weight is not None and eps is not None:
        states = torch.randn(2, len(weight), generator=torch.Generator().manual_seed(0)).to(weight)
        for norm in (Norm(weight, eps), Norm(weight.float() + 1, eps)):
            if close(reference.rms_norm(states, norm), module(states)):
                return norm
    raise UnknownLayer(f"other norms ({type(module).__name__})")


def read_mlp(module: nn.Module, kernels: Kernels) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what computes an MLP of normed states (N, D): a gated one with gate and up in one
    matmul; any other module as it is."""
    parts = dict(module.named_children())
    function = parts.get("act_fn", parts.get("activation_fn"))
    names = ["gate_up_proj"] if "gate_up_proj" in parts else ["gate_proj", "up_proj"]
    inner = [parts.get(name) for name in names]
    gated = function is not None and all(
        part is not None and is_linear(part) and part.bias is None for part in inner
    )
    if gated:
        activation = Activation(function, ACTIVATION_COEFFICIENTS.get(type(function)))
        return GatedMLP(kernels, join_linears(inner), activation, join_linears([module.down_proj]))

    def run_module(states: torch.Tensor) -> torch.Tensor:
        result = module(states[None])
        if isinstance(result, tuple):  # some return their router's scores
            result = result[0]
        return result[0]

    return run_module


def read_layer(module: nn.Module, kind: str, heads: int, shared: int, kernels: Kernels) -> Layer:
    """Read a decoder layer with `heads` query heads and `shared` key heads. Raises UnknownLayer,
    naming the part, for layers of another kind."""
    parts = {name: part for name, part in module.named_children() if type(part) is not nn.Dropout}
    if parts.keys() - {"self_attn", "mlp"} not in (PLAIN, SANDWICH) or not parts.keys() >= {
        "self_attn",
        "mlp",
    }:
        raise UnknownLayer(f"other parts ({', '.join(sorted(parts))})")
    attention = module.self_attn
    second = "post_attention_layernorm"
    after = None
    if parts.keys() >= SANDWICH:
        second = "pre_feedforward_layernorm"
        after = (
            read_norm(parts["post_attention_layernorm"]),
            read_norm(parts["post_feedforward_layernorm"]),
        )
    inner = dict(attention.named_children())
    names = ["qkv_proj"] if "qkv_proj" in inner else ["q_proj", "k_proj", "v_proj"]
    projections = [inner.get(name) for name in names]
    qk_norm = None
    if None in projections:
        raise UnknownLayer(f"projections of other names ({type(attention).__name__})")
    if "q_norm" in inner:
        norms = read_norm(inner["q_norm"]), read_norm(inner["k_norm"])
        if any(len(norm.weight) != attention.head_dim for norm in norms):
            raise UnknownLayer("norms over all heads together")
        weights = [
            norm.weight.expand(count, -1)
            for norm, count in zip(norms, (heads, shared), strict=True)
        ]
        qk_norm = Norm(torch.cat(weights)[None], norms[0].eps)
    return Layer(
        kernels=kernels,
        kind=kind,
        heads=heads,
        key_heads=shared,
        attention_norm=read_norm(module.input_layernorm),
        mlp_norm=read_norm(parts[second]),
        output_norms=after,
        qkv=join_linears(projections),
        qk_norm=qk_norm,
        out=join_linears([attention.o_proj]),
        mlp=read_mlp(module.mlp, kernels),
        scale=attention.scaling,
        residual=vars(module).get("residual_multiplier", 1.0),
        rotates=bool(vars(attention).get("use_rope", True)),
    )


def lean_decoder(
    body: nn.Module,
    kinds: list[str],
    heads: int,
    shared: int,
    embed: Callable[[torch.Tensor], torch.Tensor],
    kernels: Kernels,
) -> LeanDecoder:
    """Return the lean pass of a decoder with `heads` query heads and `shared` key heads, whose
    layers attend in `kinds` of ways. Raises UnknownLayer with the part that it does not express."""
    layers = [
        read_layer(module, kind, heads, shared, kernels)
        for module, kind in zip(body.layers, kinds, strict=True)
    ]
    return decoder_of(layers, kernels)(
        kernels, layers, read_norm(body.norm), embed, body.rotary_emb
    )


def decoder_of(layers: list[Layer], kernels: Kernels) -> type[LeanDecoder]:
    """Return the class that runs layers: one that records passes, if there is one and all layers
    are recordable."""
    if kernels.recording_decoder is not None and all(layer.recordable for layer in layers):
        return resolve_name(kernels.recording_decoder)
    return LeanDecoder
