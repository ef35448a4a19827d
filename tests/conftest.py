"""What every test stands on: no network, one thread a process, the repository's folder."""

import fcntl
import functools
import gc
import importlib.util
import json
import os
import re
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest  # and no torch: the process that hands out the tests needs none

if (
    "PYTEST_XDIST_WORKER" not in os.environ
):  # pytest's processes share the rows that they pack, and nobody else
    CACHE = tempfile.TemporaryDirectory(prefix="datasets-")
    os.environ["HF_DATASETS_CACHE"] = CACHE.name
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = (
    "1"  # of the processes that tests start, too: pytest itself runs twice side by side
)
os.environ["WANDB_MODE"] = "offline"

TINY = {  # what all tiny random models have in common
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "eos_token_id": None,
    "bos_token_id": None,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need an optional package (optional_packages.toml) that was deleted."""
    tests = Path(__file__).resolve().parent
    packages = tomllib.loads((tests / "optional_packages.toml").read_text())
    for name, package in packages.items():
        missing = [path for path in package["code"] if not (tests.parent / path).exists()]
        for item in items if missing else ():
            parameters = item.callspec.params if hasattr(item, "callspec") else ""
            named = {*re.split(r"[\W_]+", f"{item.name} {parameters}")}
            marked = {needed for marker in item.iter_markers("needs") for needed in marker.args}
            if name in marked or not named.isdisjoint(package["words"]):
                item.add_marker(pytest.mark.skip(reason=f"needs {missing[0]}, which is missing"))


def pytest_collection_finish() -> None:
    """What has been imported is here to stay: it is not looked through for garbage again and
    again."""
    gc.collect()
    gc.freeze()


# every HTTP client that a test makes would read all certificates anew, for a server that has none
ssl.create_default_context = functools.cache(ssl.create_default_context)


@pytest.fixture(scope="session")
def repo() -> Path:
    """The repository's root."""
    return Path(__file__).resolve().parent.parent


class ForkServer:
    """The client of fork_server.py, which starts processes of the project's commands: one server
    for all of pytest's processes, started by the first of them."""

    def __init__(self, repo: Path, folder: Path) -> None:
        self.repo = repo
        self.socket = socket.socket(socket.AF_UNIX)
        path = folder / "forks"
        deadline = time.monotonic() + 600
        with (folder / "forks.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            started = None
            while True:
                try:
                    self.socket.connect(str(path))
                    break
                except OSError:  # nobody has started it, or it has just been, or it has just ended
                    assert time.monotonic() < deadline and (
                        started is None or started.poll() is None
                    )
                if started is None:
                    command = [sys.executable, str(repo / "tests" / "fork_server.py"), str(path)]
                    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
                    started = subprocess.Popen(
                        command, env=os.environ | {"PYTHONPATH": str(repo)}, **quiet
                    )
                time.sleep(0.02)
        self.lines = self.socket.makefile("rw")

    def ask(self, **request) -> int | None:
        print(json.dumps(request), file=self.lines, flush=True)
        return json.loads(self.lines.readline())

    def close(self) -> None:
        self.lines.close()
        self.socket.close()


class Command:
    """A running command of one or more processes. When one of them fails, the others are killed."""

    def __init__(
        self,
        server: ForkServer,
        output: Path,
        script: str,
        arguments: list[str],
        processes: int,
        variables: dict,
    ) -> None:
        self.server = server
        self.output = output
        self.returncode = None
        output.touch()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        cluster = {
            "WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        common = {
            "script": str(server.repo / script),
            "arguments": arguments,
            "output": str(output),
        }
        self.running = []
        for rank in range(processes):
            place = cluster | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}
            self.running.append(server.ask(**common, environment=place | variables))

    def poll(self) -> int | None:
        for process in list(self.running):
            code = self.server.ask(poll=process)
            if code is None:
                continue
            self.running.remove(process)
            self.returncode = self.returncode or code
            if code:
                self.kill()
        return None if self.running else self.returncode

    def send_signal(self, number: int) -> None:
        for process in self.running:
            os.kill(process, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float = 600) -> int:
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                self.kill()
                raise TimeoutError(self.output.read_text())
            time.sleep(0.02)
        return self.returncode

    def finish(self, code: int = 0) -> str:
        """Wait for the end, which must have this exit code; return what was printed."""
        assert self.wait() == code, self.output.read_text()
        return self.output.read_text()


@pytest.fixture(scope="session")
def start_command(repo, tmp_path_factory, shared_folder) -> Iterator:
    """(script, arguments, processes=1, **environment) -> a running `Command`: as `python script
    arguments`, but already imported."""
    servers = []
    commands = []
    folder = tmp_path_factory.mktemp("commands")

    def start(script: str, arguments: list[str], processes: int = 1, **environment: str) -> Command:
        if not servers:
            servers.append(ForkServer(repo, shared_folder))
        output = folder / f"{len(commands)}.txt"
        commands.append(Command(servers[0], output, script, arguments, processes, environment))
        return commands[-1]

    yield start
    for command in commands:  # of tests that failed
        command.kill()
    for server in servers:
        server.close()


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory) -> Path:
    """A folder of all of pytest's processes together."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def make_once(shared_folder):
    """(name, make) -> a folder that `make(folder)` has filled, once for all of pytest's processes:
    the others wait."""
    shared = shared_folder

    def once(name: str, make) -> Path:
        folder = shared / f"once-{name}"
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (shared / f"{name}.made").exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a process in which it failed
                folder.mkdir()
                make(folder)
                (shared / f"{name}.made").touch()
        return folder

    return once


@pytest.fixture(scope="session")
def load_program(repo):
    """name -> the program of that name in tests/robustness, as a module."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(
            name, repo / "tests" / "robustness" / f"{name}.py"
        )
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def file_size_limit():
    """(bytes) -> a context in which no file grows beyond that, as on a full disk: the kernel says
    EFBIG."""

    @contextmanager
    def limit(size: int) -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limit


