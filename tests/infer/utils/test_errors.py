"""How a command ends, and the check of the hub before it starts."""

import errno
import json
import re

import pytest
import torch
from safetensors import SafetensorError

from infer.cli.chat import ChatCommand
from infer.ngrams.count import count_ngrams
from infer.utils.files import atomic_write, save_world_readable_safetensors
from infer.utils.hydra_app import run_command

INTERRUPTED_PROGRAM = """
import os, signal, threading, time
from infer.cli.eval import EvalCommand
from infer.utils.errors import set_interrupt_message
from infer.utils.hydra_app import run_command

def run(config):
    threading.Thread(target=time.sleep, args=(600,)).start()  # like a request that is running
    with set_interrupt_message("the same command goes on"):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(600)

run_command("eval", EvalCommand, run, ["checkpoint=runs/mine"])
"""


def test_ctrl_c_is_one_sentence_and_waits_for_nothing(start_command, tmp_path):
    (tmp_path / "program.py").write_text(INTERRUPTED_PROGRAM)
    output = start_command(str(tmp_path / "program.py"), []).finish(130)
    assert output.strip() == "stopped by Ctrl-C: the same command goes on"


def test_the_hub_is_checked_once_and_only_for_names_on_it(monkeypatch, tmp_path):
    """A missing file is then reported at once, instead of after half a minute of retries."""
    from huggingface_hub import constants

    from infer.utils import hub

    checks = []
    monkeypatch.setattr(hub, "is_hub_reachable", lambda: checks.append(1))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    hub.go_offline_if_hub_is_unreachable(
        [("out", "runs/a"), ("target.path", "./folder"), ("checkpoint", "runs/x/checkpoints/best")]
    )
    assert not checks and not constants.is_offline_mode()
    hub.go_offline_if_hub_is_unreachable([("target.path", "some/model")])
    assert checks == [1] and constants.is_offline_mode()


FULL_DISK_ERRORS = [
    (
        OSError(errno.ENOSPC, "No space left on device", "runs/a"),
        "[Errno 28] No space left on device: 'runs/a'",
    ),
    (SafetensorError("I/O error: No space left on device"), "I/O error: No space left on device"),
]


@pytest.mark.parametrize(("error", "sentence"), FULL_DISK_ERRORS, ids=["file", "safetensors"])
def test_a_full_disk_is_a_sentence(capsys, error, sentence):
    def run(config) -> None:
        raise error

    with pytest.raises(SystemExit) as end:
        run_command("chat", ChatCommand, run, [])
    assert end.value.code == 3
    assert capsys.readouterr().err == f"error: {sentence}\n"


CLOSED_PIPE_PROGRAM = """
import io, json, os, sys
from infer.cli.chat import ChatCommand
from infer.utils.errors import abort_on_write_error
from infer.utils.hydra_app import run_command

def run_case(letters, stream, flush, ending, arguments, buffered):
    buffering = -1 if buffered else 0
    sys.stdout = io.TextIOWrapper(open(1, "wb", buffering), write_through=not buffered)
    sys.stderr = io.TextIOWrapper(open(2, "wb", buffering), write_through=not buffered)

    def run(config):
        with abort_on_write_error("out=x"):
            print("x" * letters, file=getattr(sys, stream), flush=flush)
        exec(ending)

    try:
        run_command("chat", ChatCommand, run, arguments)
        sys.stdout.flush()
    except SystemExit as end:
        os._exit(end.code)
    os._exit(0)

for case in json.loads(sys.argv[1]):
    ends = {name: os.pipe() for name in ("stdout", "stderr")}
    os.close(ends[case[1]][0])  # the reader has closed it
    if not (child := os.fork()):
        for number, name in enumerate(ends, 1):
            os.dup2(ends[name][1], number)
        run_case(*case)
    for _, written in ends.values():
        os.close(written)
    (other,) = {*ends} - {case[1]}
    other_output = open(ends[other][0]).read()
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), other_output]))
"""
# Characters printed, stream, whether it is flushed, how the command ends, arguments.
CLOSED_PIPE_CASES = [
    (10, "stdout", False, "pass", []),
    (10, "stdout", True, "pass", []),
    (100_000, "stdout", False, "pass", []),
    (10, "stdout", False, "raise SystemExit(1)", []),
    (100_000, "stderr", True, "pass", []),
    (0, "stderr", False, "pass", ["wrong=1"]),
    (0, "stdout", False, "pass", ["--cfg", "job"]),
    (0, "stdout", False, "pass", ["--help"]),
]


def test_a_command_whose_output_pipe_is_closed_ends_without_a_message(start_command, tmp_path):
    cases = [(*case, buffered) for case in CLOSED_PIPE_CASES for buffered in (True, False)]
    (tmp_path / "program.py").write_text(CLOSED_PIPE_PROGRAM)
    lines = start_command(str(tmp_path / "program.py"), [json.dumps(cases)]).finish().splitlines()
    ends = {str(case): json.loads(line) for case, line in zip(cases, lines, strict=True)}
    assert ends == {str(case): [141, ""] for case in cases}


def test_a_broken_pipe_that_is_not_the_output_is_a_sentence(capsys):
    def run(config) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with pytest.raises(SystemExit) as end:
        run_command("chat", ChatCommand, run, [])
    assert end.value.code == 3 and capsys.readouterr().err == "error: [Errno 32] Broken pipe\n"


FILE_WRITERS = {
    "ngrams": lambda out: count_ngrams([[*range(97)] * 20], 97, 4, out, "0" * 64),
    "text": lambda out: atomic_write(out, "x" * 5000),
    "tensors": lambda out: save_world_readable_safetensors({"weight": torch.ones(2000)}, out),
}


@pytest.mark.parametrize("name", FILE_WRITERS)
def test_a_file_that_does_not_fit_is_named_and_nothing_is_left_of_it(
    file_size_limit, tmp_path, name
):
    out = tmp_path / "file"
    with file_size_limit(1000), pytest.raises(OSError, match=re.escape(str(out))):
        FILE_WRITERS[name](out)
    assert not [path for path in tmp_path.iterdir() if path != out]
