"""Commands under Hydra: arguments, error messages, and options from a checkpoint's run."""

import io
import json
import os
import subprocess
import sys
from dataclasses import fields, is_dataclass

import pytest

from infer.cli.chat import ChatCommand
from infer.cli.compare import CompareCommand
from infer.cli.eval import EvalCommand
from infer.cli.generate import GenerateCommand
from infer.main import INSTALLED_COMMANDS
from infer.utils.hydra_app import compose_checked_options, run_command
from infer.utils.options import read_text_or_file_options
from train.config import TrainConfig

UNUSUAL_PROMPTS = [
    "It's {a: [1, 2]}, ${x}\n",
    "${oc.env:HOME}",
    "--help",
    "key=value",
    '\\${escaped} "quoted"',
    "日本語で書いてください。",
    "two\nlines\n",
    "@dataclass\nclass A:",
    "\ttab and trailing space  ",
]


@pytest.mark.parametrize("prompt", UNUSUAL_PROMPTS)
def test_a_prompt_is_taken_as_it_is_typed(prompt):
    received = []
    run_command(
        "generate", GenerateCommand, received.append, ["--prompt", prompt, "decoding.budget=7"]
    )
    assert (received[0].prompt, received[0].decoding.budget) == (prompt, 7)


def test_a_prompt_is_for_commands_that_have_one(capsys):
    received = []
    run_command("chat", ChatCommand, received.append, ["--prompt", "It's {a}"])
    assert received[0].prompt == "It's {a}"
    for name, arguments in (("eval", ["--prompt", "x"]), ("generate", ["--prompt"])):
        with pytest.raises(SystemExit) as end:
            run_command(
                name, INSTALLED_COMMANDS[name].import_options_class(), received.append, arguments
            )
        assert end.value.code == 2 and "unrecognized arguments: --prompt" in capsys.readouterr().err


