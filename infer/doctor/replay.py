"""Replay chains along given answers. The target's states are computed once; each drafter, or each
way of reading one, then costs passes of the drafter alone.

T: tokens of a sequence, A: tokens of its answer, F: features per position, D: hidden size,
V: vocabulary size
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch

from infer.drafters.base import Drafter
from infer.evaluation.acceptance import count_accepted_drafts
from infer.evaluation.replay import ReplayVariant, replay_sequences
from infer.evaluation.results import AcceptanceCounts
from infer.targets.target import Target


class FeatureLayer(NamedTuple):
    """Where features are read: the output of a target layer, before or after the next norm."""

    # 0-based; the number of layers stands for the last layer's output after the final norm
    layer: int
    normed: bool = False


@dataclass(frozen=True)
class TargetStates:
    """What the target computed for prompts and their answers."""

    prompts: list[list[int]]
    answers: list[list[int]]
    states: dict[FeatureLayer, list[torch.Tensor]]  # (T, D) of each sequence
    agreement: float  # share of the answers' tokens that are the target's own greedy choice


def find_next_norm(target: Target, layer: int) -> torch.nn.Module | None:
    """Return the norm that is applied to a layer's output; None if the model's layers have no norm
    of the usual name."""
    layers = cast(torch.nn.ModuleList, target.decoder.layers)
    if layer + 1 < len(layers):
        return getattr(layers[layer + 1], "input_layernorm", None)
    return getattr(target.decoder, "norm", None)


@torch.inference_mode()
def compute_target_states(
    target: Target,
    prompts: list[list[int]],
    answers: list[list[int]],
    feature_layers: Sequence[FeatureLayer] = (),
) -> TargetStates:
    """Run prompts with their answers through the target once."""
    layers = tuple(sorted({feature_layer.layer for feature_layer in feature_layers}))
    states: dict[FeatureLayer, list[torch.Tensor]] = {each: [] for each in feature_layers}
    is_target_choice = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = [*prompt, *answer]
        cache = target.allocate_cache(1, len(ids))
        # Use decoding's own arithmetic: int8 quantisation amplifies other rounding.
        with cache.add_rows(1) as row:
            output = target.extend_cache([ids], row, layers)
        features = output.context[0].chunk(len(layers) or 1, dim=-1)
        features_by_layer = dict(zip(layers, features, strict=False))
        for feature_layer in feature_layers:
            state = features_by_layer[feature_layer.layer]  # (T, D)
            if feature_layer.normed:
                norm = find_next_norm(target, feature_layer.layer)
                assert norm is not None
                state = norm(state)
            states[feature_layer].append(state)

        logits = target.compute_logits(
            output.last_hidden_states[0, len(prompt) - 1 : -1]
        ).float()  # (A, V)
        answer_ids = torch.tensor(answer, device=logits.device)
        answer_logits = logits.gather(1, answer_ids[:, None])[:, 0]
        is_target_choice += (logits.amax(-1) == answer_logits).tolist()
    agreement = sum(is_target_choice) / max(1, len(is_target_choice))
    return TargetStates(prompts, answers, states, agreement)


def replay_chains(
    target: Target,
    drafter: Drafter,
    target_states: TargetStates,
    feature_layers: Sequence[FeatureLayer],
    uncounted_tokens: int,
) -> list[AcceptanceCounts]:
    """Replay chains along the answers and return the accepted drafts of each answer.

    feature_layers: where the drafter's features are read
    uncounted_tokens: rounds that begin in the last so many tokens of an answer do not count
    """
    sequences = list(zip(target_states.prompts, target_states.answers, strict=True))
    states = [target_states.states[feature_layer] for feature_layer in feature_layers]
    features = [torch.cat(each, dim=-1) for each in zip(*states, strict=True)]  # (T, F)
    chain = ReplayVariant("chain", drafter.block_size - 1)
    replayed = replay_sequences(target, drafter, sequences, [chain], features)
    counts = []
    for sequence, answer in zip(replayed, target_states.answers, strict=True):
        countable_tokens = len(answer) - uncounted_tokens
        counts.append(count_accepted_drafts(sequence.commits[chain], countable_tokens, chain.nodes))
    return counts
