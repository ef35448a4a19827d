"""Read and write DART's published layout, which has a draft length and no `dart_config`, and read ours."""

from collections.abc import Collection

import torch

from infer.drafters.base import Drafter
from infer.drafters.config_keys import ConfigReading, Keys, config_dict, known_tokens
from infer.drafters.families import Family
from infer.drafters.heads.table import read_head
from infer.targets.target import Target


def default_layer_ids(target_layers: int) -> list[int]:
    """DART appendix B.2: the outputs of layers 1, N / 2 - 1 and N - 4, counted from 0 as in the authors' code."""
    return [1, target_layers // 2 - 1, target_layers - 4]


def read(family: Family, raw: dict, tensors: Collection[str], target_layers: int | None) -> ConfigReading | None:
    """Read a config.json in one of the layouts; None if it is in none of them. tensors: names of the stored ones;
    target_layers: how many layers the target has, from which follows which ones the published layout taps."""
    keys, ours = Keys(raw, []), family.config_key in raw
    if not ours and "draft_length" not in raw and keys.architecture != family.architecture:
        return None
    options = keys.transformer(1)
    if options["num_hidden_layers"] not in (1, None):
        keys.note("num_hidden_layers", f"is {options['num_hidden_layers']}, a DART drafter has 1")
    if "sliding_attention" in options["layer_types"]:
        keys.note("layer_types", "is sliding_attention, a DART drafter has full_attention")
    layers = keys.target_layers(target_layers)
    if ours:
        part = keys.part(family.config_key)
        for key in ("shifted", "qk_norm"):
            if part.flag(key) is None and key not in part.raw:
                part.note(key, "is missing")
        own = {key: bool(part.flag(key)) for key in ("shifted", "qk_norm", "norm_twice") if key in part.raw}
        own["target_layer_ids"] = part.tapped("target_layer_ids", layers)
        own |= part.last_tap(own["target_layer_ids"], layers, "raw") | read_head(part)
        options["block_size"] = keys.number("block_size", least=2)
    else:
        own = {"shifted": True, "qk_norm": False, "norm_twice": True}
        own["target_layer_ids"] = default_layer_ids(layers) if layers else [0]
        if not layers:
            keys.note("num_target_layers", "is missing: load_drafter(..., target_layers=<the target's layers>)")
        length = keys.number("draft_length")
        options["block_size"] = length and length + 2  # masks, the last item before them, and the bonus token
    unused = keys.draft_vocabulary(tensors, options) | {"embed_tokens.weight"}  # the target's, whatever is stored
    keys.note_unknown()
    options |= family.config_part(own) | {"num_target_layers": layers}
    return ConfigReading("DART", family, options, keys.problems, unused)


def write_published(drafter: Drafter, target: Target | None) -> tuple[dict, dict]:
    """Return config.json and tensors in DART's published layout. Raises ValueError for drafters that differ from the
    authors' architecture."""
    config, own = drafter.config, drafter.own
    faults = []
    if own["qk_norm"]:
        faults.append("it has norms of queries and keys")
    if not own["shifted"]:
        faults.append("its logits are not shifted")
    if not own.get("norm_twice"):
        faults.append("its last norm is applied once, theirs twice")
    if own["target_layer_ids"] != default_layer_ids(config.num_target_layers):
        faults.append(f"it taps layers {own['target_layer_ids']}")
    if faults:
        raise ValueError(f"format=dart: the authors' code would run another drafter: {', '.join(faults)}")
    weights, rows = dict(drafter.state_dict()), len(drafter.lm_head.weight)
    weights.setdefault("d2t", torch.zeros(rows, dtype=torch.long))
    weights["t2d"] = known_tokens(drafter.d2t, config.vocab_size)
    part = config_dict(config)
    for key in ("block_size", drafter.family.config_key, "layer_types"):
        part.pop(key, None)
    part |= {"architectures": ["LlamaForCausalLMDart"], "model_type": "llama", "hidden_act": "silu"}
    part |= {"draft_length": config.block_size - 2, "draft_vocab_size": rows}
    return part, weights
