"""Create or load the drafter that a training run starts from: a new one, or the existing drafter
given by the option drafter.init."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from infer.config import DrafterConfig, HeadConfig, TargetConfig
from infer.drafters.base import Drafter
from infer.drafters.build import (
    check_draft_vocab_size,
    create_drafter,
    read_options_from_config,
    remove_copied_embedding_and_head,
)
from infer.drafters.heads.table import build_head_config, read_head_options
from infer.formats.checkpoint import load_drafter
from infer.formats.folders import open_drafter_folder
from infer.formats.layouts import find_folder_problems, parse_drafter_config
from infer.targets.loading import load_config
from infer.targets.target import Target
from train.config import TrainConfig
from train.seeding import seeded_generator

NO_WARM_START_WARNING = (
    "the drafter starts from random weights, because the target's layers have another "
    "architecture than the drafter's (for example, DFlash normalises queries and keys, and Llama "
    "does not). drafter.warm_start=false turns this warning off"
)
MAX_QUOTED_WEIGHT_LOADING_ERROR_CHARACTERS = (
    300  # longer PyTorch errors are cut to this length before a message quotes them
)


def resolve_drafter_options(options: DrafterConfig, target: TargetConfig) -> DrafterConfig:
    """Complete the drafter's options: if `options.init` is an existing drafter, copy the options
    that its config.json fixes, such as its number of layers. The weights are not read.

    Raises ValueError if `options.init` is not a drafter, or if given options contradict its config.
    """
    if options.init is None:
        return options
    text_config = load_config(target.path, target.trust_remote_code).get_text_config()
    check_draft_vocab_size(options, text_config)
    folder = open_drafter_folder(options.init)
    reading = parse_drafter_config(folder, text_config.num_hidden_layers)
    if problems := find_folder_problems(folder, reading):
        raise ValueError(f"drafter.init={options.init}: {'; '.join(problems)}")

    drafter = cast(Drafter, reading.build_drafter())
    init_options = read_options_from_config(drafter)
    # The option draft_vocab_size can differ from that of the existing drafter. This is not possible
    # if the drafter has a conditional head, which has weights for every token of the vocabulary.
    if options.draft_vocab_size and drafter.head_spec is None:
        init_options["draft_vocab_size"] = options.draft_vocab_size
    corrections = []
    for key, value in init_options.items():
        if getattr(options, key) not in (None, value):
            value_text = "null" if value is None else str(value).replace(" ", "")
            corrections.append(f"drafter.{key}={value_text}")
    if corrections:
        raise ValueError(
            f"drafter.init={options.init} has other values for some of the given options: give "
            f"{' '.join(corrections)}, or do not give these options"
        )
    head = choose_head(options, HeadConfig(**read_head_options(drafter.family_config)))
    return replace(options, **init_options, head=head)


def format_mask_token(mask_token_id: int | None, tokenizer) -> str:
    """Return ", mask token <id> (<token>)", to be appended to a message, or "" if `mask_token_id`
    is None."""
    if mask_token_id is None:
        return ""
    token = tokenizer.convert_ids_to_tokens(mask_token_id)
    return f", mask token {mask_token_id} ({token})" if token else f", mask token {mask_token_id}"


def load_drafter_weights(
    drafter: Drafter, state: dict[str, torch.Tensor], checkpoint: Path
) -> None:
    """Load the drafter's weights from a training state, which also holds optimiser moments.

    checkpoint: the checkpoint's folder, for the error message. Raises ValueError if the weights do
    not fit the drafter.
    """
    # Keys with a slash are optimiser moments; the other keys are weights.
    weights = {name: tensor for name, tensor in state.items() if "/" not in name}
    try:
        drafter.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:MAX_QUOTED_WEIGHT_LOADING_ERROR_CHARACTERS]
        raise ValueError(
            f"{checkpoint} contains the weights of another drafter ({reason}): choose another "
            "name for the run with name="
        ) from error


def choose_head(options: DrafterConfig, init_head_options: HeadConfig) -> HeadConfig:
    """Choose the conditional head (which conditions each draft token on the previous one) for
    training that starts from an existing drafter. Return the options of the head.

    init_head_options: the options of the existing drafter's head, which is kept. If
    `init_head_options.name` is 'none', the existing drafter has no head, and gets the head in
    `options`. Raises ValueError if the existing drafter and `options` have different heads.
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
    """Give the drafter a reduced vocabulary: it then computes logits only for the given tokens.

    token_ids: (num_tokens,) ids in the target's vocabulary, ascending
    """
    drafter.config.draft_vocab_size = len(token_ids)
    drafter.d2t = token_ids - torch.arange(len(token_ids))


def create_initial_drafter(
    config: TrainConfig, target: Target, draft_tokens: torch.Tensor | None = None
) -> Drafter:
    """Create or load the drafter that training starts from, in float32.

    draft_tokens: (num_tokens,) the token ids of the reduced vocabulary, or None for the whole
        vocabulary. They are ignored if an existing drafter is loaded whose reduced vocabulary has
        the configured size.

    Raises ValueError if the drafter does not fit the target.
    """
    if config.drafter.init is None:
        return _create_new_drafter(config, target, draft_tokens)
    return _load_existing_drafter(config, target, draft_tokens)


def _create_new_drafter(
    config: TrainConfig, target: Target, draft_tokens: torch.Tensor | None
) -> Drafter:
    """Create a new drafter. With drafter.warm_start=true, its layers start as copies of layers of
    the target, if these have the same architecture."""
    options = config.drafter
    drafter = create_drafter(options, target)
    drafter.config.chat_template_kwargs = config.target.chat_template_kwargs or None
    if options.draft_vocab_size:
        assert draft_tokens is not None
        restrict_vocabulary(drafter, draft_tokens)
    copied_layers = drafter.initialize(target, seeded_generator(config.seed), options.warm_start)
    if options.warm_start and not copied_layers:
        warnings.warn(NO_WARM_START_WARNING, stacklevel=3)
    return drafter


def _load_existing_drafter(
    config: TrainConfig, target: Target, draft_tokens: torch.Tensor | None
) -> Drafter:
    """Load the existing drafter given by `drafter.init`. Add a new conditional head if one is
    configured and the drafter has none."""
    options = config.drafter
    assert options.init is not None
    num_layers = target.config.num_hidden_layers
    drafter = cast(Drafter, load_drafter(options.init, torch.float32, target_layers=num_layers))
    try:
        drafter.check_target(target)
        remove_copied_embedding_and_head(drafter, target)
    except ValueError as error:
        raise ValueError(f"drafter.init={options.init} cannot be trained here: {error}") from error

    if (
        options.draft_vocab_size
        and options.draft_vocab_size != read_options_from_config(drafter)["draft_vocab_size"]
    ):
        assert draft_tokens is not None
        restrict_vocabulary(drafter, draft_tokens)
    if drafter.head_spec is None:
        drafter.family_config.update(build_head_config(options.head))
        drafter.add_conditional_and_confidence_heads()
        drafter.init_head_weights(seeded_generator(config.seed))
    if config.target.chat_template_kwargs:
        drafter.config.chat_template_kwargs = config.target.chat_template_kwargs

    drafter.train().requires_grad_(config.trainable == "all")
    if config.trainable == "head":
        for head in (drafter.conditional_head, drafter.confidence_head):
            if head is not None:
                head.requires_grad_(True)
    return drafter
