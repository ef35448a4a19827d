"""Compute how many draft tokens would be accepted if given answers were decoded with a drafter.
This is called a replay, because the answers are not decoded again (infer/evaluation/replay.py).

The hidden states of the target are computed once and reused for every variation, which is a copy of
the drafter with one changed setting. A variation therefore costs only forward passes of the
drafter.

Letters in shapes: T number of tokens of a sequence, D hidden size, V vocabulary size.
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
    """Names one of the target's hidden states that a drafter reads as input.

    layer: index, from 0, of the target layer whose output is read. An index equal to the number of
        layers means the output of the last layer after the final norm.
    normed: whether the norm that follows the layer is applied to the output
    """

    layer: int
    normed: bool = False


@dataclass(frozen=True)
class TargetStates:
    """The hidden states that the target computes for prompts and their answers.

    prompts, answers: token ids
    states: keys are the layers that are read. Values are lists with one tensor per prompt and
        answer, of shape (number of tokens, hidden_size).
    greedy_agreement: share of the answers' tokens that are the target's greedy choice
    """

    prompts: list[list[int]]
    answers: list[list[int]]
    states: dict[FeatureLayer, list[torch.Tensor]]
    greedy_agreement: float


def find_next_norm(target: Target, layer: int) -> torch.nn.Module | None:
    """Return the norm module that is applied to the output of a target layer: `input_layernorm` of
    the next layer, or the final norm after the last layer. Return None if the next layer has no
    module with this name.
    """
    layers = cast(torch.nn.ModuleList, target.decoder.layers)
    if layer + 1 < len(layers):
        return getattr(layers[layer + 1], "input_layernorm", None)
    return getattr(target.decoder, "norm", None)


@torch.inference_mode()
def compute_features_and_agreement(
    target: Target,
    prompts: list[list[int]],
    answers: list[list[int]],
    feature_layers: Sequence[FeatureLayer] = (),
) -> TargetStates:
    """Run the target once over each prompt with its answer. Return its hidden states in the given
    layers, and the share of answer tokens that are its greedy choice.

    prompts, answers: token ids. feature_layers: the hidden states to return.
    """
    layers = tuple(sorted({feature_layer.layer for feature_layer in feature_layers}))
    states: dict[FeatureLayer, list[torch.Tensor]] = {each: [] for each in feature_layers}
    is_target_choice = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = [*prompt, *answer]
        cache = target.allocate_cache(1, len(ids))
        # Run the target with the same functions as in decoding. Other functions would round
        # differently, and int8 quantisation would amplify the differences.
        with cache.add_rows(1) as row:
            output = target.extend_cache([ids], row, layers)
        features = output.layer_features[0].chunk(len(layers) or 1, dim=-1)
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
        ).float()  # (answer tokens, V)
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
    """Compute how many draft tokens would be accepted if the answers were decoded with one chain (a
    draft without branches) per round. Return the numbers of rounds and of accepted draft tokens for
    each answer.

    target_states: prompts, answers, and the target's hidden states for them
    feature_layers: those hidden states that the drafter reads
    uncounted_tokens: rounds that begin within the last `uncounted_tokens` tokens of an answer are
        not counted
    """
    sequences = list(zip(target_states.prompts, target_states.answers, strict=True))
    states = [target_states.states[feature_layer] for feature_layer in feature_layers]
    # one tensor per answer, of shape (T, number of feature layers * D)
    features = [torch.cat(each, dim=-1) for each in zip(*states, strict=True)]
    chain = ReplayVariant("chain", drafter.block_size - 1)
    replayed = replay_sequences(target, drafter, sequences, [chain], features)
    counts = []
    for sequence, answer in zip(replayed, target_states.answers, strict=True):
        countable_tokens = len(answer) - uncounted_tokens
        counts.append(
            count_accepted_drafts(sequence.commits[chain], countable_tokens, chain.node_budget)
        )
    return counts
