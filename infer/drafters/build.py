"""Build new drafters: choose the content of config.json for the given options, and create a drafter
with uninitialised weights."""

import re
from collections.abc import Callable, Collection, Iterator
from itertools import chain
from typing import Any, cast

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase, Qwen3Config

from infer.config import DrafterConfig
from infer.drafters.base import Drafter, get_target_head_weight
from infer.drafters.families import DRAFTER_FAMILIES
from infer.drafters.heads.table import build_head_config
from infer.targets.support import (
    choose_drafter_mlp_size,
    get_head_size,
    get_norm_eps,
    get_num_key_heads,
    get_rope_parameters,
)
from infer.targets.target import Target

# Matches names of tokens that do not occur in text: mask tokens, Llama's reserved tokens, Gemma's
# unused tokens and Nemotron's numbered special tokens.
UNUSED_TOKEN_NAME_PATTERN = re.compile(
    r"[<\[]\W*\w*(mask|reserved|unused|special_\d)\w*\W*[>\]]", re.IGNORECASE
)
# Types of rotary scaling (`rope_type`) that a new drafter copies from its target. "llama3" is not
# copied for two reasons: it only matters for positions that are thousands of tokens apart, and
# llama.cpp does not support it in a drafter.
INHERITED_ROPE_TYPES = ("linear", "yarn")


def iterate_mask_token_candidates(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int, end_token_ids: Collection[int]
) -> Iterator[int]:
    """Yield candidates for the mask token, in order of preference: token ids that text is unlikely
    to contain.

    1. The tokenizer's mask token.
    2. The id after the tokenizer's last token, if the target's vocabulary is padded (151669 for
       Qwen3).
    3. Tokens whose name marks them as mask, reserved or unused (Gemma, Llama 3, Nemotron).
    4. The padding token, unless it also begins or ends sequences.
    5. Other special tokens that neither begin nor end sequences and do not occur in the chat
       template, from the highest id to the lowest (<empty_output> for SmolLM2).
    """
    if tokenizer.mask_token_id is not None:
        yield tokenizer.mask_token_id
    if len(tokenizer) < vocab_size:
        yield len(tokenizer)

    excluded = {*end_token_ids, tokenizer.eos_token_id, tokenizer.bos_token_id}
    template = str(tokenizer.chat_template)
    names = {
        token_id: name
        for name, token_id in tokenizer.get_vocab().items()
        if token_id < vocab_size and token_id not in excluded
    }
    yield from sorted(
        token_id
        for token_id, name in names.items()
        if UNUSED_TOKEN_NAME_PATTERN.fullmatch(name) and name not in template
    )

    if tokenizer.pad_token_id in names:
        yield tokenizer.pad_token_id

    added_tokens = tokenizer.added_tokens_decoder
    special_ids = [
        token_id
        for token_id in names
        if token_id in added_tokens
        and added_tokens[token_id].special
        and token_id != tokenizer.unk_token_id
    ]
    yield from sorted((i for i in special_ids if names[i] not in template), reverse=True)


def choose_mask_token(
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    end_token_ids: Collection[int],
    get_used_ids: Callable[[], Collection[int]] | None = None,
) -> int:
    """Choose the mask token, which is the input at drafted positions.

    The result is the first of `iterate_mask_token_candidates` that does not occur in the training
    data. If all candidates occur, it is the highest token id that does not occur.

    `get_used_ids` returns the ids that occur in the data and is called only if needed. If
    `get_used_ids` is None, the first candidate is returned. Raises ValueError if no id is suitable.
    """
    candidates = iterate_mask_token_candidates(tokenizer, vocab_size, end_token_ids)
    first_candidate = next(candidates, None)
    if first_candidate is not None and (get_used_ids is None or first_candidate >= len(tokenizer)):
        # An id after the tokenizer's last token cannot occur in data, so `get_used_ids` is not
        # needed.
        return first_candidate

    if get_used_ids is not None:
        used_ids = set(get_used_ids())
        if first_candidate is not None:
            for candidate in chain([first_candidate], candidates):
                if candidate not in used_ids:
                    return candidate
        unused_ids = {*range(vocab_size)} - used_ids - {*end_token_ids}
        if unused_ids:
            return max(unused_ids)
    raise ValueError(
        "no mask token was found: every token id of the target may occur in text. Set "
        "drafter.mask_token_id to the id of a token that your data never contains"
    )


