"""Bodies of requests of OpenAI's HTTP API, as pydantic models."""

import json
import random
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from infer.config import SamplingOptions
from infer.engine.sampling import derive_seed
from infer.serving.messages import (
    FAIL_FAST_LIST_FIELD,
    Message,
    NamedTool,
    ResponseFormat,
    StrictModel,
    Tool,
    ToolDefinition,
)
from infer.utils.chat_template import tool_arguments_to_json

MAX_PROMPTS_PER_REQUEST = 4096  # maximum number of prompts in one request
MAX_METADATA_PAIRS = 64  # maximum number of entries of the field "metadata"
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens for /v1/completions
# Fields that are copied to options of `SamplingOptions` with the same name
REQUEST_FIELDS_COPIED_TO_SAMPLING_OPTIONS = {
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "ignore_eos",
    "stop",
}


def wrap_string_in_list(value: Any) -> Any:
    """Return [value] if the value is a string, else the value unchanged."""
    return [value] if isinstance(value, str) else value


def normalise_prompts(value: Any) -> Any:
    """Return the field "prompt" of a request, with a single string put into a list.

    Raises ValueError if there are more than MAX_PROMPTS_PER_REQUEST prompts.
    """
    prompts = wrap_string_in_list(value)
    is_list_of_prompts = isinstance(prompts, list) and len(prompts) > 0
    # A list of integers is a single prompt, given as token ids.
    if (
        is_list_of_prompts
        and len(prompts) > MAX_PROMPTS_PER_REQUEST
        and not isinstance(prompts[0], int)
    ):
        raise ValueError(
            f"the request has {len(prompts)} prompts, at most {MAX_PROMPTS_PER_REQUEST} are "
            "allowed: send several requests"
        )
    return prompts


def check_metadata_count(value: Any) -> Any:
    """Return the request field "metadata" unchanged.

    Raises ValueError if it has more than MAX_METADATA_PAIRS entries.
    """
    if isinstance(value, dict) and len(value) > MAX_METADATA_PAIRS:
        raise ValueError(
            f"metadata has {len(value)} entries, at most {MAX_METADATA_PAIRS} are allowed: send "
            "fewer entries"
        )
    return value


TokenIds = Annotated[list[int], FAIL_FAST_LIST_FIELD]
StopString = Annotated[str, Field(min_length=1, max_length=200)]


class StreamOptions(StrictModel):
    """The request field `stream_options`."""

    include_usage: bool = False  # whether the last chunk contains token counts


class CompletionRequest(StrictModel):
    """Base class with the fields that completion requests and chat requests have in common.

    The fields are those of OpenAI's API, extra fields of vLLM, and `trace` of this server.
    Properties that only chat requests use (chat template, tools, response format) return empty
    values here, and are overridden by `ChatRequest`.
    """

    is_chat: ClassVar[bool] = False
    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    # The default 1 is that of OpenAI's API; 0 means greedy decoding
    temperature: float = Field(1.0, ge=0, le=10)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    n: int = Field(1, ge=1, le=16)
    seed: int | None = Field(None, ge=-(2**62), lt=2**62)
    stop: Annotated[
        list[StopString], Field(max_length=16), BeforeValidator(wrap_string_in_list)
    ] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    # Field of this server only: each streamed chunk also reports the number of draft tokens and the
    # text of the rejected ones.
    trace: bool = False
    return_token_ids: bool = False  # field of vLLM: the response also contains token ids
    # The four guided_* fields are from vLLM. Each constrains the output.
    guided_json: Annotated[str, BeforeValidator(tool_arguments_to_json)] | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(min_length=1, max_length=256)] | None = None
    guided_grammar: str | None = None  # in Lark's syntax
    # `user` and `metadata` are accepted and ignored.
    user: str | None = None
    metadata: Annotated[dict[str, str], BeforeValidator(check_metadata_count)] | None = None

    @model_validator(mode="after")
    def check_stream_options(self) -> "CompletionRequest":
        """Raise ValueError if `stream_options` or `trace` is given without stream=true."""
        if (self.stream_options or self.trace) and not self.stream:
            raise ValueError(
                "stream_options and trace work with stream=true only: add stream=true, or remove "
                "stream_options and trace"
            )
        return self

    @property
    def template_options(self) -> dict[str, Any]:
        """Variables of the chat template. Keys are their names."""
        return {}

    @property
    def template_tools(self) -> list[dict[str, Any]]:
        """Tool definitions for the chat template, which puts them into the prompt."""
        return []

    @property
    def callable_tools(self) -> list[Tool]:
        """Tools that the answer may call."""
        return []

    @property
    def required_call_candidates(self) -> list[Tool] | None:
        """The tools of which the answer must call at least one; None if it need not call a tool."""
        return None

    @property
    def allows_several_required_calls(self) -> bool:
        """Whether an answer that must call a tool may contain several calls."""
        return False

    @property
    def response_schema(self) -> str | None:
        """The JSON schema of `response_format` as JSON text; None if there is no such schema."""
        return None

    @property
    def output_token_limit(self) -> int | None:
        """The maximum number of generated tokens; None means up to the server's limit."""
        raise NotImplementedError

    @property
    def logprob_alternatives(self) -> int | None:
        """Number of most likely tokens per position whose log-probabilities are returned.

        None means that no log-probabilities are returned. 0 means that only those of the generated
        tokens are returned.
        """
        raise NotImplementedError

    def prompts(self) -> list[Any]:
        """Return the prompts of the request.

        Each prompt is a text, a list of token ids, or a list of chat messages.
        """
        raise NotImplementedError

    def grammar_options(self) -> dict[str, str]:
        """Return the option of `SamplingOptions` that constrains the output, as {name: value}.

        Returns an empty dictionary if the request has no constraint. Raises ValueError if it has
        more than one.
        """
        choice_grammar = None
        if self.guided_choice:
            choice_grammar = "start: " + " | ".join(map(json.dumps, self.guided_choice))
        # Keys are fields of the request. Values are (option of `SamplingOptions`, its value).
        constraints = {
            "guided_json": ("json_schema", self.guided_json),
            "guided_regex": ("regex", self.guided_regex),
            "guided_choice": ("grammar", choice_grammar),
            "guided_grammar": ("grammar", self.guided_grammar),
            "response_format": ("json_schema", self.response_schema),
        }
        options = {}
        fields = []
        for field, (option, value) in constraints.items():
            if value is not None:
                options[option] = value
                fields.append(field)
        if len(fields) > 1:
            raise ValueError(
                f"the request has {' and '.join(fields)}, but an answer can follow only one of "
                "these constraints: keep one and remove the others"
            )
        return options

    def to_sampling_options(self, max_new_tokens: int, index: int) -> SamplingOptions:
        """Return the options with which the engine generates one answer to the request.

        If the field `seed` is null, the sampling seed is random. Otherwise the sampling seed is
        derived from the field and from `index`, so that every answer has a different one.

        index: number of the answer in the request
        """
        seed = random.getrandbits(62) if self.seed is None else derive_seed(self.seed, index)
        shared_options: dict[str, Any] = self.model_dump(
            include=REQUEST_FIELDS_COPIED_TO_SAMPLING_OPTIONS
        )
        grammar_options: dict[str, Any] = self.grammar_options()
        return SamplingOptions(
            max_new_tokens,
            seed=seed,
            top_k=max(0, self.top_k),
            logprobs=self.logprob_alternatives,
            **shared_options,
            **grammar_options,
        )


