"""What a running engine does with the prompts of a reference, asked over HTTP; its acceptance by its own counters.

vLLM, llama.cpp's server and ours count on /metrics, SGLang beside each answer of /generate. Nobody else may ask the
engine meanwhile: counters are for all requests.
"""

import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import httpx

from infer.evaluation.causes import Served
from infer.evaluation.results import Acceptance, KnownText, Reference

LINE = re.compile(r"^(\w[\w:]*?)(?:_total)?(?:\{(.*)\})? ([-+\w.]+)$")


@dataclass(frozen=True)
class Counters:
    """The names under which an engine counts, without the ending _total."""

    engine: str
    rounds: str
    drafted: str
    accepted: str  # with a label `position`, from 0
    switch: str  # how to turn them on


_SPEC = ("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens_per_pos")
COUNTERS = (
    Counters("vLLM", *(f"vllm:{name}" for name in _SPEC), "start it with --speculative-config, with its statistics on"),
    Counters("llama.cpp", *(f"llamacpp:{name}" for name in _SPEC), "start llama-server with --metrics"),
    Counters("blockdraft", "blockdraft_rounds", "blockdraft_drafted_tokens", "blockdraft_accepted_tokens_per_pos", ""),
)


def open_client(url: str, key: str | None = None) -> httpx.Client:
    """Return a client for a server's address, with or without /v1."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.Client(
        base_url=url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=httpx.Timeout(10, read=600)
    )


def examine_engine(client: httpx.Client, reference: Reference) -> Served:
    """Send the prompts of a reference, as a client would, and return what came of it. Raises ValueError where there is
    no server, or none that tells how many drafts it accepts."""
    try:
        counters = find_counters(client)
        if counters is None:
            return examine_sglang(client, reference)
        model = client.get("/v1/models").json()["data"][0]["id"]
        answers, counts = [], [read_metrics(client, counters)]
        for text in reference.texts:
            answers.append(ask(client, model, text, tokens_of(text, reference)))
            counts.append(read_metrics(client, counters))
    except (httpx.HTTPError, LookupError, TypeError) as wrong:
        raise ValueError(
            f"url={client.base_url}: no engine that this command knows answers there ({wrong!r})"
        ) from wrong
    parts = [read_part(counters, *pair, reference) for pair in pairwise(counts)]
    rounds = sum(part.rounds for part in parts)
    if not rounds:
        raise ValueError(
            f"url={client.base_url}: {counters.engine} counted no round of drafts: is it serving a drafter? "
            f"{counters.switch}"
        )
    ids = [answer.get("token_ids") for answer in answers]
    return Served(
        engine=counters.engine,
        texts=[answer["said"] for answer in answers],
        ids=None if None in ids else ids,
        prompt_tokens=[answer["prompt_tokens"] for answer in answers],
        by_text=parts,
        drafted=(counts[-1][counters.drafted] - counts[0][counters.drafted]) / rounds,
    )


def read_part(counters: Counters, before: Counter[str], after: Counter[str], reference: Reference) -> Acceptance:
    """Return what was accepted between two readings of an engine's counters."""
    accepted = [
        round(after[name] - before[name])
        for name in (f"{counters.accepted} {k}" for k in range(reference.block_size + 64))
    ]
    return Acceptance(round(after[counters.rounds] - before[counters.rounds]), trimmed(accepted, reference))


def tokens_of(text: KnownText, reference: Reference) -> int:
    """Return how many tokens to ask for: rounds begin before the last block_size - 1 of a known answer."""
    return max(1, len(text.ids) - reference.block_size + 1)


def trimmed(accepted: list[int], reference: Reference) -> list[int]:
    """Return counts by position, those of a block at least, without zeros behind."""
    while len(accepted) >= reference.block_size and not accepted[-1]:
        accepted = accepted[:-1]
    return accepted


