"""The command `data` shows what training would learn."""

import json

import pytest

from infer.cli.data import DataCommand, run
from infer.utils.hydra_app import compose_checked_options as composed


def test_examples_are_counted_and_shown_with_the_learnt_text(tmp_path, capsys):
    file = tmp_path / "chats.jsonl"
    chat = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]
    rows = [
        {"messages": [*chat, {"role": "user", "content": f"And {i}?"}, chat[1]]} for i in range(100)
    ]
    rows += [{"prompt": f"x{i} = ", "response": "1\ny = 2", "finish": "length"} for i in range(100)]
    rows[1:1] = [
        {"messages": [*chat[:1], {**chat[1], "tool_calls": [{"function": {"name": "f"}}]}]}
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(composed("data", DataCommand, ["data=jsonl", f"data.path={file}", "data.length=64"]))
    output = capsys.readouterr().out
    assert (
        "201 read: 179 used, 21 held out, 1 excluded, 0 invalid" in output
    )  # one of ten is held out for evaluation
    assert "89 chats and 90 other texts" in output
    assert (
        "excluded   1: the chat template changes or leaves out the tool calls of an answer"
        in output
    )
    assert (
        "answers    268, of which 90 were cut by a token limit" in output
        and "template   chat template variables: none" in output
    )
    assert "What?\n⟦That" in output and "⟧" in output.split("And 1?")[1] and "median " in output
    with pytest.raises(ValueError, match=r"enable_thinking: this model's chat template has"):
        run(composed("data", DataCommand, ["+target.chat_template_kwargs.enable_thinking=false"]))
