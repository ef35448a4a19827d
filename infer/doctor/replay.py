"""Chains replayed along texts that are there already: what the target computed of them is computed
once, and each drafter, or each way to read one, costs passes of the drafter alone.

T tokens of a text, A of its answer, F features of a position, D hidden size, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from infer.drafters.base import Drafter
from infer.evaluation.acceptance import count_accepted
from infer.evaluation.replay import Order, replay
from infer.evaluation.results import Acceptance
from infer.targets.target import Target


class Tap(NamedTuple):
    """Where features are read: what a layer puts out, or what the next norm makes of it."""

    layer: (
        int  # as `Target` counts, the number of layers: the last one's states behind the last norm
    )
    normed: bool = False


@dataclass(frozen=True)
class Material:
    """What the target computed of prompts and their answers."""

    prompts: list[list[int]]
    answers: list[list[int]]
    states: dict[Tap, list[torch.Tensor]]  # (T, D) of each text
    agreement: float  # the share of the answers' tokens that the target itself would choose


def next_norm(target: Target, layer: int) -> torch.nn.Module | None:
    """Return the norm that what a layer puts out goes into, None where the model's layers have none
    of that name."""
    layers = target.body.layers
    if layer + 1 < len(layers):
        return getattr(layers[layer + 1], "input_layernorm", None)
    return getattr(target.body, "norm", None)


@torch.inference_mode()
def compute(
    target: Target, prompts: list[list[int]], answers: list[list[int]], taps: Sequence[Tap] = ()
) -> Material:
    """Run texts through the target once."""
    layers = tuple(sorted({tap.layer for tap in taps}))
    states = {tap: [] for tap in taps}
    chosen = []
    for text in zip(prompts, answers, strict=True):
        ids = [*text[0], *text[1]]
        cache = target.cache(1, len(ids))
        with cache.add(
            1
        ) as row:  # decoding's own arithmetic: int8 codes make much of another rounding
            found = target.extend([ids], row, layers)
        by_layer = dict(zip(layers, found.context[0].chunk(len(layers) or 1, dim=-1), strict=False))
        for tap in taps:
            state = by_layer[tap.layer]  # (T, D)
            states[tap].append(next_norm(target, tap.layer)(state) if tap.normed else state)
        scores = target.head(found.last[0, len(text[0]) - 1 : -1]).float()  # (A, V)
        own = scores.gather(1, torch.tensor(text[1], device=scores.device)[:, None])[:, 0]
        chosen += (scores.amax(-1) == own).tolist()
    return Material(prompts, answers, states, sum(chosen) / max(1, len(chosen)))


def chains(
    target: Target, drafter: Drafter, material: Material, taps: Sequence[Tap], margin: int
) -> list[Acceptance]:
    """Replay chains along the answers, with features of the taps; return what is accepted, text by
    text. A round counts if it begins before a text's last `margin` tokens."""
    texts = list(zip(material.prompts, material.answers, strict=True))
    chain = Order("chain", drafter.block_size - 1)
    # (T, F)
    features = [
        torch.cat(each, dim=-1)
        for each in zip(*(material.states[tap] for tap in taps), strict=True)
    ]
    return [
        count_accepted(found.commits[chain], len(answer) - margin, chain.nodes)
        for found, (_, answer) in zip(
            replay(target, drafter, texts, [chain], features), texts, strict=True
        )
    ]
