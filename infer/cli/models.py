"""What several commands need: options, and loading target and drafter."""

from dataclasses import dataclass, field, replace
from pkgutil import resolve_name
from typing import ClassVar

from infer.config import LoadedConfig, TargetConfig, TextOptions
from infer.drafters.families import LOOKUP
from infer.targets.kinds import MASKED, is_masked, masked_options_class
from infer.utils.checks import check_parts

MaskedConfig = masked_options_class()


@dataclass
class OfTarget:
    """Options of a command for a target. FROM_RUN: parts that are those of the checkpoint's run,
    unless they are given.

    target: see TargetConfig in infer/config.py
    """

    FROM_RUN: ClassVar = ("target",)
    target: TargetConfig = field(default_factory=TargetConfig, kw_only=True)

    def check(self) -> None:
        """Raise ValueError for options that cannot be followed."""
        check_parts(self)


@dataclass
class OfDrafter(OfTarget):
    """Options of a command that decodes with a drafter.

    drafter: see LoadedConfig in infer/config.py
    """

    drafter: LoadedConfig = field(default_factory=LoadedConfig, kw_only=True)


def text_options(place: TargetConfig, decoding: TextOptions, masked: MaskedConfig) -> TextOptions:
    """Return how texts are decoded with this kind of model. Raises ValueError for what a masked one
    cannot follow."""
    if is_masked(place.path):
        return resolve_name(MASKED.text_options)(decoding, masked)
    return decoding


def load(place: TargetConfig, checkpoint: str | None, options: LoadedConfig | None = None):
    """Load target and drafter, the drafter in the target's dtype; None for what has no drafter: no
    checkpoint, or a masked diffusion model. `options` of the drafter. Raises ValueError as
    `load_all`."""
    if is_masked(place.path):
        load_masked = resolve_name(MASKED.load)
        return load_masked(place.path, place.dtype, place.device, place.trust_remote_code), None
    target, drafters = load_all(place, [] if checkpoint is None else [checkpoint], options)
    return target, next(iter(drafters), None)


def load_all(place: TargetConfig, checkpoints: list[str], options: LoadedConfig | None = None):
    """Load a causal target and drafters for it, in its dtype. The drafters are opened first,
    because a mistake in one costs less time; how their target was asked in training
    (`chat_template_kwargs`) is how it is asked here, unless the target's options say otherwise: as
    for the first that says so. Raises ValueError for a drafter that does not fit or that this
    target's dtype or device has no int8 products for, for options that change nothing, and for a
    masked diffusion model."""
    from infer.formats.checkpoint import load_drafter
    from infer.targets.loading import load_config, open_target, resolve_device, resolve_dtype

    if is_masked(place.path):
        raise ValueError(f"target.path={place.path}: a masked diffusion model has no drafter")
    drafters = []
    asked = vars(options or LoadedConfig()).copy()
    given = [
        f"drafter.{name}={value}"
        for name, value in asked.items()
        if value not in (None, "none", "auto")
    ]
    if asked["quantization"] == "auto":
        asked["quantization"] = place.quantization
    if given and not {*checkpoints} - {LOOKUP.name}:
        raise ValueError(
            f"{' '.join(given)}: leave it out, plain decoding and lookup have no use for it"
        )
    if checkpoints:
        layers = (
            load_config(place.path, place.trust_remote_code).get_text_config().num_hidden_layers
        )
        device = resolve_device(place.device)
        kind = resolve_dtype(place.dtype, device)
        drafters = [
            load_drafter(checkpoint, kind, device, layers, **asked) for checkpoint in checkpoints
        ]
    configs = [drafter.config for drafter in drafters if drafter.config is not None]
    ways = [
        place.chat_template_kwargs,
        *(getattr(config, "chat_template_kwargs", None) for config in configs),
    ]
    model = open_target(replace(place, chat_template_kwargs=next(filter(None, ways), {})))
    for drafter in drafters:
        drafter.check_target(model)
    return model, [drafter.to(model.device, model.dtype) for drafter in drafters]
