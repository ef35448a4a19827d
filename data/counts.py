"""Count the examples of a data set that are trained on, and why the others are not.

The commands `data` and `plan` and training print these counts.
"""

from collections import Counter
from dataclasses import dataclass, field

MAX_LISTED_EXCLUSION_REASONS = 20  # per category; the remaining reasons are summed in one more line
MAX_EXCLUSION_REASONS_IN_SUMMARY = 5


class ExampleError(ValueError):
    """An example cannot be trained on.

    `reason` omits the details of the single example, so that examples can be counted by reason.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason = reason


class InvalidExample(ExampleError):
    """An example is malformed: it is not JSON, has a wrong type, or a token id out of range."""


class ExcludedExample(ExampleError):
    """A well-formed example is left out by a rule, for example because it has no answer."""


def get_error_reason(error: ValueError) -> str:
    """Return what an example is counted by: the error's `reason`, else its whole message.

    ExampleError and UnicodeError have a `reason`.
    """
    return getattr(error, "reason", str(error))


@dataclass
class ExampleCounts:
    """Number of examples in a data set by outcome.

    used: trained on
    held_out: kept for evaluation
    not_taken: left over by data.max_examples, or by the weights of a mixture
    excluded, invalid: number of examples by reason
    first_invalid: location and error of the first invalid example
    """

    used: int = 0
    held_out: int = 0
    not_taken: int = 0
    excluded: dict[str, int] = field(default_factory=dict)
    invalid: dict[str, int] = field(default_factory=dict)
    first_invalid: str = ""

    @property
    def total(self) -> int:
        """Number of all examples that were read."""
        rejected = sum(self.excluded.values()) + sum(self.invalid.values())
        return self.used + self.held_out + self.not_taken + rejected

    def count_excluded(self, reason: str, count: int = 1) -> None:
        """Add `count` examples that a rule leaves out for `reason`."""
        self.excluded[reason] = self.excluded.get(reason, 0) + count

    def count_invalid(self, reason: str, description: str, count: int = 1) -> None:
        """Add `count` malformed examples.

        description: location and error of the first of them
        """
        self.invalid[reason] = self.invalid.get(reason, 0) + count
        if not self.first_invalid:
            self.first_invalid = description

    def add_counts(self, other: "ExampleCounts") -> None:
        """Add the counts of another data set to these."""
        self.used += other.used
        self.held_out += other.held_out
        self.not_taken += other.not_taken
        self.excluded = dict(Counter(self.excluded) + Counter(other.excluded))
        self.invalid = dict(Counter(self.invalid) + Counter(other.invalid))
        if not self.first_invalid:
            self.first_invalid = other.first_invalid

    def check_invalid_share(self, max_invalid: float) -> None:
        """Raise ValueError if more than the share `max_invalid` of all examples is invalid."""
        invalid_count = sum(self.invalid.values())
        max_invalid_count = max_invalid * self.total
        if invalid_count > max_invalid_count:
            raise ValueError(
                f"{invalid_count:,} of {self.total:,} examples are invalid; "
                f"data.max_invalid_fraction={max_invalid:g} allows {int(max_invalid_count):,}. "
                f"First: {self.first_invalid}"
            )

    def summarise(self) -> str:
        """Return the most frequent reasons for unused examples as a clause for an error message."""
        reasons = Counter(self.excluded) + Counter(self.invalid)
        clauses = [
            f"{count:,}: {reason}"
            for reason, count in reasons.most_common(MAX_EXCLUSION_REASONS_IN_SUMMARY)
        ]
        if self.held_out:
            clauses.append(f"{self.held_out:,}: held out for evaluation")
        return f"of {self.total:,} examples " + ", ".join(clauses)

    def format_lines(self) -> list[str]:
        """Return lines to print: one with all counts, then one for each reason."""
        excluded_count = sum(self.excluded.values())
        invalid_count = sum(self.invalid.values())
        left_over = f"{self.not_taken:,} left over, " if self.not_taken else ""
        lines = [
            f"examples   {self.total:,} read: {self.used:,} used, {self.held_out:,} held out, "
            f"{left_over}{excluded_count:,} excluded, {invalid_count:,} invalid"
        ]
        lines += _format_reasons("excluded", self.excluded)
        lines += _format_reasons("invalid", self.invalid)
        if self.first_invalid:
            lines.append(f"           first invalid: {self.first_invalid}")
        return lines


def _format_reasons(label: str, reasons: dict[str, int]) -> list[str]:
    """Return a line for each reason with its number of examples, the most frequent first."""
    ordered = Counter(reasons).most_common()
    lines = [
        f"{label:<11}{count:,}: {reason}"
        for reason, count in ordered[:MAX_LISTED_EXCLUSION_REASONS]
    ]

    remaining = ordered[MAX_LISTED_EXCLUSION_REASONS:]
    if remaining:
        remaining_count = sum(count for _, count in remaining)
        lines.append(f"{label:<11}{remaining_count:,}: {len(remaining)} other reasons")
    return lines
