"""Check that a finished text is what the target alone would have written, and name the cause of a
difference.

In float32 there are no differences. In bfloat16 a pass over a tree rounds differently from a pass
over one token. Where two tokens are equally good to within that rounding, either may be chosen: a
tie. Any other difference is a defect.

V vocabulary, Q positions of a pass.
"""

import torch

from infer.config import TextOptions
from infer.engine.grammar import follow
from infer.engine.sampling import Sampling, choose, round_noise, seen_tokens
from infer.targets.target import Target

CHUNK = 64  # positions of one checking pass
SINGLE = 8  # positions run one by one, to see how the shape of a pass changes rounding


def find_difference(
    target: Target, prompt: list[int], ids: list[int], expected: list[int], options: TextOptions
) -> str | None:
    """Return what the first difference between a text's new tokens and plain decoding's is, "tie"
    or "defect"; None if there is none.

    It is a tie if moving the target's logits there by no more than their rounding lets either token
    be chosen. The rounding is taken to be two steps of the dtype at the largest logit, plus twice
    the change that comes from running the last tokens one by one."""
    if ids == expected:
        return None
    place = next((i for i, (a, b) in enumerate(zip(ids, expected, strict=False)) if a != b), None)
    if place is None:  # one is longer
        return "defect"
    prefix = prompt + ids[:place]
    logits, again = (last_logits(target, prefix, single) for single in (0, SINGLE))
    rounding = 2 * float(logits.abs().max()) * torch.finfo(target.dtype).eps + 2 * float(
        (logits - again).abs().max()
    )
    if (grammar := follow(options, target)) is not None:
        logits = grammar.mask(logits[0], ids[:place], [])[None]
    choice = TargetChoice(logits, len(prefix) - 1, prefix, options)
    return (
        "tie"
        if all(choice.possible(some[place], rounding) for some in (ids, expected))
        else "defect"
    )


class TargetChoice:
    """The target's choice at one position from logits (1, 1, V), and its choice if they were a
    little different."""

    def __init__(
        self, logits: torch.Tensor, position: int, prefix: list[int], options: TextOptions
    ) -> None:
        vocabulary = logits.shape[-1]
        device = logits.device
        self.logits = logits
        self.asked = Sampling.of([options], vocabulary, device)
        self.noise = round_noise(self.asked, torch.tensor([position], device=device), 1, vocabulary)
        self.seen = None
        if self.asked.kind.penalised:
            self.seen = lambda nodes: seen_tokens([prefix], vocabulary, device)[None]  # (1, 1, V)

    def token(self, shift: torch.Tensor | float = 0.0) -> int:
        """Return the chosen token with `shift` added to the logits."""
        depth = torch.zeros(1, 1, dtype=torch.long, device=self.logits.device)
        return int(choose(self.logits + shift, depth, self.asked, self.noise, self.seen))

    def possible(self, token: int, rounding: float) -> bool:
        """Return whether the token could be chosen if no logit moved by more than `rounding`. Tried
        are this token up and all others down and, for the edge of top-p, likelier tokens down and
        the others up."""
        alone = torch.full_like(self.logits, -rounding)
        alone[..., token] = rounding
        edge = torch.where(self.logits > self.logits[..., token, None], -rounding, rounding)
        edge[..., self.token()] = -rounding
        edge[..., token] = rounding
        return token in (self.token(alone), self.token(edge))


@torch.no_grad()
def last_logits(target: Target, ids: list[int], single: int) -> torch.Tensor:
    """Run the target alone over a text, CHUNK positions at a time and the last `single` ones one by
    one; return the logits behind it, (1, 1, V) float32."""
    many = max(0, len(ids) - single)
    with target.cache(1, len(ids)).add(1) as cache:
        for start in (*range(0, many, CHUNK), *range(many, len(ids))):
            end = min(start + CHUNK, many) if start < many else start + 1
            last = target.extend([ids[start:end]], cache, ()).last
    return target.head(last)[:, -1:].float()
