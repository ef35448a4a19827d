"""Variations of a drafter: copies with the same weights, but with one changed setting.

If another engine accepts as many draft tokens as a variation, the engine probably runs the drafter
with the changed setting.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast

import torch

from infer.doctor.replay import FeatureLayer, find_next_norm
from infer.drafters.base import Drafter
from infer.targets.loading import load_int8_package
from infer.targets.support import get_rope_parameters
from infer.targets.target import Target

# rope_theta of common models, among them Qwen2, Qwen3, Llama 3, and Qwen3 with long context.
COMMON_ROPE_THETAS = (10_000.0, 1_000_000.0, 500_000.0, 5_000_000.0, 10_000_000.0)
DEFAULT_ROPE_THETA = 1e4


@dataclass(frozen=True)
class DrafterVariation:
    """A copy of a drafter with one changed setting.

    label: name and value of the changed setting, for the user
    drafter: the drafter; the original one if only `feature_layers` differs
    feature_layers: the target's hidden states that the drafter gets as input
    """

    label: str
    drafter: Drafter
    feature_layers: list[FeatureLayer]


Variations = Iterator[DrafterVariation]


def list_feature_layers(drafter: Drafter) -> list[FeatureLayer]:
    """Return which of the target's hidden states a drafter reads, in the order in which it
    concatenates them."""
    return [FeatureLayer(layer) for layer in drafter.layer_ids]


def copy_with_config(drafter: Drafter, family_keys: dict | None = None, **keys: object) -> Drafter:
    """Return a copy of a drafter with the same weights, but with changed values in its config.json.

    family_keys: new values inside the object of the drafter's family, such as dflash_config
    keys: new values at the top level of config.json
    """
    config = deepcopy(drafter.config)
    family_config = drafter.family_config | (family_keys or {})
    config.update({drafter.family.config_key: family_config} | keys)
    copy = type(drafter)(config)
    if drafter.quantised:
        # Quantisation needs finite weights, so random weights are set first. They are replaced
        # below by those of `drafter`.
        copy.init_weights(torch.Generator())
        load_int8_package().quantise_drafter(copy)
    copy.load_state_dict(drafter.state_dict())
    norm: Any = drafter.norm
    return copy.to(norm.weight.device, norm.weight.dtype).eval().requires_grad_(False)


def count_target_layers(target: Target) -> int:
    """Return the number of decoder layers of the target."""
    return len(cast(torch.nn.ModuleList, target.decoder.layers))


def vary_feature_layers(target: Target, drafter: Drafter) -> Variations:
    """Yield two variations of a drafter: one reads all target hidden states one layer earlier, the
    other one layer later. A variation is left out if the target has no such layer."""
    count = count_target_layers(target)
    for offset in (-1, 1):
        layers = [layer + offset for layer in drafter.layer_ids]
        if all(0 <= layer < count for layer in layers):
            label = f"layers {', '.join(map(str, layers))}"
            yield DrafterVariation(label, drafter, [FeatureLayer(layer) for layer in layers])


def vary_feature_norm(target: Target, drafter: Drafter) -> Variations:
    """Yield a variation of a drafter that reads the target's hidden states after a norm instead of
    before it, or the reverse.

    If the drafter reads the last layer after the final norm, the variation reads this layer before
    the final norm. Otherwise, the drafter reads the outputs of layers, and the variation reads each
    output after the norm with which the next layer begins.
    """
    count = count_target_layers(target)
    if count in drafter.layer_ids:
        layers = [count - 1 if layer == count else layer for layer in drafter.layer_ids]
        feature_layers = [FeatureLayer(layer) for layer in layers]
        yield DrafterVariation("the last layer before the last norm", drafter, feature_layers)
    elif all(find_next_norm(target, layer) is not None for layer in drafter.layer_ids):
        feature_layers = [FeatureLayer(layer, normed=True) for layer in drafter.layer_ids]
        yield DrafterVariation("features after the next norm", drafter, feature_layers)


def make_flag_variation(key: str) -> Callable[[Target, Drafter], Variations]:
    """Return a function for `LowAcceptanceCause.variations` that yields a copy of the drafter in
    which a boolean option has the opposite value.

    key: name of an option of the drafter's family, such as "causal"
    """

    def vary_flag(target: Target, drafter: Drafter) -> Variations:
        if key not in drafter.family.specific_option_names:
            return
        value = drafter.family_config.get(key)
        if key == "causal":
            value = any(causal for causal, _ in drafter.attention_patterns)
        variation = copy_with_config(drafter, {key: not value})
        label = f"{key} {str(not value).lower()}"
        yield DrafterVariation(label, variation, list_feature_layers(drafter))

    return vary_flag


def vary_rope_theta(target: Target, drafter: Drafter) -> Variations:
    """Yield copies of a drafter with other values of rope_theta: that of the target, and those of
    common models."""
    parameters = cast(dict, drafter.config.rope_parameters)
    target_theta = float(get_rope_parameters(target.config).get("rope_theta", DEFAULT_ROPE_THETA))
    for theta in dict.fromkeys([target_theta, *COMMON_ROPE_THETAS]):
        if theta != parameters["rope_theta"]:
            new_parameters = parameters | {"rope_theta": theta}
            variation = copy_with_config(drafter, rope_parameters=new_parameters)
            label = f"rope_theta {theta:g}"
            yield DrafterVariation(label, variation, list_feature_layers(drafter))


def share_first_key_norm(target: Target, drafter: Drafter) -> Variations:
    """Yield a copy of a drafter in which all layers normalise the keys of the context with the
    first layer's norm.

    vLLM 0.32 has this bug on CPUs: its kernel `rms_norm` normalises the keys of all layers at once,
    and reads only the first layer's norm weights.
    """
    if drafter.config.num_hidden_layers <= 1 or "block_size" not in drafter.family_config:
        return
    variation = copy_with_config(drafter)
    layers: Any = variation.layers
    first_norm = layers[0].self_attn.k_norm
    for layer in layers[1:]:
        attention = layer.self_attn
        with_first_norm = deepcopy(attention)
        with_first_norm.k_norm = first_norm

        # The drafter calls this method for the context and for the drafted block. It passes keyword
        # arguments only for the context, whose keys shall have the first layer's norm.
        def compute_keys_values(
            *states: torch.Tensor,
            attention: Any = attention,
            with_first_norm: Any = with_first_norm,
            **context_options: object,
        ) -> object:
            module = with_first_norm if context_options else attention
            return type(attention).project_keys_values(module, *states, **context_options)

        attention.project_keys_values = compute_keys_values
    label = "the first layer's norm for all context keys"
    yield DrafterVariation(label, variation, list_feature_layers(drafter))
