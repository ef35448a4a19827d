"""The installed version of this package, and which extra of it contains a missing module."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGE_NAME = "blockdraft"
SOURCE_ROOT = Path(__file__).resolve().parent.parent.parent
# The optional dependencies of pyproject.toml, by the names under which they are imported.
EXTRA_MODULES = {
    "train": ("datasets", "deepspeed", "wandb"),
    "serve": ("fastapi", "httpx", "llguidance", "prometheus_client", "uvicorn"),
    "gguf": ("accelerate", "gguf"),
}


def package_version() -> str:
    """Return the version of the installed package.

    Without an installation, return the version in the pyproject.toml of the source folder.
    """
    try:
        return version(PACKAGE_NAME)
    except PackageNotFoundError:
        lines = (SOURCE_ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()
        version_line = next(line for line in lines if line.startswith("version = "))
        return version_line.split('"')[1]


def describe_missing_module(module: str) -> str:
    """Return an error message for a module that could not be imported.

    It names the extra of this package that installs the module, if there is one.
    """
    extras = (extra for extra, modules in EXTRA_MODULES.items() if module in modules)
    extra = next(extras, None)
    if extra is None:
        return f"this command needs the Python module {module}, which is not installed"
    try:
        version(PACKAGE_NAME)
        source = PACKAGE_NAME
    except PackageNotFoundError:
        # Not installed from an index, where another project may have this name.
        source = str(SOURCE_ROOT)
    return f"this command needs {module}, which is not installed: pip install '{source}[{extra}]'"
