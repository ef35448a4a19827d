"""Compare two measurements of a drafter's acceptance (how many of its draft tokens are accepted),
and decide whether the difference is significant.

One measurement is the acceptance that this project's engine has in this process; it is called
"local" or "here". The other is the acceptance on the drafter's model card or in another engine.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from infer.doctor.replay import TargetStates, compute_features_and_agreement
from infer.drafters.base import Drafter
from infer.evaluation.results import AcceptanceCounts, AcceptanceReference
from infer.targets.target import Target

# The acceptance is called too low only if the number of accepted draft tokens per round is below
# this share of the expected number. A smaller difference may come from rounding.
MIN_MEASURED_TO_EXPECTED_ACCEPTANCE = 0.95
# The acceptance is called too low only if it is more than this number of standard errors below the
# expected acceptance. A smaller difference may be chance.
MAX_CHANCE_DIFFERENCE_STANDARD_ERRORS = 2


@dataclass(frozen=True)
class EngineMeasurement:
    """The answers of an engine to the prompts of an `AcceptanceReference`, and how many draft
    tokens the engine accepted.

    engine: name of the engine
    texts: texts of the answers
    answer_ids: token ids of the answers
    prompt_token_counts: number of tokens of each prompt, as the engine reports it
    acceptance_by_answer: acceptance of each answer, or a single entry for all answers together
    repeated_acceptance: the acceptance of the second request with each prompt, in the same form
    draft_tokens_per_round: mean number of draft tokens per round
    incomparable_options: the engine's decoding options, if it does not draft one chain with a whole
        block of tokens per round, so that its acceptance cannot be compared with that of our own
        decoder; else ""
    """

    engine: str
    texts: list[str]
    answer_ids: list[list[int]]
    prompt_token_counts: list[int]
    acceptance_by_answer: list[AcceptanceCounts]
    repeated_acceptance: list[AcceptanceCounts]
    draft_tokens_per_round: float
    incomparable_options: str = ""


@dataclass(frozen=True)
class AcceptanceComparison:
    """A comparison of the acceptance in this process with the acceptance on the drafter's model
    card or in another engine.

    reference: prompts and answers with which the acceptance is measured
    target_states: the target's hidden states for the answers in `reference`
    local_acceptance: acceptance of each answer, computed in this process
    compared_acceptance: acceptance of each answer on the card or in the other engine; or a single
        entry for all answers together
    engine: the measurement of the other engine; None if `compared_acceptance` is from the card
    """

    target: Target
    drafter: Drafter
    reference: AcceptanceReference
    target_states: TargetStates
    local_acceptance: list[AcceptanceCounts]
    compared_acceptance: list[AcceptanceCounts]
    engine: EngineMeasurement | None = None

    @property
    def is_comparable(self) -> bool:
        """Whether the acceptance of the other engine can be compared with that of our own decoder.
        This is so if both draft one chain with a whole block of tokens per round. True if no other
        engine was measured.
        """
        return self.engine is None or not self.engine.incomparable_options

    @property
    def is_acceptance_low(self) -> bool:
        """Whether the acceptance is significantly lower than expected. If another engine was
        measured, this means that its acceptance is lower than the acceptance in this process.
        Otherwise, it means that the acceptance in this process is lower than on the drafter's card.
        False if the measurements cannot be compared.
        """
        if not self.is_comparable:
            return False
        local = AcceptanceCounts.pool(self.local_acceptance)
        compared = AcceptanceCounts.pool(self.compared_acceptance)
        if self.engine is None:
            return is_significantly_lower(local, compared)
        return is_significantly_lower(compared, local)

    @property
    def relative_count_difference(self) -> float:
        """The difference between the two measurements (`sum_absolute_count_differences`), divided
        by the number of rounds plus the number of accepted draft tokens in this process.

        It is 0 if all counts are equal, and also if the measurements cannot be compared.
        """
        if not self.is_comparable:
            return 0.0
        total = sum(counts.rounds + sum(counts.accepted) for counts in self.local_acceptance)
        difference = sum_absolute_count_differences(self.local_acceptance, self.compared_acceptance)
        return difference / max(1, total)

    @property
    def target_greedy_agreement(self) -> float:
        """The share of the answers' tokens that are the greedy choice of the target, as computed in
        this process.

        The answers are those of the other engine. If no engine was measured, they are the answers
        in `reference`.
        """
        if self.engine is None:
            return self.target_states.greedy_agreement
        prompts = [answer.prompt_ids for answer in self.reference.answers]
        return compute_features_and_agreement(
            self.target, prompts, self.engine.answer_ids
        ).greedy_agreement


def is_significantly_lower(counts: AcceptanceCounts, expected: AcceptanceCounts) -> bool:
    """Return whether the number of accepted draft tokens per round in `counts` is lower than in
    `expected`, by more than rounding and chance can explain.
    """
    standard_error = math.hypot(counts.standard_error, expected.standard_error)
    rounding_limit = MIN_MEASURED_TO_EXPECTED_ACCEPTANCE * expected.mean_accepted
    chance_limit = expected.mean_accepted - MAX_CHANCE_DIFFERENCE_STANDARD_ERRORS * standard_error
    return counts.mean_accepted < min(rounding_limit, chance_limit)


def sum_absolute_count_differences(
    counts: Sequence[AcceptanceCounts], other_counts: Sequence[AcceptanceCounts]
) -> int:
    """Return how much two measurements differ: the sum of the absolute differences of their numbers
    of rounds and of their numbers of accepted draft tokens at each position.

    If both lists have the same length, which means one entry per answer, the differences are
    computed for each answer. Otherwise, the sums over all answers are compared.
    """
    if len(counts) != len(other_counts):
        counts = [AcceptanceCounts.pool(counts)]
        other_counts = [AcceptanceCounts.pool(other_counts)]
    total = 0
    for each, other in zip(counts, other_counts, strict=True):
        total += abs(each.rounds - other.rounds)
        for accepted, other_accepted in zip_longest(each.accepted, other.accepted, fillvalue=0):
            total += abs(accepted - other_accepted)
    return total
