"""Write DFlash drafters in the layouts that engines and trainers read (layouts.py reads them).

A writer is given the drafter, its target or None, and the public layout's config.json and tensors,
with the embedding and the head that the drafter uses where its row in families.py says so
(`target`); it returns its layout's. What a layout has no words for is refused before
(`infer.formats.export`). V vocabulary, D hidden size.
"""

import math

import torch

from infer.drafters.base import Drafter
from infer.drafters.config_keys import config_dict
from infer.drafters.dflash.layouts import LAYOUTS, NATIVE, NATIVE_TYPE, PROJECTORS, Layout
from infer.targets.target import Target

Weights = dict[str, torch.Tensor]


def write_public(
    drafter: Drafter, target: Target | None, config: dict, weights: Weights
) -> tuple[dict, Weights]:
    return config, weights


def write_dflash2(
    drafter: Drafter, target: Target | None, config: dict, weights: Weights
) -> tuple[dict, Weights]:
    """As DFlash 2's authors have it: a drafter without convolutions gets some that change
    nothing."""
    own, convolutions = convolved(drafter)
    config["architectures"] = ["DFlash2DraftModel"]
    config["dflash_config"] |= own
    return config, weights | convolutions


def convolved(drafter: Drafter) -> tuple[dict, Weights]:
    """Return the keys of DFlash 2's selector and convolutions, and the tensors of convolutions that
    change nothing for a drafter without any."""
    own = {"selector_top_k": drafter.conditional_head.top_k or drafter.config.vocab_size}  # 0: all
    if drafter.own.get("conv_kernel_size"):
        return own, {}
    size = drafter.config.hidden_size
    weight = drafter.norm.weight
    channels = math.gcd(size, 16)
    identity = weight.new_zeros(2, 2, size)
    identity[:, 0] = 1
    weights = {}
    for i in range(drafter.config.num_hidden_layers):
        for name in ("attention_conv", "mlp_conv"):
            weights[f"layers.{i}.{name}.base_kernel"] = identity.clone()
            weights[f"layers.{i}.{name}.kernel_projection.weight"] = weight.new_zeros(
                4 * size // channels, size
            )
    return own | {"conv_kernel_size": 2, "conv_group_size": channels}, weights


def write_dspark(
    drafter: Drafter, target: Target | None, config: dict, weights: Weights
) -> tuple[dict, Weights]:
    """DeepSpec's flat form: DSpark, or DeepSpec's DFlash where it has no conditional head."""
    own = config.pop("dflash_config")
    config |= {
        "architectures": ["Qwen3DSparkModel"],
        "num_anchors": 512,
        "sample_from_anchor": True,
    }
    config |= {
        key: own[key]
        for key in ("mask_token_id", "target_layer_ids", "markov_head_type")
        if key in own
    }
    return config | {"markov_rank": own.get("markov_rank", 0)} | confidence_keys(own), weights


def write_specforge(
    drafter: Drafter, target: Target | None, config: dict, weights: Weights
) -> tuple[dict, Weights]:
    """SpecForge's layout of DSpark and Domino drafters, which SGLang serves; the head's keys also
    stand beside `dflash_config`, where vLLM looks for them."""
    own = config["dflash_config"]
    del own["sample_from_anchor"]
    if "gru_hidden_dim" in own:  # the published Domino drafter names the class of the backbone
        own |= {"projector_type": "domino", "shift_label": True}
        return config | {"emb_dim": own["emb_dim"]}, stored(weights, PROJECTORS["domino"])
    own |= {"projector_type": "dspark", "attention_mode": "gqa"} | confidence_keys(own)
    if config["num_attention_heads"] == config["num_key_value_heads"]:
        own["attention_mode"] = "mha"
    config["architectures"] = ["DSparkDraftModel"]
    return config | {
        key: own[key] for key in ("markov_rank", "markov_head_type")
    } | confidence_keys(own), weights


def confidence_keys(own: dict) -> dict[str, bool]:
    """Return the keys of a confidence head, which readers of DSpark want to see set."""
    return {
        key: bool(own.get(key)) for key in ("enable_confidence_head", "confidence_head_with_markov")
    }


