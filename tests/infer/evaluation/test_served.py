"""`./launch.sh eval url=...`: servers of this project, and servers that imitate other engines."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

import infer.evaluation.served
from data.suites import SuiteConfig
from infer import Engine, load_drafter
from infer.api import decode_prompts
from infer.cli.eval import EvalCommand, run as run_eval
from infer.config import DecodeOptions, EngineConfig, EvaluationConfig
from infer.evaluation.metrics import compute_median_speedup
from infer.evaluation.results import (
    Evaluation,
    MethodResult,
    SetResult,
    SuiteResult,
    read_result,
    write_result,
)
from infer.evaluation.served_results import ServedResult
from infer.evaluation.suite import encode_chat
from infer.utils.errors import RunAborted

QUESTIONS = [["What is a list?", "And a tuple?"], ["Write a loop."], ["What is a class?"]]
WARMUP_TEXT = "Count upwards from"
TOKENS_PER_FAKE_ANSWER = 6


@dataclass
class FakeServer:
    """A server that imitates an engine. Every answer has TOKENS_PER_FAKE_ANSWER tokens.

    owner: value of `owned_by` in the list of models
    answer_fields: fields of the last chunk of every answer
    metrics: takes the number of answers so far, and returns the text of /metrics
    refuse: takes the body of a request, and returns (status, message) to refuse it
    bodies: the bodies of all requests except the first one and warm-up requests
    """

    owner: str = "vllm"
    models: list[str] = field(default_factory=lambda: ["m"])
    name: str = "a"
    answer_fields: dict = field(default_factory=dict)
    metrics: Callable[[int], str] | None = None
    refuse: Callable[[dict], tuple[int, str] | None] = lambda body: None
    delay_seconds: float = 0.0
    key: str | None = None
    log: list[str] = field(default_factory=list)
    bodies: list[dict] = field(default_factory=list)
    num_answers: int = 0
    running: int = 0
    max_running: int = 0
    url: str = ""

    def answer(self, request: BaseHTTPRequestHandler, body: dict) -> None:
        """Answer a chat request; a streamed one with a chunk for each token."""
        refusal = self.refuse(body)
        if refusal is not None:
            send(request, refusal[0], json.dumps({"error": refusal[1]}))
            return
        if not body.get("stream"):
            send(request, 200, "{}")
            return
        question = body["messages"][-1]["content"]
        if not question.startswith(WARMUP_TEXT):
            self.bodies.append(body)
            self.log.append(self.name)
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        time.sleep(self.delay_seconds)
        self.running -= 1
        self.num_answers += 1
        text = f"{question} {self.name}"
        chunks: list[dict] = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
        chunks += [{"choices": [{"delta": {"reasoning_content": "hm "}}]}]
        chunks += [{"choices": [{"delta": {"content": letter}}], "usage": None} for letter in text]
        usage = {"completion_tokens": TOKENS_PER_FAKE_ANSWER, "prompt_tokens": 10}
        chunks += [{"choices": [], "usage": usage} | self.answer_fields]
        events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        send(request, 200, ": ping\n\n" + "".join(events) + "data: [DONE]\n\n")


def send(request: BaseHTTPRequestHandler, status: int, text: str) -> None:
    """Send a response with this text."""
    content = text.encode()
    request.send_response(status)
    request.send_header("content-length", str(len(content)))
    request.end_headers()
    request.wfile.write(content)


@contextmanager
def serve(server: FakeServer) -> Iterator[FakeServer]:
    """Run the server on a free port within the block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self):
            if server.key and self.headers["authorization"] != f"Bearer {server.key}":
                send(self, 401, "who are you?")
            elif self.path == "/v1/models":
                models = [{"id": name, "owned_by": server.owner} for name in server.models]
                send(self, 200, json.dumps({"data": models}))
            elif server.metrics is None:
                send(self, 404, "no metrics")
            else:
                send(self, 200, server.metrics(server.num_answers))

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            server.answer(self, body)

        def log_message(self, *_):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
    server.url = f"http://127.0.0.1:{http.server_port}"
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    """Fake servers have no threads that would slow each other."""
    monkeypatch.setattr(infer.evaluation.served, "PAUSE_BETWEEN_SERVERS_SECONDS", 0.0)


