"""Greedy texts replayed: the rounds that decoding them takes, by any tree method and node budget,
without decoding.

A greedy text is what the target writes, whatever drafts. So one pass over the whole text has the
target's features, one block is drafted behind every token of the answer, many at a time, and what a
round would accept there is how far the text itself goes along the tree (`infer.engine.choices.walk`).
Rounds are then steps over these counts.

P places of an answer, T tokens of a text, L drafted positions, M candidates a position, F features of a
position, R tokens that the drafter knows.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from infer.config import EngineConfig
from infer.drafters.base import DraftedBlock, Drafter, drafted_block, packed_states
from infer.drafters.families import LOOKUP
from infer.drafters.heads.draft import ConditionalDraft, behind
from infer.engine.choices import walk
from infer.engine.runner import candidates_of
from infer.evaluation.ruler import interval, pooled
from infer.targets.target import Target
from infer.trees.ddtree import Marginals
from infer.trees.methods import TREES
from infer.trees.tree import Proposal

ROOM = 1 << 24  # scores of drafted positions that are in memory at a time
AT_ONCE = 128  # blocks at most

Text = tuple[Sequence[int], Sequence[int]]  # token ids of a prompt, and of the target's greedy answer


class Order(NamedTuple):
    """Which of the drafter's candidates a round verifies."""

    method: str  # a row of TREES that asks no n-grams
    nodes: int  # the budget; of a chain block_size - 1
    by: str = "drafter"  # as it decodes; "marginals": without the conditional head; "ideal": see `ideal`


@dataclass(frozen=True)
class Drafts:
    """Blocks drafted behind P tokens of an answer."""

    bonus: torch.Tensor  # (P,)
    block: DraftedBlock  # (P, L, R)
    ahead: torch.Tensor  # (P, L + 1) the text's own tokens behind the bonus; -1 behind its end
    steps: Callable[[int], ConditionalDraft | None]  # by the number of candidates; None: there is no head


def features_of(target: Target, layers: Sequence[int], texts: Sequence[Text]) -> list[torch.Tensor]:
    """Return the features (T, F) of `layers` at every token of each text, one pass a text."""
    found = []
    for prompt, answer in texts:
        rows = _packed([*prompt, *answer], target.device)
        found.append(target.packed_features(*rows.values(), tuple(layers)).context[0])
    return found


@dataclass(frozen=True)
class ReplayedText:
    """The rounds of one text."""

    commits: dict[Order, list[int]]  # tokens committed round by round, the prefill's one first
    # (4, L) int64 by "marginals" and "head", of the reference's rounds: `first_choices`
    choices: dict[str, np.ndarray]


@torch.no_grad()
def replay(
    target: Target,
    drafter: Drafter,
    texts: Sequence[Text],
    orders: Sequence[Order],
    features: Sequence[torch.Tensor] | None = None,
    reference: Order | None = None,
) -> list[ReplayedText]:
    """Return what every text's rounds commit by each order: what `Sequence.commits` is behind decoding,
    but for rounding; and how good the drafter's first choices are in those of the `reference`, one of
    the orders.

    texts: greedy ones, the answers with their end token if they have one; features: `features_of` the
    drafter's `layer_ids`, where they are known. Raises ValueError for methods that ask n-grams or draft
    nothing, and for drafters without a network."""
    for order in orders:
        row = TREES.get(order.method)
        if row is None or row.ngrams or not row.drafts:
            known = " or ".join(name for name, row in TREES.items() if row.drafts and not row.ngrams)
            raise ValueError(f"method={order.method} cannot be replayed: use {known}")
    if drafter.family is LOOKUP:
        raise ValueError(f"a {LOOKUP.name} drafter has no features to replay with: give a trained one")
    found = []
    for number, text in enumerate(texts):
        context = features_of(target, drafter.layer_ids, [text])[0] if features is None else features[number]
        counts, choices = defaultdict(list), defaultdict(list)
        for drafts in drafted(target, drafter, text, context):
            lengths = {order: accepted(drafter, drafts, order) for order in orders}
            for order, length in lengths.items():
                counts[order] += length.tolist()
            for by, right in first_choices(target, drafter, drafts).items() if reference else ():
                choices[by].append(count_choices(right, drafts.ahead[:, :-1] >= 0, lengths[reference]))
        rounds = {order: commits(counts[order]) for order in orders}
        starts = np.cumsum([0, *rounds[reference][1:-1]]) if choices else []
        sums = {by: torch.cat(parts, 1)[:, starts].sum(1).cpu().numpy() for by, parts in choices.items()}
        found.append(ReplayedText(rounds, sums))
    return found


