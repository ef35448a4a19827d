"""Export drafters in the layouts that other engines read.

A drafter is refused if the readers of a layout would compute something else than it was trained
for."""

from pathlib import Path

import torch
from transformers import PretrainedConfig

from infer.drafters.base import Drafter, get_target_head_weight
from infer.drafters.build import drop_target_copies, get_target_embeddings
from infer.drafters.config_keys import build_public_config
from infer.drafters.families import check_export_format
from infer.formats.checkpoint import write_drafter_folder
from infer.targets.loading import load_config
from infer.targets.target import Target

MAX_SELECTOR_TOP_K = 1024  # engines hold a table of top_k x top_k scores for every slot


def find_export_limits(drafter: Drafter) -> dict[str, str]:
    """Return the properties of a drafter that readers of some formats do not support: names that
    `ExportFormat.refused_features` lists, with a sentence for each."""
    return find_attention_limits(drafter) | find_head_limits(drafter)


def find_attention_limits(drafter: Drafter) -> dict[str, str]:
    """Return the properties of a drafter's slots, attention and feature layers, as
    `find_export_limits` does."""
    family_config = drafter.family_config
    patterns = drafter.attention_patterns
    starts_at_anchor = family_config.get("sample_from_anchor")
    last_layer_features = family_config.get("last_tap")
    rope_type = drafter.config.rope_parameters["rope_type"]  # ty: ignore[not-subscriptable]

    limits = {}
    if starts_at_anchor:
        limits["from anchor"] = "its first slot drafts already (sample_from_anchor)"
    else:
        limits["not from anchor"] = (
            "its first slot does not draft (drafter.sample_from_anchor=true)"
        )
    if any(causal for causal, _ in patterns):
        limits["causal"] = "it has layers that are causal inside the block"
    if (True, None) in patterns:
        limits["full and causal"] = (
            "it has layers that see all and are causal inside the block (dflash_config.causal)"
        )
    if any(window for _, window in patterns):
        limits["sliding"] = "it has sliding layers"
    if any(window == 1 for _, window in patterns):
        limits["window of 1"] = "its window of 1 position cannot be expressed there"
    if rope_type == "llama3":
        limits["llama3"] = (
            "its rotary positions are scaled as Llama 3's, which llama.cpp does not support in a drafter"
        )
    if family_config.get("layer_fusion"):
        limits["layer fusion"] = (
            "each of its layers reads its own mix of the feature layers (layer_fusion)"
        )
    if last_layer_features == "raw":
        limits["raw"] = "it reads the last layer before the target's last norm (last_tap=raw)"
    if last_layer_features == "normed":
        limits["normed"] = "it reads the last layer after the target's last norm (last_tap=normed)"
    return limits


def find_head_limits(drafter: Drafter) -> dict[str, str]:
    """Return the properties of a drafter's conditional head, as `find_export_limits` does."""
    family_config = drafter.family_config
    starts_at_anchor = family_config.get("sample_from_anchor")
    limits = {}
    if family_config.get("markov_head_type") == "rnn" and not starts_at_anchor:
        limits["recurrent"] = (
            "its recurrent head reads the bonus token's slot there (sample_from_anchor)"
        )
    if drafter.head_spec is not None and drafter.d2t is not None:
        limits["reduced vocabulary"] = (
            "its conditional head has a reduced vocabulary, theirs the whole one (drafter.draft_vocab_size=0)"
        )
    if drafter.head_spec is None or drafter.head_spec.name != "selector":
        return limits

    head = drafter.conditional_head
    assert head is not None
    top_k = head.top_k or drafter.config.vocab_size
    hidden_size = drafter.config.hidden_size
    if drafter.d2t is not None:
        limits["reduced selector vocabulary"] = "its selector has a reduced vocabulary"
    if starts_at_anchor:
        limits["selector from anchor"] = (
            "its selector chooses in the first slot too (sample_from_anchor)"
        )
    if top_k > MAX_SELECTOR_TOP_K:
        limits["selector size"] = (
            f"its selector chooses among {top_k} tokens, and they hold a table of all pairs (drafter.head.top_k=16)"
        )
    # llama.cpp stores the pairs of a slot, and the tokens, in one hidden state.
    if top_k * (top_k + 1) > hidden_size:
        max_top_k = int((hidden_size + 0.25) ** 0.5 - 0.5)
        limits["selector pairs"] = (
            f"its selector chooses among {top_k} tokens, and llama.cpp supports at most {max_top_k} with hidden_size={hidden_size} (drafter.head.top_k)"
        )
    return limits


