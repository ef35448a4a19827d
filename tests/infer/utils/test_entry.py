"""Whatever is typed: a checked configuration, or one sentence and exit code 2."""

import errno

import pytest

from infer.cli.chat import ChatCommand
from infer.cli.eval import EvalCommand
from infer.utils.entry import LONGEST_SENTENCE, composed, entry
from train.config import TrainConfig


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("optim.weight_decay=nan", "optim.weight_decay=nan: a finite number"),
        ("optim.lr=1e999", "optim.lr=inf: a finite number"),
        ("seed=" + "9" * 30, "seed: a whole number of at most 62 bits"),
        ("seed=true", "seed"),
        ("optim.betas=[0.9,1.0]", "optim.betas=[0.9, 1.0]"),
        ("target.device=gpu0!", "target.device=gpu0!"),
        ("anchors=5000", "anchors=5000: a row of data.length=256 tokens has room for 254 at most"),
        ("name='a\nb'", "a plain folder name"),
        ("name=" + "a" * 5000, "a plain folder name"),
        ("data.limit=-1", "data.limit=-1"),
        ("evaluation.temperature=1e-9", "evaluation.temperature"),
        ("+_target_=os.system", "_target_"),
        ("drafter.target_layer_ids=[[]]", "drafter.target_layer_ids=[[]]: a list of single values"),
    ],
)
def test_values_that_nothing_can_be_meant_by(override, says):
    with pytest.raises(ValueError) as refusal:
        composed("train", TrainConfig, [override])
    assert says in str(refusal.value)
    assert len(str(refusal.value)) <= LONGEST_SENTENCE and len(str(refusal.value).splitlines()) == 1


@pytest.mark.parametrize("text", ["${oc.env:SECRET}", "x${oc.env:SECRET,y}", "${oc.decode:${oc.env:SECRET}}"])
def test_no_configuration_reads_the_environment(monkeypatch, text):
    monkeypatch.setenv("SECRET", "hunter2")
    for name, schema, key in (
        ("eval", EvalCommand, "out"),
        ("train", TrainConfig, "name"),
    ):
        with pytest.raises(ValueError, match="does not read the environment") as refusal:
            composed(name, schema, [f"{key}='{text}'"])
        assert "hunter2" not in str(refusal.value)
    assert composed("chat", ChatCommand, [f"system={text}"]).system == text  # words, not a place to look up
    assert composed("train", TrainConfig, ["name=x-${drafter.family}"]).name == "x-dflash"  # what is inside, it reads


INTERRUPTED = """
import os, signal, threading, time
from infer.cli.eval import EvalCommand
from infer.utils.entry import entry, going_on

def run(config):
    threading.Thread(target=time.sleep, args=(600,)).start()  # as of a request under way
    with going_on("the same command goes on"):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(600)

entry("eval", EvalCommand, run, ["checkpoint=runs/mine"])
"""


def test_ctrl_c_is_one_sentence_and_waits_for_nothing(start_command, tmp_path):
    (tmp_path / "program.py").write_text(INTERRUPTED)
    said = start_command(str(tmp_path / "program.py"), []).finish(130)
    assert said.strip() == "stopped by Ctrl-C: the same command goes on"


def test_a_silent_hub_is_asked_once_and_only_for_names(monkeypatch, tmp_path):
    """What is not on this machine is then said at once, instead of after half a minute of retries."""
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


def test_a_full_disk_is_a_sentence(capsys):
    def run(config) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "runs/a")

    with pytest.raises(SystemExit) as end:
        entry("chat", ChatCommand, run, [])
    assert end.value.code == 3 and capsys.readouterr().err == "error: No space left on device: runs/a\n"
