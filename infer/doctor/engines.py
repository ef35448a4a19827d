"""Measure over HTTP how many draft tokens a running inference engine accepts.

Prompts are sent to the engine, and the engine's counters of draft tokens are read from /metrics
(infer/evaluation/engine_metrics.py).
"""

from collections.abc import Mapping
from itertools import pairwise
from uuid import uuid4

import httpx
from prometheus_client.parser import text_string_to_metric_families

from infer.doctor.comparison import EngineMeasurement
from infer.evaluation.engine_metrics import (
    EngineCounters,
    find_engine_counters,
    read_counters,
    subtract_counters,
)
from infer.evaluation.results import AcceptanceCounts, AcceptanceReference, ReferenceAnswer

# An engine may draft more tokens than a block has. The counters of accepted tokens are also read
# for this number of positions after the block.
MAX_POSITIONS_BEYOND_BLOCK_SIZE = 64
MAX_QUOTED_ENGINE_ERROR_CHARACTERS = 200
# Each prompt is sent twice, because in the second request it is in the engine's prefix cache.
DOCTOR_REQUESTS_PER_PROMPT = 2


def measure_engine(client: httpx.Client, reference: AcceptanceReference) -> EngineMeasurement:
    """Send prompts to an engine, and return its answers and how many draft tokens it accepted.

    reference: the prompts, and the acceptance that is expected for them

    Each prompt is sent twice. The second time, it is in the engine's prefix cache.

    Raises ValueError if no engine answers, or if its /metrics page has no counters of draft tokens
    that are known.
    """
    try:
        counters = require_engine_counters(client, read_counters(client))
        options = read_decoding_options(client)
        incomparable_options = describe_incomparable_options(options, reference.block_size)
        answers, snapshots = request_answers(client, reference, counters)
        prompt_tokens = [answer["usage"]["prompt_tokens"] for answer in answers]
        answer_ids = [answer["choices"][0]["token_ids"] for answer in answers]
    except (httpx.HTTPError, LookupError, TypeError) as error:
        raise ValueError(
            f"url={client.base_url}: no supported engine answers at this address ({error!r}); "
            "give the address of a vLLM server or of a server of this project"
        ) from error

    acceptance = [
        read_acceptance(counters, subtract_counters(after, before), reference)
        for before, after in pairwise(snapshots)
    ]
    rounds = sum(counts.rounds for counts in acceptance)
    if not rounds:
        raise ValueError(
            f"url={client.base_url}: {counters.engine} counted no draft tokens; start the engine "
            "with the drafter"
        )
    total = subtract_counters(snapshots[-1], snapshots[0])
    return EngineMeasurement(
        engine=counters.engine,
        texts=[read_answer_text(answer) for answer in answers],
        answer_ids=answer_ids,
        prompt_token_counts=prompt_tokens,
        acceptance_by_answer=acceptance[::DOCTOR_REQUESTS_PER_PROMPT],
        repeated_acceptance=acceptance[1::DOCTOR_REQUESTS_PER_PROMPT],
        draft_tokens_per_round=total.get(counters.drafted, 0) / rounds,
        incomparable_options=incomparable_options,
    )


def request_answers(
    client: httpx.Client, reference: AcceptanceReference, counters: EngineCounters
) -> tuple[list[dict], list[dict[str, float]]]:
    """Send each prompt to an engine twice, and read the engine's counters after each request.

    reference: the prompts, and the acceptance that is expected for them

    Returns the responses to the first request with each prompt, and the values of the counters
    before the first request and after every request (see `read_counters`).
    """
    model = client.get("/v1/models").json()["data"][0]["id"]
    answers = []
    snapshots = [read_counters(client)]
    for reference_answer in reference.answers:
        # With a new salt, the first request does not find the prompt in the prefix cache.
        salt = {"cache_salt": uuid4().hex} if counters.supports_cache_salt else {}
        max_tokens = choose_num_tokens_to_request(reference_answer, reference)
        for _ in range(DOCTOR_REQUESTS_PER_PROMPT):
            answers.append(request_answer(client, model, reference_answer, max_tokens, salt))
            snapshots.append(read_counters(client))
    return answers[::DOCTOR_REQUESTS_PER_PROMPT], snapshots


