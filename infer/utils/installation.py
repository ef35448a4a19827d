"""The installed version of this package, and which extra of the package installs a missing
module."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGE_NAME = "blockdraft"
SOURCE_ROOT = Path(__file__).resolve().parent.parent.parent
# The optional dependencies of pyproject.toml. Key: name of the extra. Value: the modules that it
# installs, by the names under which they are imported.
EXTRA_MODULES = {
    "train": ("datasets", "deepspeed", "wandb"),
    "serve": ("fastapi", "httpx", "llguidance", "prometheus_client", "uvicorn"),
    "gguf": ("accelerate", "gguf"),
}


def package_version() -> str:
    """Return the version of this package.

    If the package is not installed, the version is read from the pyproject.toml of the source
    folder.
    """
    try:
        return version(PACKAGE_NAME)
    except PackageNotFoundError:
        lines = (SOURCE_ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()
        version_line = next(line for line in lines if line.startswith("version = "))
        return version_line.split('"')[1]


def describe_missing_module(module: str) -> str:
    """Return an error message for a module that could not be imported.

    If an extra of this package installs the module, the message contains the command that installs
    the extra.
    """
    extras = (extra for extra, modules in EXTRA_MODULES.items() if module in modules)
    extra = next(extras, None)
    if extra is None:
        return f"this command needs the Python module {module}, which is not installed; install it"
    try:
        version(PACKAGE_NAME)
        source = PACKAGE_NAME
    except PackageNotFoundError:
        # The extra is installed from the source folder, since another project may have this name in
        # a package index.
        source = str(SOURCE_ROOT)
    return (
        f"this command needs {module}, which is not installed; run pip install '{source}[{extra}]'"
    )
