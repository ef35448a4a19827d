"""Prepare the input of the tree method (`Proposal`): the drafter's distributions, to which the
target's sampling noise is added, and the n-gram model. Also rebuild the trees of sequences with a
grammar."""

from collections import abc
from functools import partial

import numpy as np

from infer.config import EngineConfig
from infer.drafters.heads.draft import ConditionalDraft
from infer.engine.batch_state import BatchState
from infer.engine.sampling import apply_sampling_to_marginals, make_score_transform
from infer.engine.sequence import Sequence
from infer.engine.verification import SamplingBatch
from infer.ngrams.model import NGramModel
from infer.trees.constrained import GrammarRule, build_constrained_trees
from infer.trees.methods import TreeMethod
from infer.trees.tree import DraftTree, Proposal

# With an n-gram model, trees rank nodes by (drafter's probability) * (n-gram probability) **
# DDTREE_NGRAM_EXPONENT.
DDTREE_NGRAM_EXPONENT = 0.8


def run_drafter(
    state: BatchState,
    num_nodes: int,
    options: EngineConfig,
    ngram_model: NGramModel | None,
    contexts: abc.Sequence[abc.Sequence[int] | np.ndarray],
    sampling: SamplingBatch,
) -> Proposal:
    """Run the drafter for the positions after the bonus tokens, and return its distributions as the
    input of the tree method.

    `num_nodes` is the maximum number of drafted nodes per batch row. `contexts` has the last tokens
    of each batch row's sequence, and is used only with an n-gram model.
    """
    target = state.target
    drafter = state.drafter
    assert drafter is not None and state.draft_state is not None
    vocabulary = drafter.vocabulary
    if vocabulary.tokens is None:
        noise = sampling.noise
    else:
        num_positions = sampling.num_positions
        noise = sampling.make_noise(slice(None), 0, num_positions, vocabulary.tokens)
    seen = vocabulary.select_columns(sampling.seen)
    if seen is not None:
        seen = seen[:, None]

    bonus = state.bonus_tokens
    block = drafter.draft_block(target, bonus, state.draft_state)
    conditionals = None
    # A conditional head scores a token given the drafted token before it.
    if drafter.head_spec is not None:
        transform = make_score_transform(sampling.tensors, noise, seen)
        conditionals = ConditionalDraft(drafter, target, bonus, block, transform)
    return Proposal(
        bonus_tokens=bonus,
        marginals=apply_sampling_to_marginals(
            block.marginals, sampling.tensors, noise, seen
        ),  # (B, draft_length, vocab_size)
        budget=num_nodes,
        ngram=ngram_model,
        contexts=contexts,
        ngram_weight=DDTREE_NGRAM_EXPONENT,
        width=options.width,
        eos_token_ids=target.eos_token_ids,
        conditionals=conditionals,
        vocabulary=vocabulary,
    )


def constrain_to_grammars(
    sequences: abc.Sequence[Sequence], method: TreeMethod, tree: DraftTree, proposal: Proposal
) -> DraftTree:
    """Rebuild the trees of sequences with a grammar, so that they contain only what the grammar
    allows. Return the trees of all batch rows; the trees of sequences without a grammar are
    unchanged.

    `sequences` has one sequence per batch row, and `proposal` is the input that `tree` was built
    from.
    """
    if not tree.max_drafted:
        return tree
    rules = {}
    for row, sequence in enumerate(sequences):
        grammar = sequence.grammar
        if grammar is not None:
            allowed = partial(grammar.compute_allowed_draft_mask, sequence.ids)
            rules[row] = GrammarRule(allowed, grammar.forced_tokens(sequence.ids))
    branches = method.scales_with_budget
    return build_constrained_trees(tree, proposal, rules, branches)
