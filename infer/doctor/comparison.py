"""Compares the acceptance of a drafter in our engine with the acceptance on its model card or in
another engine, and decides whether a difference is significant.

"Here" means in this process, with our engine.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from infer.doctor.replay import TargetStates, compute_target_states
from infer.drafters.base import Drafter
from infer.evaluation.results import AcceptanceCounts, AcceptanceReference
from infer.targets.target import Target

# Rounding errors cannot explain it if the share of accepted to expected draft tokens is smaller.
MIN_MEASURED_TO_EXPECTED_ACCEPTANCE = 0.95
# Chance cannot explain a difference of more standard errors than this.
MAX_CHANCE_DIFFERENCE_STANDARD_ERRORS = 2


@dataclass(frozen=True)
class EngineMeasurement:
    """The answers of an engine to the prompts of a reference, and the engine's acceptance.

    engine: name of the engine
    texts: texts of the answers
    answer_ids: token ids of the answers
    prompt_tokens: number of tokens of each prompt, as the engine reports it
    acceptance_by_answer: acceptance of each answer, or a single entry for all answers together
    repeated_acceptance: the same when each prompt was sent a second time
    drafts_per_round: mean number of draft tokens per round
    incomparable_options: if the engine does not draft a whole block as a chain in each round, its
        decoding options, because its acceptance cannot be compared then; else ""
    """

    engine: str
    texts: list[str]
    answer_ids: list[list[int]]
    prompt_tokens: list[int]
    acceptance_by_answer: list[AcceptanceCounts]
    repeated_acceptance: list[AcceptanceCounts]
    drafts_per_round: float
    incomparable_options: str = ""


@dataclass(frozen=True)
class AcceptanceComparison:
    """A comparison of the acceptance here with that on the drafter's card or in an engine.

    target_states: states of the target for the answers of the reference
    local_acceptance: acceptance of each answer, measured here
    compared_acceptance: acceptance on the card or in the engine, of each answer, or a single entry
        for all answers together
    engine: the measurement of the engine; None if the acceptance is compared with the card
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
        """Whether both measurements drafted a whole block as a chain in each round."""
        return self.engine is None or not self.engine.incomparable_options

    @property
    def is_low(self) -> bool:
        """Whether the acceptance is significantly too low.

        If an engine was measured, its acceptance is lower than here. Otherwise the acceptance here
        is lower than on the card.
        """
        if not self.is_comparable:
            return False
        local = AcceptanceCounts.pool(self.local_acceptance)
        compared = AcceptanceCounts.pool(self.compared_acceptance)
        if self.engine is None:
            return is_significantly_lower(local, compared)
        return is_significantly_lower(compared, local)

    @property
    def relative_difference(self) -> float:
        """The difference of the counts of both measurements, relative to the counts here.

        The counts are the numbers of rounds and of accepted draft tokens, see `count_difference`.
        The difference is 0 if both engines use the drafter in the same way.
        """
        if not self.is_comparable:
            return 0.0
        total = sum(counts.rounds + sum(counts.accepted) for counts in self.local_acceptance)
        difference = count_difference(self.local_acceptance, self.compared_acceptance)
        return difference / max(1, total)

    @property
    def target_agreement(self) -> float:
        """The share of answer tokens that are the greedy choice of the target here.

        The answers are those of the engine, or of the reference if no engine was measured.
        """
        if self.engine is None:
            return self.target_states.agreement
        prompts = [answer.prompt_ids for answer in self.reference.answers]
        return compute_target_states(self.target, prompts, self.engine.answer_ids).agreement


def is_significantly_lower(counts: AcceptanceCounts, expected: AcceptanceCounts) -> bool:
    """Return whether fewer draft tokens are accepted than rounding and chance explain."""
    standard_error = math.hypot(counts.standard_error, expected.standard_error)
    rounding_limit = MIN_MEASURED_TO_EXPECTED_ACCEPTANCE * expected.mean_accepted
    chance_limit = expected.mean_accepted - MAX_CHANCE_DIFFERENCE_STANDARD_ERRORS * standard_error
    return counts.mean_accepted < min(rounding_limit, chance_limit)


def count_difference(
    counts: Sequence[AcceptanceCounts], other_counts: Sequence[AcceptanceCounts]
) -> int:
    """Return by how many rounds and accepted draft tokens two measurements differ.

    If both have an entry for each answer, the differences of the answers are added up. Otherwise
    the totals are compared.
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
