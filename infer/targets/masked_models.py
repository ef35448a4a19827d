"""The table entry of masked diffusion models, targets that are not causal language models.

This module does not import torch: commands read their options from here before they load anything.
"""

from dataclasses import dataclass
from pkgutil import resolve_name

from infer.utils.optional import is_installed, require_installed


@dataclass(frozen=True)
class OptionalTargetKind:
    """A kind of target besides causal language models, which an optional package decodes: how its
    config.json is recognised, and the package's entry points, as "module:name"."""

    title: str  # for messages
    model_types: tuple[str, ...]  # `model_type` in config.json of models that bring their own code
    config_key: str  # a config.json key with an object that only this kind has
    options_class: str  # dataclass of its decoding options, the section `masked` of a command
    merge_options: str  # (TextOptions, decoding options) -> options of `infer.generate`
    load: str  # (path, dtype, device, trust_remote_code) -> model
    # (model, prompts, EvaluationConfig, decoding options, progress) -> Evaluation
    evaluate: str

    def matches(self, config: dict) -> bool:
        """Return whether the content of a config.json belongs to a model of this kind."""
        has_model_type = config["model_type"].lower() in self.model_types
        return has_model_type or config.get(self.config_key) is not None


MASKED_DIFFUSION_TARGET_KIND = OptionalTargetKind(
    title="masked diffusion model",
    model_types=("llada", "dream"),
    config_key="masked_diffusion",
    options_class="infer.masked.config:MaskedConfig",
    merge_options="infer.masked.config:merge_masked_options",
    load="infer.masked.model:load_masked",
    evaluate="infer.masked.evaluation:evaluate_masked",
)


@dataclass
class NoOptions:
    """The options of an optional package that is not installed: none."""

    def check(self) -> None:
        """Accept the options."""


def masked_diffusion_options_class() -> type:
    """Return the options class of masked diffusion models; `NoOptions` if their package is not
    installed."""
    if is_installed(MASKED_DIFFUSION_TARGET_KIND.options_class):
        return resolve_name(MASKED_DIFFUSION_TARGET_KIND.options_class)
    return NoOptions


def read_config_dict(path: str) -> dict:
    """Read the content of a model's config.json, without the defaults of a config class. Raises
    FileNotFoundError if there is none."""
    from transformers import PretrainedConfig

    from infer.targets.loading import explain_load_errors, resolve_path

    with explain_load_errors(path):
        config, _ = PretrainedConfig.get_config_dict(resolve_path(path))
        if not config.get("model_type"):
            raise OSError(f"{path} has no config.json, or one without model_type")
    return config


def is_masked_diffusion(path: str) -> bool:
    """Return whether a model is a masked diffusion model, by its config.json.

    Raises FileNotFoundError if there is none, and ValueError for a masked diffusion model if the
    package that decodes it is not installed.
    """
    if not MASKED_DIFFUSION_TARGET_KIND.matches(read_config_dict(path)):
        return False
    feature = f"target.path={path}: the decoder for a {MASKED_DIFFUSION_TARGET_KIND.title}"
    require_installed(MASKED_DIFFUSION_TARGET_KIND.load, feature)
    return True
