"""Answers of the target to the prompts of a data set, for drafters to learn from.

Answers are written in the order of the rows, one JSON line each, and a run that was stopped goes on behind the last
whole line. Either our engine writes them, or any server with OpenAI's API (vLLM, SGLang, ours).
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

from infer.config import MASKED_METHODS, DecodeOptions, MaskedConfig, TextOptions
from infer.engine.sampling import derived_seed
from infer.utils.entry import going_on
from infer.utils.files import refuse_other_settings, write_json
from infer.utils.progress import Progress
from infer.utils.redact import redact_text

LARGEST_RESPONSE = 32 << 20  # bytes of what a server answers


@dataclass(frozen=True)
class Row:
    """One prompt: a text or the messages of a chat; `index` is its place in the data."""

    index: int
    prompt: str | list[dict[str, str]]


@dataclass(frozen=True)
class Answer:
    """The outcome of a row: a text and why it ended, or an error."""

    row: Row
    text: str | None = None
    finish: str | None = None
    error: str | None = None


def of_row(options: DecodeOptions, row: Row) -> DecodeOptions:
    """The options with the row's own seed, whoever answers and wherever a run begins."""
    return replace(options, seed=derived_seed(options.seed, row.index))


def by_engine(target, drafter, options: DecodeOptions, capacity: int) -> Callable[[Iterable[Row]], Iterator[Answer]]:
    """Return a function that answers rows with our engine, `options.rows` side by side, in the rows' order."""
    from infer.api import answer_text, encode, open_engine

    engine = open_engine(target, drafter, options, capacity)

    def answers(rows: Iterable[Row]) -> Iterator[Answer]:
        rows, queue = iter(rows), []  # [(row, text or error)] in order
        while True:
            for row in islice(rows, 4 * options.rows - len(queue)):
                try:
                    queue.append((row, engine.submit(encode(target, row.prompt), of_row(options, row))))
                except ValueError as wrong:
                    queue.append((row, str(wrong)))
            if not queue:
                return
            while queue and (isinstance(queue[0][1], str) or queue[0][1].finish is not None):
                row, text = queue.pop(0)
                if isinstance(text, str):
                    yield Answer(row, error=text)
                else:
                    yield Answer(row, answer_text(target, text.ids, options), text.finish)
            if engine.busy:
                engine.step()

    return answers


def request_body(row: Row, model: str, options: DecodeOptions) -> dict:
    """Return what a server is asked. Fields that OpenAI's API does not have are sent where they are not neutral."""
    body = {"model": model, "max_tokens": options.max_new_tokens, "temperature": options.temperature}
    body |= {"seed": of_row(options, row).seed, "top_p": options.top_p}
    neutral = TextOptions()
    for name in ("top_k", "min_p", "repetition_penalty", "ignore_eos"):
        if getattr(options, name) != getattr(neutral, name):
            body[name] = getattr(options, name)
    body |= {"stop": list(options.stop)} if options.stop else {}
    return body | {"prompt" if isinstance(row.prompt, str) else "messages": row.prompt}


