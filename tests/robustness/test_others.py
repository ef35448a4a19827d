"""The classes of other projects and ours draft the same from one folder
(benchmarks/others_drafters.py), in processes of their own: ANGELSLIM and ANGELSPEC name folders
with the projects' sources, SPECULATORS one with its package."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.robustness


@pytest.mark.parametrize(
    "project, cases", [("angelslim", 2), ("angelspec", 2), ("speculators", 11)]
)
def test_log_probabilities_are_those_of_the_code_that_defines_them(repo, project, cases):
    place = os.environ.get(project.upper())
    if place is None:
        pytest.skip(f"{project.upper()} names no folder")
    flags = [f"--{project}"] if project == "speculators" else [f"--{project}", place]
    command = [sys.executable, str(repo / "benchmarks" / "others_drafters.py"), *flags]
    environment = os.environ | {"PYTHONPATH": place, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    differences = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(differences) == cases and max(differences) < 1e-5, done.stdout
