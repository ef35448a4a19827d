"""Machine code where nothing can be kept for the next process."""

import os
import shutil
import subprocess
import sys

from infer.utils.jit import njit

PROGRAM = """
import torch
from infer.trees import compiled, guided
from infer.ngrams import model
from infer.utils import jit
@jit.njit
def double(x):
    return 2 * x
assert double(21) == 42 and double.signatures
print("fine")
"""


def test_a_checkout_and_a_home_that_cannot_be_written_cost_the_cache_only(repo, tmp_path):
    """A file stands where every folder of caches would be: nobody can write there, not even root."""
    shutil.copytree(repo / "infer", tmp_path / "infer", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in [tmp_path, *(path for path in tmp_path.rglob("*") if path.is_dir())]:
        (folder / "__pycache__").touch()
    program = PROGRAM + "assert double.stats.cache_path is None, double.stats\n"
    (tmp_path / "program.py").write_text(program)
    without = {"NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "NUMBA_DISABLE_JIT"}
    environment = {name: value for name, value in os.environ.items() if name not in without}
    environment |= {
        "HOME": "/dev/null",
        "PYTHONPATH": str(tmp_path),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch"),
    }
    command = [sys.executable, str(tmp_path / "program.py")]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "fine\n", done.stderr


def test_a_full_disk_costs_the_cache_only(monkeypatch):
    from numba.core import caching

    tried = []

    def full(*_):
        tried.append(1)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(caching.IndexDataCacheFile, "save", full)
    double = njit(lambda x: 2 * x)
    assert double(21) == 42 and tried