@pytest.fixture(scope="session")
def embedded():
    """The repository's own target, float32, with its tokenizer. Read only."""
    from infer import load_target

    return load_target("embedded", dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def shallow(make_once) -> Path:
    """A folder with the embedded target's first four layers and its tokenizer: for runs that need a
    target, whatever it says. Read only."""

    def cut(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        from infer.targets.loading import EMBEDDED

        shutil.copytree(
            EMBEDDED,
            folder,
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns("drafter", "*.jsonl"),
        )
        config = json.loads((EMBEDDED / "config.json").read_text())
        config |= {"num_hidden_layers": 4, "layer_types": config["layer_types"][:4]}
        (folder / "config.json").write_text(json.dumps(config))
        tensors = load_file(EMBEDDED / "model.safetensors")
        kept = {
            name: it
            for name, it in tensors.items()
            if ".layers." not in name or int(name.split(".")[2]) < 4
        }
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})

    return make_once("shallow", cut)


@pytest.fixture(scope="session")
def shallow_target(shallow):
    """These four layers, float32, with the tokenizer: for tests of what stands around a target.
    Read only."""
    from infer import load_target

    return load_target(str(shallow), dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def random_qwen3():
    """A factory of small Qwen3 models with random weights, sharp enough that tokens differ: (seed,
    **what differs)."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    def make(seed: int = 0, **sizes) -> Qwen3ForCausalLM:
        torch.manual_seed(seed)
        usual = {
            "vocab_size": 97,
            "num_hidden_layers": 2,
            "max_position_embeddings": 512,
            "initializer_range": 0.2,
        }
        return Qwen3ForCausalLM(Qwen3Config(**TINY | usual | sizes))

    return make


@pytest.fixture(scope="session")
def make_tiny(random_qwen3):
    """A factory of random targets of 97 tokens and drafters for them: (dtype, block size, seed,
    layers, depth of the target, family) -> (target, drafter)."""
    import torch

    from infer.config import DrafterConfig
    from infer.drafters.base import new_drafter
    from infer.targets.target import Target

    def make(
        dtype: torch.dtype = torch.float32,
        block_size: int = 4,
        seed: int = 0,
        layers: int = 2,
        depth: int = 6,
        **options,
    ):
        target = Target(random_qwen3(seed, num_hidden_layers=depth).to(dtype))
        dart = options.get("family") == "dart"
        layers = 1 if dart else layers
        if depth < 6:  # the public formulas are for more layers
            options = {"target_layer_ids": [0, 1, 1] if dart else [*range(layers)]} | options
        options = DrafterConfig(layers=layers, block_size=block_size, mask_token_id=96, **options)
        drafter = new_drafter(options, target)
        drafter.config.initializer_range = 0.2
        drafter.init_weights(torch.Generator().manual_seed(seed))
        return target, drafter.to(dtype)

    return make


@pytest.fixture(scope="session")
def random_target():
    """(transformers config) -> a target with random weights; its norms, biases and sinks are random
    too."""
    import torch
    from transformers import AutoModelForCausalLM

    from infer.targets.loading import without_memory
    from infer.targets.target import Target

    def make(config) -> Target:
        attention = without_memory(config).config._attn_implementation
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        generator = torch.Generator().manual_seed(3)
        for parameter in model.parameters():
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.data += 0.5
        return Target(model)

    return make


@pytest.fixture(scope="session")
def ngrams(tmp_path_factory) -> Path:
    """An n-gram file of order 3 over 97 tokens that follow each other with a preference, for
    `make_tiny`'s targets."""
    import torch

    from infer.ngrams.count import count_ngrams

    generator = torch.Generator().manual_seed(5)
    favourites = torch.randint(97, (97, 3), generator=generator)
    documents = []
    for _ in range(40):
        ids = [int(torch.randint(97, (), generator=generator))]
        for dice in torch.randint(6, (120,), generator=generator).tolist():
            ids.append(int(favourites[ids[-1], dice % 3]) if dice < 5 else (ids[-1] + 31) % 97)
        documents.append(ids)
    path = tmp_path_factory.mktemp("ngrams") / "tiny.ngrams"
    count_ngrams(documents, 97, 3, path, "0" * 64)
    return path


@pytest.fixture(scope="session")
def make_masked(random_qwen3):
    """A factory of random bidirectional models of 64 tokens, sharp enough that positions differ in
    confidence."""
    from infer.masked.model import MaskedModel

    def make(shifted: bool = False, seed: int = 2) -> MaskedModel:
        sizes = {"vocab_size": 64, "max_position_embeddings": 128, "initializer_range": 0.4}
        body = random_qwen3(seed, **sizes).eval().requires_grad_(False)
        for layer in body.model.layers:
            layer.self_attn.o_proj.weight *= (
                0.25  # what stands elsewhere matters, but not so much that no draft holds
            )
        return MaskedModel(body, None, 60, shifted, "tiny")

    return make