def require_engine_counters(client: httpx.Client, values: Mapping[str, float]) -> EngineCounters:
    """Return the names of the counters of draft tokens of the engine that the server runs.

    values: the counters that the server reports; keys are their names

    Raises ValueError if none of the known engines has such counters.
    """
    counters = find_engine_counters(values)
    if counters is None:
        raise ValueError(
            f"url={client.base_url}: /metrics has no known counters of draft tokens. Start vLLM "
            "with --speculative-config, or use a server of this project"
        )
    return counters


def describe_incomparable_options(options: Mapping[str, str], block_size: int) -> str:
    """Check whether an engine drafts one chain (a draft without branches) with a whole block of
    tokens per round. Only then can its acceptance be compared with that of this process.

    options: the engine's decoding options, see `read_decoding_options`

    Returns "" if the engine drafts such a chain, or if its options are unknown. Otherwise returns
    the options as text.
    """
    method = options.get("method")
    if method is None:
        return ""
    budget = options.get("budget", "auto")
    if method == "chain" and budget != "auto" and int(budget) >= block_size - 1:
        return ""
    names = [name for name in ("method", "budget") if name in options]
    return " ".join(f"decoding.{name}={options[name]}" for name in names)


def read_acceptance(
    counters: EngineCounters, values: Mapping[str, float], reference: AcceptanceReference
) -> AcceptanceCounts:
    """Return the numbers of rounds and of accepted draft tokens by position from an engine's
    counters.

    values: by how much each counter has grown during the measured requests

    The result has an entry for each of the block_size - 1 drafted positions. If draft tokens were
    also accepted at later positions, it has entries up to the last of these positions.
    """
    positions = range(reference.block_size + MAX_POSITIONS_BEYOND_BLOCK_SIZE)
    accepted = [round(values.get(f"{counters.accepted} {position}", 0)) for position in positions]
    while len(accepted) >= reference.block_size and not accepted[-1]:
        accepted.pop()
    return AcceptanceCounts(round(values.get(counters.rounds, 0)), accepted)


def choose_num_tokens_to_request(answer: ReferenceAnswer, reference: AcceptanceReference) -> int:
    """Return how many tokens of an answer to request from an engine: the length of the stored
    answer minus block_size - 1. The stored acceptance counts no rounds that begin in the last
    block_size - 1 tokens.
    """
    return max(1, len(answer.answer_ids) - reference.block_size + 1)


def read_decoding_options(client: httpx.Client) -> dict[str, str]:
    """Return the decoding options of a server of this project, such as {"method": "chain"}, which
    it reports on /metrics. Return an empty dictionary for other engines.
    """
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            if sample.name == "blockdraft_decoding_info":
                return sample.labels
    return {}


def request_answer(
    client: httpx.Client,
    model: str,
    answer: ReferenceAnswer,
    max_tokens: int,
    extra_fields: Mapping[str, str],
) -> dict:
    """Send a prompt to an engine, and return the response as parsed JSON.

    model: name of the model on the server
    answer: contains the prompt; its answer is not used
    max_tokens: number of tokens to generate; the end-of-sequence token is ignored
    extra_fields: further fields of the request

    The token ids of the answer are requested, too. vLLM and servers of this project return them.
    Raises ValueError if the engine refuses the prompt.
    """
    request = {
        "model": model,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **extra_fields,
    }
    if answer.chat:
        path = "/v1/chat/completions"
        request["messages"] = [{"role": "user", "content": answer.prompt_text}]
    else:
        path = "/v1/completions"
        request["prompt"] = answer.prompt_text
    response = client.post(path, json=request)
    if response.status_code != 200:
        raise ValueError(
            f"url={client.base_url}: the engine refused a prompt ({response.status_code}): "
            f"{response.text[:MAX_QUOTED_ENGINE_ERROR_CHARACTERS]}"
        )
    return response.json()


def read_answer_text(response: dict) -> str:
    """Return the answer's text from the response of an engine: the reasoning, if there is one,
    followed by the content."""
    choice = response["choices"][0]
    message = choice.get("message") or {"content": choice.get("text")}
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    return reasoning + (message.get("content") or "")
