"""The table entry of masked diffusion models, targets that are no causal language models. No torch
here: commands read their options from here before anything is loaded."""

from dataclasses import dataclass
from pkgutil import resolve_name

from infer.utils.optional import is_installed, require_installed


@dataclass(frozen=True)
class TargetKind:
    """A kind of target beside causal language models: how its config.json is recognised, and what
    commands need of its optional package, as "module:name"."""

    title: str  # for people
    model_types: tuple[str, ...]  # `model_type` of config.json, of models with code of their own
    config_key: str  # an object in config.json that only this kind has
    options_class: str  # how it decodes: the part `masked` of a command's options
    text_options: str  # (TextOptions, these options) -> the options of `infer.generate`
    load: str  # (path, dtype, device, trust_remote_code) -> the model
    evaluate: str  # (model, prompts, EvaluationConfig, these options, progress) -> Evaluation

    def matches(self, config: dict) -> bool:
        """Return whether a config.json is of a model of this kind."""
        return (
            config["model_type"].lower() in self.model_types
            or config.get(self.config_key) is not None
        )


MASKED = TargetKind(
    title="masked diffusion model",
    model_types=("llada", "dream"),
    config_key="masked_diffusion",
    options_class="infer.masked.config:MaskedConfig",
    text_options="infer.masked.config:masked_options",
    load="infer.masked.model:load_masked",
    evaluate="infer.masked.evaluation:evaluate_masked",
)


@dataclass
class NotInstalled:
    """Options of a package that is not in this installation: there are none."""

    def check(self) -> None:
        """Accept what is not there."""


def masked_options_class() -> type:
    """Return the class of a masked diffusion model's options, `NotInstalled` where its package is
    missing."""
    return (
        resolve_name(MASKED.options_class) if is_installed(MASKED.options_class) else NotInstalled
    )


def read_config(path: str) -> dict:
    """Read a model's config.json, unchanged. Raises FileNotFoundError where there is none."""
    from transformers import PretrainedConfig

    from infer.targets.loading import explain_load_errors, resolve_path

    with explain_load_errors(path):
        config, _ = PretrainedConfig.get_config_dict(resolve_path(path))
        if not config.get("model_type"):
            raise OSError(f"{path}: no config.json, or one without model_type")
    return config


def is_masked(path: str) -> bool:
    """Return whether a model is a masked diffusion model, by its config.json. Raises
    FileNotFoundError where there is none, and ValueError for such a model where its package is not
    in this installation."""
    if not MASKED.matches(read_config(path)):
        return False
    require_installed(MASKED.load, f"target.path={path}: what decodes a {MASKED.title}")
    return True
