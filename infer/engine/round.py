"""A round: draft, build, verify, walk, commit. One loop for every method (DDTree section 4.1).

A chain is a tree of width one and plain decoding is a tree with a root alone, so that baselines and
methods are measured by the same code. What differs is handed in.

A round has three stages, each of which the device computes without the host: `draft_trees`,
`verify_trees` and `commit_round`. Between them the host builds the trees of texts with a grammar,
and chooses the tokens of texts with a grammar or logits processors; the other rows are not touched.

B rows, M tree nodes, W = most nodes on a path, D hidden size.
"""

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from infer.engine.choices import (
    Accepted,
    RowsAsked,
    choose_on_host,
    choose_tokens,
    rows_for_host,
    walk,
)
from infer.engine.memory import Memory
from infer.engine.packet import pack
from infer.engine.sequence import Sequence
from infer.targets.target import Features
from infer.trees.tree import DraftTree, Proposal


def call(stage: str, function: Callable[[], object]) -> object:
    """Run a stage of a round as it is."""
    return function()


def no_lap(stage: str) -> None:
    """Time nothing."""


@dataclass(frozen=True)
class RoundPlan:
    """What a round does, and what the host has a say in."""

    ask: Callable[[], RowsAsked]  # what the rows ask of sampling
    draft: Callable[[RowsAsked], Proposal]
    build: Callable[[Proposal], DraftTree]
    cut: Callable[[DraftTree], DraftTree] = lambda tree: tree  # to the nodes that are verified
    # the trees with those of texts with a grammar built anew, on the host; None where no text has
    # one
    constrain: Callable[[DraftTree, Proposal], DraftTree] | None = None
    # the rows' texts, of which the host may choose tokens; none where it is not to be asked
    texts: abc.Sequence[Sequence] = ()
    log_probs: bool = False  # tell those of all nodes that were found


class DraftedTrees(NamedTuple):
    """What `draft_trees` leaves to the next stages."""

    asked: RowsAsked
    proposal: Proposal | None  # where trees may be built anew: its marginals are large
    whole: DraftTree  # as it was built


class VerifiedTrees(NamedTuple):
    """What `verify_trees` leaves to the next stages."""

    tree: DraftTree  # what was verified
    ancestors: torch.Tensor  # (B, M, M)
    features: Features  # of all nodes
    chosen: torch.Tensor  # (B, M) the target's token after every node


class RoundResult(NamedTuple):
    """A round that is committed on the device. `Memory.note_lengths` is to follow."""

    tree: DraftTree
    accepted: Accepted
    packet: torch.Tensor  # see `pack`
    log_probs: int  # of how many nodes it tells the log-probabilities


def run_round(
    memory: Memory,
    plan: RoundPlan,
    lap: Callable[[str], None] = no_lap,
    run: Callable[[str, Callable[[], object]], object] = call,
) -> RoundResult:
    """Run a round. `lap` is told the ends of its parts; `run` runs a stage by its name, as a CUDA
    graph for example."""
    drafted = run("draft", partial(draft_trees, memory, plan, lap))
    if plan.constrain is not None:
        write_tree(drafted.whole, plan.constrain(drafted.whole, drafted.proposal))
        drafted = drafted._replace(proposal=None)
    captured = bool(memory.cache.fixed_rows)
    texts = rows_for_host(plan.texts, drafted.whole, drafted.asked, captured)
    on_device = captured or len(texts) < len(plan.texts) or not texts
    verified = run("verify", partial(verify_trees, memory, plan, drafted, on_device, lap))
    tree, ancestors, features, chosen = verified
    choose_on_host(memory.target, tree, ancestors, features.last, drafted.asked, texts, chosen)
    return run("commit", partial(commit_round, memory, plan, drafted, verified))


def draft_trees(memory: Memory, plan: RoundPlan, lap: Callable[[str], None]) -> DraftedTrees:
    """Draft behind the bonus tokens, and build trees."""
    asked = plan.ask()
    proposal = plan.draft(asked)
    lap("draft")
    whole = plan.build(proposal)
    if plan.constrain is None:
        return DraftedTrees(asked, None, whole)
    if proposal.steps is not None and not proposal.steps.recurrent:
        _ = proposal.steps.table  # made when it is first asked for, which must be in this stage
    return DraftedTrees(asked, proposal, whole)


def write_tree(tree: DraftTree, new: DraftTree) -> None:
    """Write a tree of the same shape into the memory of another, where the next stages read it."""
    for part in ("tokens", "parents", "depths", "log_probs"):
        getattr(tree, part).copy_(getattr(new, part))


def verify_trees(
    memory: Memory,
    plan: RoundPlan,
    drafted: DraftedTrees,
    on_device: bool,
    lap: Callable[[str], None],
) -> VerifiedTrees:
    """Verify the trees in one pass of the target, and choose its token after every node; -1 where
    that is left to the host (not `on_device`)."""
    target = memory.target
    tree = plan.cut(drafted.whole)
    ancestors = tree.ancestors()  # (B, M, M)
    lap("build")
    features = target.verify(tree, ancestors, memory.cache, memory.layers)
    if on_device:
        chosen = choose_tokens(target, tree, ancestors, features.last, drafted.asked)
    else:
        chosen = torch.full_like(tree.tokens, -1)
    return VerifiedTrees(tree, ancestors, features, chosen)


def commit_round(
    memory: Memory, plan: RoundPlan, drafted: DraftedTrees, verified: VerifiedTrees
) -> RoundResult:
    """Walk from the roots along what the target chose, commit the path, and pack what the host is
    told."""
    tree, ancestors, features, chosen = verified
    asked = drafted.asked
    accepted = walk(tree, chosen, ancestors)
    if accepted.path.device.type == "cpu" and not memory.cache.fixed_rows:
        # the host can look at what the device knows: what no row commits is not copied
        accepted = replace(accepted, path=accepted.path[:, : int(accepted.lengths.max())])
    log_probs = drafted.whole.log_probs if plan.log_probs else None
    packet = pack(
        memory.target,
        tree,
        features.last,
        chosen,
        accepted,
        asked.sampling.kind.logprobs,
        log_probs,
    )
    if asked.seen is not None:
        asked.seen.scatter_(1, tree.tokens.gather(1, accepted.path), True)
        asked.seen.scatter_(1, accepted.bonus[:, None], True)
    memory.commit(tree, features, accepted)
    return RoundResult(tree, accepted, packet, 0 if log_probs is None else log_probs.shape[1])
