"""Read the config.json layouts of DART drafters: the published one, which has a draft length and no
`dart_config`, and this project's."""

from collections.abc import Collection
from typing import Any

from infer.drafters.config_keys import CheckedKeys, ParsedConfig, first_architecture
from infer.drafters.families import Family
from infer.drafters.heads.table import read_head_config
from infer.drafters.key_rules import REQUIRED_SIZE_KEYS


def default_layer_ids(target_layers: int, layers: int = 1) -> list[int]:
    """Return the target layers whose states a DART drafter reads, from 0: 1, N / 2 - 1 and N - 4
    (DART appendix B.2)."""
    return [1, target_layers // 2 - 1, target_layers - 4]


def check_required_keys(
    keys: CheckedKeys, is_project_layout: bool, target_layers: int | None
) -> None:
    """Add a problem for each required key that is missing, and for more than one layer."""
    required_keys = ("draft_length",)
    if is_project_layout:
        required_keys = ("target_layer_ids", "shifted", "qk_norm", "block_size")
    keys.require(*REQUIRED_SIZE_KEYS, *required_keys)
    if not is_project_layout and not target_layers:
        keys.add_problem(
            "num_target_layers",
            "is missing: load_drafter(..., target_layers=<the target's layers>)",
        )
    if keys.get("num_hidden_layers", 1) != 1:
        keys.add_problem(
            "num_hidden_layers", f"is {keys['num_hidden_layers']}, a DART drafter has 1"
        )


def read_project_family_config(keys: CheckedKeys, target_layers: int | None) -> dict[str, Any]:
    """Return the keys of `dart_config` in this project's layout."""
    names = ("shifted", "qk_norm", "norm_twice")
    family_config = {name: keys[name] for name in names if name in keys}
    family_config |= keys.read_feature_layers(target_layers, 0, "raw")
    return family_config | read_head_config(keys)


def read_config(
    family: Family, raw: dict[str, Any], tensors: Collection[str], target_layers: int | None
) -> ParsedConfig | None:
    """Read a config.json in one of the layouts; None if it is in neither of them.

    `tensors` are the names of the stored tensors; `target_layers` is the target's number of layers,
    which determines the layers that a drafter in the published layout reads.
    """
    is_project_layout = family.config_key in raw
    is_published = "draft_length" in raw or first_architecture(raw) == family.architecture
    if not is_project_layout and not is_published:
        return None

    keys = CheckedKeys(raw, (family.config_key,), {"num_hidden_layers": 1})
    layers = keys.get("num_target_layers", target_layers)
    check_required_keys(keys, is_project_layout, layers)
    parsed = ParsedConfig("DART", family, {}, keys.problems, warnings=keys.warnings)
    if keys.problems:
        return parsed

    options = keys.read_transformer_config()
    if "sliding_attention" in options["layer_types"]:
        keys.add_problem("layer_types", "is sliding_attention, a DART drafter has full_attention")
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
        # The draft length counts the mask slots. The slot before them drafts too, and the block
        # size includes the bonus token.
        block_size = keys["draft_length"] + 2

    # A stored embedding is the target's.
    parsed.unused_tensors |= {"t2d", "embed_tokens.weight"}
    if "draft_vocab_size" not in options:
        parsed.unused_tensors.add("d2t")
    parsed.padded_rows = keys.padded_rows
    parsed.options = {
        **options,
        **family.wrap_family_config(family_config),
        "block_size": block_size,
        "num_target_layers": layers,
    }
    return parsed
