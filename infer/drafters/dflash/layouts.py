"""The layouts that DFlash drafters are published in, read into our terms; writers.py writes them.

- the public one, which we write too; newer ones have sliding layers, or hold their size in `dflash_config`;
- DeepSpec's flat form of it, whose first slot drafts already (`sample_from_anchor`), with embedding and head inside,
  and DSpark's Markov and confidence heads;
- SpecForge's DSpark and Domino: the public one with a `projector_type`, and the head's keys in `dflash_config`;
- DFlash 2: the public one with convolutions and a candidate selector;
- TreeFlash: the public one with a `treeflash_config`, the backbone's tensors under `model.`;
- speculators' "dflash", "dspark" and "dflash2": the Qwen3 part in `transformer_layer_config`, tapped layers counted
  from 1;
- transformers' own (5.23, `MuseGlimmerAssistantModel`): flat, with two tensors of other names, no layer causal.

JetSpec and NeMo Automodel write the public one, with a flag (`causal_head`) and a class name of their own.
"""

from collections.abc import Collection
from typing import Any

from infer.drafters.config_keys import ConfigReading, Keys, check_proposal
from infer.drafters.families import Family
from infer.drafters.heads import table as heads

DSPARK, SPECFORGE, DFLASH2, TREEFLASH = "DeepSpec", "SpecForge", "dflash2", "treeflash"  # layouts beside the public one
NAMES = {  # the layout of classes beside the authors' first one
    "Qwen3DFlashDraftModel": "dflash",  # NeMo Automodel's
    "Qwen3DSparkModel": DSPARK,
    "DSparkDraftModel": SPECFORGE,
    "DominoDraftModel": SPECFORGE,
    "DFlash2DraftModel": DFLASH2,
    "TreeFlashDraftModel": TREEFLASH,
}
PROJECTORS = {"dspark": "markov_rank", "domino": "gru_hidden_dim"}  # projector_type, and the key that it needs
# keys that some write beside `dflash_config`, some in it, and some in both
EITHER = (
    *("projector_type", "sample_from_anchor", "shift_label", "emb_dim", "gru_hidden_dim", "pure_draft_prefix_len"),
    *("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
)
AUTOREGRESSIVE = ("eagle3", "mtp")  # speculators' kinds that write token by token
DOMINO_TENSORS = ("prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.0.weight", "embed_proj.2.weight")
# what speculators' classes take for keys that are missing
SPECULATORS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dspark": {
        "sample_from_anchor": True,
        "markov_rank": 256,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
    "dflash2": {
        "sliding_window_non_causal": True,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 256,
        "selector_top_k": 16,
    },
}
NATIVE, NATIVE_TYPE = "MuseGlimmerAssistantModel", "muse_glimmer_assistant"
NATIVE_TENSORS = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
# what transformers' class takes for keys that are missing, where ours takes something else
NATIVE_DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 2048, "max_position_embeddings": 131072}


def read(family: Family, raw: dict, tensors: Collection[str], target_layers: int | None) -> ConfigReading | None:
    """Read a config.json in one of the layouts; None if it is in none of them. tensors: names of the stored ones;
    target_layers: how many layers the target has, for configs that do not say."""
    keys = Keys(raw, [], heads=True)
    if raw.get("speculators_model_type") in AUTOREGRESSIVE:
        keys.note(
            "speculators_model_type",
            f"is {raw['speculators_model_type']!r}, whose drafters are not read: they "
            "write token by token, and not a block at once",
        )
        return ConfigReading("none", None, {}, keys.problems)
    if "speculators_model_type" in raw:
        return read_speculators(family, keys, tensors, target_layers)
    if raw.get("model_type") == NATIVE_TYPE or keys.architecture == NATIVE:
        return read_transformers(family, keys, tensors, target_layers)
    if keys.architecture in (family.architecture, *NAMES):
        return read_public(family, keys, tensors, target_layers)
    return None


