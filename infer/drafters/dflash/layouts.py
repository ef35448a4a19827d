"""The layouts that DFlash drafters are published in, read into our terms and written.

- the public one, which we write too; newer ones have sliding layers, or hold their size in `dflash_config`;
- DeepSpec's flat form of it, whose first slot drafts already (`sample_from_anchor`), with embedding and head inside;
- speculators' "dflash": the Qwen3 part in `transformer_layer_config`, tapped layers counted from 1.
"""

from collections.abc import Collection
from typing import Any

from infer.drafters.base import Drafter, target_embeddings
from infer.drafters.config_keys import Keys, Reading, config_dict, known_tokens
from infer.drafters.families import Family
from infer.targets.target import Target


def read(family: Family, raw: dict, tensors: Collection[str], target_layers: int | None) -> Reading | None:
    """Read a config.json in one of the layouts; None if it is in none of them. tensors: names of the stored ones;
    target_layers: how many layers the target has, for configs that do not say."""
    keys = Keys(raw, [])
    if keys.architecture == "DFlash2DraftModel":
        sentence = "architectures is ['DFlash2DraftModel']: its convolutions and candidate selector are not supported"
        return Reading("dflash2", family, {}, [f"config.json: {sentence}"])
    if "speculators_model_type" in raw:
        return read_speculators(family, keys, tensors, target_layers)
    if keys.architecture in (family.architecture, "Qwen3DSparkModel"):
        return read_public(family, keys, tensors, target_layers)
    return None


def read_public(family: Family, keys: Keys, tensors: Collection[str], target_layers: int | None) -> Reading:
    """Read the public layout, or DeepSpec's flat form."""
    raw = keys.raw
    flat = raw.get(family.config_key) is None and raw.get("target_layer_ids") is not None
    part = keys if flat else keys.part(family.config_key)
    if not flat:
        part.plain()
    options = keys.transformer(None)
    layers = keys.target_layers(target_layers)
    sized = part if raw.get("block_size") is None else keys
    masked = keys if part.raw.get("mask_token_id") is None else part
    own: dict[str, Any] = {
        "block_size": sized.number("block_size", least=2 - flat),
        "mask_token_id": masked.mask_token(options["vocab_size"]),
        "target_layer_ids": part.tapped("target_layer_ids", layers),  # no formula: many published ones have others
    }
    if part.raw.get("block_size") not in (None, own["block_size"]):
        part.note("block_size", f"is {part.raw['block_size']}, and {own['block_size']} outside")
    if part.raw.get("use_swa") and "sliding_attention" not in options["layer_types"]:  # all slide, and see all
        window = part.number("swa_window_size", raw.get("sliding_window"))
        kinds = ["sliding_attention"] * (options["num_hidden_layers"] or 1)
        options |= {"layer_types": kinds, "use_sliding_window": True, "sliding_window": window}
        own["causal"] = False
    for flag in (part.flag("causal"), keys.flag("is_causal")):  # the second one counts
        if flag is not None:
            own["causal"] = flag
    anchor = part.flag("sample_from_anchor")
    if anchor or (flat and anchor is None):
        own["sample_from_anchor"] = True
    reading = Reading("DeepSpec" if flat else "dflash", family, options, keys.problems)
    return complete(reading, keys, own, tensors, layers)


def read_speculators(family: Family, keys: Keys, tensors: Collection[str], target_layers: int | None) -> Reading:
    """Read speculators' layout of DFlash drafters."""
    kind = keys.raw["speculators_model_type"]
    if kind != "dflash":
        keys.note("speculators_model_type", f"is {kind!r}, expected 'dflash'")
    if not isinstance(keys.raw.get("transformer_layer_config"), dict):
        keys.note("transformer_layer_config", "is missing")
    part = keys.part("transformer_layer_config")
    keys.plain()
    options = part.transformer(None)
    layers = keys.target_layers(target_layers)
    anchor = keys.flag("sample_from_anchor")
    own: dict[str, Any] = {
        "block_size": keys.number("block_size", least=1 if anchor else 2),
        "mask_token_id": keys.mask_token(options["vocab_size"]),
        "target_layer_ids": keys.tapped("aux_hidden_state_layer_ids", layers, first=1),
    }
    if anchor:
        own["sample_from_anchor"] = True
    if keys.flag("sliding_window_non_causal") and "sliding_attention" in options["layer_types"]:
        own["causal"] = False
    unused = {"verifier_lm_head.weight", "verifier_norm.weight"}
    reading = Reading("speculators", family, options, keys.problems, unused)
    return complete(reading, keys, own, tensors, layers)


