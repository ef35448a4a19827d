"""Replay greedy outputs: find the rounds that decoding them takes, with any tree method and node
budget, without decoding.

A greedy output does not depend on the drafts. So one pass over the whole sequence gives the
target's features, one block is drafted after every token of the answer, many blocks at a time, and
a round that begins there accepts as many drafts as the sequence itself follows in the tree
(`infer.engine.verification.walk`). The rounds follow from these counts. `replay_tree_variants` and
`summarise_replay` use them to find what trees gain.

n: sequences, P: positions of an answer, T: tokens of a sequence, L: drafted positions, M:
candidates per position, F: features per position, R: tokens of the drafter's vocabulary
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
from infer.evaluation.metrics import acceptance_length, bootstrap_interval, count_tokens_and_rounds
from infer.evaluation.results import FirstChoiceAccuracy, ReplayResult, TreeStudy
from infer.targets.target import Target
from infer.trees.ddtree import MarginalConditionals
from infer.trees.methods import TREE_METHODS
from infer.trees.tree import Conditionals, Proposal

MAX_REPLAY_SCORES_IN_MEMORY = 1 << 24  # scores of drafted positions that are in memory at a time
MAX_BLOCKS_REPLAYED_AT_ONCE = 128

# token ids of a prompt and of the target's greedy answer
PromptAndAnswer = tuple[Sequence[int], Sequence[int]]


class ReplayVariant(NamedTuple):
    """A tree method, its size, and the ranking that selects its nodes."""

    method: str  # a row of TREES that drafts and needs no n-grams
    nodes: int  # the node budget; of a chain block_size - 1
    # "drafter": as in decoding; "marginals": without the conditional head; "ideal": the best
    # possible ranking, see `count_ideal_accepted`
    ranking: str = "drafter"


class BlockBatch(NamedTuple):
    """Blocks drafted after P tokens of an answer."""

    bonus: torch.Tensor  # (P,)
    block: DraftedBlock  # (P, L, R)
    next_tokens: torch.Tensor  # (P, L + 1) the sequence's tokens after the bonus; -1 past its end
    conditional_draft: ConditionalDraft | None  # None if the drafter has no conditional head


class ReplayedSequence(NamedTuple):
    """The rounds of one sequence."""

    commits: dict[ReplayVariant, list[int]]  # tokens committed by each round, the prefill's first
    # by "marginals" and "head": (4, L) int64, `count_first_choices` summed over the rounds of the
    # reference variant
    first_choices: dict[str, np.ndarray]


def extract_features(
    target: Target, layers: Sequence[int], sequence: PromptAndAnswer
) -> torch.Tensor:
    """Return the features (T, F) of `layers` at every token of a sequence, with one pass."""
    packed = pack_sequence(sequence, target.device)
    features = target.compute_packed_features(
        packed["ids"], packed["positions"], packed["documents"], tuple(layers)
    )
    return features.context[0]


def pack_sequence(sequence: PromptAndAnswer, device: torch.device) -> dict[str, torch.Tensor]:
    """Return a sequence as a packed sequence with one document; each tensor is (1, T)."""
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
    reference: ReplayVariant | None = None,
) -> list[ReplayedSequence]:
    """Return what the rounds of each sequence commit with each variant. The counts are those of
    `Sequence.commits` after decoding, except for rounding.

    drafter: one with a network; prompt lookup is not supported
    sequences: prompts and greedy answers, with their end token if they have one
    features: `extract_features` of each sequence at the drafter's `layer_ids`, if already computed
    reference: one of the variants, in whose rounds the drafter's first choices are counted; None:
        they are not counted
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
            if reference is not None:
                counts = count_first_choices(target, drafter, batch, lengths[reference])
                for source, position_counts in counts.items():
                    first_choices[source].append(position_counts)

        commits = {variant: compute_commits(accepted[variant]) for variant in variants}
        sums = {}
        if reference is not None and first_choices:
            # Rounds of the reference variant begin after these tokens of the answer.
            starts = np.cumsum([0, *commits[reference][1:-1]])
            for source, position_counts in first_choices.items():
                counts_at_starts = torch.cat(position_counts, 1)[:, starts]  # (4, rounds, L)
                sums[source] = counts_at_starts.sum(1).cpu().numpy()
        replayed.append(ReplayedSequence(commits, sums))
    return replayed


