"""What trees are built from: the drafter's block as the texts' options and the target's noise change it, and what
grammars say.

B rows, L drafted positions, V vocabulary.
"""

from collections import abc
from functools import partial

from infer.config import EngineConfig
from infer.drafters.heads.draft import ConditionalDraft
from infer.engine.choices import RowsAsked
from infer.engine.memory import Memory
from infer.engine.rejection import children_noise
from infer.engine.sampling import adjust, condition_on_noise, judge_on_noise
from infer.engine.sequence import Sequence
from infer.ngrams.model import NGram
from infer.trees.constrained import Rule, constrain
from infer.trees.methods import TreeMethod
from infer.trees.tree import DraftTree, Proposal

SEARCHED = 8192  # tokens at a text's end in which trees with n-grams look for what came before
NGRAM_WEIGHT = 0.8  # of the n-gram model against the drafter
CANDIDATES = 32  # of a position with a conditional head, at most
FEW = 16  # of small trees; larger ones consider two for each of their nodes


def propose(
    memory: Memory, asked: RowsAsked, nodes: int, method: TreeMethod, options: EngineConfig, ngram: NGram | None
) -> Proposal:
    """Draft behind the roots, and collect what else the tree method may use for `nodes` nodes at most."""
    target, drafter = memory.target, memory.drafter
    before, draws, steps = None if asked.seen is None else asked.seen[:, None], None, None
    conditional = None
    block = drafter.draft_block(target, memory.bonus, memory.state)
    marginals = block.marginals  # (B, L, V)
    if drafter.head_row is not None:  # tokens depend on the ones drafted before them
        judge = judge_on_noise(asked.options, None if method.draws else asked.noise, before)
        considered = min(CANDIDATES, max(FEW, 2 * nodes)) if method.by_budget else CANDIDATES
        steps = ConditionalDraft(drafter, target, memory.bonus, block, judge, considered)
        conditional = None if steps.recurrent else steps
    if not method.draws:
        marginals = condition_on_noise(marginals, asked.options, asked.noise, before)
    else:  # independent of the noise that the target draws with
        marginals = adjust(marginals, asked.options, before).log_softmax(-1)
        if asked.noise is not None:
            draws = partial(children_noise, asked.options, asked.start, vocabulary=marginals.shape[-1])
    return Proposal(
        memory.bonus,
        marginals,
        nodes,
        ngram,
        [text.end(SEARCHED) for text in asked.texts] if ngram else (),
        NGRAM_WEIGHT,
        options.width,
        conditional,
        draws,
        target.end_ids,
        steps,
    )


def forced_tokens(texts: abc.Sequence[Sequence], nodes: int, length: int) -> list[list[int]]:
    """Return what grammars force behind every row's root, as far as `nodes` and the text's room go, where that is as
    much as a draft of `length` tokens has in every row, which then costs none; else nothing."""
    forced = []
    for text in texts:
        tokens = [] if text.grammar is None else text.grammar.forced(text.ids)
        tokens = tokens[: min(nodes, text.options.max_new_tokens - len(text.ids))]
        if len(tokens) < min(length, nodes):
            return []
        forced.append(tokens)
    return forced


def follow_grammars(
    tree: DraftTree, proposal: Proposal, texts: abc.Sequence[Sequence], method: TreeMethod
) -> DraftTree:
    """Return the tree with the rows built anew whose texts follow a grammar."""
    if not method.ranked or not tree.budget:
        return tree
    rows = {
        row: Rule(partial(text.grammar.drafted, text.ids), text.grammar.forced(text.ids))
        for row, text in enumerate(texts)
        if text.grammar is not None
    }
    return constrain(tree, proposal, rows, method.by_budget) if rows else tree
