"""Run first on a GPU: the tests that need one, and rounds of a tiny model.

    python benchmarks/gpu_checks.py         # two minutes

Then run gpu_lossless.py, gpu_round.py and gpu_step.py.

The tests are those with the marker `gpu` and those of the Triton kernels. `benchmarks/gpu_round.py
--shape tiny` then checks that rounds are replayed as CUDA graphs and wait for the device once.
"""

import subprocess
import sys
from pathlib import Path

from gpu import exit_with_failures, nullgpu, record_failure, require_cuda

REPOSITORY_FOLDER = Path(__file__).resolve().parents[1]
GPU_TEST_FILES = (
    "tests/infer/engine/test_gpu.py",
    "tests/infer/kernels/test_triton_rows.py",
    "tests/infer/kernels/test_triton_attention.py",
    "tests/infer/kernels/test_triton_search.py",
    "tests/train/test_blocks.py",
)
PYTEST_OPTIONS = ("-q", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib")
TINY_ROUND_OPTIONS = ("--shape", "tiny", "--capacity", "1024", "--context", "300")


def main() -> None:
    require_cuda()
    pytest = [sys.executable, "-m", "pytest", *PYTEST_OPTIONS]
    tests = [*pytest, *GPU_TEST_FILES, "-k", "gpu or kernel or cuda"]
    if nullgpu is not None:  # it computes nothing that tests could compare
        tests.append("--collect-only")
    rounds = [sys.executable, "benchmarks/gpu_round.py", *TINY_ROUND_OPTIONS]

    failures: list[str] = []
    for description, command in (("tests", tests), ("rounds of a tiny model", rounds)):
        print(f"== {description}", flush=True)
        process = subprocess.run(command, cwd=REPOSITORY_FOLDER, check=False)
        record_failure(process.returncode == 0, f"{description} failed", failures)
    exit_with_failures(failures)


if __name__ == "__main__":
    main()
