"""Convert DFlash drafters to the checkpoint formats ("layouts") of engines and trainers. layouts.py
reads these formats.

There is one writer function per export format. A writer takes the drafter, the target or None, and
the drafter's config.json and tensors in the public layout (the format of the DFlash authors'
checkpoints). If `stores_embedding_and_head` of the export format (families.py) is true, these
tensors include the embedding and the language model head that the drafter uses. A writer returns
the content of config.json and the tensors in its format.

`infer.formats.export` calls a writer only if its format can express the drafter.
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

# DFlash 2's format requires convolutions. A drafter without convolutions gets identity convolutions
# with the kernel size and the number of channels per group of published drafters.
IDENTITY_CONVOLUTION_KERNEL_SIZE = 2
MAX_IDENTITY_CONVOLUTION_GROUP_CHANNELS = 16
DEEPSPEC_NUM_ANCHORS = 512  # value of the config.json key num_anchors, which DeepSpec requires
# Key: name of the conditional head (`HeadSpec.name`). Value: `speculators_model_type` in
# config.json.
SPECULATORS_TYPE_BY_HEAD = {"markov": "dspark", "selector": "dflash2", "xpress": "xpress"}
# Key: `speculators_model_type` in config.json. Value: the class name under `architectures`.
SPECULATORS_CLASS_BY_TYPE = {
    "dflash": "DFlashDraftModel",
    "dspark": "DSparkDraftModel",
    "dflash2": "DFlash2DraftModel",
    "xpress": "XPressDraftModel",
}
# Keys of dflash_config with these prefixes are copied to the top level of speculators' config.json.
SPECULATORS_KEY_PREFIXES = ("markov_", "selector_", "conv_", "xpress_", "num_jacobi_")


def convert_to_public_format(
    drafter: Drafter, target: Target | None, config: Config, weights: Weights
) -> tuple[Config, Weights]:
    """Return `config` and `weights` unchanged: they are already in the format of the DFlash
    authors' checkpoints."""
    return config, weights


def convert_to_dflash2_format(
    drafter: Drafter, target: Target | None, config: Config, weights: Weights
) -> tuple[Config, Weights]:
    """Return the content of config.json and the tensors in the format of DFlash 2's authors.

    To a drafter without convolutions, convolutions that change nothing (the identity) are added.
    """
    keys, convolutions = build_selector_keys(drafter)
    config["architectures"] = ["DFlash2DraftModel"]
    config["dflash_config"] |= keys
    return config, weights | convolutions


def build_selector_keys(drafter: Drafter) -> tuple[Config, Weights]:
    """Return the config.json entries of DFlash 2's candidate selector and convolutions, and the
    tensors that must be added to the drafter's tensors.

    DFlash 2 requires convolutions. If the drafter has none, convolutions that change nothing (the
    identity) are added; otherwise no tensors are added.
    """
    head = drafter.conditional_head
    assert head is not None
    # In this project, top_k = 0 means all tokens that the drafter can propose.
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


def convert_to_dspark_format(
    drafter: Drafter, target: Target | None, config: Config, weights: Weights
) -> tuple[Config, Weights]:
    """Return the content of config.json and the tensors in DeepSpec's format of DSpark drafters,
    which has no dflash_config.

    A drafter without a conditional head becomes a DSpark drafter with markov_rank 0.
    """
    family_config = config.pop("dflash_config")
    config["architectures"] = ["Qwen3DSparkModel"]
    config["num_anchors"] = DEEPSPEC_NUM_ANCHORS
    config["sample_from_anchor"] = True
    for key in ("mask_token_id", "target_layer_ids", "markov_head_type"):
        if key in family_config:
            config[key] = family_config[key]
    config["markov_rank"] = family_config.get("markov_rank", 0)
    return config | build_confidence_config(family_config), weights


def convert_to_specforge_format(
    drafter: Drafter, target: Target | None, config: Config, weights: Weights
) -> tuple[Config, Weights]:
    """Return the content of config.json and the tensors of a DSpark or Domino drafter in
    SpecForge's format, which SGLang serves.

    Some keys of the conditional head are in dflash_config and are repeated at the top level of
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
    """Return the config.json entries of the confidence head, which predicts whether a drafted token
    is accepted.

    Programs that read DSpark drafters require these entries. Without a confidence head, their
    values are false.
    """
    names = ("enable_confidence_head", "confidence_head_with_markov")
    return {name: bool(family_config.get(name)) for name in names}


def rename_for_layout(weights: Weights, layout: CheckpointLayout) -> Weights:
    """Rename tensors from this project's names to the names in the checkpoint format `layout`."""
    layout_names = {}
    for layout_prefix, prefix in layout.tensor_prefixes.items():
        for name in weights:
            if name.startswith(prefix):
                layout_names[name] = layout_prefix + name[len(prefix) :]
    return {layout_names.get(name, name): tensor for name, tensor in weights.items()}


def convert_to_transformers_format(
    drafter: Drafter, target: Target | None, public_config: Config, weights: Weights
) -> tuple[Config, Weights]:
    """Return the content of config.json and the tensors in the format of transformers' own drafter
    class.

    This class is used by `generate(assistant_model=..., speculation_type="dflash")`.
    """
    config = drafter.config
    assert config.layer_types is not None and config.rope_parameters is not None
    layout_config = {
        "architectures": [TRANSFORMERS_DRAFTER_ARCHITECTURE],
        "model_type": TRANSFORMERS_DRAFTER_MODEL_TYPE,
        "block_size": config.block_size,
        "mask_token_id": drafter.mask_token_id,
        "target_layer_ids": list(drafter.family_config["target_layer_ids"]),
        # transformers ignores this key; this project needs it to read the file back
        "num_target_layers": config.num_target_layers,
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
    """Return the content of config.json in speculators' format.

    `target_name` is the name or path from which engines load the target. `target_architectures` is
    the list `architectures` in the target's config.json. The drafter's conditional head determines
    the value of `speculators_model_type`.
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
        # all layers are causal. The DFlash authors' code applies the flag only to layers with a
        # sliding window.
        "sliding_window_non_causal": not any(causal for causal, _ in drafter.attention_patterns),
        # speculators ignores this key; this project needs it to read the file back
        "num_target_layers": config.num_target_layers,
        "dtype": str(drafter.dtype).removeprefix("torch."),
    }
    for key, value in family_config.items():
        if key.startswith(SPECULATORS_KEY_PREFIXES):
            layout_config[key] = value
    if speculators_type == "dspark":
        layout_config |= build_confidence_config(family_config)
    return layout_config


def convert_to_speculators_format(
    drafter: Drafter, target: Target, public_config: Config, weights: Weights
) -> tuple[Config, Weights]:
    """Return the content of config.json and the tensors in speculators' format.

    The config.json contains `target.name`, from which engines load the target.
    """
    draft_tokens = drafter.vocabulary.tokens
    if draft_tokens is not None:
        # (vocabulary size,)
        in_draft_vocabulary = torch.zeros(drafter.config.vocab_size, dtype=torch.bool)
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
