"""The drafter that a run starts from: a new one, or an existing one (drafter.init)."""

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
    "the drafter starts from random weights, because the target's layers differ from the drafter's "
    "(for example, DFlash "
    "normalises queries and keys, and Llama does not): drafter.warm_start=false turns this warning "
    "off"
)
MAX_QUOTED_WEIGHT_LOADING_ERROR_CHARACTERS = 300  # of an error that a message quotes


def resolve_drafter_options(options: DrafterConfig, target: TargetConfig) -> DrafterConfig:
    """Return the drafter's options with those of the existing drafter `init`, if it is given. Only
    its config is read, not its weights.

    Raises ValueError if `init` is not a drafter, and if given options contradict its config.
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
    # a new vocabulary can be chosen, unless a conditional head has weights for every token
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
            f"{' '.join(corrections)}, or "
            "leave them out"
        )
    head = choose_head(options, HeadConfig(**read_head_options(drafter.family_config)))
    return replace(options, **init_options, head=head)


def format_mask_token(mask_token_id: int | None, tokenizer) -> str:
    """Return the mask token as text for a message; empty for a drafter without one."""
    if mask_token_id is None:
        return ""
    token = tokenizer.convert_ids_to_tokens(mask_token_id)
    return f", mask token {mask_token_id} ({token})" if token else f", mask token {mask_token_id}"


def load_drafter_weights(
    drafter: Drafter, state: dict[str, torch.Tensor], checkpoint: Path
) -> None:
    """Load the drafter's weights from a training state. Raises ValueError if they belong to another
    drafter; `checkpoint` is named in the message."""
    # names with a slash belong to the optimiser
    weights = {name: tensor for name, tensor in state.items() if "/" not in name}
    try:
        drafter.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:MAX_QUOTED_WEIGHT_LOADING_ERROR_CHARACTERS]
        raise ValueError(
            f"{checkpoint} holds the weights of another drafter: choose another name= ({reason})"
        ) from error


def choose_head(options: DrafterConfig, init_head_options: HeadConfig) -> HeadConfig:
    """Return the conditional head of a drafter that starts from an existing one: its own head, or
    the configured one if it has none. Raises ValueError if both exist and differ."""
    if init_head_options.name == "none":
        return options.head
    if options.head.name != "none" and options.head != init_head_options:
        raise ValueError(
            f"drafter.init={options.init} already has a conditional head, "
            f"{vars(init_head_options)}: leave head= out"
        )
    return init_head_options


def restrict_vocabulary(drafter: Drafter, token_ids: torch.Tensor) -> None:
    """Let the drafter draft only the given tokens (R,). Its logits are those of the target's head
    for these tokens."""
    drafter.config.draft_vocab_size = len(token_ids)
    drafter.d2t = token_ids - torch.arange(len(token_ids))


def create_initial_drafter(
    config: TrainConfig, target: Target, draft_tokens: torch.Tensor | None = None
) -> Drafter:
    """Return the drafter that training starts from, in float32.

    draft_tokens: (R,) the token ids of a reduced vocabulary, for a new drafter or one that had a
        vocabulary of another size.

    Raises ValueError if the drafter does not fit the target.
    """
    if config.drafter.init is None:
        return _create_new_drafter(config, target, draft_tokens)
    return _load_existing_drafter(config, target, draft_tokens)


def _create_new_drafter(
    config: TrainConfig, target: Target, draft_tokens: torch.Tensor | None
) -> Drafter:
    """Return a new drafter, initialised from the target's layers if possible."""
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
    """Return the drafter of `drafter.init`, with a new conditional head if one is configured and it
    has none."""
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
