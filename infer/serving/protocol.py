"""OpenAI's HTTP formats: requests and answers."""

import json
import random
import time
import uuid
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Protocol

from fastapi.responses import JSONResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from infer.config import TextOptions
from infer.engine.sampling import derived_seed
from infer.engine.sequence import TokenLogprob
from infer.serving.dialogue import arguments_of
from infer.targets.target import Target
from infer.utils.chat_template import arguments_text


@dataclass(frozen=True)
class TextPiece:
    """What a round added to one text, and how the text ended if it did."""

    text: str
    ids: list[int]
    logprobs: list[TokenLogprob]
    finish: str | None  # "stop", "length", "cancelled" or "error"
    drafted: int = 0  # nodes that the last round verified
    rejected: list[int] | None = None  # the likeliest path that it did not take, if asked for
    refusal: tuple[int, str] | None = None  # where it ended in an error: HTTP status and sentence


@dataclass(frozen=True)
class Tool:
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str
    parameters: dict


class AnswerParts(Protocol):
    """Tells one answer's thoughts, words and tool calls apart (`infer.serving.calls`, an optional
    package)."""

    calls: int  # that were begun

    def read(self, text: str, final: bool) -> dict:
        """Return the delta, as OpenAI's, that new text adds; `final`: the answer ends behind it."""


def failed(status: int, message: str) -> TextPiece:
    """Return the end of a text that is given up."""
    return TextPiece("", [], [], "error", refusal=(status, message))


def listed(value: object) -> object:
    """Return a text as a list of one, all else as it is."""
    return [value] if isinstance(value, str) else value


FIRST_WRONG = Field(fail_fast=True)  # of a list, which may have 100,000 wrong ones
TokenIds = Annotated[list[int], FIRST_WRONG]
MAX_PROMPTS = 4096  # of a request, told before they are looked at
MAX_METADATA_PAIRS = 64
Stop = Annotated[str, Field(min_length=1, max_length=200)]


def listed_prompts(value: object) -> object:
    """Return prompts as a list. Raises ValueError for too many."""
    prompts = listed(value)
    if isinstance(prompts, list) and len(prompts) > MAX_PROMPTS and not isinstance(prompts[0], int):
        raise ValueError(f"{len(prompts)} prompts in a request, {MAX_PROMPTS} may be")
    return prompts


def few_pairs(value: object) -> object:
    """Return a value as it is. Raises ValueError for too many pairs."""
    if isinstance(value, dict) and len(value) > MAX_METADATA_PAIRS:
        raise ValueError(f"{len(value)} pairs, {MAX_METADATA_PAIRS} may be")
    return value


