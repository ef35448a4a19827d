"""Read DART's published layout, which has a draft length and no `dart_config`, and ours."""

from collections.abc import Collection

from infer.drafters.config_keys import SIZES, ConfigReading, Keys, named_class
from infer.drafters.families import Family
from infer.drafters.heads.table import read_head


def default_layer_ids(target_layers: int, layers: int = 1) -> list[int]:
    """DART appendix B.2: the outputs of layers 1, N / 2 - 1 and N - 4, counted from 0 as in the
    authors' code."""
    return [1, target_layers // 2 - 1, target_layers - 4]


def read(
    family: Family, raw: dict, tensors: Collection[str], target_layers: int | None
) -> ConfigReading | None:
    """Read a config.json in one of the layouts; None if it is in none of them. tensors: names of
    the stored ones; target_layers: how many layers the target has, from which follows which ones
    the published layout taps."""
    ours = family.config_key in raw
    if not ours and "draft_length" not in raw and named_class(raw) != family.architecture:
        return None
    keys = Keys(raw, (family.config_key,), {"num_hidden_layers": 1})
    keys.need(
        *SIZES,
        *(("target_layer_ids", "shifted", "qk_norm", "block_size") if ours else ("draft_length",)),
    )
    layers = keys.get("num_target_layers", target_layers)
    if not ours and not layers:
        keys.note(
            "num_target_layers",
            "is missing: load_drafter(..., target_layers=<the target's layers>)",
        )
    if keys.get("num_hidden_layers", 1) != 1:
        keys.note("num_hidden_layers", f"is {keys['num_hidden_layers']}, a DART drafter has 1")
    reading = ConfigReading("DART", family, {}, keys.problems, doubts=keys.doubts)
    if keys.problems:
        return reading
    options = keys.transformer()
    if "sliding_attention" in options["layer_types"]:
        keys.note("layer_types", "is sliding_attention, a DART drafter has full_attention")
    if ours:
        own = {key: keys[key] for key in ("shifted", "qk_norm", "norm_twice") if key in keys}
        own |= keys.tapped(layers, 0, "raw") | read_head(keys)
    else:  # whose draft length leaves out the last item before the masks, and the bonus token
        own = {
            "shifted": True,
            "qk_norm": False,
            "norm_twice": True,
            "target_layer_ids": default_layer_ids(layers),
        }
        keys["block_size"] = keys["draft_length"] + 2
    reading.unused |= {"t2d", "embed_tokens.weight"}  # the target's, whatever is stored
    reading.unused |= set() if "draft_vocab_size" in options else {"d2t"}
    reading.padded_rows = keys.padded_rows
    sizes = {"block_size": keys["block_size"], "num_target_layers": layers}
    reading.options = options | family.config_part(own) | sizes
    return reading
