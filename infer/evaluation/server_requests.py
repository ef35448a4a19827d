"""Send chat requests to a server with OpenAI's HTTP API, and measure the time of each answer.

The server may be vLLM, SGLang, llama-server of llama.cpp, or a server of this project.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from infer.evaluation.engine_metrics import build_client_options, open_client
from infer.evaluation.served_results import ServedAcceptance

CHAT_PATH = "/v1/chat/completions"
MODELS_PATH = "/v1/models"
MAX_QUOTED_RESPONSE_CHARACTERS = 200
API_KEY_STATUSES = (401, 403)
# Fields of a request that switch off the defaults of an engine or of the model's
# generation_config.json. All tokens can then be sampled, as in the command `eval`.
UNFILTERED_SAMPLING_FIELDS = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True)
class ServedEngine:
    """An inference engine, and what requests to it contain besides the fields of OpenAI's API.

    supports_cache_salt: whether requests may have the field `cache_salt`. The engine then finds a
        prompt in its prefix cache only if it was cached with the same salt
    """

    name: str
    request_fields: Mapping[str, object] = field(default_factory=dict)
    supports_cache_salt: bool = False


# Keys are the values of the field `owned_by` in the list of models
ENGINES_BY_MODEL_OWNER = {
    "vllm": ServedEngine("vLLM", UNFILTERED_SAMPLING_FIELDS, supports_cache_salt=True),
    "sglang": ServedEngine(
        "SGLang",
        UNFILTERED_SAMPLING_FIELDS | {"return_spec_tokens_details": True},
        supports_cache_salt=True,
    ),
    "llamacpp": ServedEngine("llama.cpp", {"top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0}),
    "local": ServedEngine("blockdraft"),
}


class ServerFailure(Exception):
    """Raised if a server does not answer, or answers with an error of its own. The message names
    the server.
    """


class RequestRefused(Exception):
    """Raised if a server refuses a request (HTTP status 4xx). The message names the server."""


@dataclass(frozen=True)
class EngineServer:
    """A running server and the model that is requested from it.

    option: name of the option with the address, for messages
    client: for single requests, such as those to /metrics
    stream_client: for requests that run at the same time
    """

    option: str
    url: str
    model: str
    engine: ServedEngine
    client: httpx.Client
    stream_client: httpx.AsyncClient

    @property
    def label(self) -> str:
        """The option and its value, for messages."""
        return f"{self.option}={self.url}"


@dataclass(frozen=True)
class StreamedAnswer:
    """An answer and its times.

    text: the reasoning, if there is one, followed by the content
    tokens: number of generated tokens, as counted by the server
    prompt_tokens, cached_tokens: number of tokens of the prompt, and how many of them were in the
        prefix cache
    seconds: time from sending the request to the end of the answer
    first_token_seconds: time from sending the request to the first text
    acceptance: counts of draft tokens; None if the response does not contain them
    """

    text: str
    tokens: int
    prompt_tokens: int
    cached_tokens: int
    seconds: float
    first_token_seconds: float
    acceptance: ServedAcceptance | None = None

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second, including the prefill. An empty answer counts as one token."""
        return max(1, self.tokens) / self.seconds


def connect_to_server(
    option: str, url: str, model: str | None, preferred_model: str | None, thinking: bool
) -> EngineServer:
    """Find out which engine a server runs and which models it has.

    option: name of the option with the address, for messages
    model: name of the model to request; None means `preferred_model` if the server has it, and
        otherwise the server's first model
    thinking: value of the chat template variable enable_thinking

    Raises ValueError if no server answers, if it refuses the request, or if it does not have the
    model.
    """
    label = f"{option}={url}"
    try:
        client = open_client(url)
        response = client.get(MODELS_PATH)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ValueError(
            f"{label}: no server answers at this address ({describe_error(error)}); start the "
            "server, or correct the address"
        ) from error
    if response.status_code in API_KEY_STATUSES:
        raise ValueError(
            f"{label}: the server refused the API key (status {response.status_code}); set the "
            "environment variable OPENAI_API_KEY or BLOCKDRAFT_API_KEY to the server's key"
        )
    models = read_models(response)
    if not models:
        raise ValueError(
            f"{label}: {MODELS_PATH} has no list of models (status {response.status_code}: "
            f"{response.text[:MAX_QUOTED_RESPONSE_CHARACTERS]}); give the address of a server with "
            "OpenAI's API"
        )
    if model is None:
        model = preferred_model if preferred_model in models else next(iter(models))
    if model not in models:
        raise ValueError(
            f"served_model={model}: {label} does not have this model; use one of "
            f"{', '.join(models)}"
        )
    owner = models[model]
    engine = ENGINES_BY_MODEL_OWNER.get(owner, ServedEngine(owner or "server"))
    # Every request has a connection of its own. llama-server closes connections after streamed
    # answers, sometimes at the moment when the next request is sent.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    stream_client = httpx.AsyncClient(**build_client_options(url), limits=limits)
    server = EngineServer(option, url, model, engine, client, stream_client)
    template_fields = find_template_fields(server, thinking)
    engine = replace(engine, request_fields={**engine.request_fields, **template_fields})
    return replace(server, engine=engine)


