"""Builds the responses of OpenAI's HTTP API."""

import json
import time
import uuid
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi.responses import JSONResponse

from infer.api import REPLACEMENT_CHARACTER
from infer.engine.sequence import TokenLogprob
from infer.serving.protocol import CompletionRequest
from infer.targets.target import Target

OPENAI_ERROR_TYPE_BY_STATUS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


@dataclass(frozen=True)
class SequenceDelta:
    """The tokens that were added to a sequence since its previous delta.

    text: text of the added tokens
    ids: ids of the added tokens
    logprobs: log-probabilities of the added tokens; empty if they were not requested
    finish_reason: "stop", "length", "cancelled" or "error" if the sequence has ended, else None
    drafted: number of draft tokens that were verified in the rounds that added the tokens
    rejected_ids: ids of the draft tokens on the most likely rejected path of the draft tree; None
        if they were not requested
    error: (HTTP status, message) if the sequence has failed, else None
    """

    text: str
    ids: list[int]
    logprobs: list[TokenLogprob]
    finish_reason: str | None
    drafted: int = 0
    rejected_ids: list[int] | None = None
    error: tuple[int, str] | None = None


def make_failure_delta(status: int, message: str) -> SequenceDelta:
    """Return the last delta of a sequence that has failed.

    status: HTTP status for the client
    message: error message for the client
    """
    return SequenceDelta("", [], [], "error", error=(status, message))


class DeltaParser(Protocol):
    """Interface of a parser that separates the reasoning, content and tool calls of one answer.

    The optional module `infer.serving.calls` implements it.
    """

    call_count: int  # number of the answer's tool calls that are already parsed

    def parse(self, text: str, is_final: bool) -> dict:
        """Return what the next piece of text adds to the message, as a delta of OpenAI's API.

        is_final: whether the answer ends after this text
        """
        ...


def format_server_sent_event(payload: dict) -> str:
    """Return a server-sent event whose data is `payload` as JSON."""
    return f"data: {json.dumps(payload, ensure_ascii=False)}\n\n"


def make_error_response(status: int, message: str) -> JSONResponse:
    """Return an error response in the form of OpenAI's API."""
    # The message may quote a lone surrogate from the request, which cannot be encoded as UTF-8.
    message = message.encode(errors="replace").decode()
    error_type = OPENAI_ERROR_TYPE_BY_STATUS.get(status, "invalid_request_error")
    if status >= 500:
        error_type = "server_error"
    error = {"message": message, "type": error_type, "param": None, "code": None}
    return JSONResponse({"error": error}, status)


class ResponseBuilder:
    """Builds the response to one request, either complete or as chunks of a stream.

    prompts: token ids of every prompt of the request
    parsers: a parser for each answer, which separates reasoning, content and tool calls; empty if
        answers are not separated
    """

    id_prefix: str
    object_type: str
    chunk_object_type: str

    def __init__(
        self,
        target: Target,
        model_name: str,
        request: CompletionRequest,
        prompts: list[list[int]],
        parsers: list[DeltaParser],
    ) -> None:
        self.tokenizer: Any = target.tokenizer
        self.model_name = model_name
        self.has_logprobs = request.logprob_alternatives is not None
        self.prompt_tokens = sum(map(len, prompts))
        self.includes_token_ids = request.return_token_ids
        self.id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.parsers = parsers

    def build_response(self, answers: list[SequenceDelta], cached_tokens: int) -> dict:
        """Return the response of a request that is not streamed.

        answers: the text and tokens of each answer, as one delta
        cached_tokens: number of prompt tokens that were found in the prefix cache
        """
        choices = []
        for index, answer in enumerate(answers):
            choices.append(self.build_choice(index, answer, is_chunk=False))
        completion_tokens = sum(len(answer.ids) for answer in answers)
        usage = self.build_usage(completion_tokens, cached_tokens)
        return self.build_envelope(self.object_type, choices) | {"usage": usage}

    def build_first_chunk(self, index: int) -> dict | None:
        """Return the chunk that is sent before the text of an answer, or None if the API has no
        such chunk.

        index: number of the answer in the response
        """
        return None

    def build_chunk(self, index: int, delta: SequenceDelta) -> dict:
        """Return the streamed chunk for one delta of an answer.

        If the request has `trace`, the chunk has the additional key "round" with the number of
        draft tokens and the text of the rejected ones. OpenAI's API does not have this key.

        index: number of the answer in the response
        """
        choice = self.build_choice(index, delta, is_chunk=True)
        chunk = self.build_envelope(self.chunk_object_type, [choice])
        if delta.rejected_ids is not None and delta.ids:
            chunk["round"] = {
                "drafted": delta.drafted,
                "committed": len(delta.ids),
                "bonus": self.tokenizer.decode(delta.ids[-1:]),
                "rejected": self.tokenizer.decode(delta.rejected_ids),
            }
        return chunk

    def build_usage_chunk(self, completion_tokens: int, cached_tokens: int) -> dict:
        """Return the last chunk of a stream, which contains token counts and no text.

        completion_tokens: number of generated tokens of all answers
        cached_tokens: number of prompt tokens that were found in the prefix cache
        """
        usage = self.build_usage(completion_tokens, cached_tokens)
        return self.build_envelope(self.chunk_object_type, []) | {"usage": usage}

    def build_usage(self, completion_tokens: int, cached_tokens: int) -> dict:
        """Return the field "usage" of a response, which has token counts.

        The tokens of a prompt with several answers are counted once.

        completion_tokens: number of generated tokens of all answers
        cached_tokens: number of prompt tokens that were found in the prefix cache
        """
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }

    def build_envelope(self, object_type: str, choices: list[dict]) -> dict:
        """Return a response or a chunk with the given choices and with id, time and model name.

        object_type: value of the field "object"
        """
        return {
            "id": self.id,
            "object": object_type,
            "created": self.created,
            "model": self.model_name,
            "choices": choices,
        }

    def build_choice(self, index: int, delta: SequenceDelta, is_chunk: bool) -> dict:
        """Return the entry of "choices" for an answer, with token ids if they were requested.

        index: number of the answer in the response
        is_chunk: whether the entry is part of a streamed chunk
        """
        choice = self.build_choice_without_token_ids(index, delta, is_chunk)
        if self.includes_token_ids:
            choice["token_ids"] = delta.ids
        return choice

    def build_choice_without_token_ids(
        self, index: int, delta: SequenceDelta, is_chunk: bool
    ) -> dict:
        """Return the entry of "choices" for an answer, without token ids.

        The entry differs between /v1/completions and /v1/chat/completions, so each subclass
        overrides this method.
        """
        raise NotImplementedError

    def decode_token(self, token_id: int) -> str:
        """Return the text of one token."""
        return self.tokenizer.decode([token_id])


