"""Dataclasses of options: their keys explained, their numbers checked, their texts taken as they
are typed or read from files."""

import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields, is_dataclass
from inspect import cleandoc
from math import isfinite
from pathlib import Path
from typing import Any

from infer.utils.checks import FREE_TEXT
from infer.utils.files import read_text

MAX_ABS_NUMBER = 2**62  # seeds and counts are 64 bits
MAX_TEXT_FILE_BYTES = 16 << 20
PRESET_GROUPS = ("model", "recipe", "experiment")  # later ones change what earlier ones say
# target=VALUE and data=VALUE mean target.path and data.path where VALUE looks like a path or a hub
# id.
PATH_GROUPS = ("target", "data")
PATH_PATTERN = re.compile(r".*/.*|.*\.(jsonl|jsonl\.gz|json|parquet|txt|gguf)['\"]?")


def print_help(options_class: type, values: dict, conf: Path) -> None:
    """Print every key with its value, type and meaning, and the groups of the folder `conf`."""
    print("\n".join(describe_options(options_class, values)))
    print("\nGroups (GROUP=NAME; target and data also take a path, data=chats.jsonl):")
    for group in sorted(path for path in conf.iterdir() if path.is_dir() and path.name != "hydra"):
        print(f"  {group.name}: {', '.join(sorted(file.stem for file in group.glob('*.yaml')))}")
    print(
        "\n--cfg job prints the configuration, --hydra-help explains Hydra's own options, such as -m for a sweep."
    )


def describe_options(options_class: type, values: dict, prefix: str = "") -> Iterator[str]:
    """Yield the docstring of a dataclass of options, every key with its full name, value and type;
    then those of its parts. `values`: by key, those of parts nested."""
    own = {field.name: field for field in fields(options_class)}

    def with_value(entry: re.Match) -> str:
        field = own.get(entry[1])
        if field is None or is_dataclass(field.type):
            return entry[0]
        kind = getattr(field.type, "__name__", field.type)
        return f"  {prefix}{field.name}={json.dumps(values[field.name])}  ({kind})\n    "

    yield re.sub(r"^(\w+): ", with_value, cleandoc(options_class.__doc__), flags=re.MULTILINE)
    for field in own.values():
        if is_dataclass(field.type):
            yield f"\n{prefix}{field.name}"
            yield from describe_options(field.type, values[field.name], f"{prefix}{field.name}.")


def check_numbers(options: Any) -> None:
    """Raise ValueError for a number that is not finite or too large for 64 bits."""
    for key, value in leaf_values(asdict(options)):
        if isinstance(value, (int, float)) and not (
            isfinite(value) and abs(value) < MAX_ABS_NUMBER
        ):
            raise ValueError(f"{key}={value}: a finite number of at most 62 bits")


def take_prompt(arguments: list[str]) -> tuple[list[str], str | None]:
    """Return the arguments without `--prompt TEXT`, and the text, None where there is none: a
    prompt is taken as it is typed, without Hydra's grammar."""
    if "--prompt" not in arguments[:-1]:
        return arguments, None
    place = arguments.index("--prompt")
    return arguments[:place] + arguments[place + 2 :], arguments[place + 1]


def rewrite_groups(arguments: Iterable[str]) -> list[str]:
    """Return arguments in which target=/path/to/model is target.path=/path/to/model, and
    +model=NAME is model=NAME: conf/ has a place for each preset, so that their order on the command
    line does not matter."""
    rewritten = []
    for argument in arguments:
        group, _, value = argument.partition("=")
        if group.removeprefix("+") in PRESET_GROUPS:
            argument = argument.removeprefix("+")
        elif group in PATH_GROUPS and PATH_PATTERN.fullmatch(value):
            argument = f"{group}.path={value}"
        rewritten.append(argument)
    return rewritten


def read_text_files(options: Any) -> None:
    """Read the files that options of free text name (`read_text_file`). Raises ValueError."""
    for field in fields(options):
        value = getattr(options, field.name)
        if is_dataclass(value):
            read_text_files(value)
        elif FREE_TEXT in field.metadata and isinstance(value, list):
            setattr(options, field.name, [read_text_file(field.name, text) for text in value])
        elif FREE_TEXT in field.metadata and value is not None:
            setattr(options, field.name, read_text_file(field.name, value))


def read_text_file(key: str, text: str) -> str:
    """Return what the file of `@FILE` holds, standard input for a prompt that is `-`, and any other
    text as it is; one that begins with `@` is written with `@@`. Raises ValueError where a file
    cannot be read."""
    if key == "prompt" and text == "-":
        return sys.stdin.read()
    if text.startswith("@@"):
        return text[1:]
    if not text.startswith("@") or "\n" in text:
        return text
    try:
        return read_text(Path(text[1:]).expanduser(), MAX_TEXT_FILE_BYTES)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{key}={text}: could not be read ({error}); @{text} is the text itself"
        ) from error


def leaf_values(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Yield (key, value) of all values in nested dictionaries and lists."""
    if not isinstance(value, (dict, list)):
        yield name, value
        return
    for key, inside in value.items() if isinstance(value, dict) else enumerate(value):
        yield from leaf_values(inside, f"{name}.{key}" if name else str(key))