def choose_feature_layers(
    options: DrafterConfig, target_config: PretrainedConfig
) -> tuple[int, ...]:
    """Return the target layers whose hidden states a new drafter reads, counted from 0.

    Raises ValueError if the options name a layer that the target does not have.
    """
    target_layers = target_config.num_hidden_layers
    drafter_class = DRAFTER_FAMILIES[options.family].load()
    layer_ids = options.target_layer_ids
    if not layer_ids:
        layer_ids = drafter_class.default_layer_ids(target_layers, options.layers)
    if any(not 0 <= layer < target_layers for layer in layer_ids):
        raise ValueError(
            f"drafter.target_layer_ids={list(layer_ids)}: use layers of the target, 0 to "
            f"{target_layers - 1}"
        )
    return tuple(int(layer) for layer in layer_ids)


def build_feature_layer_config(
    options: DrafterConfig, target_config: PretrainedConfig
) -> dict[str, Any]:
    """Return the entries of config.json that define which target layers a new drafter reads.

    Raises ValueError if the options name a layer that the target does not have. Also raises
    ValueError if the drafter does not read the target's last layer, but the option
    `last_layer_output` asks for its output after the final norm.
    """
    layer_ids = list(choose_feature_layers(options, target_config))
    last_layer = target_config.num_hidden_layers - 1
    if last_layer in layer_ids:
        return {"target_layer_ids": layer_ids, "last_tap": options.last_layer_output}
    if options.last_layer_output != "raw":
        raise ValueError(
            f"drafter.last_layer_output={options.last_layer_output}: drafter.target_layer_ids "
            f"does not contain the target's last layer, {last_layer}; add this layer or remove "
            "drafter.last_layer_output"
        )
    return {"target_layer_ids": layer_ids}


def choose_rope_parameters(target_config: PretrainedConfig) -> dict[str, Any]:
    """Return the parameters of a new drafter's rotary embeddings, in the format of
    `rope_parameters` in transformers 5.

    `rope_theta` is the target's, because a warm start copies weights that were trained with this
    value. Rotary scaling is copied from the target only if its type is in INHERITED_ROPE_TYPES.
    """
    target_parameters = get_rope_parameters(target_config)
    parameters = {
        "rope_type": "default",
        "rope_theta": float(target_parameters.get("rope_theta", 1e4)),
    }
    rope_type = target_parameters.get("rope_type")
    if rope_type not in INHERITED_ROPE_TYPES:
        return parameters

    numbers = {
        key: value for key, value in target_parameters.items() if isinstance(value, int | float)
    }
    numbers.pop("partial_rotary_factor", None)
    return numbers | parameters | {"rope_type": rope_type}


def build_family_independent_config(
    options: DrafterConfig, target_config: PretrainedConfig
) -> dict[str, Any]:
    """Return the entries of a new drafter's config.json that do not depend on the drafter family:
    mainly sizes, from the target or from the options."""
    num_slots = options.block_size
    if options.sample_from_anchor:
        num_slots -= 1
    layer_type = "full_attention" if options.sliding_window is None else "sliding_attention"
    target_keys = (
        "hidden_size",
        "num_attention_heads",
        "max_position_embeddings",
        "vocab_size",
        "bos_token_id",
        "eos_token_id",
    )
    shared_keys = {
        "block_size": num_slots,
        "intermediate_size": choose_drafter_mlp_size(target_config),
        "num_target_layers": target_config.num_hidden_layers,
        "num_hidden_layers": options.layers,
        "layer_types": [layer_type] * options.layers,
        "use_sliding_window": options.sliding_window is not None,
        "sliding_window": options.sliding_window,
        "num_key_value_heads": get_num_key_heads(target_config),
        "head_dim": get_head_size(target_config),
        "rms_norm_eps": get_norm_eps(target_config),
        "rope_parameters": choose_rope_parameters(target_config),
        "tie_word_embeddings": False,
        "has_embed_tokens": False,
        "has_lm_head": False,
    }
    for key in target_keys:
        shared_keys[key] = getattr(target_config, key)
    return shared_keys


