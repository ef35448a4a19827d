"""Functions for the option dataclasses of all commands: print help, check numbers, expand short
command-line arguments, and read the texts of options from files."""

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
from infer.utils.files import read_small_regular_file

# Numbers below this bound fit into 64-bit integers, also after small numbers are added to them.
NUMERIC_OPTION_ABSOLUTE_VALUE_BOUND = 2**62
MAX_OPTION_TEXT_FILE_BYTES = 16 << 20
# Groups of presets in conf/. If two presets set the same option, the preset of the later group
# takes effect.
PRESET_GROUPS = ("model", "recipe", "experiment")
# For these groups, GROUP=VALUE is short for GROUP.path=VALUE if VALUE looks like a path, or like a
# repository on the Hugging Face hub.
HYDRA_GROUPS_ACCEPTING_PATHS = ("target", "data")
PATH_OR_HUB_NAME_PATTERN = re.compile(r".*/.*|.*\.(jsonl|jsonl\.gz|json|parquet|txt|gguf)['\"]?")


def print_help(options_class: Any, values: dict, config_folder: Path) -> None:
    """Print the help of a command: every option with its value, type and meaning, and then the
    option groups in `config_folder` with the names that may be chosen.

    options_class: the command's dataclass of options
    values: the value of every option, by name; a nested dictionary for a nested dataclass
    """
    print("\n".join(describe_options(options_class, values)))
    print(
        "\nGroups of options (choose with GROUP=NAME; target and data also take a path, such as "
        "data=chats.jsonl):"
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
    """Yield the help text of each dataclass of options: of `options_class`, and of the dataclasses
    nested in it.

    values: the value of every option, by name; a nested dictionary for a nested dataclass
    prefix: text in front of the option names, such as "decoding."

    The help text is the docstring of the dataclass. In each of its lines "name: meaning", the name
    is replaced by the option's full name, value and type.
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
    """Raise ValueError if a numeric option is infinite or NaN, or if its absolute value is 2**62 or
    more. Options of nested dataclasses are included."""
    for key, value in iterate_leaf_values(asdict(options)):
        if not isinstance(value, (int, float)):
            continue
        if not isfinite(value) or abs(value) >= NUMERIC_OPTION_ABSOLUTE_VALUE_BOUND:
            raise ValueError(f"{key}={value}: must be a finite number between -2**62 and 2**62")


def extract_prompt_argument(arguments: list[str]) -> tuple[list[str], str | None]:
    """Remove `--prompt TEXT` from the command-line arguments.

    Returns the other arguments, and TEXT, or None if there is no `--prompt`. TEXT is not passed to
    Hydra, because Hydra would interpret special characters in it.
    """
    if "--prompt" not in arguments[:-1]:
        return arguments, None
    index = arguments.index("--prompt")
    return arguments[:index] + arguments[index + 2 :], arguments[index + 1]


def normalise_overrides(arguments: Iterable[str]) -> list[str]:
    """Rewrite short forms of command-line arguments to forms that Hydra understands.

    target=/path/to/model becomes target.path=/path/to/model. The "+" in front of a preset, as in
    +model=NAME, is removed, because the files in conf/ already list every preset group.
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


def read_text_or_file_options(options: Any) -> None:
    """Replace values "@FILE" by the content of the file, in place. This applies to options whose
    dataclass field is marked with TEXT_OR_FILE_METADATA_KEY.

    Options of nested dataclasses are included. Raises ValueError if a file cannot be read.
    """
    for field in fields(options):
        value = getattr(options, field.name)
        if is_dataclass(value):
            read_text_or_file_options(value)
        elif TEXT_OR_FILE_METADATA_KEY in field.metadata and isinstance(value, list):
            setattr(
                options, field.name, [read_text_or_file_option(field.name, text) for text in value]
            )
        elif TEXT_OR_FILE_METADATA_KEY in field.metadata and value is not None:
            setattr(options, field.name, read_text_or_file_option(field.name, value))


def read_text_or_file_option(key: str, text: str) -> str:
    """Return the text for an option's value, which is read from a file or from standard input if
    the value says so.

    key: the option's name. text: the value.

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
        return read_small_regular_file(Path(text[1:]).expanduser(), MAX_OPTION_TEXT_FILE_BYTES)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{key}={text}: the file could not be read ({error}); if you mean the text {text} and "
            f"not a file, write @{text}"
        ) from error


def iterate_leaf_values(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Yield a pair (dotted key, value) for each value inside nested dictionaries and lists, such as
    ("optim.batch_size", 8).

    name: the dotted key of `value` itself, for the recursion
    """
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    else:
        yield name, value
        return
    for key, nested_value in items:
        yield from iterate_leaf_values(nested_value, f"{name}.{key}" if name else str(key))
