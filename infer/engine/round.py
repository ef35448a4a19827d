"""A decoding round: draft, build the tree, verify, walk, commit (DDTree section 4.1).

All methods share this loop. A chain is a tree of width one, and baseline decoding is a tree with
only a root, so that baselines and methods are measured by the same code. `RoundPlan` holds what
differs between methods.

A round has three stages that run on the device without a synchronisation: `draft_trees`,
`verify_trees` and `commit_round`. Between the stages, the host rebuilds the trees of sequences with
a grammar, and chooses the tokens of sequences with a grammar or logits processors. Other batch rows
are not affected.

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

# (name of a stage, its function) -> the function's result
StageRunner = Callable[[str, Callable[[], Any]], Any]


def run_stage_directly(stage: str, function: Callable[[], Any]) -> Any:
    """Run a stage of a round without a CUDA graph."""
    return function()


def ignore_lap(stage: str) -> None:
    """Do not time the stages."""


@dataclass(frozen=True)
class RoundPlan:
    """The steps of a round that depend on the method and on the sequences."""

    make_sampling: Callable[[], SamplingBatch]
    draft: Callable[[SamplingBatch], Proposal]
    build_trees: Callable[[Proposal], DraftTree]
    # Reduces trees to the nodes that are verified.
    prune: Callable[[DraftTree], DraftTree] = lambda tree: tree
    # Rebuilds the trees of sequences with a grammar on the host. None: no sequence has a grammar.
    constrain: Callable[[DraftTree, Proposal], DraftTree] | None = None
    # The sequences of all rows, whose tokens may be chosen on the host. Empty: the device chooses.
    sequences: abc.Sequence[Sequence] = ()
    returns_log_probs: bool = False  # whether the outcome includes those of all drafted nodes


class DraftedTrees(NamedTuple):
    """The result of `draft_trees`."""

    sampling: SamplingBatch
    proposal: Proposal | None  # only if trees may be rebuilt, since marginals are large
    full_tree: DraftTree  # before pruning


class VerifiedTrees(NamedTuple):
    """The result of `verify_trees`."""

    tree: DraftTree  # after pruning
    ancestors: torch.Tensor  # (B, M, M) bool
    features: Features  # of all nodes
    target_tokens: torch.Tensor  # (B, M) the target's token after every node


class RoundResult(NamedTuple):
    """The result of a round that is committed on the device. The caller has to call
    `BatchState.note_lengths` next."""

    tree: DraftTree
    accepted: AcceptedPath
    packed_outcomes: torch.Tensor  # see `pack_outcomes`
    num_log_probs: int  # number of nodes whose log-probabilities the outcome includes


def run_round(
    state: BatchState,
    plan: RoundPlan,
    lap: Callable[[str], None] = ignore_lap,
    run_stage: StageRunner = run_stage_directly,
) -> RoundResult:
    """Run a round.

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
    # The device skips its choice only if the host chooses the tokens of all rows.
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
    """Draft after the bonus tokens and build the trees."""
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
    """Copy a tree into the tensors of another one of the same shape, from which the captured stages
    read."""
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
    """Verify the trees in one pass of the target, and choose its token after every node.

    Without `choose_on_device` all tokens are NO_TOKEN, and the host has to choose them.
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
    """Walk from the roots along the target's tokens, commit the path, and pack the outcome for the
    host."""
    tree, ancestors, features, target_tokens = verified
    accepted = walk(tree, target_tokens, ancestors)
    if accepted.path.device.type == "cpu" and not state.cache.padded_batch_size:
        # Reading a length needs no synchronisation here: drop columns that no row commits.
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
