"""`./launch.sh generate`: a chat model is asked through its template, any other model continues the
text."""

import logging
import sys
from copy import copy

import pytest

from infer import generate
from infer.cli import generate as module
from infer.cli.generate import GenerateCommand
from infer.cli.models import load
from infer.config import DecodeOptions, LoadedConfig, TargetConfig

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.mark.parametrize(
    "template, chat, asked", [(TURNS, None, True), (TURNS, False, False), (None, None, False)]
)
def test_a_chat_model_is_asked_and_others_continue(
    shallow_target, monkeypatch, capsys, template, chat, asked
):
    target = copy(shallow_target)
    target.tokenizer = copy(target.tokenizer)
    target.tokenizer.chat_template = (
        template or target.tokenizer.chat_template
    )  # its own joins the messages
    monkeypatch.setattr(module, "load", lambda *_: (target, None))
    options = DecodeOptions(method="plain", max_new_tokens=6)
    module.run(GenerateCommand(prompt="import os", chat=chat, decoding=options))
    prompt = "<user>import os<assistant>" if asked else "import os"
    expected = generate(target, None, prompt, options).text
    assert capsys.readouterr().out == (expected if asked else prompt + expected) + "\n"


def test_standard_output_has_the_answer_alone(shallow_target, monkeypatch, capsys):
    """What libraries print while a target is loaded, as DeepSpeed does when its accelerator is
    looked for, goes to standard error."""

    def load_and_warn(*_):
        logging.StreamHandler(stream=sys.stdout).emit(
            logging.makeLogRecord({"msg": "Setting accelerator to CPU"})
        )
        return shallow_target, None

    monkeypatch.setattr(module, "load", load_and_warn)
    options = DecodeOptions(method="plain", max_new_tokens=6)
    module.run(GenerateCommand(prompt="import os", chat=False, decoding=options))
    said = capsys.readouterr()
    assert (
        said.out == "import os" + generate(shallow_target, None, "import os", options).text + "\n"
    )
    assert said.err.startswith("Setting accelerator to CPU\n")


@pytest.mark.parametrize(
    "options", [{"checkpoint": "lookup"}, {"decoding": DecodeOptions(method="plain")}]
)
def test_a_quantization_of_nothing_is_refused_before_anything_loads(options, monkeypatch):
    monkeypatch.setattr("infer.targets.loading.open_target", None)
    with pytest.raises(ValueError, match=r"drafter\.quantization=int8: leave it out"):
        module.run(GenerateCommand(drafter=LoadedConfig("int8"), **options))


@pytest.mark.parametrize(
    ("target", "drafter", "expected"),
    [
        ("int8", "auto", "int8"),
        ("none", "auto", "none"),
        ("int8", "none", "none"),
        ("none", "int8", "int8"),
    ],
)
def test_a_drafter_follows_its_target_into_integers_unless_told_otherwise(
    target, drafter, expected, monkeypatch
):
    class Loaded(Exception):
        pass

    def record(*_, quantization, **__):
        raise Loaded(quantization)

    monkeypatch.setattr("infer.formats.checkpoint.load_drafter", record)
    with pytest.raises(Loaded, match=f"^{expected}$"):
        load(TargetConfig(quantization=target), "embedded", LoadedConfig(drafter))