def stored(weights: Weights, layout: Layout) -> Weights:
    """Return tensors under the names that a layout has for them."""
    renamed = {}
    for theirs, ours in layout.tensors.items():
        renamed |= {name: theirs + name[len(ours) :] for name in weights if name.startswith(ours)}
    return {renamed.get(name, name): tensor for name, tensor in weights.items()}


def write_transformers(
    drafter: Drafter, target: Target | None, public: dict, weights: Weights
) -> tuple[dict, Weights]:
    """The folder of transformers' own class, for `generate(assistant_model=...,
    speculation_type="dflash")`."""
    config = drafter.config
    raw = {
        "architectures": [NATIVE],
        "model_type": NATIVE_TYPE,
        "block_size": config.block_size,
        "mask_token_id": drafter.mask_token_id,
        "target_layer_ids": list(drafter.own["target_layer_ids"]),
        "num_target_layers": config.num_target_layers,  # theirs has no such key, and keeps it
        "layer_types": config.layer_types,
        "rope_parameters": dict(config.rope_parameters),
        "dtype": str(drafter.dtype).removeprefix("torch."),
    }
    if "sliding_attention" in config.layer_types:
        raw["sliding_window"] = config.sliding_window - 1  # theirs counts distances, ours positions
    names = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    names += ("head_dim", "max_position_embeddings", "rms_norm_eps", "vocab_size")
    names += (
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    )  # null too: else its config takes another model's
    everything = config.to_dict()
    return raw | {name: everything.get(name) for name in names}, stored(weights, LAYOUTS[NATIVE])


def speculators_config(drafter: Drafter, verifier: str, architectures: list[str]) -> dict:
    """Return config.json in speculators' layout, of the kind that the conditional head asks for.
    verifier: the target's name or path."""
    config = drafter.config
    own = drafter.own
    kinds = {"markov": "dspark", "selector": "dflash2", "xpress": "xpress"}
    kind = kinds[drafter.head_row.name] if drafter.head_row else "dflash"
    part = config_dict(config)
    for key in (
        "architectures",
        "block_size",
        drafter.family.config_key,
        "num_target_layers",
        "draft_vocab_size",
    ):
        part.pop(key, None)
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": drafter.block_size - 1,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    classes = {"dflash": "DFlash", "dspark": "DSpark", "dflash2": "DFlash2", "xpress": "XPress"}
    parts = ("markov_", "selector_", "conv_", "xpress_", "num_jacobi_")
    more = {key: value for key, value in own.items() if key.startswith(parts)}
    return {
        "architectures": [f"{classes[kind]}DraftModel"],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
        "transformer_layer_config": part,
        "draft_vocab_size": config.vocab_size if drafter.d2t is None else len(drafter.d2t),
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in drafter.own["target_layer_ids"]],
        "mask_token_id": drafter.mask_token_id,
        "sample_from_anchor": drafter.first_draft_slot == 0,
        # vLLM takes it for all layers, false for causal ones, where the authors' code takes it for
        # sliding layers alone
        "sliding_window_non_causal": not any(causal for causal, _ in drafter.attention_patterns),
        "num_target_layers": config.num_target_layers,  # theirs has no such key, and ignores it
        "dtype": str(drafter.norm.weight.dtype).removeprefix("torch."),
    } | (more | confidence_keys(own) if kind == "dspark" else more)


def write_speculators(
    drafter: Drafter, target: Target, public: dict, weights: Weights
) -> tuple[dict, Weights]:
    """speculators' layout; `target.name` tells the engine where to find the target."""
    if drafter.d2t is not None:
        known = torch.zeros(drafter.config.vocab_size, dtype=torch.bool)  # (V,)
        weights["t2d"] = known.index_fill_(0, drafter.vocabulary.tokens.cpu(), True)
    architectures = target.model.config.architectures or [type(target.model).__name__]
    config = speculators_config(drafter, target.name, architectures)
    if config["speculators_model_type"] == "dflash2":
        own, convolutions = convolved(drafter)
        return config | own, weights | convolutions
    return config, weights
