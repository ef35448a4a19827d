"""Results of measuring running servers (infer/evaluation/served.py), and their Markdown table."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infer.evaluation.results import SetResult
from infer.evaluation.tables import MISSING_CELL, format_interval, format_markdown_table

FIRST_TOKEN_PERCENTILE = 95
SERVED_TABLE_COLUMNS = (
    "set",
    "requests at a time",
    "server",
    "tokens/s, all requests",
    "tokens/s, one request",
    "ms to first token, median",
    "ms to first token, 95th percentile",
    "τ",
    "drafted per round",
    "accepted per round",
    "speedup",
    "same",
)


@dataclass(frozen=True)
class ServedAcceptance:
    """Counts of draft tokens.

    rounds: number of rounds. vLLM and llama.cpp count only the rounds with a draft in /metrics
    drafted, accepted: number of draft tokens, and how many of them were accepted
    """

    rounds: int
    drafted: int
    accepted: int

    @property
    def tau(self) -> float:
        """Tokens per round: the accepted draft tokens and one token of the target."""
        return 1 + self.accepted / self.rounds


@dataclass(frozen=True)
class AnswerTiming:
    """Size and times of one answer.

    number: number of the question in its set, the same as in `eval` without a server
    seconds, first_token_seconds: time from sending the request to the end of the answer, and to its
        first text
    """

    number: int
    tokens: int
    seconds: float
    first_token_seconds: float


@dataclass(frozen=True)
class ServerMeasurement:
    """The measured values of one server on one question set.

    seconds: time in which requests were running
    prompt_tokens, cached_tokens: number of tokens of all prompts, and how many of them were in the
        prefix cache
    acceptance: counts of draft tokens; None if the server does not report them
    tau: tokens per round; None if the server does not report it. SGLang may report τ alone
    """

    engine: str
    url: str
    model: str
    answers: list[AnswerTiming]
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    acceptance: ServedAcceptance | None = None
    tau: float | None = None

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second of all requests together."""
        return sum(answer.tokens for answer in self.answers) / self.seconds

    @property
    def request_tokens_per_second(self) -> float:
        """Median over the requests of the output tokens per second of a request."""
        return float(np.median([answer.tokens / answer.seconds for answer in self.answers]))

    @property
    def first_token_milliseconds(self) -> list[float]:
        """Median and 95th percentile of the time to the first token."""
        times = [1000 * answer.first_token_seconds for answer in self.answers]
        return np.percentile(times, [50, FIRST_TOKEN_PERCENTILE]).tolist()


@dataclass(frozen=True)
class ServedSetResult:
    """The results of one question set at one temperature and number of concurrent requests.

    concurrency: maximum number of requests that ran at the same time
    left_out: number of chat turns that a server refused, for example because they are too long
    refusal: how the server refused the first of them; None if there are none
    baseline: the server without a drafter; None if there is none. The next three fields are then
        None, too
    speedup: median over the answers of the tokens per second, divided by those of the baseline
    speedup_interval: confidence interval; None for too few answers
    identical_outputs: number of answers whose text equals that of the baseline
    time_limit_note: sentence about the questions that were not asked because of
        evaluation.max_minutes; None if all were asked
    """

    set: str
    title: str
    temperature: float
    concurrency: int
    questions: int
    left_out: int
    server: ServerMeasurement
    refusal: str | None = None
    baseline: ServerMeasurement | None = None
    speedup: float | None = None
    speedup_interval: list[float] | None = None
    identical_outputs: int | None = None
    time_limit_note: str | None = None


@dataclass(frozen=True)
class ServedResult:
    """The results of all question sets.

    notes: sentences about the measurement, such as why a value is missing
    interruption: why the measurement ended early; None if it did not
    """

    suite: str
    date: str
    max_new_tokens: int
    sets: list[ServedSetResult]
    notes: list[str]
    interruption: str | None = None


