"""The drafter that a run starts from: a new drafter, or the existing drafter that the option
drafter.init names."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from infer.config import DrafterConfig, HeadConfig, TargetConfig
from infer.drafters.base import Drafter
from infer.drafters.build import (
    check_draft_vocabulary,
    create_drafter,
    drop_target_copies,
    read_fixed_options,
)
from infer.drafters.heads.table import build_head_config, read_head_options
from infer.formats.checkpoint import load_drafter
from infer.formats.folders import open_drafter_folder
from infer.formats.layouts import find_folder_problems, read_layout
from infer.targets.loading import load_config
from infer.targets.target import Target
from train.config import TrainConfig
from train.seeding import seeded_generator

RANDOM_DRAFTER_WEIGHTS_WARNING = (
    "the drafter starts from random weights, because the target's layers have another "
    "architecture than the drafter's (for example, DFlash normalises queries and keys, and Llama "
    "does not). drafter.warm_start=false turns this warning off"
)
MAX_QUOTED_WEIGHT_LOADING_ERROR_CHARACTERS = (
    300  # length to which an error is cut that a message quotes
)


def resolve_drafter_options(options: DrafterConfig, target: TargetConfig) -> DrafterConfig:
    """Return the drafter's options. If `options.init` names an existing drafter, options that this
    drafter's config decides are taken from the config. The drafter's weights are not read.

    Raises ValueError if `options.init` is not a drafter, and if given options contradict its
    config.
    """
    if options.init is None:
        return options
    text_config = load_config(target.path, target.trust_remote_code).get_text_config()
    check_draft_vocabulary(options, text_config)
    folder = open_drafter_folder(options.init)
    reading = read_layout(folder, text_config.num_hidden_layers)
    if problems := find_folder_problems(folder, reading):
        raise ValueError(f"drafter.init={options.init}: {'; '.join(problems)}")

    drafter = cast(Drafter, reading.build_drafter())
    init_options = read_fixed_options(drafter)
    # A drafter can get another reduced vocabulary, unless it has a conditional head, which has
    # weights for every token of its vocabulary.
    if options.draft_vocab_size and drafter.head_spec is None:
        init_options["draft_vocab_size"] = options.draft_vocab_size
    corrections = []
    for key, value in init_options.items():
        if getattr(options, key) not in (None, value):
            value_text = "null" if value is None else str(value).replace(" ", "")
            corrections.append(f"drafter.{key}={value_text}")
    if corrections:
        raise ValueError(
            f"drafter.init={options.init} contradicts other options of the drafter: give "
            f"{' '.join(corrections)}, "
            "or do not give these options"
        )
    head = choose_head(options, HeadConfig(**read_head_options(drafter.family_config)))
    return replace(options, **init_options, head=head)


def format_mask_token(mask_token_id: int | None, tokenizer) -> str:
    """Return text that names the mask token and can be appended to a message. It is empty if
    `mask_token_id` is None."""
    if mask_token_id is None:
        return ""
    token = tokenizer.convert_ids_to_tokens(mask_token_id)
    return f", mask token {mask_token_id} ({token})" if token else f", mask token {mask_token_id}"


def load_drafter_weights(
    drafter: Drafter, state: dict[str, torch.Tensor], checkpoint: Path
) -> None:
    """Load a drafter's weights from the training state of a checkpoint.

    checkpoint: the checkpoint's folder, for the error message. Raises ValueError if the weights
    belong to another drafter.
    """
    # keys with a slash belong to the optimiser's state
    weights = {name: tensor for name, tensor in state.items() if "/" not in name}
    try:
        drafter.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:MAX_QUOTED_WEIGHT_LOADING_ERROR_CHARACTERS]
        raise ValueError(
            f"{checkpoint} holds the weights of another drafter ({reason}): choose another name "
            "for the run with name="
        ) from error


def choose_head(options: DrafterConfig, init_head_options: HeadConfig) -> HeadConfig:
    """Return the options of the conditional head of a drafter that starts from an existing one.

    init_head_options: the head of the existing drafter. It is kept; if its name is 'none', the head
    that `options` configures is added. Raises ValueError if both exist and differ.
    """
    if init_head_options.name == "none":
        return options.head
    if options.head.name != "none" and options.head != init_head_options:
        raise ValueError(
            f"drafter.init={options.init} already has a conditional head with the options "
            f"{vars(init_head_options)}: do not give the option head="
        )
    return init_head_options


def restrict_vocabulary(drafter: Drafter, token_ids: torch.Tensor) -> None:
    """Give the drafter a reduced vocabulary, so that it can draft only the given tokens.

    token_ids: (tokens,) ids in the target's vocabulary, ascending. The drafter then has logits only
    for these tokens.
    """
    drafter.config.draft_vocab_size = len(token_ids)
    drafter.d2t = token_ids - torch.arange(len(token_ids))


def create_initial_drafter(
    config: TrainConfig, target: Target, draft_tokens: torch.Tensor | None = None
) -> Drafter:
    """Return the drafter that training starts from, in float32.

    draft_tokens: (tokens,) the token ids of a reduced vocabulary, None without one. They are used
        for a new drafter, and for an existing drafter with a vocabulary of another size.

    Raises ValueError if the drafter does not fit the target.
    """
    if config.drafter.init is None:
        return _create_new_drafter(config, target, draft_tokens)
    return _load_existing_drafter(config, target, draft_tokens)


def _create_new_drafter(
    config: TrainConfig, target: Target, draft_tokens: torch.Tensor | None
) -> Drafter:
    """Return a new drafter. Its layers start as copies of target layers if the option warm_start is
    true and the architectures are the same."""
    options = config.drafter
    drafter = create_drafter(options, target)
    drafter.config.chat_template_kwargs = config.target.chat_template_kwargs or None
    if options.draft_vocab_size:
        assert draft_tokens is not None
        restrict_vocabulary(drafter, draft_tokens)
    copied_layers = drafter.initialize(target, seeded_generator(config.seed), options.warm_start)
    if options.warm_start and not copied_layers:
        warnings.warn(RANDOM_DRAFTER_WEIGHTS_WARNING, stacklevel=3)
    return drafter


def _load_existing_drafter(
    config: TrainConfig, target: Target, draft_tokens: torch.Tensor | None
) -> Drafter:
    """Return the existing drafter that `drafter.init` names. If it has no conditional head and one
    is configured, a new conditional head is added."""
    options = config.drafter
    assert options.init is not None
    num_layers = target.config.num_hidden_layers
    drafter = cast(Drafter, load_drafter(options.init, torch.float32, target_layers=num_layers))
    try:
        drafter.check_target(target)
        drop_target_copies(drafter, target)
    except ValueError as error:
        raise ValueError(f"drafter.init={options.init} cannot be trained here: {error}") from error

    if (
        options.draft_vocab_size
        and options.draft_vocab_size != read_fixed_options(drafter)["draft_vocab_size"]
    ):
        assert draft_tokens is not None
        restrict_vocabulary(drafter, draft_tokens)
    if drafter.head_spec is None:
        drafter.family_config.update(build_head_config(options.head))
        drafter.add_conditional_head()
        drafter.init_head_weights(seeded_generator(config.seed))
    if config.target.chat_template_kwargs:
        drafter.config.chat_template_kwargs = config.target.chat_template_kwargs

    drafter.train().requires_grad_(config.trainable == "all")
    if config.trainable == "head":
        for head in (drafter.conditional_head, drafter.confidence_head):
            if head is not None:
                head.requires_grad_(True)
    return drafter
