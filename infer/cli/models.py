"""Options that several commands share, and functions that load a target and its drafters."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar

from infer.config import DecodeOptions, DrafterLoadConfig, TargetConfig
from infer.drafters.families import PROMPT_LOOKUP_FAMILY
from infer.targets.masked_models import (
    MASKED_DIFFUSION_TARGET_KIND,
    NoOptions,
    is_masked_diffusion,
    masked_diffusion_options_class,
)
from infer.utils.checks import check_nested_options

if TYPE_CHECKING:
    # A placeholder for the type checker. The real class is in an optional package, which must not
    # be imported here.
    MaskedConfig = NoOptions
else:
    MaskedConfig = masked_diffusion_options_class()

# Values of the options drafter.* that are also allowed without a drafter, because they have no
# effect.
DRAFTER_OPTION_VALUES_WITHOUT_EFFECT = (None, "none", "auto")


@dataclass
class CommandWithTarget:
    """Options of a command that uses a target.

    target: see TargetConfig in infer/config.py
    """

    # Sections of options. If the checkpoint was written by a training run, the options in these
    # sections are by default those of the training run.
    OPTION_SECTIONS_TAKEN_FROM_RUN: ClassVar[tuple[str, ...]] = ("target",)
    target: TargetConfig = field(default_factory=TargetConfig, kw_only=True)

    def check(self) -> None:
        """Raise ValueError for invalid options."""
        check_nested_options(self)


@dataclass
class CommandWithDrafter(CommandWithTarget):
    """Options of a command that decodes with a drafter.

    drafter: see DrafterLoadConfig in infer/config.py
    """

    drafter: DrafterLoadConfig = field(default_factory=DrafterLoadConfig, kw_only=True)


def resolve_decode_options(
    target_config: TargetConfig, decoding: DecodeOptions, masked: MaskedConfig
) -> Any:
    """Return the argument `options` of `infer.generate` for a target.

    For a causal target this is `decoding`. For a masked diffusion model it is a `MaskedOptions`
    object with the values of `decoding` and `masked`. Raises ValueError for options in `decoding`
    that a masked diffusion model does not support.
    """
    if is_masked_diffusion(target_config.path):
        return resolve_name(MASKED_DIFFUSION_TARGET_KIND.merge_options)(decoding, masked)
    return decoding


def load_target_and_drafter(
    target_config: TargetConfig, checkpoint: str | None, options: DrafterLoadConfig | None = None
) -> tuple[Any, Any]:
    """Load a target, and a drafter with the dtype of the target.

    checkpoint: the drafter's folder or name; None means that no drafter is loaded
    options: how the drafter is loaded; None means the default options

    Returns (target, drafter). The drafter is None if `checkpoint` is None or if the target is a
    masked diffusion model. Raises ValueError for a drafter that does not fit the target, for int8
    with a dtype or device that does not support it, and for drafter options without a drafter.
    """
    if is_masked_diffusion(target_config.path):
        load_masked = resolve_name(MASKED_DIFFUSION_TARGET_KIND.load)
        model = load_masked(
            target_config.path,
            target_config.dtype,
            target_config.device,
            target_config.trust_remote_code,
        )
        return model, None
    checkpoints = [] if checkpoint is None else [checkpoint]
    target, drafters = load_target_and_drafters(target_config, checkpoints, options)
    return target, drafters[0] if drafters else None


def load_target_and_drafters(
    target_config: TargetConfig, checkpoints: list[str], options: DrafterLoadConfig | None = None
) -> tuple[Any, list[Any]]:
    """Load a causal target, and drafters with the dtype of the target.

    The drafters are loaded first, so that their errors are reported before the target is loaded.
    The chat template variables come from `target_config.chat_template_kwargs`. If this option is
    empty, they come from the first drafter that was trained with such variables.

    checkpoints: the drafters' folders or names
    options: how the drafters are loaded; None means the default options

    Returns (target, drafters). Raises ValueError for a drafter that does not fit the target, for
    int8 with a dtype or device that does not support it, for drafter options without a drafter, and
    for a masked diffusion model as the target.
    """
    from infer.targets.loading import load_configured_target

    if is_masked_diffusion(target_config.path):
        raise ValueError(
            f"target.path={target_config.path} is a masked diffusion model, which cannot be used "
            "with a drafter: give a causal target"
        )
    drafters = _load_drafters(target_config, checkpoints, options or DrafterLoadConfig())
    template_kwargs = target_config.chat_template_kwargs
    for drafter in drafters:
        if not template_kwargs and drafter.config is not None:
            template_kwargs = getattr(drafter.config, "chat_template_kwargs", None) or {}
    target = load_configured_target(replace(target_config, chat_template_kwargs=template_kwargs))
    for drafter in drafters:
        drafter.check_target(target)
    return target, [drafter.to(target.device, target.dtype) for drafter in drafters]


def _load_drafters(
    target_config: TargetConfig, checkpoints: Sequence[str], options: DrafterLoadConfig
) -> list[Any]:
    """Load drafters with the dtype and on the device that the target will have.

    Raises ValueError if options are set but `checkpoints` contains no trained drafter. Prompt
    lookup ("lookup") is not a trained drafter.
    """
    from infer.formats.checkpoint import load_drafter
    from infer.targets.loading import load_config, resolve_device, resolve_dtype

    load_options = dict(vars(options))
    set_options = [
        f"drafter.{name}={value}"
        for name, value in load_options.items()
        if value not in DRAFTER_OPTION_VALUES_WITHOUT_EFFECT
    ]
    if load_options["quantization"] == "auto":
        load_options["quantization"] = target_config.quantization
    has_drafter_model = any(checkpoint != PROMPT_LOOKUP_FAMILY.name for checkpoint in checkpoints)
    if set_options and not has_drafter_model:
        raise ValueError(
            f"{' '.join(set_options)} has no effect, because no drafter is loaded for baseline "
            f"decoding and prompt lookup: remove {' '.join(set_options)}"
        )
    if not checkpoints:
        return []
    config = load_config(target_config.path, target_config.trust_remote_code)
    layers = config.get_text_config().num_hidden_layers
    device = resolve_device(target_config.device)
    dtype = resolve_dtype(target_config.dtype, device)
    return [
        load_drafter(checkpoint, dtype, device, layers, **load_options)
        for checkpoint in checkpoints
    ]
