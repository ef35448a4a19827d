"""`COMMAND --help`: every key with its type, its default and its meaning, from the dataclasses of the options."""

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from inspect import cleandoc
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

KINDS = {str: "text", int: "whole number", float: "number", bool: "true or false", type(None): "null", Any: "anything"}
HOW = (
    "A text is taken as it is typed; lists are [a,b]; nothing is null. A group is chosen by GROUP=NAME, a bundle of "
    "settings by +model=NAME.\n--cfg job prints the configuration that a command line stands for."
)


def meanings(schema: type) -> tuple[str, dict[str, str]]:
    """Return what a class of options says of itself, and the meaning of each of its fields ("name: meaning")."""
    about, found, current = [], {}, None
    names = {field.name for field in fields(schema)}
    for line in cleandoc(schema.__doc__).splitlines():
        entry = re.match(r"(\w+): (.*)", line)
        if entry and entry[1] in names:
            current = entry[1]
            found[current] = entry[2]
        elif current and line.startswith("    "):
            found[current] += " " + line.strip()
        elif not line.strip():
            current = None
        elif not found:
            about.append(line)
    return " ".join(about), found


def kind_name(kind: object) -> str:
    """Return a type in plain words."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(map(kind_name, inside))
    if origin in (list, tuple):
        return f"list of {kind_name(inside[0])}s"
    if origin is dict:
        return "keys and values"
    return KINDS.get(kind) or getattr(kind, "__name__", str(kind)).lower()


def shown(value: object) -> str:
    """Return a value as one would type it, in short."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value if value.isprintable() and value.strip() == value and value else ascii(value)
    text = f"[{','.join(map(shown, value))}]" if isinstance(value, (list, tuple)) else str(value)
    return text if len(text) <= 60 else text[:60] + "..."


def explained(schema: type, values: object, options: dict[str, list[str]], prefix: str = "") -> Iterator[str]:
    """Yield the lines that explain a class's keys, its parts behind its own. `values`: an instance with the defaults;
    options: what may be chosen in a group of conf/."""
    from textwrap import wrap

    hints = get_type_hints(schema)
    about, meaning = meanings(schema)
    parts = [field.name for field in fields(schema) if is_dataclass(hints[field.name])]
    for field in fields(schema):
        if field.name in parts:
            continue
        yield f"  {prefix}{field.name}={shown(getattr(values, field.name))}  ({kind_name(hints[field.name])})"
        said = re.sub(r"\bNone\b", "null", meaning.get(field.name, ""))
        yield from wrap(said, 110, initial_indent=" " * 6, subsequent_indent=" " * 6)
    for name in parts:
        about, _ = meanings(hints[name])
        choices = f"\n  {name}=NAME: {', '.join(options[name])}" if options.get(name) else ""
        yield f"\n{prefix}{name}: {about}{choices}"
        yield from explained(hints[name], getattr(values, name), {}, f"{prefix}{name}.")


def help_text(name: str, schema: type, values: object, options: dict[str, list[str]]) -> str:
    """Return the help of a command."""
    about, _ = meanings(schema)
    bundles = f"\n\n+model=NAME: {', '.join(options['model'])}" if name == "train" else ""
    lines = "\n".join(explained(schema, values, options))
    return f"{name}: {about}\n\nKEY=DEFAULT  (type)\n{lines}{bundles}\n\n{HOW}"
