"""What `chat` prints for an answer, and the message that it sends back."""

import io
import json

import httpx
import pytest
from rich.console import Console

from infer.cli.chat import ChatCommand, print_answer, read_questions

ROUND_INFO = {"drafted": 3, "committed": 2, "bonus": "", "rejected": "no"}


@pytest.mark.parametrize(
    ("deltas", "printed"),
    [
        ([{"reasoning_content": "Hm."}, {"content": "Yes"}, {"content": "."}], "Hm.\n\nYes."),
        (
            [{"reasoning_content": "Hm"}, {"reasoning_content": ".", "content": "Yes."}],
            "Hm.\n\nYes.",
        ),
        ([{"reasoning_content": "Hm."}, {}], "Hm."),
        ([{"content": "Yes"}, {"content": "."}], "Yes."),
    ],
)
@pytest.mark.parametrize("colours", [None, "standard"])
def test_reasoning_is_printed_apart_from_the_content(deltas, printed, colours):
    chunks = [{"choices": [{"delta": delta}], "round": ROUND_INFO} for delta in deltas]
    lines = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=lines))
    out = io.StringIO()
    console = Console(file=out, color_system=colours, force_terminal=colours is not None)
    with httpx.Client(base_url="http://here", transport=transport) as client:
        message = print_answer(client, [{"role": "user", "content": "?"}], ChatCommand(), console)

    reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
    content = "".join(delta.get("content", "") for delta in deltas)
    expected = {"role": "assistant", "content": content}
    assert message == expected | ({"reasoning_content": reasoning} if reasoning else {})
    if colours is None:
        assert out.getvalue().startswith(f"{printed}\n[")
    else:
        assert ("\x1b[2" in out.getvalue().partition("Yes")[0]) == bool(reasoning)


def test_a_prompt_is_the_first_question(monkeypatch):
    for prompt, expected in (("[a] first", ["[a] first", "typed"]), ("", ["typed"])):
        console = Console(file=io.StringIO())
        typed = iter(["typed", ""])
        monkeypatch.setattr(console, "input", lambda _, typed=typed: next(typed))
        assert list(read_questions(prompt, console)) == expected
        assert console.file.getvalue() == (f"> {prompt}\n" if prompt else "")