def read_public(family: Family, keys: Keys, tensors: Collection[str], target_layers: int | None) -> ConfigReading:
    """Read the public layout, DeepSpec's flat form, or one of those with a head that are like the public one."""
    raw = keys.raw
    flat = raw.get(family.config_key) is None and raw.get("target_layer_ids") is not None
    part = keys if flat else keys.part(family.config_key)
    if not flat:
        part.inherit(keys, EITHER)
        part.plain()
    layout = DSPARK if flat else NAMES.get(keys.architecture or "", "dflash")
    if part.get("projector_type") in PROJECTORS:
        layout = SPECFORGE
    head = read_head(keys, part, tensors, layout)
    options = keys.transformer(None)
    layers = keys.target_layers(target_layers)
    sized = part if keys.get("block_size") is None else keys
    masked = keys if part.get("mask_token_id") is None else part
    own: dict[str, Any] = {
        "block_size": sized.number("block_size", least=1 if "sample_from_anchor" in head else 2),
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
    own |= head | convolutions(part, options["hidden_size"])
    reading = ConfigReading(layout, family, options, keys.problems, renamed=renamed(layout, own, tensors))
    if layers is not None and "last_tap" in own and part.get("last_tap") is None:
        reading.guessed_tap = (
            "it taps the target's last layer and does not say where: behind the last norm, as the authors' code does; "
            'vLLM taps before it, as "last_tap": "raw" beside target_layer_ids would say'
        )
    return complete(reading, keys, own, tensors, layers)


def read_head(keys: Keys, part: Keys, tensors: Collection[str], layout: str) -> dict[str, Any]:
    """Return the keys of the conditional head, none where there is none, and `sample_from_anchor` where the first slot
    drafts."""
    projector = part.get("projector_type")
    needed = "selector_rank" if layout == DFLASH2 else PROJECTORS.get(projector)
    if needed is not None and not part.raw.get(needed):
        part.note(needed, "is missing: it says how large the conditional head is")
    level = part
    if layout == TREEFLASH:
        level = keys.part("treeflash_config")
        level.get("candidate_tokens")  # of the authors' own tree
    own = heads.read_head(level)
    if "markov_rank" in own and part.get("enable_confidence_head") is None and "confidence_head.proj.weight" in tensors:
        own["enable_confidence_head"] = True
    if "markov_rank" not in own and part.flag("enable_confidence_head"):
        part.note("enable_confidence_head", "is true, and there is no Markov head")
    anchor, shifted = part.flag("sample_from_anchor"), part.flag("shift_label")
    if None not in (anchor, shifted) and anchor != shifted:
        part.note("shift_label", f"is {shifted}, and sample_from_anchor {anchor}")
    default = layout == DSPARK or projector == "dspark" or keys.architecture == "DSparkDraftModel"
    if next((said for said in (anchor, shifted) if said is not None), default):
        own["sample_from_anchor"] = True
    return own


def renamed(layout: str, own: dict[str, Any], tensors: Collection[str]) -> dict[str, str]:
    """Return the tensors that have other names in the layout: theirs to ours."""
    if layout == TREEFLASH:
        return {name: name.removeprefix("model.") for name in tensors if name.startswith("model.")}
    if layout == SPECFORGE and "gru_hidden_dim" in own:
        return {name: f"domino_head.{name}" for name in DOMINO_TENSORS}
    return {}


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


def read_transformers(family: Family, keys: Keys, tensors: Collection[str], target_layers: int | None) -> ConfigReading:
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
    reading = ConfigReading("transformers", family, options, keys.problems, renamed=NATIVE_TENSORS)
    return complete(reading, keys, own, tensors, layers)


def read_speculators(family: Family, keys: Keys, tensors: Collection[str], target_layers: int | None) -> ConfigReading:
    """Read speculators' layout of DFlash drafters, with heads or without."""
    kind = keys.raw["speculators_model_type"]
    if kind not in SPECULATORS:
        keys.note("speculators_model_type", f"is {kind!r}, expected {' or '.join(SPECULATORS)}")
    keys.heads = kind != "dflash"
    keys.raw = SPECULATORS.get(kind, {}) | {key: value for key, value in keys.raw.items() if value is not None}
    if type(keys.raw.get("transformer_layer_config")) is not dict:
        keys.note("transformer_layer_config", "is missing")
    part = keys.part("transformer_layer_config")
    keys.plain()
    options = part.transformer(None)
    layers = keys.target_layers(target_layers)
    head = read_head(keys, keys, (), "speculators") | convolutions(keys, options["hidden_size"])
    if head.get("markov_head_type") == "rnn" and "sample_from_anchor" not in head:
        keys.note("sample_from_anchor", "is false, and the recurrent head reads the bonus token's slot there")
    keys.get("speculators_model_type")
    check_proposal(keys.part("speculators_config"))
    own: dict[str, Any] = {
        "block_size": keys.number("block_size", least=1 if "sample_from_anchor" in head else 2),
        "mask_token_id": keys.mask_token(options["vocab_size"]),
        "target_layer_ids": keys.tapped("aux_hidden_state_layer_ids", layers, first=1),
    }
    own |= head
    own |= keys.last_tap(own["target_layer_ids"], layers, "raw")  # states come from vLLM, which taps before the norm
    if keys.flag("sliding_window_non_causal") and "sliding_attention" in options["layer_types"]:
        own["causal"] = False
    unused = {"verifier_lm_head.weight", "verifier_norm.weight"}
    reading = ConfigReading("speculators", family, options, keys.problems, unused)
    return complete(reading, keys, own, tensors, layers)


def complete(
    reading: ConfigReading, keys: Keys, own: dict[str, Any], tensors: Collection[str], layers: int | None
) -> ConfigReading:
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
