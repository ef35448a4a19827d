"""What the target chooses at the nodes of trees, and the walk: the drafted path that it accepts,
and the bonus token after it (DDTree section 4.4).

B rows, M tree nodes, W = max depth + 1, D hidden size, V vocabulary.
"""

from collections import abc
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from infer.engine.sampling import (
    Sampling,
    SeenAt,
    adjust,
    choose,
    round_noise,
    seen_at_nodes,
    seen_tokens,
)
from infer.engine.sequence import Sequence, text_end
from infer.targets.support import PLAIN
from infer.targets.target import Target
from infer.trees.tree import DraftTree

PIECE = 65  # nodes of a row whose logits are in memory at a time; of many rows fewer, as many as of MANY in all
MANY = 4  # rows


@dataclass(frozen=True)
class RowsAsked:
    """What the rows of a round ask of sampling."""

    sampling: Sampling
    start: torch.Tensor  # (B,) the roots' positions
    steps: int  # positions behind them, more than trees are deep
    vocabulary: int
    seen: torch.Tensor | None  # (B, V) the tokens that every row holds, where one has a penalty

    @cached_property
    def noise(self) -> torch.Tensor | None:
        """The noise of all positions, (B, steps, V), where a row is sampled."""
        return self.some_noise(slice(None), 0, self.steps, self.vocabulary)

    def some_noise(
        self, rows: slice, first: int, steps: int, tokens: int | torch.Tensor
    ) -> torch.Tensor | None:
        """Return that of some rows, depths from `first` on, and tokens (`gumbel_noise`)."""
        return round_noise(self.sampling.rows(rows), self.start[rows] + first, steps, tokens)


def sampling_of(
    target: Target, texts: abc.Sequence[Sequence]
) -> tuple[Sampling, torch.Tensor | None]:
    """Return what texts ask of sampling, and which tokens every row holds, (B, V) bool, where a
    penalty needs them."""
    vocabulary = target.vocabulary
    sampling = Sampling.of([text.options for text in texts], vocabulary, target.device)
    seen = (
        seen_tokens([text.known for text in texts], vocabulary, target.device)
        if sampling.kind.penalised
        else None
    )
    return sampling, seen


def texts_ask(
    target: Target, texts: abc.Sequence[Sequence], start: torch.Tensor, depth: int
) -> RowsAsked:
    """Return what texts ask of a round with trees of so much depth behind roots at positions start
    (B,)."""
    sampling, seen = sampling_of(target, texts)
    return RowsAsked(sampling, start, depth + 1, target.vocabulary, seen)


