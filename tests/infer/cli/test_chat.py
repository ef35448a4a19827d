"""What `chat` prints of an answer, and what it sends back."""

import io
import json

import httpx
import pytest
from rich.console import Console

from infer.cli.chat import ChatCommand, answer, questions

ROUND = {"drafted": 3, "committed": 2, "bonus": "", "rejected": "no"}


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
def test_a_thought_is_printed_apart_from_the_answer(deltas, printed, colours):
    chunks = [{"choices": [{"delta": delta}], "round": ROUND} for delta in deltas]
    lines = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=lines))
    out = io.StringIO()
    console = Console(file=out, color_system=colours, force_terminal=colours is not None)
    with httpx.Client(base_url="http://here", transport=transport) as client:
        said = answer(client, [{"role": "user", "content": "?"}], ChatCommand(), console)

    thought = "".join(delta.get("reasoning_content", "") for delta in deltas)
    words = "".join(delta.get("content", "") for delta in deltas)
    expected = {"role": "assistant", "content": words}
    assert said == expected | ({"reasoning_content": thought} if thought else {})
    if colours is None:
        assert out.getvalue().startswith(f"{printed}\n[")
    else:
        assert ("\x1b[2" in out.getvalue().partition("Yes")[0]) == bool(thought)


def test_a_prompt_is_the_first_question(monkeypatch):
    for prompt, asked in (("[a] first", ["[a] first", "typed"]), ("", ["typed"])):
        console = Console(file=io.StringIO())
        typed = iter(["typed", ""])
        monkeypatch.setattr(console, "input", lambda _, typed=typed: next(typed))
        assert list(questions(prompt, console)) == asked
        assert console.file.getvalue() == (f"> {prompt}\n" if prompt else "")
