"""Read the config.json of DART drafters, in two formats ("layouts"): the authors' format has the
key `draft_length` and no `dart_config`; this project's format has the object `dart_config`."""

from collections.abc import Collection
from typing import Any

from infer.drafters.config_keys import ParsedConfig, ValidConfigEntries, first_architecture
from infer.drafters.families import Family
from infer.drafters.heads.table import read_head_config
from infer.drafters.key_rules import REQUIRED_SIZE_KEYS


def default_layer_ids(target_layers: int, layers: int = 1) -> list[int]:
    """Return the target layers whose hidden states a DART drafter reads, counted from 0 (DART
    appendix B.2).

    `target_layers` is the target's number of layers. `layers` is ignored: a DART drafter has one
    layer.
    """
    return [1, target_layers // 2 - 1, target_layers - 4]


def check_required_keys(
    keys: ValidConfigEntries, is_project_layout: bool, target_layers: int | None
) -> None:
    """Add a sentence to `keys.problems` for each required key that is missing, and one if the
    drafter has more than one layer.

    `is_project_layout` is true for this project's format of config.json, and false for the authors'
    format. `target_layers` is the target's number of layers, None if unknown.
    """
    required_keys = ("draft_length",)
    if is_project_layout:
        required_keys = ("target_layer_ids", "shifted", "qk_norm", "block_size")
    keys.require(*REQUIRED_SIZE_KEYS, *required_keys)
    if not is_project_layout and not target_layers:
        keys.add_problem(
            "num_target_layers",
            "is missing; use load_drafter(..., target_layers=<number of the target's layers>)",
        )
    if keys.get("num_hidden_layers", 1) != 1:
        keys.add_problem(
            "num_hidden_layers", f"is {keys['num_hidden_layers']}, expected 1 for a DART drafter"
        )


def read_project_family_config(
    keys: ValidConfigEntries, target_layers: int | None
) -> dict[str, Any]:
    """Return the content of `dart_config` from a config.json in this project's format.

    `target_layers` is the target's number of layers, None if unknown.
    """
    names = ("shifted", "qk_norm", "norm_twice")
    family_config = {name: keys[name] for name in names if name in keys}
    family_config |= keys.read_feature_layers(target_layers, 0, "raw")
    return family_config | read_head_config(keys)


def read_config(
    family: Family, raw: dict[str, Any], tensors: Collection[str], target_layers: int | None
) -> ParsedConfig | None:
    """Translate the content of a DART drafter's config.json to this project's keys.

    `raw` is the content. `tensors` are the names of the tensors in the checkpoint. `target_layers`
    is the target's number of layers, which is needed if `raw` does not store this number. Returns
    None if `raw` does not describe a DART drafter.
    """
    is_project_layout = family.config_key in raw
    is_published = "draft_length" in raw or first_architecture(raw) == family.architecture
    if not is_project_layout and not is_published:
        return None

    keys = ValidConfigEntries(raw, (family.config_key,), {"num_hidden_layers": 1})
    layers = keys.get("num_target_layers", target_layers)
    check_required_keys(keys, is_project_layout, layers)
    parsed = ParsedConfig("DART", family, {}, keys.problems, warnings=keys.warnings)
    if keys.problems:
        return parsed

    options = keys.read_transformer_config()
    if "sliding_attention" in options["layer_types"]:
        keys.add_problem(
            "layer_types", "is sliding_attention, expected full_attention for a DART drafter"
        )
    if is_project_layout:
        family_config = read_project_family_config(keys, layers)
        block_size = keys["block_size"]
    else:
        family_config = {
            "shifted": True,
            "qk_norm": False,
            "norm_twice": True,
            "target_layer_ids": default_layer_ids(layers),
        }
        # `draft_length` counts the mask slots (inputs that are the mask vector). The slot before
        # them drafts one more token, and `block_size` also counts the bonus token.
        block_size = keys["draft_length"] + 2

    # An embedding in the checkpoint is a copy of the target's, so it is not read. t2d (which tokens
    # of the target the drafter can propose) can be computed from d2t.
    parsed.unused_tensors |= {"t2d", "embed_tokens.weight"}
    if "draft_vocab_size" not in options:
        parsed.unused_tensors.add("d2t")
    parsed.padded_vocab_size = keys.padded_vocab_rows
    parsed.config_kwargs = {
        **options,
        **family.build_config_entries(family_config),
        "block_size": block_size,
        "num_target_layers": layers,
    }
    return parsed
