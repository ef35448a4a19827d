"""Write DFlash drafters in the layouts that engines and trainers read (layouts.py reads them).

A layout without words for what a drafter computes is refused: heads and convolutions by the table in families.py, the
rest here. V vocabulary, D hidden size.
"""

import math
from collections.abc import Callable

import torch

from infer.drafters.base import Drafter, drop_copies, target_embeddings
from infer.drafters.config_keys import config_dict, known_tokens
from infer.drafters.dflash.layouts import NATIVE, NATIVE_TENSORS, NATIVE_TYPE
from infer.targets.target import Target

# what readers of some formats would run in another way: which drafters, and a sentence
FAULTS: dict[str, tuple[Callable[[Drafter], object], str]] = {
    "from anchor": (
        lambda drafter: drafter.own.get("sample_from_anchor"),
        "its first slot drafts already (sample_from_anchor)",
    ),
    "not from anchor": (
        lambda drafter: not drafter.own.get("sample_from_anchor"),
        "its first slot does not draft (drafter.sample_from_anchor=true)",
    ),
    "causal": (
        lambda drafter: any(causal for causal, _ in drafter.attention_patterns),
        "it has layers that are causal inside the block",
    ),
    "full and causal": (
        lambda drafter: (True, None) in drafter.attention_patterns,
        "it has layers that see all and are causal inside the block (dflash_config.causal)",
    ),
    "sliding": (lambda drafter: any(window for _, window in drafter.attention_patterns), "it has sliding layers"),
    "window of 1": (
        lambda drafter: any(window == 1 for _, window in drafter.attention_patterns),
        "its window of 1 position has no word there",
    ),
    "raw": (
        lambda drafter: drafter.own.get("last_tap") == "raw",
        "it taps the last layer before the target's last norm (last_tap=raw)",
    ),
    "normed": (
        lambda drafter: drafter.own.get("last_tap") == "normed",
        "it taps the last layer behind the target's last norm (last_tap=normed)",
    ),
    "recurrent": (
        lambda drafter: drafter.own.get("markov_head_type") == "rnn" and not drafter.own.get("sample_from_anchor"),
        "its recurrent head reads the bonus token's slot there (sample_from_anchor)",
    ),
    "part": (lambda drafter: drafter.d2t is not None, "its head knows a part of the vocabulary only"),
}
DSPARK_FAULTS = ("not from anchor", "causal", "sliding", "normed")
REFUSED = {  # by format
    "dflash": ("from anchor",),
    "dflash2": ("from anchor",),
    "dspark": (*DSPARK_FAULTS, "part"),
    "specforge": DSPARK_FAULTS,
    "treeflash": ("from anchor", "causal"),
    "transformers": ("from anchor", "causal", "raw", "window of 1"),
    "speculators": ("full and causal", "recurrent", "normed"),
}
LARGEST_CHOICE = 1024  # engines hold a table of selector_top_k squared for every slot


def write_public(drafter: Drafter, target: Target | None) -> tuple[dict, dict]:
    """Return config.json and tensors in the public layout, without embedding and head. `target` is needed for a drafter
    that has copies of them. Raises ValueError for drafters that this layout has no words for."""
    refuse(drafter, "dflash")
    return without_ends(drafter, target, "dflash")


def refuse(drafter: Drafter, format: str) -> None:
    """Raise ValueError for a drafter that readers of a format would run in another way."""
    faults = [said for name in REFUSED[format] for holds, said in [FAULTS[name]] if holds(drafter)]
    if faults:
        raise ValueError(f"format={format}: its readers would run another drafter: {'; '.join(faults)}")


def without_ends(drafter: Drafter, target: Target | None, format: str) -> tuple[dict, dict]:
    """Return config.json, with the keys of the public layout, and tensors, without embedding and head. Raises
    ValueError where the drafter's own differ from the target's, or there is no target to compare with."""
    if drafter.embed_tokens is not None or drafter.lm_head is not None:
        if target is None:
            raise ValueError(
                f"format={format}: it has an embedding or head of its own: give target.path to compare them"
            )
        try:
            drop_copies(drafter, target)
        except ValueError as error:
            raise ValueError(f"format={format} stores neither embedding nor head, and {error}") from error
    config, causal = config_dict(drafter.config), drafter.own.get("causal")
    if causal is not None:  # in the words of every reader
        config["is_causal"] = causal
        config[drafter.family.config_key] |= {"causal_head": causal}
    return config, drafter.state_dict()


