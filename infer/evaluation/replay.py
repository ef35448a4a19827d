"""Greedy texts replayed: the rounds that decoding them takes, by any tree method and node budget,
without decoding.

A greedy text is what the target writes, whatever drafts. So one pass over the whole text has the
target's features, one block is drafted behind every token of the answer, many at a time, and what a
round would accept there is how far the text itself goes along the tree
(`infer.engine.choices.walk`). Rounds are then steps over these counts. `replay_trees` and
`study_of` ask them whether trees pay.

n texts, P places of an answer, T tokens of a text, L drafted positions, M candidates a position, F
features of a position, R tokens that the drafter knows.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from infer.config import EngineConfig, EvaluationConfig
from infer.drafters.base import DraftedBlock, Drafter, drafted_block, packed_states
from infer.drafters.families import LOOKUP
from infer.drafters.heads.draft import ConditionalDraft, behind
from infer.engine.choices import walk
from infer.evaluation.results import FirstChoices, ReplayedOrder, TreeStudy
from infer.evaluation.ruler import acceptance_length, counted, interval
from infer.targets.target import Target
from infer.trees.ddtree import Marginals
from infer.trees.methods import TREES
from infer.trees.tree import Proposal

ROOM = 1 << 24  # scores of drafted positions that are in memory at a time
AT_ONCE = 128  # blocks at most

Text = tuple[
    Sequence[int], Sequence[int]
]  # token ids of a prompt, and of the target's greedy answer


class Order(NamedTuple):
    """Which of the drafter's candidates a round verifies."""

    method: str  # a row of TREES that drafts and asks no n-grams
    nodes: int  # the budget; of a chain block_size - 1
    by: str = (
        "drafter"  # as it decodes; "marginals": without the conditional head; "ideal": see `ideal`
    )


class Drafts(NamedTuple):
    """Blocks drafted behind P tokens of an answer."""

    bonus: torch.Tensor  # (P,)
    block: DraftedBlock  # (P, L, R)
    ahead: torch.Tensor  # (P, L + 1) the text's own tokens behind the bonus; -1 behind its end
    steps: ConditionalDraft | None  # None: there is no head


class ReplayedText(NamedTuple):
    """The rounds of one text."""

    commits: dict[Order, list[int]]  # tokens committed round by round, the prefill's one first
    # (4, L) int64 by "marginals" and "head", of the reference's rounds: `first_choices`
    choices: dict[str, np.ndarray]


def features_of(target: Target, layers: Sequence[int], text: Text) -> torch.Tensor:
    """Return the features (T, F) of `layers` at every token of a text, by one pass."""
    return target.packed_features(*packed(text, target.device).values(), tuple(layers)).context[0]


def packed(text: Text, device: torch.device) -> dict[str, torch.Tensor]:
    """Return a text as a packed row of one document, (1, T) each."""
    row = torch.tensor([[*text[0], *text[1]]], device=device)
    return {
        "ids": row,
        "positions": torch.arange(row.shape[1], device=device)[None],
        "documents": row * 0,
    }


@torch.no_grad()
def replay(
    target: Target,
    drafter: Drafter,
    texts: Sequence[Text],
    orders: Sequence[Order],
    features: Sequence[torch.Tensor] | None = None,
    reference: Order | None = None,
) -> list[ReplayedText]:
    """Return what every text's rounds commit by each order: what `Sequence.commits` is behind
    decoding, but for rounding; and how good the drafter's first choices are in those of the
    `reference`, one of the orders.

    texts: greedy ones, the answers with their end token if they have one; features: `features_of`
        the
    drafter's `layer_ids`, where they are known. The drafter is one that can be trained."""
    found = []
    for number, text in enumerate(texts):
        context = features[number] if features else features_of(target, drafter.layer_ids, text)
        counts = {order: [] for order in orders}
        choices = defaultdict(list)
        for drafts in drafted(target, drafter, text, context):
            lengths = {order: accepted(drafter, drafts, order) for order in orders}
            for order, length in lengths.items():
                counts[order] += length.tolist()
            for by, places in (
                first_choices(target, drafter, drafts, lengths[reference]) if reference else ()
            ):
                choices[by].append(places)
        rounds = {order: commits(counts[order]) for order in orders}
        starts = np.cumsum([0, *rounds[reference][1:-1]]) if choices else []
        sums = {
            by: torch.cat(parts, 1)[:, starts].sum(1).cpu().numpy() for by, parts in choices.items()
        }
        found.append(ReplayedText(rounds, sums))
    return found


