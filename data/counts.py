"""How many examples of a data set are learnt from, and why the others are not: what `data`, `plan`
and training print."""

from collections import Counter
from dataclasses import dataclass, field

MAX_REASON_LINES = 20  # of each kind; further reasons are summed up in one more line


class ExampleError(ValueError):
    """Raised for an example that is not learnt from. `reason` says why, without the details of this
    one example, so that examples can be counted by it."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason = reason


class InvalidExample(ExampleError):
    """Raised for an example that is broken: no JSON, a wrong type, a token id out of range."""


class ExcludedExample(ExampleError):
    """Raised for a sound example that a rule leaves out: it has no answer, the chat template cannot
    show it."""


@dataclass
class ExampleCounts:
    """Count the examples of a data set by what becomes of them.

    used: learnt from
    held_out: kept for evaluation
    not_taken: left over by data.max_examples, or by the weights of a mixture
    excluded, invalid: by reason
    first_invalid: where the first invalid example is, and what is wrong with it
    """

    used: int = 0
    held_out: int = 0
    not_taken: int = 0
    excluded: dict[str, int] = field(default_factory=dict)
    invalid: dict[str, int] = field(default_factory=dict)
    first_invalid: str = ""

    @property
    def total(self) -> int:
        """Return the number of all examples that were read."""
        rejected = sum(self.excluded.values()) + sum(self.invalid.values())
        return self.used + self.held_out + self.not_taken + rejected

    def exclude(self, reason: str, count: int = 1) -> None:
        """Count examples that a rule leaves out."""
        self.excluded[reason] = self.excluded.get(reason, 0) + count

    def invalidate(self, reason: str, described: str, count: int = 1) -> None:
        """Count broken examples; `described`: where the first of them is, and what is wrong with
        it."""
        self.invalid[reason] = self.invalid.get(reason, 0) + count
        self.first_invalid = self.first_invalid or described

    def add(self, other: "ExampleCounts") -> None:
        """Add the counts of another data set."""
        self.used += other.used
        self.held_out += other.held_out
        self.not_taken += other.not_taken
        self.excluded = dict(Counter(self.excluded) + Counter(other.excluded))
        self.invalid = dict(Counter(self.invalid) + Counter(other.invalid))
        self.first_invalid = self.first_invalid or other.first_invalid

    def check(self, max_invalid: float) -> None:
        """Raise ValueError if more than the share `max_invalid` of all examples are invalid."""
        invalid = sum(self.invalid.values())
        if invalid > max_invalid * self.total:
            raise ValueError(
                f"{invalid:,} of {self.total:,} examples are invalid; data.max_invalid_fraction={max_invalid:g} "
                f"allows {int(max_invalid * self.total):,}. First: {self.first_invalid}"
            )

    def summary(self) -> str:
        """Return the counts in a part of a sentence."""
        reasons = Counter(self.excluded) + Counter(self.invalid)
        parts = [f"{count:,}: {reason}" for reason, count in reasons.most_common(5)]
        parts += [f"{self.held_out:,}: held out for evaluation"] if self.held_out else []
        return f"of {self.total:,} examples " + ", ".join(parts)

    def lines(self) -> list[str]:
        """Return the counts as lines to print: one for all examples, then one for each reason."""
        excluded = sum(self.excluded.values())
        invalid = sum(self.invalid.values())
        not_taken = f"{self.not_taken:,} left over, " if self.not_taken else ""
        lines = [
            f"examples   {self.total:,} read: {self.used:,} used, {self.held_out:,} held out, "
            f"{not_taken}{excluded:,} excluded, {invalid:,} invalid"
        ]
        lines += _reason_lines("excluded", self.excluded)
        lines += _reason_lines("invalid", self.invalid)
        if self.first_invalid:
            lines.append(f"           first invalid: {self.first_invalid}")
        return lines


def _reason_lines(label: str, reasons: dict[str, int]) -> list[str]:
    """Return a line for each reason, the most frequent first."""
    ordered = Counter(reasons).most_common()
    lines = [f"{label:<11}{count:,}: {reason}" for reason, count in ordered[:MAX_REASON_LINES]]
    further = ordered[MAX_REASON_LINES:]
    if further:
        lines.append(
            f"{label:<11}{sum(count for _, count in further):,}: {len(further)} other reasons"
        )
    return lines
