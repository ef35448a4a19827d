"""A griffe extension for the API pages: docstring entries "name: meaning" become Markdown lists."""

import re
from typing import Any

from griffe import Extension, Object

ENTRY = re.compile(r"^[a-z_]\w*(\[[^\]]*\])?(, [a-z_]\w*)*( \([^)]*\))?: \S")


def format_entries(docstring: str) -> str:
    """Return a docstring in which every entry "name: meaning" is an item of a list.

    An entry begins at the left margin with an argument's or field's name, optionally followed by
    further names and by a shape in parentheses. Its other lines are indented.
    """
    lines = []
    in_list = False
    for line in docstring.splitlines():
        if ENTRY.match(line):
            if not in_list:
                lines.append("")
            name, meaning = line.split(": ", 1)
            lines.append(f"- `{name}`: {meaning}")
            in_list = True
            continue
        if in_list and line.strip() and not line.startswith(" "):
            lines.append("")
            in_list = False
        lines.append(line)
    return "\n".join(lines)


class DocstringLists(Extension):
    """Apply `format_entries` to every docstring."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Rewrite the docstring of one object, when griffe has read it."""
        if obj.docstring is not None:
            obj.docstring.value = format_entries(obj.docstring.value)
