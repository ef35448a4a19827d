"""The rules of the code, checked by reading it: imports, packages, names, sizes, and what must not
be written."""

import ast
import pydoc
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import infer
from infer.utils import installation
from infer.utils.installation import EXTRA_MODULES, describe_missing
from infer.utils.optional import is_installed

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("train", "infer", "data")
MAX_TOP_FILES = 5  # of infer/
MAX_DEPENDENCIES = 78  # between packages and top files of infer/: 187 before there were packages
MAX_FUNCTION_LINES = 60
MAX_PACKAGE_DOCSTRING_LINES = 4  # what lives here; what it may import; where to start reading

# Package -> packages that it may not import. infer/cli may import data and train inside functions,
# and the modules of OPTION_MODULES, which load no torch, where a command's options have their
# dataclasses as fields.
FORBIDDEN_IMPORTS = {"data": {"infer", "train"}, "infer": {"train", "data"}, "train": set()}
# What data may import all the same: how a chat template takes tool calls is one function for
# training and decoding.
SHARED_MODULES = {"infer.utils.chat_template"}

# Package of infer/ -> what it may import of infer/ besides itself and infer.config.
_BELOW_ENGINE = {"utils", "ngrams", "attention", "kernels", "trees", "targets", "drafters"}
ALLOWED_IMPORTS: dict[str, set[str]] = {
    "utils": set(),
    "ngrams": {"utils"},
    "attention": {"utils"},
    "kernels": {"utils", "ngrams", "attention"},
    "trees": {"utils", "ngrams", "attention", "kernels"},
    "targets": {"utils", "ngrams", "attention", "kernels", "trees"},
    "int8_cpu": {"utils", "attention", "kernels", "targets"},
    "drafters": {"utils", "ngrams", "attention", "kernels", "trees", "targets"},
    "formats": _BELOW_ENGINE,
    "engine": _BELOW_ENGINE,
    "evaluation": _BELOW_ENGINE | {"formats", "engine", "api"},
    "masked": _BELOW_ENGINE | {"formats", "engine", "evaluation"},
    "doctor": _BELOW_ENGINE | {"api", "evaluation"},
    "serving": _BELOW_ENGINE | {"formats", "engine", "api", "evaluation"},
    "cli": _BELOW_ENGINE | {"formats", "engine", "api", "evaluation", "serving"},
}
# Optional packages: no other module imports one of theirs, and only these tables name them, as
# "module:name".
OPTIONAL_PACKAGES: dict[str, tuple[str, ...]] = {
    name: tuple(path.removesuffix(".py").replace("/", ".") for path in package["code"])
    for name, package in tomllib.loads(
        (ROOT / "tests" / "optional_packages.toml").read_text()
    ).items()
}
TABLES = {
    "infer/__init__.py",
    "infer/main.py",
    "infer/drafters/families.py",
    "infer/kernels/table.py",
    "infer/serving/server.py",
    "infer/targets/kinds.py",
    "infer/targets/loading.py",
    "infer/trees/methods.py",
}
# Module or package -> those that may import it besides itself.
IMPORTED_ONLY_BY = {
    module: set(modules) for modules in OPTIONAL_PACKAGES.values() for module in modules
}
CODE_IN_INIT = {"infer/__init__.py", "infer/trees/__init__.py", "infer/drafters/__init__.py"}

OPTION_MODULES = {"data.rows", "data.suites"}
PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}

# Nothing that infer/ may do without: with all of these missing, loading and generating are still
# importable.
OPTIONAL_LIBRARIES = (
    "train",
    "data",
    "deepspeed",
    "hydra",
    "omegaconf",
    "datasets",
    "wandb",
    "rich",
    "llguidance",
)

REGISTRY_HOSTS = rb"(pypi|pythonhosted|download\.pytorch|anaconda|registry\.npmjs)\.org"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
MACHINE_PATHS = rb"/(work|root)/(?<![\w.~-]/..../)"


