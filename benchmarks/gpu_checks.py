"""First on a GPU: the tests that need one, and a round of a tiny model.

    python benchmarks/gpu_checks.py         # two minutes; then gpu_lossless.py, gpu_round.py, gpu_step.py

The tests are those with the marker `gpu` and those of the Triton kernels; `benchmarks/gpu_round.py
--shape tiny` then asserts that rounds are replayed as CUDA graphs and wait for the device once.
"""

import subprocess
import sys
from pathlib import Path

from gpu import check, finish, need_cuda, nullgpu

HERE = Path(__file__).resolve().parents[1]
TESTS = ["engine/test_gpu.py", "kernels/test_triton_attention.py", "kernels/test_triton_search.py"]


def main() -> None:
    need_cuda()
    tests = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=--import-mode=importlib",
    ]
    tests += [f"tests/infer/{name}" for name in TESTS]
    tests += ["tests/train/test_blocks.py", "-k", "gpu or kernel or cuda"]
    tests += (
        ["--collect-only"] if nullgpu is not None else []
    )  # it computes nothing that could be compared
    rounds = [
        sys.executable,
        "benchmarks/gpu_round.py",
        "--shape",
        "tiny",
        "--capacity",
        "1024",
        "--context",
        "300",
    ]
    faults: list[str] = []
    for what, command in (("tests", tests), ("rounds of a tiny model", rounds)):
        print(f"== {what}", flush=True)
        check(
            subprocess.run(command, cwd=HERE, check=False).returncode == 0, f"{what} failed", faults
        )
    finish(faults)


if __name__ == "__main__":
    main()
