"""Computes in how many rounds a tree method would decode a greedy output, without decoding it
again.

This is called a replay. It is possible because a greedy output does not depend on the drafts. One
forward pass of the target over prompt and answer gives the hidden states that the drafter reads.
From them, the drafter drafts a block after every token of the answer; it drafts many blocks at
once. For each block, `walk` counts the draft tokens that equal the next tokens of the answer. A
round with this block would accept these tokens. The counts determine at which tokens the rounds
begin.

`replay_tree_variants` and `summarise_replay` compare trees with chains, which are drafts without
branches.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from torch.nn import functional as F

from infer.config import EngineConfig, EvaluationConfig
from infer.drafters.base import DraftedBlock, Drafter, draft_from_states
from infer.drafters.blocks import compute_packed_block_states
from infer.drafters.families import PROMPT_LOOKUP_FAMILY
from infer.drafters.heads.draft import ConditionalDraft, teacher_forced_log_probs
from infer.engine.sequence import Sequence as DecodedSequence
from infer.engine.verification import walk
from infer.evaluation.metrics import (
    bootstrap_interval,
    compute_acceptance_length_or_ratio,
    count_tokens_and_rounds,
)
from infer.evaluation.results import FirstChoiceAccuracy, ReplayResult, TreeStudy
from infer.targets.target import Target
from infer.trees.ddtree import MarginalConditionals
from infer.trees.methods import TREE_METHODS
from infer.trees.tree import Conditionals, Proposal

MAX_REPLAY_SCORES_IN_MEMORY = (
    1 << 24
)  # maximum number of the drafter's scores in memory; a position has one score per token
MAX_BLOCKS_REPLAYED_AT_ONCE = 128  # maximum number of blocks in one forward pass of the drafter

# Token ids of a prompt, and token ids of the target's greedy answer to this prompt
PromptAndAnswer = tuple[Sequence[int], Sequence[int]]


class ReplayVariant(NamedTuple):
    """A tree method, its node budget, and the scores that rank the candidate nodes.

    method: name of a method in TREE_METHODS that uses a drafter and no n-grams
    node_budget: the node budget (number of drafted nodes per round); block_size - 1 for a chain
    ranking: "drafter" ranks as in decoding. "marginals" ignores the drafter's conditional head,
        which predicts a token given the token before it. "ideal" ranks as well as possible, see
        `count_ideal_accepted`
    """

    method: str
    node_budget: int
    ranking: str = "drafter"


class BlockBatch(NamedTuple):
    """Drafted blocks, each of which begins after a different token of an answer.

    bonus: the token after which each block was drafted, of shape (num_blocks,)
    block: the drafted blocks, with scores of shape (num_blocks, draft_length, vocab_size of the
        drafter)
    next_tokens: the answer's tokens after each bonus token; -1 after the end of the answer. The
        shape is (num_blocks, draft_length + 1)
    conditional_draft: scores from the conditional head, which scores each token given the token
        before it; None if the drafter has no conditional head
    """

    bonus: torch.Tensor
    block: DraftedBlock
    next_tokens: torch.Tensor
    conditional_draft: ConditionalDraft | None


class ReplayedSequence(NamedTuple):
    """The result of the replay of one sequence.

    commits: for each variant, how many tokens the prefill and each round would commit, in this
        order
    first_choices: how often the drafter's most likely token is right, summed over the rounds of the
        variant that the caller chose. See `count_first_choices` for the keys and for the values,
        which are int64 of shape (4, draft_length)
    """

    commits: dict[ReplayVariant, list[int]]
    first_choices: dict[str, np.ndarray]


def extract_features(
    target: Target, layers: Sequence[int], sequence: PromptAndAnswer
) -> torch.Tensor:
    """Return the target's hidden states that the drafter reads, for each token of a sequence.

    layers: ids of the target layers whose hidden states are concatenated

    Returns shape (num_tokens, num_features).
    """
    packed = pack_sequence(sequence, target.device)
    features = target.compute_packed_features(
        packed["ids"], packed["positions"], packed["documents"], tuple(layers)
    )
    return features.layer_features[0]


def pack_sequence(sequence: PromptAndAnswer, device: torch.device) -> dict[str, torch.Tensor]:
    """Return a sequence in the form of a packed training sequence, with the whole sequence as its
    only document.

    Returns token ids, positions and document numbers, each of shape (1, num_tokens).
    """
    prompt, answer = sequence
    ids = torch.tensor([[*prompt, *answer]], device=device)
    return {
        "ids": ids,
        "positions": torch.arange(ids.shape[1], device=device)[None],
        "documents": ids * 0,
    }


@torch.no_grad()
def replay_sequences(
    target: Target,
    drafter: Drafter,
    sequences: Sequence[PromptAndAnswer],
    variants: Sequence[ReplayVariant],
    features: Sequence[torch.Tensor] | None = None,
    first_choice_variant: ReplayVariant | None = None,
) -> list[ReplayedSequence]:
    """Compute how many tokens each round would commit if the sequences were decoded with each
    variant (tree method and node budget). Except for rounding errors, the counts equal
    `Sequence.commits` of an engine that decodes the same prompts.

    drafter: a drafter with a network; prompt lookup is not supported
    sequences: prompts and greedy answers; an answer includes its end token if it has one
    features: result of `extract_features` for each sequence, with the layers `drafter.layer_ids`;
        None means that the features are computed here
    first_choice_variant: the variant in whose rounds `count_first_choices` counts how often the
        drafter's most likely token is right. None means that nothing is counted
    """
    replayed = []
    for i, sequence in enumerate(sequences):
        context = features[i] if features else None
        if context is None:
            context = extract_features(target, drafter.layer_ids, sequence)

        accepted = {variant: [] for variant in variants}
        first_choices = defaultdict(list)
        for batch in iterate_block_batches(target, drafter, sequence, context):
            lengths = {
                variant: count_accepted_per_block(drafter, batch, variant) for variant in variants
            }
            for variant, length in lengths.items():
                accepted[variant] += length.tolist()
            if first_choice_variant is not None:
                counts = count_first_choices(target, drafter, batch, lengths[first_choice_variant])
                for source, position_counts in counts.items():
                    first_choices[source].append(position_counts)

        commits = {variant: compute_commits(accepted[variant]) for variant in variants}
        sums = {}
        if first_choice_variant is not None and first_choices:
            # Indices of the answer tokens after which the rounds of `first_choice_variant` begin
            starts = np.cumsum([0, *commits[first_choice_variant][1:-1]])
            for source, position_counts in first_choices.items():
                # (4, num_rounds, draft_length)
                counts_at_starts = torch.cat(position_counts, 1)[:, starts]
                sums[source] = counts_at_starts.sum(1).cpu().numpy()
        replayed.append(ReplayedSequence(commits, sums))
    return replayed


def iterate_block_batches(
    target: Target, drafter: Drafter, sequence: PromptAndAnswer, context: torch.Tensor
) -> Iterator[BlockBatch]:
    """Draft a block after each token of the answer except the last one.

    Yields the blocks in order, as many at a time as fit into memory.

    context: the result of `extract_features` for the sequence, of shape (num_tokens, num_features)
    """
    packed = pack_sequence(sequence, target.device)
    prompt, answer = sequence
    if len(answer) <= 1:
        return

    draft_length = drafter.block_size - 1
    ids = packed["ids"][0]
    blocks_in_memory = MAX_REPLAY_SCORES_IN_MEMORY // (draft_length * target.vocab_size)
    batch_size = max(1, min(MAX_BLOCKS_REPLAYED_AT_ONCE, blocks_in_memory))
    padded = F.pad(ids, (0, draft_length + 1), value=-1)
    # (num_tokens, draft_length + 1)
    next_tokens = padded.unfold(0, draft_length + 1, 1)[1:]
    positions = torch.arange(len(prompt), len(ids) - 1, device=ids.device)
    for anchors in positions.split(batch_size):
        # (num_blocks, num_queries, hidden_size)
        states = compute_packed_block_states(
            drafter, target, packed, anchors[None], context[None], drafter
        )[0]
        block = draft_from_states(drafter, target, states)
        conditional_draft = None
        if drafter.head_spec is not None:
            conditional_draft = ConditionalDraft(drafter, target, ids[anchors], block)
        yield BlockBatch(ids[anchors], block, next_tokens[anchors], conditional_draft)


def count_accepted_per_block(
    drafter: Drafter, batch: BlockBatch, variant: ReplayVariant
) -> torch.Tensor:
    """Return how many draft tokens of each block a round would accept, of shape (num_blocks,)."""
    conditional_draft = None if variant.ranking == "marginals" else batch.conditional_draft
    proposal = Proposal(
        batch.bonus,
        batch.block.marginals,
        variant.node_budget,
        width=EngineConfig.width,
        conditionals=cast(Conditionals, conditional_draft),
        vocabulary=drafter.vocabulary,
    )
    if variant.ranking == "ideal":
        return count_ideal_accepted(proposal, batch.next_tokens)
    tree = TREE_METHODS[variant.method].load_builder()(proposal)
    choices = batch.next_tokens.gather(1, tree.depths)
    return walk(tree, choices).lengths - 1


def count_ideal_accepted(proposal: Proposal, next_tokens: torch.Tensor) -> torch.Tensor:
    """Return how many draft tokens are accepted with the best possible ranking of the nodes.

    The tree then contains the next tokens of the answer, up to the first one that is not among the
    drafter's candidates for its position. No ranking of the same candidates accepts more.

    next_tokens: the answer's tokens after each bonus token, of shape (num_blocks, draft_length + 1)

    Returns shape (num_blocks,).
    """
    candidates = proposal.conditionals
    if candidates is None:
        marginals = cast(torch.Tensor, proposal.marginals)
        candidates = MarginalConditionals(marginals, proposal.budget, proposal.vocabulary)
    # (num_blocks, draft_length)
    is_candidate = (candidates.tokens == next_tokens[:, :-1, None]).any(-1)
    return is_candidate.long().cumprod(1).sum(1).clamp(max=proposal.budget)


def count_first_choices(
    target: Target, drafter: Drafter, batch: BlockBatch, accepted_lengths: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Count how often the drafter's first choice, its most likely token at a position, is the
    answer's token. If a round accepts m draft tokens, each of the first m + 1 positions is one
    attempt. Attempts are counted separately by whether the first choices at all earlier positions
    of the block were right.

    accepted_lengths: number of draft tokens that a round accepts, for each block of `batch`

    Returns a dictionary. The key "marginals" has the counts for the scores without the conditional
    head. If the drafter has a conditional head, the key "head" has the counts for the scores with
    it. Counts are int64 of shape (4, num_blocks, draft_length). The first dimension has these
    entries:
    0: attempts at positions where all earlier first choices of the block were right
    1: those attempts of entry 0 in which the first choice is the answer's token
    2: attempts at positions where an earlier first choice of the block was wrong
    3: those attempts of entry 2 in which the first choice is the answer's token
    """
    next_tokens = batch.next_tokens[:, :-1]  # (num_blocks, draft_length)
    log_probs_by_source = {"marginals": batch.block.marginals}
    if drafter.head_spec is not None:
        previous = torch.cat([batch.bonus[:, None], next_tokens[:, :-1].clamp(min=0)], 1)
        log_probs_by_source["head"] = teacher_forced_log_probs(
            drafter, target, batch.block, previous
        )

    depths = torch.arange(next_tokens.shape[1], device=next_tokens.device)
    is_reached = (next_tokens >= 0) & (depths <= accepted_lengths[:, None])
    counts = {}
    for source, log_probs in log_probs_by_source.items():
        is_correct = drafter.vocabulary.columns_to_ids(log_probs.argmax(-1)) == next_tokens
        after_first_choices = F.pad(is_correct[:, :-1], (1, 0), value=True).cumprod(1).bool()
        attempts = torch.stack(
            [is_reached & after_first_choices, is_reached & ~after_first_choices]
        )  # (2, num_blocks, draft_length)
        counts[source] = torch.stack([attempts, attempts & is_correct], 1).flatten(0, 1).long()
    return counts


