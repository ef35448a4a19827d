"""From the words behind a command to a checked dataclass: Hydra composes conf/, types are enforced, and
no DictConfig survives.

GROUP=NAME and +model=NAME choose files of conf/; target= and data= also take a path, as target.path= and
data.path= do. KEY=VALUE sets a key: a text is taken as it is typed
(quotes, brackets, newlines, any language), anything else is YAML.

`COMMAND --help` shows every key with its default, type and meaning.
"""

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import Field, asdict, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from inspect import cleandoc
from pathlib import Path
from typing import get_args, get_origin

from infer.utils.checks import FREE_TEXT
from infer.utils.files import read_text

CONF = Path(__file__).resolve().parent.parent.parent / "conf"
BUNDLES = ("model", "recipe")  # groups that change others, the second what the first one says
TYPED = re.compile(r"\+{0,2}(?P<key>[^\W\d][\w.]*)=(?P<value>.*)", re.DOTALL)
LARGEST = 2**62  # of a number: seeds and counts are 64 bits
HOW = (
    "A text is taken as it is typed; lists are [a,b], of numbers a,b too; nothing is null. A group is chosen by "
    "GROUP=NAME, a bundle of settings by +model=NAME.\n--cfg job prints the configuration that a command line stands "
    "for."
)
# Suffixes that make the VALUE of GROUP=VALUE a file's name.
PATH_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".txt", ".gguf")
LONGEST_SENTENCE = 480  # characters
LARGEST_PROMPT = 16 << 20  # bytes of a file that is a prompt
# What a command whose class says FROM_RUN takes of its checkpoint's own run: not the device, which is
# this machine's, and not the leave to run a model's own code, which nobody but the user gives.
OF_RUN = {
    "target": ("path", "dtype", "chat_template_kwargs"),
    "data": ("source", "path", "split", "parts", "length", "limit", "max_invalid"),
}


def composed(name: str, schema: type, arguments: list[str]):
    """Return conf/<name>.yaml with the arguments as a checked `schema`, whose `check()` raises
    ValueError for impossible combinations. Raises ValueError, one sentence, for whatever is wrong."""
    from omegaconf import OmegaConf

    with in_one_sentence():
        config = OmegaConf.to_object(merged(name, schema, arguments))
        for key, value in values(asdict(config)):
            if isinstance(value, (int, float)) and not abs(value) < LARGEST:
                raise ValueError(f"{key}={value}: a finite number of at most 62 bits")
        config.check()
    return config


@contextmanager
def in_one_sentence() -> Iterator[None]:
    """Raise ValueError, one sentence, for any error within the block, with the key that OmegaConf
    names."""
    try:
        yield
    except Exception as error:  # of any kind: OmegaConf lets its own AttributeErrors and the like through
        said, _, rest = (str(error).strip() or type(error).__name__).partition("\n    full_key: ")
        key = rest.split("\n")[0]
        if key and key not in said:
            said = f"{key}: {said}"
        said = " ".join(said.split())
        if len(said) > LONGEST_SENTENCE:
            said = f"{said[:300]} ... {said[-150:]}"
        raise ValueError(said) from error


def merged(name: str, schema: type, arguments: list[str]):
    """Return conf/<name>.yaml with the arguments as OmegaConf's `schema`, not yet checked."""
    from omegaconf import OmegaConf

    groups, given = typed(schema, groups_of(name), arguments)
    chosen = [f"{group}={option}" for group, option in groups.items() if group not in BUNDLES]
    chosen += [f"+{group}={groups[group]}" for group in BUNDLES if group in groups]
    base = with_groups(name, schema, *chosen)
    return OmegaConf.merge(base, of_run(schema, OmegaConf.merge(base, given), groups, given), given)


@cache
def groups_of(name: str) -> set[str]:
    """Return the groups of conf/ that a command's configuration is composed of."""
    from omegaconf import OmegaConf

    file = CONF / f"{name}.yaml"
    parts = OmegaConf.load(file).defaults if file.exists() else []
    groups = {key for part in parts if not isinstance(part, str) for key in part}
    return groups | {*BUNDLES} if name == "train" else groups


