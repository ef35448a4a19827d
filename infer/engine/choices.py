"""What the target chooses at the nodes of trees, and the log-probabilities of what it chose.

B rows, M tree nodes, W = max depth + 1, D hidden size, V vocabulary.
"""

from collections import abc
from dataclasses import dataclass

import torch

from infer.config import TextOptions
from infer.engine.sampling import SeenAt, adjust, choose, sampled_rows, seen_tokens
from infer.engine.sequence import Sequence, TokenLogprob, text_end
from infer.targets.target import Target
from infer.trees.tree import DraftTree

PIECE = 65  # nodes of a row whose logits are in memory at a time; of many rows fewer, as many as of MANY in all
MANY = 4  # rows


@dataclass(frozen=True)
class RowsAsked:
    """What the rows of a round ask of sampling."""

    options: abc.Sequence[TextOptions]  # empty: all rows are greedy
    start: torch.Tensor  # (B,) positions of the roots
    noise: torch.Tensor | None  # (S, > max depth, V) of the sampled rows
    seen: torch.Tensor | None  # (B, V) the tokens that every row holds, where one has a penalty
    texts: abc.Sequence[Sequence] = ()  # none where the host is not asked: no processors, no grammars, no n-grams


def piece(rows: int) -> int:
    """Return how many nodes of so many rows have their logits in memory at a time."""
    return max(1, PIECE * min(rows, MANY) // rows)


def held_tokens(target: Target, texts: abc.Sequence[Sequence]) -> torch.Tensor | None:
    """Return which tokens every row holds, (B, V) bool; None where no repetition penalty needs them."""
    if all(text.options.repetition_penalty == 1 for text in texts):
        return None
    everything = [text.prompt + text.ids for text in texts]
    return seen_tokens(everything, target.head_weight.shape[0], target.device)


def choose_tokens(
    target: Target,
    tree: DraftTree,
    within: SeenAt | None,
    last: torch.Tensor,
    asked: RowsAsked,
) -> torch.Tensor:
    """Return the target's token after every node with final states (B, M, D), (B, M). Logits are made for a `piece` of
    the nodes at a time, unless processors want to see them."""
    pieces = []
    width = last.shape[1] if any(text.judged for text in asked.texts) else piece(len(last))
    for first in range(0, last.shape[1], width):
        here = slice(first, first + width)
        logits = target.head(last[:, here])  # (B, n, V)
        before = within and (lambda rows, nodes, first=first: within(rows, nodes + first))
        pieces.append(choose(logits, tree.depths[:, here], asked.options, asked.noise, before))
    chosen = torch.cat(pieces, 1) if len(pieces) > 1 else pieces[0]
    order = sampled_rows(asked.options)
    for row, text in enumerate(asked.texts):
        if text.judged:
            own = asked.noise[order.index(row)] if row in order else None  # (> max depth, V)
            prefix = within if text.options.repetition_penalty != 1 else None
            chosen[row] = choose_processed(target, tree, row, text, logits, own, prefix)
    return chosen


def choose_processed(
    target: Target,
    tree: DraftTree,
    row: int,
    text: Sequence,
    logits: torch.Tensor,
    noise: torch.Tensor | None,
    seen: SeenAt | None,
) -> torch.Tensor:
    """Return the same for one row whose logits go through processors or a grammar, (M,). These see the true prefix
    of one node at a time, and so only the nodes on the path that the target takes, as far as the text goes; -1,
    which no child carries, elsewhere. Behind the end of the text the last token stands, which is cut off."""
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
            place = (torch.tensor([[i]], device=scores.device) for i in (row, node))
            scores = adjust(scores[None], [text.options], None if seen is None else seen(*place))[0, 0]  # (V,)
            token = int((scores if noise is None else scores + noise[depth]).argmax())
            ids.append(token)
        chosen[node] = token
        children = (i for i in range(node + 1, len(tokens)) if parents[i] == node and tokens[i] == token)
        node, depth = next(children, None), depth + 1
    return chosen


def logprobs_of(target: Target, last: torch.Tensor, chosen: torch.Tensor, most: int) -> torch.Tensor:
    """Return the target's own log-probabilities at places with final states (B, W, D): of the token that was chosen
    there, (B, W), then of the k = `most` likeliest, then their ids: (B, W, 1 + 2 k) float64."""
    log_probs = target.head(last).float().log_softmax(-1)
    top, ids = log_probs.topk(most, dim=-1)
    return torch.cat([log_probs.gather(2, chosen[..., None]), top, ids.double()], -1)


def note_logprobs(text: Sequence, places: list[list[float]]) -> None:
    """Give a text that asks for them the `logprobs_of` its committed tokens."""
    for of_chosen, *likeliest in places if text.options.logprobs is not None else ():
        half = len(likeliest) // 2
        ranked = zip(map(int, likeliest[half:]), likeliest[:half], strict=True)
        text.logprobs.append(TokenLogprob(of_chosen, list(ranked)[: text.options.logprobs]))
