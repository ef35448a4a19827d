"""Chats answered turn by turn: by our engine, by a server with failures, and in shards."""

import hashlib
import json
import zlib
from contextlib import contextmanager
from itertools import islice

import pytest

from infer import generate
from infer.config import DecodeOptions
from infer.serving.clients import OpenAIClient
from infer.serving.regenerate import build_engine_answerer, regenerate_answers
from infer.serving.regeneration_task import PromptExample, RegenerationTask, TargetOutput

CHAT_OPTIONS = DecodeOptions(max_new_tokens=8, temperature=1.0, method="plain", max_num_seqs=4)


def make_chats(count: int = 90) -> list[PromptExample]:
    """Return chats of 1 to 6 turns, with recorded answers that are replaced."""
    examples = []
    for i in range(count):
        messages = [{"role": "system", "content": f"chat {i}"}] if i % 5 == 0 else []
        for turn in range(1 + i % 6):
            messages += [
                {"role": "user", "content": f"question {turn} of {i}"},
                {"role": "assistant", "content": "old"},
            ]
        template_options = {"enable_thinking": i % 2 == 0}
        examples.append(PromptExample(i, messages[:-1], template_options=template_options))
    return examples


def model_reply(body: dict) -> dict:
    """Return the model's response, which depends on the request only.

    Some answers are cut by the limit, and some have reasoning.
    """
    content = json.dumps([body["messages"], body["seed"], body.get("chat_template_kwargs")])
    number = int.from_bytes(hashlib.sha256(content.encode()).digest()[:4], "big")
    message = {"content": f"answer {number}"}
    if number % 3 == 0:
        message["reasoning"] = f"hm {number}"
    choice = {
        "message": message,
        "finish_reason": "length" if number % 11 == 0 else "stop",
        "token_ids": [number % 97, 5],
    }
    return {"choices": [choice]}


def read_lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def run_server(answering):
    """A context manager that runs a server of that model and yields its address.

    dies_after: number of requests after which it closes
    fail_interval: one of so many requests fails at its first attempt
    """

    @contextmanager
    def run(dies_after: int | None = None, fail_interval: int = 0):
        requests = []
        failed = set()

        def reply(request, body: dict | None):
            if body is None:
                return 200, {"data": [{"id": "model", "owned_by": "vllm"}]}
            requests.append(body)
            if dies_after is not None and len(requests) > dies_after:
                return None
            content = json.dumps(body)
            is_selected = fail_interval and zlib.crc32(content.encode()) % fail_interval == 0
            if is_selected and content not in failed:
                failed.add(content)
                return 503, {}
            return 200, model_reply(body)

        with answering(reply) as url:
            yield url

    return run


@pytest.fixture(scope="module")
def reference_file(tmp_path_factory, run_server):
    """The answers of one server without failures."""
    out = tmp_path_factory.mktemp("once") / "a.jsonl"
    with run_server() as url:
        client = OpenAIClient(url, CHAT_OPTIONS, 4)
        counts = regenerate_answers(make_chats(), client.answer_examples, out, {}, 0)
    assert counts == {"answers": 90, "failed": 0}
    return out


def test_every_answer_follows_those_generated_before_it(reference_file):
    complete_count = 0
    reasoning_count = 0
    for example, record in zip(make_chats(), read_lines(reference_file), strict=True):
        assert record["chat_template_kwargs"] == example.template_options
        questions = [turn for turn in example.messages if turn["role"] != "assistant"]
        answers = [turn for turn in record["messages"] if turn["role"] == "assistant"]
        sent_questions = [turn for turn in record["messages"] if turn["role"] != "assistant"]
        assert sent_questions == questions[: len(sent_questions)]
        assert not any(turn["content"] == "old" for turn in answers)
        assert all(turn["token_ids"] for turn in answers)
        # A chat ends after an answer that was cut.
        assert all(turn["finish"] == "stop" for turn in answers[:-1])
        is_complete = len(record["messages"]) == len(example.messages) + 1
        assert answers[-1]["finish"] == "length" or is_complete
        complete_count += answers[-1]["finish"] == "stop"
        reasoning_count += sum("reasoning_content" in turn for turn in answers)
    assert 45 < complete_count < 86 and reasoning_count > 45


