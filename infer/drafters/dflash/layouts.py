"""Read the config.json of DFlash drafters in all published formats ("layouts"). writers.py writes
these formats.

The public layout is the format of the DFlash authors' checkpoints, which this project also writes.
Every other layout is described by its differences from the public layout. Checkpoints in the public
layout can differ in details: some have layers with a sliding window or store sizes in
`dflash_config`, JetSpec's have the additional flag `causal_head`, and NeMo Automodel's have another
class name under `architectures`.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from infer.drafters.config_keys import ParsedConfig, ValidConfigEntries, first_architecture
from infer.drafters.families import Family
from infer.drafters.heads.table import read_head_config
from infer.drafters.key_rules import CAUSAL_KEYS, REQUIRED_SIZE_KEYS

EMPTY_MAPPING: Mapping[str, Any] = {}
# number of channels that share a convolution kernel, if config.json lacks conv_group_size
DEFAULT_CONVOLUTION_GROUP_SIZE = 16


class CheckpointLayout(NamedTuple):
    """A format of config.json and of tensor names, described by its differences from the format of
    the DFlash authors' checkpoints (the public layout)."""

    name: str
    # Whether a token is drafted at the bonus token's position, if config.json does not say it.
    drafts_from_anchor: bool = False
    # config.json keys that are required in addition to those of the public layout
    required_keys: tuple[str, ...] = ()
    # Values of missing config.json keys, where the program that defines the layout and this project
    # have different defaults.
    defaults: Mapping[str, Any] = EMPTY_MAPPING
    # Key: prefix of tensor names in the checkpoint. Value: the prefix in this project.
    tensor_prefixes: Mapping[str, str] = EMPTY_MAPPING
    # Key: a key of config.json in this layout. Value: the name of the key in this project.
    key_names: Mapping[str, str] = EMPTY_MAPPING
    first_layer_id: int = 0  # number that target_layer_ids uses for the target's first layer
    # The output of the target's last layer that drafters with this checkpoint layout read, if
    # config.json does not say it: "raw" (before the target's final norm) or "normed" (after it).
    last_tap: str = "normed"


