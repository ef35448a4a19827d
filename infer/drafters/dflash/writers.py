"""Convert DFlash drafters to the layouts that engines and trainers read. layouts.py reads layouts.

There is one writer function per export format. A writer takes the drafter, the target or None, and
the drafter's config.json and tensors in the public layout. The tensors include the embedding and
the language model head that the drafter uses if the format has `stores_embedding_and_head`
(families.py). A writer returns the config.json and the tensors in the layout of the format.

`infer.formats.export` calls a writer only if the layout can express the drafter.
"""

import math
from typing import Any

import torch

from infer.drafters.base import Drafter
from infer.drafters.config_keys import build_public_config
from infer.drafters.dflash.layouts import (
    CHECKPOINT_LAYOUTS_BY_DRAFTER_ARCHITECTURE,
    LAYOUTS_BY_PROJECTOR_TYPE,
    TRANSFORMERS_DRAFTER_ARCHITECTURE,
    TRANSFORMERS_DRAFTER_MODEL_TYPE,
    CheckpointLayout,
)
from infer.targets.target import Target

Config = dict[str, Any]
Weights = dict[str, torch.Tensor]

# A layout with convolutions stores identity convolutions for a drafter that has no convolutions.
# They have the kernel size and the group size of published drafters.
IDENTITY_CONVOLUTION_KERNEL_SIZE = 2
MAX_IDENTITY_CONVOLUTION_GROUP_CHANNELS = 16
DEEPSPEC_NUM_ANCHORS = 512  # value of num_anchors, a training option that DeepSpec requires
# Key: `HeadSpec.name` of the conditional head. Value: `speculators_model_type`.
SPECULATORS_TYPE_BY_HEAD = {"markov": "dspark", "selector": "dflash2", "xpress": "xpress"}
# Key: `speculators_model_type`. Value: the class name under `architectures`.
SPECULATORS_CLASS_BY_TYPE = {
    "dflash": "DFlashDraftModel",
    "dspark": "DSparkDraftModel",
    "dflash2": "DFlash2DraftModel",
    "xpress": "XPressDraftModel",
}
# Keys of dflash_config with these prefixes are at the top level of speculators' config.json.
SPECULATORS_KEY_PREFIXES = ("markov_", "selector_", "conv_", "xpress_", "num_jacobi_")


def write_public(
    drafter: Drafter, target: Target | None, config: Config, weights: Weights
) -> tuple[Config, Weights]:
    """Return `config` and `weights` unchanged, as they are in the public layout."""
    return config, weights


def write_dflash2(
    drafter: Drafter, target: Target | None, config: Config, weights: Weights
) -> tuple[Config, Weights]:
    """Return config.json and tensors in the layout of DFlash 2's authors. Identity convolutions are
    added to a drafter without convolutions."""
    keys, convolutions = build_selector_keys(drafter)
    config["architectures"] = ["DFlash2DraftModel"]
    config["dflash_config"] |= keys
    return config, weights | convolutions


def build_selector_keys(drafter: Drafter) -> tuple[Config, Weights]:
    """Return the config.json keys of DFlash 2's selector and convolutions, and the tensors of
    identity convolutions if the drafter has no convolutions, else {}."""
    head = drafter.conditional_head
    assert head is not None
    # In this project, top_k = 0 means all tokens of the vocabulary.
    keys = {"selector_top_k": head.top_k or drafter.config.vocab_size}
    if drafter.family_config.get("conv_kernel_size"):
        return keys, {}

    hidden_size = drafter.config.hidden_size
    weight = drafter.norm.weight
    group_size = math.gcd(hidden_size, MAX_IDENTITY_CONVOLUTION_GROUP_CHANNELS)
    identity = weight.new_zeros(2, IDENTITY_CONVOLUTION_KERNEL_SIZE, hidden_size)
    identity[:, 0] = 1
    projection_rows = 2 * IDENTITY_CONVOLUTION_KERNEL_SIZE * hidden_size // group_size
    tensors = {}
    for i in range(drafter.config.num_hidden_layers):
        for name in ("attention_conv", "mlp_conv"):
            prefix = f"layers.{i}.{name}"
            tensors[f"{prefix}.base_kernel"] = identity.clone()
            tensors[f"{prefix}.kernel_projection.weight"] = weight.new_zeros(
                projection_rows, hidden_size
            )
    keys |= {"conv_kernel_size": IDENTITY_CONVOLUTION_KERNEL_SIZE, "conv_group_size": group_size}
    return keys, tensors


