"""What a person types after a command, made into Hydra's overrides.

Where a key of ours is a text, everything behind its `=` is that text: quotes, brackets, newlines, any language. Hydra's
grammar is kept for what is Hydra's: groups, lists, numbers; and a text that is a whole quoted
string already, `name='a b'` as Hydra sees it, is what stands between the quotes.
"""

import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from infer.utils.checks import FREE_TEXT
from infer.utils.files import read_text

TYPED = re.compile(r"(?P<sign>\+{0,2})(?P<key>[^\W\d][\w./]*)(?P<package>@[\w.]*)?=(?P<value>.*)", re.DOTALL)
QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
LARGEST_PROMPT = 16 << 20  # bytes of a file that is a prompt
# What a command whose class says FROM_RUN takes of its checkpoint's own run: not the device, which is this machine's,
# and not the leave to run a model's own code, which nobody but the user gives.
OF_RUN = {
    "target": ("path", "dtype", "chat_template_kwargs"),
    "data": ("source", "path", "split", "parts", "length", "long", "limit", "bad_rows"),
}


@dataclass(frozen=True)
class Key:
    """A key of a command that is no dataclass itself: its dotted name, its type, and whether it is free text."""

    name: str
    kind: Any
    free: bool
    default: Any

    @property
    def kinds(self) -> tuple:
        """The types that the key takes, None among them."""
        return get_args(self.kind) if get_origin(self.kind) in (Union, UnionType) else (self.kind,)

    @property
    def is_text(self) -> bool:
        return set(self.kinds) <= {str, type(None)}

    @property
    def open_ended(self) -> bool:
        """Whether the key holds names and values of the user's choice."""
        return dict in map(get_origin, self.kinds)

    @property
    def optional(self) -> bool:
        return type(None) in self.kinds


def keys_of(schema: type, prefix: str = "") -> Iterator[Key]:
    """Yield the keys of a dataclass of options, those of its parts with them."""
    hints = get_type_hints(schema)
    for field in fields(schema):
        name, kind = prefix + field.name, hints[field.name]
        if is_dataclass(kind):
            yield from keys_of(kind, f"{name}.")
        else:
            default = field.default if field.default is not MISSING else field.default_factory()
            yield Key(name, kind, FREE_TEXT in field.metadata, default)


def groups_of(schema: type) -> set[str]:
    """Return the keys of a dataclass that are dataclasses themselves, target, data and the like, and theirs: these have
    groups of their last name, head for drafter.head."""
    inside = {name: kind for name, kind in get_type_hints(schema).items() if is_dataclass(kind)}
    return set(inside).union(*map(groups_of, inside.values()))


def quote(text: str) -> str:
    """Return a text as one quoted string of Hydra's grammar."""
    return "'" + re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + "\\'" * bool(found[2]), text) + "'"


