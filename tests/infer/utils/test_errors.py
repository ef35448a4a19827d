"""How a command ends, and whom it asks before it begins."""

import errno
import json
import re

import pytest
import torch
from safetensors import SafetensorError

from infer.cli.chat import ChatCommand
from infer.ngrams.count import count_ngrams
from infer.utils.files import atomic_write, save_readable
from infer.utils.hydra_app import run_command

INTERRUPTED = """
import os, signal, threading, time
from infer.cli.eval import EvalCommand
from infer.utils.errors import going_on
from infer.utils.hydra_app import run_command

def run(config):
    threading.Thread(target=time.sleep, args=(600,)).start()  # as of a request under way
    with going_on("the same command goes on"):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(600)

run_command("eval", EvalCommand, run, ["checkpoint=runs/mine"])
"""


def test_ctrl_c_is_one_sentence_and_waits_for_nothing(start_command, tmp_path):
    (tmp_path / "program.py").write_text(INTERRUPTED)
    said = start_command(str(tmp_path / "program.py"), []).finish(130)
    assert said.strip() == "stopped by Ctrl-C: the same command goes on"


def test_a_silent_hub_is_asked_once_and_only_for_names(monkeypatch, tmp_path):
    """What is not on this machine is then said at once, instead of after half a minute of
    retries."""
    from huggingface_hub import constants

    from infer.utils import hub

    asked = []
    monkeypatch.setattr(hub, "hub_answers", lambda: asked.append(1))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    hub.refrain_from_silent_hub(
        [("out", "runs/a"), ("target.path", "./folder"), ("checkpoint", "runs/x/checkpoints/best")]
    )
    assert not asked and not constants.is_offline_mode()
    hub.refrain_from_silent_hub([("target.path", "some/model")])
    assert asked == [1] and constants.is_offline_mode()


FULL = [
    (
        OSError(errno.ENOSPC, "No space left on device", "runs/a"),
        "[Errno 28] No space left on device: 'runs/a'",
    ),
    (SafetensorError("I/O error: No space left on device"), "I/O error: No space left on device"),
]


@pytest.mark.parametrize(("error", "sentence"), FULL, ids=["file", "safetensors"])
def test_a_full_disk_is_a_sentence(capsys, error, sentence):
    def run(config) -> None:
        raise error

    with pytest.raises(SystemExit) as end:
        run_command("chat", ChatCommand, run, [])
    assert end.value.code == 3
    assert capsys.readouterr().err == f"error: {sentence}\n"


UNREAD = """
import io, json, os, sys
from infer.cli.chat import ChatCommand
from infer.utils.errors import disk
from infer.utils.hydra_app import run_command

def run_case(letters, stream, flush, ending, arguments, buffered):
    streams = [io.TextIOWrapper(open(fd, "wb", -1 if buffered else 0), write_through=not buffered) for fd in (1, 2)]
    sys.stdout, sys.stderr = streams

    def run(config):
        with disk("out=x"):
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
    os.close(ends[case[1]][0])  # nobody reads this one
    if not (child := os.fork()):
        for number, name in enumerate(ends, 1):
            os.dup2(ends[name][1], number)
        run_case(*case)
    for _, written in ends.values():
        os.close(written)
    (other,) = {*ends} - {case[1]}
    said = open(ends[other][0]).read()
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said]))
"""
CASES = [  # how much is printed, where, whether it is flushed, how the command ends, its arguments
    (10, "stdout", False, "pass", []),
    (10, "stdout", True, "pass", []),
    (100_000, "stdout", False, "pass", []),
    (10, "stdout", False, "raise SystemExit(1)", []),
    (100_000, "stderr", True, "pass", []),
    (0, "stderr", False, "pass", ["wrong=1"]),
    (0, "stdout", False, "pass", ["--cfg", "job"]),
    (0, "stdout", False, "pass", ["--help"]),
]


def test_a_command_whose_output_nobody_reads_ends_without_a_word(start_command, tmp_path):
    cases = [(*case, buffered) for case in CASES for buffered in (True, False)]
    (tmp_path / "program.py").write_text(UNREAD)
    lines = start_command(str(tmp_path / "program.py"), [json.dumps(cases)]).finish().splitlines()
    ends = {str(case): json.loads(line) for case, line in zip(cases, lines, strict=True)}
    assert ends == {str(case): [141, ""] for case in cases}


def test_a_broken_pipe_that_is_not_the_output_is_a_sentence(capsys):
    def run(config) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with pytest.raises(SystemExit) as end:
        run_command("chat", ChatCommand, run, [])
    assert end.value.code == 3 and capsys.readouterr().err == "error: [Errno 32] Broken pipe\n"


WRITERS = {
    "ngrams": lambda out: count_ngrams([[*range(97)] * 20], 97, 4, out, "0" * 64),
    "text": lambda out: atomic_write(out, "x" * 5000),
    "tensors": lambda out: save_readable({"weight": torch.ones(2000)}, out),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_that_does_not_fit_is_named_and_nothing_is_left_of_it(
    file_size_limit, tmp_path, name
):
    out = tmp_path / "file"
    with file_size_limit(1000), pytest.raises(OSError, match=re.escape(str(out))):
        WRITERS[name](out)
    assert not [path for path in tmp_path.iterdir() if path != out]