def typed(schema: type, known: set[str], arguments: list[str]):
    """Return the groups that the arguments choose, by name, and what they give for keys, as a
    DictConfig. Raises ValueError for what is neither: `known` are the command's groups."""
    from omegaconf import OmegaConf

    keys, groups, given = keys_of(schema), {}, OmegaConf.create()
    old_names = {
        f"{key.rpartition('.')[0]}.{field.metadata['renamed_from']}": key
        for key, field in keys.items()
        if "renamed_from" in field.metadata
    }
    for argument in arguments:
        found = TYPED.fullmatch(argument)
        if found is None:
            free = next((name for name, field in keys.items() if FREE_TEXT in field.metadata), None)
            hint = f"; for a text: {free}={shortened(argument)!r}" if free and "=" not in argument else ""
            raise ValueError(f"{shortened(argument)!r} is no KEY=VALUE{hint}")
        key, value = found["key"], found["value"]
        if key in known and f"{key}.path" in keys and names_a_path(key, value):
            key = f"{key}.path"
        field, parent = keys.get(key), keys.get(key.rpartition(".")[0])
        if field is None and key in known:
            if value not in (options := options_of(key)):
                raise ValueError(f"{key}={shortened(value)}: there is {', '.join(options)}")
            groups[key] = value
        elif field is not None and field.type in (str, str | None):
            null = value == "null" and field.type is not str
            text = None if null else literal(text_of(key, value, FREE_TEXT in field.metadata))
            OmegaConf.update(given, key, text)
        elif field and (entries := entries_without_brackets(key, value, field.type)) is not None:
            OmegaConf.update(given, key, entries)
        elif field is not None or (parent is not None and get_origin(parent.type) is dict):
            value = OmegaConf.from_dotlist([f"{key}={literal(value)}"])
            given = OmegaConf.merge(given, value)
        elif key in old_names:
            new_key = old_names[key]
            default = keys[new_key].default
            raise ValueError(f"{key} was replaced by {new_key} (default {default}), which --help explains")
        else:
            near = nearest(key, sorted(keys))
            raise ValueError(f"{shortened(key)}: no such key{near} --help explains every key")
    return groups, given


def keys_of(schema: type, prefix: str = "") -> dict[str, Field]:
    """Return the keys of a dataclass of options by their dotted names, those of its parts with them."""
    keys = {}
    for field in fields(schema):
        name = prefix + field.name
        keys |= keys_of(field.type, f"{name}.") if is_dataclass(field.type) else {name: field}
    return keys


def options_of(group: str) -> list[str]:
    """Return what may be chosen in a group of conf/; nothing where there is no such group."""
    options = {file.stem for file in (CONF / group).glob("*.yaml")}
    return sorted(options | {*options_of("target")} - {"embedded"} if group == "model" else options)


@cache
def with_groups(name: str, schema: type, *chosen: str):
    """Return conf/<name>.yaml with options of its groups, GROUP=NAME, as Hydra composes them, as
    OmegaConf's `schema`. Hydra is told what has no file: a command without groups, and model=NAME for
    every target without one, which is the bundle conf/model/hf.yaml with that target."""
    import hydra
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    store = ConfigStore.instance()
    if not (CONF / f"{name}.yaml").exists():
        store.store(name=name, node={})
    for target in {*options_of("target")} - {"embedded", *(file.stem for file in (CONF / "model").iterdir())}:
        bundle = {"defaults": ["hf", {"override /target": target}], "name": target + "-${drafter.family}"}
        store.store(group="model", name=target, node=bundle, package="_global_")
    with hydra.initialize_config_dir(version_base=None, config_dir=str(CONF)):
        found = OmegaConf.to_container(hydra.compose(name, [*chosen]))
    return OmegaConf.merge(OmegaConf.structured(schema), found)


def names_a_path(group: str, value: str) -> bool:
    """Return whether GROUP=VALUE names a file, a folder or a model on the hub, and no option of the
    group: `target=/my/model` means `target.path=/my/model`."""
    if value in options_of(group):
        return False
    return "/" in value or value.endswith(PATH_SUFFIXES) or os.path.exists(value)


def entries_without_brackets(key: str, value: str, kind: object) -> list | None:
    """Return the entries of a list option whose value has no brackets, numbers with commas between
    them or one text; None where the value has brackets or is none of a list. Raises ValueError for
    texts with a comma, which may be one text or several. `kind`: the option's type."""
    from omegaconf import OmegaConf

    list_kinds = [each for each in (kind, *get_args(kind)) if get_origin(each) is list]
    if not list_kinds or value == "null" or value.lstrip().startswith("["):
        return None
    if get_args(list_kinds[0]) != (str,):
        return OmegaConf.from_dotlist([f"entries=[{literal(value)}]"]).entries
    if "," in value:
        raise ValueError(f"{key}={shortened(value)}: a list of texts is written {key}=[a,b]")
    return [literal(value)]


