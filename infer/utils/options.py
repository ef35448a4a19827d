"""Handling of option dataclasses: their help text, checks of their numbers, and text options that
are read from files."""

import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields, is_dataclass
from inspect import cleandoc
from math import isfinite
from pathlib import Path
from typing import Any

from infer.utils.checks import TEXT_OR_FILE_METADATA_KEY
from infer.utils.files import read_limited_text

NUMERIC_OPTION_ABSOLUTE_VALUE_BOUND = 2**62  # seeds and counts are 64-bit integers
MAX_OPTION_TEXT_FILE_BYTES = 16 << 20
# Groups of presets. A preset of a later group overrides the options of a preset of an earlier
# group.
PRESET_GROUPS = ("model", "recipe", "experiment")
# For these groups, GROUP=VALUE means GROUP.path=VALUE if VALUE looks like a path or a repository on
# the hub.
HYDRA_GROUPS_ACCEPTING_PATHS = ("target", "data")
PATH_OR_HUB_NAME_PATTERN = re.compile(r".*/.*|.*\.(jsonl|jsonl\.gz|json|parquet|txt|gguf)['\"]?")


def print_help(options_class: Any, values: dict, config_folder: Path) -> None:
    """Print every option with its value, type and meaning, and then the groups in `config_folder`
    with their choices.

    options_class: the command's dataclass of options
    values: the value of every option, by name; a nested dictionary for a nested dataclass
    """
    print("\n".join(describe_options(options_class, values)))
    print(
        "\nGroups (write GROUP=NAME; target and data also take a path, such as data=chats.jsonl):"
    )
    groups = [path for path in config_folder.iterdir() if path.is_dir() and path.name != "hydra"]
    for group in sorted(groups):
        names = sorted(file.stem for file in group.glob("*.yaml"))
        print(f"  {group.name}: {', '.join(names)}")
    print(
        "\n--cfg job prints the configuration. --hydra-help explains Hydra's own options, such as "
        "-m for a sweep."
    )


def describe_options(options_class: Any, values: dict, prefix: str = "") -> Iterator[str]:
    """Yield the help texts of a dataclass of options and of the dataclasses nested in it.

    values: the value of every option, by name; a nested dictionary for a nested dataclass
    prefix: text in front of the option names, such as "decoding."

    The help text is the docstring of the dataclass. In every entry "name: meaning", the name is
    replaced by the option's full name, value and type.
    """
    fields_by_name = {field.name: field for field in fields(options_class)}

    def add_value(entry: re.Match) -> str:
        field = fields_by_name.get(entry[1])
        if field is None or is_dataclass(field.type):
            return entry[0]
        type_name = getattr(field.type, "__name__", field.type)
        return f"  {prefix}{field.name}={json.dumps(values[field.name])}  ({type_name})\n    "

    docstring = cleandoc(options_class.__doc__)
    yield re.sub(r"^(\w+): ", add_value, docstring, flags=re.MULTILINE)
    for field in fields_by_name.values():
        if is_dataclass(field.type):
            yield f"\n{prefix}{field.name}"
            yield from describe_options(field.type, values[field.name], f"{prefix}{field.name}.")


def check_numbers(options: Any) -> None:
    """Raise ValueError if an option's number is not finite, or if its absolute value does not fit
    into 62 bits."""
    for key, value in iterate_leaf_values(asdict(options)):
        if not isinstance(value, (int, float)):
            continue
        if not isfinite(value) or abs(value) >= NUMERIC_OPTION_ABSOLUTE_VALUE_BOUND:
            raise ValueError(f"{key}={value}: must be a finite number between -2**62 and 2**62")


def split_prompt_argument(arguments: list[str]) -> tuple[list[str], str | None]:
    """Remove `--prompt TEXT` from the command-line arguments.

    Returns the other arguments, and the text or None if there is no prompt. The text does not go
    through Hydra, because Hydra's grammar would interpret special characters in the text.
    """
    if "--prompt" not in arguments[:-1]:
        return arguments, None
    index = arguments.index("--prompt")
    return arguments[:index] + arguments[index + 2 :], arguments[index + 1]


def expand_short_arguments(arguments: Iterable[str]) -> list[str]:
    """Rewrite short forms of command-line arguments to the form that Hydra takes.

    target=/path/to/model becomes target.path=/path/to/model. +model=NAME becomes model=NAME. This
    is possible because the files in conf/ list every preset group, so that the order of presets on
    the command line does not matter.
    """
    rewritten = []
    for argument in arguments:
        group, _, value = argument.partition("=")
        if group.removeprefix("+") in PRESET_GROUPS:
            argument = argument.removeprefix("+")
        elif group in HYDRA_GROUPS_ACCEPTING_PATHS and PATH_OR_HUB_NAME_PATTERN.fullmatch(value):
            argument = f"{group}.path={value}"
        rewritten.append(argument)
    return rewritten


def resolve_text_options(options: Any) -> None:
    """Replace "@FILE" by the file's content in every option whose field is marked with
    TEXT_OR_FILE_METADATA_KEY.

    Options of nested dataclasses are included. Raises ValueError if a file cannot be read.
    """
    for field in fields(options):
        value = getattr(options, field.name)
        if is_dataclass(value):
            resolve_text_options(value)
        elif TEXT_OR_FILE_METADATA_KEY in field.metadata and isinstance(value, list):
            setattr(options, field.name, [resolve_text_option(field.name, text) for text in value])
        elif TEXT_OR_FILE_METADATA_KEY in field.metadata and value is not None:
            setattr(options, field.name, resolve_text_option(field.name, value))


def resolve_text_option(key: str, text: str) -> str:
    """Return the text that the value of an option stands for.

    | value | result |
    | --- | --- |
    | @FILE | content of the file |
    | - (only for the option `prompt`) | standard input |
    | @@... | the value without its first @ |
    | anything else | the value itself |

    Raises ValueError if the file cannot be read.
    """
    if key == "prompt" and text == "-":
        return sys.stdin.read()
    if text.startswith("@@"):
        return text[1:]
    if not text.startswith("@") or "\n" in text:
        return text
    try:
        return read_limited_text(Path(text[1:]).expanduser(), MAX_OPTION_TEXT_FILE_BYTES)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{key}={text}: the file could not be read ({error}); to use {text} as text, write "
            f"@{text}"
        ) from error


def iterate_leaf_values(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Yield (dotted key, value) for every value in nested dictionaries and lists. `name` is the key
    of `value` itself."""
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    else:
        yield name, value
        return
    for key, nested_value in items:
        yield from iterate_leaf_values(nested_value, f"{name}.{key}" if name else str(key))
