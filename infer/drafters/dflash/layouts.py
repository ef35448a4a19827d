"""The layouts that DFlash drafters are published in, read into our terms and written.

- the public one, which we write too; newer ones have sliding layers, or hold their size in `dflash_config`;
- DeepSpec's flat form of it, whose first slot drafts already (`sample_from_anchor`), with embedding and head inside;
- speculators' "dflash": the Qwen3 part in `transformer_layer_config`, tapped layers counted from 1;
- transformers' own (5.23, `MuseGlimmerAssistantModel`): flat, with two tensors of other names, no layer causal.

JetSpec and NeMo Automodel write the public one, with a flag (`causal_head`) and a class name of their own.
"""

from collections.abc import Collection
from typing import Any

from infer.drafters.base import Drafter, target_embeddings
from infer.drafters.config_keys import Keys, Reading, config_dict, known_tokens
from infer.drafters.families import Family
from infer.targets.target import Target

NAMES = ("Qwen3DFlashDraftModel", "Qwen3DSparkModel")  # NeMo Automodel's and DeepSpec's beside the authors'
NATIVE, NATIVE_TYPE = "MuseGlimmerAssistantModel", "muse_glimmer_assistant"
NATIVE_TENSORS = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
# what transformers' class takes for keys that are missing, where ours takes something else
NATIVE_DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 2048, "max_position_embeddings": 131072}


def read(family: Family, raw: dict, tensors: Collection[str], target_layers: int | None) -> Reading | None:
    """Read a config.json in one of the layouts; None if it is in none of them. tensors: names of the stored ones;
    target_layers: how many layers the target has, for configs that do not say."""
    keys = Keys(raw, [], heads=True)
    if keys.architecture == "DFlash2DraftModel":
        sentence = "architectures is ['DFlash2DraftModel']: its convolutions and candidate selector are not supported"
        return Reading("dflash2", family, {}, [f"config.json: {sentence}"])
    if "speculators_model_type" in raw:
        keys.heads = False
        return read_speculators(family, keys, tensors, target_layers)
    if raw.get("model_type") == NATIVE_TYPE or keys.architecture == NATIVE:
        return read_transformers(family, keys, tensors, target_layers)
    if keys.architecture in (family.architecture, *NAMES):
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
    sized = part if keys.get("block_size") is None else keys
    masked = keys if part.get("mask_token_id") is None else part
    own: dict[str, Any] = {
        "block_size": sized.number("block_size", least=2 - flat),
        "mask_token_id": masked.mask_token(options["vocab_size"]),
        "target_layer_ids": part.tapped("target_layer_ids", layers),  # no formula: many published ones have others
    }
    own |= part.last_tap(own["target_layer_ids"], layers, "normed")  # the authors' code: hidden_states[N]
    if part.get("block_size") not in (None, own["block_size"]):
        part.note("block_size", f"is {part.raw['block_size']}, and {own['block_size']} outside")
    for key in ("target_hidden_size", "num_target_layers"):
        if part.get(key) not in (None, raw.get(key, options["hidden_size"])):
            part.note(key, f"is {part.raw[key]}, and {raw.get(key, options['hidden_size'])} outside")
    if part.get("use_swa") and "sliding_attention" not in options["layer_types"]:  # all slide, and see all
        window = part.number("swa_window_size", keys.get("sliding_window"))
        kinds = ["sliding_attention"] * (options["num_hidden_layers"] or 1)
        options |= {"layer_types": kinds, "use_sliding_window": True, "sliding_window": window}
        own["causal"] = False
    own |= causal_flag(keys, part)
    own |= part.conditional_head() | convolutions(part, options["hidden_size"])
    anchor = part.flag("sample_from_anchor")
    if anchor or (flat and anchor is None):
        own["sample_from_anchor"] = True
    reading = Reading("DeepSpec" if flat else "dflash", family, options, keys.problems)
    if layers is not None and "last_tap" in own and part.get("last_tap") is None:
        reading.guessed_tap = (
            "it taps the target's last layer and does not say where: behind the last norm, as the authors' code does; "
            'vLLM taps before it, as "last_tap": "raw" beside target_layer_ids would say'
        )
    return complete(reading, keys, own, tensors, layers)


