"""The layouts that DFlash drafters are published in, read into our terms; writers.py writes them.

A layout is a row of the table: how it differs from the public one, which we write too. Newer public
folders have sliding layers, or hold their sizes in `dflash_config`; JetSpec's and NeMo Automodel's
have a flag (`causal_head`) and a class name of their own.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from infer.drafters.config_keys import CAUSAL, SIZES, ConfigReading, Keys, named_class
from infer.drafters.families import Family
from infer.drafters.heads.table import read_head

NOTHING: Mapping[str, Any] = {}


class Layout(NamedTuple):
    """A row."""

    name: str
    anchor: bool = False  # the first slot drafts, where no key says whether
    needs: tuple[str, ...] = ()  # the key of its conditional head
    defaults: Mapping[str, Any] = (
        NOTHING  # what its classes take for keys that are missing, where ours differ
    )
    tensors: Mapping[str, str] = NOTHING  # beginnings of names: theirs to ours
    renames: Mapping[str, str] = NOTHING  # keys: theirs to ours
    first: int = 0  # tapped layers are counted from it
    last_tap: str = "normed"  # where its own code reads a tap of the target's last layer


PUBLIC = Layout("dflash")
TORCHSPEC = Layout(  # and its fork AngelSpec: flat, and never with a block size
    "TorchSpec",
    tensors={"context_proj.": "fc.", "context_norm.": "hidden_norm.", "final_norm.": "norm."},
    last_tap="raw",
)
NATIVE_TYPE = "muse_glimmer_assistant"
NATIVE = "MuseGlimmerAssistantModel"
MODEL_TYPES = {  # by `model_type`
    "dflash": TORCHSPEC,
    "dspark": TORCHSPEC._replace(anchor=True, needs=("markov_rank",)),
}
REFINER = {  # of XPress' authors, ours
    "w1.": "token_embed.",
    "w2.": "readout.",
    "mix.L": "mix_l",
    "down_": "down_",
    "in_proj.": "in_proj.",
    **{f"mlp.{part}_proj.": f"mlp_{part}." for part in ("gate", "up", "down")},
}
PROJECTORS = {  # by `projector_type`
    "dspark": Layout("SpecForge", anchor=True, needs=("markov_rank",)),
    "domino": Layout(
        "SpecForge",
        needs=("gru_hidden_dim",),
        tensors={
            "prefix_gru.": "domino_head.prefix_gru.",
            "embed_proj.": "domino_head.embed_proj.",
        },
    ),
}
LAYOUTS = {  # by the first name in `architectures`, beside the family's own
    "Qwen3DFlashDraftModel": PUBLIC,  # NeMo Automodel's
    "QwenDFlashDraftModel": Layout("AngelSlim"),
    "QwenDFlareDraftModel": Layout("AngelSlim", defaults={"layer_fusion": True}),
    "Qwen3XPressModel": Layout(
        "XPress",
        needs=("xpress_rank",),
        renames={"xpress_num_passes": "num_jacobi_passes"},
        tensors={
            f"xpress_head.{theirs}": f"refiner_head.{ours}" for theirs, ours in REFINER.items()
        },
    ),
    "Qwen3DSparkModel": Layout("DeepSpec", anchor=True),  # flat, with embedding and head
    "DSparkDraftModel": PROJECTORS["dspark"],
    "DominoDraftModel": PROJECTORS["domino"],
    "DFlash2DraftModel": Layout("dflash2", needs=("selector_rank",)),
    "TreeFlashDraftModel": Layout("treeflash", needs=("ar_approximation",), tensors={"model.": ""}),
    NATIVE: Layout(  # transformers' own (5.23): flat
        "transformers",
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "sliding_window": 2048,
            "max_position_embeddings": 131072,
        },
        tensors={"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."},
    ),
}
# by `speculators_model_type`: the Qwen3 part in `transformer_layer_config`; states come from vLLM
SPECULATORS = {
    "dflash": NOTHING,
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
    "xpress": {"xpress_rank": 256},
}
TAPS = {"aux_hidden_state_layer_ids": "target_layer_ids"}


def find_layout(family: Family, raw: dict) -> Layout | None:
    """Return the row of a config.json; None where there is none."""
    named = named_class(raw)
    kind = str(raw.get("speculators_model_type"))
    if kind in SPECULATORS:
        return Layout(
            "speculators", defaults=SPECULATORS[kind], renames=TAPS, first=1, last_tap="raw"
        )
    if raw.get("model_type") == NATIVE_TYPE:
        return LAYOUTS[NATIVE]
    if (
        raw.get(family.config_key) is None
        and "target_layer_ids" in raw
        and named in (family.architecture, *LAYOUTS)
    ):
        flat = LAYOUTS["Qwen3DSparkModel"] if named == family.architecture else LAYOUTS[named]
        return MODEL_TYPES.get(raw.get("model_type"), flat)
    return PUBLIC if named == family.architecture else LAYOUTS.get(named)


def read(
    family: Family, raw: dict, tensors: Collection[str], target_layers: int | None
) -> ConfigReading | None:
    """Read a config.json in one of the layouts; None if it is in none of them. tensors: names of
    the stored ones; target_layers: how many layers the target has, for configs that do not say."""
    kind = raw.get("speculators_model_type")
    row = find_layout(family, raw)
    if kind is not None and (row is None or row.name != "speculators"):
        said = f"is {kind!r}, expected {' or '.join(SPECULATORS)}; drafters that write token by token are not read"
        return ConfigReading("none", None, {}, [f"config.json: speculators_model_type {said}"])
    if row is None:
        return None
    keys = Keys(
        raw,
        (family.config_key, "treeflash_config", "transformer_layer_config"),
        row.defaults,
        row.renames,
    )
    if row.name not in ("speculators", "transformers", "TorchSpec"):
        row = PROJECTORS.get(keys.get("projector_type"), row)
    if row is LAYOUTS[NATIVE]:  # it has no vocabulary: the least one that has the mask token
        keys.setdefault("vocab_size", keys.get("mask_token_id", 0) + 1)
        keys.setdefault("layer_types", ["sliding_attention"] * keys.get("num_hidden_layers", 1))
    keys.need(*SIZES, "block_size", "mask_token_id", "target_layer_ids", *row.needs)
    reading = ConfigReading(row.name, family, {}, keys.problems, doubts=keys.doubts)
    if not keys.problems:
        for theirs, ours in row.tensors.items():
            reading.renamed |= {
                name: ours + name[len(theirs) :] for name in tensors if name.startswith(theirs)
            }
        layers = keys.get("num_target_layers", target_layers)
        ids = keys["target_layer_ids"]
        if row.name == "TorchSpec" or layers == len(ids) <= max(ids) - row.first:  # it counts taps
            layers = keys.get("target_num_hidden_layers", target_layers)
        complete(reading, keys, row, tensors, layers)
    return reading


def complete(
    reading: ConfigReading, keys: Keys, row: Layout, tensors: Collection[str], layers: int | None
) -> None:
    """Complete a reading whose keys are there: the options of the Qwen3 part, and `dflash_config`.
    layers: how many the target has, if that is known."""
    options = keys.transformer()
    head = conditional_head(keys, row, tensors)
    if keys["block_size"] == 1 and "sample_from_anchor" not in head:
        keys.note("block_size", "is 1, expected 2 or more")
    own = {key: keys[key] for key in ("block_size", "mask_token_id")} | keys.tapped(
        layers, row.first, row.last_tap
    )
    own |= causality(keys, row, options) | head
    # AngelSlim's own template names another class
    if keys.get("layer_fusion", "layer_fusion_weights" in tensors):
        own["layer_fusion"] = True
    if keys.get("conv_kernel_size"):
        group = keys.get("conv_group_size", 16)
        own |= {"conv_kernel_size": keys["conv_kernel_size"], "conv_group_size": group}
        if options["hidden_size"] % group:
            keys.note(
                "conv_group_size",
                f"is {group}, which does not divide hidden_size, {options['hidden_size']}",
            )
    silent = row.last_tap == "normed" and row.name != "transformers" and "last_tap" not in keys
    if silent and "last_tap" in own and layers:
        reading.doubts.append(
            "it taps the target's last layer and does not say where: behind the last norm, as the authors' code does; "
            'vLLM taps before it, as "last_tap": "raw" beside target_layer_ids would say'
        )
    part = "draft_vocab_size" in options
    reading.unused |= {"t2d"} if part else {"t2d", "d2t"}  # t2d follows from d2t
    reading.padded_rows = keys.padded_rows
    if row.name == "speculators":
        reading.unused |= {"verifier_lm_head.weight", "verifier_norm.weight"}
    ends = {
        "has_embed_tokens": "embed_tokens.weight" in tensors,
        "has_lm_head": "lm_head.weight" in tensors,
    }
    if keys.tied and ends["has_embed_tokens"] and not ends["has_lm_head"]:
        keys.note(
            "tie_word_embeddings",
            "is true: its own embedding would be its head, which this project has not",
        )
    sizes = {"block_size": own["block_size"], "num_target_layers": layers}
    reading.options = options | ends | reading.family.config_part(own) | sizes


def conditional_head(keys: Keys, row: Layout, tensors: Collection[str]) -> dict[str, Any]:
    """Return the keys of the conditional head, none where there is none, and `sample_from_anchor`
    where the first slot drafts."""
    own = read_head(keys)
    inner = keys.get("xpress_mlp_hidden")
    if inner and "xpress_rank" in own:
        own["xpress_mlp_ratio"] = inner // own["xpress_rank"]
    if (
        "markov_rank" in own
        and "enable_confidence_head" not in keys
        and "confidence_head.proj.weight" in tensors
    ):
        own["enable_confidence_head"] = True
    if "markov_rank" not in own and keys.get("enable_confidence_head"):
        keys.note("enable_confidence_head", "is true, and there is no Markov head")
    said = [keys[key] for key in ("sample_from_anchor", "shift_label") if key in keys]
    if len({*said}) > 1:
        keys.note("shift_label", f"is {said[1]}, and sample_from_anchor {said[0]}")
    if (said or [row.anchor])[0]:
        own["sample_from_anchor"] = True
    elif row.name == "speculators" and own.get("markov_head_type") == "rnn":
        keys.note(
            "sample_from_anchor",
            "is false, and the recurrent head reads the bonus token's slot there",
        )
    return own


def causality(keys: Keys, row: Layout, options: dict[str, Any]) -> dict[str, bool]:
    """Return `causal` of all layers, where a key says so. Readers differ on which one counts, so
    that two that differ are a fault: NeMo's JetSpec recipe writes is_causal false beside causal
    true."""
    own = {}
    sliding = "sliding_attention" in options["layer_types"]
    if sliding and (row.name == "transformers" or keys.get("sliding_window_non_causal")):
        own["causal"] = False
    if sliding and row.name == "transformers":
        options["sliding_window"] += 1  # theirs counts distances, ours positions
    said = {key: keys[key] for key in CAUSAL if key in keys}
    if len({*said.values()}) > 1:
        flags = " and ".join(f"{key} {flag}".lower() for key, flag in said.items())
        keys.note("is_causal", f"contradicts another key: {flags}; remove the wrong one")
    return own | ({"causal": next(iter(said.values()))} if said else {})
