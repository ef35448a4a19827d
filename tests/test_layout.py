"""Rules of the code, checked on its syntax trees: imports, packages, names, sizes, unsafe calls."""

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
from infer.utils.installation import MODULES_BY_EXTRA, describe_missing_module
from infer.utils.optional import is_installed

REPOSITORY_ROOT = Path(__file__).resolve().parent.parent
TOP_PACKAGES = ("train", "infer", "data")
MAX_INFER_TOP_FILES = 5
MAX_PACKAGE_DEPENDENCIES = 78  # pairs of packages and top-level files of infer/
MAX_FUNCTION_LINES = 60
MAX_PACKAGE_DOCSTRING_LINES = 4  # contents, allowed imports, where to start reading

# Package -> packages that it may not import. infer/cli may import data and train inside functions,
# and the modules of OPTION_MODULES, which load no torch, where a command's options have their
# dataclasses as fields.
FORBIDDEN_IMPORTS = {"data": {"infer", "train"}, "infer": {"train", "data"}, "train": set()}
# Exception for data: training and decoding use the same function for tool calls in chat templates.
SHARED_MODULES = {"infer.utils.chat_template"}

# Package of infer/ -> packages of infer/ that it may import, besides itself and infer.config.
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
# Optional packages. No other module imports their modules; only the files in TABLE_FILES name them,
# as "module:name".
OPTIONAL_PACKAGES: dict[str, tuple[str, ...]] = {
    name: tuple(path.removesuffix(".py").replace("/", ".") for path in package["code"])
    for name, package in tomllib.loads(
        (REPOSITORY_ROOT / "tests" / "optional_packages.toml").read_text()
    ).items()
}
TABLE_FILES = {
    "infer/__init__.py",
    "infer/main.py",
    "infer/drafters/families.py",
    "infer/kernels/table.py",
    "infer/serving/service.py",
    "infer/targets/masked_models.py",
    "infer/targets/loading.py",
    "infer/trees/methods.py",
}
# Module or package -> those that may import it besides itself.
IMPORTED_ONLY_BY = {
    module: set(modules) for modules in OPTIONAL_PACKAGES.values() for module in modules
}
CODE_IN_INIT = {"infer/__init__.py", "infer/trees/__init__.py", "infer/drafters/__init__.py"}

OPTION_MODULES = {"data.rows", "data.suites"}
PICKLE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}

# Loading and generating must be importable with all of these missing.
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
FUNCTION_NODES = (ast.FunctionDef, ast.AsyncFunctionDef)
MACHINE_PATHS = rb"/(work|root)/(?<![\w.~-]/..../)"


def list_source_files(*folders: str, name: str = "*.py") -> list[Path]:
    """Return the files of this name in the folders, sorted; there must be at least one."""
    paths = sorted(path for folder in folders for path in (REPOSITORY_ROOT / folder).rglob(name))
    assert paths, folders
    return paths


