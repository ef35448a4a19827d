"""Export drafters to folders that other inference engines can load.

An export is refused if the engines that load such folders would compute something else with the
drafter than this project does.
"""

from pathlib import Path

import torch
from transformers import PretrainedConfig

from infer.drafters.base import Drafter, get_target_head_weight
from infer.drafters.build import compute_target_input_embeddings, remove_copied_embedding_and_head
from infer.drafters.config_keys import build_public_config
from infer.drafters.families import check_export_format
from infer.formats.checkpoint import write_drafter_folder
from infer.targets.loading import load_config
from infer.targets.target import Target

# The maximum top_k of an exported selector head, which chooses among the top_k most likely tokens
# of each position. Engines store top_k * top_k scores per position, one for each pair of
# consecutive tokens.
MAX_EXPORTED_SELECTOR_TOP_K = 1024


def find_export_limits(drafter: Drafter) -> dict[str, str]:
    """Return those features of a drafter that some export formats do not support.

    Keys are names of features, as in `ExportFormat.refused_features`. Values describe a feature to
    the user.
    """
    return find_attention_limits(drafter) | find_head_limits(drafter)


def find_attention_limits(drafter: Drafter) -> dict[str, str]:
    """Return those features of the drafter's blocks, attention and input layers that some export
    formats do not support. Keys are names of features, values describe them to the user."""
    family_config = drafter.family_config
    patterns = drafter.attention_patterns
    starts_at_anchor = family_config.get("sample_from_anchor")
    last_layer_features = family_config.get("last_tap")
    rope_type = drafter.config.rope_parameters["rope_type"]  # ty: ignore[not-subscriptable]

    limits = {}
    if starts_at_anchor:
        limits["from anchor"] = (
            "it drafts a token at the position of the bonus token too (sample_from_anchor is true)"
        )
    else:
        limits["not from anchor"] = (
            "it drafts no token at the position of the bonus token (train with "
            "drafter.sample_from_anchor=true)"
        )
    if any(causal for causal, _ in patterns):
        limits["causal"] = "it has layers that are causal inside the block"
    if (True, None) in patterns:
        limits["full and causal"] = (
            "it has layers with full attention that are causal inside the block "
            "(dflash_config.causal is true)"
        )
    if any(window for _, window in patterns):
        limits["sliding"] = "it has layers with a sliding window"
    if any(window == 1 for _, window in patterns):
        limits["window of 1"] = "the format cannot express its sliding window of 1 position"
    if rope_type == "llama3":
        limits["llama3"] = (
            "it has Llama 3's scaling of rotary embeddings, which llama.cpp does not support in a "
            "drafter"
        )
    if family_config.get("layer_fusion"):
        limits["layer fusion"] = (
            "each of its layers reads its own mix of the target's layers (layer_fusion is true)"
        )
    if last_layer_features == "raw":
        limits["raw"] = "it reads the target's last layer before the final norm (last_tap is raw)"
    if last_layer_features == "normed":
        limits["normed"] = (
            "it reads the target's last layer after the final norm (last_tap is normed)"
        )
    return limits


def find_head_limits(drafter: Drafter) -> dict[str, str]:
    """Return those features of the drafter's conditional head that some export formats do not
    support. Keys are names of features, values describe them to the user."""
    family_config = drafter.family_config
    starts_at_anchor = family_config.get("sample_from_anchor")
    limits = {}
    if family_config.get("markov_head_type") == "rnn" and not starts_at_anchor:
        limits["recurrent"] = (
            "its conditional head is recurrent, which the format supports only if "
            "sample_from_anchor is true"
        )
    if drafter.head_spec is not None and drafter.d2t is not None:
        limits["reduced vocabulary"] = (
            "its conditional head has a reduced vocabulary, and the format supports only the "
            "whole vocabulary (train with drafter.draft_vocab_size=0)"
        )
    if drafter.head_spec is None or drafter.head_spec.name != "selector":
        return limits

    head = drafter.conditional_head
    assert head is not None
    top_k = head.top_k or drafter.config.vocab_size
    hidden_size = drafter.config.hidden_size
    if drafter.d2t is not None:
        limits["reduced selector vocabulary"] = "its selector head has a reduced vocabulary"
    if starts_at_anchor:
        limits["selector from anchor"] = (
            "its selector head also chooses a token at the position of the bonus token "
            "(sample_from_anchor is true)"
        )
    if top_k > MAX_EXPORTED_SELECTOR_TOP_K:
        limits["selector size"] = (
            f"its selector head chooses among {top_k} tokens, but at most "
            f"{MAX_EXPORTED_SELECTOR_TOP_K} are allowed, because engines store scores for all "
            "pairs of these tokens (set drafter.head.top_k, for example to 16)"
        )
    # For each position, llama.cpp stores top_k token ids and the scores of top_k * top_k pairs of
    # consecutive tokens in a buffer of hidden_size values.
    if top_k * (top_k + 1) > hidden_size:
        max_top_k = int((hidden_size + 0.25) ** 0.5 - 0.5)
        limits["selector pairs"] = (
            f"its selector head chooses among {top_k} tokens, and llama.cpp supports at most "
            f"{max_top_k} with hidden_size={hidden_size} (set drafter.head.top_k)"
        )
    return limits


