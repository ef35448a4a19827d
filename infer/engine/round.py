"""A decoding round (DDTree section 4.1). It drafts, builds the trees, verifies them in one pass of
the target, walks along the accepted nodes, and commits these nodes.

All methods share this code, so that the baseline and the methods are measured alike. A chain is a
tree of width one. In baseline decoding a tree consists of the root alone. `RoundPlan` holds what
differs between methods.

A round has three stages that run on the device without a synchronisation: `draft_trees`,
`verify_trees` and `commit_round`. Between the stages, the host rebuilds the trees of sequences with
a grammar, and chooses the tokens of sequences with a grammar or logits processors. This does not
affect other batch rows.

B batch rows, M tree nodes, W = maximum number of nodes on a path, D hidden size.
"""

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from infer.engine.batch_state import BatchState
from infer.engine.round_outcome import pack_outcomes
from infer.engine.sequence import Sequence
from infer.engine.verification import (
    NO_TOKEN,
    AcceptedPath,
    SamplingBatch,
    choose_tokens,
    choose_tokens_on_host,
    select_host_rows,
    walk,
)
from infer.targets.target import Features
from infer.trees.tree import DraftTree, Proposal

# Runs one stage. Arguments: the stage's name and the stage's function. Result: that of the
# function.
StageRunner = Callable[[str, Callable[[], Any]], Any]


def run_stage_directly(stage: str, function: Callable[[], Any]) -> Any:
    """Call the function of a stage directly, without a CUDA graph."""
    return function()


def ignore_lap(stage: str) -> None:
    """Do nothing when a stage ends: used if the stages are not timed."""


@dataclass(frozen=True)
class RoundPlan:
    """The steps of a round that depend on the method and on the sequences.

    `make_sampling` returns the sampling options, `draft` runs the drafter, and `build_trees` is the
    tree method.
    """

    make_sampling: Callable[[], SamplingBatch]
    draft: Callable[[SamplingBatch], Proposal]
    build_trees: Callable[[Proposal], DraftTree]
    # Reduces the built trees to the nodes that are verified.
    prune: Callable[[DraftTree], DraftTree] = lambda tree: tree
    # Rebuilds on the host the trees of sequences with a grammar. None: no sequence has a grammar.
    constrain: Callable[[DraftTree, Proposal], DraftTree] | None = None
    # The sequences of all batch rows, if the host may choose tokens; empty if the device chooses
    # all.
    sequences: abc.Sequence[Sequence] = ()
    returns_log_probs: bool = False  # whether the outcome has all nodes' log-probabilities


class DraftedTrees(NamedTuple):
    """The result of `draft_trees`: the draft trees before verification."""

    sampling: SamplingBatch
    proposal: Proposal | None  # None unless trees may be rebuilt, since marginals are large
    full_tree: DraftTree  # the trees before pruning


class VerifiedTrees(NamedTuple):
    """The result of `verify_trees`: the pruned trees and the target's tokens."""

    tree: DraftTree  # the trees after pruning
    ancestors: torch.Tensor  # (B, M, M) bool, see `DraftTree.ancestors`
    features: Features  # the target's features of all nodes
    target_tokens: torch.Tensor  # (B, M) the target's token after every node


class RoundResult(NamedTuple):
    """The result of a round. The round is committed on the device, and the caller has to call
    `BatchState.note_lengths` next."""

    tree: DraftTree
    accepted: AcceptedPath
    packed_outcomes: torch.Tensor  # see `pack_outcomes`
    num_log_probs: int  # number of nodes per row whose log-probabilities the outcome has


