"""Optional packages: folders and files that may be deleted (tests/test_optional_packages.py deletes
each).

Nothing imports them but a table's row, as "module:name". A table leaves out rows whose module is
missing, and says so where such a row is asked for.
"""

from importlib.util import find_spec


def find_missing(entry_point: str) -> str | None:
    """Return the file or folder of "module:name" that this installation lacks; None where it has
    all."""
    parts = entry_point.partition(":")[0].split(".")
    for count in range(1, len(parts) + 1):
        if find_spec(".".join(parts[:count])) is None:
            path = "/".join(parts[:count])
            return path if count < len(parts) else f"{path}.py"
    return None


def is_installed(entry_point: str) -> bool:
    """Return whether the module of "module:name" is in this installation."""
    return find_missing(entry_point) is None


def explain_missing(entry_point: str, feature: str) -> str | None:
    """Return a sentence that says which file of "module:name" is missing; None where there are all.
    `feature`: what the user asked for, the sentence's subject."""
    missing = find_missing(entry_point)
    return (
        None if missing is None else f"{feature} is not in this installation: {missing} is missing"
    )


def require_installed(entry_point: str, feature: str) -> None:
    """Raise ValueError with the sentence of `explain_missing` where there is one."""
    sentence = explain_missing(entry_point, feature)
    if sentence is not None:
        raise ValueError(sentence)