def drafted(
    target: Target, drafter: Drafter, text: Text, context: torch.Tensor
) -> Iterator[Drafts]:
    """Yield the `Drafts` behind all tokens of an answer but the last, in turn, as many at a time as
    there is room for; context (T, F)."""
    rows = packed(text, target.device)
    first = len(text[0])
    length = drafter.block_size - 1
    ids = rows["ids"][0]
    at_once = max(1, min(AT_ONCE, ROOM // (length * target.vocabulary)))
    ahead = F.pad(ids, (0, length + 1), value=-1).unfold(0, length + 1, 1)[1:]  # (T, L + 1)
    for part in (
        torch.arange(first, len(ids) - 1, device=ids.device).split(at_once)
        if len(text[1]) > 1
        else ()
    ):
        states = packed_states(drafter, target, rows, part[None], context[None], drafter)[
            0
        ]  # (P, L, D)
        block = drafted_block(drafter, target, states)
        steps = ConditionalDraft(drafter, target, ids[part], block) if drafter.head_row else None
        yield Drafts(ids[part], block, ahead[part], steps)


def accepted(drafter: Drafter, drafts: Drafts, order: Order) -> torch.Tensor:
    """Return how many drafts a round behind each place accepts, (P,)."""
    row = TREES[order.method]
    width = EngineConfig.width
    known = drafter.vocabulary
    head = drafts.steps if order.by != "marginals" else None
    proposal = Proposal(
        drafts.bonus, drafts.block.marginals, order.nodes, width=width, steps=head, vocabulary=known
    )
    if order.by == "ideal":
        return ideal(proposal, drafts.ahead)
    tree = row.load()(proposal)
    return walk(tree, drafts.ahead.gather(1, tree.depths)).lengths - 1


def ideal(proposal: Proposal, ahead: torch.Tensor) -> torch.Tensor:
    """Return how many drafts are accepted, (P,), where a tree has the best nodes of all that could
    be drawn from its candidates: those on the text's own path, as long as its tokens are among the
    candidates of their positions. No order of the same candidates accepts more."""
    steps = proposal.steps or Marginals(proposal.marginals, proposal.budget, proposal.vocabulary)
    found = (steps.tokens == ahead[:, :-1, None]).any(-1)  # (P, L)
    return found.long().cumprod(1).sum(1).clamp(max=proposal.budget)


def first_choices(
    target: Target, drafter: Drafter, drafts: Drafts, lengths: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield "marginals", and "head" where there is a conditional one, with what rounds behind each
    place that accept `lengths` (P,) drafts say of its likeliest tokens, (4, P, L): at which
    positions it was asked and at which it was right, where all tokens before were its first choices
    (the spine); then both where one was not (behind an accepted sibling). A head is asked behind
    the text's own tokens."""
    ahead = drafts.ahead[:, :-1]  # (P, L)
    scores = {"marginals": drafts.block.marginals}
    if drafter.head_row is not None:
        before = torch.cat([drafts.bonus[:, None], ahead[:, :-1].clamp(min=0)], 1)
        scores["head"] = behind(drafter, target, drafts.block, before)
    reached = (ahead >= 0) & (torch.arange(ahead.shape[1], device=ahead.device) <= lengths[:, None])
    for by, log_q in scores.items():
        right = drafter.vocabulary.ids(log_q.argmax(-1)) == ahead
        spine = F.pad(right[:, :-1], (1, 0), value=True).cumprod(1).bool()
        asked = torch.stack([reached & spine, reached & ~spine])  # (2, P, L)
        yield by, torch.stack([asked, asked & right], 1).flatten(0, 1).long()


def commits(accepted: Sequence[int]) -> list[int]:
    """Return what each round commits, the prefill first, given what one would accept that began
    behind each token of an answer but the last."""
    found = [1]
    place = 0
    while place < len(accepted):
        found.append(min(accepted[place] + 1, len(accepted) - place))
        place += found[-1]
    return found


def replay_trees(
    target: Target, drafter: Drafter, plain: Iterable[Sequence], config: EvaluationConfig
) -> list[ReplayedText]:
    """Replay the chain and DDTrees of every budget along plain decoding's texts: as the drafter
    decodes, by marginals alone, and in the best order; look at first choices in the rounds of the
    largest. Nothing of sampled texts, and by prompt lookup, which drafts no blocks."""
    if config.temperature > 0 or drafter.family is LOOKUP:
        return []
    texts = [(text.prompt, text.ids) for text in plain]
    budgets = config.budgets
    ways = ("drafter", "ideal") if drafter.head_row is None else ("drafter", "marginals", "ideal")
    orders = [Order("chain", drafter.block_size - 1, by) for by in ways[:-1]]
    orders += [Order("ddtree", budget, by) for budget, by in product(budgets, ways)]
    return replay(target, drafter, texts, orders, reference=Order("ddtree", max(budgets)))


def study_of(texts: Sequence[ReplayedText]) -> TreeStudy:
    """Return the figures of replayed texts, with intervals over texts."""
    orders = texts[0].commits
    choices = []
    for by in next((text.choices for text in texts if text.choices), ()):
        counts = np.stack([text.choices[by] for text in texts if text.choices], 2)  # (4, L, n)
        for place, asked, right in zip(
            ("first choices", "a sibling"), counts[::2], counts[1::2], strict=True
        ):
            around = [share_interval(*pair) for pair in zip(asked, right, strict=True)]
            sums = (asked.sum(1).tolist(), right.sum(1).tolist())
            whole = share_interval(asked.sum(0), right.sum(0))
            choices.append(FirstChoices(by, place, *sums, around, whole))
    rows = [
        ReplayedOrder(*order, *acceptance_length(counted(text.commits[order] for text in texts)))
        for order in orders
    ]
    return TreeStudy(
        max(order.nodes for order in orders if order.method == "ddtree"), choices, rows
    )


def share_interval(asked: np.ndarray, right: np.ndarray) -> list[float] | None:
    """Return the interval of a share over texts with these counts (n,)."""
    return interval(
        lambda drawn: right[drawn].sum(-1) / np.maximum(asked[drawn].sum(-1), 1), len(asked)
    )