def check_export(drafter: Drafter, format: str) -> None:
    """Raise ValueError if a layout cannot express a drafter, or if its readers would compute
    something else."""
    has_convolutions = bool(drafter.family_config.get("conv_kernel_size"))
    check_export_format(drafter.family, format, drafter.head_spec, has_convolutions)
    refused = drafter.family.formats[format].refused_features
    limits = find_export_limits(drafter)
    sentences = [sentence for name, sentence in limits.items() if name in refused]
    if sentences:
        raise ValueError(
            f"format={format}: its readers would run another drafter: {'; '.join(sentences)}"
        )


def export_drafter(drafter: Drafter, format: str, target: Target | None, out: Path) -> None:
    """Write a drafter in a layout of its family (`infer.drafters.families.EXPORT_FORMATS`).

    target: needed if the layout stores the embedding and the head, and if the drafter has copies of
        them

    Raises ValueError as `check_export` does, and if the target is missing.
    """
    check_export(drafter, format)
    family_config = drafter.family_config
    if format == "gguf":  # written in a layout that llama.cpp's converter reads
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
    # Readers of formats without reduced vocabularies use the target's whole head instead.
    if "reduced vocabulary" in export_format.refused_features:
        config.pop("draft_vocab_size", None)
        weights.pop("d2t", None)
    causal = family_config.get("causal")
    if causal is not None and not export_format.stores_embedding_and_head:
        # Readers of these formats look for different keys.
        config["is_causal"] = causal
        config[drafter.family.config_key] |= {"causal_head": causal}
    write = drafter.export_writers[format]
    write_drafter_folder(*write(drafter, target, config, weights), out)


def add_embedding_and_head(
    drafter: Drafter, target: Target | None, format: str
) -> dict[str, torch.Tensor]:
    """Return the drafter's tensors with the embedding and the head that it uses. Raises ValueError
    if the target is missing."""
    if target is None:
        raise ValueError(
            f"format={format} stores the target's embedding and head: give target.path"
        )
    weights = drafter.state_dict()
    target_weights = {
        "embed_tokens.weight": get_target_embeddings(target),
        "lm_head.weight": get_target_head_weight(drafter, target),
    }
    for name, weight in target_weights.items():
        weights.setdefault(name, weight.detach().to("cpu", drafter.dtype))
    return weights


def drop_embedding_and_head(
    drafter: Drafter, target: Target | None, format: str
) -> dict[str, torch.Tensor]:
    """Return the drafter's tensors without embedding and head. Raises ValueError if the drafter's
    differ from the target's, or if the target is missing and they cannot be compared."""
    if drafter.embed_tokens is not None or drafter.lm_head is not None:
        if target is None:
            raise ValueError(
                f"format={format}: it has its own embedding or head: give target.path to compare them"
            )
        try:
            drop_target_copies(drafter, target)
        except ValueError as error:
            raise ValueError(
                f"format={format} stores neither embedding nor head, and {error}"
            ) from error
    return drafter.state_dict()


def require_base_model_sizes(name: str, drafter: Drafter) -> str | None:
    """Check that the model which the card names as the target has the sizes of the drafter's
    target.

    name: a path or hub id

    Returns a sentence if its config.json cannot be read, else None. Raises ValueError if a size
    differs.
    """
    try:
        expected = get_target_sizes(drafter.config)
        sizes = get_target_sizes(load_config(name).get_text_config())
    except FileNotFoundError:
        return f"base_model={name}: its config.json could not be read from here, and was not compared with the drafter"
    wrong = [
        f"{key} {sizes[key]}, expected {size}"
        for key, size in expected.items()
        if size not in (None, sizes[key])
    ]
    if wrong:
        raise ValueError(
            f"base_model={name} is not the target of this drafter: it has {'; '.join(wrong)}"
        )
    return None


def get_target_sizes(config: PretrainedConfig) -> dict[str, int | None]:
    """Return the sizes of a target, from its config or from that of a drafter for it."""
    layers = vars(config).get("num_target_layers", config.num_hidden_layers)
    return {"hidden_size": config.hidden_size, "layers": layers, "vocab_size": config.vocab_size}