def write_dflash2(drafter: Drafter, target: Target | None) -> tuple[dict, dict]:
    """Return config.json and tensors as DFlash 2's authors have them. A drafter without convolutions gets some that
    change nothing. Arguments and exceptions as of `write_public`."""
    refuse(drafter, "dflash2")
    config, weights = without_ends(drafter, target, "dflash2")
    own, convolutions = convolved(drafter, "dflash2")
    config["architectures"] = ["DFlash2DraftModel"]
    config["dflash_config"] |= own
    return config, weights | convolutions


def convolved(drafter: Drafter, format: str) -> tuple[dict, dict[str, torch.Tensor]]:
    """Return the keys of DFlash 2's convolutions and selector, and the tensors of convolutions that change nothing for
    a drafter without any. Raises ValueError for a selector that chooses among more tokens than engines can hold."""
    top_k = drafter.conditional_head.top_k or drafter.config.vocab_size  # 0: all
    if top_k > LARGEST_CHOICE:
        raise ValueError(
            f"format={format}: its selector chooses among {top_k} tokens, and engines hold a table of all pairs: "
            "train it with drafter.head.top_k=16"
        )
    own = {"selector_top_k": top_k}
    if drafter.own.get("conv_kernel_size"):
        return own, {}
    size, weight = drafter.config.hidden_size, drafter.norm.weight
    channels = math.gcd(size, 16)
    identity = weight.new_zeros(2, 2, size)
    identity[:, 0] = 1
    weights = {}
    for i in range(drafter.config.num_hidden_layers):
        for name in ("attention_conv", "mlp_conv"):
            weights[f"layers.{i}.{name}.base_kernel"] = identity.clone()
            weights[f"layers.{i}.{name}.kernel_projection.weight"] = weight.new_zeros(4 * size // channels, size)
    return own | {"conv_kernel_size": 2, "conv_group_size": channels}, weights


def write_dspark(drafter: Drafter, target: Target | None) -> tuple[dict, dict]:
    """Return config.json and tensors in DeepSpec's flat form, with the embedding and the head that the drafter uses:
    DSpark, or DeepSpec's DFlash where it has no conditional head. Raises ValueError for drafters that it has no words
    for."""
    refuse(drafter, "dspark")
    own, config = drafter.own, config_dict(drafter.config)
    del config["dflash_config"]
    config |= {"architectures": ["Qwen3DSparkModel"], "num_anchors": 512, "sample_from_anchor": True}
    config |= {key: own[key] for key in ("mask_token_id", "target_layer_ids", "markov_head_type") if key in own}
    config |= {"markov_rank": own.get("markov_rank", 0)} | confidence_keys(own)
    return config, with_ends(drafter, target, "dspark")


def write_specforge(drafter: Drafter, target: Target | None) -> tuple[dict, dict]:
    """Return config.json and tensors in SpecForge's layout of DSpark and Domino drafters, which SGLang serves; the
    head's keys also stand beside `dflash_config`, where vLLM looks for them. Arguments and exceptions as of
    `write_public`."""
    refuse(drafter, "specforge")
    config, weights = without_ends(drafter, target, "specforge")
    own = config["dflash_config"]
    del own["sample_from_anchor"]
    if "gru_hidden_dim" in own:  # the published Domino drafter names the class of the backbone
        own |= {"projector_type": "domino", "shift_label": True}
        config["emb_dim"] = own["emb_dim"]
        return config, {name.removeprefix("domino_head."): tensor for name, tensor in weights.items()}
    own |= {"projector_type": "dspark", "attention_mode": "gqa"} | confidence_keys(own)
    if config["num_attention_heads"] == config["num_key_value_heads"]:
        own["attention_mode"] = "mha"
    config["architectures"] = ["DSparkDraftModel"]
    config |= {key: own[key] for key in ("markov_rank", "markov_head_type")} | confidence_keys(own)
    return config, weights


def confidence_keys(own: dict) -> dict[str, bool]:
    """Return the keys of a confidence head, which readers of DSpark want to see set."""
    return {key: bool(own.get(key)) for key in ("enable_confidence_head", "confidence_head_with_markov")}


def write_treeflash(drafter: Drafter, target: Target | None) -> tuple[dict, dict]:
    """Return config.json and tensors as TreeFlash's authors have them. Arguments and exceptions as of
    `write_public`."""
    refuse(drafter, "treeflash")
    if drafter.own.get("ar_hidden_size") not in (None, drafter.config.intermediate_size):
        raise ValueError(
            f"format=treeflash: its head has {drafter.own['ar_hidden_size']} entries, theirs as many as a layer, "
            f"{drafter.config.intermediate_size}: train it without drafter.head.hidden"
        )
    config, weights = without_ends(drafter, target, "treeflash")
    for key in ("ar_approximation", "ar_hidden_size"):
        config["dflash_config"].pop(key, None)
    config["architectures"] = ["TreeFlashDraftModel"]
    config["treeflash_config"] = {"ar_approximation": "swiglu", "candidate_tokens": 16}
    names = {name: name if name.startswith("ar_approximation.") else f"model.{name}" for name in weights}
    return config, {names[name]: tensor for name, tensor in weights.items()}


def with_ends(drafter: Drafter, target: Target | None, format: str) -> dict[str, torch.Tensor]:
    """Return the tensors with the embedding and the head that the drafter uses."""
    if target is None:
        raise ValueError(f"format={format} stores the target's embedding and head: give target.path")
    weights, kind = dict(drafter.state_dict()), drafter.norm.weight.dtype
    for name, weight in (("embed_tokens", target_embeddings(target)), ("lm_head", target.head_weight)):
        weights.setdefault(f"{name}.weight", weight.detach().to("cpu", kind))
    return weights


def write_transformers(drafter: Drafter, target: Target | None) -> tuple[dict, dict]:
    """Return config.json and tensors of transformers' own class, for `generate(assistant_model=...,
    speculation_type="dflash")`. `target` as in `write_public`. Raises ValueError for drafters that it would run in
    another way."""
    config, own = drafter.config, drafter.own
    refuse(drafter, "transformers")
    weights = without_ends(drafter, target, "transformers")[1]
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
    names += ("bos_token_id", "eos_token_id", "pad_token_id")  # null too: else its config takes another model's
    stored = {ours: theirs for theirs, ours in NATIVE_TENSORS.items()}
    raw |= {name: getattr(config, name, None) for name in names}
    return raw, {stored.get(name, name): tensor for name, tensor in weights.items()}


def write_for_gguf(drafter: Drafter, target: Target | None) -> tuple[dict, dict]:
    """Return config.json and tensors as llama.cpp's converter reads them: DeepSpec's, DFlash 2's or the public layout,
    by what the drafter has. Raises ValueError for drafters that llama.cpp has no room for."""
    if drafter.own.get("sample_from_anchor") or drafter.own.get("markov_rank"):
        return write_dspark(drafter, target)
    if drafter.head_row is None:
        if drafter.own.get("conv_kernel_size"):
            raise ValueError("format=gguf: llama.cpp has convolutions beside a selector only, and the drafter has none")
        return write_public(drafter, target)
    top_k, size = drafter.conditional_head.top_k or drafter.config.vocab_size, drafter.config.hidden_size
    if top_k * (top_k + 1) > size:  # it keeps the pairs of a slot in one hidden state
        raise ValueError(
            f"format=gguf: its selector chooses among {top_k} tokens, and llama.cpp has room for "
            f"{int((size + 0.25) ** 0.5 - 0.5)} with {size} hidden entries: train it with a smaller drafter.head.top_k"
        )
    return write_dflash2(drafter, target)


def speculators_config(drafter: Drafter, verifier: str, architectures: list[str]) -> dict:
    """Return config.json in speculators' layout, of the kind that the conditional head asks for. verifier: the target's
    name or path."""
    config, own_key, own = drafter.config, drafter.family.config_key, drafter.own
    kind = {"markov": "dspark", "selector": "dflash2"}[drafter.head_row.name] if drafter.head_row else "dflash"
    part = config_dict(config)
    for key in ("architectures", "block_size", own_key, "num_target_layers", "draft_vocab_size"):
        part.pop(key, None)
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": drafter.block_size - 1,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    classes = {"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel", "dflash2": "DFlash2DraftModel"}
    more = {key: value for key, value in own.items() if key.startswith(("markov_", "selector_", "conv_"))}
    return {
        "architectures": [classes[kind]],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
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
    } | (more | confidence_keys(own) if kind == "dspark" else more)


def write_speculators(drafter: Drafter, target: Target | None) -> tuple[dict, dict]:
    """Return config.json and tensors in speculators' layout, with the embedding and the head that the drafter uses;
    `target.name` tells the engine where to find the target. Raises ValueError for drafters that this layout has no
    words for."""
    refuse(drafter, "speculators")
    weights = with_ends(drafter, target, "speculators")
    if drafter.d2t is not None:
        weights["t2d"] = known_tokens(drafter.d2t, drafter.config.vocab_size)
    architectures = target.model.config.architectures or [type(target.model).__name__]
    config = speculators_config(drafter, target.name, architectures)
    if config["speculators_model_type"] == "dflash2":
        if drafter.d2t is not None:
            raise ValueError("format=speculators: DFlash 2 drafters know the whole vocabulary there (draft_vocab_size)")
        own, convolutions = convolved(drafter, "speculators")
        return config | own, weights | convolutions
    return config, weights
