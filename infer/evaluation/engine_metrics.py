"""Connect to a running inference engine over HTTP, and read its counters of draft tokens.

The counters are on the engine's page /metrics, in the text format of Prometheus. They include the
requests of all users, so nobody else may use the engine during a measurement.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

ENGINE_CONNECT_TIMEOUT_SECONDS = 10
ENGINE_READ_TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class EngineCounters:
    """The names of an engine's counters on /metrics, without the suffix _total.

    engine: name of the engine
    rounds, drafted: name of the counter of rounds, and name of the counter of draft tokens
    accepted: name of the counter of accepted draft tokens, which has a label "position" (from 0)
    supports_cache_salt: whether requests may have the field `cache_salt`. The engine then finds a
        prompt in its prefix cache only if it was cached with the same salt.
    """

    engine: str
    rounds: str
    drafted: str
    accepted: str
    supports_cache_salt: bool = False


ACCEPTANCE_COUNTERS_OF_ENGINES = (
    EngineCounters(
        "vLLM",
        "vllm:spec_decode_num_drafts",
        "vllm:spec_decode_num_draft_tokens",
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        supports_cache_salt=True,
    ),
    EngineCounters(
        "llama.cpp",
        "llamacpp:spec_decode_num_drafts",
        "llamacpp:spec_decode_num_draft_tokens",
        "llamacpp:spec_decode_num_accepted_tokens_per_pos",
    ),
    EngineCounters(
        "blockdraft",
        "blockdraft_rounds",
        "blockdraft_drafted_tokens",
        "blockdraft_accepted_tokens_per_pos",
    ),
)


def build_client_options(url: str) -> dict[str, Any]:
    """Return the arguments with which httpx.Client and httpx.AsyncClient connect to an engine.

    The client sends the API key in the environment variable OPENAI_API_KEY or BLOCKDRAFT_API_KEY,
    if there is one.

    url: address of the server, with or without /v1 at its end
    """
    key = os.environ.get("OPENAI_API_KEY") or os.environ.get("BLOCKDRAFT_API_KEY")
    return {
        "base_url": url.rstrip("/").removesuffix("/v1"),
        "headers": {"Authorization": f"Bearer {key}"} if key else {},
        "timeout": httpx.Timeout(ENGINE_CONNECT_TIMEOUT_SECONDS, read=ENGINE_READ_TIMEOUT_SECONDS),
    }


def open_client(url: str) -> httpx.Client:
    """Return an HTTP client for an engine's server, see `build_client_options`."""
    return httpx.Client(**build_client_options(url))


def find_engine_counters(values: Mapping[str, float]) -> EngineCounters | None:
    """Find out from the counters on /metrics which engine the server runs. Return the names of this
    engine's counters of draft tokens.

    values: the counters that the server reports; keys are their names

    Returns None if none of the known engines has such counters.
    """
    for counters in ACCEPTANCE_COUNTERS_OF_ENGINES:
        if counters.rounds in values:
            return counters
    return None


def read_counters(client: httpx.Client) -> dict[str, float]:
    """Read all counters of an engine from /metrics. Return a dictionary from names to values.

    If a counter has a label "position", the key is "<name> <position>". Values of the same counter
    for several models or processes are added up.
    """
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            name = sample.name.removesuffix("_total")
            position = sample.labels.get("position")
            if position:
                name = f"{name} {position}"
            values[name] = values.get(name, 0) + sample.value
    return values


def read_gauge(client: httpx.Client, name: str) -> float | None:
    """Return the mean of a value on /metrics over all models and processes of an engine. Return
    None if /metrics does not have it.
    """
    try:
        families = list(text_string_to_metric_families(client.get("/metrics").text))
    except (httpx.HTTPError, ValueError):
        return None
    values = []
    for family in families:
        values += [sample.value for sample in family.samples if sample.name == name]
    return sum(values) / len(values) if values else None


def subtract_counters(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """Return by how much each counter has grown between two readings of all counters. Counters that
    have not grown are left out."""
    growth = {name: value - before.get(name, 0) for name, value in after.items()}
    return {name: value for name, value in growth.items() if value > 0}
