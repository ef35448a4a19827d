"""`COMMAND --help`: every key with its default, its type and its meaning, from the dataclasses of the
options."""

import json
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from inspect import cleandoc

from infer.utils.overrides import options_of

HOW = (
    "A text is taken as it is typed; lists are [a,b]; nothing is null. A group is chosen by GROUP=NAME, a bundle of "
    "settings by +model=NAME.\n--cfg job prints the configuration that a command line stands for."
)


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
