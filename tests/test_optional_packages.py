"""Decoding, training and serving work in a copy of the repository without the optional packages.

All are deleted together and, with -m robustness, each alone.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

SOURCE_REPOSITORY = Path(__file__).resolve().parent.parent
OPTIONAL_PACKAGE_FILES = tomllib.loads(
    (SOURCE_REPOSITORY / "tests" / "optional_packages.toml").read_text()
)
# data/ (35 MB) is linked instead.
COPIED_PATHS = (
    "benchmarks",
    "conf",
    "docs",
    "infer",
    "train",
    "tests",
    "launch.sh",
    "pyproject.toml",
)

DECODE_TESTS = "tests/infer/engine/test_decode.py"
SERVER_TESTS = "tests/infer/serving/test_server.py"
QUICK_TESTS = [
    f"{DECODE_TESTS}::test_every_method_and_budget_is_lossless",
    f"{DECODE_TESTS}::test_every_drafter_with_every_tree_is_lossless[dflash-0.9]",
    f"{SERVER_TESTS}::test_completions_are_those_of_the_target",
    f"{SERVER_TESTS}::test_chat_through_the_template",
    "tests/train/run/test_initial.py::test_a_run_starts_with_the_drafters_weights_and_loss",
]
FULL_TESTS = [
    DECODE_TESTS,
    "tests/infer/engine/test_engine.py",
    SERVER_TESTS,
    "tests/infer/serving/test_protocol.py",
    "tests/train/test_loop.py",
    "tests/train/run",
]
MIN_FULL_TESTS = 150  # that pass; few tests need an optional package and are skipped
# Optional package -> a command that needs it, and its error message.
REFUSED_COMMANDS = {
    "masked": (
        ["diffusion"],
        "command diffusion is not in this installation: train/masked is missing",
    ),
    "doctor": (
        ["doctor"],
        "command doctor is not in this installation: infer/cli/doctor.py is missing",
    ),
    "int8_cpu": (
        ["generate", "target.quantization=int8", "decoding.method=plain"],
        "quantization=int8 is not in this installation: infer/int8_cpu is missing",
    ),
    "dart": (
        ["generate", "decoding.method=continuity", "decoding.ngrams=x"],
        "method=continuity is not in this installation: infer/trees/continuity.py is missing",
    ),
}


@pytest.fixture
def copy_without(tmp_path) -> Callable[..., Path]:
    """Return a function (*optional packages) -> copy of the repository without their files."""

    def copy_repository(*names: str) -> Path:
        folder = tmp_path / "copy"
        folder.mkdir()
        (folder / "data").symlink_to(SOURCE_REPOSITORY / "data")
        # Compiled code that other processes are writing.
        unfinished = shutil.ignore_patterns("*.pyc.*", "*.tmp.*")
        for path in COPIED_PATHS:
            if (SOURCE_REPOSITORY / path).is_dir():
                shutil.copytree(SOURCE_REPOSITORY / path, folder / path, ignore=unfinished)
            else:
                shutil.copy2(SOURCE_REPOSITORY / path, folder / path)
        for path in [
            path
            for name in names
            for path in (
                *OPTIONAL_PACKAGE_FILES[name]["code"],
                *OPTIONAL_PACKAGE_FILES[name]["own"],
            )
        ]:
            if (folder / path).is_dir():
                shutil.rmtree(folder / path)
            elif Path(path).parts[0] in COPIED_PATHS:
                (folder / path).unlink()
        return folder

    return copy_repository


def run_tests(folder: Path, tests: list[str]) -> str:
    """Run tests of a copy of the repository; return pytest's last line. No test may fail."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, f"{process.stdout[-8000:]}\n{process.stderr[-2000:]}"
    return process.stdout.splitlines()[-1]


def test_the_core_works_without_all_of_them(copy_without):
    folder = copy_without(*OPTIONAL_PACKAGE_FILES)
    assert "skipped" not in run_tests(folder, QUICK_TESTS)
    # tests/infer/serving checks that a server refuses such requests.
    for arguments, message in REFUSED_COMMANDS.values():
        command = [sys.executable, str(folder / "infer" / "main.py"), *arguments]
        process = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": str(folder)}, capture_output=True, text=True
        )
        assert (process.returncode, process.stderr) == (2, f"error: {message}\n")


@pytest.mark.robustness
@pytest.mark.parametrize("name", OPTIONAL_PACKAGE_FILES)
def test_the_core_works_without(name, copy_without):
    passed = re.search(r"(\d+) passed", run_tests(copy_without(name), FULL_TESTS))
    assert int(passed[1]) >= MIN_FULL_TESTS