def list_committed_files() -> list[Path]:
    """Return the files that git tracks or would add with `git add .`."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=REPOSITORY_ROOT, capture_output=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = [REPOSITORY_ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return [path for path in paths if path.is_file()]


@cache
def parse_nodes(code: str) -> list[ast.AST]:
    """Return all syntax nodes of the code, parsed once for all tests."""
    return list(ast.walk(ast.parse(code)))


@pytest.fixture(scope="module", autouse=True)
def _clear_parsed_code():
    yield
    parse_nodes.cache_clear()


def imported_modules(code: str) -> Iterator[str]:
    """Yield the names of all modules that the code imports, also inside functions."""
    yield from list_imports(parse_nodes(code))


def list_imports(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the names of the modules that these nodes import; relative ones start with a dot."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def find_import_errors(code: str, package: str, cli: bool = False) -> list[str]:
    """Return the imports of a file of `package` that are relative or not allowed.

    cli: whether it is a file of infer/cli, where imports inside functions are allowed
    """
    relative = [name for name in imported_modules(code) if name.startswith(".")]
    allowed = OPTION_MODULES if cli else set()
    nodes_in_functions = {
        each
        for node in parse_nodes(code)
        if cli and isinstance(node, FUNCTION_NODES)
        for each in ast.walk(node)
    }
    forbidden_imports = [
        name
        for name in list_imports(
            node for node in parse_nodes(code) if node not in nodes_in_functions
        )
        if name.split(".")[0] in FORBIDDEN_IMPORTS[package]
    ]
    allowed = allowed | SHARED_MODULES if package == "data" else allowed
    return relative + [name for name in forbidden_imports if name not in allowed]


def get_module_name(path: Path) -> str:
    """Return the dotted name of a module, for example infer.trees for its __init__.py."""
    return ".".join(path.relative_to(REPOSITORY_ROOT).with_suffix("").parts).removesuffix(
        ".__init__"
    )


def find_project_imports(code: str, modules: set[str]) -> set[str]:
    """Return which of `modules` the code imports, also inside functions and under TYPE_CHECKING.

    `from a import b` is an import of a.b if that is a module, and otherwise of a.
    """
    names = set()
    for node in parse_nodes(code):
        if isinstance(node, ast.ImportFrom) and node.module:
            imported_names = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in modules else node.module for name in imported_names.values()}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names & modules


@cache
def find_bound_names(path: Path) -> set[str]:
    """Return every name that the file binds, at any depth."""
    names = set()
    for node in parse_nodes(path.read_text()):
        if isinstance(node, (*FUNCTION_NODES, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def find_missing_names(code: str, modules: dict[str, Path]) -> list[str]:
    """Return the names that the code imports from files that do not bind them.

    modules: files by module name
    """
    errors = []
    for node in parse_nodes(code):
        if isinstance(node, ast.ImportFrom) and node.module in modules:
            names = [
                alias.name for alias in node.names if f"{node.module}.{alias.name}" not in modules
            ]
            errors += [
                f"{node.module}.{name}"
                for name in names
                if name not in find_bound_names(modules[node.module])
            ]
    return errors


@cache
def build_module_graph() -> dict[str, set[str]]:
    """Return the project's modules that each module of all three packages imports."""
    code = {get_module_name(path): path.read_text() for path in list_source_files(*TOP_PACKAGES)}
    return {name: find_project_imports(text, set(code)) for name, text in code.items()}