def find_counters(client: httpx.Client) -> Counters | None:
    """Return how an engine counts, None where it has no counters of rounds on /metrics. Raises ValueError for a known
    engine that has them off."""
    answer = client.get("/metrics")
    if answer.status_code == 200:
        for counters in COUNTERS:
            if counters.rounds in answer.text:
                return counters
            prefix = re.split(r"[:_]", counters.rounds)[0]
            if re.search(rf"^{prefix}[:_]", answer.text, re.MULTILINE):
                raise ValueError(f"url={client.base_url}: {counters.engine} counts no drafts: {counters.switch}")
    return None


def read_metrics(client: httpx.Client, counters: Counters) -> Counter[str]:
    """Return an engine's counters, those by position as "name position", all models and processes together."""
    found: Counter[str] = Counter()
    for line in client.get("/metrics").text.splitlines():
        match = LINE.match(line)
        if match is None or match[1] not in (counters.rounds, counters.drafted, counters.accepted):
            continue
        position = re.search(r'position="(\d+)"', match[2] or "")
        found[match[1] + (f" {position[1]}" if position else "")] += float(match[3])
    return found


def ask(client: httpx.Client, model: str, text: KnownText, tokens: int) -> dict:
    """Return an answer: what was said, its ids if the engine tells them, and how many tokens the prompt has."""
    body = {"model": model, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    body |= {"messages": [{"role": "user", "content": text.said}]} if text.chat else {"prompt": text.said}
    answer = client.post("/v1/chat/completions" if text.chat else "/v1/completions", json=body)
    if answer.status_code != 200:
        raise ValueError(f"url={client.base_url}: it refused a prompt ({answer.status_code}): {answer.text[:200]}")
    found = answer.json()
    choice = found["choices"][0]
    message = choice["message"] if text.chat else {"content": choice["text"]}
    said = (message.get("reasoning_content") or message.get("reasoning") or "") + (message.get("content") or "")
    return {
        "said": said,
        "token_ids": choice.get("token_ids"),
        "prompt_tokens": found["usage"]["prompt_tokens"],
    }


def examine_sglang(client: httpx.Client, reference: Reference) -> Served:
    """Ask SGLang, which tells with an answer how many rounds accepted 0, 1, 2, ... drafts. A chat's tokens are sent as
    the reference has them, and the chat itself for the number of its tokens."""
    texts, ids, prompts, parts, drafted = [], [], [], [], 0
    for text in reference.texts:
        sampling = {"max_new_tokens": tokens_of(text, reference), "temperature": 0, "ignore_eos": True}
        asked = {"input_ids": text.prompt} if text.chat else {"text": text.said}
        answer = client.post("/generate", json=asked | {"sampling_params": sampling})
        if answer.status_code != 200:
            raise ValueError(
                f"url={client.base_url}: neither /metrics nor /generate tells how many drafts were accepted; known are "
                f"vLLM, SGLang, llama.cpp's server (--metrics) and ours"
            )
        found = answer.json()
        told = found["meta_info"]
        counts = told.get("spec_correct_drafts_histogram") or told.get("spec_accept_histogram")
        if not counts:
            raise ValueError(f"url={client.base_url}: SGLang counted no drafts: start it with --speculative-algorithm")
        accepted = [sum(counts[k + 1 :]) for k in range(len(counts) - 1)]
        accepted += [0] * (reference.block_size - 1 - len(accepted))
        parts.append(Acceptance(sum(counts), accepted))
        drafted += told.get("spec_num_proposed_drafts") or told.get("spec_draft_token_num") or 0
        texts.append(found["text"])
        ids.append(found.get("output_ids"))
        prompts.append(ask(client, "default", text, 1)["prompt_tokens"] if text.chat else told["prompt_tokens"])
    rounds = sum(part.rounds for part in parts)
    many = drafted / rounds if drafted else reference.block_size - 1
    return Served("SGLang", texts, None if None in ids else ids, prompts, parts, many)
