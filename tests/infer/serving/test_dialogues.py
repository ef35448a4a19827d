"""Chats answered turn by turn: by our engine, by a server that fails, and in shards."""

import hashlib
import json
import zlib
from contextlib import contextmanager
from itertools import islice

import pytest

from infer import generate
from infer.config import DecodeOptions
from infer.serving.clients import Client
from infer.serving.dialogue import Dialogue, Row, Turn
from infer.serving.regenerate import by_engine, regenerate

OPTIONS = DecodeOptions(max_new_tokens=8, temperature=1.0, method="plain", max_num_seqs=4)


def chats(count: int = 90) -> list[Row]:
    """Chats of 1 to 6 turns, with recorded answers that are to be replaced."""
    rows = []
    for i in range(count):
        messages = [{"role": "system", "content": f"chat {i}"}] if i % 5 == 0 else []
        for turn in range(1 + i % 6):
            messages += [
                {"role": "user", "content": f"question {turn} of {i}"},
                {"role": "assistant", "content": "old"},
            ]
        rows.append(Row(i, messages[:-1], template={"enable_thinking": i % 2 == 0}))
    return rows


def reply(body: dict) -> dict:
    """What the model says: a function of the request alone. Now and then an answer is cut, or calls
    a tool."""
    said = json.dumps([body["messages"], body["seed"], body.get("chat_template_kwargs")]).encode()
    number = int.from_bytes(hashlib.sha256(said).digest()[:4], "big")
    finish = "length" if number % 11 == 0 else "stop"
    message = {"content": f"answer {number}"} | (
        {"reasoning": f"hm {number}"} if number % 3 == 0 else {}
    )
    return {
        "choices": [{"message": message, "finish_reason": finish, "token_ids": [number % 97, 5]}]
    }


@pytest.fixture(scope="module")
def server(answering):
    """(...) -> a server of that model: one that dies, or one where one of `fails` requests fails at
    first."""

    @contextmanager
    def run(dies_after: int | None = None, fails: int = 0):
        asked = []
        failed = set()

        def say(request, body: dict | None):
            if body is None:
                return 200, {"data": [{"id": "model", "owned_by": "vllm"}]}
            asked.append(body)
            if dies_after is not None and len(asked) > dies_after:
                return None
            said = json.dumps(body)
            if fails and said not in failed and zlib.crc32(said.encode()) % fails == 0:
                failed.add(said)
                return 503, {}
            return 200, reply(body)

        with answering(say) as url:
            yield url

    return run


@pytest.fixture(scope="module")
def expected(tmp_path_factory, server):
    """What one server that nothing happens to writes."""
    out = tmp_path_factory.mktemp("once") / "a.jsonl"
    with server() as url:
        assert regenerate(chats(), Client(url, OPTIONS, 4).answers, out, {}, 0) == {
            "answers": 90,
            "failed": 0,
        }
    return out


def test_every_answer_follows_those_written_before_it(expected):
    lines = [json.loads(line) for line in expected.read_text().splitlines()]
    whole = thoughts = 0
    for row, line in zip(chats(), lines, strict=True):
        assert line["chat_template_kwargs"] == row.template
        questions = [turn for turn in row.prompt if turn["role"] != "assistant"]
        answers = [turn for turn in line["messages"] if turn["role"] == "assistant"]
        asked = [turn for turn in line["messages"] if turn["role"] != "assistant"]
        assert asked == questions[: len(asked)]
        assert not any(turn["content"] == "old" for turn in answers)
        assert all(turn["token_ids"] for turn in answers)
        assert all(
            turn["finish"] == "stop" for turn in answers[:-1]
        )  # a chat ends with an answer that was cut
        assert answers[-1]["finish"] == "length" or len(line["messages"]) == len(row.prompt) + 1
        whole += answers[-1]["finish"] == "stop"
        thoughts += sum("reasoning_content" in turn for turn in answers)
    assert 45 < whole < 86 and thoughts > 45