def sources(*folders: str, name: str = "*.py") -> list[Path]:
    found = sorted(path for folder in folders for path in (ROOT / folder).rglob(name))
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


@cache
def nodes(code: str) -> list[ast.AST]:
    """Everything in the code: it is parsed once for all tests."""
    return list(ast.walk(ast.parse(code)))


@pytest.fixture(scope="module", autouse=True)
def _no_nodes_stay():
    yield
    nodes.cache_clear()


def imported_modules(code: str) -> Iterator[str]:
    """Absolute names of everything that the code imports, also inside functions."""
    yield from imported(nodes(code))


def imported(found: Iterable[ast.AST]) -> Iterator[str]:
    for node in found:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def import_faults(code: str, package: str, cli: bool = False) -> list[str]:
    """Imports in `code`, a file of `package`, that are relative or go against the direction. cli: a
    file of infer/cli, where only imports outside functions are judged."""
    relative = [name for name in imported_modules(code) if name.startswith(".")]
    allowed = OPTION_MODULES if cli else set()
    inside = {
        each
        for node in nodes(code)
        if cli and isinstance(node, FUNCTIONS)
        for each in ast.walk(node)
    }
    outside = [
        name
        for name in imported(node for node in nodes(code) if node not in inside)
        if name.split(".")[0] in FORBIDDEN_IMPORTS[package]
    ]
    allowed = allowed | SHARED_MODULES if package == "data" else allowed
    return relative + [name for name in outside if name not in allowed]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(code: str, modules: set[str]) -> set[str]:
    """Those of `modules` that `code` imports, also inside functions and under TYPE_CHECKING. `from
    a import b` is an import of a.b where that is a module, and of a elsewhere."""
    found = set()
    for node in nodes(code):
        if isinstance(node, ast.ImportFrom) and node.module:
            full = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else node.module for name in full.values()}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & modules


@cache
def names_in(path: Path) -> set[str]:
    """Every name that the file binds, at any depth."""
    found = set()
    for node in nodes(path.read_text()):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def missing_names(code: str, modules: dict[str, Path]) -> list[str]:
    """What `code` imports by name from files that do not have it; `modules` are the files by
    name."""
    faults = []
    for node in nodes(code):
        if isinstance(node, ast.ImportFrom) and node.module in modules:
            names = [
                alias.name for alias in node.names if f"{node.module}.{alias.name}" not in modules
            ]
            faults += [
                f"{node.module}.{name}"
                for name in names
                if name not in names_in(modules[node.module])
            ]
    return faults


@cache
def module_graph() -> dict[str, set[str]]:
    """Module -> the project's modules that it imports, of all three packages."""
    code = {module_name(path): path.read_text() for path in sources(*PACKAGES)}
    return {name: imports_of(text, set(code)) for name, text in code.items()}