def unquote(text: str) -> str:
    """Return what a whole quoted string of Hydra's grammar stands for; any other text as it is."""
    if not QUOTED.fullmatch(text):
        return text
    mark = text[0]
    return re.sub(rf"(\\+)({mark}|\Z)", lambda found: found[1][: len(found[1]) // 2] + found[2], text[1:-1])


def readable(override: str) -> bool:
    """Return whether Hydra's grammar can read an override."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        OverridesParser.create().parse_override(override)
    except HydraException:
        return False
    return True


def hydra_overrides(schema: type, arguments: list[str]) -> list[str]:
    """Return the arguments in Hydra's grammar: texts quoted, and lists of texts that Hydra cannot read as they are. A
    recipe comes last, as it changes what a model's bundle says."""
    keys = {key.name: key for key in keys_of(schema)}
    ordered = sorted(arguments, key=lambda argument: argument.startswith("+recipe="))
    return [in_grammar(argument, keys) for argument in ordered]


def in_grammar(argument: str, keys: dict[str, Key]) -> str:
    """Return one argument in Hydra's grammar."""
    typed = TYPED.fullmatch(argument)
    key = keys.get(typed["key"]) if typed and not typed["package"] else None
    if key is None:
        parent = keys.get(typed["key"].rpartition(".")[0]) if typed and not typed["sign"] else None
        return f"++{argument}" if parent and parent.open_ended else argument
    value = typed["value"]
    start = f"{typed['sign'] or '++' * key.open_ended}{key.name}="  # ++: names that are not known before
    if key.is_text:
        own = QUOTED.fullmatch(value) or (key.optional and value == "null")
        return argument if own else start + quote(value)
    if value.startswith(("[", "{")) and not readable(argument):
        try:
            return start + literal(json.loads(value))  # JSON, whose keys have quotes
        except (ValueError, RecursionError):
            if key.kind == list[str] and value.endswith("]"):
                return f"{start}[{','.join(quote(unquote(part.strip())) for part in value[1:-1].split(','))}]"
    return start + value


def free_texts(schema: type, arguments: list[str]) -> dict[str, str]:
    """Return what is given for the keys that hold free text, as it is typed, by key. Interpolation has no place there:
    `${x}` may be part of a program."""
    free = {key.name for key in keys_of(schema) if key.free and key.is_text}
    found = (TYPED.fullmatch(argument) for argument in arguments)
    return {typed["key"]: free_text(typed["key"], typed["value"]) for typed in found if typed and typed["key"] in free}


def free_text(key: str, typed: str) -> str:
    """Return the text that is meant: `-` is standard input, `@file` the content of a file, `@@` a text that begins with
    one @; a text of several lines that begins with @ is itself. Raises ValueError if it cannot be read."""
    if typed == "-":
        try:
            return sys.stdin.read()
        except UnicodeDecodeError as error:
            raise ValueError(f"{key}=-: standard input is not UTF-8 ({error})") from error
    if typed.startswith("@@"):
        return typed[1:]
    if not typed.startswith("@") or "\n" in typed:
        return unquote(typed)
    try:
        return read_text(Path(os.path.expanduser(typed[1:])), LARGEST_PROMPT)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ValueError(
            f"{key}={typed}: the file could not be read ({reason}); {key}=@{typed} is the text itself"
        ) from error


def expand_home(config: object) -> None:
    """Put the home folder in the place of a leading ~/ in every text that is not free, in place."""
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            expand_home(value)
        elif isinstance(value, list) and any(map(is_dataclass, value)):
            for part in value:
                expand_home(part)
        elif FREE_TEXT not in field.metadata:
            if isinstance(value, list):
                value = [at_home(part) for part in value]
            setattr(config, field.name, at_home(value))


def at_home(value: object) -> object:
    """Return a path with the home folder in the place of ~; any other value as it is."""
    return os.path.expanduser(value) if isinstance(value, str) and (value == "~" or value.startswith("~/")) else value


def check_keys(schema: type, arguments: list[str], groups: set[str]) -> None:
    """Raise ValueError for an argument that is no KEY=VALUE, or whose key there is not, with the nearest one.

    groups: the folders of conf/, which may be chosen from as `+group=option`.
    """
    own, known = groups_of(schema), list(keys_of(schema))
    names = {key.name for key in known} | own
    open_ended = tuple(f"{key.name}." for key in known if key.open_ended)
    for argument in arguments:
        if argument.startswith(("-", "~")):
            continue
        typed = TYPED.fullmatch(argument)
        if typed is None:
            free = next((key.name for key in known if key.free and key.is_text), None)
            hint = f"; for a text: {free}={shortened(argument)!r}" if free and "=" not in argument else ""
            raise ValueError(f"{shortened(argument)!r} is no KEY=VALUE{hint}")
        key = typed["key"]
        if key == "model" and not typed["sign"] and "model" in groups and "model" not in names:
            raise ValueError(f"model={typed['value']}: write +model={typed['value']}, it adds to the configuration")
        known_place = key in names or key.startswith(open_ended) or (key in groups and (key in own or typed["sign"]))
        if not known_place and not typed["package"]:
            near = nearest(key, names | (groups if key in groups else set()))
            raise ValueError(f"{shortened(key)}: no such key{near} --help explains every key")


def shortened(text: str) -> str:
    return text if len(text) <= 60 else text[:60] + "..."


def nearest(key: str, names: set[str]) -> str:
    """Return the words that suggest the names which a mistyped key may mean, or nothing."""
    by_end = {}
    for name in sorted(names):
        by_end.setdefault(name.rsplit(".", 1)[-1], []).append(name)
    found = get_close_matches(key, sorted(names), 1, 0.8)
    if not found:
        ends = get_close_matches(key.rsplit(".", 1)[-1], by_end, 1, 0.75)
        same = [name for end in ends for name in by_end[end]]
        found = get_close_matches(key, same, 3, 0.0) if "." in key else same[:3]
    return f", did you mean {' or '.join(found[:3])}?" if found else ";"


def run_of(checkpoint: str) -> dict | None:
    """Return the configuration of the run that a checkpoint is part of; None for anything else."""
    try:
        folder, best = Path(checkpoint), Path(checkpoint) / "checkpoints" / "best"  # of a run's folder
        folder = (best if best.is_dir() else folder).resolve()  # best is a link to a step
        step = folder.parent if folder.name == "drafter" else folder
        file = step.parent.parent / "config.json"
        if step.parent.name != "checkpoints" or not file.is_file():
            return None
        run = json.loads(read_text(file, 1 << 20))
    except (OSError, ValueError, RecursionError):
        return None
    return run if isinstance(run, dict) else None


def run_overrides(schema: type, config: object, arguments: list[str]) -> list[str]:
    """Return the overrides that give a command the target and the data of its checkpoint's own run, where they differ
    and the user named neither group nor what decides it. `config`: composed from the arguments."""
    sections = getattr(schema, "FROM_RUN", ())
    if not sections:
        return []
    checkpoint = next(iter(config.checkpoints), None) if hasattr(config, "checkpoints") else config.checkpoint
    run = run_of(checkpoint) if checkpoint else None
    if run is None:
        return []
    typed = {found["key"] for argument in arguments if (found := TYPED.fullmatch(argument))}
    overrides = []
    for section in sections:
        theirs, ours = run.get(section), getattr(config, section)
        deciding = {section, *(f"{section}.{name}" for name in ("path", "source", "parts"))}
        if section == "data":
            deciding.add("suite")
        if not isinstance(theirs, dict) or typed & deciding:
            continue
        for name in OF_RUN[section]:
            if name in theirs and plain(getattr(ours, name)) != theirs[name] and f"{section}.{name}" not in typed:
                overrides.append(f"{section}.{name}={literal(theirs[name])}")
    return overrides


def plain(value: object) -> object:
    """Return a list of dataclasses as dictionaries; other values as they are."""
    return [vars(part) if is_dataclass(part) else part for part in value] if isinstance(value, list) else value


def literal(value: object) -> str:
    """Return a value of JSON in Hydra's grammar."""
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, list):
        return f"[{','.join(map(literal, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{literal(inside)}" for key, inside in value.items()) + "}"
    return json.dumps(value)