def by_server(url: str, model: str | None, options: DecodeOptions, at_once: int) -> Callable:
    """Return a function that answers rows by a server with OpenAI's API, `at_once` requests under way, in the rows'
    order. A request is tried three times before its row counts as failed; the key in OPENAI_API_KEY is sent to that
    server only."""
    import httpx

    headers = {"Accept-Encoding": "identity"}  # no compressed answer that grows when it is unpacked
    if os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {os.environ['OPENAI_API_KEY']}"
    client = httpx.Client(base_url=url.rstrip("/"), headers=headers, timeout=httpx.Timeout(10, read=600))

    def asked(method: str, path: str, body: dict | None = None) -> tuple[int, bytes]:
        """Return a response's status and content. Raises ValueError for one that is larger than any answer."""
        content = b""
        with client.stream(method, path, json=body) as response:
            for part in response.iter_bytes():
                content += part
                if len(content) > LARGEST_RESPONSE:
                    raise ValueError(f"a response of more than {LARGEST_RESPONSE} bytes")
        return response.status_code, content

    if model is None:
        try:
            model = str(json.loads(asked("GET", "/models")[1])["data"][0]["id"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError, RecursionError) as wrong:
            raise ValueError(f"server={url}: no models there ({wrong}); an address ends in /v1 as a rule") from wrong

    def ask(row: Row) -> Answer:
        chat, body = not isinstance(row.prompt, str), request_body(row, model, options)
        for _ in range(3):
            try:
                status, content = asked("POST", "/chat/completions" if chat else "/completions", body)
                if status == 200:
                    choice = json.loads(content)["choices"][0]
                    text = choice["message"]["content"] if chat else choice["text"]
                    if not isinstance(text or "", str):
                        raise ValueError("an answer that is no text")
                    return Answer(row, text or "", choice["finish_reason"])
                error = f"status {status}: {content[:200].decode(errors='replace')}"
                if 400 <= status < 500 and status != 429:
                    break  # asking again changes nothing
            except (httpx.HTTPError, ValueError, LookupError, TypeError, RecursionError) as wrong:
                error = f"{type(wrong).__name__}: {wrong}"
        return Answer(row, error=error)

    return lambda rows: in_order(ask, iter(rows), at_once)


def in_order(ask: Callable[[Row], Answer], rows: Iterator[Row], at_once: int) -> Iterator[Answer]:
    """Yield the answers to rows, `at_once` of them under way. Who stops does not wait for those."""
    pool = ThreadPoolExecutor(at_once)
    try:
        queue = [pool.submit(ask, row) for row in islice(rows, 2 * at_once)]
        while queue:
            yield queue.pop(0).result()
            queue += [pool.submit(ask, row) for row in islice(rows, 1)]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def regenerate(
    rows: list[Row],
    answers: Callable[[Iterable[Row]], Iterator[Answer]],
    out: Path,
    settings: dict,
    most_failures: int,
) -> dict[str, int]:
    """Write {"index", "prompt" or "messages", "response", "finish"} lines to `out`, and {"index", "error"} lines to
    `out`.failed; returns how many of each there are. `settings` say how the answers come about: a file that was begun
    with others is not gone on with. Raises ValueError for that, and when more than `most_failures` rows failed."""
    failed_path, settings_path = Path(f"{out}.failed"), Path(f"{out}.settings.json")
    settings = settings | {"rows": len(rows)}
    out.parent.mkdir(parents=True, exist_ok=True)
    if settings_path.exists():
        message = f"out={out} was begun with another {{keys}}: give another out, or delete it"
        refuse_other_settings(_settings(settings_path, out), settings, message)
    if out.exists() and not settings_path.exists():
        raise ValueError(f"out={out} exists already and is not ours to go on with: give another out")
    write_json(settings_path, settings)
    done, failed = _whole_lines(out), _whole_lines(failed_path)
    ready = {line["index"] for line in done + failed}
    count, lost = len(done), len(failed)
    progress = Progress("regenerating", "rows", count + lost)
    left = [row for row in rows if row.index not in ready]
    keep = going_on(f"{out} has the answers so far, the same command goes on from there")
    with keep, out.open("a", encoding="utf-8") as good, failed_path.open("a", encoding="utf-8") as bad:
        for answer in answers(left):
            index, prompt = answer.row.index, answer.row.prompt
            if answer.error is None:
                key = "prompt" if isinstance(prompt, str) else "messages"
                line = {"index": index, key: prompt, "response": answer.text, "finish": answer.finish}
                good.write(json.dumps(line, ensure_ascii=False) + "\n")
                good.flush()
                count += 1
            else:
                bad.write(json.dumps({"index": index, "error": redact_text(answer.error)}, ensure_ascii=False) + "\n")
                bad.flush()
                lost += 1
            progress(count + lost, len(rows), f"{lost} failed" if lost else "")
            if lost > most_failures:
                raise ValueError(f"{lost} rows failed, at most {most_failures} may: the last said {answer.error!r}")
    return {"answers": count, "failed": lost}


def _settings(path: Path, out: Path) -> dict:
    """What the answers in `out` were begun with. Raises ValueError if it cannot be read."""
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: delete it and {out}, or give another out") from error


def _whole_lines(path: Path) -> list[dict]:
    """Return the complete lines of a file; cut off a last one that is not complete."""
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return [json.loads(line) for line in whole.splitlines()]


def options_of(options: DecodeOptions) -> dict:
    """Return the options that decide an answer, without those that only change the speed."""
    speed = {"method", "budget", "rows", "compile", "draft_length", "order", "nodes"}
    if options.method not in MASKED_METHODS:
        speed |= MaskedConfig.__dataclass_fields__.keys()
    return {key: value for key, value in asdict(options).items() if key not in speed}
