"""Files for contributors: the public workflow, the pre-commit hooks, the container file."""

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent


def commands_of_script(path: Path) -> list[str]:
    """Return the commands of a shell script that start launch.sh or a Python module."""
    lines = path.read_text().splitlines()
    return [line for line in lines if "./launch.sh" in line or '"$python"' in line]


def test_the_workflow_runs_the_commands_of_ci_run():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    steps = workflow["jobs"]["checks"]["steps"]
    workflow_commands = [line for step in steps for line in step.get("run", "").splitlines()]
    ci_commands = commands_of_script(ROOT / ".ci/run")
    assert len(ci_commands) == 6
    assert workflow_commands == [
        command.replace('"$python"', ".venv/bin/python") for command in ci_commands
    ]


def test_the_workflow_tests_the_oldest_python_that_the_package_allows():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    versions = workflow["jobs"]["checks"]["strategy"]["matrix"]["python-version"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=" + versions[0]


def test_pre_commit_has_the_versions_of_pyproject():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    ruff_pins = [pin for pin in extras["test"] + extras["dev"] if pin.startswith("ruff")]
    assert len(set(ruff_pins)) == 1
    assert [hook["additional_dependencies"] for hook in hooks] == [ruff_pins[:1]] * 2


def test_the_container_runs_launch_sh_of_a_copy_of_the_repository():
    container_file = (ROOT / "Containerfile").read_text()
    python_version = re.search(r"^FROM python:(3\.\d+)$", container_file, re.MULTILINE)
    assert python_version is not None
    assert "COPY . .\nRUN ./launch.sh" in container_file
    assert 'ENTRYPOINT ["./launch.sh"]' in container_file
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "runs"} <= set(ignored)
