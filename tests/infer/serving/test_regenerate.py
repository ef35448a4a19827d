"""Regenerated answers: the target's own, in order, none lost or doubled;
robustness/test_robustness.py kills runs."""

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

from data.rows import DataConfig, read_rows
from infer import Engine, generate
from infer.config import DecodeOptions, EngineConfig
from infer.serving.clients import Client
from infer.serving.dialogue import Row
from infer.serving.regenerate import by_engine, regenerate
from infer.utils.errors import Stopped
from infer.utils.files import locked

PROMPTS = [f"def f{i}(x" * (1 + i % 3) for i in range(30)]
OPTIONS = DecodeOptions(max_new_tokens=12, method="plain", max_num_seqs=4)


def rows() -> list[Row]:
    return [Row(i, prompt) for i, prompt in enumerate(PROMPTS)]


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_are_the_targets_own_and_in_order(shallow_target, tmp_path):
    out = tmp_path / "answers.jsonl"
    counts = regenerate(rows(), by_engine(shallow_target, None, OPTIONS, 60), out, {}, 0)
    assert counts == {"answers": 30, "failed": 0}
    written = lines(out)
    assert [line["index"] for line in written] == list(range(30))
    for line, answer in zip(written, generate(shallow_target, None, PROMPTS, OPTIONS), strict=True):
        assert line["prompt"] == PROMPTS[line["index"]] and line["response"] == answer.text
        assert line["finish"] == answer.finish_reason


def test_a_stopped_run_goes_on_behind_its_last_whole_line(tmp_path):
    out = tmp_path / "a.jsonl"
    asked = []

    def answers(rows, finished, stop_after=None):
        for i, row in enumerate(rows):
            if i == stop_after:
                raise KeyboardInterrupt
            asked.append(row.index)
            yield {"index": row.index} | (
                {"error": "no"} if row.index % 7 == 3 else {"response": "t"}
            )

    with pytest.raises(KeyboardInterrupt, match="has the answers so far, the same command goes on"):
        regenerate(rows(), lambda *given: answers(*given, 11), out, {"a": 1}, 10)
    with out.open("a") as file:
        file.write('{"index": 11, "prom')  # killed while writing
    assert regenerate(rows(), answers, out, {"a": 1}, 10) == {"answers": 26, "failed": 4}
    assert asked == list(range(30))
    indices = [line["index"] for line in lines(out)]
    assert indices == [i for i in range(30) if i % 7 != 3]
    assert [line["index"] for line in lines(tmp_path / "a.jsonl.failed")] == [3, 10, 17, 24]
    assert regenerate(rows(), answers, out, {"a": 1}, 10) == {"answers": 26, "failed": 4}
    assert len(asked) == 30
    with pytest.raises(ValueError, match="begun with another a"):
        regenerate(rows(), answers, out, {"a": 2}, 10)
    with pytest.raises(ValueError, match="2 rows failed, at most 1 may: the last said 'no'"):
        regenerate(rows(), answers, tmp_path / "b.jsonl", {}, 1)


def lengths(rows, finished):
    """Answers of one length."""
    yield from ({"index": row.index, "response": "x" * 40} for row in rows)


@pytest.fixture
def command(shallow, tmp_path):
    """(further options) -> the command's outcome, for a target and a data file of the test's
    own."""
    from infer.cli.regenerate import RegenerateCommand, run
    from infer.utils.hydra_app import compose_options as composed

    target = tmp_path / "target"
    data = tmp_path / "rows.jsonl"
    shutil.copytree(shallow, target)
    data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS[:3]))
    options = [
        f"target.path={target}",
        "data=jsonl",
        f"data.path={data}",
        f"out={tmp_path}/a.jsonl",
        "decoding=plain",
    ]
    return lambda *more: run(
        composed("regenerate", RegenerateCommand, [*options, "decoding.max_new_tokens=2", *more])
    )


def test_other_contents_under_the_same_paths_are_refused(command, tmp_path):
    command()
    data = tmp_path / "rows.jsonl"
    weights = tmp_path / "target" / "model.safetensors"
    was = data.read_text()
    data.write_text(was.replace("f0", "g0"))
    with pytest.raises(
        ValueError, match=r"a\.jsonl was begun with another content\.data: give another out"
    ):
        command()
    data.write_text(was)
    command()
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    with pytest.raises(
        ValueError, match=r"begun with another content\.target\.weights: give another out"
    ):
        command()