@pytest.fixture
def command(tmp_path) -> EvalCommand:
    """The command without an address, with QUESTIONS in the set `mine`."""
    folder = tmp_path / "sets"
    folder.mkdir()
    lines = "".join(json.dumps({"turns": turns}) + "\n" for turns in QUESTIONS)
    (folder / "mine.jsonl").write_text(lines)
    return EvalCommand(
        out=str(tmp_path / "out"),
        evaluation=EvaluationConfig(max_new_tokens=12, max_minutes=None),
        suite=SuiteConfig("files", str(folder), temperatures=[0.0]),
    )


def run_command(command: EvalCommand, **options) -> ServedResult:
    """Run the command with these options; return what it has written."""
    command = replace(command, **options)
    command.check()
    run_eval(command)
    return read_result(Path(command.out) / "served.json", ServedResult)


def parse_rows(text: str) -> list[dict[str, str]]:
    """The rows of the first table in a text, by column name."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return [dict(zip(table[0], row, strict=True)) for row in table[2:]]


def test_our_server_is_measured_with_and_without_a_drafter(
    embedded, command, running, capsys, monkeypatch
):
    """Tokens, rounds and accepted tokens are those of decoding the same chats in this process."""
    monkeypatch.setenv("BLOCKDRAFT_API_KEY", "a-key-for-this-test")
    drafter = load_drafter("embedded")
    options = {"max_num_seqs": 2, "max_num_batched_tokens": None}
    engine = Engine(embedded, drafter, EngineConfig("chain", 7, **options), 300)
    baseline_engine = Engine(embedded, None, EngineConfig("plain", **options), 300)
    with (
        running(engine) as (url, _),
        running(baseline_engine) as (baseline, _),
    ):
        result = run_command(
            replace(command, suite=replace(command.suite, temperatures=[0.0, 0.8])),
            url=f"{url}/v1/",
            baseline=baseline,
            concurrency=[2],
        )
    assert [(each.temperature, each.concurrency) for each in result.sets] == [(0.0, 2), (0.8, 2)]
    assert result.interruption is None
    for each in result.sets:
        assert each.identical_outputs == len(each.server.answers) == 4
        assert each.server.engine == "blockdraft"
        assert each.baseline.tau == 1

    tokens = 0
    rounds = 0
    accepted = 0
    for turns in QUESTIONS:
        messages = []
        for question in turns:
            messages.append({"role": "user", "content": question})
            ids = encode_chat(embedded, messages, thinking=False)
            decode_options = DecodeOptions(12, method="chain", budget=7, max_num_seqs=1)
            [sequence] = decode_prompts(embedded, drafter, [ids], decode_options)
            tokens += len(sequence.ids)
            rounds += len(sequence.drafted)
            accepted += sum(sequence.accepted)
            text = embedded.tokenizer.decode(sequence.ids, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": text})
    greedy = result.sets[0]
    assert sum(answer.tokens for answer in greedy.server.answers) == tokens
    assert sum(answer.tokens for answer in greedy.baseline.answers) == tokens
    assert greedy.server.acceptance.rounds == rounds
    assert greedy.server.acceptance.accepted == accepted
    assert greedy.server.tau == 1 + accepted / rounds
    row = parse_rows(capsys.readouterr().out)[1]
    assert row["server"] == "blockdraft"
    assert row["same"] == "4/4"
    assert row["τ"] == f"{1 + accepted / rounds:.2f}"
    assert row["speedup"].startswith(f"{greedy.speedup:.2f}x")


def test_both_servers_get_the_same_requests_in_alternating_order(command):
    log = []
    with (
        serve(FakeServer(name="a", log=log, delay_seconds=0.02)) as server,
        serve(FakeServer(name="b", log=log, delay_seconds=0.04)) as baseline,
    ):
        result = run_command(command, url=server.url, baseline=baseline.url)
    assert log == ["a", "b", "b", "a", "a", "b", "b", "a"]
    salts = set()
    for body, baseline_body in zip(server.bodies, baseline.bodies, strict=True):
        assert body == baseline_body
        salts.add(body["cache_salt"])
        assert (body["max_tokens"], body["temperature"], body["top_k"]) == (12, 0.0, -1)
        assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert len(salts) == 1
    assert [body["seed"] for body in server.bodies] == [0, 3, 1, 2]
    assert [message["content"] for message in server.bodies[1]["messages"]] == [
        "What is a list?",
        "hm What is a list? b",
        "And a tuple?",
    ]
    [each] = result.sets
    assert each.identical_outputs == 0
    assert [answer.tokens for answer in each.server.answers] == [TOKENS_PER_FAKE_ANSWER] * 4
    assert each.speedup > 1.3
    seconds = sum(answer.seconds for answer in each.server.answers)
    assert seconds >= 4 * server.delay_seconds
    assert each.server.seconds == pytest.approx(seconds, rel=0.2)


def test_requests_run_at_the_same_time(command):
    rows = "".join(json.dumps({"turns": [f"{i}?"]}) + "\n" for i in range(20))
    Path(command.suite.folder, "mine.jsonl").write_text(rows)
    with (
        serve(FakeServer(name="a", delay_seconds=0.05)) as server,
        serve(FakeServer(name="a", log=server.log)) as baseline,
    ):
        result = run_command(command, url=server.url, baseline=baseline.url, concurrency=[4])
    assert server.max_running == 4
    [each] = result.sets
    assert each.identical_outputs == 20
    sum_of_seconds = sum(answer.seconds for answer in each.server.answers)
    assert 0.25 <= each.server.seconds < sum_of_seconds
    assert 30 < each.server.request_tokens_per_second < TOKENS_PER_FAKE_ANSWER / 0.05
    assert each.speedup_interval[0] <= each.speedup <= each.speedup_interval[1]


def count_vllm(answers: int) -> str:
    """/metrics of vLLM, with 4 rounds, 12 draft tokens and 6 accepted ones per answer."""
    return (
        f'vllm:spec_decode_num_drafts_total{{engine="0"}} {4 * answers}\n'
        f"vllm:spec_decode_num_draft_tokens_total {12 * answers}\n"
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {4 * answers}\n'
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="1"}} {2 * answers}\n'
    )


SGLANG_DETAILS = {
    "spec_verify_ct": 2,
    "spec_num_proposed_drafts": 14,
    "spec_num_correct_drafts": 4,
}
# server, its τ, drafted and accepted tokens per round in the table, and the note
ACCEPTANCE_CASES = {
    "vLLM": (FakeServer(metrics=count_vllm), ("2.50", "3.00", "1.50"), None),
    "llama.cpp": (
        FakeServer(
            "llamacpp",
            answer_fields={"timings": {"predicted_n": 6, "draft_n": 9, "draft_n_accepted": 3}},
        ),
        ("2.50", "4.50", "1.50"),
        None,
    ),
    "llama.cpp with --metrics": (
        FakeServer(
            "llamacpp",
            answer_fields={"timings": {"predicted_n": 6, "draft_n": 9, "draft_n_accepted": 3}},
            metrics=lambda answers: count_vllm(answers).replace("vllm:", "llamacpp:"),
        ),
        ("2.50", "3.00", "1.50"),
        None,
    ),
    "SGLang": (
        FakeServer("sglang", answer_fields={"sglext": {"spec_tokens_details": SGLANG_DETAILS}}),
        ("3.00", "7.00", "2.00"),
        None,
    ),
    "an earlier SGLang": (
        FakeServer("sglang", metrics=lambda answers: "sglang:spec_accept_length 2.25\n"),
        ("2.25", "-", "-"),
        None,
    ),
    "a server without metrics": (FakeServer("x"), ("-", "-", "-"), "/metrics answers with status"),
    "vLLM without a drafter": (
        FakeServer(metrics=lambda answers: "up 1\n"),
        ("-", "-", "-"),
        "--speculative-config",
    ),
    "a drafter that is not used": (
        FakeServer(metrics=lambda answers: count_vllm(3)),
        ("-", "-", "-"),
        "drafted no tokens",
    ),
}


@pytest.mark.parametrize("case", ACCEPTANCE_CASES)
def test_the_acceptance_of_every_engine_is_read(command, capsys, case):
    server, expected, note = ACCEPTANCE_CASES[case]
    with serve(replace(server)) as server:
        run_command(command, url=server.url)
    text = capsys.readouterr().out
    [row] = parse_rows(text)
    assert (row["τ"], row["drafted per round"], row["accepted per round"]) == expected
    assert row["speedup"] == row["same"] == "-"
    assert ("τ is unknown" in text) == (note is not None)
    assert note is None or note in text


OPTION_ERRORS = [
    ({"baseline": "http://x"}, "baseline=http://x needs a server: add url="),
    ({"served_model": "m"}, "served_model=m needs a server: add url="),
    ({"url": "localhost:8000"}, "url=localhost:8000: give an address such as http://"),
    ({"url": "http://x", "baseline": "same"}, "baseline=same: give an address such as http://"),
    ({"url": "http://x", "baseline": "http://x"}, "give the address of a second server"),
    ({"url": "http://x", "suite": SuiteConfig()}, "add suite=ddtree, suite=speed_bench"),
    ({"url": "http://x", "concurrency": []}, "give one or more numbers of requests"),
    ({"url": "http://x", "concurrency": [4, 0]}, "each at least 1"),
]


@pytest.mark.parametrize(("options", "message"), OPTION_ERRORS)
def test_wrong_options_are_refused(command, options, message):
    with pytest.raises(ValueError, match=message):
        replace(command, **options).check()


def refuse_all(body: dict) -> tuple[int, str]:
    return 422, "unknown field\n  min_p"


def refuse_questions(body: dict) -> tuple[int, str] | None:
    is_question = any("?" in message["content"] for message in body["messages"])
    return (400, "too long") if is_question else None


SERVER_ERRORS = [
    (FakeServer(key="k"), {}, ValueError, "refused the API key .status 401.; set the environment"),
    (
        FakeServer(models=["m", "n"]),
        {"served_model": "q"},
        ValueError,
        "served_model=q: url=.*have this model; use one of m, n",
    ),
    (FakeServer(models=[]), {}, ValueError, "has no list of models .status 200: "),
    (FakeServer(refuse=refuse_all), {}, ValueError, "answered with status 422: .*unknown field"),
    (
        FakeServer(refuse=refuse_all),
        {"suite.thinking": True},
        ValueError,
        "suite.thinking=true: url=.*refuses the chat template variable enable_thinking",
    ),
    (
        FakeServer(refuse=lambda body: (500, "out of memory") if "stream" in body else None),
        {},
        RunAborted,
        "status 500: .*out of memory.*; start the server again",
    ),
    (
        FakeServer(answer_fields={"usage": None}),
        {},
        RunAborted,
        "without token counts .the field usage.",
    ),
    (
        FakeServer(answer_fields={"error": {"message": "engine died"}}),
        {},
        RunAborted,
        "status 500: .*engine died",
    ),
]


@pytest.mark.parametrize(("server", "options", "error", "message"), SERVER_ERRORS)
def test_errors_of_servers_are_explained(command, server, options, error, message):
    options = dict(options)
    if options.pop("suite.thinking", False):
        options["suite"] = replace(command.suite, thinking=True)
    with serve(replace(server)) as server, pytest.raises(error, match=message):
        run_command(command, url=server.url, **options)
    assert not Path(command.out, "served.json").exists()


def test_an_address_without_a_server_is_refused(command, free_port):
    message = r"baseline=http://127.*: no server answers at this address \(ConnectError"
    with serve(FakeServer()) as server, pytest.raises(ValueError, match=message):
        run_command(command, url=server.url, baseline=f"http://127.0.0.1:{free_port}")


def test_refused_questions_are_left_out(command, capsys):
    with serve(FakeServer(refuse=refuse_questions)) as server:
        result = run_command(command, url=server.url)
    [each] = result.sets
    assert (each.left_out, [answer.number for answer in each.server.answers]) == (3, [1])
    text = capsys.readouterr().out
    assert "mine, temperature 0: 3 turns were left out because a server refused them (url=" in text
    assert "too long" in text

    Path(command.suite.folder, "mine.jsonl").write_text('{"turns": ["Why?"]}\n')
    message = "no question was answered. url=.*too long"
    server = FakeServer(refuse=refuse_questions)
    with serve(server), pytest.raises(ValueError, match=message):
        run_command(command, url=server.url)


def test_too_many_requests_at_a_time_end_the_measurement(command):
    """The row with fewer requests at a time is kept."""

    def refuse_fifth(body: dict) -> tuple[int, str] | None:
        return (429, "busy") if body.get("stream") and server.running >= 4 else None

    server = FakeServer(refuse=refuse_fifth, delay_seconds=0.05)
    with serve(server), pytest.raises(RunAborted, match="status 429: .*busy.*; what was measured"):
        run_command(command, url=server.url, concurrency=[1, 8])
    result = read_result(Path(command.out, "served.json"), ServedResult)
    assert [each.concurrency for each in result.sets] == [1]


def test_different_models_and_a_baseline_that_drafts_are_noted(command, capsys):
    with (
        serve(FakeServer(models=["m", "n"])) as server,
        serve(FakeServer(models=["other"], metrics=count_vllm)) as baseline,
    ):
        run_command(command, url=server.url, baseline=baseline.url, served_model="n")
    text = capsys.readouterr().out
    assert "serves the model n, and baseline=" in text
    assert "serves other: if these are not the same weights" in text
    assert "has accepted draft tokens, but a baseline must not draft" in text
    assert server.bodies[0]["model"] == "n"
    assert baseline.bodies[0]["model"] == "other"


def test_what_was_measured_is_kept_if_a_server_fails(command, capsys):
    def fail_later(body: dict) -> tuple[int, str] | None:
        return (500, "lost") if len(server.bodies) == 3 and "stream" in body else None

    server = FakeServer(refuse=fail_later)
    message = r"status 500: .*lost.*; what was measured before is"
    with serve(server), pytest.raises(RunAborted, match=message):
        run_command(command, url=server.url)
    [each] = read_result(Path(command.out, "served.json"), ServedResult).sets
    assert len(each.server.answers) == 3
    assert parse_rows(capsys.readouterr().out)


def test_what_was_measured_is_kept_after_an_interrupt(command, monkeypatch):
    answer_turn = infer.evaluation.served.answer_turn
    calls = []

    def interrupt(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return answer_turn(*arguments)

    monkeypatch.setattr(infer.evaluation.served, "answer_turn", interrupt)
    with serve(FakeServer()) as server, pytest.raises(KeyboardInterrupt, match="served.json"):
        run_command(command, url=server.url)
    result = read_result(Path(command.out, "served.json"), ServedResult)
    assert len(result.sets[0].server.answers) == 2
    assert result.interruption == "stopped by Ctrl-C"


def test_the_time_limit_is_respected(command, capsys):
    command.evaluation = replace(command.evaluation, max_minutes=1e-6)
    with serve(FakeServer()) as server:
        result = run_command(command, url=server.url, concurrency=[1, 2])
    first, second = result.sets
    assert len(first.server.answers) == 2  # both turns of the first question
    assert len(second.server.answers) == 4
    assert "mine: evaluation.max_minutes=1e-06 had time for 2 of 4" in capsys.readouterr().out


def test_the_table_shows_an_earlier_evaluation_too(command, capsys):
    method = MethodResult(
        "chain", 7, 3.5, 3.4, 10, 35, 1.0, 35.0, 1.75, [1], identical_outputs=4, prompts=[]
    )
    evaluation = Evaluation(
        target="t",
        device="d",
        dtype="float32",
        prompts=4,
        max_new_tokens=12,
        temperature=0.0,
        methods=[method],
        samples=[],
    )
    results = [
        SetResult({}, name, name, temperature, 3, 4, 0, evaluation)
        for name, temperature in (("mine", 0.0), ("mine", 1.0), ("other", 0.0))
    ]
    Path(command.out).mkdir()
    write_result(Path(command.out, "suite.json"), SuiteResult("files", "c", "t", results))
    with serve(FakeServer()) as server:
        run_command(command, url=server.url)
    rows = parse_rows(capsys.readouterr().out)
    assert [row["server"] for row in rows] == ["vLLM", "eval: chain"]
    assert rows[1]["tokens/s, one request"] == "35.0"
    assert rows[1]["speedup"] == "1.75x"
    assert rows[1]["same"] == "4/4"


def test_the_speedup_is_the_median_over_answers_with_its_interval():
    generator = np.random.default_rng(0)
    baseline = 1 + generator.random(41)
    ratios = 1 + generator.random(41)
    speedup, interval = compute_median_speedup(ratios * baseline, baseline)
    assert speedup == pytest.approx(sorted(ratios)[20])
    samples = generator.choice(ratios, (20_000, 41))
    expected = np.percentile(np.median(samples, axis=1), [2.5, 97.5])
    assert interval == pytest.approx(expected, abs=0.03)
    assert compute_median_speedup(baseline[:4], baseline[:4]) == (1, None)