def find_import_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return modules that import each other in a cycle, the first one repeated at the end.

    The list is empty if there is no cycle.
    """
    done: set[str] = set()

    def search(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for list_imports in sorted(graph[name]):
            if cycle := search(list_imports, [*path, name]):
                return cycle
        done.add(name)
        return []

    for name in sorted(graph):
        if cycle := search(name, []):
            return cycle
    return []


def is_within(module: str, packages: Iterable[str]) -> bool:
    """Return whether a module is one of these, or in one of them."""
    return any(f"{module}.".startswith(f"{package}.") for package in packages)


def get_infer_package(module: str) -> str | None:
    """Return the package of a module of infer/, for example "trees" for infer.trees.ddtree.

    Returns None for infer, infer.api and modules of other packages.
    """
    names = module.split(".")
    if names[0] == "infer" and len(names) > 1 and names[1] in ALLOWED_IMPORTS:
        return names[1]
    return None


def find_package_errors(graph: dict[str, set[str]]) -> list[str]:
    """Return the imports of infer/ that the table ALLOWED_IMPORTS does not allow.

    Modules of one optional package may import each other.
    """
    errors = []
    for module, list_imports in graph.items():
        package = get_infer_package(module)
        if package is None:
            continue
        allowed = {package, "config", *ALLOWED_IMPORTS[package]}
        siblings = [
            name
            for names in OPTIONAL_PACKAGES.values()
            if is_within(module, names)
            for name in names
        ]
        for name in list_imports:
            if name.split(".")[0] == "infer" and not is_within(name, siblings):
                errors += [f"{module} -> {name}"] * ((name + ".api").split(".")[1] not in allowed)
    return sorted(errors)


def find_importer_errors(graph: dict[str, set[str]]) -> list[str]:
    """Return the imports that IMPORTED_ONLY_BY does not allow."""
    errors = []
    for package, importers in IMPORTED_ONLY_BY.items():
        for module in graph:
            if not is_within(module, (package, *importers)):
                errors += [
                    f"{module} -> {name}"
                    for name in sorted(graph[module])
                    if is_within(name, [package])
                ]
    return errors


def find_optional_module_names(code: str) -> list[str]:
    """Return the strings in the code that name a module of an optional package."""
    modules = [module for modules in OPTIONAL_PACKAGES.values() for module in modules]
    texts = [
        node.value
        for node in parse_nodes(code)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return [text for text in texts if is_within(text.partition(":")[0], modules)]


def find_function_errors(code: str) -> list[str]:
    """Return the functions that are too long or return a tuple of more than two values."""
    errors = []
    for node in parse_nodes(code):
        if not isinstance(node, FUNCTION_NODES):
            continue
        lines = node.end_lineno - node.lineno + 1
        if lines > MAX_FUNCTION_LINES:
            errors.append(f"{node.name}: {lines} lines")
        returns = [each.value for each in ast.walk(node) if isinstance(each, ast.Return)]
        if any(isinstance(value, ast.Tuple) and len(value.elts) > 2 for value in returns):
            errors.append(f"{node.name}: a tuple longer than two")
    return errors


def find_unsafe_calls(code: str) -> list[str]:
    """Return what could run foreign code: unpickling, eval, exec, code of a model repository."""
    errors = [
        f"import {name}" for name in imported_modules(code) if name.split(".")[0] in PICKLE_MODULES
    ]
    for node in parse_nodes(code):
        if isinstance(node, ast.ImportFrom) and node.module in ("torch", "torch.serialization"):
            errors += ["from torch import load" for alias in node.names if alias.name == "load"]
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if name in ("eval", "exec", "builtins.eval", "builtins.exec"):
            errors.append(name)
        if (
            name in ("torch.load", "torch.serialization.load")
            and keywords.get("weights_only") != "True"
        ):
            errors.append(name)
        if keywords.get("trust_remote_code") == "True":
            errors.append("trust_remote_code=True")
    return errors


@pytest.mark.parametrize("package", TOP_PACKAGES)
def test_imports_have_one_direction(package):
    """train may import infer and data; they may not import train or each other."""
    errors = {}
    for path in list_source_files(package):
        cli = path.is_relative_to(REPOSITORY_ROOT / "infer" / "cli")
        errors[str(path.relative_to(REPOSITORY_ROOT))] = find_import_errors(
            path.read_text(), package, cli
        )
    assert not {path: names for path, names in errors.items() if names}


def test_the_import_check_detects_errors():
    code = "def f():\n    import train.loop\n    from infer.attention.masks import x\n"
    code += "    from . import y\n    import training"
    assert find_import_errors(code, "data") == [".", "train.loop", "infer.attention.masks"]
    assert find_import_errors(code, "infer") == [".", "train.loop"]
    assert find_import_errors(code, "infer", cli=True) == ["."]
    assert find_import_errors("import train.loop\n" + code, "infer", cli=True) == [
        ".",
        "train.loop",
    ]
    assert find_import_errors("from data.rows import DataConfig", "infer", cli=True) == []
    assert find_import_errors("from data.rows import DataConfig", "infer") == ["data.rows"]
    assert find_import_errors(code, "train") == ["."]


def test_packages_import_only_allowed_packages():
    assert find_package_errors(build_module_graph()) == []


def test_nothing_imports_an_optional_package():
    assert find_importer_errors(build_module_graph()) == []
    core = {"train.loop": {"train.masked.config"}, "train.masked.config": {"infer.masked.model"}}
    assert find_importer_errors(core) == ["train.loop -> train.masked.config"]
    assert find_importer_errors({"infer.cli.eval": {"infer.doctor"}}) == [
        "infer.cli.eval -> infer.doctor"
    ]
    assert find_importer_errors({"infer.trees.ddtree": {"infer.trees.continuity"}}) != []


def test_only_tables_name_optional_packages():
    naming = {
        str(path.relative_to(REPOSITORY_ROOT))
        for path in list_source_files(*TOP_PACKAGES)
        if not is_within(get_module_name(path), IMPORTED_ONLY_BY)
        and find_optional_module_names(path.read_text())
    }
    assert naming <= TABLE_FILES
    assert find_optional_module_names('"infer.masked.x:f", "infer.maskedness:f", "a"') == [
        "infer.masked.x:f"
    ]


def test_the_packages_check_detects_errors():
    code = "if TYPE_CHECKING:\n    from infer.engine.engine import Engine\n"
    code += "def f():\n    from infer.trees import tree\n"
    modules = {
        "infer",
        "infer.api",
        "infer.engine.engine",
        "infer.trees",
        "infer.trees.tree",
        "infer.config",
    }
    list_imports = find_project_imports(
        code + "import infer.config\nfrom infer import api, generate\nimport torch", modules
    )
    assert list_imports == modules - {"infer.trees"}
    errors = find_package_errors(
        {
            "infer.drafters.base": list_imports,
            "infer.main": list_imports,
            "train.loop": list_imports,
        }
    )
    start = "infer.drafters.base -> "
    assert errors == [start + name for name in ("infer", "infer.api", "infer.engine.engine")]


def test_every_folder_of_infer_is_a_package_and_its_top_is_small():
    folders = {path.parent.name for path in (REPOSITORY_ROOT / "infer").glob("*/__init__.py")}
    optional = {
        module.removeprefix("infer.")
        for modules in OPTIONAL_PACKAGES.values()
        for module in modules
    }
    assert set(ALLOWED_IMPORTS) - optional <= folders <= set(ALLOWED_IMPORTS)
    top = sorted(path.name for path in (REPOSITORY_ROOT / "infer").glob("*.py"))
    assert len(top) <= MAX_INFER_TOP_FILES, top


def test_dependencies_between_packages_are_few():
    """Packages and top-level files of infer/. A dependency is an import of a module of the
    other."""
    graph = {
        a: {b for b in names if b.startswith("infer")}
        for a, names in build_module_graph().items()
        if a[:5] == "infer"
    }
    pairs = {
        (get_infer_package(a) or a, get_infer_package(b) or b)
        for a, names in graph.items()
        for b in names
    }
    assert 40 < len([pair for pair in pairs if pair[0] != pair[1]]) <= MAX_PACKAGE_DEPENDENCIES


def test_no_modules_import_each_other():
    assert find_import_cycle(build_module_graph()) == []


def test_the_cycle_check_detects_cycles():
    assert find_import_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    assert find_import_cycle({"a": {"b"}, "b": {"c"}, "c": {"d", "b"}, "d": set()}) == [
        "b",
        "c",
        "b",
    ]


@pytest.mark.parametrize(
    "path", list_source_files("infer", "train", name="*/__init__.py"), ids=get_module_name
)
def test_packages_have_short_docstrings(path):
    """Contents, allowed imports, where to start reading; code only in the files of CODE_IN_INIT."""
    tree = ast.parse(path.read_text())
    docstring = (ast.get_docstring(tree) or "").strip()
    assert docstring and "TODO" not in docstring
    assert (
        len([line for line in docstring.splitlines() if line.strip()])
        <= MAX_PACKAGE_DOCSTRING_LINES
    )
    assert len(tree.body) == 1 or str(path.relative_to(REPOSITORY_ROOT)) in CODE_IN_INIT


@pytest.mark.parametrize("package", TOP_PACKAGES)
def test_functions_are_short_and_return_no_long_tuples(package):
    errors = {
        str(path.relative_to(REPOSITORY_ROOT)): find_function_errors(path.read_text())
        for path in list_source_files(package)
    }
    assert not {path: errors for path, errors in errors.items() if errors}


def test_the_function_check_detects_errors():
    long = "def f():\n" + "    x = 1\n" * 60
    assert find_function_errors(long) == ["f: 61 lines"] and not find_function_errors(
        long.removesuffix("    x = 1\n")
    )
    assert find_function_errors("def g():\n    return 1, 2, 3") == ["g: a tuple longer than two"]
    assert find_function_errors("async def g():\n    return 1, 2") == []


def test_tests_import_no_test():
    """Helpers that tests share are fixtures in conftest files."""
    imports = {
        str(path): set(imported_modules(path.read_text())) for path in list_source_files("tests")
    }
    tops = {path: {name.split(".")[0] for name in names} for path, names in imports.items()}
    test_modules = {
        "tests",
        "conftest",
        *(path.stem for path in list_source_files("tests", name="test_*.py")),
    }
    assert not {path: names & test_modules for path, names in tops.items() if names & test_modules}


def test_scripts_import_existing_names():
    """No test runs most of benchmarks/ and tests/robustness/, so that renames could break them."""
    modules = {get_module_name(path): path for path in list_source_files(*TOP_PACKAGES)}
    modules |= {path.stem: path for path in list_source_files("benchmarks")}
    public = {f"infer.{name}" for name in infer.__all__}
    errors = {
        str(path): find_missing_names(path.read_text(), modules)
        for path in list_source_files("benchmarks", "tests/robustness")
    }
    assert not {path: {*names} - public for path, names in errors.items() if {*names} - public}
    assert find_missing_names("def f():\n    from train.plan import gone, StepSizes", modules) == [
        "train.plan.gone"
    ]


def test_no_module_hides_another():
    """`python train/main.py` puts train/ first on the path, where a file queue.py would replace the
    standard library's."""
    existing_module_names = {*sys.stdlib_module_names, *packages_distributions(), *TOP_PACKAGES}
    entries = [path for package in TOP_PACKAGES for path in (REPOSITORY_ROOT / package).iterdir()]
    modules = [path for path in entries if path.suffix == ".py" or (path / "__init__.py").is_file()]
    assert modules
    assert not [
        str(path.relative_to(REPOSITORY_ROOT))
        for path in modules
        if path.stem in existing_module_names
    ]