def iterate_block_batches(
    target: Target, drafter: Drafter, sequence: PromptAndAnswer, context: torch.Tensor
) -> Iterator[BlockBatch]:
    """Draft a block after each token of the answer but the last, and yield the blocks in order, as
    many at a time as fit in memory. context: (T, F), the features."""
    packed = pack_sequence(sequence, target.device)
    prompt, answer = sequence
    if len(answer) <= 1:
        return

    draft_length = drafter.block_size - 1
    ids = packed["ids"][0]
    blocks_in_memory = MAX_REPLAY_SCORES_IN_MEMORY // (draft_length * target.vocab_size)
    batch_size = max(1, min(MAX_BLOCKS_REPLAYED_AT_ONCE, blocks_in_memory))
    padded = F.pad(ids, (0, draft_length + 1), value=-1)
    next_tokens = padded.unfold(0, draft_length + 1, 1)[1:]  # (T, L + 1)
    positions = torch.arange(len(prompt), len(ids) - 1, device=ids.device)
    for anchors in positions.split(batch_size):
        # (P, W, D)
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
    """Return how many drafts the round after each bonus token accepts, (P,)."""
    conditional_draft = None if variant.ranking == "marginals" else batch.conditional_draft
    proposal = Proposal(
        batch.bonus,
        batch.block.marginals,
        variant.nodes,
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
    """Return how many drafts are accepted, (P,), if the candidates are ranked by an oracle: the
    tree then holds the sequence's own path, as long as each token is among the candidates of its
    position. No other ranking of the same candidates accepts more."""
    candidates = proposal.conditionals
    if candidates is None:
        marginals = cast(torch.Tensor, proposal.marginals)
        candidates = MarginalConditionals(marginals, proposal.budget, proposal.vocabulary)
    is_candidate = (candidates.tokens == next_tokens[:, :-1, None]).any(-1)  # (P, L)
    return is_candidate.long().cumprod(1).sum(1).clamp(max=proposal.budget)


def count_first_choices(
    target: Target, drafter: Drafter, batch: BlockBatch, lengths: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Count how often the drafter's most likely token is the sequence's token, at the positions
    that rounds reach which accept `lengths` (P,) drafts.

    Returns int64 counts (4, P, L) by "marginals", and by "head" if there is a conditional head,
    whose distributions follow the sequence's own tokens. The rows are: attempts and correct ones
    where all tokens before were first choices, then attempts and correct ones after an accepted
    sibling of a first choice.
    """
    next_tokens = batch.next_tokens[:, :-1]  # (P, L)
    log_probs_by_source = {"marginals": batch.block.marginals}
    if drafter.head_spec is not None:
        previous = torch.cat([batch.bonus[:, None], next_tokens[:, :-1].clamp(min=0)], 1)
        log_probs_by_source["head"] = teacher_forced_log_probs(
            drafter, target, batch.block, previous
        )

    depths = torch.arange(next_tokens.shape[1], device=next_tokens.device)
    is_reached = (next_tokens >= 0) & (depths <= lengths[:, None])
    counts = {}
    for source, log_probs in log_probs_by_source.items():
        is_correct = drafter.vocabulary.columns_to_ids(log_probs.argmax(-1)) == next_tokens
        after_first_choices = F.pad(is_correct[:, :-1], (1, 0), value=True).cumprod(1).bool()
        attempts = torch.stack(
            [is_reached & after_first_choices, is_reached & ~after_first_choices]
        )  # (2, P, L)
        counts[source] = torch.stack([attempts, attempts & is_correct], 1).flatten(0, 1).long()
    return counts


def compute_commits(accepted: Sequence[int]) -> list[int]:
    """Return what each round commits, the prefill's token first. accepted: for each token of an
    answer but the last, the drafts that a round accepts which begins after it."""
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
    """Replay the chain and DDTrees of every budget on the outputs of baseline decoding, with each
    ranking, and count first choices in the rounds of the largest tree. Return nothing for sampled
    outputs, and for prompt lookup, which drafts no blocks."""
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
    return replay_sequences(target, drafter, sequences, variants, reference=largest)


def summarise_replay(sequences: Sequence[ReplayedSequence]) -> TreeStudy:
    """Return the results of replayed sequences, with intervals over sequences."""
    variants = sequences[0].commits
    counted = [sequence.first_choices for sequence in sequences if sequence.first_choices]
    first_choices = []
    for source in counted[0] if counted else ():
        counts = np.stack([each[source] for each in counted], 2)  # (4, L, n)
        for i, prefix in enumerate(("first choices", "a sibling")):
            attempts = counts[2 * i]  # (L, n)
            correct = counts[2 * i + 1]  # (L, n)
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
        tau, tau_interval = acceptance_length(count_tokens_and_rounds(commits))
        results.append(ReplayResult(*variant, tau, tau_interval))
    largest = max(variant.nodes for variant in variants if variant.method == "ddtree")
    return TreeStudy(largest, first_choices, results)


def accuracy_interval(attempts: np.ndarray, correct: np.ndarray) -> list[float] | None:
    """Return the confidence interval of correct per attempt over n sequences with counts (n,)."""

    def accuracy(indices: np.ndarray) -> np.ndarray:
        return correct[indices].sum(-1) / np.maximum(attempts[indices].sum(-1), 1)

    return bootstrap_interval(accuracy, len(attempts))
