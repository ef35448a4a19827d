"""Summarises what was measured of running servers (infer/evaluation/served.py)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import httpx

from infer.evaluation.engine_metrics import (
    find_engine_counters,
    read_counters,
    read_gauge,
    subtract_counters,
)
from infer.evaluation.measurement import describe_time_limit
from infer.evaluation.metrics import compute_median_speedup
from infer.evaluation.served_results import (
    AnswerTiming,
    ServedAcceptance,
    ServedSetResult,
    ServerMeasurement,
)
from infer.evaluation.server_requests import EngineServer, StreamedAnswer, build_request
from infer.evaluation.suite import LoadedQuestionSet

MIN_CACHED_SHARE_TO_REPORT = 0.1
SGLANG_TAU_GAUGE = "sglang:spec_accept_length"


@dataclass(frozen=True)
class ServedJob:
    """What is measured for one row of the table: a question set at one temperature and with one
    number of concurrent requests.
    """

    question_set: LoadedQuestionSet
    temperature: float
    concurrency: int
    max_new_tokens: int
    cache_salt: str = field(default_factory=lambda: uuid4().hex)

    def build_request(
        self, server: EngineServer, messages: list[dict[str, str]], seed: int
    ) -> dict[str, Any]:
        """Return the body of a request for the next answer of a chat."""
        return build_request(
            server,
            messages,
            self.max_new_tokens,
            self.temperature,
            seed,
            self.cache_salt,
        )

    @property
    def num_turns(self) -> int:
        """Number of answers that the question set asks for."""
        return sum(map(len, self.question_set.chats))


@dataclass
class JobRecord:
    """What was measured so far for a `ServedJob`. The lists `answers`, `seconds` and
    `counters_before` have an entry for each server.

    numbers: number of the question of each answer
    seconds: time in which requests were running
    counters_before: the counters on /metrics before the first request; empty if there are none
    left_out: number of turns that were left out because a server refused them
    refusal: why the first of them was refused
    """

    numbers: list[int]
    answers: list[list[StreamedAnswer]]
    seconds: list[float]
    counters_before: list[dict[str, float]]
    left_out: int = 0
    refusal: str | None = None


def read_server_counters(server: EngineServer) -> dict[str, float]:
    """Return the counters on a server's page /metrics; an empty dictionary if it has no such
    page.
    """
    try:
        return read_counters(server.client)
    except (httpx.HTTPError, ValueError):
        return {}


def summarise_job(
    servers: Sequence[EngineServer],
    job: ServedJob,
    record: JobRecord,
    max_minutes: float | None,
) -> ServedSetResult:
    """Return the results of one row of the table.

    max_minutes: the time limit of the whole measurement
    """
    measurements = []
    for k in range(len(servers)):
        measurements.append(summarise_server(servers[k], record, k))
    speedup = None
    speedup_interval = None
    identical_outputs = None
    if len(servers) > 1:
        speedup, speedup_interval = compute_median_speedup(
            [answer.tokens_per_second for answer in record.answers[0]],
            [answer.tokens_per_second for answer in record.answers[1]],
        )
        pairs = zip(*record.answers, strict=True)
        identical_outputs = sum(answer.text == expected.text for answer, expected in pairs)
    time_limit_note = None
    if max_minutes is not None:
        num_turns = job.num_turns - record.left_out
        time_limit_note = describe_time_limit(max_minutes, len(record.numbers), num_turns)
    return ServedSetResult(
        set=job.question_set.name,
        title=job.question_set.title,
        temperature=job.temperature,
        concurrency=job.concurrency,
        questions=len(job.question_set.chats),
        left_out=record.left_out,
        server=measurements[0],
        refusal=record.refusal,
        baseline=measurements[1] if len(servers) > 1 else None,
        speedup=speedup,
        speedup_interval=speedup_interval,
        identical_outputs=identical_outputs,
        time_limit_note=time_limit_note,
    )


def summarise_server(server: EngineServer, record: JobRecord, k: int) -> ServerMeasurement:
    """Return the measured values of a server.

    k: index of the server
    """
    answers = record.answers[k]
    acceptance = read_acceptance(server, record.counters_before[k], answers)
    tau = None
    if acceptance is not None:
        tau = acceptance.tau
    elif server.engine.name == "SGLang":
        tau = read_gauge(server.client, SGLANG_TAU_GAUGE)
    timings = []
    for number, answer in zip(record.numbers, answers, strict=True):
        timings.append(
            AnswerTiming(number, answer.tokens, answer.seconds, answer.first_token_seconds)
        )
    return ServerMeasurement(
        engine=server.engine.name,
        url=server.url,
        model=server.model,
        answers=timings,
        seconds=record.seconds[k],
        prompt_tokens=sum(answer.prompt_tokens for answer in answers),
        cached_tokens=sum(answer.cached_tokens for answer in answers),
        acceptance=acceptance,
        tau=tau,
    )


def read_acceptance(
    server: EngineServer, counters_before: dict[str, float], answers: Sequence[StreamedAnswer]
) -> ServedAcceptance | None:
    """Return the counts of draft tokens by the growth of the counters on /metrics, or else by the
    responses. Return None if neither has such counts.
    """
    counters_after = read_server_counters(server)
    counters = find_engine_counters(counters_after)
    if counters is not None:
        growth = subtract_counters(counters_after, counters_before)
        accepted = sum(
            value for name, value in growth.items() if name.startswith(f"{counters.accepted} ")
        )
        rounds = round(growth.get(counters.rounds, 0))
        drafted = round(growth.get(counters.drafted, 0))
        if rounds > 0:
            return ServedAcceptance(rounds, drafted, round(accepted))

    counts = [answer.acceptance for answer in answers if answer.acceptance is not None]
    total = ServedAcceptance(
        sum(each.rounds for each in counts),
        sum(each.drafted for each in counts),
        sum(each.accepted for each in counts),
    )
    if len(counts) < len(answers) or not total.rounds:
        return None
    return total


def list_notes(servers: Sequence[EngineServer], sets: Sequence[ServedSetResult]) -> list[str]:
    """Return sentences about missing values and other properties of the measurement."""
    notes = []
    server = servers[0]
    if any(each.server.tau is None for each in sets):
        notes.append(describe_missing_acceptance(server))
    if len(servers) > 1 and servers[1].model != server.model:
        notes.append(
            f"{server.label} serves the model {server.model}, and {servers[1].label} serves "
            f"{servers[1].model}: if these are not the same weights, the speedup and the column "
            "'same' mean nothing."
        )
    baseline_taus = [each.baseline.tau for each in sets if each.baseline is not None]
    if any(tau is not None and tau > 1 for tau in baseline_taus):
        notes.append(
            f"{servers[1].label} has accepted draft tokens, but a baseline must not draft: start "
            "it without a drafter."
        )
    cached_shares = [each.server.cached_tokens / max(1, each.server.prompt_tokens) for each in sets]
    cached_share = max(cached_shares, default=0.0)
    if cached_share > MIN_CACHED_SHARE_TO_REPORT:
        notes.append(
            f"Up to {100 * cached_share:.0f} % of the prompt tokens of a row were in the server's "
            "prefix cache, which shortens the time to the first token."
        )
    for each in sets:
        if each.questions < each.concurrency:
            notes.append(
                f"{each.title} has {each.questions} questions, so fewer than {each.concurrency} "
                "requests ran at a time."
            )
        if each.left_out:
            notes.append(
                f"{each.title}, temperature {each.temperature:g}: {each.left_out} turns were left "
                f"out because a server refused them ({each.refusal})."
            )
        if each.time_limit_note:
            notes.append(f"{each.title}: {each.time_limit_note}.")
    return list(dict.fromkeys(notes))


def describe_missing_acceptance(server: EngineServer) -> str:
    """Return a sentence that says why the acceptance of draft tokens is unknown."""
    try:
        status = server.client.get("/metrics").status_code
    except httpx.HTTPError:
        return f"τ is unknown, because {server.label}/metrics does not answer."
    if status != 200:
        return (
            f"τ is unknown, because {server.label}/metrics answers with status {status}; start "
            "llama-server with --metrics and SGLang with --enable-metrics."
        )
    if find_engine_counters(read_server_counters(server)) is None:
        return (
            f"τ is unknown, because {server.label}/metrics has no counters of draft tokens; vLLM "
            "has them if it was started with --speculative-config."
        )
    return f"τ is unknown, because {server.label} drafted no tokens; start it with the drafter."