def complete(
    reading: Reading, keys: Keys, own: dict[str, Any], tensors: Collection[str], layers: int | None
) -> Reading:
    """Complete a reading: embedding and head of the drafter's own, as vLLM takes them, and `dflash_config`."""
    options = reading.options
    reading.unused |= keys.draft_vocabulary(tensors, options)
    options["has_embed_tokens"] = "embed_tokens.weight" in tensors
    options["has_lm_head"] = "draft_vocab_size" in options or "lm_head.weight" in tensors
    options |= reading.family.config_part(own) | {"block_size": own["block_size"], "num_target_layers": layers}
    return reading


def write_public(drafter: Drafter, target: Target | None) -> tuple[dict, dict]:
    """Return config.json and tensors in the public layout, without embedding and head. `target` is needed for a drafter
    that has copies of them. Raises ValueError for drafters that this layout has no words for."""
    if drafter.own.get("sample_from_anchor"):
        raise ValueError(
            "format=dflash: its first slot drafts already (sample_from_anchor), which no engine reads there"
        )
    if drafter.embed_tokens is not None or drafter.lm_head is not None:
        if target is None:
            raise ValueError("format=dflash: it has an embedding or head of its own: give target.path to compare them")
        try:
            drafter.drop_copies(target)
        except ValueError as error:
            raise ValueError(f"format=dflash stores neither embedding nor head, and {error}") from error
    return config_dict(drafter.config), drafter.state_dict()


def speculators_config(drafter: Drafter, verifier: str, architectures: list[str]) -> dict:
    """Return config.json in speculators' layout. verifier: the target's name or path."""
    config, own_key = drafter.config, drafter.family.config_key
    part = config_dict(config)
    for key in ("architectures", "auto_map", "block_size", own_key, "num_target_layers", "draft_vocab_size"):
        part.pop(key, None)
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": drafter.block_size - 1,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
        "transformer_layer_config": part,
        "draft_vocab_size": config.vocab_size if drafter.d2t is None else len(drafter.d2t),
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in drafter.layer_ids],
        "mask_token_id": drafter.mask_token_id,
        "sample_from_anchor": drafter.first_draft_slot == 0,
        "sliding_window_non_causal": drafter.own.get("causal") is False,
        "num_target_layers": config.num_target_layers,  # theirs has no such key, and ignores it
        "dtype": str(drafter.norm.weight.dtype).removeprefix("torch."),
    }


def write_speculators(drafter: Drafter, target: Target | None) -> tuple[dict, dict]:
    """Return config.json and tensors in speculators' layout, with the embedding and the head that the drafter uses;
    `target.name` tells the engine where to find the target. Raises ValueError for drafters that this layout has no
    words for."""
    if target is None:
        raise ValueError("format=speculators stores the target's embedding and head: give target.path")
    causal = drafter.own.get("causal")
    if causal or (causal is False and drafter.attention_patterns == [(False, None)]):
        raise ValueError("format=speculators: layers that see all are never causal there (dflash_config.causal)")
    weights, kind = dict(drafter.state_dict()), drafter.norm.weight.dtype
    for name, weight in (("embed_tokens", target_embeddings(target)), ("lm_head", target.head_weight)):
        weights.setdefault(f"{name}.weight", weight.detach().to("cpu", kind))
    if drafter.d2t is not None:
        weights["t2d"] = known_tokens(drafter.d2t, drafter.config.vocab_size)
    architectures = target.model.config.architectures or [type(target.model).__name__]
    return speculators_config(drafter, target.name, architectures), weights
