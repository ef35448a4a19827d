"""The house rules of the code, held by reading it: who imports whom, names, sizes, and what must not be written."""

import ast
import pydoc
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import infer

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("train", "infer", "data")
MAX_LINES = 400

FORBIDDEN_IMPORTS = {"data": {"infer", "train"}, "infer": {"train"}, "train": set()}
PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}

# Nothing that infer/ may do without: with all of these missing, loading and generating are still importable.
OPTIONAL = ("train", "deepspeed", "hydra", "omegaconf", "datasets", "wandb", "rich", "matplotlib", "numba")

REGISTRY_HOSTS = (
    rb"\b(pypi\.org|[\w.]*pythonhosted\.org|download\.pytorch\.org|[\w.]*anaconda\.org|registry\.npmjs\.org)"
)
MACHINE_PATHS = rb"(?<![\w.~-])/(work|root)/"


def sources(*folders: str) -> list[Path]:
    found = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    assert found, folders
    return found


def committed_files() -> list[Path]:
    """Files that git tracks or would take with `git add .`."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return [path for path in paths if path.is_file()]


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Absolute names of everything that the code imports, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def import_faults(code: str, package: str) -> list[str]:
    """Imports in `code`, a file of `package`, that are relative or go against the direction."""
    names = imported_modules(ast.parse(code))
    return [name for name in names if name.startswith(".") or name.split(".")[0] in FORBIDDEN_IMPORTS[package]]


def unsafe_calls(code: str) -> list[str]:
    """What in `code` could run somebody else's code: unpickling, eval, exec, code from a model repository."""
    tree = ast.parse(code)
    faults = [f"import {name}" for name in imported_modules(tree) if name.split(".")[0] in PICKLES]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("torch", "torch.serialization"):
            faults += ["from torch import load" for alias in node.names if alias.name == "load"]
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if name in ("eval", "exec", "builtins.eval", "builtins.exec"):
            faults.append(name)
        if name in ("torch.load", "torch.serialization.load") and keywords.get("weights_only") != "True":
            faults.append(name)
        if keywords.get("trust_remote_code") == "True":
            faults.append("trust_remote_code=True")
    return faults


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way(package):
    faults = {str(path.relative_to(ROOT)): import_faults(path.read_text(), package) for path in sources(package)}
    assert not {path: names for path, names in faults.items() if names}


def test_the_import_check_sees_faults():
    inside = "def f():\n    import train.loop\n    from infer.attention.masks import x\n"
    inside += "    from . import y\n    import training"
    assert import_faults(inside, "data") == ["train.loop", "infer.attention.masks", "."]
    assert import_faults(inside, "infer") == ["train.loop", "."]
    assert import_faults(inside, "train") == ["."]


def test_no_module_hides_another():
    """`python train/main.py` puts train/ first on the path: a file queue.py there would replace the library's."""
    taken = {*sys.stdlib_module_names, *packages_distributions(), *PACKAGES}
    entries = [path for package in PACKAGES for path in (ROOT / package).iterdir()]
    modules = [path for path in entries if path.suffix == ".py" or (path / "__init__.py").is_file()]
    assert modules
    assert not [str(path.relative_to(ROOT)) for path in modules if path.stem in taken]


def test_nothing_runs_foreign_code():
    faults = {str(path.relative_to(ROOT)): unsafe_calls(path.read_text()) for path in sources(*PACKAGES, "benchmarks")}
    assert not {path: calls for path, calls in faults.items() if calls}


def test_the_foreign_code_check_sees_faults():
    assert unsafe_calls("torch.load(f)\ntorch.load(f, weights_only=False)") == ["torch.load", "torch.load"]
    assert unsafe_calls("from torch import load\nimport pickle") == ["import pickle", "from torch import load"]
    assert unsafe_calls("eval(x)\nAuto.load(n, trust_remote_code=True)") == ["eval", "trust_remote_code=True"]
    assert not unsafe_calls("torch.load(f, weights_only=True)\nmodel.eval()\nload(n, trust_remote_code=c.trust)")


def test_configurations_name_no_code():
    files = sorted((ROOT / "conf").rglob("*.yaml"))
    assert files
    assert not [path.name for path in files if "_target_" in path.read_text()]


def test_infer_needs_only_torch_transformers_safetensors():
    """None in sys.modules makes a module missing, both for `import` and for find_spec."""
    code = f"""
import sys
sys.modules.update(dict.fromkeys({OPTIONAL!r}))
from infer import generate, load_drafter, load_target
assert not [name for name in sys.modules if name.split('.')[0] in {OPTIONAL!r} and sys.modules[name]]
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_files_are_small(package):
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources(package)}
    assert not {path: lines for path, lines in lengths.items() if lines > MAX_LINES}


def test_files_name_no_machine_and_no_registry():
    pattern = re.compile(REGISTRY_HOSTS + b"|" + MACHINE_PATHS)
    assert pattern.search(b"see https://files." + b"pythonhosted" + b".org/x") and pattern.search(
        b'open("/ro' + b'ot/x")'
    )
    found = {str(path.relative_to(ROOT)): pattern.findall(path.read_bytes()) for path in committed_files()}
    assert not {path: hits for path, hits in found.items() if hits}


def test_the_api_lists_and_explains_itself():
    """What tab completion and help(infer) show, without a type checker's help."""
    assert set(infer.__all__) <= set(dir(infer)) and set(infer.__all__) == set(infer._HOME)
    text = pydoc.render_doc(infer, renderer=pydoc.plaintext)
    for name in ("generate", "load_drafter", "load_target", "stream"):
        assert f"    {name}(" in text
    assert (ROOT / "infer" / "py.typed").is_file()


def test_every_package_is_installed():
    """pyproject.toml lists the packages; a folder that it forgets would be missing from an ordinary installation."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {path.parent.relative_to(ROOT) for path in sources(*PACKAGES)}
    assert set(project["tool"]["setuptools"]["packages"]) == {".".join(folder.parts) for folder in folders} | {"conf"}
