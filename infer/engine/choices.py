"""What the target chooses at the nodes of trees, and the walk: the drafted path that it accepts, and
the bonus token after it (DDTree section 4.4).

B rows, M tree nodes, W = max depth + 1, D hidden size, V vocabulary.
"""

from collections import abc
from dataclasses import dataclass
from functools import cached_property

import torch

from infer.engine.sampling import Sampling, SeenAt, adjust, choose, round_noise, seen_tokens
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
    # none where the host is not asked: no processors, no grammars, no n-grams
    texts: abc.Sequence[Sequence] = ()

    @cached_property
    def noise(self) -> torch.Tensor | None:
        """The noise of all positions, (B, steps, V), where a row is sampled."""
        return self.some_noise(slice(None), 0, self.steps, self.vocabulary)

    def some_noise(self, rows: slice, first: int, steps: int, tokens: int | torch.Tensor) -> torch.Tensor | None:
        """Return that of some rows, depths from `first` on, and tokens (`gumbel_noise`)."""
        return round_noise(self.sampling.rows(rows), self.start[rows] + first, steps, tokens)


def sampling_of(target: Target, texts: abc.Sequence[Sequence]) -> tuple[Sampling, torch.Tensor | None]:
    """Return what texts ask of sampling, and which tokens every row holds, (B, V) bool, where a penalty
    needs them."""
    vocabulary = target.vocabulary
    sampling = Sampling.of([text.options for text in texts], vocabulary, target.device)
    seen = seen_tokens([text.known for text in texts], vocabulary, target.device) if sampling.kind.penalised else None
    return sampling, seen


def texts_ask(target: Target, texts: abc.Sequence[Sequence], start: torch.Tensor, depth: int) -> RowsAsked:
    """Return what texts ask of a round with trees of so much depth behind roots at positions start
    (B,)."""
    sampling, seen = sampling_of(target, texts)
    return RowsAsked(sampling, start, depth + 1, target.vocabulary, seen, texts)


def piece(rows: int) -> int:
    """Return how many nodes of so many rows have their logits in memory at a time."""
    return max(1, PIECE * min(rows, MANY) // rows)


def likeliest(target: Target, last: torch.Tensor) -> torch.Tensor:
    """Return the likeliest token after final states (B, n, D), (B, n)."""
    if target.quantised and target.scale == PLAIN:
        return target.model.get_output_embeddings().product.best(last)
    return target.head(last).argmax(-1)


def choose_tokens(
    target: Target, tree: DraftTree, within: SeenAt | None, last: torch.Tensor, asked: RowsAsked
) -> torch.Tensor:
    """Return the target's token after every node with final states (B, M, D), (B, M). Logits are made
    for a `piece` of the nodes at a time, unless processors want to see them. On a CPU, where noise takes
    as long as a pass, it is made where the target goes alone, see `choose_alone`."""
    pieces, judged, sampled = [], any(text.judged for text in asked.texts), asked.sampling.kind.sampled
    width = last.shape[1] if judged else piece(len(last))
    alone = sampled and within is None and last.device.type == "cpu" and asked.texts and 1 < last.shape[1] <= width
    if within is None and not (sampled or judged):
        flat = last.flatten(0, 1) if tree.real is None else last[tree.real]
        found = torch.cat([likeliest(target, part) for part in flat.split(width * len(last))])
        return found.view(last.shape[:2]) if tree.real is None else tree.tokens.index_put((tree.real,), found)
    for first in range(0, last.shape[1], width):
        here = slice(first, first + width)
        logits = target.head(last[:, here])  # (B, n, V)
        before = within and (lambda nodes, first=first: within(slice(nodes.start + first, nodes.stop + first)))
        pieces.append(choose(logits, tree.depths[:, here], asked.sampling, None if alone else asked.noise, before))
    chosen = torch.cat(pieces, 1) if len(pieces) > 1 else pieces[0]
    for row, text in enumerate(asked.texts):
        if alone or text.judged:
            chosen[row] = choose_alone(target, tree, row, asked, logits, within)
    return chosen


def choose_alone(
    target: Target, tree: DraftTree, row: int, asked: RowsAsked, logits: torch.Tensor, within: SeenAt | None
) -> torch.Tensor:
    """Return the same for one row, (M,): only for the nodes on the path that the target takes, as far as
    the text goes; -1, which no child carries, elsewhere. Processors and grammars see the true prefix of
    one node at a time. Behind the end of the text the last token stands, which is cut off."""
    text, sampling = asked.texts[row], asked.sampling.rows(slice(row, row + 1))
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    chosen = torch.full_like(tree.tokens[row], -1)
    ids, node, depth, token = text.ids[:], 0, 0, None
    while node is not None:
        if token is None or text_end(ids, len(ids) - 1, text.options, target) is None:
            scores = logits[row, node][None].to(torch.float32, copy=True)  # theirs to change
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
        children = (i for i in range(node + 1, len(tokens)) if parents[i] == node and tokens[i] == token)
        node, depth = next(children, None), depth + 1
    return chosen


@dataclass(frozen=True)
class Accepted:
    """What a round commits."""

    path: torch.Tensor  # (B, W) node indices from the root down, padded by repeating the last accepted one
    lengths: torch.Tensor  # (B,) committed nodes, the root included: 1 .. W
    bonus: torch.Tensor  # (B,) the target's token after the path: the next round's root


def walk(tree: DraftTree, chosen: torch.Tensor, ancestors: torch.Tensor | None = None) -> Accepted:
    """Go from the root to a child as long as a child carries the token that the target chose at the
    node.

    chosen (B, M): the target's token after every node, greedy or sampled: the same rule makes both
    lossless. Stays on the device: a node is reached if it and all its ancestors carry what was chosen
    at their parents, and the deepest of these ends the path.
    """
    if tree.max_depth == 0:
        return Accepted(tree.parents, torch.ones_like(tree.parents[:, 0]), chosen[:, 0])
    ancestors = tree.ancestors() if ancestors is None else ancestors
    match = tree.tokens == chosen.gather(1, tree.parents)  # (B, M)
    match[:, 0] = True
    reached = (match[:, None] | ~ancestors).all(-1)  # (B, M)
    last = (reached * (tree.depths + 1)).argmax(1, keepdim=True)  # (B, 1)
    on_path = ancestors.gather(1, last[..., None].expand(-1, -1, ancestors.shape[-1]))[:, 0]  # (B, M)
    depths = torch.where(on_path, tree.depths, tree.max_depth + 1)
    nodes = torch.arange(depths.shape[1], device=depths.device).expand_as(depths)
    # node i goes to column depths[i], nodes off the path to a last column, which is dropped
    path = last.expand(-1, tree.max_depth + 2).clone().scatter_(1, depths, nodes)[:, :-1]
    return Accepted(path, tree.depths.gather(1, last)[:, 0] + 1, chosen.gather(1, last)[:, 0])
