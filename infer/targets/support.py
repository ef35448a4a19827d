"""Properties of a target that its config.json decides: its layers' attention windows, its logits'
scale, and whether draft trees can be verified through it.

All of it is known before weights are loaded. docs/targets.md lists the families.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from infer.targets.recurrent import unknown_recurrence

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

CHUNKED = "chunked_attention"  # a query sees its own chunk of positions alone (Llama 4)
LAYERS = {
    "full_attention",
    "sliding_attention",
    CHUNKED,
}  # kinds whose attention is a mask over all cached positions
STATEFUL = ("linear_attention", "conv", "hybrid", "mamba", "recurrent")  # kinds that keep a state
STATES = (
    "mamba_",
    "ssm_",
    "lru_",
    "linear_key_head_dim",
    "conv_L_cache",
)  # names of such layers' sizes, by prefix
# models whose states follow trees (infer/targets/recurrent.py)
FOLLOWED = {
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"),  # Gated DeltaNet
    *("kimi_linear", "bailing_hybrid"),  # KDA
    *("nemotron_h", "falcon_h1", "bamba", "granitemoehybrid", "zamba2"),  # Mamba-2
    *("lfm2", "lfm2_moe", "lfm3"),  # short convolutions
}
# Config keys of features that our cache, masks or head do not support, and what they mean.
FOREIGN = {
    "cross_attention_layers": "layers that look at images",
    "use_bidirectional_attention": "layers that look ahead",
    "output_logit_soft_cap": "logits scaled in a way of its own",
    "depth_decoder_config": "a second decoder, of sounds",
}


@dataclass(frozen=True)
class LogitScale:
    """The scale of the head's products (..., V): divided (Cohere, Granite, Falcon-H1), then
    soft-capped (Gemma)."""

    divisor: float = 1.0
    cap: float | None = None

    def __call__(self, products: torch.Tensor) -> torch.Tensor:
        """Return the logits of the products; the products themselves where there is no scale."""
        if self.divisor != 1:
            products = products / self.divisor
        return products if self.cap is None else torch.tanh(products / self.cap) * self.cap

    def slope(self, logits: torch.Tensor) -> torch.Tensor | float | None:
        """Return the derivative of the logits with respect to the products, at these logits; None
        where it is 1."""
        if self.cap is None:
            return None if self.divisor == 1 else 1 / self.divisor
        return (1 - (logits / self.cap).square()) / self.divisor


PLAIN = LogitScale()


def setting(config: "PretrainedConfig", *names: str) -> object | None:
    """Return what a config.json says under the first of the names that it has; None for 0, false
    and nothing too."""
    return next((value for name in names if (value := getattr(config, name, None))), None)


def logit_scale(config: "PretrainedConfig") -> LogitScale:
    """Return the scale of a target's logits."""
    factor = setting(config, "logit_scale", "lm_head_multiplier") or 1
    divisor = setting(config, "logits_scaling") or 1 / factor
    return LogitScale(float(divisor), setting(config, "final_logit_softcapping"))


def windows(config: "PretrainedConfig") -> dict[str, int | None]:
    """Return the attention window, or chunk, of each kind of the target's layers: positions, the
    query's own included; None: all before it.

    A model with kinds of layers takes a mask for each. One whose class has none (Mistral, Phi-3)
    takes a single mask, with a window if its config has one.
    """
    width = setting(config, "sliding_window")
    if config.model_type in FOLLOWED:
        kinds = {"full_attention", *(setting(config, "layer_types") or [])} & LAYERS
        return {kind: width if kind == "sliding_attention" else None for kind in sorted(kinds)}
    known = dir(type(config))
    if "layer_types" not in known or not config.layer_types:
        return {"all": width if "sliding_window" in known else None}
    widths = {"sliding_attention": width, CHUNKED: setting(config, "attention_chunk_size")}
    return {kind: widths.get(kind) for kind in sorted(set(config.layer_types))}


def attention_layers(config: "PretrainedConfig") -> list[int]:
    """Return the numbers of the layers that attend: all but those with a state."""
    kinds = setting(config, "layer_types") or ["full_attention"] * config.num_hidden_layers
    return [i for i, kind in enumerate(kinds) if kind not in STATEFUL]


def norm_eps(config: "PretrainedConfig") -> float:
    """Return the epsilon of the target's norms, whatever its family calls it."""
    names = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon")
    return setting(config, *names) or 1e-6


def rope(config: "PretrainedConfig") -> dict:
    """Return the rotary parameters; of the full-attention layers, where each kind has its own
    (Gemma 3)."""
    parameters = setting(config, "rope_parameters") or {}
    return parameters.get("full_attention") or parameters