def check_export(drafter: Drafter, format: str) -> None:
    """Raise ValueError if `drafter` cannot be exported in the format `format`. The reason is that
    the format cannot store the drafter, or that engines would compute something else with it than
    this project does.
    """
    has_convolutions = bool(drafter.family_config.get("conv_kernel_size"))
    check_export_format(drafter.family, format, drafter.head_spec, has_convolutions)
    refused = drafter.family.formats[format].refused_features
    limits = find_export_limits(drafter)
    sentences = [sentence for name, sentence in limits.items() if name in refused]
    if sentences:
        raise ValueError(
            f"format={format} does not support this drafter, because {'; '.join(sentences)}"
        )


def export_drafter(drafter: Drafter, format: str, target: Target | None, out: Path) -> None:
    """Write a drafter to the folder `out` in one of the export formats of its family.

    format: a key of `Family.formats`
    target: required in two cases: if the format includes the target's embedding and language model
        head, or if the drafter has its own embedding or head, which is compared with the target's

    Raises ValueError if the drafter cannot be exported in this format (`check_export`), and if
    `target` is required and None.
    """
    check_export(drafter, format)
    family_config = drafter.family_config
    if format == "gguf":
        # Write a format that llama.cpp's converter reads. `convert_to_gguf` runs the converter
        # afterwards.
        if family_config.get("sample_from_anchor") or family_config.get("markov_rank"):
            source_format = "dspark"
        elif drafter.head_spec is None:
            source_format = "dflash"
        else:
            source_format = "dflash2"
        return export_drafter(drafter, source_format, target, out)

    export_format = drafter.family.formats[format]
    if export_format.stores_embedding_and_head:
        weights = add_embedding_and_head(drafter, target, format)
    else:
        weights = drop_embedding_and_head(drafter, target, format)
    config = build_public_config(drafter.config)
    # The engines of this format do not support reduced vocabularies. They let the drafter use the
    # target's whole language model head.
    if "reduced vocabulary" in export_format.refused_features:
        config.pop("draft_vocab_size", None)
        weights.pop("d2t", None)
    causal = family_config.get("causal")
    if causal is not None and not export_format.stores_embedding_and_head:
        # Write the flag for causal attention under two keys, because engines read different keys.
        config["is_causal"] = causal
        config[drafter.family.config_key] |= {"causal_head": causal}
    write = drafter.export_writers[format]
    write_drafter_folder(*write(drafter, target, config, weights), out)


def add_embedding_and_head(
    drafter: Drafter, target: Target | None, format: str
) -> dict[str, torch.Tensor]:
    """Return the drafter's tensors, with the target's embedding and language model head added if
    the drafter has none of its own. Raises ValueError if `target` is None.

    format: the export format, for the message
    """
    if target is None:
        raise ValueError(
            f"format={format} stores the target's embedding and output head: set target.path to "
            "the target"
        )
    weights = drafter.state_dict()
    target_weights = {
        "embed_tokens.weight": compute_target_input_embeddings(target),
        "lm_head.weight": get_target_head_weight(drafter, target),
    }
    for name, weight in target_weights.items():
        weights.setdefault(name, weight.detach().to("cpu", drafter.dtype))
    return weights


def drop_embedding_and_head(
    drafter: Drafter, target: Target | None, format: str
) -> dict[str, torch.Tensor]:
    """Return the drafter's tensors without embedding and language model head, for a format in which
    engines use those of the target.

    format: the export format, for the message

    Raises ValueError if the drafter has an embedding or a head that differs from the target's, or
    that cannot be compared because `target` is None.
    """
    if drafter.embed_tokens is not None or drafter.lm_head is not None:
        if target is None:
            raise ValueError(
                f"format={format} does not store the drafter's own embedding or output head: set "
                "target.path to the target, so that they can be compared with the target's"
            )
        try:
            remove_copied_embedding_and_head(drafter, target)
        except ValueError as error:
            raise ValueError(
                f"format={format} cannot store the drafter's own embedding or output head, but "
                f"{error}"
            ) from error
    return drafter.state_dict()


def check_base_model_sizes(name: str, drafter: Drafter) -> str | None:
    """Check that the base model named on a drafter's model card can be the drafter's target. Hidden
    size, number of layers and vocabulary size are compared.

    name: the base model, a path or an id on the Hugging Face hub

    Returns a warning for the user if the base model's config.json cannot be read, else None. Raises
    ValueError if a size differs.
    """
    try:
        expected = get_target_sizes(drafter.config)
        sizes = get_target_sizes(load_config(name).get_text_config())
    except FileNotFoundError:
        return (
            f"base_model={name}: the config.json of this model could not be read, so it was not "
            "checked that the drafter fits the model"
        )
    wrong = [
        f"{key} {sizes[key]}, expected {size}"
        for key, size in expected.items()
        if size not in (None, sizes[key])
    ]
    if wrong:
        raise ValueError(
            f"base_model={name} is not the target of this drafter: it has {'; '.join(wrong)}. "
            "Give the model for which the drafter was trained"
        )
    return None


def get_target_sizes(config: PretrainedConfig) -> dict[str, int | None]:
    """Return the hidden size, the number of layers and the vocabulary size of a target, with the
    keys hidden_size, layers and vocab_size.

    config: the config of the target, or of a drafter that was trained for the target
    """
    layers = vars(config).get("num_target_layers", config.num_hidden_layers)
    return {"hidden_size": config.hidden_size, "layers": layers, "vocab_size": config.vocab_size}
