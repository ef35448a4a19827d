"""Settings and fixtures of all tests: no network, one thread per process."""

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

# torch is imported in fixtures only: the process that distributes the tests does not need it.
import pytest

# All processes of one pytest run share a cache of packed data sets, and other runs do not.
if "PYTEST_XDIST_WORKER" not in os.environ:
    DATASETS_CACHE_FOLDER = tempfile.TemporaryDirectory(prefix="datasets-")
    os.environ["HF_DATASETS_CACHE"] = DATASETS_CACHE_FOLDER.name
os.environ["HF_HUB_OFFLINE"] = "1"
# Also for the processes that tests start. Several pytest processes run at the same time.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["WANDB_MODE"] = "offline"

TINY_QWEN3_SIZES = {  # common to all tiny random models
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
            name_words = {*re.split(r"[\W_]+", f"{item.name} {parameters}")}
            needed_packages = {
                needed for marker in item.iter_markers("needs") for needed in marker.args
            }
            if name in needed_packages or not name_words.isdisjoint(package["words"]):
                item.add_marker(pytest.mark.skip(reason=f"needs {missing[0]}, which is missing"))


def pytest_collection_finish() -> None:
    """Exclude imported modules from garbage collection, as they stay in memory anyway."""
    gc.collect()
    gc.freeze()


# Otherwise every HTTP client of a test would read all certificates, for a server without TLS.
ssl.create_default_context = functools.cache(ssl.create_default_context)


@pytest.fixture(scope="session")
def repo() -> Path:
    """Return the repository's root folder."""
    return Path(__file__).resolve().parent.parent


class ForkServer:
    """Client of fork_server.py, which starts processes of the project's commands.

    All processes of a pytest run share one server, which the first of them starts.
    """

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
                except OSError:  # it is not started yet, is just starting, or has just ended
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

    def send_request(self, **request) -> int | None:
        """Send a request and return the answer, see fork_server.py."""
        print(json.dumps(request), file=self.lines, flush=True)
        return json.loads(self.lines.readline())

    def close(self) -> None:
        self.lines.close()
        self.socket.close()


class Command:
    """A running command of one or more processes. If one of them fails, the others are killed."""

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
            rank_variables = {}
            if processes > 1:
                rank_variables = cluster | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            self.running.append(
                server.send_request(**common, environment=rank_variables | variables)
            )

    def poll(self) -> int | None:
        """Return the exit code, or None while a process is running."""
        for process in list(self.running):
            exit_code = self.server.send_request(poll=process)
            if exit_code is None:
                continue
            self.running.remove(process)
            self.returncode = self.returncode or exit_code
            if exit_code:
                self.kill()
        return None if self.running else self.returncode

    def send_signal(self, number: int) -> None:
        for process in self.running:
            os.kill(process, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float = 600) -> int:
        """Wait for the end; return the exit code. Raises TimeoutError after `timeout` seconds."""
        deadline_time = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline_time:
                self.kill()
                raise TimeoutError(self.output.read_text())
            time.sleep(0.02)
        return self.returncode

    def finish(self, code: int = 0) -> str:
        """Wait for the end, check that its exit code is `code`, and return the output."""
        assert self.wait() == code, self.output.read_text()
        return self.output.read_text()


@pytest.fixture(scope="session")
def start_command(repo, tmp_path_factory, shared_folder) -> Iterator:
    """Return a function (script, arguments, processes=1, **environment) -> running `Command`.

    It does the same as `python script arguments`, but with all modules already imported.
    """
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
    for command in commands:  # a failed test may have left it running
        command.kill()
    for server in servers:
        server.close()


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory) -> Path:
    """Return a folder that all processes of the pytest run share."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def make_once(shared_folder):
    """Return a function (name, make) -> folder that `make(folder)` has filled.

    It is filled once for all processes of the pytest run; the others wait for it.
    """
    shared = shared_folder

    def make_folder_once(name: str, make) -> Path:
        folder = shared / f"once-{name}"
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (shared / f"{name}.made").exists():
                shutil.rmtree(folder, ignore_errors=True)  # left by a process that failed
                folder.mkdir()
                make(folder)
                (shared / f"{name}.made").touch()
        return folder

    return make_folder_once


@pytest.fixture(scope="session")
def load_program(repo):
    """Return a function (name) -> module of the program tests/robustness/<name>.py."""

    def load_robustness_program(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(
            name, repo / "tests" / "robustness" / f"{name}.py"
        )
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load_robustness_program


@pytest.fixture
def file_size_limit():
    """Return a function (bytes) -> context in which no file can grow beyond this size.

    Writing then fails with EFBIG, as on a full disk.
    """

    @contextmanager
    def limit_file_size(size: int) -> Iterator[None]:
        old_limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, old_limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old_limits)

    return limit_file_size


@pytest.fixture(scope="session")
def embedded():
    """Return the embedded target in float32 with its tokenizer. Tests must not change it."""
    from infer import load_target

    return load_target("embedded", dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def shallow(make_once) -> Path:
    """Return a folder with the embedded target's first four layers and its tokenizer.

    It is for tests that need any target, whatever it generates. They must not change it.
    """

    def write_shallow_copy(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        from infer.targets.loading import EMBEDDED_TARGET_FOLDER

        shutil.copytree(
            EMBEDDED_TARGET_FOLDER,
            folder,
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns("drafter", "*.jsonl"),
        )
        config = json.loads((EMBEDDED_TARGET_FOLDER / "config.json").read_text())
        config |= {"num_hidden_layers": 4, "layer_types": config["layer_types"][:4]}
        (folder / "config.json").write_text(json.dumps(config))
        tensors = load_file(EMBEDDED_TARGET_FOLDER / "model.safetensors")
        remaining_tensors = {
            name: tensor
            for name, tensor in tensors.items()
            if ".layers." not in name or int(name.split(".")[2]) < 4
        }
        save_file(remaining_tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return make_once("shallow", write_shallow_copy)


@pytest.fixture(scope="session")
def shallow_target(shallow):
    """Return the target of the fixture `shallow` in float32. Tests must not change it."""
    from infer import load_target

    return load_target(str(shallow), dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def random_qwen3():
    """Return a function (seed, **config options) -> small Qwen3 model with random weights.

    The weights are large enough that the model generates different tokens.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    def make(seed: int = 0, **sizes) -> Qwen3ForCausalLM:
        torch.manual_seed(seed)
        default_sizes = {
            "vocab_size": 97,
            "num_hidden_layers": 2,
            "max_position_embeddings": 512,
            "initializer_range": 0.2,
        }
        return Qwen3ForCausalLM(Qwen3Config(**TINY_QWEN3_SIZES | default_sizes | sizes))

    return make


