"""Measures running servers on question sets: speed, latency, and accepted draft tokens.

If a second server, the baseline, serves the same model without a drafter, both servers get the same
requests. A group of questions is answered by one server and then by the other; which one is first
alternates from group to group. With one request at a time, a group is one question. A chat may have
several turns; the prompts of later turns contain the answers of the baseline, or those of the only
server.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from datetime import date
from itertools import product
from typing import Any

from infer.config import EvaluationConfig
from infer.evaluation.measurement import ProgressCallback
from infer.evaluation.served_results import ServedResult, ServedSetResult
from infer.evaluation.served_summary import (
    JobRecord,
    ServedJob,
    list_notes,
    read_server_counters,
    summarise_job,
)
from infer.evaluation.server_requests import (
    EngineServer,
    RequestRefused,
    ServerFailure,
    StreamedAnswer,
    stream_answer,
)
from infer.evaluation.suite import LoadedQuestionSet, SuiteOptions

# With several requests at a time, the last requests of a group run alone. Groups of several times
# as many questions make this time short compared with the whole.
QUESTIONS_PER_CONCURRENT_REQUEST = 4
WARMUP_TOKENS_PER_REQUEST = 16
# An engine's threads may spin for a moment after an answer, which would slow the other server.
PAUSE_BETWEEN_SERVERS_SECONDS = 0.3
INTERRUPTED_BY_USER = "stopped by Ctrl-C"


def measure_servers(
    servers: Sequence[EngineServer],
    question_sets: Sequence[LoadedQuestionSet],
    suite: SuiteOptions,
    evaluation: EvaluationConfig,
    concurrency_levels: Sequence[int],
    log: Callable[[str], None] = lambda line: None,
    progress: ProgressCallback = lambda done, total: None,
) -> ServedResult:
    """Measure every question set at every temperature with every number of concurrent requests.

    servers: the server to measure, and the baseline if there is one
    log: called with a line of text for each row of the table

    If a server fails or the user presses Ctrl-C, the result has what was measured before, and
    `interruption` says what happened. Raises RequestRefused if a server refuses the first warm-up
    requests or all questions, and ServerFailure if it fails before anything is measured.
    """
    jobs = list(product(suite.temperatures, question_sets, concurrency_levels))
    end = time.monotonic() + 60 * (evaluation.max_minutes or math.inf)
    sets: list[ServedSetResult] = []
    refusals = []
    interruption = None
    with asyncio.Runner() as runner:
        for i, (temperature, question_set, concurrency) in enumerate(jobs):
            log(
                f"{question_set.title}, temperature {temperature:g}, {concurrency} requests at a "
                f"time ({i + 1} of {len(jobs)}):"
            )
            job = ServedJob(question_set, temperature, concurrency, evaluation.max_new_tokens)
            seconds = max(0.0, end - time.monotonic()) / (len(jobs) - i)
            deadline = time.monotonic() + seconds
            record = JobRecord([], [[] for _ in servers], [0.0 for _ in servers], [])
            try:
                measure_job(runner, servers, job, record, progress, deadline)
            except (ServerFailure, RequestRefused) as error:
                if not sets and not record.numbers:
                    raise
                interruption = str(error)
            except KeyboardInterrupt:
                interruption = INTERRUPTED_BY_USER
            if record.numbers:
                sets.append(summarise_job(servers, job, record, evaluation.max_minutes))
            elif record.refusal is not None:
                refusals.append(f"{question_set.title}: no question was answered. {record.refusal}")
            if interruption is not None:
                break

    if refusals and not sets:
        raise RequestRefused(refusals[0])
    return ServedResult(
        suite=suite.name or "",
        date=date.today().isoformat(),
        max_new_tokens=evaluation.max_new_tokens,
        sets=sets,
        notes=list_notes(servers, sets) + refusals,
        interruption=interruption,
    )


def measure_job(
    runner: asyncio.Runner,
    servers: Sequence[EngineServer],
    job: ServedJob,
    record: JobRecord,
    progress: ProgressCallback,
    deadline: float,
) -> None:
    """Send the questions of one row of the table to all servers, and add the answers to `record`.

    A batch of answers is added when all servers have finished it.

    deadline: a value of time.monotonic(), after which no more groups of questions are started
    """
    for server in servers:
        warm_up(runner, server, job)
        record.counters_before.append(read_server_counters(server))

    chats = job.question_set.chats
    group_size = 1
    if job.concurrency > 1:
        group_size = QUESTIONS_PER_CONCURRENT_REQUEST * job.concurrency
    num_batches = 0
    for start in range(0, len(chats), group_size):
        if record.numbers and time.monotonic() > deadline:
            break
        open_chats = list(range(start, min(start + group_size, len(chats))))
        histories: dict[int, list[dict[str, str]]] = {i: [] for i in open_chats}
        for turn in range(max(len(chats[i]) for i in open_chats)):
            open_chats = [i for i in open_chats if turn < len(chats[i])]
            if not open_chats:
                break
            for i in open_chats:
                histories[i] += chats[i][turn]
            order = list(range(len(servers)))
            if num_batches % 2:
                order.reverse()
            num_batches += 1
            open_chats = answer_turn(
                runner, servers, order, job, record, histories, open_chats, turn
            )
            progress(len(record.numbers), job.num_turns - record.left_out)


def warm_up(runner: asyncio.Runner, server: EngineServer, job: ServedJob) -> None:
    """Send as many short requests as will run at the same time. They are not measured.

    Raises RequestRefused if the server refuses them.
    """
    requests = []
    for i in range(job.concurrency):
        messages = [{"role": "user", "content": f"Count upwards from {i + 1}."}]
        body = job.build_request(server, messages, seed=i)
        body["max_tokens"] = min(WARMUP_TOKENS_PER_REQUEST, job.max_new_tokens)
        requests.append(body)
    answers, _ = runner.run(stream_answers(server, requests, job.concurrency))
    for answer in answers:
        if isinstance(answer, RequestRefused):
            raise answer


async def stream_answers(
    server: EngineServer, requests: Sequence[dict[str, Any]], concurrency: int
) -> tuple[list[StreamedAnswer | RequestRefused], float]:
    """Send requests to a server, at most `concurrency` at a time.

    Returns the answers, with an exception for each request that the server refused, and the time in
    seconds that all requests together took. Raises ServerFailure if the server fails.
    """
    request_slots = asyncio.Semaphore(concurrency)

    async def answer(body: dict[str, Any]) -> StreamedAnswer:
        async with request_slots:
            return await stream_answer(server, body)

    start = time.perf_counter()
    answers = await asyncio.gather(*map(answer, requests), return_exceptions=True)
    seconds = time.perf_counter() - start
    results = []
    for each in answers:
        if isinstance(each, BaseException) and not isinstance(each, RequestRefused):
            raise each
        results.append(each)
    return results, seconds


def answer_turn(
    runner: asyncio.Runner,
    servers: Sequence[EngineServer],
    order: Sequence[int],
    job: ServedJob,
    record: JobRecord,
    histories: dict[int, list[dict[str, str]]],
    open_chats: list[int],
    turn: int,
) -> list[int]:
    """Let all servers answer the same turn of several chats. Add the answers to `record`, and those
    of the last server to `histories`.

    order: indices of the servers, in the order in which they answer
    histories: the messages of each chat; keys are the indices of the chats
    open_chats: indices of the chats whose turn is answered

    Returns the indices of the chats that all servers have answered. The others are left out.
    """
    chats = job.question_set.chats
    numbers = [turn * len(chats) + i for i in open_chats]
    answers_by_server: dict[int, list[StreamedAnswer | RequestRefused]] = {}
    seconds_by_server = {}
    for k in order:
        if k != order[0]:
            time.sleep(PAUSE_BETWEEN_SERVERS_SECONDS)
        requests = [
            job.build_request(servers[k], histories[i], seed=number)
            for i, number in zip(open_chats, numbers, strict=True)
        ]
        answers_by_server[k], seconds_by_server[k] = runner.run(
            stream_answers(servers[k], requests, job.concurrency)
        )

    answered_chats = []
    for j, (i, number) in enumerate(zip(open_chats, numbers, strict=True)):
        answers = []
        for k in range(len(servers)):
            answer = answers_by_server[k][j]
            if isinstance(answer, RequestRefused):
                record.refusal = record.refusal or str(answer)
            else:
                answers.append(answer)
        if len(answers) < len(servers):
            record.left_out += len(chats[i]) - turn
            continue
        for k, answer in enumerate(answers):
            record.answers[k].append(answer)
        record.numbers.append(number)
        histories[i].append({"role": "assistant", "content": answers[-1].text})
        answered_chats.append(i)
    for k, seconds in seconds_by_server.items():
        record.seconds[k] += seconds
    return answered_chats
