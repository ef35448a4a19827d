"""Reading a target's own layers for the lean pass (`infer.targets.lean`): which it expresses, and their
weights.

D hidden size, H query heads, K key heads, E head size.
"""

from collections.abc import Callable
from copy import copy

import torch
from torch import nn
from transformers.activations import ACT2FN

from infer.targets import loops
from infer.targets.int8 import Int8Linear, Int8Product, join_in_place
from infer.targets.lean import GatedMLP, Layer, LeanDecoder, Norm, Product
from infer.targets.tape import TapedDecoder

PLAIN = {"input_layernorm", "post_attention_layernorm"}  # norms of a layer of Llama's kind
SANDWICH = PLAIN | {"pre_feedforward_layernorm", "post_feedforward_layernorm"}  # of Gemma 2's: before and after
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}  # the most that rounding changes a result, relative
COARSE = 0.05  # the same in 16 bits
BENDS = {nn.SiLU: loops.SILU, type(ACT2FN["silu"]): loops.SILU, type(ACT2FN["gelu_pytorch_tanh"]): loops.GELU}


class UnknownLayer(Exception):
    """A layer is built in a way that this pass does not express; the message names the part."""


def close(ours: torch.Tensor, theirs: torch.Tensor, coarse: bool = False, onto: float = 0.0) -> bool:
    """Return whether two results differ by rounding only; `coarse`: of codes. `onto`: the norm of what both
    were added to, which was rounded with them."""
    within = (COARSE if coarse else ROUNDING.get(theirs.dtype, COARSE)) * theirs.norm()
    return bool((ours - theirs).norm() <= within + torch.finfo(theirs.dtype).eps * onto)


def some_outputs(linear: nn.Module, which: torch.Tensor) -> nn.Module:
    """Return a linear layer, of floats or of int8 codes, with copies of some outputs (R,) of another."""
    part = copy(linear)
    part._parameters = linear._parameters.copy()
    for name, weight in linear.named_parameters():
        if name != "smooth":  # of inputs
            part._parameters[name] = nn.Parameter(weight.data[which], requires_grad=False)
    return part


def fuse(modules: list[nn.Module]) -> Product | Int8Product:
    """Join linear layers that read the same states. Each module's weight becomes a view of its part, so
    that this takes no memory. Raises UnknownLayer for modules that cannot be joined."""
    if all(type(module) is Int8Linear for module in modules):
        if any(module.digits != modules[0].digits or not module.smooth.equal(modules[0].smooth) for module in modules):
            raise UnknownLayer("int8 codes whose activations have other factors or digits in layers side by side")
        return Int8Linear.fuse(modules, join_in_place)
    if any(type(module) is not nn.Linear for module in modules):
        raise UnknownLayer(f"projections of another class ({type(modules[0]).__name__})")
    bias = None if modules[0].bias is None else join_in_place([module.bias for module in modules])
    return Product(join_in_place([module.weight for module in modules]).t(), bias)


def read_norm(module: nn.Module) -> Norm:
    """Read a norm module as an RMS norm. Raises UnknownLayer for any other."""
    weight, facts = dict(module.named_parameters()).get("weight"), vars(module)
    eps = facts.get("variance_epsilon", facts.get("eps"))
    if type(module) is nn.RMSNorm:
        return Norm(weight, eps)
    if weight is not None and eps is not None:
        states = torch.randn(2, len(weight), generator=torch.Generator().manual_seed(0)).to(weight)
        for norm in (Norm(weight, eps), Norm(weight.float() + 1, eps)):
            if close(norm(states), module(states)):
                return norm
    raise UnknownLayer(f"other norms ({type(module).__name__})")


def read_mlp(module: nn.Module) -> tuple[Callable[[torch.Tensor, Norm], torch.Tensor], Product | None]:
    """Read a gated MLP and the norm before it, gate and up in one product, and its last product; any
    other module stays as it is."""
    parts = dict(module.named_children())
    activation = parts.get("act_fn", parts.get("activation_fn"))
    inner = [parts.get(name) for name in (["gate_up_proj"] if "gate_up_proj" in parts else ["gate_proj", "up_proj"])]
    if activation is None or any(type(part) not in (nn.Linear, Int8Linear) or part.bias is not None for part in inner):

        def run(states: torch.Tensor, norm: Norm) -> torch.Tensor:
            result = module(norm(states)[None])
            return (result[0] if type(result) is tuple else result)[0]  # some return their router's scores

        return run, None
    return GatedMLP(fuse(inner), activation, BENDS.get(type(activation))), fuse([module.down_proj])


def read_layer(module: nn.Module, kind: str, heads: int, shared: int) -> Layer:
    """Read a decoder layer with `heads` query heads and `shared` key heads. Raises UnknownLayer, naming
    the part, for layers of another kind."""
    parts = {name: part for name, part in module.named_children() if type(part) is not nn.Dropout}
    if parts.keys() - {"self_attn", "mlp"} not in (PLAIN, SANDWICH) or not parts.keys() >= {"self_attn", "mlp"}:
        raise UnknownLayer(f"other parts ({', '.join(sorted(parts))})")
    attention, second, after = module.self_attn, "post_attention_layernorm", None
    if parts.keys() >= SANDWICH:
        second = "pre_feedforward_layernorm"
        after = read_norm(parts["post_attention_layernorm"]), read_norm(parts["post_feedforward_layernorm"])
    inner = dict(attention.named_children())
    names = ["qkv_proj"] if "qkv_proj" in inner else ["q_proj", "k_proj", "v_proj"]
    projections, qk_norm = [inner.get(name) for name in names], None
    if None in projections:
        raise UnknownLayer(f"projections of other names ({type(attention).__name__})")
    if "q_norm" in inner:
        norms = read_norm(inner["q_norm"]), read_norm(inner["k_norm"])
        if any(len(norm.weight) != attention.head_dim for norm in norms):
            raise UnknownLayer("norms over all heads together")
        weights = [norm.weight.expand(count, -1) for norm, count in zip(norms, (heads, shared), strict=True)]
        qk_norm = Norm(torch.cat(weights), norms[0].eps)
    mlp, down = read_mlp(module.mlp)
    return Layer(
        kind=kind,
        heads=heads,
        key_heads=shared,
        before=(read_norm(module.input_layernorm), read_norm(parts[second])),
        after=after,
        qkv=fuse(projections),
        qk_norm=qk_norm,
        out=fuse([attention.o_proj]),
        mlp=mlp,
        down=down,
        scale=attention.scaling,
        residual=vars(module).get("residual_multiplier", 1.0),
        rotates=bool(vars(attention).get("use_rope", True)),
    )


def lean_decoder(
    body: nn.Module, kinds: list[str], heads: int, shared: int, embed: Callable[[torch.Tensor], torch.Tensor]
) -> LeanDecoder:
    """Return the lean pass of a decoder with `heads` query heads and `shared` key heads, whose layers
    attend in `kinds` of ways. Raises UnknownLayer with the part that it does not express."""
    layers = [read_layer(module, kind, heads, shared) for module, kind in zip(body.layers, kinds, strict=True)]
    return decoder_of(layers)(layers, read_norm(body.norm), embed, body.rotary_emb)


def decoder_of(layers: list[Layer]) -> type[LeanDecoder]:
    """Return the lean pass that runs layers: on a tape, if all of them can be there."""
    return TapedDecoder if all(layer.products for layer in layers) else LeanDecoder