def format_served(result: ServedResult, evaluated_sets: Sequence[SetResult] = ()) -> str:
    """Return the results in Markdown, with a table for each temperature.

    evaluated_sets: results of `eval` without a server. For the sets that both have measured, the
        table shows these too
    """
    paragraphs = [f"# {result.suite}: {result.sets[0].server.model}"]
    for temperature in dict.fromkeys(each.temperature for each in result.sets):
        rows = []
        sets = [each for each in result.sets if each.temperature == temperature]
        for i, each in enumerate(sets):
            rows += format_set_rows(each)
            is_last_of_set = i + 1 == len(sets) or sets[i + 1].set != each.set
            for evaluated in evaluated_sets if is_last_of_set else ():
                if (evaluated.set, evaluated.temperature) == (each.set, temperature):
                    rows += format_evaluated_rows(evaluated)
        table = format_markdown_table(SERVED_TABLE_COLUMNS, rows)
        paragraphs += [f"## Temperature {temperature:g}", table]

    paragraphs.append(
        f"Answers have at most {result.max_new_tokens} tokens. τ is the number of tokens per "
        "round, including the target's own token. The speedup is the median over "
        "the answers of their tokens per second, including the prefill, divided by those of the "
        "baseline's answer, with its 95 % interval. The column 'same' counts the answers whose "
        "text equals that of the baseline."
    )
    if any("eval: " in paragraph for paragraph in paragraphs):
        paragraphs.append(
            "Rows that begin with 'eval:' are from suite.json: our engine in-process."
        )
    return "\n\n".join([*paragraphs, *result.notes])


def format_set_rows(result: ServedSetResult) -> list[list[str]]:
    """Return the table rows of the baseline, if there is one, and of the server."""
    start = [result.title, str(result.concurrency)]
    rows = []
    if result.baseline is not None:
        cells = format_measurement_cells(result.baseline)
        rows.append([*start, f"{result.baseline.engine}, baseline", *cells, "1.00x", ""])
    speedup = MISSING_CELL
    same = MISSING_CELL
    if result.speedup is not None:
        speedup = f"{result.speedup:.2f}x{format_interval(result.speedup_interval)}"
        same = f"{result.identical_outputs}/{len(result.server.answers)}"
    cells = format_measurement_cells(result.server)
    rows.append([*start, result.server.engine, *cells, speedup, same])
    return rows


def format_measurement_cells(measurement: ServerMeasurement) -> list[str]:
    """Return the table cells with the speed, the latency and the acceptance of a server."""
    drafted = MISSING_CELL
    accepted = MISSING_CELL
    tau = MISSING_CELL if measurement.tau is None else f"{measurement.tau:.2f}"
    acceptance = measurement.acceptance
    if acceptance is not None:
        drafted = f"{acceptance.drafted / acceptance.rounds:.2f}"
        accepted = f"{acceptance.accepted / acceptance.rounds:.2f}"
    median, percentile = measurement.first_token_milliseconds
    return [
        f"{measurement.tokens_per_second:.1f}",
        f"{measurement.request_tokens_per_second:.1f}",
        f"{median:.0f}",
        f"{percentile:.0f}",
        tau,
        drafted,
        accepted,
    ]


def format_evaluated_rows(evaluated: SetResult) -> list[list[str]]:
    """Return a table row for each method of a question set that `eval` measured without a
    server.
    """
    rows = []
    for method in evaluated.result.methods:
        cells = dict.fromkeys(SERVED_TABLE_COLUMNS, MISSING_CELL)
        cells |= {
            "set": evaluated.title,
            "requests at a time": "1",
            "server": f"eval: {method.label}",
            "tokens/s, one request": f"{method.tokens_per_second:.1f}",
            "τ": f"{method.tau:.2f}",
            "speedup": f"{method.speedup:.2f}x{format_interval(method.speedup_interval)}",
            "same": f"{method.identical_outputs}/{evaluated.answers}",
        }
        rows.append(list(cells.values()))
    return rows
