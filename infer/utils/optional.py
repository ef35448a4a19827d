"""Optional packages: folders and files that may be deleted without breaking the rest of the
project.

tests/test_optional_packages.py deletes each of them. Other code refers to them only in tables that
contain entry points "module:name". A table leaves out rows whose module is missing, and an error
message explains why such a row is not available.
"""

from importlib.util import find_spec


def find_missing_path(entry_point: str) -> str | None:
    """Return the outermost missing file or folder of the module in an entry point "module:name".

    Return None if the module is installed.
    """
    module_path = entry_point.partition(":")[0].split(".")
    for depth in range(1, len(module_path) + 1):
        if find_spec(".".join(module_path[:depth])) is None:
            file_path = "/".join(module_path[:depth])
            return file_path if depth < len(module_path) else f"{file_path}.py"
    return None


def is_installed(entry_point: str) -> bool:
    """Return whether the module in an entry point "module:name" is installed."""
    return find_missing_path(entry_point) is None


def explain_missing_module(entry_point: str, feature: str) -> str | None:
    """Return an error message if the module in an entry point "module:name" is missing, otherwise
    None.

    feature: what the user requested, such as "method=static"
    """
    missing_path = find_missing_path(entry_point)
    if missing_path is None:
        return None
    return f"{feature} is not in this installation: {missing_path} is missing"


def require_installed(entry_point: str, feature: str) -> None:
    """Raise ValueError if the module in an entry point is missing. The arguments are those of
    `explain_missing_module`."""
    message = explain_missing_module(entry_point, feature)
    if message is not None:
        raise ValueError(message)