@pytest.fixture(scope="session")
def make_tiny(random_qwen3):
    """Return a function -> (target, drafter), both random, with a vocabulary of 97 tokens.

    layers: of the drafter
    depth: number of the target's layers
    options: of DrafterConfig
    """
    import torch

    from infer.config import DrafterConfig
    from infer.drafters.build import create_drafter
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
        if dart:
            layers = 1
        if depth < 6:  # the default layer ids need more layers
            target_layer_ids = [0, 1, 1] if dart else [*range(layers)]
            options = {"target_layer_ids": target_layer_ids} | options
        options = DrafterConfig(layers=layers, block_size=block_size, mask_token_id=96, **options)
        drafter = create_drafter(options, target)
        drafter.config.initializer_range = 0.2
        drafter.init_weights(torch.Generator().manual_seed(seed))
        return target, drafter.to(dtype)

    return make


@pytest.fixture(scope="session")
def random_target():
    """Return a function (transformers config) -> target with random weights, norms and biases."""
    import torch
    from transformers import AutoModelForCausalLM

    from infer.targets.loading import build_meta_model
    from infer.targets.target import Target

    def make(config) -> Target:
        attention = build_meta_model(config).config._attn_implementation
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
    """Return an n-gram file of order 3 over 97 tokens, for the targets of `make_tiny`.

    Every token has three frequent successors.
    """
    import torch

    from infer.ngrams.count import count_ngrams

    generator = torch.Generator().manual_seed(5)
    favourites = torch.randint(97, (97, 3), generator=generator)
    documents = []
    for _ in range(40):
        ids = [int(torch.randint(97, (), generator=generator))]
        for draw in torch.randint(6, (120,), generator=generator).tolist():
            ids.append(int(favourites[ids[-1], draw % 3]) if draw < 5 else (ids[-1] + 31) % 97)
        documents.append(ids)
    path = tmp_path_factory.mktemp("ngrams") / "tiny.ngrams"
    count_ngrams(documents, 97, 3, path, "0" * 64)
    return path


@pytest.fixture(scope="session")
def make_masked(random_qwen3):
    """Return a function (shifted, seed) -> random bidirectional model of 64 tokens.

    The weights are large enough that positions differ in confidence.
    """
    from infer.masked.model import MaskedModel

    def make(shifted: bool = False, seed: int = 2) -> MaskedModel:
        sizes = {"vocab_size": 64, "max_position_embeddings": 128, "initializer_range": 0.4}
        body = random_qwen3(seed, **sizes).eval().requires_grad_(False)
        for layer in body.model.layers:
            # Other positions matter, but not so much that every draft is rejected.
            layer.self_attn.o_proj.weight *= 0.25
        return MaskedModel(body, None, 60, shifted, "tiny")

    return make