class CompletionBuilder(ResponseBuilder):
    """Builds responses of /v1/completions."""

    id_prefix = "cmpl"
    object_type = "text_completion"
    chunk_object_type = "text_completion"

    def build_choice_without_token_ids(
        self, index: int, delta: SequenceDelta, is_chunk: bool
    ) -> dict:
        return {
            "index": index,
            "text": delta.text,
            "logprobs": self.build_logprobs(delta) if self.has_logprobs else None,
            "finish_reason": delta.finish_reason,
        }

    def build_logprobs(self, delta: SequenceDelta) -> dict:
        """Return the field "logprobs" of a choice.

        It has the log-probabilities of each token and of the most likely alternatives to it.
        """
        top_logprobs = []
        for entry in delta.logprobs:
            top_logprobs.append({self.decode_token(token): value for token, value in entry.top})
        return {
            "tokens": [self.decode_token(token) for token in delta.ids],
            "token_logprobs": [entry.logprob for entry in delta.logprobs],
            "top_logprobs": top_logprobs,
            "text_offset": None,
        }


class ChatBuilder(ResponseBuilder):
    """Builds responses of /v1/chat/completions."""

    id_prefix = "chatcmpl"
    object_type = "chat.completion"
    chunk_object_type = "chat.completion.chunk"

    def build_first_chunk(self, index: int) -> dict:
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return self.build_envelope(self.chunk_object_type, [choice])

    def build_choice_without_token_ids(
        self, index: int, delta: SequenceDelta, is_chunk: bool
    ) -> dict:
        message: dict[str, Any] = {"content": delta.text}
        finish_reason = delta.finish_reason
        if self.parsers:
            parser = self.parsers[index]
            message = parser.parse(delta.text, is_final=delta.finish_reason is not None)
            if parser.call_count and finish_reason == "stop":
                finish_reason = "tool_calls"
        choice = {"index": index}
        if is_chunk:
            choice["delta"] = message
        else:
            choice["message"] = self.build_message(message)
        logprobs = self.build_logprobs(delta) if self.has_logprobs else None
        return choice | {"logprobs": logprobs, "finish_reason": finish_reason}

    def build_message(self, delta: dict) -> dict:
        """Return the message of an answer, for a response that is not streamed.

        delta: a message delta of OpenAI's API that contains the whole answer
        """
        delta = dict(delta)
        calls = []
        for call in delta.pop("tool_calls", ()):
            calls.append({key: value for key, value in call.items() if key != "index"})
        message = {"role": "assistant", "content": None if calls else ""} | delta
        if calls:
            message["tool_calls"] = calls
        return message

    def build_logprobs(self, delta: SequenceDelta) -> dict:
        """Return the field "logprobs" of a choice.

        It has the log-probabilities of each token and of the most likely alternatives to it.
        """
        tokens = []
        for token_id, entry in zip(delta.ids, delta.logprobs, strict=True):
            token = self.build_logprob(token_id, entry.logprob)
            token["top_logprobs"] = [self.build_logprob(*alternative) for alternative in entry.top]
            tokens.append(token)
        return {"content": tokens}

    def build_logprob(self, token_id: int, logprob: float) -> dict:
        """Return the log-probability of one token, with its text and its UTF-8 bytes.

        The bytes are None if the token is an incomplete UTF-8 character.
        """
        text = self.decode_token(token_id)
        is_incomplete = REPLACEMENT_CHARACTER in text
        text_bytes = None if is_incomplete else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": text_bytes}