def find_circle(graph: dict[str, set[str]]) -> list[str]:
    """Return modules that import each other in a circle, the first one again at the end; empty if
    there is none."""
    done: set[str] = set()

    def search(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for imported in sorted(graph[name]):
            if circle := search(imported, [*path, name]):
                return circle
        done.add(name)
        return []

    for name in sorted(graph):
        if circle := search(name, []):
            return circle
    return []


def is_within(module: str, packages: Iterable[str]) -> bool:
    """Return whether a module is one of these, or in one of them."""
    return any(f"{module}.".startswith(f"{package}.") for package in packages)


def package_of(module: str) -> str | None:
    """The package of a module of infer/: "trees" for infer.trees.ddtree, None for infer, infer.api,
    ..."""
    parts = module.split(".")
    return (
        parts[1] if parts[0] == "infer" and len(parts) > 1 and parts[1] in ALLOWED_IMPORTS else None
    )


def package_faults(graph: dict[str, set[str]]) -> list[str]:
    """Imports of infer/ that the table ALLOWED_IMPORTS does not allow. Modules of one optional
    package import each other."""
    faults = []
    for module, imported in graph.items():
        package = package_of(module)
        if package is None:
            continue
        allowed = {package, "config", *ALLOWED_IMPORTS[package]}
        siblings = [
            name
            for names in OPTIONAL_PACKAGES.values()
            if is_within(module, names)
            for name in names
        ]
        for name in imported:
            if name.split(".")[0] == "infer" and not is_within(name, siblings):
                faults += [f"{module} -> {name}"] * ((name + ".api").split(".")[1] not in allowed)
    return sorted(faults)


def importer_faults(graph: dict[str, set[str]]) -> list[str]:
    """Imports of what IMPORTED_ONLY_BY names by others."""
    faults = []
    for package, importers in IMPORTED_ONLY_BY.items():
        for module in graph:
            if not is_within(module, (package, *importers)):
                faults += [
                    f"{module} -> {name}"
                    for name in sorted(graph[module])
                    if is_within(name, [package])
                ]
    return faults


def names_of_optional_modules(code: str) -> list[str]:
    """Texts in `code` that name a module of an optional package, as a row of a table does."""
    modules = [module for modules in OPTIONAL_PACKAGES.values() for module in modules]
    texts = [
        node.value
        for node in nodes(code)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return [text for text in texts if is_within(text.partition(":")[0], modules)]


def function_faults(code: str) -> list[str]:
    """Functions in `code` that are too long or return a tuple longer than two."""
    faults = []
    for node in nodes(code):
        if not isinstance(node, FUNCTIONS):
            continue
        lines = node.end_lineno - node.lineno + 1
        if lines > MAX_FUNCTION_LINES:
            faults.append(f"{node.name}: {lines} lines")
        returns = [each.value for each in ast.walk(node) if isinstance(each, ast.Return)]
        if any(isinstance(value, ast.Tuple) and len(value.elts) > 2 for value in returns):
            faults.append(f"{node.name}: a tuple longer than two")
    return faults


def unsafe_calls(code: str) -> list[str]:
    """What in `code` could run somebody else's code: unpickling, eval, exec, code from a model
    repository."""
    faults = [f"import {name}" for name in imported_modules(code) if name.split(".")[0] in PICKLES]
    for node in nodes(code):
        if isinstance(node, ast.ImportFrom) and node.module in ("torch", "torch.serialization"):
            faults += ["from torch import load" for alias in node.names if alias.name == "load"]
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if name in ("eval", "exec", "builtins.eval", "builtins.exec"):
            faults.append(name)
        if (
            name in ("torch.load", "torch.serialization.load")
            and keywords.get("weights_only") != "True"
        ):
            faults.append(name)
        if keywords.get("trust_remote_code") == "True":
            faults.append("trust_remote_code=True")
    return faults


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way(package):
    """train -> infer and data; nothing the other way."""
    faults = {}
    for path in sources(package):
        cli = path.is_relative_to(ROOT / "infer" / "cli")
        faults[str(path.relative_to(ROOT))] = import_faults(path.read_text(), package, cli)
    assert not {path: names for path, names in faults.items() if names}


def test_the_import_check_sees_faults():
    inside = "def f():\n    import train.loop\n    from infer.attention.masks import x\n"
    inside += "    from . import y\n    import training"
    assert import_faults(inside, "data") == [".", "train.loop", "infer.attention.masks"]
    assert import_faults(inside, "infer") == [".", "train.loop"]
    assert import_faults(inside, "infer", cli=True) == ["."]
    assert import_faults("import train.loop\n" + inside, "infer", cli=True) == [".", "train.loop"]
    assert import_faults("from data.rows import DataConfig", "infer", cli=True) == []
    assert import_faults("from data.rows import DataConfig", "infer") == ["data.rows"]
    assert import_faults(inside, "train") == ["."]


def test_packages_import_only_what_they_may():
    assert package_faults(module_graph()) == []


def test_nothing_imports_an_optional_package():
    assert importer_faults(module_graph()) == []
    core = {"train.loop": {"train.masked.config"}, "train.masked.config": {"infer.masked.model"}}
    assert importer_faults(core) == ["train.loop -> train.masked.config"]
    assert importer_faults({"infer.cli.eval": {"infer.doctor"}}) == [
        "infer.cli.eval -> infer.doctor"
    ]
    assert importer_faults({"infer.trees.ddtree": {"infer.trees.continuity"}}) != []


def test_only_tables_name_optional_packages():
    naming = {
        str(path.relative_to(ROOT))
        for path in sources(*PACKAGES)
        if not is_within(module_name(path), IMPORTED_ONLY_BY)
        and names_of_optional_modules(path.read_text())
    }
    assert naming <= TABLES
    assert names_of_optional_modules('"infer.masked.x:f", "infer.maskedness:f", "a"') == [
        "infer.masked.x:f"
    ]


def test_the_packages_check_sees_faults():
    code = "if TYPE_CHECKING:\n    from infer.engine.engine import Engine\ndef f():\n    from infer.trees import tree\n"
    modules = {
        "infer",
        "infer.api",
        "infer.engine.engine",
        "infer.trees",
        "infer.trees.tree",
        "infer.config",
    }
    imported = imports_of(
        code + "import infer.config\nfrom infer import api, generate\nimport torch", modules
    )
    assert imported == modules - {"infer.trees"}
    faults = package_faults(
        {"infer.drafters.base": imported, "infer.main": imported, "train.loop": imported}
    )
    start = "infer.drafters.base -> "
    assert faults == [start + name for name in ("infer", "infer.api", "infer.engine.engine")]


def test_every_folder_of_infer_is_a_package_and_its_top_is_small():
    folders = {path.parent.name for path in (ROOT / "infer").glob("*/__init__.py")}
    optional = {
        module.removeprefix("infer.")
        for modules in OPTIONAL_PACKAGES.values()
        for module in modules
    }
    assert set(ALLOWED_IMPORTS) - optional <= folders <= set(ALLOWED_IMPORTS)
    top = sorted(path.name for path in (ROOT / "infer").glob("*.py"))
    assert len(top) <= MAX_TOP_FILES, top


def test_dependencies_between_packages_are_few():
    """Of packages and files at the top of infer/: one depends on another if something in it imports
    from there."""
    graph = {
        a: {b for b in names if b.startswith("infer")}
        for a, names in module_graph().items()
        if a[:5] == "infer"
    }
    pairs = {(package_of(a) or a, package_of(b) or b) for a, names in graph.items() for b in names}
    assert 40 < len([pair for pair in pairs if pair[0] != pair[1]]) <= MAX_DEPENDENCIES


def test_no_modules_import_each_other():
    assert find_circle(module_graph()) == []


def test_the_circle_check_sees_circles():
    assert find_circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": {"d", "b"}, "d": set()}) == ["b", "c", "b"]


@pytest.mark.parametrize("path", sources("infer", "train", name="*/__init__.py"), ids=module_name)
def test_packages_say_what_lives_there(path):
    """What lives here, what it may import, where to start reading; nothing else but where a table
    lives."""
    tree = ast.parse(path.read_text())
    said = (ast.get_docstring(tree) or "").strip()
    assert said and "TODO" not in said
    assert len([line for line in said.splitlines() if line.strip()]) <= MAX_PACKAGE_DOCSTRING_LINES
    assert len(tree.body) == 1 or str(path.relative_to(ROOT)) in CODE_IN_INIT


@pytest.mark.parametrize("package", PACKAGES)
def test_functions_are_short_and_return_no_long_tuples(package):
    faults = {
        str(path.relative_to(ROOT)): function_faults(path.read_text()) for path in sources(package)
    }
    assert not {path: found for path, found in faults.items() if found}


def test_the_function_check_sees_faults():
    long = "def f():\n" + "    x = 1\n" * 60
    assert function_faults(long) == ["f: 61 lines"] and not function_faults(
        long.removesuffix("    x = 1\n")
    )
    assert function_faults("def g():\n    return 1, 2, 3") == ["g: a tuple longer than two"]
    assert function_faults("async def g():\n    return 1, 2") == []


def test_tests_import_no_test():
    """Shared helpers are fixtures of conftest files."""
    found = {str(path): set(imported_modules(path.read_text())) for path in sources("tests")}
    tops = {path: {name.split(".")[0] for name in names} for path, names in found.items()}
    own = {"tests", "conftest", *(path.stem for path in sources("tests", name="test_*.py"))}
    assert not {path: names & own for path, names in tops.items() if names & own}


def test_scripts_import_what_is_there():
    """Most of benchmarks/ and tests/robustness/ no test runs: what is renamed or moved would leave
    them behind."""
    modules = {module_name(path): path for path in sources(*PACKAGES)}
    modules |= {path.stem: path for path in sources("benchmarks")}
    public = {f"infer.{name}" for name in infer.__all__}
    faults = {
        str(path): missing_names(path.read_text(), modules)
        for path in sources("benchmarks", "tests/robustness")
    }
    assert not {path: {*names} - public for path, names in faults.items() if {*names} - public}
    assert missing_names("def f():\n    from train.plan import gone, StepShape", modules) == [
        "train.plan.gone"
    ]


def test_no_module_hides_another():
    """`python train/main.py` puts train/ first on the path: a file queue.py there would replace the
    library's."""
    taken = {*sys.stdlib_module_names, *packages_distributions(), *PACKAGES}
    entries = [path for package in PACKAGES for path in (ROOT / package).iterdir()]
    modules = [path for path in entries if path.suffix == ".py" or (path / "__init__.py").is_file()]
    assert modules
    assert not [str(path.relative_to(ROOT)) for path in modules if path.stem in taken]


def test_nothing_runs_foreign_code():
    faults = {
        str(path.relative_to(ROOT)): unsafe_calls(path.read_text())
        for path in sources(*PACKAGES, "benchmarks")
    }
    assert not {path: calls for path, calls in faults.items() if calls}


def test_the_foreign_code_check_sees_faults():
    assert unsafe_calls("torch.load(f)\ntorch.load(f, weights_only=False)") == [
        "torch.load",
        "torch.load",
    ]
    assert unsafe_calls("from torch import load\nimport pickle") == [
        "import pickle",
        "from torch import load",
    ]
    assert unsafe_calls("eval(x)\nAuto.load(n, trust_remote_code=True)") == [
        "eval",
        "trust_remote_code=True",
    ]
    assert not unsafe_calls(
        "torch.load(f, weights_only=True)\nmodel.eval()\nload(n, trust_remote_code=c.trust)"
    )


def test_configurations_name_no_code_but_hydras_callback():
    files = sorted((ROOT / "conf").rglob("*.yaml"))
    assert files
    targets = [
        line.strip()
        for path in files
        for line in path.read_text().splitlines()
        if "_target_" in line
    ]
    assert targets == ["_target_: train.sweep.SweepTable"]


def test_infer_needs_only_torch_transformers_safetensors(start_command, tmp_path):
    """None in sys.modules makes a module missing, both for `import` and for find_spec."""
    (tmp_path / "program.py").write_text(f"""
import sys
missing = [name for name in sys.modules if name.split('.')[0] in {OPTIONAL_LIBRARIES!r}]
sys.modules.update(dict.fromkeys([*missing, *{OPTIONAL_LIBRARIES!r}]))
from infer import generate, load_drafter, load_target
assert not [name for name in sys.modules if name.split('.')[0] in {OPTIONAL_LIBRARIES!r} and sys.modules[name]]
""")
    start_command(str(tmp_path / "program.py"), [], FRESH="1").finish()


def test_files_name_no_machine_and_no_registry():
    pattern = re.compile(REGISTRY_HOSTS + b"|" + MACHINE_PATHS)
    assert pattern.search(b"see https://files." + b"pythonhosted" + b".org/x") and pattern.search(
        b'open("/ro' + b'ot/x")'
    )
    found = {
        str(path.relative_to(ROOT)): pattern.findall(path.read_bytes())
        for path in committed_files()
    }
    assert not {path: hits for path, hits in found.items() if hits}


def test_the_api_lists_and_explains_itself():
    """What tab completion and help(infer) show, without a type checker's help."""
    assert set(infer.__all__) <= set(dir(infer))
    missing = {name for name, module in infer._HOME.items() if not is_installed(module)}
    assert set(infer.__all__) == set(infer._HOME) - missing
    text = pydoc.render_doc(infer, renderer=pydoc.plaintext)
    for name in ("generate", "load_drafter", "load_target", "stream"):
        assert f"    {name}(" in text
    assert (ROOT / "infer" / "py.typed").is_file()
    stub = ast.parse((ROOT / "infer" / "__init__.pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    assert {alias.asname for node in imports for alias in node.names} == set(infer._HOME)


def test_every_file_of_the_packages_is_installed():
    """Setuptools installs files of packages alone, and prints a long warning for a folder of files
    that is none: each folder of conf, data, infer and train is a package, and package-data has all
    of its files."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    names = {path.relative_to(ROOT) for path in committed_files()}
    files = [name for name in names if name.parts[0] in {*PACKAGES, "conf"} and len(name.parts) > 1]
    folders = {".".join(name.parent.parts) for name in files}
    patterns = options["packages"]["find"]

    def is_package(name: str) -> bool:
        excluded = any(fnmatchcase(name, pattern) for pattern in patterns["exclude"])
        return not excluded and any(fnmatchcase(name, pattern) for pattern in patterns["include"])

    assert {name for name in folders if is_package(name)} == folders
    assert not [
        name
        for name in ("tests", "docs", "runs", "benchmarks", "infer.__pycache__")
        if is_package(name)
    ]
    data = options["package-data"]["*"]
    assert all(any(fnmatchcase(name.name, pattern) for pattern in data) for name in files)


def test_missing_modules_are_named_with_the_extra_that_brings_them():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra, modules in EXTRA_MODULES.items():
        packages = [
            re.match(r"[\w-]+", line)[0] for line in project["optional-dependencies"][extra]
        ]
        assert sorted(modules) == sorted(package.replace("-", "_") for package in packages)
        assert f"[{extra}]" in describe_missing(modules[0])
    assert "[" not in describe_missing("einops")


def test_the_version_is_pyprojects_wherever_it_is_asked_for(monkeypatch, capsys):
    expected = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

    def not_installed(name: str) -> str:
        raise installation.PackageNotFoundError(name)

    assert infer.__version__ == expected
    monkeypatch.setattr(installation, "version", not_installed)
    assert infer.__version__ == expected
    assert f"pip install '{ROOT}[train]'" in describe_missing("datasets")
    monkeypatch.setattr("sys.argv", ["blockdraft", "--version"])
    runpy.run_module("infer", run_name="__main__")  # python -m infer
    script = subprocess.run([ROOT / "launch.sh", "--version"], capture_output=True, text=True)
    assert capsys.readouterr().out == script.stdout == f"blockdraft {expected}\n"


def test_text_files_are_written_in_one_place():
    """Whole, and without secrets: by infer/utils/files.py."""
    writers = [
        str(path.relative_to(ROOT))
        for path in sources(*PACKAGES)
        if ".write_text(" in path.read_text()
    ]
    assert writers == ["infer/utils/files.py"]