class Strict(BaseModel):
    """Part of a request. Null says the same as a field left out, and a number is not true. Fields
    that are not known here are refused unless they say nothing: an option that is silently ignored
    is worse than an error."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def without_empty(cls, fields: object) -> object:
        """Leave known fields out that are null, and others that are null, false, 0 or empty. Of
        those that are refused one is enough."""
        if not isinstance(fields, dict):
            return fields
        kept = {
            name: value
            for name, value in fields.items()
            if name in cls.model_fields and value is not None
        }
        if cls.model_config["extra"] == "forbid":
            others = (name for name in fields if name not in cls.model_fields)
            refused = next(
                (name for name in others if fields[name] not in (None, False, "", [], {})), None
            )
            kept |= {} if refused is None else {refused: fields[refused]}
        return kept


SHARED = {
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "ignore_eos",
    "stop",
}  # with TextOptions


class StreamOptions(Strict):
    """What a stream says beside the text."""

    include_usage: bool = False  # token counts at its end


class CompletionRequest(Strict):
    """What both requests share: OpenAI's fields and vLLM's extra sampling fields. Of chats (`chat`)
    alone:

    template_options: what the chat template is told beside the messages
    tools_shown: the tools that it is shown, as it reads them
    callable_tools: those that the answer may call
    wished_calls: the tools of which the answer must call one, if it must; or more, with
        `several_calls`
    format_schema: the JSON schema that `response_format` stands for
    """

    chat: ClassVar[bool] = False
    template_options: ClassVar[dict[str, Any]] = {}
    tools_shown: ClassVar[list[dict[str, Any]]] = []
    callable_tools: ClassVar[list[Tool]] = []
    wished_calls: ClassVar[list[Tool] | None] = None
    format_schema: ClassVar[str | None] = None
    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=10)  # OpenAI's default: sampled
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    n: int = Field(1, ge=1, le=16)
    seed: int | None = Field(None, ge=-(2**62), lt=2**62)
    stop: Annotated[list[Stop], Field(max_length=16), BeforeValidator(listed)] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    trace: bool = False  # ours: streamed chunks say what was drafted and rejected
    return_token_ids: bool = False  # vLLM's: choices have the ids of their tokens
    # vLLM's: what the answer must look like
    guided_json: Annotated[str, BeforeValidator(arguments_text)] | None = None  # a JSON schema
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(min_length=1, max_length=256)] | None = None
    guided_grammar: str | None = None  # in Lark's syntax
    # Whose request it is has no effect on the answer.
    user: str | None = None
    metadata: Annotated[dict[str, str], BeforeValidator(few_pairs)] | None = None

    @model_validator(mode="after")
    def effective(self) -> "CompletionRequest":
        """Raise ValueError for options of a stream where there is none."""
        if (self.stream_options or self.trace) and not self.stream:
            raise ValueError(
                "stream_options and trace: for streams only, add stream=true or leave them out"
            )
        return self

    def shapes(self) -> dict[str, str]:
        """Return what the answer must look like, as `TextOptions` name it. Raises ValueError for
        several wishes."""
        choice = self.guided_choice
        wishes = {
            "guided_json": ("json_schema", self.guided_json),
            "guided_regex": ("regex", self.guided_regex),
            "guided_choice": (
                "grammar",
                choice and "start: " + " | ".join(map(json.dumps, choice)),
            ),
            "guided_grammar": ("grammar", self.guided_grammar),
            "response_format": ("json_schema", self.format_schema),
        }
        asked = [name for name, (_, text) in wishes.items() if text is not None]
        if len(asked) > 1:
            raise ValueError(f"{' and '.join(asked)}: an answer can follow one of them, give one")
        return dict(wishes[name] for name in asked)

    def text_options(self, most: int, logprobs: int | None, index: int) -> TextOptions:
        """Return the options of text number `index` of the request."""
        shared = self.model_dump(include=SHARED)
        seed = random.getrandbits(62) if self.seed is None else derived_seed(self.seed, index)
        return TextOptions(
            most, seed=seed, top_k=max(0, self.top_k), logprobs=logprobs, **shared, **self.shapes()
        )


class PromptRequest(CompletionRequest):
    """A request to /v1/completions."""

    prompt: Annotated[
        TokenIds | Annotated[list[str], FIRST_WRONG] | Annotated[list[TokenIds], FIRST_WRONG],
        BeforeValidator(listed_prompts),
        Field(min_length=1),
    ]
    logprobs: int | None = Field(None, ge=0, le=20)

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, one or many, as a list."""
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt

    def limits(self) -> tuple[int | None, int | None]:
        """Return the most tokens (None: all that fit) and the alternatives of log-probabilities."""
        return self.max_tokens or 16, self.logprobs


class Returned(Strict):
    """Part of a message, as clients return it that have it from this server or another: what else
    servers add to it (annotations, say) is ignored, as vLLM does."""

    model_config = ConfigDict(extra="ignore", strict=True)


class TextPart(Returned):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class RefusalPart(Returned):
    """A piece of an answer that says why the model does not answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class NamedFunction(Strict):
    """A function's name."""

    name: str


class CalledFunction(Returned):
    """A function's name, and its arguments as JSON in a text."""

    name: str
    arguments: str = "{}"