def literal(text: str) -> str:
    """Return a text in which OmegaConf looks nothing up: `${x}` may be part of a program."""
    return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + "\\${", text)


def text_of(key: str, typed: str, free: bool) -> str:
    """Return the text that is meant. In free text, `-` is standard input, `@file` the content of a
    file, `@@` a text that begins with one @, and a text of several lines that begins with @ is itself;
    elsewhere ~/ is the home folder. Raises ValueError if it cannot be read."""
    if not free:
        return os.path.expanduser(typed) if typed.startswith("~/") else typed
    try:
        if typed == "-":
            return sys.stdin.read()
        if not typed.startswith("@") or "\n" in typed:
            return typed
        return typed[1:] if typed.startswith("@@") else read_text(Path(typed[1:]).expanduser(), LARGEST_PROMPT)
    except (OSError, ValueError) as error:
        raise ValueError(f"{key}={typed}: could not be read ({error}); {key}=@{typed} is the text itself") from error


def values(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Yield (key, value) of all values in nested dictionaries and lists."""
    if not isinstance(value, (dict, list)):
        yield name, value
        return
    for key, inside in value.items() if isinstance(value, dict) else enumerate(value):
        yield from values(inside, f"{name}.{key}" if name else str(key))


def shortened(text: str) -> str:
    return text if len(text) <= 60 else text[:60] + "..."


def nearest(key: str, names: list[str]) -> str:
    """Return the words that suggest the names which a mistyped key may mean, or nothing."""
    ends = {name.rpartition(".")[2]: name for name in names}
    by_end = get_close_matches(key.rpartition(".")[2], ends, 1, 0.75)
    found = get_close_matches(key, names, 1, 0.8) or [ends[end] for end in by_end]
    return f", did you mean {found[0]}?" if found else ";"


def run_of(checkpoint: str) -> dict:
    """Return the configuration of the run that a checkpoint is part of; nothing for anything else."""
    place = Path(checkpoint).resolve()  # best is a link to a step
    for folder in (place, *place.parents[:3]) if place.exists() else ():
        if (folder / "checkpoints").is_dir() and (folder / "config.json").is_file():
            return json.loads(read_text(folder / "config.json", 1 << 20))
    return {}


def of_run(schema: type, config, groups: dict[str, str], given) -> dict[str, dict]:
    """Return the target and the data of the checkpoint's own run, where the user gave neither the group
    nor what decides it. `config`: composed from the arguments; groups, given: what `typed` found in
    them."""
    sections = getattr(schema, "FROM_RUN", ())
    checkpoints = [config.checkpoint] if "checkpoint" in config else config.get("checkpoints", [])
    run, found = run_of(checkpoints[0]) if sections and checkpoints and checkpoints[0] else {}, {}
    for section in sections:
        deciding = {"path", "source", "parts"} & set(given.get(section, {}))
        instead = {section, "suite"} if section == "data" else {section}
        if section in run and not deciding and not instead & set(groups):
            found[section] = {key: value for key, value in run[section].items() if key in OF_RUN[section]}
    return found


def explained(config: object, prefix: str = "") -> Iterator[str]:
    """Yield the docstring of a dataclass of options, its keys with their defaults and types; then its
    parts'."""
    own = {field.name: field for field in fields(config)}

    def with_default(entry: re.Match) -> str:
        field = own.get(entry[1])
        if field is None or is_dataclass(field.type):
            return entry[0]
        kind = re.sub(r"<class '(\w+)'>", r"\1", str(field.type))
        return f"  {prefix}{field.name}={json.dumps(getattr(config, field.name), default=vars)}  ({kind})\n    "

    yield re.sub(r"^(\w+): ", with_default, cleandoc(config.__doc__), flags=re.MULTILINE)
    for field in own.values():
        if is_dataclass(field.type):
            options = options_of(field.name)
            yield f"\n{prefix}{field.name}" + (f", a group: {', '.join(options)}" if options else "")
            yield from explained(getattr(config, field.name), f"{prefix}{field.name}.")


def help_text(name: str, config: object) -> str:
    """Return the help of a command. `config`: its options as they are if nothing more is given."""
    bundles = f"\n+model=NAME: {', '.join(options_of('model'))}\n" if name == "train" else ""
    return "\n".join([f"{name}:", *explained(config), bundles, HOW])
