"""OpenAI's HTTP formats: requests and answers."""

import json
import random
import time
import uuid
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from infer.config import TextOptions
from infer.engine.sequence import TokenLogprob
from infer.targets.target import Target


@dataclass(frozen=True)
class Piece:
    """What a round added to one text, and how the text ended if it did."""

    text: str
    ids: list[int]
    logprobs: list[TokenLogprob]
    finish: str | None  # "stop", "length", "cancelled" or "error"
    drafted: int = 0  # nodes that the last round verified
    rejected: list[int] | None = None  # the likeliest path that it did not take, if asked for


Stop = Annotated[str, Field(min_length=1, max_length=200)]


class CompletionRequest(BaseModel):
    """The fields of both requests: OpenAI's, and vLLM's extra sampling fields. Unknown fields are refused, because an
    option that is silently ignored is worse than an error."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=10)  # OpenAI's default: sampled
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    n: int = Field(1, ge=1, le=16)
    seed: int | None = Field(None, ge=-(2**62), lt=2**62)
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: dict[str, bool] | None = None
    user: str | None = None
    trace: bool = False  # ours: streamed chunks say what was drafted and rejected
    # Accepted at their neutral values only.
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    logit_bias: dict[str, float] | None = Field(None, max_length=0)

    def text_options(self, most: int, logprobs: int | None, index: int) -> TextOptions:
        """Return the options of text number `index` of the request's `n`."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return TextOptions(
            max_new_tokens=most,
            temperature=self.temperature,
            top_k=max(0, self.top_k),
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            seed=random.getrandbits(62) if self.seed is None else self.seed + index,
            ignore_eos=self.ignore_eos,
            stop=stop,
            logprobs=logprobs,
            trace=self.trace and self.stream,
        )


class PromptRequest(CompletionRequest):
    """A request to /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: Literal[False] = False
    best_of: Literal[1] | None = None
    suffix: None = None

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, one or many, as a list."""
        one = isinstance(self.prompt, str) or (len(self.prompt) > 0 and isinstance(self.prompt[0], int))
        return [self.prompt] if one else self.prompt

    def limits(self) -> tuple[int | None, int | None]:
        """Return the most tokens (None: all that fit) and the alternatives of log-probabilities."""
        return self.max_tokens or 16, self.logprobs


class Part(BaseModel):
    """A piece of a message."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn of a chat."""

    model_config = ConfigDict(extra="forbid")

    role: str
    content: str | list[Part]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """Return the message as chat templates read it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": content}


class ChatRequest(CompletionRequest):
    """A request to /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: None = None
    tools: None = None

    def prompts(self) -> list[list[dict[str, str]]]:
        """Return the one conversation, as a list."""
        return [[message.plain() for message in self.messages]]

    def limits(self) -> tuple[int | None, int | None]:
        """Return the most tokens (None: all that fit) and the alternatives of log-probabilities."""
        return self.max_completion_tokens or self.max_tokens, (self.top_logprobs or 0) if self.logprobs else None


def event(payload: dict) -> str:
    return f"data: {json.dumps(payload, ensure_ascii=False)}\n\n"


def error(status: int, message: str, param: str | None = None) -> JSONResponse:
    """Return an error as OpenAI's clients expect it. A quoted part of the request may hold half of a surrogate pair."""
    message, param = (None if said is None else said.encode(errors="replace").decode() for said in (message, param))
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error")
    kind = "server_error" if status >= 500 else kind
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": None}}, status)


def usage(prompts: list[list[int]], completion: int) -> dict:
    """Return the token counts of a request with these prompts."""
    prompt = sum(map(len, prompts))
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class Form:
    """Builds the answer to one request, in the format of an API."""

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, target: Target, name: str, logprobs: bool) -> None:
        self.target, self.name, self.logprobs = target, name, logprobs
        self.id, self.created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())

    def envelope(self, choices: list[dict], chunk: bool) -> dict:
        kind = self.chunk_kind if chunk else self.kind
        return {"id": self.id, "object": kind, "created": self.created, "model": self.name, "choices": choices}

    def whole(self, prompts: list[list[int]], pieces: list[Piece]) -> dict:
        """Return the whole answer."""
        choices = [self.choice(i, piece) for i, piece in enumerate(pieces)]
        return self.envelope(choices, chunk=False) | {"usage": usage(prompts, sum(len(piece.ids) for piece in pieces))}

    def chunk(self, index: int, piece: Piece) -> dict:
        """Return a streamed chunk of one text. The key "round" is ours, for requests with trace."""
        chunk = self.envelope([self.choice(index, piece, chunk=True)], chunk=True)
        if piece.rejected is not None and piece.ids:
            decode = self.target.tokenizer.decode
            chunk["round"] = {
                "drafted": piece.drafted,
                "committed": len(piece.ids),
                "bonus": decode(piece.ids[-1:]),
                "rejected": decode(piece.rejected),
            }
        return chunk

    def opening(self, index: int) -> dict | None:
        """Return what is sent before the first chunk of a text, if anything."""
        return None

    def choice(self, index: int, piece: Piece, chunk: bool = False) -> dict:
        raise NotImplementedError

    def word(self, id: int) -> str:
        return self.target.tokenizer.decode([id])


class Completion(Form):
    """Answers of /v1/completions."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def choice(self, index: int, piece: Piece, chunk: bool = False) -> dict:
        logprobs = None
        if self.logprobs:
            logprobs = {
                "tokens": [self.word(id) for id in piece.ids],
                "token_logprobs": [entry.logprob for entry in piece.logprobs],
                "top_logprobs": [{self.word(id): value for id, value in entry.top} for entry in piece.logprobs],
                "text_offset": None,
            }
        return {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish}


class Chat(Form):
    """Answers of /v1/chat/completions."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> dict:
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return self.envelope([choice], chunk=True)

    def choice(self, index: int, piece: Piece, chunk: bool = False) -> dict:
        logprobs = None
        if self.logprobs:
            entries = zip(piece.ids, piece.logprobs, strict=True)
            logprobs = {
                "content": [
                    self.entry(id, entry.logprob) | {"top_logprobs": [self.entry(*pair) for pair in entry.top]}
                    for id, entry in entries
                ]
            }
        body = (
            {"delta": {"content": piece.text}} if chunk else {"message": {"role": "assistant", "content": piece.text}}
        )
        return {"index": index, **body, "logprobs": logprobs, "finish_reason": piece.finish}

    def entry(self, id: int, logprob: float) -> dict:
        word = self.word(id)
        return {"token": word, "logprob": logprob, "bytes": list(word.encode())}
