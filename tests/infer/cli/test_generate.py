"""The command `generate`: a chat model answers through its template, others continue the text."""

import logging
import sys
from copy import copy

import pytest

from infer import generate
from infer.cli import generate as module
from infer.cli.generate import GenerateCommand
from infer.cli.models import load_target_and_drafter
from infer.config import DecodeOptions, DrafterLoadConfig, TargetConfig

TURN_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.mark.parametrize(
    "template, chat, uses_template",
    [(TURN_TEMPLATE, None, True), (TURN_TEMPLATE, False, False), (None, None, False)],
)
def test_a_chat_model_answers_and_others_continue(
    shallow_target, monkeypatch, capsys, template, chat, uses_template
):
    target = copy(shallow_target)
    target.tokenizer = copy(target.tokenizer)
    target.tokenizer.chat_template = (
        template or target.tokenizer.chat_template
    )  # its own only joins the messages
    monkeypatch.setattr(module, "load_target_and_drafter", lambda *_: (target, None))
    options = DecodeOptions(method="plain", max_new_tokens=6)
    module.run(GenerateCommand(prompt="import os", chat=chat, decoding=options))
    prompt = "<user>import os<assistant>" if uses_template else "import os"
    expected = generate(target, None, prompt, options).text
    assert capsys.readouterr().out == (expected if uses_template else prompt + expected) + "\n"


def test_standard_output_has_only_the_answer(shallow_target, monkeypatch, capsys):
    """Lines that libraries print while a target is loaded, such as DeepSpeed's, go to stderr."""

    def load_and_warn(*_):
        logging.StreamHandler(stream=sys.stdout).emit(
            logging.makeLogRecord({"msg": "Setting accelerator to CPU"})
        )
        return shallow_target, None

    monkeypatch.setattr(module, "load_target_and_drafter", load_and_warn)
    options = DecodeOptions(method="plain", max_new_tokens=6)
    module.run(GenerateCommand(prompt="import os", chat=False, decoding=options))
    captured = capsys.readouterr()
    assert (
        captured.out
        == "import os" + generate(shallow_target, None, "import os", options).text + "\n"
    )
    assert captured.err.startswith("Setting accelerator to CPU\n")


@pytest.mark.parametrize(
    "options", [{"checkpoint": "lookup"}, {"decoding": DecodeOptions(method="plain")}]
)
def test_quantization_without_a_drafter_is_refused_before_loading(options, monkeypatch):
    monkeypatch.setattr("infer.targets.loading.load_configured_target", None)
    with pytest.raises(ValueError, match=r"drafter\.quantization=int8 has no effect"):
        module.run(GenerateCommand(drafter=DrafterLoadConfig("int8"), **options))


@pytest.mark.parametrize(
    ("target", "drafter", "expected"),
    [
        ("int8", "auto", "int8"),
        ("none", "auto", "none"),
        ("int8", "none", "none"),
        ("none", "int8", "int8"),
    ],
)
def test_a_drafter_has_the_quantization_of_its_target_by_default(
    target, drafter, expected, monkeypatch
):
    class Loaded(Exception):
        pass

    def record(*_, quantization, **__):
        raise Loaded(quantization)

    monkeypatch.setattr("infer.formats.checkpoint.load_drafter", record)
    with pytest.raises(Loaded, match=f"^{expected}$"):
        load_target_and_drafter(
            TargetConfig(quantization=target), "embedded", DrafterLoadConfig(drafter)
        )