def test_texts_come_from_files_and_standard_input(tmp_path, monkeypatch):
    file = tmp_path / "a prompt (1).txt"
    file.write_text("def f():\n    '''ä'''\n", encoding="utf-8")
    received = []
    run_command("generate", GenerateCommand, received.append, ["--prompt", f"@{file}"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("import os\n"))
    run_command("generate", GenerateCommand, received.append, ["--prompt", "-"])
    run_command("generate", GenerateCommand, received.append, ["--prompt", "@@property"])
    assert [options.prompt for options in received] == [
        "def f():\n    '''ä'''\n",
        "import os\n",
        "@property",
    ]
    options = GenerateCommand()
    options.decoding.stop = [f"@{file}", "x", "-"]
    options.decoding.regex = f"@{file}"
    read_text_or_file_options(options)
    assert (
        options.decoding.stop
        == [options.decoding.regex, "x", "-"]
        == ["def f():\n    '''ä'''\n", "x", "-"]
    )
    (tmp_path / "system.txt").write_text("Be brief.")
    assert (
        compose_checked_options("chat", ChatCommand, [f"system=@{tmp_path}/system.txt"]).system
        == "Be brief."
    )


@pytest.mark.parametrize("wrong", ["@/nowhere/to be found", "@property"])
def test_a_text_file_that_cannot_be_read_is_named(wrong, capsys):
    with pytest.raises(SystemExit) as end:
        run_command("generate", GenerateCommand, None, ["--prompt", wrong])
    assert end.value.code == 2
    assert f"prompt={wrong}: the file could not be read" in capsys.readouterr().err


# Command, arguments, a part of the error message (Hydra's, or that of one of our checks).
INVALID_ARGUMENTS = [
    ("train", ["optim.lrr=1"], "Key 'lrr' not in 'OptimConfig'"),
    ("train", ["+optim.lrr=1"], "Key 'lrr' not in 'OptimConfig'"),
    ("train", ["prompts=3"], "Key 'prompts' not in 'TrainConfig'"),
    ("train", ["optim.lr=abc"], "Value 'abc' of type 'str' could not be converted to Float"),
    ("train", ["seed=1.5"], "Value '1.5' of type 'float' could not be converted to Integer"),
    ("train", ["seed=true"], "could not be converted to Integer"),
    ("train", ["optim.lr"], "missing EQUAL"),
    ("train", ["optim.betas=[0.9"], "no viable alternative at input"),
    ("train", ["optimiser=laptop"], "Key 'optimiser' not in 'TrainConfig'"),
    ("train", ["optim=adam"], "Available options in 'optim':"),
    ("train", ["target=nope"], "qwen3-4b"),
    ("train", ["+model=nope"], "Could not find 'model/nope'"),
    ("train", ["+experiment=nope"], "Available options in 'experiment':"),
    ("train", ["--config-name", "nope"], "Cannot find primary config 'nope'"),
    ("train", ["--config-dir", "/nowhere"], "Additional config directory '/nowhere' not found"),
    ("train", ["evaluation.budgets=16,32"], "To use it as a list, use key=[value1,value2]"),
    ("train", ["optim.lr=nan"], "optim.lr=nan: must be a finite number"),
    ("train", ["optim.lr=-1"], "optim.lr=-1.0: must be above 0"),
    ("train", ["seed=" + "9" * 30], "between -2**62 and 2**62"),
    ("train", ["optim.betas=[0.9,1.0]"], "optim.betas=[0.9, 1.0]"),
    ("train", ["name=../x"], "name=../x is not allowed: the name of a run"),
    ("train", ["data=jsonl"], "data.path"),
    ("train", ["data=gone.jsonl"], "data.path=gone.jsonl: no such file or folder"),
    ("train", ["deepspeed.stage=1"], "optim.name=muon"),
    ("train", ["objective.divergence=l2"], "objective.divergence=l2: use"),
    ("train", ["evaluation.budgets=[]"], "budgets"),
    (
        "train",
        ["anchors_per_sequence=5000"],
        "a packed sequence of data.length=256 tokens has room for at most 254 anchors",
    ),
    ("eval", ["optim=laptop"], "Could not override 'optim'"),
    ("generate", ["def f(x):"], "See https://hydra.cc"),
    ("generate", ["target.device=gpu0!"], "See https://hydra.cc"),
    (
        "generate",
        ["decoding.method=static", "decoding.budget=auto"],
        "give budget as a number of nodes",
    ),
]


@pytest.mark.parametrize(("name", "arguments", "expected"), INVALID_ARGUMENTS)
def test_invalid_arguments_give_a_message_without_a_traceback(
    name, arguments, expected, capsys, tmp_path, monkeypatch
):
    """The message is Hydra's or ours, nothing runs, and no file is left."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        run_command(name, INSTALLED_COMMANDS[name].import_options_class(), None, arguments)
    message = capsys.readouterr().err
    assert end.value.code == 2
    assert message.startswith("error: ") and expected in message and "Traceback" not in message
    assert not list(tmp_path.rglob("*.*"))
    assert not (tmp_path / "runs" / "embedded-dflash").exists()


def test_a_folder_that_cannot_be_created_gives_one_sentence(capsys):
    with pytest.raises(SystemExit) as end:
        run_command("train", TrainConfig, None, ["runs_dir=/dev/null"])
    assert end.value.code == 3
    assert (
        capsys.readouterr().err
        == "error: [Errno 20] Not a directory: '/dev/null/embedded-dflash'\n"
    )


def test_hydra_full_error_shows_the_traceback(repo):
    """HYDRA_FULL_ERROR=1 works as in every Hydra application."""
    command = [sys.executable, "train/main.py", "optim.lrr=1"]
    environment = os.environ | {"HYDRA_FULL_ERROR": "1", "PYTHONPATH": str(repo)}
    done = subprocess.run(command, cwd=repo, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" in done.stderr and "Key 'lrr'" in done.stderr


def option_keys(options_class, prefix=""):
    """Yield the dotted keys of a dataclass of options."""
    for field in fields(options_class):
        if is_dataclass(field.type):
            yield from option_keys(field.type, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


@pytest.mark.parametrize("name", list(INSTALLED_COMMANDS))
def test_help_explains_every_key(name, capsys):
    """The help has the option's value in this command, its type and its meaning."""
    options_class = INSTALLED_COMMANDS[name].import_options_class()
    run_command(name, options_class, None, ["--help"])
    lines = capsys.readouterr().out.splitlines()
    for key in option_keys(options_class):
        [index] = [i for i, line in enumerate(lines) if line.startswith(f"  {key}=")]
        assert lines[index].endswith(")") and lines[index + 1].startswith("    ")
    assert any(line.startswith("  objective: acceptance, annealed-kl") for line in lines)
    if name == "train":
        run_command("train", options_class, None, ["+model=qwen3-4b", "--help"])
        assert "  anchors_per_sequence=1536  (int)" in capsys.readouterr().out


INFORMATION_FLAGS = [
    ["--info"],
    ["--info", "defaults"],
    ["--cfg", "hydra"],
    ["--cfg", "job", "--package", "optim"],
    ["--hydra-help"],
]


@pytest.mark.parametrize("arguments", INFORMATION_FLAGS, ids=" ".join)
def test_flags_that_only_print_create_no_folder(arguments, tmp_path, repo):
    command = [sys.executable, str(repo / "train" / "main.py"), *arguments]
    environment = os.environ | {"PYTHONPATH": str(repo)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout, done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name", ["train", "features", "data", "regenerate", "ngram", "eval", "compare"]
)
def test_a_file_or_folder_is_the_data_of_every_command(name, tmp_path):
    """With data.path= and data=, whatever the command's default, also with a model preset."""
    file = tmp_path / "mine.jsonl"
    schema = INSTALLED_COMMANDS[name].import_options_class()
    file.write_text('{"text": "x"}\n')
    presets = (
        [[], ["+model=hf", "target.path=embedded", "data.length=2000"]] if name == "train" else [[]]
    )
    for preset in presets:
        for argument in (f"data.path={file}", f"data={file}", f"data={tmp_path}"):
            data = compose_checked_options(name, schema, [*preset, argument]).data
            assert (data.source, data.path) == ("jsonl", argument.partition("=")[2])
        for argument in (f"data.path={file}l", f"data={file}l", "data=gone.jsonl"):
            with pytest.raises(ValueError, match=r"^data\.path=\S+: no such file or folder"):
                compose_checked_options(name, schema, [*preset, argument])


def test_a_target_may_be_given_as_a_path_or_a_name_of_the_hub(tmp_path):
    for path in (str(tmp_path), "Qwen/Qwen3-4B", "model.gguf"):
        assert (
            compose_checked_options("generate", GenerateCommand, [f"target={path}"]).target.path
            == path
        )
    assert (
        compose_checked_options("generate", GenerateCommand, ["target=qwen3-4b"]).target.path
        == "Qwen/Qwen3-4B"
    )


@pytest.fixture
def run_folder(tmp_path):
    """The folder of a training run: its config.json and a checkpoint with the link `best`."""
    run = tmp_path / "runs" / "mine"
    (run / "checkpoints" / "step-00000003" / "drafter").mkdir(parents=True)
    (run / "checkpoints" / "best").symlink_to("step-00000003")
    target = {
        "path": "/models/it's mine",
        "dtype": "bfloat16",
        "device": "cuda:7",
        "trust_remote_code": True,
    }
    parts = [{"path": "chats (1).jsonl", "split": "train", "weight": 2.0}]
    data = {
        "source": "mixture",
        "path": None,
        "parts": parts,
        "length": 3072,
        "bad_rows": 100.0,
        "gone": 1,
    }
    (run / "config.json").write_text(json.dumps({"target": target, "data": data}))
    return run


def test_a_runs_configuration_cannot_read_environment_variables(run_folder):
    (run_folder / "config.json").write_text(json.dumps({"target": {"path": "${oc.env:HOME}/x"}}))
    config = compose_checked_options(
        "generate", GenerateCommand, [f"checkpoint={run_folder}/checkpoints/best"]
    )
    assert config.target.path == "${oc.env:HOME}/x"


def test_commands_take_target_and_data_from_the_checkpoints_run(run_folder):
    best = f"{run_folder}/checkpoints/best"
    config = compose_checked_options("eval", EvalCommand, [f"checkpoint={best}"])
    assert (config.target.path, config.target.dtype) == ("/models/it's mine", "bfloat16")
    assert (config.data.source, config.data.datasets[0].weight, config.data.length) == (
        "mixture",
        2.0,
        3072,
    )
    # The device is this machine's, and only the user allows remote code.
    assert (config.target.device, config.target.trust_remote_code) == ("auto", False)
    for name in ("generate", "serve", "export"):
        schema = INSTALLED_COMMANDS[name].import_options_class()
        assert (
            compose_checked_options(name, schema, [f"checkpoint={best}/drafter"]).target.path
            == "/models/it's mine"
        )
    config = compose_checked_options("compare", CompareCommand, [f"checkpoints=[{best}]"])
    assert (config.target.path, config.data.source) == ("/models/it's mine", "mixture")
    overridden = compose_checked_options(
        "eval", EvalCommand, [f"checkpoint={best}", "target.path=other", "data=stdlib"]
    )
    assert (overridden.target.path, overridden.target.dtype, overridden.data.source) == (
        "other",
        "auto",
        "stdlib",
    )
    assert (
        compose_checked_options(
            "eval", EvalCommand, [f"checkpoint={best}", "target.dtype=float32"]
        ).target.dtype
        == "float32"
    )
    assert (
        compose_checked_options("generate", GenerateCommand, ["checkpoint=nowhere"]).target.path
        == "embedded"
    )
