"""Helpers for optional packages: parts of this project that may be deleted without breaking the
rest. tests/test_optional_packages.py deletes each of them.

Tables of features refer to optional packages by entry points, which are texts "module:name". Other
code does not import these packages. If the module of a feature is missing, the feature is left out,
and an error message explains why.
"""

from importlib.util import find_spec


def find_missing_path(entry_point: str) -> str | None:
    """Return which file or folder is missing if the module of an entry point "module:name" cannot
    be found, else None.

    For "a.b.c:name", this is "a" if the folder a is missing, and "a/b/c.py" if only the file is.
    """
    module_path = entry_point.partition(":")[0].split(".")
    for depth in range(1, len(module_path) + 1):
        if find_spec(".".join(module_path[:depth])) is None:
            file_path = "/".join(module_path[:depth])
            return file_path if depth < len(module_path) else f"{file_path}.py"
    return None


def is_installed(entry_point: str) -> bool:
    """Return whether the module of an entry point "module:name" exists, without importing it."""
    return find_missing_path(entry_point) is None


def explain_missing_module(entry_point: str, feature: str) -> str | None:
    """Return an error message if the module of an entry point "module:name" is missing, else None.

    feature: the option that needs the module, for the message, such as "method=static"
    """
    missing_path = find_missing_path(entry_point)
    if missing_path is None:
        return None
    return f"{feature} is not in this installation: {missing_path} is missing"


def require_installed(entry_point: str, feature: str) -> None:
    """Raise ValueError if the module of an entry point "module:name" is missing.

    feature: the option that needs the module, for the message, such as "method=static"
    """
    message = explain_missing_module(entry_point, feature)
    if message is not None:
        raise ValueError(message)