def run_round(
    state: BatchState,
    plan: RoundPlan,
    lap: Callable[[str], None] = ignore_lap,
    run_stage: StageRunner = run_stage_directly,
) -> RoundResult:
    """Run one decoding round for all batch rows in use.

    `lap` is called with "draft" and "build" when these steps end. `run_stage` runs the stages
    "draft", "verify" and "commit", for example as CUDA graphs.
    """
    drafted = run_stage("draft", partial(draft_trees, state, plan, lap))

    if plan.constrain is not None:
        constrained_tree = plan.constrain(drafted.full_tree, drafted.proposal)
        overwrite_tree(drafted.full_tree, constrained_tree)
        drafted = drafted._replace(proposal=None)

    is_captured = bool(state.cache.padded_batch_size)
    host_sequences = select_host_rows(
        plan.sequences, drafted.full_tree, drafted.sampling, is_captured
    )
    # The device does not choose tokens if the host chooses the tokens of all rows.
    all_on_host = bool(host_sequences) and len(host_sequences) == len(plan.sequences)
    choose_on_device = is_captured or not all_on_host
    verified = run_stage(
        "verify", partial(verify_trees, state, plan, drafted, choose_on_device, lap)
    )

    choose_tokens_on_host(
        state.target,
        verified.tree,
        verified.ancestors,
        verified.features.last_hidden_states,
        drafted.sampling,
        host_sequences,
        verified.target_tokens,
    )
    return run_stage("commit", partial(commit_round, state, plan, drafted, verified))


def draft_trees(state: BatchState, plan: RoundPlan, lap: Callable[[str], None]) -> DraftedTrees:
    """Draft the positions after the bonus tokens, and build the trees."""
    sampling = plan.make_sampling()
    proposal = plan.draft(sampling)
    lap("draft")

    tree = plan.build_trees(proposal)
    if plan.constrain is None:
        return DraftedTrees(sampling, None, tree)
    conditionals = proposal.conditionals
    if conditionals is not None and not conditionals.recurrent:
        # The table is computed on first access, which must happen inside this stage.
        _ = conditionals.table
    return DraftedTrees(sampling, proposal, tree)


def overwrite_tree(tree: DraftTree, new_tree: DraftTree) -> None:
    """Copy `new_tree` into the tensors of `tree`, which has the same shape. Stages that were
    recorded as CUDA graphs read the tensors of `tree`."""
    tree.tokens.copy_(new_tree.tokens)
    tree.parents.copy_(new_tree.parents)
    tree.depths.copy_(new_tree.depths)
    tree.log_probs.copy_(new_tree.log_probs)


def verify_trees(
    state: BatchState,
    plan: RoundPlan,
    drafted: DraftedTrees,
    choose_on_device: bool,
    lap: Callable[[str], None],
) -> VerifiedTrees:
    """Verify the trees in one pass of the target, and choose the target's token after every node.

    Without `choose_on_device` all tokens are NO_TOKEN, and the host has to choose the tokens.
    """
    target = state.target
    tree = plan.prune(drafted.full_tree)
    ancestors = tree.ancestors()  # (B, M, M)
    lap("build")

    features = target.verify(tree, ancestors, state.cache, state.feature_layers)
    if choose_on_device:
        target_tokens = choose_tokens(
            target, tree, ancestors, features.last_hidden_states, drafted.sampling
        )
    else:
        target_tokens = torch.full_like(tree.tokens, NO_TOKEN)
    return VerifiedTrees(tree, ancestors, features, target_tokens)


def commit_round(
    state: BatchState, plan: RoundPlan, drafted: DraftedTrees, verified: VerifiedTrees
) -> RoundResult:
    """Walk from the roots along the target's tokens, commit the accepted nodes, and pack the
    outcome of the round for the host."""
    tree, ancestors, features, target_tokens = verified
    accepted = walk(tree, target_tokens, ancestors)
    if accepted.path.device.type == "cpu" and not state.cache.padded_batch_size:
        # On the CPU reading a length needs no synchronisation: drop columns that no row commits.
        max_length = int(accepted.lengths.max())
        accepted = replace(accepted, path=accepted.path[:, :max_length])

    log_probs = drafted.full_tree.log_probs if plan.returns_log_probs else None
    num_logprobs = drafted.sampling.tensors.kind.num_logprobs
    packed_outcomes = pack_outcomes(
        state.target,
        tree,
        features.last_hidden_states,
        target_tokens,
        accepted,
        num_logprobs,
        log_probs,
    )

    seen = drafted.sampling.seen
    if seen is not None:
        seen.scatter_(1, tree.tokens.gather(1, accepted.path), True)
        seen.scatter_(1, accepted.bonus[:, None], True)
    state.commit(tree, features, accepted)
    num_log_probs = 0 if log_probs is None else log_probs.shape[1]
    return RoundResult(tree, accepted, packed_outcomes, num_log_probs)
