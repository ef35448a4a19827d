"""Compilation where machine code cannot be cached for the next process."""

import shutil

from infer.utils.jit import njit

NO_CACHE_PROGRAM = """
import os
os.environ.pop("NUMBA_CACHE_DIR", None), os.environ.pop("XDG_CACHE_HOME", None)
from infer.kernels import cpu_search
from infer.trees import guided
from infer.ngrams import model
from infer.utils import jit
@jit.njit
def double(x):
    return 2 * x
assert double(21) == 42 and double.signatures
assert double.stats.cache_path is None, double.stats
"""


def test_a_checkout_and_a_home_that_cannot_be_written_cost_the_cache_only(
    repo, tmp_path, start_command
):
    """A file takes the path of every cache folder, so that not even root can write there."""
    shutil.copytree(
        repo / "infer", tmp_path / "infer", ignore=shutil.ignore_patterns("__pycache__")
    )
    for folder in [tmp_path, *(path for path in tmp_path.rglob("*") if path.is_dir())]:
        (folder / "__pycache__").touch()
    (tmp_path / "program.py").write_text(NO_CACHE_PROGRAM)
    start_command(str(tmp_path / "program.py"), [], FRESH="1", HOME="/dev/null").finish()


def test_a_full_disk_costs_the_cache_only(monkeypatch):
    from numba.core import caching

    attempts = []

    def raise_disk_full(*_):
        attempts.append(1)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(caching.IndexDataCacheFile, "save", raise_disk_full)
    double = njit(lambda x: 2 * x)
    assert double(21) == 42 and attempts
