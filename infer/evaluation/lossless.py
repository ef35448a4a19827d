"""Is a text what the target alone would have written? Checked afterwards, and every difference is given its cause.

In float32 there are no differences. In bfloat16 a pass over a tree rounds otherwise than a pass over one token, and
where two tokens are equally good to within that rounding either may be chosen: a tie. Any other difference is a defect.

V vocabulary, Q positions of a pass.
"""

import logging
import math
import random
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch

from infer.config import TextOptions
from infer.engine.sampling import choose, round_noise, seen_tokens
from infer.engine.sequence import Text, text_end
from infer.targets.target import Target

log = logging.getLogger(__name__)

CHUNK = 64  # positions of a pass that checks: others wait no longer than that
SINGLE = 8  # positions run one by one, to see what the shape of a pass changes
MOST_WAITING = 64  # texts that wait to be checked; further ones are not


@dataclass(frozen=True)
class Difference:
    """Where a text leaves the target's own, and why."""

    place: int  # among the new tokens
    written: int | None  # the token there; None: the text ended before it
    expected: int | None  # what plain decoding has there
    gap: float  # how far the two lie apart, in logits (sampled: of the tempered logits with their noise)
    cause: str  # "tie" or "defect"

    def __str__(self) -> str:
        return f"token {self.place} is {self.written} instead of {self.expected}, {self.gap:.3g} apart: a {self.cause}"


def explain(
    target: Target, prompt: list[int], ids: list[int], expected: list[int], options: TextOptions
) -> Difference | None:
    """The first difference between a text's new tokens and what plain decoding wrote, or None. A tie: the target's
    logits there need to move by no more than they are rounded for either token to be chosen. That is taken
    to be two steps of the dtype at the largest logit, and twice what it changes there to run the last tokens singly."""
    if ids == expected:
        return None
    place = next((i for i, (a, b) in enumerate(zip(ids, expected, strict=False)) if a != b), None)
    if place is None:  # one goes on where the other has ended
        place = min(len(ids), len(expected))
        written, wanted = (some[place] if place < len(some) else None for some in (ids, expected))
        return Difference(place, written, wanted, math.inf, "defect")
    prefix, written, wanted = prompt + ids[:place], ids[place], expected[place]
    logits, again = (last_logits(target, prefix, single) for single in (0, SINGLE))
    chosen = Chosen(logits, len(prefix) - 1, prefix, options)
    gap = abs(chosen.score(wanted) - chosen.score(written))
    rounding = 2 * float(logits.abs().max()) * torch.finfo(target.dtype).eps + 2 * float((logits - again).abs().max())
    tie = all(chosen.possible(token, rounding) for token in (written, wanted))
    return Difference(place, written, wanted, gap, "tie" if tie else "defect")


class Chosen:
    """What the target chooses at one position, and what it would with logits (1, 1, V) that are a little different."""

    def __init__(self, logits: torch.Tensor, position: int, prefix: list[int], options: TextOptions) -> None:
        vocabulary, device = logits.shape[-1], logits.device
        self.logits, self.options = logits, options
        self.noise = round_noise([options], torch.tensor([position], device=device), 1, vocabulary)
        self.seen = None
        if options.repetition_penalty != 1:
            self.seen = seen_tokens([prefix], vocabulary, device)[:, None]

    def score(self, token: int) -> float:
        """A token's logit as it is compared with others, filters aside."""
        score = float(self.logits[0, 0, token])
        if self.noise is None:
            return score
        return score / self.options.temperature + float(self.noise[0, 0, token])

    def token(self, shift: torch.Tensor | float = 0.0) -> int:
        depth = torch.zeros(1, 1, dtype=torch.long, device=self.logits.device)
        return int(choose(self.logits + shift, depth, [self.options], self.noise, self.seen))

    def possible(self, token: int, rounding: float) -> bool:
        """Whether the token would be chosen if no logit moved by more than `rounding`: it alone up and all others down,
        or, for a place at the edge of top-p, likelier tokens down and the others up."""
        alone = torch.full_like(self.logits, -rounding)
        alone[..., token] = rounding
        edge = torch.where(self.logits > self.logits[..., token, None], -rounding, rounding)
        edge[..., self.token()] = -rounding
        edge[..., token] = rounding
        return token in (self.token(alone), self.token(edge))


