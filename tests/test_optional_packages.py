"""Optional packages are deleted in a copy of the repository, all together and, with -m robustness,
each alone: the core decodes, trains and serves there."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = tomllib.loads((ROOT / "tests" / "optional_packages.toml").read_text())
COPIED = (
    "benchmarks",
    "conf",
    "docs",
    "infer",
    "train",
    "tests",
    "launch.sh",
    "pyproject.toml",
)  # data/ is linked: it has 35 MB

DECODE = "tests/infer/engine/test_decode.py"
SERVER = "tests/infer/serving/test_server.py"
QUICK = [
    f"{DECODE}::test_every_method_and_budget_writes_what_plain_decoding_writes",
    f"{DECODE}::test_every_drafter_with_every_tree_writes_what_plain_decoding_writes[dflash-0.9]",
    f"{SERVER}::test_completions_are_the_targets_own",
    f"{SERVER}::test_chat_through_the_template",
    "tests/train/run/test_initial.py::test_a_run_starts_from_exactly_those_weights_with_their_loss",
]
FULL = [
    DECODE,
    "tests/infer/engine/test_engine.py",
    SERVER,
    "tests/infer/serving/test_protocol.py",
    "tests/train/test_loop.py",
    "tests/train/run",
]
MIN_FULL_TESTS = 150  # that pass: a test that needs an optional package is skipped, and few do
# optional package -> a command that needs it, and the end of the sentence that refuses it
REFUSED = {
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
    """(optional packages) -> the folder of a copy of the repository without them, their tests and
    configurations."""

    def copy(*names: str) -> Path:
        folder = tmp_path / "copy"
        folder.mkdir()
        (folder / "data").symlink_to(ROOT / "data")
        unfinished = shutil.ignore_patterns(
            "*.pyc.*", "*.tmp.*"
        )  # compiled code that other processes are writing
        for path in COPIED:
            if (ROOT / path).is_dir():
                shutil.copytree(ROOT / path, folder / path, ignore=unfinished)
            else:
                shutil.copy2(ROOT / path, folder / path)
        for path in [
            path for name in names for path in (*PACKAGES[name]["code"], *PACKAGES[name]["own"])
        ]:
            if (folder / path).is_dir():
                shutil.rmtree(folder / path)
            elif Path(path).parts[0] in COPIED:
                (folder / path).unlink()
        return folder

    return copy


def run_tests(folder: Path, tests: list[str]) -> str:
    """Run tests of a copy of the repository, of which none may fail; return pytest's last line."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
    return done.stdout.splitlines()[-1]


def test_the_core_works_without_all_of_them(copy_without):
    folder = copy_without(*PACKAGES)
    assert "skipped" not in run_tests(folder, QUICK)
    for (
        arguments,
        sentence,
    ) in REFUSED.values():  # a server's requests are refused in tests/infer/serving
        command = [sys.executable, str(folder / "infer" / "main.py"), *arguments]
        done = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": str(folder)}, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (2, f"error: {sentence}\n")


@pytest.mark.robustness
@pytest.mark.parametrize("name", PACKAGES)
def test_the_core_works_without(name, copy_without):
    passed = re.search(r"(\d+) passed", run_tests(copy_without(name), FULL))
    assert int(passed[1]) >= MIN_FULL_TESTS
