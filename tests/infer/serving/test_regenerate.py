"""Regenerated answers: those of the target, in order, none lost and none twice.

tests/robustness/test_robustness.py kills runs.
"""

import fcntl
import json
import shutil
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from resource import RLIMIT_FSIZE, getrlimit, setrlimit
from threading import Event, Lock

import pytest

from data.rows import DataConfig, read_examples
from infer import Engine, generate
from infer.config import DecodeOptions, EngineConfig
from infer.serving.clients import OpenAIClient
from infer.serving.regenerate import build_engine_answerer, regenerate_answers
from infer.serving.regeneration_task import PromptExample
from infer.utils.errors import RunAborted
from infer.utils.files import hold_lock_file

REGENERATED_PROMPTS = [f"def f{i}(x" * (1 + i % 3) for i in range(30)]
REGENERATE_OPTIONS = DecodeOptions(max_new_tokens=12, method="plain", max_num_seqs=4)


def make_examples() -> list[PromptExample]:
    return [PromptExample(i, prompt) for i, prompt in enumerate(REGENERATED_PROMPTS)]


def read_lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_are_those_of_the_target_and_in_order(shallow_target, tmp_path):
    out = tmp_path / "answers.jsonl"
    counts = regenerate_answers(
        make_examples(),
        build_engine_answerer(shallow_target, None, REGENERATE_OPTIONS, 60),
        out,
        {},
        0,
    )
    assert counts == {"answers": 30, "failed": 0}
    records = read_lines(out)
    assert [record["index"] for record in records] == list(range(30))
    for line, answer in zip(
        records,
        generate(shallow_target, None, REGENERATED_PROMPTS, REGENERATE_OPTIONS),
        strict=True,
    ):
        assert (
            line["prompt"] == REGENERATED_PROMPTS[line["index"]] and line["response"] == answer.text
        )
        assert line["finish"] == answer.finish_reason


def test_a_stopped_run_continues_after_its_last_complete_line(tmp_path):
    out = tmp_path / "a.jsonl"
    answered = []

    def answer_examples(examples, on_finished, stop_after=None):
        for i, example in enumerate(examples):
            if i == stop_after:
                raise KeyboardInterrupt
            answered.append(example.index)
            if example.index % 7 == 3:
                yield {"index": example.index, "error": "no"}
            else:
                yield {"index": example.index, "response": "t"}

    with pytest.raises(KeyboardInterrupt, match="contains the answers so far"):
        regenerate_answers(
            make_examples(), lambda *arguments: answer_examples(*arguments, 11), out, {"a": 1}, 10
        )
    with out.open("a") as file:
        file.write('{"index": 11, "prom')  # killed while writing
    assert regenerate_answers(make_examples(), answer_examples, out, {"a": 1}, 10) == {
        "answers": 26,
        "failed": 4,
    }
    assert answered == list(range(30))
    indices = [line["index"] for line in read_lines(out)]
    assert indices == [i for i in range(30) if i % 7 != 3]
    assert [line["index"] for line in read_lines(tmp_path / "a.jsonl.failed")] == [3, 10, 17, 24]
    assert regenerate_answers(make_examples(), answer_examples, out, {"a": 1}, 10) == {
        "answers": 26,
        "failed": 4,
    }
    assert len(answered) == 30
    with pytest.raises(ValueError, match="started with another a"):
        regenerate_answers(make_examples(), answer_examples, out, {"a": 2}, 10)
    with pytest.raises(
        ValueError, match="2 examples failed, at most 1 may fail. The last error was 'no'"
    ):
        regenerate_answers(make_examples(), answer_examples, tmp_path / "b.jsonl", {}, 1)


def answer_with_one_length(examples, on_finished):
    """Yield answers of the same length."""
    yield from ({"index": example.index, "response": "x" * 40} for example in examples)


@pytest.fixture
def command(shallow, tmp_path):
    """A function (further options) that runs the command with a target and data of the test."""
    from infer.cli.regenerate import RegenerateCommand, run
    from infer.utils.hydra_app import compose_checked_options as composed

    target = tmp_path / "target"
    data = tmp_path / "rows.jsonl"
    shutil.copytree(shallow, target)
    data.write_text(
        "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in REGENERATED_PROMPTS[:3])
    )
    options = [
        f"target.path={target}",
        "data=jsonl",
        f"data.path={data}",
        f"out={tmp_path}/a.jsonl",
        "decoding=plain",
    ]
    return lambda *further_options: run(
        composed(
            "regenerate",
            RegenerateCommand,
            [*options, "decoding.max_new_tokens=2", *further_options],
        )
    )


