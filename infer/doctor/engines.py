"""What a running engine does with the prompts of a reference, asked over HTTP; its acceptance by
its own counters on /metrics. Nobody else may ask the engine meanwhile: counters are for all
requests.
"""

import os
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from uuid import uuid4

import httpx
from prometheus_client.parser import text_string_to_metric_families

from infer.doctor.causes import Served
from infer.evaluation.results import Acceptance, KnownText, Reference


@dataclass(frozen=True)
class Counters:
    """The names under which an engine counts, without the ending _total."""

    engine: str
    rounds: str
    drafted: str
    accepted: str  # with a label `position`, from 0
    salts: bool = False  # it keeps prompts with another `cache_salt` apart in its prefix cache


COUNTERS = (
    Counters(
        "vLLM",
        "vllm:spec_decode_num_drafts",
        "vllm:spec_decode_num_draft_tokens",
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        salts=True,
    ),
    Counters(
        "blockdraft",
        "blockdraft_rounds",
        "blockdraft_drafted_tokens",
        "blockdraft_accepted_tokens_per_pos",
    ),
)


def open_client(url: str) -> httpx.Client:
    """Return a client for a server's address, with or without /v1; a key in the environment is
    sent."""
    key = os.environ.get("OPENAI_API_KEY") or os.environ.get("BLOCKDRAFT_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.Client(
        base_url=url.rstrip("/").removesuffix("/v1"),
        headers=headers,
        timeout=httpx.Timeout(10, read=600),
    )


def examine_engine(client: httpx.Client, reference: Reference) -> Served:
    """Send the prompts of a reference, as a client would, each twice, so that the engine's prefix
    cache has it the second time; return what came of it. Raises ValueError where there is no
    server, or none that tells how many drafts it accepts."""
    try:
        answers = []
        counts = [read_metrics(client)]
        counters = next((each for each in COUNTERS if each.rounds in counts[0]), None)
        if counters is None:
            raise ValueError(
                f"url={client.base_url}: /metrics tells of no drafts; known are vLLM (--speculative-config) and ours"
            )
        drafting = describe_drafting(read_decoding(client), reference.block_size)
        model = client.get("/v1/models").json()["data"][0]["id"]
        for text in reference.texts:
            salt = {"cache_salt": uuid4().hex} if counters.salts else {}
            for _ in range(2):
                answers.append(ask(client, model, text, tokens_of(text, reference), salt))
                counts.append(read_metrics(client))
        answers = answers[::2]
        told = [answer["usage"]["prompt_tokens"] for answer in answers]
        ids = [answer["choices"][0]["token_ids"] for answer in answers]
    except (httpx.HTTPError, LookupError, TypeError) as wrong:
        raise ValueError(
            f"url={client.base_url}: no engine that this command knows answers there ({wrong!r})"
        ) from wrong
    parts = [acceptance(counters, later - sooner, reference) for sooner, later in pairwise(counts)]
    rounds = sum(part.rounds for part in parts)
    if not rounds:
        raise ValueError(
            f"url={client.base_url}: {counters.engine} counted no drafts: does it serve a drafter?"
        )
    drafted = (counts[-1] - counts[0])[counters.drafted] / rounds
    texts = [said(answer) for answer in answers]
    return Served(counters.engine, texts, ids, told, parts[::2], parts[1::2], drafted, drafting)


def describe_drafting(decoding: dict[str, str], block_size: int) -> str:
    """Return the options of an engine that does not draft whole blocks as chains; nothing for one
    that does, or does not tell its options."""
    method = decoding.get("method")
    if method is None:
        return ""
    budget = decoding.get("budget", "auto")
    if method == "chain" and budget != "auto" and int(budget) >= block_size - 1:
        return ""
    return " ".join(
        f"decoding.{name}={decoding[name]}" for name in ("method", "budget") if name in decoding
    )


def acceptance(counters: Counters, counted: Counter[str], reference: Reference) -> Acceptance:
    """Return what an engine counted of one text: by the positions of a block at least, without
    zeros behind."""
    positions = range(reference.block_size + 64)
    accepted = [round(counted[f"{counters.accepted} {position}"]) for position in positions]
    while len(accepted) >= reference.block_size and not accepted[-1]:
        accepted.pop()
    return Acceptance(round(counted[counters.rounds]), accepted)


def tokens_of(text: KnownText, reference: Reference) -> int:
    """Return how many tokens to ask for: rounds begin before the last block_size - 1 of a known
    answer."""
    return max(1, len(text.ids) - reference.block_size + 1)


def read_decoding(client: httpx.Client) -> dict[str, str]:
    """Return the options by which our server says that it decodes; none of other engines."""
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            if sample.name == "blockdraft_decoding_info":
                return sample.labels
    return {}


def read_metrics(client: httpx.Client) -> Counter[str]:
    """Return an engine's counters, those by position as "name position", all models and processes
    together."""
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            position = sample.labels.get("position")
            found[sample.name.removesuffix("_total") + (f" {position}" if position else "")] += (
                sample.value
            )
    return found


def ask(client: httpx.Client, model: str, text: KnownText, tokens: int, more: dict) -> dict:
    """Return the answer to a prompt: vLLM and ours tell its token ids. more: of the request."""
    body = {
        "model": model,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    } | more
    body |= (
        {"messages": [{"role": "user", "content": text.said}]}
        if text.chat
        else {"prompt": text.said}
    )
    answer = client.post("/v1/chat/completions" if text.chat else "/v1/completions", json=body)
    if answer.status_code != 200:
        raise ValueError(
            f"url={client.base_url}: it refused a prompt ({answer.status_code}): {answer.text[:200]}"
        )
    return answer.json()


def said(answer: dict) -> str:
    """Return an answer's text, with the thoughts before it."""
    choice = answer["choices"][0]
    message = choice.get("message") or {"content": choice.get("text")}
    return (message.get("reasoning_content") or message.get("reasoning") or "") + (
        message.get("content") or ""
    )