def compute_commits(accepted: Sequence[int]) -> list[int]:
    """Return how many tokens the prefill and each round commit, in this order.

    accepted: entry i is the number of draft tokens that a round accepts if it begins after token i
        of the answer. The last token of the answer has no entry
    """
    commits = [1]
    position = 0
    while position < len(accepted):
        commit = min(accepted[position] + 1, len(accepted) - position)
        commits.append(commit)
        position += commit
    return commits


def replay_tree_variants(
    target: Target, drafter: Drafter, baseline: Iterable[DecodedSequence], config: EvaluationConfig
) -> list[ReplayedSequence]:
    """Replay the outputs of baseline decoding with chains, and with DDTree at every node budget.

    Chains and trees are replayed with the rankings of `ReplayVariant`. Chains have no "ideal"
    ranking, and "marginals" is left out without a conditional head. First choices (most likely
    tokens of the drafter) are counted in the rounds of the largest tree. Returns an empty list for
    sampled outputs, and for prompt lookup, which drafts no blocks.
    """
    if config.temperature > 0 or drafter.family is PROMPT_LOOKUP_FAMILY:
        return []
    sequences = [(sequence.prompt, sequence.ids) for sequence in baseline]
    rankings = ["drafter"]
    if drafter.head_spec is not None:
        rankings.append("marginals")
    variants = [ReplayVariant("chain", drafter.block_size - 1, ranking) for ranking in rankings]
    for budget in config.budgets:
        for ranking in [*rankings, "ideal"]:
            variants.append(ReplayVariant("ddtree", budget, ranking))
    largest = ReplayVariant("ddtree", max(config.budgets))
    return replay_sequences(target, drafter, sequences, variants, first_choice_variant=largest)


