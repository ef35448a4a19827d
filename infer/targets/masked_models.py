"""Recognise masked diffusion models (targets that are not causal language models), and name the
functions and classes of the optional package that decodes them.

This module does not import torch, because commands need the options of that package before they
load anything.
"""

from dataclasses import dataclass
from pkgutil import resolve_name

from infer.utils.optional import is_installed, require_installed


@dataclass(frozen=True)
class OptionalTargetKind:
    """A kind of target that is not a causal language model and is decoded by an optional package.
    The fields `options_class`, `merge_options`, `load` and `evaluate` name the package's entry
    points, as "module:name"."""

    title: str  # name of this kind of model in messages
    # Values of `model_type` in config.json that only models of this kind have.
    model_types: tuple[str, ...]
    config_key: str  # key of config.json that only models of this kind have
    # Dataclass of the decoding options, which are the section `masked` of a command's options.
    options_class: str
    merge_options: str  # function (SamplingOptions, decoding options) -> both as one object
    load: str  # function (path, dtype, device, trust_remote_code) -> model
    # Function (model, prompts, EvaluationConfig, decoding options, progress) -> Evaluation.
    evaluate: str

    def matches(self, config: dict) -> bool:
        """Return whether a model is of this kind.

        config: content of the model's config.json
        """
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
    """Stands for the options of an optional package that is not installed. It has no fields."""

    def check(self) -> None:
        """Do nothing, since there are no options to check."""


def masked_diffusion_options_class() -> type:
    """Return the dataclass with the options of masked diffusion models, or `NoOptions` if the
    package that decodes these models is not installed."""
    if is_installed(MASKED_DIFFUSION_TARGET_KIND.options_class):
        return resolve_name(MASKED_DIFFUSION_TARGET_KIND.options_class)
    return NoOptions


def read_model_config_dict(path: str) -> dict:
    """Read the config.json of the model at `path` (the option target.path) as a dictionary, without
    the default values of a config class. Raises FileNotFoundError if the model has no config.json,
    or if config.json has no model_type."""
    from transformers import PretrainedConfig

    from infer.targets.loading import explain_load_errors, resolve_hub_id_or_folder

    with explain_load_errors(path):
        config, _ = PretrainedConfig.get_config_dict(resolve_hub_id_or_folder(path))
        if not config.get("model_type"):
            raise OSError(
                f"{path} has no config.json, or its config.json has no model_type; give a model's "
                "folder or hub id"
            )
    return config


def is_masked_diffusion(path: str) -> bool:
    """Return whether the config.json of the model at `path` (the option target.path) describes a
    masked diffusion model.

    Raises FileNotFoundError if there is no config.json. Raises ValueError if the model is a masked
    diffusion model, but the package that decodes such models is not installed.
    """
    if not MASKED_DIFFUSION_TARGET_KIND.matches(read_model_config_dict(path)):
        return False
    feature = f"target.path={path}: the decoder for a {MASKED_DIFFUSION_TARGET_KIND.title}"
    require_installed(MASKED_DIFFUSION_TARGET_KIND.load, feature)
    return True
