"""The layouts that others publish drafters in, in our terms: a family, a config, and which tensors are of no use to us.

- the public DFlash layout, which we write too; newer ones have sliding layers, or hold their size in `dflash_config`;
- DeepSpec's flat form of it, whose first slot drafts already (`sample_from_anchor`), with embedding and head inside;
- speculators' "dflash": the Qwen3 part in `transformer_layer_config`, tapped layers counted from 1;
- DART's published one, which knows its draft length and no `dart_config`.

All that is wrong or missing in a config is noted, not the first thing only.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Qwen3Config

from infer.drafters import dart
from infer.drafters.families import CLASSES
from infer.formats.config_keys import Keys, transformer
from infer.formats.folders import Folder

FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass
class Reading:
    """A folder in our terms."""

    layout: str  # dflash, deepspec, speculators, dart, or ours
    family: str
    options: dict[str, Any]  # of the Qwen3Config
    problems: list[str]
    unused: set[str] = field(default_factory=set)  # tensors that belong to the layout, and that we do not need

    def config(self) -> Qwen3Config:
        return Qwen3Config(**self.options)


def ends(folder: Folder, options: dict[str, Any], keys: Keys) -> set[str]:
    """Embedding, head and draft vocabulary of a drafter's own, as vLLM takes them; returns the tensors that say nothing
    new: `t2d` follows from `d2t`, which is not needed for a whole vocabulary."""
    vocabulary = options["vocab_size"]
    rows = keys.number("draft_vocab_size", vocabulary or 1)
    pruned = vocabulary is not None and rows != vocabulary
    if rows and pruned and rows > vocabulary:
        keys.note("draft_vocab_size", f"is {rows}, more than vocab_size, {vocabulary}")
    options["has_embed_tokens"] = "embed_tokens.weight" in folder.tensors
    options["has_lm_head"] = pruned or "lm_head.weight" in folder.tensors
    if pruned:
        options["draft_vocab_size"] = rows
    return {"t2d"} if pruned else {"t2d", "d2t"}


def known_layers(keys: Keys, target_layers: int | None) -> int | None:
    """How many layers the target has, if the config says so, or the caller."""
    return target_layers if keys.raw.get("num_target_layers") is None else keys.number("num_target_layers")


def tapped(keys: Keys, key: str, layers: int | None, first: int = 0) -> list[int]:
    """The target's layers under a key, counted from `first` there and from 0 in what is returned; `layers`: how many
    the target has, if that is known."""
    ids = keys.numbers(key)
    if ids is None:
        if keys.raw.get(key) is None:
            keys.note(key, "is missing")
        return [0]
    if min(ids) < first or (layers and max(ids) >= layers + first):
        last = f" to {layers - 1 + first}" if layers else " on"
        keys.note(key, f"is {ids}: the target has layers {first}{last}")
    return [i - first for i in ids]


def mask_token(keys: Keys, vocabulary: int | None) -> int:
    mask = keys.number("mask_token_id", least=0)
    if mask is not None and vocabulary and mask >= vocabulary:
        keys.note("mask_token_id", f"is {mask}, the vocabulary has ids 0 to {vocabulary - 1}")
    return mask or 0


def read_dflash(folder: Folder, target_layers: int | None) -> Reading:
    """The public layout, and DeepSpec's flat form."""
    problems: list[str] = []
    keys = Keys(folder.config, problems)
    flat = keys.raw.get("dflash_config") is None and keys.raw.get("target_layer_ids") is not None
    part = keys if flat else keys.part("dflash_config")
    if not flat:
        part.plain()
    options = transformer(keys, None)
    layers = known_layers(keys, target_layers)
    count = options["num_hidden_layers"] or 1
    own: dict[str, Any] = {
        "block_size": None,
        "mask_token_id": mask_token(keys if part.raw.get("mask_token_id") is None else part, options["vocab_size"]),
        "target_layer_ids": tapped(part, "target_layer_ids", layers),  # no formula: many published ones have others
    }
    where = part if keys.raw.get("block_size") is None else keys
    options["block_size"] = own["block_size"] = where.number("block_size", least=2 - flat)
    if part.raw.get("block_size") not in (None, options["block_size"]):
        part.note("block_size", f"is {part.raw['block_size']}, and {options['block_size']} outside")
    if part.raw.get("use_swa") and "sliding_attention" not in options["layer_types"]:  # all slide, and see all
        window = part.number("swa_window_size", keys.raw.get("sliding_window"))
        options |= {"layer_types": ["sliding_attention"] * count, "use_sliding_window": True, "sliding_window": window}
        own["causal"] = False
    for flag in (part.flag("causal"), keys.flag("is_causal")):  # the second one counts
        if flag is not None:
            own["causal"] = flag
    anchor = part.flag("sample_from_anchor")
    if anchor or (flat and anchor is None):
        own["sample_from_anchor"] = True
    if (folder.path / "mask_embedding.pt").exists():
        problems.append(
            "mask_embedding.pt holds a mask embedding of its own, which this project's drafters do not have"
        )
    unused = ends(folder, options, keys)
    options |= {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "dflash_config": own,
        "num_target_layers": layers,
    }
    return Reading("deepspec" if flat else "dflash", "dflash", options, problems, unused)