@pytest.mark.robustness
def test_a_server_that_fails_now_and_then(expected, server, tmp_path):
    """Stopped twice, the second time within a line: the same file. A folder of shards holds the
    same lines."""
    out = tmp_path / "a.jsonl"
    with server(fails=13) as url:
        answers = Client(url, OPTIONS, 4).answers
        for stop in (20, 35):

            def stopped(rows, finished, stop=stop):
                yield from islice(answers(rows, finished), stop)
                raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                regenerate(chats(), stopped, out, {}, 0)
        with out.open("a") as file:
            file.write('{"index": 55, "mess')
        assert regenerate(chats(), answers, out, {}, 0) == {"answers": 90, "failed": 0}
        assert out.read_text() == expected.read_text()
        for part in range(3):
            regenerate(chats()[part::3], answers, tmp_path / "parts" / f"{part}.jsonl", {}, 0)
    lines = [
        line
        for file in (tmp_path / "parts").glob("*.jsonl")
        for line in file.read_text().splitlines()
    ]
    assert sorted(lines) == sorted(expected.read_text().splitlines())


def test_a_run_ends_where_no_server_is_left(server, tmp_path, monkeypatch):
    """Rows do not fail for it: the same command goes on when one is back."""
    monkeypatch.setattr("infer.serving.clients.PATIENCE", 0.3)
    out = tmp_path / "a.jsonl"
    with server(dies_after=9) as url, pytest.raises(ValueError, match="has not answered for"):
        regenerate(chats(20), Client(url, OPTIONS, 2).answers, out, {}, 0)
    assert not (tmp_path / "a.jsonl.failed").exists()
    with server() as url:
        assert regenerate(chats(20), Client(url, OPTIONS, 2).answers, out, {}, 0)["answers"] == 20


def test_recorded_results_of_tools_must_fit():
    """The chat goes on where the target makes the call that the result is of, and ends where it
    makes another."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    recorded = [
        {"role": "user", "content": "1+2?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
    ]
    text = '<tool_call>\n{"name": "add", "arguments": {"x": %d}}\n</tool_call>'
    said = {"function": {"name": "add", "arguments": '{"x": 1}'}, "id": "a"}
    for turn in (Turn(text % 1, "stop"), Turn("", "tool_calls", calls=[said])):
        dialogue = Dialogue(Row(0, recorded))
        dialogue.take(turn)
        assert dialogue.answer is None and dialogue.prompt[-1] == recorded[-1]
    for turn in (
        Turn(text % 2, "stop"),
        Turn("It is 3.", "stop"),
        Turn("<tool_call>{x</tool_call>", "stop"),
    ):
        dialogue = Dialogue(Row(0, recorded))
        dialogue.take(turn)
        assert [message["role"] for message in dialogue.answer["messages"]] == ["user", "assistant"]


def test_our_engine_answers_chats_turn_by_turn(shallow_target, tmp_path, monkeypatch):
    """Each answer is what `generate` writes after the answers before it; a chat that grows too long
    ends early."""
    monkeypatch.setattr("infer.serving.dialogue.WHOLE", ("length",))  # nothing else ends them here
    rows = [Row(row.index, row.prompt) for row in chats(7)]
    options = DecodeOptions(max_new_tokens=6, method="plain", max_num_seqs=3, ignore_eos=True)
    regenerate(rows, by_engine(shallow_target, None, options, 400), tmp_path / "a.jsonl", {}, 0)
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    for row, line in zip(rows, lines, strict=True):
        turns = line["messages"]
        assert (
            turns[1 if row.index % 5 == 0 else 0]["role"] == "user"
            and turns[-1]["role"] == "assistant"
        )
        for i, turn in enumerate(turns):
            if turn["role"] == "assistant":
                before = [{key: said[key] for key in ("role", "content")} for said in turns[:i]]
                assert turn["content"] == generate(shallow_target, None, before, options).text
                assert turn["finish"] == "length" and len(turn["token_ids"]) == 6
        assert len(turns) == len(row.prompt) + 1
    regenerate(rows[5:6], by_engine(shallow_target, None, options, 60), tmp_path / "b.jsonl", {}, 0)
    [line] = [json.loads(line) for line in (tmp_path / "b.jsonl").read_text().splitlines()]
    count = len(line["messages"])
    assert (
        1 < count < 11 and line["messages"] == lines[5]["messages"][:count]
    )  # six turns have no room