def check_draft_vocab_size(options: DrafterConfig, target_config: PretrainedConfig) -> None:
    """Raise ValueError if the drafter would propose more tokens than the target's vocabulary
    has."""
    if (options.draft_vocab_size or 0) > target_config.vocab_size:
        raise ValueError(
            f"drafter.draft_vocab_size={options.draft_vocab_size}: the target has "
            f"{target_config.vocab_size} tokens; use at most this number"
        )


def build_drafter_config(
    options: DrafterConfig, target: Target | None, target_config: PretrainedConfig | None = None
) -> Qwen3Config:
    """Return the config of a new drafter.

    The drafter is for `target`. If `target` is None, only the target's config is known, and
    `target_config` must be given. Raises ValueError if the options are invalid or do not fit the
    target.
    """
    options.check()
    if target is not None:
        target_config = target.config
    assert target_config is not None
    family = DRAFTER_FAMILIES[options.family]
    family_config = family.load().build_family_config(options, target_config, target)
    family_config |= build_head_config(options.head)
    check_draft_vocab_size(options, target_config)

    keys = family.build_config_entries(family_config)
    if options.draft_vocab_size:
        keys["draft_vocab_size"] = options.draft_vocab_size
    return Qwen3Config(**keys, **build_family_independent_config(options, target_config))


def create_drafter(
    options: DrafterConfig, target: Target | None, target_config: PretrainedConfig | None = None
) -> Drafter:
    """Return a new drafter with uninitialised weights.

    The drafter is for `target`. If `target` is None, only the target's config is known, and
    `target_config` must be given. Raises ValueError if the options are invalid or do not fit the
    target.
    """
    config = build_drafter_config(options, target, target_config)
    return DRAFTER_FAMILIES[options.family].load()(config)


@torch.no_grad()
def compute_target_input_embeddings(target: Target) -> torch.Tensor:
    """Return the input vector of the target's first layer for every token,
    (vocab_size, hidden_size).

    The result differs from the embedding's weight if the target scales its embeddings.
    """
    weight = cast(torch.Tensor, target.embedding.weight)
    ids = torch.arange(len(weight), device=target.device)
    return target.embed(ids)


def remove_copied_embedding_and_head(drafter: Drafter, target: Target) -> None:
    """Remove the drafter's embedding and language model head, so that the drafter uses the
    target's.

    Raises ValueError if one of them is not a copy of the target's. The weight of a copy may have
    another dtype than the target's weight, but must be equal to it after a cast. Does nothing for
    drafter families that always have their own language model head.
    """
    if drafter.family.includes_lm_head:
        return
    pairs = {
        "embed_tokens": (drafter.embed_tokens, compute_target_input_embeddings(target)),
        "lm_head": (drafter.lm_head, get_target_head_weight(drafter, target)),
    }
    for name, (module, target_weight) in pairs.items():
        if module is not None and not equal_in_either_dtype(module.weight, target_weight):
            raise ValueError(f"the drafter's {name} differs from the target's {name}")
        setattr(drafter, name, None)
        setattr(drafter.config, f"has_{name}", False)


def equal_in_either_dtype(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors are equal after one of them is moved to the other's device and
    cast to the other's dtype. The cast is tried in both directions."""
    return torch.equal(first, second.to(first)) or torch.equal(first.to(second), second)


def read_options_from_config(drafter: Drafter) -> dict[str, Any]:
    """Return the options with which a new drafter like `drafter` can be created. The keys are
    fields of `infer.config.DrafterConfig`.

    Only the options that can be read from the config.json of `drafter` are returned, without those
    of the conditional head.
    """
    family_config = drafter.family_config
    family = drafter.family
    options = {
        "family": family.name,
        "layers": drafter.config.num_hidden_layers,
        "block_size": drafter.block_size,
        "target_layer_ids": list(family_config["target_layer_ids"]),
        "last_layer_output": family_config.get("last_tap", "raw"),
        "sliding_window": drafter.config.sliding_window,
        "draft_vocab_size": 0 if drafter.d2t is None else len(drafter.d2t),
    }
    if "mask_token_id" in family_config:
        options["mask_token_id"] = family_config["mask_token_id"]
    for name in ("sample_from_anchor", "causal", "layer_fusion"):
        if name in family.specific_option_names:
            options[name] = bool(family_config.get(name))
    if "conv_kernel_size" in family.specific_option_names:
        options["conv_kernel_size"] = family_config.get("conv_kernel_size", 0)
    return options
