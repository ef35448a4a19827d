"""The installed version of this package, and the messages about missing optional dependencies."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGE_NAME = "blockdraft"
SOURCE_ROOT = Path(__file__).resolve().parent.parent.parent
# The extras (groups of optional dependencies) of pyproject.toml. Keys are names of extras. Values
# are the modules that an extra installs, with the names that Python code imports.
MODULES_BY_EXTRA = {
    "train": ("datasets", "deepspeed", "wandb"),
    "serve": ("fastapi", "httpx", "llguidance", "prometheus_client", "uvicorn"),
    "gguf": ("accelerate", "gguf", "sentencepiece"),
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

    If one of this package's extras (optional dependencies) installs the module, the message
    contains the pip command for this extra.
    """
    extras = (extra for extra, modules in MODULES_BY_EXTRA.items() if module in modules)
    extra = next(extras, None)
    if extra is None:
        return f"this command needs the Python module {module}, which is not installed; install it"
    try:
        version(PACKAGE_NAME)
        source = PACKAGE_NAME
    except PackageNotFoundError:
        # Install the extra from the source folder: on a package index, another project may have
        # this package's name.
        source = str(SOURCE_ROOT)
    return (
        f"this command needs {module}, which is not installed; run pip install '{source}[{extra}]'"
    )