FUNCTIONS = """{% for m in messages -%}
{{ 'def ' + m.content if m.role == 'user' else '# ' + m.content + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '(' }}{% endif %}"""


@pytest.mark.robustness
def test_questions_of_the_targets_own_go_on_where_they_were_stopped(command, tmp_path, capsys):
    """Its template is of Python's functions, whose names are the questions: up to the bracket."""
    (tmp_path / "target" / "chat_template.jinja").write_text(FUNCTIONS)
    asked = [
        "data=self",
        "data.path=null",
        "data.max_examples=30",
        "questions.system=[Fast, 'Slow, but sure']",
        "questions.length_range=[2,24]",
    ]
    out = tmp_path / "a.jsonl"
    written = tmp_path / "a.jsonl.questions"
    command(*asked)
    whole = out.read_text()
    questions = written.read_text()
    rows = lines(out)
    assert f"{len(rows)} questions to answer" in capsys.readouterr().err and 3 < len(rows) < 30
    for row in rows:
        system, question, answer = row["messages"]
        assert system["content"] == ("Slow, but sure" if row["index"] % 2 else "Fast")
        assert answer["token_ids"]
        assert lines(written)[row["index"]]["response"].strip() == question["content"]
    names = [row["messages"][1]["content"] for row in rows]
    assert len(set(names)) == len(names) and not any("(" in name for name in names)
    out.unlink()
    written.write_text(questions[: len(questions) // 2])
    command(*asked, "decoding.max_num_seqs=3")
    assert (written.read_text(), out.read_text()) == (questions, whole)
    assert len(list(read_rows(DataConfig("jsonl", str(out))))) == len(rows)
    out.write_text(whole[: len(whole) // 2])
    command(*asked, "data.max_examples=45")
    assert (
        out.read_text().startswith(whole)
        and len(lines(out)) > len(rows)
        and len(lines(written)) == 45
    )
    with pytest.raises(ValueError, match="begun with another"):
        command(*asked, "decoding.seed=1")
    (tmp_path / "target" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(ValueError, match="nothing before a user's words"):
        command(*asked[:3])


def test_two_runs_at_once_are_refused_and_so_are_the_lines_that_they_left(command, tmp_path):
    out = tmp_path / "a.jsonl"
    with (
        locked(Path(f"{out}.lock"), "a.jsonl", "out="),
        pytest.raises(ValueError, match="is being written by process"),
    ):
        command()
    assert not out.exists()
    regenerate(rows(), lengths, out, {}, 0)
    assert sorted(path.name for path in tmp_path.iterdir() if "a.jsonl" in path.name) == [
        "a.jsonl",
        "a.jsonl.settings.json",
    ]  # neither the lock nor an empty list of failed rows
    out.write_text(out.read_text() + out.read_text())
    with pytest.raises(
        ValueError, match="a.jsonl, line 31: row 0 stands behind row 29: give another out"
    ):
        regenerate(rows(), lengths, out, {}, 0)


def test_rows_count_as_finished_whatever_their_order(shallow_target, answering):
    """When the first is given out, those behind it that are finished are counted too. By our engine
    and a server."""
    others = [Row(i, f"y{i}") for i in range(1, 6)]
    finished = []
    last = Event()

    def say(request, body: dict | None) -> tuple[int, dict]:
        if body is None:
            return 200, {"data": [{"id": "big"}]}
        if body["prompt"] == "y5":
            last.set()
        elif body["prompt"] == "slow":
            last.wait(20)
        return 200, {"choices": [{"text": "t", "finish_reason": "stop"}]}

    next(
        by_engine(shallow_target, None, OPTIONS, 200)(
            [Row(0, "y0"), *others], lambda: finished.append(1)
        )
    )
    assert len(finished) == OPTIONS.max_num_seqs  # texts of one length, side by side
    finished.clear()
    with answering(say) as url:
        next(
            Client(url, OPTIONS, at_once=2).answers(
                [Row(0, "slow"), *others], lambda: finished.append(1)
            )
        )
    assert len(finished) >= 5  # y5's may come a moment later


def test_answers_of_an_earlier_version_are_gone_on_with(tmp_path):
    """Its settings have data.bad_rows, which data.max_invalid_fraction replaced: neither changes an
    answer."""
    out = tmp_path / "a.jsonl"
    regenerate(rows()[:3], lengths, out, {"rows": 30, "data": {"path": "x", "bad_rows": 100.0}}, 0)
    settings = {"data": {"path": "x", "max_invalid_fraction": 0.05}}
    assert regenerate(rows(), lengths, out, settings, 0) == {"answers": 30, "failed": 0}
    with pytest.raises(ValueError, match=r"begun with another data\.path"):
        regenerate(rows(), lengths, out, {"data": {"path": "y", "max_invalid_fraction": 0.05}}, 0)


def test_progress_is_of_finished_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("infer.utils.progress.SECONDS_BETWEEN_LINES", 0.0)

    def answers(rows, finished):
        rows = list(rows)
        for _ in rows[1:]:
            finished()
        assert "regenerating: 29 of 30 rows, " in capsys.readouterr().err
        finished()
        yield from ({"index": row.index, "response": "t"} for row in rows)

    assert regenerate(rows(), answers, tmp_path / "a.jsonl", {}, 0) == {"answers": 30, "failed": 0}


def test_a_lock_that_was_removed_while_it_was_opened_locks_nobody_out(tmp_path, monkeypatch):
    """The next holder has the file that is there, so that a third one is refused."""
    file = tmp_path / "lock"
    flock = fcntl.flock
    removed = []

    def remove_first(*arguments) -> None:
        if not removed:
            removed.append(file.unlink())
        flock(*arguments)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with locked(file, "a", "out="):
        assert file.read_text().startswith("process")
        with (
            pytest.raises(ValueError, match="is being written by process"),
            locked(file, "a", "out="),
        ):
            pass
    assert not file.exists()


def test_a_full_disk_is_a_sentence_and_the_same_command_goes_on(tmp_path):
    out, (soft, hard) = tmp_path / "a.jsonl", getrlimit(RLIMIT_FSIZE)
    setrlimit(RLIMIT_FSIZE, (1000, hard))  # no file may grow beyond
    try:
        with pytest.raises(Stopped, match="a.jsonl could not be written: File too large"):
            regenerate(rows(), lengths, out, {}, 0)
    finally:
        setrlimit(RLIMIT_FSIZE, (soft, hard))
    assert regenerate(rows(), lengths, out, {}, 0) == {"answers": 30, "failed": 0}
    assert [line["index"] for line in lines(out)] == list(range(30))


def test_a_file_of_others_is_not_touched(tmp_path):
    out = tmp_path / "mine.jsonl"
    out.write_text("precious")
    with pytest.raises(ValueError, match="not ours"):
        regenerate(rows(), lambda rows, finished: iter(()), out, {}, 0)
    assert out.read_text() == "precious"


def test_answers_from_a_server(answering, tmp_path, monkeypatch):
    """It answers with the prompt's length; every third prompt fails once, prompts with "f5("
    always."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    lock = Lock()
    failed = set()
    at_once = []
    most = []

    def say(request, body: dict | None) -> tuple[int, dict]:
        if body is None:
            return 200, {"data": [{"id": "big"}]}
        prompt = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
        with lock:
            at_once.append(prompt)
            most.append(len(at_once))
            first = prompt not in failed
            failed.add(prompt)
        time.sleep(0.01)
        with lock:
            at_once.remove(prompt)
        if "f5(" in prompt or request.headers["authorization"] != "Bearer secret":
            return 400, {"error": "never"}
        if first and len(prompt) % 3 == 0:
            return 503, {"error": "later"}
        text = (
            {"text": str(len(prompt))}
            if "prompt" in body
            else {"message": {"content": str(len(prompt))}}
        )
        return 200, {"choices": [text | {"finish_reason": "stop"}]}

    wanted = rows() + [Row(30, [{"role": "user", "content": "hello"}])]
    out = tmp_path / "a.jsonl"
    with answering(say) as url:
        counts = regenerate(wanted, Client(url, OPTIONS, at_once=5).answers, out, {}, 3)
    assert counts == {"answers": 30, "failed": 1}
    written = lines(out)
    assert [line["index"] for line in written] == [i for i in range(31) if i != 5]
    assert all(line["response"] == str(len(line["prompt"])) for line in written[:-1])
    assert [turn["content"] for turn in written[-1]["messages"]] == ["hello", "5"]
    assert "status 400" in lines(tmp_path / "a.jsonl.failed")[0]["error"]
    assert 2 <= max(most) <= 5
    assert "secret" not in "".join(path.read_text() for path in tmp_path.iterdir())


def test_no_server_is_one_sentence():
    with pytest.raises(ValueError, match="no models there"):
        Client("http://127.0.0.1:9/v1", OPTIONS, 2)


def test_no_secret_of_an_address_reaches_a_file(answering, tmp_path, monkeypatch):
    """All that `regenerate` writes where a server refuses and repeats what it was sent, with a
    password and tokens in every option that can hold them; settings of an earlier version, which
    had them, are gone on with."""
    from infer.cli.regenerate import RegenerateCommand, run
    from infer.utils.hydra_app import compose_options as composed

    monkeypatch.setenv("OPENAI_API_KEY", "wrong-key-of-mine")
    url = "http://me:hunter2hunter2@here/v1?token=hunter2hunter2"

    def say(request, body: dict | None) -> tuple[int, dict]:
        if body is None:
            return 200, {"data": [{"id": "big"}]}
        return 400, {"url": url, "sent": json.dumps(body), **request.headers}

    secrets = ("hunter2hunter2", "wrong-key-of-mine", "hf_" + "Q" * 30)
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS[:4]))
    with answering(say) as there:
        address = there.replace("http://", f"http://me:{secrets[0]}@")
        options = [f"server={address}", "data=jsonl", f"data.path={source}"]
        command = composed(
            "regenerate",
            RegenerateCommand,
            [*options, "decoding=plain", f"out={tmp_path}/out/a.jsonl"],
        )
        command.model = secrets[2]
        run(command)
        written = {file.name: file.read_text() for file in (tmp_path / "out").iterdir()}
        assert (
            len(lines(tmp_path / "out" / "a.jsonl.failed")) == 4
            and "a.jsonl.settings.json" in written
        )
        assert not [name for name, text in written.items() for secret in secrets if secret in text]
        settings = tmp_path / "out" / "a.jsonl.settings.json"
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"server": address}))
        run(command)
    assert secrets[0] not in settings.read_text()


def test_sampled_answers_have_independent_seeds_wherever_they_are_written(
    shallow_target, tmp_path, running
):
    """Those of `generate`, by row; killed and gone on with, in other batches, or by three servers:
    the same rows."""
    wanted = rows()[:24]
    capacity = 60
    sampled = DecodeOptions(
        8, 1.0, top_k=5, min_p=0.02, repetition_penalty=1.3, method="plain", max_num_seqs=32, seed=3
    )
    regenerate(
        wanted, by_engine(shallow_target, None, sampled, capacity), tmp_path / "whole", {}, 0
    )
    answers = generate(shallow_target, None, [row.prompt for row in wanted], sampled)
    assert [line["response"] for line in lines(tmp_path / "whole")] == [
        answer.text for answer in answers
    ]
    few = replace(sampled, max_num_seqs=3)
    out = tmp_path / "stopped"

    def stopped(rows, finished):
        yield from islice(by_engine(shallow_target, None, sampled, capacity)(rows), 7)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        regenerate(wanted, stopped, out, {}, 0)
    regenerate(wanted, by_engine(shallow_target, None, few, capacity), out, {}, 0)
    assert out.read_text() == (tmp_path / "whole").read_text()
    for first in range(3):  # each server has a third of the rows
        engine = Engine(
            shallow_target, None, EngineConfig("plain", max_num_seqs=2 + first), capacity
        )
        with running(engine) as (url, _):
            regenerate(
                wanted[first::3],
                Client(f"{url}/v1", sampled, 4).answers,
                tmp_path / f"{first}",
                {},
                0,
            )
    thirds = [lines(tmp_path / f"{first}") for first in range(3)]
    together = sorted(sum(thirds, []), key=lambda line: line["index"])
    assert together == lines(tmp_path / "whole")
