"""Checks that several options dataclasses need. Every function raises ValueError, naming the
key."""

from collections.abc import Iterable
from dataclasses import fields, is_dataclass

FREE_TEXT = (
    "free text"  # in a field's metadata: what is typed there is nobody's grammar and no path
)


def check_parts(options: object) -> None:
    """Check every field that is itself a dataclass of options."""
    for field in fields(options):
        part = getattr(options, field.name)
        if is_dataclass(part):
            part.check()


def at_least(options: object, prefix: str = "", **limits: int) -> None:
    """Raise unless every named field is at least its limit, or None."""
    for name, limit in limits.items():
        value = getattr(options, name)
        if value is not None and value < limit:
            raise ValueError(f"{prefix}{name}={value}: at least {limit}")


def above_zero(options: object, prefix: str, *names: str) -> None:
    """Raise unless every named field is above 0, or None."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ValueError(f"{prefix}{name}={value}: above 0")


def one_of(options: object, prefix: str = "", **choices: Iterable[str]) -> None:
    """Raise unless every named field has one of its choices."""
    for name, allowed in choices.items():
        if getattr(options, name) not in allowed:
            *most, last = map(str, allowed)
            raise ValueError(
                f"{prefix}{name}={getattr(options, name)}: use {', '.join(most)} or {last}"
            )


def temperature(options: object, prefix: str = "") -> None:
    """Raise unless the field `temperature` is 0, or large enough to divide logits by."""
    if options.temperature != 0 and not 0.001 <= options.temperature < float("inf"):
        raise ValueError(
            f"{prefix}temperature={options.temperature}: 0 for greedy decoding, or at least 0.001"
        )