def write_dspark(
    drafter: Drafter, target: Target | None, config: Config, weights: Weights
) -> tuple[Config, Weights]:
    """Return config.json and tensors in DeepSpec's layout, which has no dflash_config. A drafter
    without a conditional head becomes a DSpark drafter with markov_rank 0."""
    family_config = config.pop("dflash_config")
    config["architectures"] = ["Qwen3DSparkModel"]
    config["num_anchors"] = DEEPSPEC_NUM_ANCHORS
    config["sample_from_anchor"] = True
    for key in ("mask_token_id", "target_layer_ids", "markov_head_type"):
        if key in family_config:
            config[key] = family_config[key]
    config["markov_rank"] = family_config.get("markov_rank", 0)
    return config | build_confidence_config(family_config), weights


def write_specforge(
    drafter: Drafter, target: Target | None, config: Config, weights: Weights
) -> tuple[Config, Weights]:
    """Return config.json and tensors of a DSpark or Domino drafter in SpecForge's layout, which
    SGLang serves.

    The keys of the conditional head are in dflash_config, and are repeated at the top level of
    config.json, where vLLM reads them.
    """
    family_config = config["dflash_config"]
    del family_config["sample_from_anchor"]
    if "gru_hidden_dim" in family_config:
        # `architectures` stays DFlashDraftModel, as in the published Domino drafter.
        family_config |= {"projector_type": "domino", "shift_label": True}
        config["emb_dim"] = family_config["emb_dim"]
        return config, rename_for_layout(weights, LAYOUTS_BY_PROJECTOR_TYPE["domino"])

    attention_mode = "gqa"
    if config["num_attention_heads"] == config["num_key_value_heads"]:
        attention_mode = "mha"
    confidence_keys = build_confidence_config(family_config)
    family_config |= {"projector_type": "dspark", "attention_mode": attention_mode}
    family_config |= confidence_keys
    config["architectures"] = ["DSparkDraftModel"]
    config["markov_rank"] = family_config["markov_rank"]
    config["markov_head_type"] = family_config["markov_head_type"]
    return config | confidence_keys, weights


def build_confidence_config(family_config: Config) -> dict[str, bool]:
    """Return the config.json keys of the confidence head. Programs that read DSpark's layouts
    require these keys even if there is no confidence head and the values are false."""
    names = ("enable_confidence_head", "confidence_head_with_markov")
    return {name: bool(family_config.get(name)) for name in names}


def rename_for_layout(weights: Weights, layout: CheckpointLayout) -> Weights:
    """Return the tensors with the names that they have in `layout`."""
    layout_names = {}
    for layout_prefix, prefix in layout.tensor_prefixes.items():
        for name in weights:
            if name.startswith(prefix):
                layout_names[name] = layout_prefix + name[len(prefix) :]
    return {layout_names.get(name, name): tensor for name, tensor in weights.items()}


