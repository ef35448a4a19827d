"""What is installed: this package's version, and which extra of it brings a missing module."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGE = "blockdraft"
ROOT = Path(__file__).resolve().parent.parent.parent
EXTRA_MODULES = {  # pyproject.toml's [project.optional-dependencies], by the names that are imported
    "train": ("datasets", "deepspeed", "wandb"),
    "serve": ("fastapi", "httpx", "llguidance", "prometheus_client", "uvicorn"),
    "gguf": ("accelerate", "gguf"),
}


def package_version() -> str:
    """Return the installed package's version; in a folder of sources that was never installed, the
    one that its pyproject.toml names."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        lines = (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()
        return next(line.split('"')[1] for line in lines if line.startswith("version = "))


def describe_missing(module: str) -> str:
    """Return a sentence about a module that could not be imported, with the extra that brings
    it."""
    extra = next((extra for extra, modules in EXTRA_MODULES.items() if module in modules), None)
    if extra is None:
        return f"this command needs the Python module {module}, which is not installed"
    try:
        version(PACKAGE)
        source = PACKAGE
    except PackageNotFoundError:  # an index may have another project of this name
        source = str(ROOT)
    return f"this command needs {module}, which is not installed: pip install '{source}[{extra}]'"
