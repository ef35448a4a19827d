"""A round: draft, build, verify, walk, commit. One loop for every method (DDTree section 4.1).

A chain is a tree of width one and plain decoding is a tree with a root alone, so that baselines and
methods are measured by the same code. What differs is handed in.

B rows, M tree nodes, W = max depth + 1, D hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from infer.engine.choices import Accepted, RowsAsked, choose_tokens, walk
from infer.engine.memory import Committed, Memory
from infer.engine.sampling import seen_at_nodes
from infer.targets.target import Features, Target
from infer.trees.tree import DraftTree, Proposal


@dataclass(frozen=True)
class Method:
    """How the trees of a round come about."""

    draft: Callable[[], Proposal]
    build: Callable[[Proposal], DraftTree]
    cut: Callable[[DraftTree], DraftTree] = lambda tree: tree  # to the nodes that are verified


@dataclass(frozen=True)
class RoundResult:
    """What a round finds before anything is committed."""

    whole: DraftTree  # as it was built
    tree: DraftTree  # what was verified of it
    features: Features  # of all nodes
    chosen: torch.Tensor  # (B, M) the target's token after every node
    accepted: Accepted


def run_round(
    memory: Memory, asked: RowsAsked, method: Method, lap: Callable[[str], None] = lambda stage: None
) -> RoundResult:
    """Draft behind the bonus tokens, build trees, verify them in one pass of the target, and walk."""
    proposal = method.draft()
    lap("draft")
    whole = method.build(proposal)
    del proposal  # its marginals are large
    tree = method.cut(whole)
    ancestors = tree.ancestors()  # (B, M, M)
    lap("build")
    features = memory.target.verify(tree, ancestors, memory.cache, memory.layers)
    accepted, chosen = follow_target(memory.target, tree, ancestors, features.last, asked)
    return RoundResult(whole, tree, features, chosen, accepted)


def follow_target(
    target: Target, tree: DraftTree, ancestors: torch.Tensor, last: torch.Tensor, asked: RowsAsked
) -> tuple[Accepted, torch.Tensor]:
    """Return the path that the target takes by final states (B, M, D), and its token after every node,
    (B, M)."""
    within = None if asked.seen is None else partial(seen_at_nodes, asked.seen, tree.tokens.clamp(min=0), ancestors)
    chosen = choose_tokens(target, tree, within, last, asked)
    return walk(tree, chosen, ancestors), chosen


def commit(memory: Memory, found: RoundResult, path: torch.Tensor, counts: list[int] | None) -> None:
    """Keep the first counts[b] nodes of a path (B, W) in the cache, note them for the drafter, and
    begin the next round with the target's token behind them. counts None: the device alone knows
    them."""
    accepted = found.accepted
    memory.cache.commit(path, counts, accepted.lengths)
    if memory.state is not None:
        context = found.features.context
        along = context.gather(1, path[..., None].expand(-1, -1, context.shape[-1]))
        memory.note(Committed(along, found.tree.tokens.gather(1, path), counts, accepted.lengths))
    memory.bonuses[: len(accepted.bonus)] = accepted.bonus  # last: roots may be views of it