def test_nothing_runs_foreign_code():
    errors = {
        str(path.relative_to(REPOSITORY_ROOT)): find_unsafe_calls(path.read_text())
        for path in list_source_files(*TOP_PACKAGES, "benchmarks")
    }
    assert not {path: calls for path, calls in errors.items() if calls}


def test_the_foreign_code_check_detects_errors():
    assert find_unsafe_calls("torch.load(f)\ntorch.load(f, weights_only=False)") == [
        "torch.load",
        "torch.load",
    ]
    assert find_unsafe_calls("from torch import load\nimport pickle") == [
        "import pickle",
        "from torch import load",
    ]
    assert find_unsafe_calls("eval(x)\nAuto.load(n, trust_remote_code=True)") == [
        "eval",
        "trust_remote_code=True",
    ]
    assert not find_unsafe_calls(
        "torch.load(f, weights_only=True)\nmodel.eval()\nload(n, trust_remote_code=c.trust)"
    )


def test_configurations_name_no_code_but_hydras_callback():
    files = sorted((REPOSITORY_ROOT / "conf").rglob("*.yaml"))
    assert files
    targets = [
        line.strip()
        for path in files
        for line in path.read_text().splitlines()
        if "_target_" in line
    ]
    assert targets == ["_target_: train.sweep.SweepTable"]