def first_choices(target: Target, drafter: Drafter, drafts: Drafts) -> dict[str, torch.Tensor]:
    """Return whether the likeliest token of each position is the text's own, (P, L): by the marginals,
    and by a conditional head behind the text's own tokens."""
    known, ahead = drafter.vocabulary, drafts.ahead
    found = {"marginals": drafts.block.marginals}
    if drafter.head_row is not None:
        before = torch.cat([drafts.bonus[:, None], ahead[:, :-2].clamp(min=0)], 1)  # (P, L)
        found["head"] = behind(drafter, target, drafts.block, before)
    return {by: known.ids(scores.argmax(-1)) == ahead[:, :-1] for by, scores in found.items()}


def count_choices(right: torch.Tensor, there: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return which positions a round behind each place asks for, and at which the first choice is
    right, (4, P, L): both where all tokens before were first choices (the spine), then both where an
    accepted one was not (behind a sibling). right (P, L); there (P, L): the text has a token there;
    lengths (P,): accepted drafts."""
    spine = F.pad(right[:, :-1], (1, 0), value=True).long().cumprod(1).bool()
    asked = there & (torch.arange(right.shape[1], device=right.device) <= lengths[:, None])
    return torch.stack([asked & spine, asked & spine & right, asked & ~spine, asked & ~spine & right]).long()


def drafted(target: Target, drafter: Drafter, text: Text, context: torch.Tensor) -> Iterator[Drafts]:
    """Yield the `Drafts` behind all tokens of an answer but the last, in turn, as many at a time as
    there is room for; context (T, F)."""
    prompt, answer = text
    length, known = drafter.block_size - 1, target.vocabulary
    rows = _packed([*prompt, *answer], target.device)
    ids, first, end = rows["ids"][0], len(prompt), len(prompt) + len(answer) - 1
    ahead = F.pad(ids, (0, length + 1), value=-1).unfold(0, length + 1, 1)[1:]
    for part in torch.arange(first, end, device=ids.device).split(max(1, min(AT_ONCE, ROOM // (length * known)))):
        states = packed_states(drafter, target, rows, part[None], context[None])[0]  # (P, L, D)
        block = drafted_block(drafter, target, states)

        @cache
        def steps(count: int, bonus=ids[part], block=block) -> ConditionalDraft | None:
            return ConditionalDraft(drafter, target, bonus, block, candidates=count) if drafter.head_row else None

        yield Drafts(ids[part], block, ahead[part], steps)


def accepted(drafter: Drafter, drafts: Drafts, order: Order) -> torch.Tensor:
    """Return how many drafts a round behind each place accepts, (P,)."""
    row = TREES[order.method]
    head = drafts.steps(candidates_of(row, order.nodes)) if order.by != "marginals" else None
    known, width = drafter.vocabulary, EngineConfig.width
    proposal = Proposal(drafts.bonus, drafts.block.marginals, order.nodes, width=width, steps=head, vocabulary=known)
    if order.by == "ideal":
        return ideal(proposal, drafts.ahead)
    tree = row.load()(proposal)
    return walk(tree, drafts.ahead.gather(1, tree.depths)).lengths - 1


def ideal(proposal: Proposal, ahead: torch.Tensor) -> torch.Tensor:
    """Return how many drafts are accepted, (P,), where a tree has the best nodes of all that could be
    drawn from its candidates: those on the text's own path, as long as its tokens are among the
    candidates of their positions. No order of the same candidates accepts more."""
    steps = proposal.steps or Marginals(proposal.marginals, proposal.budget, proposal.vocabulary)
    found = (steps.tokens == ahead[:, :-1, None]).any(-1)  # (P, L)
    return found.long().cumprod(1).sum(1).clamp(max=proposal.budget)


def commits(accepted: Sequence[int]) -> list[int]:
    """Return what each round commits, the prefill first, given what one would accept that began behind
    each token of an answer but the last."""
    found, place = [1], 0
    while place < len(accepted):
        found.append(min(accepted[place] + 1, len(accepted) - place))
        place += found[-1]
    return found


def tau(texts: Sequence[Sequence[int]]) -> tuple[float, list[float] | None]:
    """Return the acceptance length of texts by their commits, and its interval over other texts."""
    gains, rounds = np.array([[sum(text) - 1, len(text) - 1] for text in texts], float).T
    return float(pooled(gains, rounds)), interval(lambda drawn: pooled(gains[drawn], rounds[drawn]), len(gains))


def _packed(ids: list[int], device: torch.device) -> dict[str, torch.Tensor]:
    """Return a text as a packed row of one document, (1, T) each."""
    row = torch.tensor([ids], device=device)
    return {"ids": row, "positions": torch.arange(len(ids), device=device)[None], "documents": torch.zeros_like(row)}