@torch.no_grad()
def passes(target: Target, ids: list[int], single: int = 0) -> Generator[tuple[int, torch.Tensor], None, None]:
    """The target alone over a text, CHUNK positions at a time, the last `single` ones one by one: (first position,
    logits (1, Q, V))."""
    many = max(0, len(ids) - single)
    with target.cache(1, len(ids)).add(1) as cache:
        for start in (*range(0, many, CHUNK), *range(many, len(ids))):
            end = min(start + CHUNK, many) if start < many else start + 1
            yield start, target.head(target.extend([ids[start:end]], cache, ()).last)


def last_logits(target: Target, ids: list[int], single: int) -> torch.Tensor:
    """What follows a text: (1, 1, V) float32."""
    for _, logits in passes(target, ids, single):  # noqa: B007
        pass
    return logits[:, -1:].float()


@torch.no_grad()
def recheck(target: Target, text: Text) -> Generator[None, None, Difference | None]:
    """Asks the target for its choice after every prefix of a finished text, a short pass at each `next`; returns the
    first difference. This is plain decoding's text: it was written from the same prefixes."""
    whole, first, options = text.prompt + text.ids, len(text.prompt), text.options
    for start, logits in passes(target, whole[:-1]):
        width, vocabulary = logits.shape[1], logits.shape[2]
        if start + width >= first:  # position i chooses the token at i + 1
            noise = round_noise([options], torch.tensor([start], device=logits.device), width, vocabulary)
            seen = None
            if options.repetition_penalty != 1:
                prefixes = [whole[: start + i + 1] for i in range(width)]
                seen = seen_tokens(prefixes, vocabulary, logits.device)[None]
            depths = torch.arange(width, device=logits.device)[None]
            tokens = choose(logits, depths, [options], noise, seen)[0].tolist()
            for i in range(max(0, first - start - 1), width):
                place = start + i + 1 - first
                if tokens[i] != text.ids[place]:
                    return explain(target, text.prompt, text.ids, [*text.ids[:place], tokens[i]], options)
        yield
    end = text_end(text.ids, 0, options, target)
    if end != (len(text.ids), text.finish):  # it goes on behind its end, or ended where it does not
        return Difference(len(text.ids), None, None, math.inf, "defect")
    return None


class Watch:
    """Checks a share of finished texts, a short pass at a time, between the rounds of those that are being written.
    `told` hears of every text that was checked."""

    def __init__(self, target: Target, share: float, told: Callable[[Text, Difference | None], None]) -> None:
        self.target, self.share, self.told = target, share, told
        self.waiting: deque[Text] = deque(maxlen=MOST_WAITING)  # the oldest give way
        self.current: tuple[Text, Generator] | None = None
        self.dice = random.Random()

    @property
    def busy(self) -> bool:
        return self.current is not None or bool(self.waiting)

    def offer(self, text: Text) -> None:
        """A finished text that the target would write again: greedy, or sampled with noise of its own seed."""
        if text.finish in ("stop", "length") and self.dice.random() < self.share:
            self.waiting.append(text)

    def step(self) -> None:
        """The next pass of the check under way. What goes wrong in it harms nobody who is served."""
        if self.current is None:
            text = self.waiting.popleft()
            self.current = text, recheck(self.target, text)
        text, check = self.current
        try:
            next(check)
            return
        except StopIteration as done:
            self.told(text, done.value)
        except Exception:
            log.exception("a text could not be checked")
        self.current = None