PUBLIC_DFLASH_LAYOUT = CheckpointLayout("dflash")
# TorchSpec and its fork AngelSpec use this layout, in which config.json has no dflash_config.
TORCHSPEC_LAYOUT = CheckpointLayout(
    "TorchSpec",
    tensor_prefixes={
        "context_proj.": "fc.",
        "context_norm.": "hidden_norm.",
        "final_norm.": "norm.",
    },
    last_tap="raw",
)
TRANSFORMERS_DRAFTER_MODEL_TYPE = "muse_glimmer_assistant"
TRANSFORMERS_DRAFTER_ARCHITECTURE = "MuseGlimmerAssistantModel"
# Layouts of config.json files without dflash_config. Key: `model_type` in config.json.
LAYOUTS_BY_MODEL_TYPE = {
    "dflash": TORCHSPEC_LAYOUT,
    "dspark": TORCHSPEC_LAYOUT._replace(drafts_from_anchor=True, required_keys=("markov_rank",)),
}
# Names of the XPress head's tensors, without the head's own prefix. Key: prefix in the XPress
# authors' checkpoints. Value: prefix in this project.
XPRESS_HEAD_PREFIXES = {
    "w1.": "token_embed.",
    "w2.": "readout.",
    "mix.L": "mix_l",
    "down_": "down_",
    "in_proj.": "in_proj.",
    "mlp.gate_proj.": "mlp_gate.",
    "mlp.up_proj.": "mlp_up.",
    "mlp.down_proj.": "mlp_down.",
}
# SpecForge's layouts. Key: `projector_type` in config.json.
LAYOUTS_BY_PROJECTOR_TYPE = {
    "dspark": CheckpointLayout(
        "SpecForge", drafts_from_anchor=True, required_keys=("markov_rank",)
    ),
    "domino": CheckpointLayout(
        "SpecForge",
        required_keys=("gru_hidden_dim",),
        tensor_prefixes={
            "prefix_gru.": "domino_head.prefix_gru.",
            "embed_proj.": "domino_head.embed_proj.",
        },
    ),
}
# Key: the first name under `architectures` in config.json. DFlashDraftModel, which the public
# layout and others use, is handled in `find_layout`.
CHECKPOINT_LAYOUTS_BY_DRAFTER_ARCHITECTURE = {
    "Qwen3DFlashDraftModel": PUBLIC_DFLASH_LAYOUT,  # written by NeMo Automodel
    "QwenDFlashDraftModel": CheckpointLayout("AngelSlim"),
    "QwenDFlareDraftModel": CheckpointLayout("AngelSlim", defaults={"layer_fusion": True}),
    "Qwen3XPressModel": CheckpointLayout(
        "XPress",
        required_keys=("xpress_rank",),
        key_names={"xpress_num_passes": "num_jacobi_passes"},
        tensor_prefixes={
            f"xpress_head.{layout_prefix}": f"refiner_head.{prefix}"
            for layout_prefix, prefix in XPRESS_HEAD_PREFIXES.items()
        },
    ),
    # DeepSpec's layout has no dflash_config. Its checkpoints contain copies of the target's
    # embedding and language model head.
    "Qwen3DSparkModel": CheckpointLayout("DeepSpec", drafts_from_anchor=True),
    "DSparkDraftModel": LAYOUTS_BY_PROJECTOR_TYPE["dspark"],
    "DominoDraftModel": LAYOUTS_BY_PROJECTOR_TYPE["domino"],
    "DFlash2DraftModel": CheckpointLayout("dflash2", required_keys=("selector_rank",)),
    "TreeFlashDraftModel": CheckpointLayout(
        "treeflash", required_keys=("ar_approximation",), tensor_prefixes={"model.": ""}
    ),
    # The layout of transformers 5.23, which has no dflash_config.
    TRANSFORMERS_DRAFTER_ARCHITECTURE: CheckpointLayout(
        "transformers",
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "sliding_window": 2048,
            "max_position_embeddings": 131072,
        },
        tensor_prefixes={"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."},
    ),
}
# Defaults in speculators' layout. Key: `speculators_model_type` in config.json. Value: the values
# of config.json keys that may be missing.
SPECULATORS_DEFAULTS: dict[str, Mapping[str, Any]] = {
    "dflash": EMPTY_MAPPING,
    "dspark": {
        "sample_from_anchor": True,
        "markov_rank": 256,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
    "dflash2": {
        "sliding_window_non_causal": True,
        "conv_kernel_size": 2,
        "conv_group_size": DEFAULT_CONVOLUTION_GROUP_SIZE,
        "selector_rank": 256,
        "selector_top_k": 16,
    },
    "xpress": {"xpress_rank": 256},
}
SPECULATORS_KEY_NAMES = {"aux_hidden_state_layer_ids": "target_layer_ids"}


def find_layout(family: Family, raw: dict[str, Any]) -> CheckpointLayout | None:
    """Return the format of a drafter's config.json, whose content is `raw`; None if the format is
    unknown."""
    architecture = first_architecture(raw)
    speculators_type = str(raw.get("speculators_model_type"))
    if speculators_type in SPECULATORS_DEFAULTS:
        return CheckpointLayout(
            "speculators",
            defaults=SPECULATORS_DEFAULTS[speculators_type],
            key_names=SPECULATORS_KEY_NAMES,
            first_layer_id=1,
            last_tap="raw",
        )
    if raw.get("model_type") == TRANSFORMERS_DRAFTER_MODEL_TYPE:
        return CHECKPOINT_LAYOUTS_BY_DRAFTER_ARCHITECTURE[TRANSFORMERS_DRAFTER_ARCHITECTURE]

    layout = CHECKPOINT_LAYOUTS_BY_DRAFTER_ARCHITECTURE.get(architecture or "")
    if architecture == family.architecture:
        layout = PUBLIC_DFLASH_LAYOUT
    has_family_object = raw.get(family.config_key) is not None
    if layout is None or has_family_object or "target_layer_ids" not in raw:
        return layout

    # This config.json has the keys of dflash_config at its top level, as in DeepSpec's and
    # TorchSpec's layouts.
    if architecture == family.architecture:
        layout = CHECKPOINT_LAYOUTS_BY_DRAFTER_ARCHITECTURE["Qwen3DSparkModel"]
    return LAYOUTS_BY_MODEL_TYPE.get(str(raw.get("model_type")), layout)


def read_config(
    family: Family, raw: dict[str, Any], tensors: Collection[str], target_layers: int | None
) -> ParsedConfig | None:
    """Translate the content of a DFlash drafter's config.json to this project's keys.

    `raw` is the content. `tensors` are the names of the tensors in the checkpoint. `target_layers`
    is the target's number of layers, used if `raw` does not store this number. Returns None if the
    format of `raw` is unknown.
    """
    speculators_type = raw.get("speculators_model_type")
    layout = find_layout(family, raw)
    if speculators_type is not None and (layout is None or layout.name != "speculators"):
        problem = (
            f"config.json: speculators_model_type is {speculators_type!r}, expected "
            f"{' or '.join(SPECULATORS_DEFAULTS)}; drafters that draft one token per pass are not "
            "supported"
        )
        return ParsedConfig("none", None, {}, [problem])
    if layout is None:
        return None

    objects = (family.config_key, "treeflash_config", "transformer_layer_config")
    keys = ValidConfigEntries(raw, objects, layout.defaults, layout.key_names)
    if layout.name not in ("speculators", "transformers", "TorchSpec"):
        layout = LAYOUTS_BY_PROJECTOR_TYPE.get(keys.get("projector_type", ""), layout)
    if layout is CHECKPOINT_LAYOUTS_BY_DRAFTER_ARCHITECTURE[TRANSFORMERS_DRAFTER_ARCHITECTURE]:
        # config.json may lack the size of the vocabulary. Assume the smallest size that includes
        # the mask token.
        keys.setdefault("vocab_size", keys.get("mask_token_id", 0) + 1)
        keys.setdefault("layer_types", ["sliding_attention"] * keys.get("num_hidden_layers", 1))
    keys.require(
        *REQUIRED_SIZE_KEYS,
        "block_size",
        "mask_token_id",
        "target_layer_ids",
        *layout.required_keys,
    )
    parsed = ParsedConfig(layout.name, family, {}, keys.problems, warnings=keys.warnings)
    if keys.problems:
        return parsed

    for layout_prefix, prefix in layout.tensor_prefixes.items():
        for name in tensors:
            if name.startswith(layout_prefix):
                parsed.renamed_tensors[name] = prefix + name[len(layout_prefix) :]
    layers = keys.get("num_target_layers", target_layers)
    layer_ids = keys["target_layer_ids"]
    # In some files, num_target_layers is not the target's number of layers but the number of target
    # layers that the drafter reads.
    counts_feature_layers = layers == len(layer_ids) <= max(layer_ids) - layout.first_layer_id
    if layout.name == "TorchSpec" or counts_feature_layers:
        layers = keys.get("target_num_hidden_layers", target_layers)
    fill_parsed_config(parsed, family, keys, layout, tensors, layers)
    return parsed


def fill_parsed_config(
    parsed: ParsedConfig,
    family: Family,
    keys: ValidConfigEntries,
    layout: CheckpointLayout,
    tensors: Collection[str],
    layers: int | None,
) -> None:
    """Set `parsed.config_kwargs` (the arguments of Qwen3Config) and the fields of `parsed` that
    describe the checkpoint's tensors.

    `keys` are the valid entries of config.json, among them all required keys. `tensors` are the
    names of the checkpoint's tensors. `layers` is the target's number of layers, None if unknown.
    """
    options = keys.read_transformer_config()
    head_config = read_head_and_anchor_config(keys, layout, tensors)
    if keys["block_size"] == 1 and "sample_from_anchor" not in head_config:
        keys.add_problem("block_size", "is 1, expected 2 or more")

    family_config = {key: keys[key] for key in ("block_size", "mask_token_id")}
    family_config |= keys.read_feature_layers(layers, layout.first_layer_id, layout.last_tap)
    family_config |= read_causal_flag(keys, layout, options)
    family_config |= head_config
    # `architectures` does not show whether a drafter has layer fusion (DFlare), because AngelSlim's
    # template of config.json names the DFlash class for both kinds.
    if keys.get("layer_fusion", "layer_fusion_weights" in tensors):
        family_config["layer_fusion"] = True
    family_config |= read_convolutions(keys, options["hidden_size"])

    if layers and "last_tap" in family_config:
        warn_of_default_last_tap(parsed, keys, layout)
    parsed.unused_tensors.add("t2d")  # t2d (which target tokens can be drafted) follows from d2t
    if "draft_vocab_size" not in options:
        parsed.unused_tensors.add("d2t")
    parsed.padded_vocab_size = keys.padded_vocab_rows
    if layout.name == "speculators":
        parsed.unused_tensors |= {"verifier_lm_head.weight", "verifier_norm.weight"}

    has_embedding = "embed_tokens.weight" in tensors
    has_head = "lm_head.weight" in tensors
    if keys.ties_embeddings and has_embedding and not has_head:
        keys.add_problem(
            "tie_word_embeddings",
            "is true, but a drafter that uses its own embedding as language model head is not "
            "supported",
        )
    parsed.config_kwargs = {
        **options,
        "has_embed_tokens": has_embedding,
        "has_lm_head": has_head,
        **family.build_config_entries(family_config),
        "block_size": family_config["block_size"],
        "num_target_layers": layers,
    }


def read_convolutions(keys: ValidConfigEntries, hidden_size: int) -> dict[str, int]:
    """Return the config.json entries that describe the convolutions of a DFlash 2 drafter; {} if it
    has none."""
    if not keys.get("conv_kernel_size"):
        return {}
    group_size = keys.get("conv_group_size", DEFAULT_CONVOLUTION_GROUP_SIZE)
    if hidden_size % group_size:
        keys.add_problem(
            "conv_group_size", f"is {group_size}, expected a divisor of hidden_size, {hidden_size}"
        )
    return {"conv_kernel_size": keys["conv_kernel_size"], "conv_group_size": group_size}


def warn_of_default_last_tap(
    parsed: ParsedConfig, keys: ValidConfigEntries, layout: CheckpointLayout
) -> None:
    """Add a warning to `parsed` if config.json does not say whether the drafter reads the target's
    last layer before or after the final norm."""
    if layout.last_tap != "normed" or layout.name == "transformers" or "last_tap" in keys:
        return
    parsed.warnings.append(
        "config.json does not say whether the drafter reads the target's last layer before or "
        "after the final norm. It will be read after the norm, as in the DFlash authors' code. "
        'vLLM reads it before the norm; to do the same here, add "last_tap": "raw" to config.json '
        "beside target_layer_ids"
    )


def read_head_and_anchor_config(
    keys: ValidConfigEntries, layout: CheckpointLayout, tensors: Collection[str]
) -> dict[str, Any]:
    """Return the config.json entries that describe the conditional head (it makes a token's score
    depend on the drafted tokens before it).

    If a token is also drafted at the bonus token's position, the entry `sample_from_anchor` is
    returned too, even if there is no conditional head.
    """
    head_config = read_head_config(keys)
    intermediate_size = keys.get("xpress_mlp_hidden")
    if intermediate_size and "xpress_rank" in head_config:
        head_config["xpress_mlp_ratio"] = intermediate_size // head_config["xpress_rank"]

    if "markov_rank" in head_config:
        stores_confidence_head = "confidence_head.proj.weight" in tensors
        if "enable_confidence_head" not in keys and stores_confidence_head:
            head_config["enable_confidence_head"] = True
    elif keys.get("enable_confidence_head"):
        keys.add_problem(
            "enable_confidence_head", "is true, but markov_rank is 0 or missing; set it to false"
        )

    # `shift_label` is SpecForge's name of the flag `sample_from_anchor`.
    flags = [keys[key] for key in ("sample_from_anchor", "shift_label") if key in keys]
    if len({*flags}) > 1:
        keys.add_problem(
            "shift_label",
            f"is {flags[1]}, but sample_from_anchor is {flags[0]}; the two keys mean the same, so "
            "remove the wrong one",
        )
    drafts_from_anchor = flags[0] if flags else layout.drafts_from_anchor
    if drafts_from_anchor:
        head_config["sample_from_anchor"] = True
    elif layout.name == "speculators" and head_config.get("markov_head_type") == "rnn":
        keys.add_problem(
            "sample_from_anchor",
            "is false, expected true: markov_head_type rnn requires true in this layout",
        )
    return head_config


def read_causal_flag(
    keys: ValidConfigEntries, layout: CheckpointLayout, options: dict[str, Any]
) -> dict[str, bool]:
    """Return {"causal": True} if config.json says that attention within the block is causal in all
    layers, {"causal": False} if it says that this attention is causal in no layer, and {}
    otherwise.

    Engines use different names for this flag (CAUSAL_KEYS). If config.json has several of these
    keys with different values, a sentence is added to `keys.problems`. For example, NeMo's JetSpec
    recipe writes is_causal false and causal true.

    In transformers' layout, `options["sliding_window"]` is changed from the largest distance
    between query and key to the number of positions in the window.
    """
    family_config = {}
    if "sliding_attention" in options["layer_types"]:
        if layout.name == "transformers":
            family_config["causal"] = False
            # transformers stores the largest distance between query and key in a window. This
            # project stores the number of positions in a window, which is one more.
            options["sliding_window"] += 1
        elif keys.get("sliding_window_non_causal"):
            family_config["causal"] = False

    flags = {key: keys[key] for key in CAUSAL_KEYS if key in keys}
    if len({*flags.values()}) > 1:
        described = " and ".join(f"{key} {flag}".lower() for key, flag in flags.items())
        keys.add_problem("is_causal", f"contradicts another key: {described}; remove the wrong one")
    if flags:
        family_config["causal"] = next(iter(flags.values()))
    return family_config
