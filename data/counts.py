"""Count how many examples of a data set are trained on, and how many are not, by reason.

Training and the commands `data` and `plan` print these counts.
"""

from collections import Counter
from dataclasses import dataclass, field

# Maximum number of reasons that are printed for excluded examples, one per line. The same maximum
# applies to invalid examples. One more line has the number of examples with all other reasons.
MAX_LISTED_EXCLUSION_REASONS = 20
MAX_EXCLUSION_REASONS_IN_SUMMARY = 5  # maximum number of reasons that an error message lists


class ExampleError(ValueError):
    """Raised for an example that cannot be trained on.

    The attribute `reason` is the error message without details of the single example, such as
    quoted values. Examples with the same `reason` are counted together.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason = reason


class InvalidExample(ExampleError):
    """Raised for a malformed example, such as a line that is not JSON."""


class ExcludedExample(ExampleError):
    """Raised for a well-formed example that is not trained on, such as a chat without an answer."""


def get_error_reason(error: ValueError) -> str:
    """Return the reason under which an example with this error is counted.

    The reason is the error's attribute `reason`, which ExampleError and UnicodeError have. For
    other errors it is the whole error message.
    """
    return getattr(error, "reason", str(error))


@dataclass
class ExampleCounts:
    """How many examples of a data set are trained on, and how many are not, by reason.

    used: number of examples that are trained on
    held_out: number of examples that are held out for evaluation
    not_taken: number of usable examples that are not trained on, because of data.max_examples or
        because the weights of a mixture need fewer examples of their data set
    excluded: keys are reasons, values are numbers of well-formed examples that are not trained on
    invalid: keys are reasons, values are numbers of malformed examples
    first_invalid: location and error message of the first malformed example; "" if there is none
    """

    used: int = 0
    held_out: int = 0
    not_taken: int = 0
    excluded: dict[str, int] = field(default_factory=dict)
    invalid: dict[str, int] = field(default_factory=dict)
    first_invalid: str = ""

    @property
    def total(self) -> int:
        """Number of examples that were read, used or not."""
        rejected = sum(self.excluded.values()) + sum(self.invalid.values())
        return self.used + self.held_out + self.not_taken + rejected

    def count_excluded(self, reason: str, count: int = 1) -> None:
        """Add `count` to the number of examples that are excluded for `reason`."""
        self.excluded[reason] = self.excluded.get(reason, 0) + count

    def count_invalid(self, reason: str, description: str, count: int = 1) -> None:
        """Add `count` to the number of examples that are malformed for `reason`.

        description: location and error message of the first of these examples
        """
        self.invalid[reason] = self.invalid.get(reason, 0) + count
        if not self.first_invalid:
            self.first_invalid = description

    def add_counts(self, other: "ExampleCounts") -> None:
        """Add the counts of another data set to the counts in this object."""
        self.used += other.used
        self.held_out += other.held_out
        self.not_taken += other.not_taken
        self.excluded = dict(Counter(self.excluded) + Counter(other.excluded))
        self.invalid = dict(Counter(self.invalid) + Counter(other.invalid))
        if not self.first_invalid:
            self.first_invalid = other.first_invalid

    def check_invalid_fraction(self, max_invalid_fraction: float) -> None:
        """Raise ValueError if more than the fraction `max_invalid_fraction` of all examples is
        invalid."""
        invalid_count = sum(self.invalid.values())
        max_invalid_count = max_invalid_fraction * self.total
        if invalid_count > max_invalid_count:
            raise ValueError(
                f"{invalid_count:,} of {self.total:,} examples are invalid; "
                f"data.max_invalid_fraction={max_invalid_fraction:g} allows "
                f"{int(max_invalid_count):,}. First: {self.first_invalid}"
            )

    def summarise_unused(self) -> str:
        """Return a text for an error message: the most frequent reasons, with their counts."""
        reasons = Counter(self.excluded) + Counter(self.invalid)
        clauses = [
            f"{count:,} ({reason})"
            for reason, count in reasons.most_common(MAX_EXCLUSION_REASONS_IN_SUMMARY)
        ]
        if self.held_out:
            clauses.append(f"{self.held_out:,} (held out for evaluation)")
        return f"{self.total:,} examples were read; not used, by reason: " + ", ".join(clauses)

    def format_lines(self) -> list[str]:
        """Return the counts as lines to print: one line with the totals, then a line per reason."""
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
    """Return lines to print, one per reason with its number of examples, the most frequent first.

    label: first word of each line, such as "excluded"
    """
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