def causal_flag(keys: Keys, part: Keys) -> dict[str, bool]:
    """Return `causal` of all layers, where one of its three names says so: `is_causal` at the top (vLLM, the authors'
    code), `causal` in `part` (vLLM) or `causal_head` there (JetSpec). Readers differ on which one counts, so that two
    that differ are a fault: NeMo's JetSpec recipe writes is_causal false beside causal true."""
    flags = {"is_causal": keys.flag("is_causal")} | {key: part.flag(key) for key in ("causal", "causal_head")}
    given = {key: flag for key, flag in flags.items() if flag is not None}
    if len(set(given.values())) > 1:
        said = " and ".join(f"{key} {flag}".lower() for key, flag in given.items())
        keys.note("is_causal", f"contradicts {part.prefix.rstrip('.') or 'itself'}: {said}; remove the wrong one")
    return {"causal": next(iter(given.values()))} if given else {}


def convolutions(part: Keys, hidden: int | None) -> dict[str, int]:
    """Return the keys of DFlash 2's convolutions, none where there are none."""
    if not part.get("conv_kernel_size"):
        return {}
    own = {"conv_kernel_size": part.number("conv_kernel_size"), "conv_group_size": part.number("conv_group_size", 16)}
    if hidden and own["conv_group_size"] and hidden % own["conv_group_size"]:
        part.note("conv_group_size", f"is {own['conv_group_size']}, which does not divide hidden_size, {hidden}")
    return own


def read_transformers(family: Family, keys: Keys, tensors: Collection[str], target_layers: int | None) -> Reading:
    """Read the folder of transformers' own class. It has no vocabulary: the least one that has the mask token is taken
    where the folder does not say."""
    keys.raw = NATIVE_DEFAULTS | {key: value for key, value in keys.raw.items() if value is not None}
    mask = keys.number("mask_token_id", least=0)
    keys.raw.setdefault("vocab_size", (mask or 0) + 1)
    keys.raw.setdefault("layer_types", ["sliding_attention"] * (keys.number("num_hidden_layers") or 1))
    options = keys.transformer(None)
    layers = keys.target_layers(target_layers)
    own: dict[str, Any] = {
        "block_size": keys.number("block_size", least=2),
        "mask_token_id": keys.mask_token(options["vocab_size"]),
        "target_layer_ids": keys.tapped("target_layer_ids", layers),
    }
    if layers is None or layers - 1 in own["target_layer_ids"]:
        own["last_tap"] = "normed"
    if "sliding_attention" in options["layer_types"]:
        own["causal"] = False
        options["sliding_window"] = (options["sliding_window"] or 0) + 1  # theirs counts distances, ours positions
    reading = Reading("transformers", family, options, keys.problems, renamed=NATIVE_TENSORS)
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
    keys.get("speculators_model_type")
    check_proposal(keys.part("speculators_config"))
    own: dict[str, Any] = {
        "block_size": keys.number("block_size", least=1 if anchor else 2),
        "mask_token_id": keys.mask_token(options["vocab_size"]),
        "target_layer_ids": keys.tapped("aux_hidden_state_layer_ids", layers, first=1),
    }
    if anchor:
        own["sample_from_anchor"] = True
    own |= keys.last_tap(own["target_layer_ids"], layers, "raw")  # states come from vLLM, which taps before the norm
    if keys.flag("sliding_window_non_causal") and "sliding_attention" in options["layer_types"]:
        own["causal"] = False
    unused = {"verifier_lm_head.weight", "verifier_norm.weight"}
    reading = Reading("speculators", family, options, keys.problems, unused)
    return complete(reading, keys, own, tensors, layers)


def check_proposal(part: Keys) -> None:
    """Take note of the keys of `speculators_config`, which says how an engine drafts with it."""
    part.get("algorithm", "default_proposal_method")
    part.part("verifier").get("name_or_path", "architectures")
    methods = part.get("proposal_methods")
    for number, method in enumerate(methods if isinstance(methods, list) else []):
        if isinstance(method, dict):
            level = Keys(method, part.problems, f"{part.prefix}proposal_methods[{number}].")
            level.get("proposal_type", "speculative_tokens", "verifier_accept_k", "accept_tolerance")
            part.parts[f"proposal_methods[{number}]"] = level


def complete(
    reading: Reading, keys: Keys, own: dict[str, Any], tensors: Collection[str], layers: int | None
) -> Reading:
    """Complete a reading: embedding and head of the drafter's own, as vLLM takes them, and `dflash_config`. Note the
    keys that nothing has asked for."""
    options = reading.options
    reading.unused |= keys.draft_vocabulary(tensors, options)
    options["has_embed_tokens"] = "embed_tokens.weight" in tensors
    options["has_lm_head"] = "draft_vocab_size" in options or "lm_head.weight" in tensors
    if keys.get("tie_word_embeddings") and options["has_embed_tokens"] and not options["has_lm_head"]:
        keys.note("tie_word_embeddings", "is true: its own embedding would be its head, which this project has not")
    keys.note_unknown()
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
    config, causal = config_dict(drafter.config), drafter.own.get("causal")
    if causal is not None:  # in the words of every reader
        config["is_causal"] = causal
        config[drafter.family.config_key] |= {"causal_head": causal}
    return config, drafter.state_dict()