class PromptRequest(CompletionRequest):
    """The body of a request to /v1/completions."""

    prompt: Annotated[
        TokenIds
        | Annotated[list[str], FAIL_FAST_LIST_FIELD]
        | Annotated[list[TokenIds], FAIL_FAST_LIST_FIELD],
        BeforeValidator(normalise_prompts),
        Field(min_length=1),
    ]
    logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def output_token_limit(self) -> int | None:
        return self.max_tokens or DEFAULT_COMPLETION_TOKENS

    @property
    def logprob_alternatives(self) -> int | None:
        return self.logprobs

    def prompts(self) -> list[Any]:
        is_token_ids = isinstance(self.prompt[0], int)
        return [self.prompt] if is_token_ids else self.prompt


class ChatRequest(CompletionRequest):
    """The body of a request to /v1/chat/completions."""

    is_chat: ClassVar[bool] = True
    messages: list[Message] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    # Field of vLLM: keys are names of chat template variables, values are their values
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, max_length=32)
    response_format: ResponseFormat | None = None
    tools: list[ToolDefinition] = Field(default_factory=list, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    # whether an answer that must call a tool may contain several calls
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def check_combinations(self) -> "ChatRequest":
        """Raise ValueError for fields that contradict each other, or that would have no effect."""
        if self.top_logprobs and not self.logprobs:
            raise ValueError(
                "top_logprobs works with logprobs=true only: add logprobs=true, or remove "
                "top_logprobs"
            )
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise ValueError(
                "max_tokens is the old name of max_completion_tokens, and the two have different "
                "values: remove max_tokens"
            )
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise ValueError("tools: two tools have the same name; give every tool its own name")
        if self.required_call_candidates == []:
            raise ValueError(
                "tool_choice requires a tool that is not in tools: add the tool, or use "
                'tool_choice="auto"'
            )
        if self.required_call_candidates is not None:
            options = list(self.grammar_options())
            if options:
                raise ValueError(
                    "tool_choice: an answer that must call a tool cannot also follow the "
                    f"constraint {options[0]}; remove one of the two from the request"
                )
        return self

    @property
    def template_options(self) -> dict[str, Any]:
        return self.chat_template_kwargs

    @property
    def template_tools(self) -> list[dict[str, Any]]:
        if self.tool_choice == "none":
            return []
        return [tool.model_dump(exclude={"function": {"strict"}}) for tool in self.tools]

    @property
    def callable_tools(self) -> list[Tool]:
        if self.tool_choice == "none":
            return []
        return [Tool(tool.function.name, tool.function.parameters) for tool in self.tools]

    @property
    def required_call_candidates(self) -> list[Tool] | None:
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            return [tool for tool in self.callable_tools if tool.name == name]
        return self.callable_tools if self.tool_choice == "required" else None

    @property
    def allows_several_required_calls(self) -> bool:
        return self.parallel_tool_calls and self.tool_choice == "required"

    @property
    def response_schema(self) -> str | None:
        if self.response_format is None or self.response_format.type == "text":
            return None
        any_object = {"type": "object"}
        return json.dumps(self.response_format.json_schema.get("schema", any_object))

    @property
    def output_token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def logprob_alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def prompts(self) -> list[Any]:
        return [[message.to_template_message() for message in self.messages]]