def longest(config: "PretrainedConfig") -> int | None:
    """Return the longest text whose rotary angles do not depend on its length, nor its queries'
    scales on their place (Llama 4: transformers takes the place in the cache for the position);
    None: they never do."""
    if setting(config, "attn_temperature_tuning") and not all(config.no_rope_layers):
        return config.floor_scale - 1
    parameters = rope(config)
    if parameters.get("rope_type") not in ("longrope", "dynamic"):
        return None
    return parameters.get("original_max_position_embeddings") or config.max_position_embeddings


def refuse_longer(config: "PretrainedConfig", length: int, remedy: str) -> None:
    """Raise ValueError where positions up to `length` change a target's rotary angles or scales."""
    most = longest(config)
    if most is not None and length > most:
        raise ValueError(
            f"this target's rotary angles or scales change beyond {most} positions, {length} are asked for: {remedy}"
        )


def mlp_size(config: "PretrainedConfig") -> int:
    """Return the inner size of a drafter's MLP: the target's, where it has one for all layers (a
    mixture of experts may not), else three times the hidden size."""
    size = setting(config, "intermediate_size")
    return size if type(size) is int else 3 * config.hidden_size


def first_layer(config: "PretrainedConfig") -> "PretrainedConfig":
    """Return the configuration of the first layer, where a model's layers have sizes of their own
    (Gemma 4)."""
    return config.per_layer_config[0] if setting(config, "is_heterogeneous") else config


def head_size(config: "PretrainedConfig") -> int:
    """Return E, the head size (of the first layer), from a model's config.json."""
    config = first_layer(config)
    return setting(config, "head_dim") or config.hidden_size // config.num_attention_heads


def key_heads(config: "PretrainedConfig") -> int:
    """Return H, the number of key/value heads (of the first layer), from a model's config.json."""
    config = first_layer(config)
    return setting(config, "num_key_value_heads") or config.num_attention_heads


def refuse_unsupported(config: "PretrainedConfig") -> None:
    """Raise ValueError, from config.json alone, for targets that draft trees cannot be verified
    through."""

    def refuse(what: str) -> None:
        raise ValueError(
            f"this target ({config.model_type}) has {what}: draft trees cannot be verified through it"
        )

    if setting(config, "is_encoder_decoder"):
        refuse("an encoder beside its decoder")
    if setting(config, "masked_diffusion"):
        refuse("no order from left to right (masked_diffusion: such models draft for themselves)")
    text = config.get_text_config()
    names = {name for name, value in text.to_dict().items() if value not in (None, False, 0, [])}
    kinds = set(setting(text, "layer_types") or [])
    followed = text.model_type in FOLLOWED
    if not followed and (kinds & {*STATEFUL} or any(name.startswith(STATES) for name in names)):
        refuse("recurrent layers of another form than those that follow trees here")
    if not followed and kinds - LAYERS:
        refuse(f"layers of another kind ({', '.join(sorted(kinds - LAYERS))})")
    if setting(text, "alibi") or not (followed or names & {"rope_parameters", "rope_theta"}):
        refuse("no rotary positions (ALiBi or learned ones, or no attention)")
    try:
        head_size(text), key_heads(text)
    except AttributeError:
        refuse("no attention heads")
    for name in sorted(names & FOREIGN.keys()):
        refuse(f"{FOREIGN[name]} ({name})")


def decoder_of(model: "nn.Module") -> "nn.Module":
    """Return the decoder of a causal language model, embedding to last norm."""
    body = model.get_decoder()
    return getattr(body, "model", body) if body is model else body  # Llama 4 does not find its own


def refuse_unfit(model: "nn.Module") -> None:
    """Raise ValueError for unsupported modules of a model, which may be on the meta device."""
    config = model.config.get_text_config()
    body = decoder_of(model)
    head = model.get_output_embeddings()
    if len(dict(body.named_children()).get("layers", ())) != config.num_hidden_layers:
        raise ValueError(
            f"this target ({config.model_type}) has no list of decoder layers that can be listened to"
        )
    if (unknown := unknown_recurrence(body)) is not None:
        raise ValueError(
            f"this target ({config.model_type}) has recurrent layers of another form ({unknown}): "
            "draft trees cannot be verified through it"
        )
    if head is None or "bias" in dict(head.named_parameters()):
        raise ValueError(
            f"this target ({config.model_type}) has no plain head without bias: not supported"
        )
    if config._attn_implementation not in ("eager", "sdpa"):
        raise ValueError(
            f"attention {config._attn_implementation} takes no masks of trees: "
            "load the target with attn_implementation='eager' or 'sdpa'"
        )