class ToolCall(Returned):
    """A call that an answer made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


ContentPart = Annotated[TextPart | RefusalPart, Field(discriminator="type")]


class Message(Returned):
    """One turn of a chat. An answer of this server or another can be fed back as the client has
    it."""

    role: str
    content: str | Annotated[list[ContentPart], FIRST_WRONG] = ""
    refusal: str | None = None  # OpenAI's, in place of the content
    reasoning_content: str | None = None  # the thought, as this server calls it
    reasoning: str | None = None  # as vLLM calls it
    thinking: str | None = None  # as Ollama calls it
    name: str | None = None  # of who speaks
    tool_calls: list[ToolCall] | None = Field(None, max_length=128)
    tool_call_id: str | None = None  # of the call that a message with role "tool" answers
    audio: None = None  # an answer's sound, which has words that are not here
    function_call: None = None  # what tool_calls were before

    @model_validator(mode="before")
    @classmethod
    def with_content(cls, fields: object) -> object:
        """Raise ValueError for a message without content, whose key may be mistyped."""
        if (
            isinstance(fields, dict)
            and "content" not in fields
            and fields.get("role") != "assistant"
        ):
            raise ValueError("it has no content")
        return fields

    @property
    def thought(self) -> str | None:
        return self.reasoning_content or self.reasoning or self.thinking

    def plain(self) -> dict[str, Any]:
        """Return the message as chat templates read it, but for the key of its thought: the
        arguments of calls are objects there."""
        content = (
            self.content
            if isinstance(self.content, str)
            else "".join(part.text for part in self.content)
        )
        said: dict[str, Any] = {"role": self.role, "content": content or self.refusal or ""}
        said |= {"reasoning_content": self.thought} if self.thought else {}
        said |= {"name": self.name} if self.name else {}
        said |= {"tool_call_id": self.tool_call_id} if self.tool_call_id else {}
        if self.tool_calls:
            said["tool_calls"] = [
                {"id": call.id, "type": "function"}
                | {
                    "function": {
                        "name": call.function.name,
                        "arguments": arguments_of(call.function.model_dump()),
                    }
                }
                for call in self.tool_calls
            ]
        return said


class FunctionSchema(Strict):
    """A function that the model may call."""

    name: str = Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False  # calls that must be made follow the schema in either case, others are the model's own


class OfferedTool(Strict):
    """A tool; there are functions alone."""

    type: Literal["function"]
    function: FunctionSchema


class NamedTool(Strict):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class ResponseFormat(Strict):
    """The form of an answer. json_schema: {"schema": ...}; what else is in it says nothing to the
    model here."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] = {}

    @model_validator(mode="after")
    def complete(self) -> "ResponseFormat":
        """Raise ValueError for a schema without its type, or the type without a schema."""
        if (self.type == "json_schema") != ("schema" in self.json_schema):
            raise ValueError("response_format: type json_schema and json_schema.schema go together")
        return self


class ChatRequest(CompletionRequest):
    """A request to /v1/chat/completions."""

    chat: ClassVar[bool] = True
    messages: list[Message] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, max_length=32)  # as vLLM's
    response_format: ResponseFormat | None = None
    tools: list[OfferedTool] = Field(default_factory=list, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True  # whether an answer that must call may call more than once

    @model_validator(mode="after")
    def consistent(self) -> "ChatRequest":
        """Raise ValueError for fields of which one makes the other ineffective."""
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: with logprobs=true only, add it or leave this out")
        if (
            None not in (self.max_tokens, self.max_completion_tokens)
            and self.max_tokens != self.max_completion_tokens
        ):
            raise ValueError(
                "max_tokens: is the old name of max_completion_tokens, give one of them"
            )
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise ValueError("tools: two have one name")
        if self.wished_calls == []:
            raise ValueError("tool_choice: there is no such tool")
        if self.wished_calls is not None and self.shapes():
            raise ValueError(
                f"tool_choice: an answer that must call cannot follow {next(iter(self.shapes()))} too"
            )
        return self

    @property
    def tools_shown(self) -> list[dict[str, Any]]:
        shown = [] if self.tool_choice == "none" else self.tools
        return [tool.model_dump(exclude={"function": {"strict"}}) for tool in shown]

    @property
    def callable_tools(self) -> list[Tool]:
        if self.tool_choice == "none":
            return []
        return [Tool(tool.function.name, tool.function.parameters) for tool in self.tools]

    @property
    def wished_calls(self) -> list[Tool] | None:
        if isinstance(self.tool_choice, NamedTool):
            return [
                tool for tool in self.callable_tools if tool.name == self.tool_choice.function.name
            ]
        return self.callable_tools if self.tool_choice == "required" else None

    @property
    def several_calls(self) -> bool:
        return self.parallel_tool_calls and self.tool_choice == "required"

    @property
    def format_schema(self) -> str | None:
        wish = self.response_format
        if wish is None or wish.type == "text":
            return None
        return json.dumps(wish.json_schema.get("schema", {"type": "object"}))

    @property
    def template_options(self) -> dict[str, Any]:
        return self.chat_template_kwargs

    def prompts(self) -> list[list[dict[str, Any]]]:
        """Return the one conversation, as a list."""
        return [[message.plain() for message in self.messages]]

    def limits(self) -> tuple[int | None, int | None]:
        """Return the most tokens (None: all that fit) and the alternatives of log-probabilities."""
        return self.max_completion_tokens or self.max_tokens, (
            self.top_logprobs or 0
        ) if self.logprobs else None


def event(payload: dict) -> str:
    return f"data: {json.dumps(payload, ensure_ascii=False)}\n\n"


def error(status: int, message: str) -> JSONResponse:
    """Return an error as OpenAI's clients expect it. A quoted part of the request may hold half of
    a surrogate pair."""
    message = message.encode(errors="replace").decode()
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error")
    kind = "server_error" if status >= 500 else kind
    return JSONResponse(
        {"error": {"message": message, "type": kind, "param": None, "code": None}}, status
    )


class Form:
    """Builds the answer to one request, in the format of an API."""

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(
        self,
        target: Target,
        name: str,
        body: CompletionRequest,
        prompts: list[list[int]],
        answers: list[AnswerParts],
    ) -> None:
        self.target = target
        self.name = name
        self.logprobs = body.limits()[1] is not None
        self.prompt_tokens = sum(map(len, prompts))
        self.ids_too = body.return_token_ids
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.answers = (
            answers  # one for each of the request's answers; none where they are words alone
        )

    def envelope(self, choices: list[dict], chunk: bool) -> dict:
        kind = self.chunk_kind if chunk else self.kind
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.name,
            "choices": choices,
        }

    def whole(self, pieces: list[TextPiece], reused: int) -> dict:
        """Return the whole answer."""
        choices = [self.choice(i, piece) | self.ids(piece) for i, piece in enumerate(pieces)]
        usage = self.usage(sum(len(piece.ids) for piece in pieces), reused)
        return self.envelope(choices, chunk=False) | {"usage": usage}

    def usage(self, tokens: int, reused: int) -> dict:
        """Token counts, of all prompts, each counted once, and of all answers; `reused`: those of
        prompts that earlier texts began with."""
        total = self.prompt_tokens + tokens
        counts = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": total,
        }
        return counts | {"prompt_tokens_details": {"cached_tokens": reused}}

    def chunk(self, index: int, piece: TextPiece) -> dict:
        """Return a streamed chunk of one text. The key "round" is ours, for requests with trace."""
        chunk = self.envelope([self.choice(index, piece, chunk=True) | self.ids(piece)], chunk=True)
        if piece.rejected is not None and piece.ids:
            decode = self.target.tokenizer.decode
            chunk["round"] = {
                "drafted": piece.drafted,
                "committed": len(piece.ids),
                "bonus": decode(piece.ids[-1:]),
                "rejected": decode(piece.rejected),
            }
        return chunk

    def ids(self, piece: TextPiece) -> dict:
        """Return the piece's tokens, if they were asked for."""
        return {"token_ids": piece.ids} if self.ids_too else {}

    def opening(self, index: int) -> dict | None:
        """Return what is sent before the first chunk of a text, if anything."""
        return None

    def word(self, id: int) -> str:
        return self.target.tokenizer.decode([id])