def write_transformers(drafter: Drafter, target: Target | None) -> tuple[dict, dict]:
    """Return config.json and tensors of transformers' own class, for `generate(assistant_model=...,
    speculation_type="dflash")`. `target` as in `write_public`. Raises ValueError for drafters that it would run in
    another way."""
    config, own = drafter.config, drafter.own
    faults = []
    if own.get("sample_from_anchor"):
        faults.append("its first slot drafts already (sample_from_anchor)")
    if any(causal for causal, _ in drafter.attention_patterns):
        faults.append("it has layers that are causal inside the block, and transformers' are not")
    if own.get("last_tap") == "raw":
        faults.append("it taps the last layer before the target's last norm (last_tap=raw), transformers behind it")
    if any(window == 1 for _, window in drafter.attention_patterns):
        faults.append("its window of 1 position has no word there")
    if faults:
        raise ValueError(f"format=transformers: transformers would run another drafter: {'; '.join(faults)}")
    weights = write_public(drafter, target)[1]
    raw = {
        "architectures": [NATIVE],
        "model_type": NATIVE_TYPE,
        "block_size": config.block_size,
        "mask_token_id": drafter.mask_token_id,
        "target_layer_ids": list(own["target_layer_ids"]),
        "num_target_layers": config.num_target_layers,  # theirs has no such key, and keeps it
        "layer_types": config.layer_types,
        "rope_parameters": dict(config.rope_parameters),
        "dtype": str(drafter.norm.weight.dtype).removeprefix("torch."),
    }
    if "sliding_attention" in config.layer_types:
        raw["sliding_window"] = config.sliding_window - 1  # theirs counts distances, ours positions
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    names += ("head_dim", "max_position_embeddings", "rms_norm_eps", "vocab_size")
    stored = {ours: theirs for theirs, ours in NATIVE_TENSORS.items()}
    raw |= {name: getattr(config, name) for name in names}
    return raw, {stored.get(name, name): tensor for name, tensor in weights.items()}


def speculators_config(drafter: Drafter, verifier: str, architectures: list[str]) -> dict:
    """Return config.json in speculators' layout. verifier: the target's name or path."""
    config, own_key = drafter.config, drafter.family.config_key
    part = config_dict(config)
    for key in ("architectures", "block_size", own_key, "num_target_layers", "draft_vocab_size"):
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
        "aux_hidden_state_layer_ids": [layer + 1 for layer in drafter.own["target_layer_ids"]],
        "mask_token_id": drafter.mask_token_id,
        "sample_from_anchor": drafter.first_draft_slot == 0,
        # vLLM takes it for all layers, false for causal ones, where the authors' code takes it for sliding layers alone
        "sliding_window_non_causal": not any(causal for causal, _ in drafter.attention_patterns),
        "num_target_layers": config.num_target_layers,  # theirs has no such key, and ignores it
        "dtype": str(drafter.norm.weight.dtype).removeprefix("torch."),
    }


def write_speculators(drafter: Drafter, target: Target | None) -> tuple[dict, dict]:
    """Return config.json and tensors in speculators' layout, with the embedding and the head that the drafter uses;
    `target.name` tells the engine where to find the target. Raises ValueError for drafters that this layout has no
    words for."""
    if target is None:
        raise ValueError("format=speculators stores the target's embedding and head: give target.path")
    if (True, None) in drafter.attention_patterns:
        raise ValueError("format=speculators: layers that see all are never causal there (dflash_config.causal)")
    if len({causal for causal, window in drafter.attention_patterns if window}) > 1:
        raise ValueError("format=speculators: sliding layers are all causal there, or none is")
    if drafter.own.get("last_tap") == "normed":
        raise ValueError("format=speculators: its engines tap the last layer before the target's last norm (last_tap)")
    weights, kind = dict(drafter.state_dict()), drafter.norm.weight.dtype
    for name, weight in (("embed_tokens", target_embeddings(target)), ("lm_head", target.head_weight)):
        weights.setdefault(f"{name}.weight", weight.detach().to("cpu", kind))
    if drafter.d2t is not None:
        weights["t2d"] = known_tokens(drafter.d2t, drafter.config.vocab_size)
    architectures = target.model.config.architectures or [type(target.model).__name__]
    return speculators_config(drafter, target.name, architectures), weights
