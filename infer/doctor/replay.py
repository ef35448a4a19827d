"""Chains replayed behind texts that are there already: what the target computed of them is computed
once, and each drafter, or each way to read one, costs passes of the drafter alone.

The texts are the target's own greedy answers, so that a replay drafts, accepts and goes on exactly as
decoding does.

B texts, T their tokens, F features of a position, L drafted positions, D hidden size, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from infer.drafters.base import Drafter
from infer.drafters.heads.draft import propose
from infer.evaluation.results import Acceptance
from infer.targets.target import Target, pad_ids
from infer.trees.chain import chain


class Tap(NamedTuple):
    """Where features are read: what a layer puts out, or what the next norm makes of it."""

    layer: int  # as `Target` counts, the number of layers: the last one's states behind the last norm
    normed: bool = False


@dataclass(frozen=True)
class Material:
    """What the target computed of prompts and their answers."""

    prompts: list[list[int]]
    answers: list[list[int]]
    states: dict[Tap, torch.Tensor]  # (B, T, D) each, right of a text's end: padding
    agreement: float  # the share of the answers' tokens that the target itself would choose


def next_norm(target: Target, layer: int) -> torch.nn.Module | None:
    """Return the norm that what a layer puts out goes into, None where the model's layers have none of
    that name."""
    layers = target.body.layers
    if layer + 1 < len(layers):
        return getattr(layers[layer + 1], "input_layernorm", None)
    return getattr(target.body, "norm", None)


@torch.inference_mode()
def compute(target: Target, prompts: list[list[int]], answers: list[list[int]], taps: Sequence[Tap] = ()) -> Material:
    """Run texts through the target once."""
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    layers = tuple(sorted({tap.layer for tap in taps}))
    with target.cache(len(texts), max(map(len, texts))).add(len(texts)) as rows:
        found = target.extend(texts, rows, layers)
    by_layer = dict(zip(layers, found.context.chunk(len(layers), dim=-1), strict=True)) if layers else {}
    states, chosen = {}, []
    for tap in taps:
        state = by_layer[tap.layer]
        states[tap] = next_norm(target, tap.layer)(state) if tap.normed else state
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        last = found.last[row, len(prompt) - 1 : len(prompt) + len(answer) - 1]  # (A, D)
        scores = target.head(last).float()
        own = scores.gather(1, torch.tensor(answer, device=scores.device)[:, None])[:, 0]
        chosen += (scores.amax(-1) == own).tolist()
    return Material(prompts, answers, states, sum(chosen) / max(1, len(chosen)))


@torch.inference_mode()
def replay(target: Target, drafter: Drafter, material: Material, taps: Sequence[Tap], margin: int) -> list[Acceptance]:
    """Draft chains along the answers; return what was accepted, text by text. A round counts if it
    begins before a text's last `margin` tokens."""
    length, rows = drafter.block_size - 1, len(material.answers)
    features = torch.cat([material.states[tap] for tap in taps], dim=-1)  # (B, T, F)
    widths = [len(prompt) for prompt in material.prompts]
    known = pad_ids([[*p, *a] for p, a in zip(material.prompts, material.answers, strict=True)], features.device)
    state = drafter.state(rows, known.shape[1] + length)
    with state.add(rows) as begun:
        width = max(widths)
        drafter.update_context(target, features[:, :width], known[:, :width], widths, begun)
    at = torch.tensor(widths, device=known.device)
    ends = at + torch.tensor([len(answer) for answer in material.answers], device=known.device)
    ahead = torch.arange(1, length + 1, device=known.device)
    rounds, accepted = torch.zeros_like(at), torch.zeros_like(at)[:, None].repeat(1, length)  # (B,), (B, L)
    while (going := at + 1 < ends - margin).any():
        proposal = propose(drafter, target, known.gather(1, at[:, None])[:, 0], state, length)
        tokens = chain(proposal).tokens[:, 1:]  # (B, L)
        places = at[:, None] + ahead
        right = (tokens == known.gather(1, places.clamp(max=known.shape[1] - 1))) & (places < ends[:, None])
        right = right.long().cumprod(1)  # (B, L)
        accepted += right * going[:, None]
        rounds += going
        steps = (right.sum(1) + 1) * going  # (B,)
        counts = steps.tolist()
        where = (at[:, None] + torch.arange(max(counts), device=at.device)).clamp(max=known.shape[1] - 1)  # (B, C)
        context = features.gather(1, where[..., None].expand(-1, -1, features.shape[-1]))
        drafter.update_context(target, context, known.gather(1, where), counts, state)
        at = at + steps
    return [Acceptance(*counts) for counts in zip(rounds.tolist(), accepted.tolist(), strict=True)]