def test_infer_needs_only_torch_transformers_safetensors(start_command, tmp_path):
    """A module that is None in sys.modules is missing, both for `import` and for find_spec."""
    (tmp_path / "program.py").write_text(f"""
import sys
libraries = {OPTIONAL_LIBRARIES!r}
missing = [name for name in sys.modules if name.split('.')[0] in libraries]
sys.modules.update(dict.fromkeys([*missing, *libraries]))
from infer import generate, load_drafter, load_target
loaded = [name for name, module in sys.modules.items() if module]
assert not [name for name in loaded if name.split('.')[0] in libraries]
""")
    start_command(str(tmp_path / "program.py"), [], FRESH="1").finish()


def test_files_name_no_machine_and_no_registry():
    pattern = re.compile(REGISTRY_HOSTS + b"|" + MACHINE_PATHS)
    assert pattern.search(b"see https://files." + b"pythonhosted" + b".org/x") and pattern.search(
        b'open("/ro' + b'ot/x")'
    )
    matches = {
        str(path.relative_to(REPOSITORY_ROOT)): pattern.findall(path.read_bytes())
        for path in list_committed_files()
    }
    assert not {path: hits for path, hits in matches.items() if hits}


def test_the_api_is_listed_and_documented():
    """By tab completion and help(infer)."""
    assert set(infer.__all__) <= set(dir(infer))
    missing = {name for name, module in infer._MODULE_OF_NAME.items() if not is_installed(module)}
    assert set(infer.__all__) == set(infer._MODULE_OF_NAME) - missing
    text = pydoc.render_doc(infer, renderer=pydoc.plaintext)
    for name in ("generate", "load_drafter", "load_target", "stream"):
        assert f"    {name}(" in text
    assert (REPOSITORY_ROOT / "infer" / "py.typed").is_file()
    stub = ast.parse((REPOSITORY_ROOT / "infer" / "__init__.pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    assert {alias.asname for node in imports for alias in node.names} == set(infer._MODULE_OF_NAME)


def test_every_file_of_the_packages_is_installed():
    """Setuptools installs only files of packages, and warns about other folders.

    So each folder of conf, data, infer and train is a package, and package-data matches all files.
    """
    options = tomllib.loads((REPOSITORY_ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    names = {path.relative_to(REPOSITORY_ROOT) for path in list_committed_files()}
    files = [
        name for name in names if name.parts[0] in {*TOP_PACKAGES, "conf"} and len(name.parts) > 1
    ]
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


def test_missing_modules_are_named_with_the_extra_that_has_them():
    project = tomllib.loads((REPOSITORY_ROOT / "pyproject.toml").read_text())["project"]
    for extra, modules in MODULES_BY_EXTRA.items():
        packages = [
            re.match(r"[\w-]+", line)[0] for line in project["optional-dependencies"][extra]
        ]
        assert sorted(modules) == sorted(package.replace("-", "_") for package in packages)
        assert f"[{extra}]" in describe_missing_module(modules[0])
    assert "[" not in describe_missing_module("einops")


def test_the_version_is_that_of_pyproject_everywhere(monkeypatch, capsys):
    expected = tomllib.loads((REPOSITORY_ROOT / "pyproject.toml").read_text())["project"]["version"]

    def not_installed(name: str) -> str:
        raise installation.PackageNotFoundError(name)

    assert infer.__version__ == expected
    monkeypatch.setattr(installation, "version", not_installed)
    assert infer.__version__ == expected
    assert f"pip install '{REPOSITORY_ROOT}[train]'" in describe_missing_module("datasets")
    monkeypatch.setattr("sys.argv", ["blockdraft", "--version"])
    runpy.run_module("infer", run_name="__main__")  # python -m infer
    script = subprocess.run(
        [REPOSITORY_ROOT / "launch.sh", "--version"], capture_output=True, text=True
    )
    assert capsys.readouterr().out == script.stdout == f"blockdraft {expected}\n"


def test_text_files_are_written_by_one_module():
    """infer/utils/files.py writes them atomically and without secrets."""
    writers = [
        str(path.relative_to(REPOSITORY_ROOT))
        for path in list_source_files(*TOP_PACKAGES)
        if ".write_text(" in path.read_text()
    ]
    assert writers == ["infer/utils/files.py"]