def write_transformers(
    drafter: Drafter, target: Target | None, public_config: Config, weights: Weights
) -> tuple[Config, Weights]:
    """Return config.json and tensors in the layout of transformers' own drafter class, for
    `generate(assistant_model=..., speculation_type="dflash")`."""
    config = drafter.config
    assert config.layer_types is not None and config.rope_parameters is not None
    layout_config = {
        "architectures": [TRANSFORMERS_DRAFTER_ARCHITECTURE],
        "model_type": TRANSFORMERS_DRAFTER_MODEL_TYPE,
        "block_size": config.block_size,
        "mask_token_id": drafter.mask_token_id,
        "target_layer_ids": list(drafter.family_config["target_layer_ids"]),
        "num_target_layers": config.num_target_layers,  # transformers ignores and keeps this key
        "layer_types": config.layer_types,
        "rope_parameters": dict(config.rope_parameters),
        "dtype": str(drafter.dtype).removeprefix("torch."),
    }
    if "sliding_attention" in config.layer_types:
        assert config.sliding_window is not None
        # transformers stores the largest distance between query and key in a window. This project
        # stores the number of positions in a window, which is one more.
        layout_config["sliding_window"] = config.sliding_window - 1
    # Keys whose value is null are written too, because transformers would replace a missing key by
    # the default of another model.
    shared_names = (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps"),
        *("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"),
    )
    all_keys = config.to_dict()
    for name in shared_names:
        layout_config[name] = all_keys.get(name)
    layout = CHECKPOINT_LAYOUTS_BY_DRAFTER_ARCHITECTURE[TRANSFORMERS_DRAFTER_ARCHITECTURE]
    return layout_config, rename_for_layout(weights, layout)


def build_speculators_config(
    drafter: Drafter, target_name: str, target_architectures: list[str]
) -> Config:
    """Return config.json in speculators' layout. The drafter's conditional head determines
    `speculators_model_type`.

    `target_name` is the name or path from which engines load the target. `target_architectures` is
    the target's entry `architectures` in config.json.
    """
    config = drafter.config
    family_config = drafter.family_config
    speculators_type = "dflash"
    if drafter.head_spec is not None:
        speculators_type = SPECULATORS_TYPE_BY_HEAD[drafter.head_spec.name]

    transformer_config = build_public_config(config)
    for key in ("architectures", "block_size", "num_target_layers", "draft_vocab_size"):
        transformer_config.pop(key, None)
    transformer_config.pop(drafter.family.config_key, None)
    proposal_method = {
        "proposal_type": "greedy",
        "speculative_tokens": drafter.block_size - 1,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    draft_vocab_size = config.vocab_size
    if drafter.d2t is not None:
        draft_vocab_size = len(drafter.d2t)
    layout_config = {
        "architectures": [SPECULATORS_CLASS_BY_TYPE[speculators_type]],
        "speculators_model_type": speculators_type,
        "speculators_config": {
            "algorithm": speculators_type,
            "proposal_methods": [proposal_method],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target_name, "architectures": target_architectures},
        },
        "transformer_layer_config": transformer_config,
        "draft_vocab_size": draft_vocab_size,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in family_config["target_layer_ids"]],
        "mask_token_id": drafter.mask_token_id,
        "sample_from_anchor": drafter.first_draft_slot == 0,
        # vLLM applies this flag to all layers: true means that no layer is causal, and false that
        # all layers are causal. The authors' code applies the flag to layers with a sliding window
        # only.
        "sliding_window_non_causal": not any(causal for causal, _ in drafter.attention_patterns),
        "num_target_layers": config.num_target_layers,  # speculators ignores this key
        "dtype": str(drafter.dtype).removeprefix("torch."),
    }
    for key, value in family_config.items():
        if key.startswith(SPECULATORS_KEY_PREFIXES):
            layout_config[key] = value
    if speculators_type == "dspark":
        layout_config |= build_confidence_config(family_config)
    return layout_config


def write_speculators(
    drafter: Drafter, target: Target, public_config: Config, weights: Weights
) -> tuple[Config, Weights]:
    """Return config.json and tensors in speculators' layout. The config.json contains
    `target.name`, from which engines load the target."""
    draft_tokens = drafter.vocabulary.tokens
    if draft_tokens is not None:
        in_draft_vocabulary = torch.zeros(drafter.config.vocab_size, dtype=torch.bool)  # (V,)
        weights["t2d"] = in_draft_vocabulary.index_fill_(0, draft_tokens.cpu(), True)

    target_config = target.model.config
    architectures = target_config.architectures
    if not architectures:
        architectures = [type(target.model).__name__]
    config = build_speculators_config(drafter, target.name, architectures)
    if config["speculators_model_type"] == "dflash2":
        keys, convolutions = build_selector_keys(drafter)
        return config | keys, weights | convolutions
    return config, weights
