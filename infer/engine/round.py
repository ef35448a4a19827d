"""A decoding round (DDTree section 4.1). It drafts tokens, builds the draft trees, verifies them in
one forward pass of the target, finds the path of accepted nodes, and commits these nodes.

All methods share this code, so that the baseline and the methods are measured alike. In baseline
decoding a tree consists of the root alone, and a chain is a tree in which every node has one child.
`RoundPlan` holds what differs between methods.

A round has three stages that run on the device without a GPU-to-CPU synchronisation: `draft_trees`,
`verify_trees` and `commit_round`. Between the stages, the host rebuilds the trees of sequences with
a grammar, and chooses the tokens of sequences with a grammar or logits processors. This does not
affect other batch rows.
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
    select_host_sequences,
    walk,
)
from infer.targets.target import Features
from infer.trees.tree import DraftTree, Proposal

# Takes the name of a stage and a function without arguments. Calls the function, perhaps as a CUDA
# graph, and returns the function's result.
StageRunner = Callable[[str, Callable[[], Any]], Any]


def run_stage_directly(stage: str, function: Callable[[], Any]) -> Any:
    """Call `function` directly, without a CUDA graph, and return its result."""
    return function()


def ignore_lap(stage: str) -> None:
    """Do nothing. This stands in for `Stopwatch.lap` if the stages are not timed."""


@dataclass(frozen=True)
class RoundPlan:
    """The parts of a round that depend on the decoding method and on the sequences.

    `make_sampling` returns the sampling options and the sampling noise, `draft` runs the drafter,
    and `build_trees` builds the draft trees from the drafter's output.
    """

    make_sampling: Callable[[], SamplingBatch]
    draft: Callable[[SamplingBatch], Proposal]
    build_trees: Callable[[Proposal], DraftTree]
    # Removes the nodes that are not worth verifying.
    prune: Callable[[DraftTree], DraftTree] = lambda tree: tree
    # Rebuilds the trees of sequences with a grammar, on the host. None if no sequence has a
    # grammar.
    constrain_to_grammars: Callable[[DraftTree, Proposal], DraftTree] | None = None
    # The sequence of every batch row, if the host chooses tokens of some rows. Empty if the device
    # chooses all tokens.
    sequences: abc.Sequence[Sequence] = ()
    # whether `packed_outcomes` contains the nodes' log-probabilities
    returns_node_log_probs: bool = False


class DraftedTrees(NamedTuple):
    """The result of `draft_trees`: the draft trees before pruning and verification."""

    sampling: SamplingBatch
    # the drafter's output; None unless `RoundPlan.constrain_to_grammars` needs it, because it takes
    # much memory
    proposal: Proposal | None
    full_tree: DraftTree  # the draft trees with all nodes, before pruning


class VerifiedTrees(NamedTuple):
    """The result of `verify_trees`: the pruned trees, and the tokens that the target chose."""

    tree: DraftTree  # the draft trees without the pruned nodes
    ancestors: torch.Tensor  # (B, num_nodes, num_nodes) bool, see `DraftTree.build_ancestor_mask`
    features: Features  # the target's hidden states at all nodes
    target_tokens: torch.Tensor  # (B, num_nodes): the target's token after each node


class RoundResult(NamedTuple):
    """The trees and accepted nodes of a round. The nodes are already committed to the KV cache. The
    caller must call `BatchState.record_committed_counts` next, so that the host knows their
    number."""

    tree: DraftTree
    accepted: AcceptedPath
    packed_outcomes: torch.Tensor  # what the host needs, as one tensor; see `pack_outcomes`
    # number of nodes per batch row whose log-probabilities are in `packed_outcomes`
    num_node_log_probs: int


def run_round(
    state: BatchState,
    plan: RoundPlan,
    lap: Callable[[str], None] = ignore_lap,
    run_stage: StageRunner = run_stage_directly,
) -> RoundResult:
    """Run one decoding round for all batch rows in use.

    `lap` is called with "draft" after drafting and with "build" after the trees are built, to time
    these steps. `run_stage` runs the stages "draft", "verify" and "commit", for example as CUDA
    graphs.
    """
    drafted = run_stage("draft", partial(draft_trees, state, plan, lap))

    if plan.constrain_to_grammars is not None:
        constrained_tree = plan.constrain_to_grammars(drafted.full_tree, drafted.proposal)
        overwrite_tree(drafted.full_tree, constrained_tree)
        drafted = drafted._replace(proposal=None)

    is_captured = bool(state.cache.padded_batch_size)
    host_sequences = select_host_sequences(
        plan.sequences, drafted.full_tree, drafted.sampling, is_captured
    )
    # Choose tokens on the device, unless the host chooses those of all rows.
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
    """Run the drafter for the positions after the bonus tokens, and build the draft trees."""
    sampling = plan.make_sampling()
    proposal = plan.draft(sampling)
    lap("draft")

    tree = plan.build_trees(proposal)
    if plan.constrain_to_grammars is None:
        return DraftedTrees(sampling, None, tree)
    conditionals = proposal.conditionals
    if conditionals is not None and not conditionals.recurrent:
        # Access `candidate_log_probs` now. It is computed on first access, and this must be part of
        # this stage's CUDA graph.
        _ = conditionals.candidate_log_probs
    return DraftedTrees(sampling, proposal, tree)


def overwrite_tree(tree: DraftTree, new_tree: DraftTree) -> None:
    """Copy the values of `new_tree` into the tensors of `tree`, which have the same shapes. The
    tensors of `tree` must stay the same, because the CUDA graphs of later stages read them."""
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
    """Prune the trees, verify them in one forward pass of the target, and choose the target's token
    after every node.

    If `choose_on_device` is false, all target tokens in the result are NO_TOKEN, and the host must
    choose them. `lap` is called with "build" before the forward pass, to time pruning.
    """
    target = state.target
    tree = plan.prune(drafted.full_tree)
    ancestors = tree.build_ancestor_mask()  # (B, num_nodes, num_nodes)
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
    """Find the accepted path of each tree, commit the nodes on the path, and pack the results that
    the host needs."""
    tree, ancestors, features, target_tokens = verified
    accepted = walk(tree, target_tokens, ancestors)
    if accepted.path.device.type == "cpu" and not state.cache.padded_batch_size:
        # On the CPU, reading a length costs no synchronisation, so drop the columns that are
        # padding in all rows.
        max_length = int(accepted.lengths.max())
        accepted = replace(accepted, path=accepted.path[:, :max_length])

    log_probs = drafted.full_tree.log_probs if plan.returns_node_log_probs else None
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
