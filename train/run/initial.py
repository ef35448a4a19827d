"""The drafter that a run starts from: a new one, or an existing one (drafter.init)."""

import warnings
from dataclasses import replace
from pathlib import Path

import torch

from infer.config import DrafterConfig, HeadConfig, TargetConfig
from infer.drafters.base import (
    Drafter,
    check_known,
    drop_copies,
    fixed_options,
    init_head,
    new_drafter,
)
from infer.drafters.heads.table import head_options, new_head
from infer.formats.checkpoint import load_drafter
from infer.formats.folders import open_folder
from infer.formats.layouts import find_problems, read
from infer.targets.loading import load_config
from infer.targets.target import Target
from train.batches import seeded
from train.config import TrainConfig

COLD = (
    "the drafter begins from noise, as the target's layers compute something else than its own would (DFlash's norm "
    "queries and keys, Llama's do not): drafter.warm_start=false says that you know"
)


def resolve_init(options: DrafterConfig, target: TargetConfig) -> DrafterConfig:
    """Return the drafter's options, completed by the config of `init`; its weights are not loaded.

    Raises ValueError for options that contradict it, with those to give instead, and for a folder
    that is no drafter.
    """
    if options.init is None:
        return options
    theirs = load_config(target.path, target.trust_remote_code).get_text_config()
    check_known(options, theirs)
    folder = open_folder(options.init)
    reading = read(folder, theirs.num_hidden_layers)
    if problems := find_problems(folder, reading):
        raise ValueError(f"drafter.init={options.init}: {'; '.join(problems)}")
    drafter = reading.drafter()
    known = fixed_options(drafter)
    if options.draft_vocab_size and drafter.head_row is None:  # a head has weights for every token
        known["draft_vocab_size"] = options.draft_vocab_size
    given = {key: getattr(options, key) for key in known}
    wrong = [key for key, value in given.items() if value not in (None, known[key])]
    if wrong:
        said = ("null" if known[key] is None else known[key] for key in wrong)
        wanted = " ".join(
            f"drafter.{key}={value}".replace(" ", "")
            for key, value in zip(wrong, said, strict=True)
        )
        raise ValueError(
            f"drafter.init={options.init} is another drafter than the options say: give {wanted}"
        )
    return replace(
        options, **known, head=chosen_head(options, HeadConfig(**head_options(drafter.own)))
    )


def named_mask(mask: int | None, tokenizer) -> str:
    """Return the mask token in words; nothing for a drafter without one."""
    name = None if mask is None else tokenizer.convert_ids_to_tokens(mask)
    return "" if mask is None else f", mask token {mask}" + (f" ({name})" if name else "")


def take_weights(drafter: Drafter, state: dict[str, torch.Tensor], checkpoint: Path) -> None:
    """Load the drafter's weights from a training state. Raises ValueError for those of another
    drafter."""
    try:
        drafter.load_state_dict({name: tensor for name, tensor in state.items() if "/" not in name})
    except RuntimeError as error:
        said = " ".join(str(error).split())[:300]
        raise ValueError(
            f"{checkpoint} holds the weights of another drafter: choose another name= ({said})"
        ) from error


def chosen_head(options: DrafterConfig, own: HeadConfig) -> HeadConfig:
    """Return the conditional head of a drafter that starts from one with the head `own`: its own;
    where it has none, the one that is asked for. Raises ValueError where two differ."""
    if "none" not in (options.head.name, own.name) and own != options.head:
        raise ValueError(
            f"drafter.init={options.init} has a conditional head already, {vars(own)}: leave head= out"
        )
    return options.head if own.name == "none" else own


def know(drafter: Drafter, tokens: torch.Tensor) -> None:
    """Let a drafter propose these tokens (R,) alone: its scores are the target's head's for
    them."""
    drafter.config.draft_vocab_size = len(tokens)
    drafter.d2t = tokens - torch.arange(len(tokens))


def initial_drafter(
    config: TrainConfig, target: Target, tokens: torch.Tensor | None = None
) -> Drafter:
    """Return the drafter that the run starts from, float32, to be trained. tokens (R,): those that
    a drafter of a part of the vocabulary knows, if it is new or knew another number. Raises
    ValueError where it does not fit the target."""
    options = config.drafter
    if options.init is None:
        drafter = new_drafter(options, target)
        drafter.config.chat_template_kwargs = config.target.chat_template_kwargs or None
        if options.draft_vocab_size:
            know(drafter, tokens)
        if (
            not drafter.initialize(target, seeded(config.seed), options.warm_start)
            and options.warm_start
        ):
            warnings.warn(COLD, stacklevel=2)
        return drafter
    drafter = load_drafter(
        options.init, torch.float32, target_layers=target.config.num_hidden_layers
    )
    try:
        drafter.check_target(target)
        drop_copies(drafter, target)
    except ValueError as error:
        raise ValueError(f"drafter.init={options.init} cannot be trained here: {error}") from error
    if (
        options.draft_vocab_size
        and options.draft_vocab_size != fixed_options(drafter)["draft_vocab_size"]
    ):
        know(drafter, tokens)
    if drafter.head_row is None:
        drafter.own.update(new_head(options.head))
        drafter.add_conditional_head()
        init_head(drafter, seeded(config.seed))
    if config.target.chat_template_kwargs:
        drafter.config.chat_template_kwargs = config.target.chat_template_kwargs
    drafter.train().requires_grad_(config.trainable == "all")
    if config.trainable == "head":
        for part in (drafter.conditional_head, drafter.confidence_head):
            if part is not None:
                part.requires_grad_(True)
    return drafter