def summarise_replay(sequences: Sequence[ReplayedSequence]) -> TreeStudy:
    """Return τ (tokens per round) of each variant (tree method, node budget and ranking), and the
    accuracy of the drafter's first choices.

    Both are computed over all sequences, with confidence intervals. A first choice is the drafter's
    most likely token.
    """
    variants = sequences[0].commits
    counted = [sequence.first_choices for sequence in sequences if sequence.first_choices]
    first_choices = []
    for source in counted[0] if counted else ():
        # (4, draft_length, num_sequences)
        counts = np.stack([each[source] for each in counted], 2)
        for i, prefix in enumerate(("first choices", "a sibling")):
            attempts = counts[2 * i]
            correct = counts[2 * i + 1]
            accuracy = FirstChoiceAccuracy(
                source=source,
                prefix=prefix,
                attempts=attempts.sum(1).tolist(),
                correct=correct.sum(1).tolist(),
                intervals=[
                    accuracy_interval(*pair) for pair in zip(attempts, correct, strict=True)
                ],
                interval=accuracy_interval(attempts.sum(0), correct.sum(0)),
            )
            first_choices.append(accuracy)

    results = []
    for variant in variants:
        commits = [sequence.commits[variant] for sequence in sequences]
        tau, tau_interval = compute_acceptance_length_or_ratio(count_tokens_and_rounds(commits))
        results.append(ReplayResult(*variant, tau, tau_interval))
    largest = max(variant.node_budget for variant in variants if variant.method == "ddtree")
    return TreeStudy(largest, first_choices, results)


def accuracy_interval(attempts: np.ndarray, correct: np.ndarray) -> list[float] | None:
    """Return the confidence interval of the accuracy, which is the share of attempts that are
    correct.

    attempts: number of attempts in each sequence, of shape (num_sequences,)
    correct: number of correct attempts in each sequence, of shape (num_sequences,)
    """

    def accuracy(indices: np.ndarray) -> np.ndarray:
        return correct[indices].sum(-1) / np.maximum(attempts[indices].sum(-1), 1)

    return bootstrap_interval(accuracy, len(attempts))
