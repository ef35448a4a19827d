"""Compare the acceptance of a drafter here with that on its card or in an engine, and decide
whether a difference is significant."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from infer.doctor.replay import TargetStates, compute_target_states
from infer.drafters.base import Drafter
from infer.evaluation.results import AcceptanceCounts, AcceptanceReference
from infer.targets.target import Target

# Fewer accepted drafts than this share of the expected ones are more than rounding explains.
MIN_MEASURED_TO_EXPECTED_ACCEPTANCE = 0.95
# A difference of more standard errors than this is more than chance explains.
MAX_CHANCE_DIFFERENCE_STANDARD_ERRORS = 2


@dataclass(frozen=True)
class EngineMeasurement:
    """What an engine answered to the prompts of a reference, and the drafts that it accepted."""

    engine: str
    texts: list[str]  # of the answers
    answer_ids: list[list[int]]
    prompt_tokens: list[int]  # number of tokens of each prompt, as the engine counts them
    acceptance_by_answer: list[AcceptanceCounts]  # one for each answer, or one for all
    repeated_acceptance: list[AcceptanceCounts]  # when each prompt was sent a second time
    drafts_per_round: float
    # the decoding options of an engine that does not draft a whole block as a chain each round,
    # else ""; its acceptance cannot be compared
    incomparable_options: str = ""


@dataclass(frozen=True)
class AcceptanceComparison:
    """A target and a drafter here, compared with the drafter's card or with an engine."""

    target: Target
    drafter: Drafter
    reference: AcceptanceReference
    target_states: TargetStates  # of the reference's answers
    local_acceptance: list[AcceptanceCounts]  # measured here, by answer
    compared_acceptance: list[AcceptanceCounts]  # by answer, or one for all
    engine: EngineMeasurement | None = None  # None: compared with the card

    @property
    def is_comparable(self) -> bool:
        """Whether both sides drafted whole blocks as chains."""
        return self.engine is None or not self.engine.incomparable_options

    @property
    def is_low(self) -> bool:
        """Whether acceptance is significantly too low: here, compared with the card; or in the
        engine, compared with here."""
        if not self.is_comparable:
            return False
        local = AcceptanceCounts.pool(self.local_acceptance)
        compared = AcceptanceCounts.pool(self.compared_acceptance)
        if self.engine is None:
            return is_significantly_lower(local, compared)
        return is_significantly_lower(compared, local)

    @property
    def relative_difference(self) -> float:
        """The difference between both sides, relative to all rounds and accepted drafts here. It is
        0 if both read the drafter in the same way."""
        if not self.is_comparable:
            return 0.0
        total = sum(counts.rounds + sum(counts.accepted) for counts in self.local_acceptance)
        difference = count_difference(self.local_acceptance, self.compared_acceptance)
        return difference / max(1, total)

    @property
    def target_agreement(self) -> float:
        """The share of the other side's answer tokens that are the greedy choice of the target
        here."""
        if self.engine is None:
            return self.target_states.agreement
        prompts = [answer.prompt_ids for answer in self.reference.answers]
        return compute_target_states(self.target, prompts, self.engine.answer_ids).agreement


def is_significantly_lower(counts: AcceptanceCounts, expected: AcceptanceCounts) -> bool:
    """Return whether fewer drafts are accepted than rounding and chance explain."""
    standard_error = math.hypot(counts.standard_error, expected.standard_error)
    rounding_limit = MIN_MEASURED_TO_EXPECTED_ACCEPTANCE * expected.mean_accepted
    chance_limit = expected.mean_accepted - MAX_CHANCE_DIFFERENCE_STANDARD_ERRORS * standard_error
    return counts.mean_accepted < min(rounding_limit, chance_limit)


def count_difference(
    counts: Sequence[AcceptanceCounts], other_counts: Sequence[AcceptanceCounts]
) -> int:
    """Return by how many rounds and accepted drafts two measurements differ: answer by answer if
    both have one entry for each answer, else by the totals."""
    if len(counts) != len(other_counts):
        counts = [AcceptanceCounts.pool(counts)]
        other_counts = [AcceptanceCounts.pool(other_counts)]
    total = 0
    for each, other in zip(counts, other_counts, strict=True):
        total += abs(each.rounds - other.rounds)
        for accepted, other_accepted in zip_longest(each.accepted, other.accepted, fillvalue=0):
            total += abs(accepted - other_accepted)
    return total