class Completion(Form):
    """Answers of /v1/completions."""

    prefix = "cmpl"
    kind = "text_completion"
    chunk_kind = "text_completion"

    def choice(self, index: int, piece: TextPiece, chunk: bool = False) -> dict:
        logprobs = None
        if self.logprobs:
            logprobs = {
                "tokens": [self.word(id) for id in piece.ids],
                "token_logprobs": [entry.logprob for entry in piece.logprobs],
                "top_logprobs": [
                    {self.word(id): value for id, value in entry.top} for entry in piece.logprobs
                ],
                "text_offset": None,
            }
        return {
            "index": index,
            "text": piece.text,
            "logprobs": logprobs,
            "finish_reason": piece.finish,
        }


class Chat(Form):
    """Answers of /v1/chat/completions."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def opening(self, index: int) -> dict:
        said = {"role": "assistant", "content": ""}
        return self.envelope(
            [{"index": index, "delta": said, "logprobs": None, "finish_reason": None}], chunk=True
        )

    def choice(self, index: int, piece: TextPiece, chunk: bool = False) -> dict:
        logprobs = None
        if self.logprobs:
            tokens = [
                self.entry(id, entry.logprob)
                | {"top_logprobs": [self.entry(*pair) for pair in entry.top]}
                for id, entry in zip(piece.ids, piece.logprobs, strict=True)
            ]
            logprobs = {"content": tokens}
        parts = {"content": piece.text}
        finish = piece.finish
        if self.answers:
            answer = self.answers[index]
            parts = answer.read(piece.text, piece.finish is not None)
            finish = "tool_calls" if answer.calls and finish == "stop" else finish
        if not chunk:
            calls = [
                {k: v for k, v in call.items() if k != "index"}
                for call in parts.pop("tool_calls", ())
            ]
            parts = {"role": "assistant", "content": None if calls else ""} | parts
            parts |= {"tool_calls": calls} if calls else {}
        body = {"delta": parts} if chunk else {"message": parts}
        return {"index": index, **body, "logprobs": logprobs, "finish_reason": finish}

    def entry(self, id: int, logprob: float) -> dict:
        word = self.word(id)
        return {
            "token": word,
            "logprob": logprob,
            "bytes": None if "\ufffd" in word else list(word.encode()),
        }