def piece(rows: int) -> int:
    """Return how many nodes of so many rows have their logits in memory at a time."""
    return max(1, PIECE * min(rows, MANY) // rows)


def likeliest(target: Target, last: torch.Tensor) -> torch.Tensor:
    """Return the likeliest token after final states (B, n, D), (B, n)."""
    if target.scale == PLAIN:
        return target.kernels.argmax_head(last, target.model.get_output_embeddings())
    return target.head(last).argmax(-1)


def seen_within(asked: RowsAsked, tree: DraftTree, ancestors: torch.Tensor) -> SeenAt | None:
    """Return a function that finds which tokens the prefixes of nodes hold; None where no row has a
    penalty."""
    if asked.seen is None:
        return None
    return partial(seen_at_nodes, asked.seen, tree.tokens.clamp(min=0), ancestors)


def choose_tokens(
    target: Target, tree: DraftTree, ancestors: torch.Tensor, last: torch.Tensor, asked: RowsAsked
) -> torch.Tensor:
    """Return the target's token after every node with final states (B, M, D), (B, M), on the device
    alone: without logits processors and grammars. Logits are made for a `piece` of the nodes at a
    time."""
    within = seen_within(asked, tree, ancestors)
    width = piece(len(last))
    if within is None and not asked.sampling.kind.sampled:
        flat = last.flatten(0, 1) if tree.real is None else last[tree.real]
        found = torch.cat([likeliest(target, part) for part in flat.split(width * len(last))])
        return (
            found.view(last.shape[:2])
            if tree.real is None
            else tree.tokens.index_put((tree.real,), found)
        )
    pieces = []
    for first in range(0, last.shape[1], width):
        nodes = slice(first, first + width)
        logits = target.head(last[:, nodes])  # (B, n, V)
        seen_here = within and (
            lambda part, first=first: within(slice(part.start + first, part.stop + first))
        )
        pieces.append(choose(logits, tree.depths[:, nodes], asked.sampling, asked.noise, seen_here))
    return torch.cat(pieces, 1) if len(pieces) > 1 else pieces[0]


def rows_for_host(
    texts: abc.Sequence[Sequence], tree: DraftTree, asked: RowsAsked, captured: bool
) -> dict[int, Sequence]:
    """Return the texts whose tokens the host chooses, by batch row: those with logits processors or
    a grammar. On a CPU also all texts of a sampled round, since noise takes as long as a pass
    there, and the host makes it on the target's path alone."""
    sampled = (
        asked.sampling.kind.sampled and asked.seen is None and tree.tokens.device.type == "cpu"
    )
    if sampled and not captured and 1 < tree.tokens.shape[1] <= piece(len(tree.tokens)):
        return dict(enumerate(texts))
    return {row: text for row, text in enumerate(texts) if text.judged}


def choose_on_host(
    target: Target,
    tree: DraftTree,
    ancestors: torch.Tensor,
    last: torch.Tensor,
    asked: RowsAsked,
    texts: dict[int, Sequence],
    chosen: torch.Tensor,
) -> None:
    """Write the target's tokens into the rows of `chosen` (B, M) that belong to `texts`, by batch
    row."""
    if not texts:
        return
    within = seen_within(asked, tree, ancestors)
    rows = list(texts)
    logits = target.head(last if len(rows) == len(last) else last[rows])  # (n, M, V)
    for index, row in enumerate(rows):
        chosen[row] = choose_alone(target, tree, row, texts[row], asked, logits[index], within)


def choose_alone(
    target: Target,
    tree: DraftTree,
    row: int,
    text: Sequence,
    asked: RowsAsked,
    logits: torch.Tensor,
    within: SeenAt | None,
) -> torch.Tensor:
    """Return the target's token after the nodes of one batch row with logits (M, V), (M,): only for
    the nodes on the path that the target takes, as far as the text goes; -1, which no child
    carries, elsewhere. Processors and grammars see the true prefix of one node at a time. Behind
    the end of the text the last token stands, which is cut off."""
    sampling = asked.sampling.rows(slice(row, row + 1))
    tokens = tree.tokens[row].tolist()
    parents = tree.parents[row].tolist()
    chosen = torch.full_like(tree.tokens[row], -1)
    ids = text.ids[:]
    node = 0
    depth = 0
    token = None
    while node is not None:
        if token is None or text_end(ids, len(ids) - 1, text.options, target) is None:
            scores = logits[node][None].to(torch.float32, copy=True)  # theirs to change
            for processor in text.processors:
                scores = processor(torch.tensor([text.prompt + ids], device=scores.device), scores)
            if text.grammar is not None:
                scores = text.grammar.mask(scores, text.ids, ids[len(text.ids) :])
            seen = None if within is None else within(slice(node, node + 1))[row : row + 1]
            scores = adjust(scores[None], sampling, seen)  # (1, 1, V)
            noise = asked.some_noise(slice(row, row + 1), depth, 1, target.vocabulary)
            token = int((scores if noise is None else scores + noise).argmax())
            ids.append(token)
        chosen[node] = token
        children = (
            i for i in range(node + 1, len(tokens)) if parents[i] == node and tokens[i] == token
        )
        node = next(children, None)
        depth = depth + 1
    return chosen


@dataclass(frozen=True)
class Accepted:
    """What a round commits."""

    # (B, W), W = min(max depth, nodes) + 1: node indices from the root down, padded by repeating
    # the last accepted one
    path: torch.Tensor
    lengths: torch.Tensor  # (B,) committed nodes, the root included: 1 .. W
    bonus: torch.Tensor  # (B,) the target's token after the path: the next round's root


def walk(tree: DraftTree, chosen: torch.Tensor, ancestors: torch.Tensor | None = None) -> Accepted:
    """Go from the root to a child as long as a child carries the token that the target chose at the
    node.

    chosen (B, M): the target's token after every node, greedy or sampled: the same rule makes both
    lossless. Stays on the device: a node is reached if it and all its ancestors carry what was
    chosen at their parents, and the deepest of these ends the path.
    """
    if tree.max_depth == 0:
        return Accepted(tree.parents, torch.ones_like(tree.parents[:, 0]), chosen[:, 0])
    ancestors = tree.ancestors() if ancestors is None else ancestors
    match = tree.tokens == chosen.gather(1, tree.parents)  # (B, M)
    match[:, 0] = True
    reached = (match[:, None] | ~ancestors).all(-1)  # (B, M)
    last = (reached * (tree.depths + 1)).argmax(1, keepdim=True)  # (B, 1)
    on_path = ancestors.gather(1, last[..., None].expand(-1, -1, ancestors.shape[-1]))[
        :, 0
    ]  # (B, M)
    deepest = min(
        tree.max_depth, tree.budget
    )  # a path that were longer would not fit into the cache
    depths = torch.where(on_path, tree.depths, deepest + 1)
    nodes = torch.arange(depths.shape[1], device=depths.device).expand_as(depths)
    # node i goes to column depths[i], nodes off the path to a last column, which is dropped
    path = last.expand(-1, deepest + 2).clone().scatter_(1, depths, nodes)[:, :-1]
    return Accepted(path, tree.depths.gather(1, last)[:, 0] + 1, chosen.gather(1, last)[:, 0])