def find_template_fields(server: EngineServer, thinking: bool) -> dict[str, Any]:
    """Return the fields of a request that set the chat template variable enable_thinking.

    Returns an empty dictionary if the server refuses them, which a server of this project does if
    the chat template has no such variable. Raises ValueError if it refuses them and `thinking` is
    true.
    """
    fields = {"chat_template_kwargs": {"enable_thinking": thinking}}
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": "Count."}],
        "max_tokens": 1,
        **fields,
    }
    try:
        response = server.client.post(CHAT_PATH, json=body)
    except httpx.HTTPError as error:
        raise ValueError(
            f"{server.label}: a first request was not answered ({describe_error(error)}); look "
            "into the server's log"
        ) from error
    if response.status_code == 200:
        return fields
    if thinking:
        raise ValueError(
            f"suite.thinking=true: {server.label} refuses the chat template variable "
            f"enable_thinking (status {response.status_code}: "
            f"{response.text[:MAX_QUOTED_RESPONSE_CHARACTERS]}); leave suite.thinking out"
        )
    return {}


def read_models(response: httpx.Response) -> dict[str, str]:
    """Return the models in a response to MODELS_PATH. Keys are their names, and values are their
    owners (the field `owned_by`). Return an empty dictionary if the response has no such list.
    """
    try:
        return {
            str(model["id"]): str(model.get("owned_by", "")) for model in response.json()["data"]
        }
    except (ValueError, LookupError, TypeError, AttributeError):
        return {}


def build_request(
    server: EngineServer,
    messages: Sequence[dict[str, str]],
    max_tokens: int,
    temperature: float,
    seed: int,
    cache_salt: str,
) -> dict[str, Any]:
    """Return the body of a request for the next answer of a chat.

    cache_salt: sent to engines that support it, see `ServedEngine`
    """
    body: dict[str, Any] = {
        "model": server.model,
        "messages": list(messages),
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": 1.0,
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True},
        **server.engine.request_fields,
    }
    if server.engine.supports_cache_salt:
        body["cache_salt"] = cache_salt
    return body


async def stream_answer(server: EngineServer, body: dict[str, Any]) -> StreamedAnswer:
    """Send a request and read its answer.

    Raises RequestRefused or ServerFailure if there is no complete answer.
    """
    chunks = []
    text_pieces = []
    first_token_seconds = None
    start = time.perf_counter()
    try:
        async with server.stream_client.stream("POST", CHAT_PATH, json=body) as response:
            if response.status_code != 200:
                quote = (await response.aread()).decode(errors="replace")
                raise_for_status(server, response.status_code, quote)
            async for line in response.aiter_lines():
                if not line.startswith("data:") or line.endswith("[DONE]"):
                    continue
                chunk = json.loads(line.removeprefix("data:"))
                text = read_chunk_text(chunk)
                if text and first_token_seconds is None:
                    first_token_seconds = time.perf_counter() - start
                text_pieces.append(text)
                chunks.append(chunk)
    except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ServerFailure(
            f"{server.label}: the server sent no complete answer ({describe_error(error)})"
        ) from error
    seconds = time.perf_counter() - start

    usage = None
    acceptance = None
    for chunk in chunks:
        if chunk.get("error"):
            raise_for_status(server, 500, json.dumps(chunk["error"]))
        # Some servers send counts with every chunk. Those of the last chunk are complete.
        usage = chunk.get("usage") or usage
        acceptance = read_chunk_acceptance(chunk) or acceptance
    if usage is None:
        raise ServerFailure(
            f"{server.label}: the answer ended without token counts (the field usage), which "
            "this command needs"
        )
    cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return StreamedAnswer(
        text="".join(text_pieces),
        tokens=usage["completion_tokens"],
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=cached_tokens,
        seconds=seconds,
        first_token_seconds=seconds if first_token_seconds is None else first_token_seconds,
        acceptance=acceptance,
    )


def raise_for_status(server: EngineServer, status: int, quote: str) -> None:
    """Raise RequestRefused for an HTTP status 4xx, and ServerFailure for another one.

    quote: text of the response
    """
    message = (
        f"{server.label}: {CHAT_PATH} answered with status {status}: "
        f"{' '.join(quote.split())[:MAX_QUOTED_RESPONSE_CHARACTERS]}"
    )
    if 400 <= status < 500:
        raise RequestRefused(message)
    raise ServerFailure(message)


def describe_error(error: Exception) -> str:
    """Return the type and the message of an exception as text."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def read_chunk_text(chunk: dict[str, Any]) -> str:
    """Return the text that a chunk of a streamed chat response adds to the answer."""
    text = ""
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        text += delta.get("reasoning_content") or delta.get("reasoning") or ""
        text += delta.get("content") or ""
    return text


def read_chunk_acceptance(chunk: dict[str, Any]) -> ServedAcceptance | None:
    """Return the counts of draft tokens in a chunk of a streamed response, or None.

    llama.cpp sends `timings`, without the number of rounds. Except for the first token, which the
    prefill generates, every token is an accepted draft token or the last token of a round. SGLang
    sends `sglext`.
    """
    timings = chunk.get("timings") or {}
    if "predicted_n" in timings:
        accepted = timings.get("draft_n_accepted", 0)
        rounds = max(0, timings["predicted_n"] - 1 - accepted)
        return ServedAcceptance(rounds, timings.get("draft_n", 0), accepted)
    details = (chunk.get("sglext") or {}).get("spec_tokens_details")
    if details:
        return ServedAcceptance(
            details["spec_verify_ct"],
            details["spec_num_proposed_drafts"],
            details["spec_num_correct_drafts"],
        )
    return None
