"""Other projects' classes and ours draft the same from one folder (benchmarks/others_drafters.py).

The environment variables ANGELSLIM and ANGELSPEC name folders with the projects' sources,
SPECULATORS one with its package.
"""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.robustness


@pytest.mark.parametrize(
    "project, cases", [("angelslim", 2), ("angelspec", 2), ("speculators", 11)]
)
def test_log_probabilities_equal_those_of_the_defining_code(repo, project, cases):
    project_folder = os.environ.get(project.upper())
    if project_folder is None:
        pytest.skip(f"{project.upper()} names no folder")
    flags = [f"--{project}"] if project == "speculators" else [f"--{project}", project_folder]
    command = [sys.executable, str(repo / "benchmarks" / "others_drafters.py"), *flags]
    environment = os.environ | {"PYTHONPATH": project_folder, "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert process.returncode == 0, process.stderr[-2000:]
    differences = [float(line.split()[-1]) for line in process.stdout.splitlines()]
    assert len(differences) == cases and max(differences) < 1e-5, process.stdout
