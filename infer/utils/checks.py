"""Checks of option values that several option dataclasses need.

Every `require_` function raises a ValueError that names the option, its value and what is allowed.
"""

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

# Key in the metadata of a dataclass field. It marks an option whose value is either a text, or
# "@FILE", where FILE is the path of a file that contains the text.
TEXT_OR_FILE_METADATA_KEY = "text or @file"

MIN_TEMPERATURE = 0.001  # logits divided by a smaller temperature could overflow


def check_nested_options(options: Any) -> None:
    """Call `check()` on every field of `options` that is itself a dataclass of options."""
    for field in fields(options):
        nested_options: Any = getattr(options, field.name)
        if is_dataclass(nested_options):
            nested_options.check()


def require_at_least(options: object, prefix: str = "", **minimums: int) -> None:
    """Raise ValueError if an option is below its minimum. An option that is None is allowed.

    prefix: text in front of the option's name in the message, such as "optim."
    minimums: option names as keyword arguments, with the smallest allowed value of each
    """
    for name, minimum in minimums.items():
        value = getattr(options, name)
        if value is not None and value < minimum:
            raise ValueError(f"{prefix}{name}={value}: must be at least {minimum}")


def require_positive(options: object, prefix: str, *names: str) -> None:
    """Raise ValueError if an option is not above 0. An option that is None is allowed.

    prefix: text in front of the option's name in the message, such as "optim."
    names: names of the options
    """
    for name in names:
        value = getattr(options, name)
        # Written this way, and not as `value <= 0`, the condition is also true for NaN.
        if value is not None and not value > 0:
            raise ValueError(f"{prefix}{name}={value}: must be above 0")


def require_one_of(options: object, prefix: str = "", **choices: Iterable[object]) -> None:
    """Raise ValueError if an option does not have one of its allowed values.

    prefix: text in front of the option's name in the message, such as "optim."
    choices: option names as keyword arguments, with the allowed values of each
    """
    for name, allowed in choices.items():
        value = getattr(options, name)
        if value not in allowed:
            *first_choices, last_choice = map(str, allowed)
            raise ValueError(
                f"{prefix}{name}={value}: use {', '.join(first_choices)} or {last_choice}"
            )


def require_valid_temperature(options: Any, prefix: str = "") -> None:
    """Raise ValueError unless the option `temperature` is 0, or finite and at least
    MIN_TEMPERATURE.

    prefix: text in front of the option's name in the message, such as "decoding."
    """
    temperature = options.temperature
    if temperature != 0 and not MIN_TEMPERATURE <= temperature < float("inf"):
        raise ValueError(
            f"{prefix}temperature={temperature}: use 0 for greedy decoding, or at least "
            f"{MIN_TEMPERATURE}"
        )


def require_http_address(options: object, *names: str) -> None:
    """Raise ValueError if an option is not the address of an HTTP server. An option that is None is
    allowed.

    names: names of the options
    """
    for name in names:
        value = getattr(options, name)
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError(f"{name}={value}: give an address such as http://127.0.0.1:8000")