def test_other_contents_under_the_same_paths_are_refused(command, tmp_path):
    command()
    data = tmp_path / "rows.jsonl"
    weights = tmp_path / "target" / "model.safetensors"
    content_before = data.read_text()
    data.write_text(content_before.replace("f0", "g0"))
    with pytest.raises(
        ValueError, match=r"a\.jsonl was started with another content\.data: give another out"
    ):
        command()
    data.write_text(content_before)
    command()
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    with pytest.raises(
        ValueError, match=r"started with another content\.target\.weights: give another out"
    ):
        command()


FUNCTION_TEMPLATE = """{% for m in messages -%}
{{ 'def ' + m.content if m.role == 'user' else '# ' + m.content + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '(' }}{% endif %}"""


@pytest.mark.robustness
def test_generated_questions_continue_where_they_were_stopped(command, tmp_path, capsys):
    """The template is one of Python functions. The questions are their names up to the bracket."""
    (tmp_path / "target" / "chat_template.jinja").write_text(FUNCTION_TEMPLATE)
    options = [
        "data=self",
        "data.path=null",
        "data.max_examples=30",
        "questions.system=[Fast, 'Slow, but sure']",
        "questions.length_range=[2,24]",
    ]
    out = tmp_path / "a.jsonl"
    question_file = tmp_path / "a.jsonl.questions"
    command(*options)
    all_answers = out.read_text()
    questions = question_file.read_text()
    rows = read_lines(out)
    assert f"{len(rows)} questions to answer" in capsys.readouterr().err and 3 < len(rows) < 30
    for row in rows:
        system, question, answer = row["messages"]
        assert system["content"] == ("Slow, but sure" if row["index"] % 2 else "Fast")
        assert answer["token_ids"]
        assert read_lines(question_file)[row["index"]]["response"].strip() == question["content"]
    names = [row["messages"][1]["content"] for row in rows]
    assert len(set(names)) == len(names) and not any("(" in name for name in names)
    out.unlink()
    question_file.write_text(questions[: len(questions) // 2])
    command(*options, "decoding.max_num_seqs=3")
    assert (question_file.read_text(), out.read_text()) == (questions, all_answers)
    assert len(list(read_examples(DataConfig("jsonl", str(out))))) == len(rows)
    out.write_text(all_answers[: len(all_answers) // 2])
    command(*options, "data.max_examples=45")
    assert (
        out.read_text().startswith(all_answers)
        and len(read_lines(out)) > len(rows)
        and len(read_lines(question_file)) == 45
    )
    with pytest.raises(ValueError, match="started with another"):
        command(*options, "decoding.seed=1")
    (tmp_path / "target" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(ValueError, match="needs a chat model whose chat template has text before"):
        command(*options[:3])


def test_concurrent_runs_are_refused_and_so_are_their_lines(command, tmp_path):
    out = tmp_path / "a.jsonl"
    with (
        hold_lock_file(Path(f"{out}.lock"), "a.jsonl", "out="),
        pytest.raises(ValueError, match="is being written by process"),
    ):
        command()
    assert not out.exists()
    regenerate_answers(make_examples(), answer_with_one_length, out, {}, 0)
    assert sorted(path.name for path in tmp_path.iterdir() if "a.jsonl" in path.name) == [
        "a.jsonl",
        "a.jsonl.settings.json",
    ]  # neither the lock nor an empty list of failed rows
    out.write_text(out.read_text() + out.read_text())
    with pytest.raises(ValueError, match="a.jsonl, line 31: example 0 comes after example 29"):
        regenerate_answers(make_examples(), answer_with_one_length, out, {}, 0)


def test_examples_count_as_finished_in_any_order(shallow_target, answering):
    """When the first record is yielded, finished examples after it are counted, too."""
    others = [PromptExample(i, f"y{i}") for i in range(1, 6)]
    finished = []
    last_request_came = Event()

    def reply(request, body: dict | None) -> tuple[int, dict]:
        if body is None:
            return 200, {"data": [{"id": "big"}]}
        if body["prompt"] == "y5":
            last_request_came.set()
        elif body["prompt"] == "slow":
            last_request_came.wait(20)
        return 200, {"choices": [{"text": "t", "finish_reason": "stop"}]}

    next(
        build_engine_answerer(shallow_target, None, REGENERATE_OPTIONS, 200)(
            [PromptExample(0, "y0"), *others], lambda: finished.append(1)
        )
    )
    assert (
        len(finished) == REGENERATE_OPTIONS.max_num_seqs
    )  # outputs of one length, decoded together
    finished.clear()
    with answering(reply) as url:
        next(
            OpenAIClient(url, REGENERATE_OPTIONS, max_concurrent_requests=2).answer_examples(
                [PromptExample(0, "slow"), *others], lambda: finished.append(1)
            )
        )
    assert len(finished) >= 5  # the one of y5 may come later


def test_a_file_of_an_earlier_version_is_continued(tmp_path):
    """It has data.bad_rows, which data.max_invalid_fraction replaced. Neither changes an answer."""
    out = tmp_path / "a.jsonl"
    regenerate_answers(
        make_examples()[:3],
        answer_with_one_length,
        out,
        {"rows": 30, "data": {"path": "x", "bad_rows": 100.0}},
        0,
    )
    settings = {"data": {"path": "x", "max_invalid_fraction": 0.05}}
    assert regenerate_answers(make_examples(), answer_with_one_length, out, settings, 0) == {
        "answers": 30,
        "failed": 0,
    }
    with pytest.raises(ValueError, match=r"started with another data\.path"):
        regenerate_answers(
            make_examples(),
            answer_with_one_length,
            out,
            {"data": {"path": "y", "max_invalid_fraction": 0.05}},
            0,
        )


def test_progress_counts_finished_examples(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("infer.utils.progress.SECONDS_BETWEEN_PROGRESS_LINES", 0.0)

    def answer_examples(examples, on_finished):
        examples = list(examples)
        for _ in examples[1:]:
            on_finished()
        assert "regenerating: 29 of 30 examples, " in capsys.readouterr().err
        on_finished()
        yield from ({"index": example.index, "response": "t"} for example in examples)

    assert regenerate_answers(make_examples(), answer_examples, tmp_path / "a.jsonl", {}, 0) == {
        "answers": 30,
        "failed": 0,
    }


def test_a_lock_file_removed_while_it_was_opened_is_opened_again(tmp_path, monkeypatch):
    """The next process locks the existing file, so that a third one is refused."""
    file = tmp_path / "lock"
    flock = fcntl.flock
    removed = []

    def remove_first(*arguments) -> None:
        if not removed:
            removed.append(file.unlink())
        flock(*arguments)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with hold_lock_file(file, "a", "out="):
        assert file.read_text().startswith("process")
        with (
            pytest.raises(ValueError, match="is being written by process"),
            hold_lock_file(file, "a", "out="),
        ):
            pass
    assert not file.exists()


def test_a_run_on_a_full_disk_can_be_continued(tmp_path):
    out = tmp_path / "a.jsonl"
    soft, hard = getrlimit(RLIMIT_FSIZE)
    setrlimit(RLIMIT_FSIZE, (1000, hard))  # bytes of a file
    try:
        with pytest.raises(RunAborted, match="a.jsonl could not be written: File too large"):
            regenerate_answers(make_examples(), answer_with_one_length, out, {}, 0)
    finally:
        setrlimit(RLIMIT_FSIZE, (soft, hard))
    assert regenerate_answers(make_examples(), answer_with_one_length, out, {}, 0) == {
        "answers": 30,
        "failed": 0,
    }
    assert [line["index"] for line in read_lines(out)] == list(range(30))


def test_another_file_is_not_overwritten(tmp_path):
    out = tmp_path / "mine.jsonl"
    out.write_text("precious")
    with pytest.raises(ValueError, match="was not written by this command"):
        regenerate_answers(make_examples(), lambda examples, on_finished: iter(()), out, {}, 0)
    assert out.read_text() == "precious"


def test_answers_from_a_server(answering, tmp_path, monkeypatch):
    """It answers with the prompt's length. Every third prompt fails once, and "f5(" always."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    lock = Lock()
    failed = set()
    running_prompts = []
    running_counts = []

    def reply(request, body: dict | None) -> tuple[int, dict]:
        if body is None:
            return 200, {"data": [{"id": "big"}]}
        prompt = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
        with lock:
            running_prompts.append(prompt)
            running_counts.append(len(running_prompts))
            is_first_attempt = prompt not in failed
            failed.add(prompt)
        time.sleep(0.01)
        with lock:
            running_prompts.remove(prompt)
        if "f5(" in prompt or request.headers["authorization"] != "Bearer secret":
            return 400, {"error": "never"}
        if is_first_attempt and len(prompt) % 3 == 0:
            return 503, {"error": "later"}
        text = (
            {"text": str(len(prompt))}
            if "prompt" in body
            else {"message": {"content": str(len(prompt))}}
        )
        return 200, {"choices": [text | {"finish_reason": "stop"}]}

    examples = make_examples() + [PromptExample(30, [{"role": "user", "content": "hello"}])]
    out = tmp_path / "a.jsonl"
    with answering(reply) as url:
        client = OpenAIClient(url, REGENERATE_OPTIONS, max_concurrent_requests=5)
        counts = regenerate_answers(examples, client.answer_examples, out, {}, 3)
    assert counts == {"answers": 30, "failed": 1}
    records = read_lines(out)
    assert [record["index"] for record in records] == [i for i in range(31) if i != 5]
    assert all(record["response"] == str(len(record["prompt"])) for record in records[:-1])
    assert [turn["content"] for turn in records[-1]["messages"]] == ["hello", "5"]
    assert "status 400" in read_lines(tmp_path / "a.jsonl.failed")[0]["error"]
    assert 2 <= max(running_counts) <= 5
    assert "secret" not in "".join(path.read_text() for path in tmp_path.iterdir())


def test_a_missing_server_gives_one_sentence():
    with pytest.raises(ValueError, match="no server with a model"):
        OpenAIClient("http://127.0.0.1:9/v1", REGENERATE_OPTIONS, 2)


def test_no_secret_of_an_address_reaches_a_file(answering, tmp_path, monkeypatch):
    """A server refuses requests and quotes them, and every option that can have a secret has one.

    Settings of an earlier version, which had secrets, can be continued.
    """
    from infer.cli.regenerate import RegenerateCommand, run
    from infer.utils.hydra_app import compose_checked_options as composed

    monkeypatch.setenv("OPENAI_API_KEY", "wrong-key-of-mine")
    url = "http://me:hunter2hunter2@here/v1?token=hunter2hunter2"

    def reply(request, body: dict | None) -> tuple[int, dict]:
        if body is None:
            return 200, {"data": [{"id": "big"}]}
        return 400, {"url": url, "sent": json.dumps(body), **request.headers}

    secrets = ("hunter2hunter2", "wrong-key-of-mine", "hf_" + "Q" * 30)
    source = tmp_path / "rows.jsonl"
    source.write_text(
        "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in REGENERATED_PROMPTS[:4])
    )
    with answering(reply) as server_url:
        address = server_url.replace("http://", f"http://me:{secrets[0]}@")
        options = [f"server={address}", "data=jsonl", f"data.path={source}"]
        command = composed(
            "regenerate",
            RegenerateCommand,
            [*options, "decoding=plain", f"out={tmp_path}/out/a.jsonl"],
        )
        command.model = secrets[2]
        run(command)
        files = {file.name: file.read_text() for file in (tmp_path / "out").iterdir()}
        assert (
            len(read_lines(tmp_path / "out" / "a.jsonl.failed")) == 4
            and "a.jsonl.settings.json" in files
        )
        assert not [name for name, text in files.items() for secret in secrets if secret in text]
        settings = tmp_path / "out" / "a.jsonl.settings.json"
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"server": address}))
        run(command)
    assert secrets[0] not in settings.read_text()


def test_sampled_answers_have_independent_seeds_for_every_server_and_batch(
    shallow_target, tmp_path, running
):
    """They are those of `generate`, also after an interruption, with other batch sizes, and with
    three servers."""
    examples = make_examples()[:24]
    capacity = 60
    sampled = DecodeOptions(
        8, 1.0, top_k=5, min_p=0.02, repetition_penalty=1.3, method="plain", max_num_seqs=32, seed=3
    )
    regenerate_answers(
        examples,
        build_engine_answerer(shallow_target, None, sampled, capacity),
        tmp_path / "uninterrupted",
        {},
        0,
    )
    answers = generate(shallow_target, None, [row.prompt for row in examples], sampled)
    assert [line["response"] for line in read_lines(tmp_path / "uninterrupted")] == [
        answer.text for answer in answers
    ]
    small_batches = replace(sampled, max_num_seqs=3)
    out = tmp_path / "stopped"

    def stop_early(examples, on_finished):
        yield from islice(
            build_engine_answerer(shallow_target, None, sampled, capacity)(examples), 7
        )
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        regenerate_answers(examples, stop_early, out, {}, 0)
    regenerate_answers(
        examples, build_engine_answerer(shallow_target, None, small_batches, capacity), out, {}, 0
    )
    assert out.read_text() == (tmp_path / "uninterrupted").read_text()
    for first in range(3):  # each server answers a third of the examples
        engine = Engine(
            shallow_target, None, EngineConfig("plain", max_num_seqs=2 + first), capacity
        )
        with running(engine) as (url, _):
            regenerate_answers(
                examples[first::3],
                OpenAIClient(f"{url}/v1", sampled, 4).answer_examples,
                tmp_path / f"{first}",
                {},
                0,
            )
    thirds = [read_lines(tmp_path / f"{first}") for first in range(3)]
    merged = sorted(sum(thirds, []), key=lambda line: line["index"])
    assert merged == read_lines(tmp_path / "uninterrupted")