@pytest.mark.robustness
def test_a_server_with_failures_gives_the_same_file(reference_file, run_server, tmp_path):
    """The run is stopped twice, the second time within a line. Shards have the same lines."""
    out = tmp_path / "a.jsonl"
    with run_server(fail_interval=13) as url:
        answer_examples = OpenAIClient(url, CHAT_OPTIONS, 4).answer_examples
        for stop_after in (20, 35):

            def stop_early(examples, on_finished, stop_after=stop_after):
                yield from islice(answer_examples(examples, on_finished), stop_after)
                raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                regenerate_answers(make_chats(), stop_early, out, {}, 0)
        with out.open("a") as file:
            file.write('{"index": 55, "mess')
        counts = regenerate_answers(make_chats(), answer_examples, out, {}, 0)
        assert counts == {"answers": 90, "failed": 0}
        assert out.read_text() == reference_file.read_text()
        for shard in range(3):
            shard_file = tmp_path / "shards" / f"{shard}.jsonl"
            regenerate_answers(make_chats()[shard::3], answer_examples, shard_file, {}, 0)
    lines = []
    for file in (tmp_path / "shards").glob("*.jsonl"):
        lines += file.read_text().splitlines()
    assert sorted(lines) == sorted(reference_file.read_text().splitlines())


def test_a_run_without_a_server_ends_and_can_be_continued(run_server, tmp_path, monkeypatch):
    """The examples do not fail because of it."""
    monkeypatch.setattr("infer.serving.clients.MAX_OUTAGE_SECONDS", 0.3)
    out = tmp_path / "a.jsonl"
    chats = make_chats(20)
    with (
        run_server(dies_after=9) as url,
        pytest.raises(ValueError, match="has accepted no connection for"),
    ):
        client = OpenAIClient(url, CHAT_OPTIONS, 2)
        regenerate_answers(chats, client.answer_examples, out, {}, 0)
    assert not (tmp_path / "a.jsonl.failed").exists()
    with run_server() as url:
        client = OpenAIClient(url, CHAT_OPTIONS, 2)
        counts = regenerate_answers(chats, client.answer_examples, out, {}, 0)
    assert counts["answers"] == 20


def test_recorded_tool_results_need_the_same_calls():
    """The chat continues if the target makes the recorded call, and ends otherwise."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    recorded = [
        {"role": "user", "content": "1+2?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
    ]
    text = '<tool_call>\n{"name": "add", "arguments": {"x": %d}}\n</tool_call>'
    server_call = {"function": {"name": "add", "arguments": '{"x": 1}'}, "id": "a"}
    same_calls = (
        TargetOutput(text % 1, "stop"),
        TargetOutput("", "tool_calls", tool_calls=[server_call]),
    )
    other_outputs = (
        TargetOutput(text % 2, "stop"),
        TargetOutput("It is 3.", "stop"),
        TargetOutput("<tool_call>{x</tool_call>", "stop"),
    )
    for output in same_calls:
        task = RegenerationTask(PromptExample(0, recorded))
        task.add_output(output)
        assert task.record is None and task.prompt[-1] == recorded[-1]
    for output in other_outputs:
        task = RegenerationTask(PromptExample(0, recorded))
        task.add_output(output)
        assert [message["role"] for message in task.record["messages"]] == ["user", "assistant"]


def test_our_engine_answers_chats_turn_by_turn(shallow_target, tmp_path, monkeypatch):
    """Each answer is that of `generate` after the answers before it. A chat that becomes too long
    ends early."""
    # Here, answers end only by their length.
    finish_reasons = "infer.serving.regeneration_task.COMPLETE_FINISH_REASONS"
    monkeypatch.setattr(finish_reasons, ("length",))
    examples = [PromptExample(example.index, example.prompt) for example in make_chats(7)]
    options = DecodeOptions(max_new_tokens=6, method="plain", max_num_seqs=3, ignore_eos=True)
    answer_examples = build_engine_answerer(shallow_target, None, options, 400)
    regenerate_answers(examples, answer_examples, tmp_path / "a.jsonl", {}, 0)
    records = read_lines(tmp_path / "a.jsonl")
    for example, record in zip(examples, records, strict=True):
        turns = record["messages"]
        assert turns[1 if example.index % 5 == 0 else 0]["role"] == "user"
        assert turns[-1]["role"] == "assistant"
        for i, turn in enumerate(turns):
            if turn["role"] == "assistant":
                prompt = [{key: turn[key] for key in ("role", "content")} for turn in turns[:i]]
                assert turn["content"] == generate(shallow_target, None, prompt, options).text
                assert turn["finish"] == "length" and len(turn["token_ids"]) == 6
        assert len(turns) == len(example.messages) + 1

    # The six turns of this chat do not fit into 60 positions.
    answer_examples = build_engine_answerer(shallow_target, None, options, 60)
    regenerate_answers(examples[5:6], answer_examples, tmp_path / "b.jsonl", {}, 0)
    [record] = read_lines(tmp_path / "b.jsonl")
    count = len(record["messages"])
    assert 1 < count < 11 and record["messages"] == records[5]["messages"][:count]