def read_speculators(folder: Folder, target_layers: int | None) -> Reading:
    """speculators' layout of DFlash drafters."""
    problems: list[str] = []
    keys = Keys(folder.config, problems)
    kind = keys.raw["speculators_model_type"]
    if kind != "dflash":
        keys.note("speculators_model_type", f"is {kind!r}, expected 'dflash'")
    if not isinstance(keys.raw.get("transformer_layer_config"), dict):
        keys.note("transformer_layer_config", "is missing")
    part = keys.part("transformer_layer_config")
    keys.plain()
    options = transformer(part, None)
    layers = known_layers(keys, target_layers)
    own: dict[str, Any] = {
        "block_size": None,
        "mask_token_id": mask_token(keys, options["vocab_size"]),
        "target_layer_ids": tapped(keys, "aux_hidden_state_layer_ids", layers, first=1),
    }
    anchor = keys.flag("sample_from_anchor")
    options["block_size"] = own["block_size"] = keys.number("block_size", least=1 if anchor else 2)
    if anchor:
        own["sample_from_anchor"] = True
    if keys.flag("sliding_window_non_causal") and "sliding_attention" in options["layer_types"]:
        own["causal"] = False
    unused = ends(folder, options, keys) | {"verifier_lm_head.weight", "verifier_norm.weight"}
    options |= {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "dflash_config": own,
        "num_target_layers": layers,
    }
    return Reading("speculators", "dflash", options, problems, unused)


def read_dart(folder: Folder, target_layers: int | None) -> Reading:
    """DART's published layout, or ours, which has a `dart_config`. The published one does not say which layers it taps:
    that follows from how many the target has."""
    problems: list[str] = []
    keys = Keys(folder.config, problems)
    options = transformer(keys, 1)
    if options["num_hidden_layers"] not in (1, None):
        keys.note("num_hidden_layers", f"is {options['num_hidden_layers']}, a DART drafter has 1")
    if "sliding_attention" in options["layer_types"]:
        keys.note("layer_types", "is sliding_attention, a DART drafter has full_attention")
    layers = known_layers(keys, target_layers)
    ours = "dart_config" in keys.raw
    if ours:
        part = keys.part("dart_config")
        for key in ("shifted", "qk_norm"):
            if part.flag(key) is None and key not in part.raw:
                part.note(key, "is missing")
        own = {key: bool(part.flag(key)) for key in ("shifted", "qk_norm", "norm_twice") if key in part.raw}
        own["target_layer_ids"] = tapped(part, "target_layer_ids", layers)
        options["block_size"] = keys.number("block_size", least=2)
    else:
        own = {"shifted": True, "qk_norm": False, "norm_twice": True}
        own["target_layer_ids"] = dart.default_layer_ids(layers) if layers else [0]
        if not layers:
            keys.note("num_target_layers", "is missing: load_drafter(..., target_layers=<the target's layers>)")
        length = keys.number("draft_length")
        options["block_size"] = length and length + 2  # masks, the last item before them, and the bonus token
    unused = ends(folder, options, keys) | {"embed_tokens.weight"}  # the target's, whatever is stored
    del options["has_embed_tokens"], options["has_lm_head"]
    options |= {"architectures": ["DARTDraftModel"], "dart_config": own, "num_target_layers": layers}
    return Reading("ours" if ours else "dart", "dart", options, problems, unused)


def read(folder: Folder, target_layers: int | None = None) -> Reading:
    """A folder in our terms, whatever its layout; `target_layers`: how many layers the target has, for layouts that do
    not say. Nothing is raised: what is wrong is among the problems."""
    raw = folder.config
    if not raw:
        return Reading("none", "dflash", {}, [])
    named = raw.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else None
    if architecture == "DFlash2DraftModel":
        sentence = "architectures is ['DFlash2DraftModel']: its convolutions and candidate selector are not supported"
        return Reading("dflash2", "dflash", {}, [f"config.json: {sentence}"])
    if "speculators_model_type" in raw:
        return read_speculators(folder, target_layers)
    if "dart_config" in raw or "draft_length" in raw or architecture == "DARTDraftModel":
        return read_dart(folder, target_layers)
    if architecture in ("DFlashDraftModel", "Qwen3DSparkModel"):
        return read_dflash(folder, target_layers)
    known = "['DFlashDraftModel'], ['DARTDraftModel'] or a speculators_model_type"
    return Reading("none", "dflash", {}, [f"config.json: architectures is {named}, expected {known}"])


def shapes(reading: Reading) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that a drafter of this config has. The config has no problems."""
    with torch.device("meta"):
        drafter = CLASSES[reading.family](reading.config())
    return {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}


def tensor_problems(folder: Folder, expected: dict[str, tuple[int, ...]], unused: set[str]) -> list[str]:
    """What is wrong with a folder's tensors, each one named."""
    found = folder.tensors
    groups = {
        "missing": [name for name in expected if name not in found],
        "unknown": [name for name in found if name not in expected and name not in unused],
        "of wrong shape": [
            f"{name} {list(found[name].shape)}, expected {list(shape)}"
            for name, shape in expected.items()
            if name in found and found[name].shape != shape
        ],
        "of wrong type": [
            f"{name} {found[name].dtype}"
            for name in expected
            if name in found and found[name].dtype not in (("I64", "I32") if name == "d2t" else FLOATS)
        ],
    }
    return [f"{what} tensors: {', '.join(sorted(names))}" for what, names in groups.items() if names]


def problems_of(folder: Folder, reading: Reading) -> list[str]:
    """All that keeps a folder from being loaded here."""
    config = folder.problems + reading.problems
    if reading.problems or not reading.options or not folder.tensors:
        return config
    return config + tensor_problems(folder, shapes(reading), reading.unused)
