"""Chat messages and tools of OpenAI's HTTP API, as pydantic models."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from infer.serving.regeneration_task import parse_call_arguments

# For lists: report the first invalid element only. A list may have 100,000 of them.
FAIL_FAST_LIST_FIELD = Field(fail_fast=True)
MAX_TOOL_CALLS_PER_MESSAGE = 128  # in one message


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    parameters: JSON schema of its arguments
    """

    name: str
    parameters: dict


class StrictModel(BaseModel):
    """An object of a request in which unknown fields are errors.

    A silently ignored option would be worse than an error. Null means the same as a missing field.
    Unknown fields are accepted if their value is neutral: null, false, 0 or empty. Values are not
    converted: true is not a number.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def drop_neutral_fields(cls, fields: Any) -> Any:
        """Remove known fields that are null and unknown fields that are neutral.

        Of the other unknown fields, one is kept, which pydantic then reports.
        """
        if not isinstance(fields, dict):
            return fields
        remaining_fields = {
            name: value
            for name, value in fields.items()
            if name in cls.model_fields and value is not None
        }
        if cls.model_config["extra"] == "forbid":
            for name, value in fields.items():
                if name not in cls.model_fields and value not in (None, False, "", [], {}):
                    remaining_fields[name] = value
                    break
        return remaining_fields


class LenientModel(StrictModel):
    """An object of a message in which unknown fields are ignored, as vLLM does.

    Clients send messages back as they received them. Other servers add fields to them, such as
    annotations.
    """

    model_config = ConfigDict(extra="ignore", strict=True)


class TextPart(LenientModel):
    """A text in a message."""

    type: Literal["text"]
    text: str


class RefusalPart(LenientModel):
    """A part of an answer that explains why the model does not answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


ContentPart = Annotated[TextPart | RefusalPart, Field(discriminator="type")]


class FunctionCall(LenientModel):
    """A function's name, and its arguments as JSON text."""

    name: str
    arguments: str = "{}"


class ToolCall(LenientModel):
    """A tool call in an assistant message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall

    def to_template_call(self) -> dict[str, Any]:
        """Return the call for a chat template, with its arguments as an object."""
        arguments = parse_call_arguments(self.function.model_dump())
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class Message(LenientModel):
    """A message of a chat. Answers of this server and of others are accepted as they were sent."""

    role: str
    content: str | Annotated[list[ContentPart], FAIL_FAST_LIST_FIELD] = ""
    refusal: str | None = None  # OpenAI sends it in place of the content
    reasoning_content: str | None = None  # name of this server
    reasoning: str | None = None  # name of vLLM
    thinking: str | None = None  # name of Ollama
    name: str | None = None  # of the participant
    tool_calls: list[ToolCall] | None = Field(None, max_length=MAX_TOOL_CALLS_PER_MESSAGE)
    tool_call_id: str | None = None  # in messages with role "tool": the call that it answers
    audio: None = None  # not supported: the words of the answer would be missing
    function_call: None = None  # not supported: OpenAI's predecessor of tool_calls

    @model_validator(mode="before")
    @classmethod
    def require_content(cls, fields: Any) -> Any:
        """Raise ValueError for a message without content, whose key may be misspelt."""
        if not isinstance(fields, dict):
            return fields
        if "content" not in fields and fields.get("role") != "assistant":
            raise ValueError("it has no content")
        return fields

    @property
    def any_reasoning(self) -> str | None:
        """The reasoning, under whatever name it was sent."""
        return self.reasoning_content or self.reasoning or self.thinking

    def to_template_message(self) -> dict[str, Any]:
        """Return the message for a chat template.

        The reasoning has the key "reasoning_content". `place_reasoning` moves it to where the
        template reads it.
        """
        content = self.content
        if not isinstance(content, str):
            content = "".join(content_part.text for content_part in content)
        message: dict[str, Any] = {"role": self.role, "content": content or self.refusal or ""}
        if self.any_reasoning:
            message["reasoning_content"] = self.any_reasoning
        if self.name:
            message["name"] = self.name
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [call.to_template_call() for call in self.tool_calls]
        return message


def make_empty_parameters_schema() -> dict[str, Any]:
    """Return the JSON schema of a function without parameters."""
    return {"type": "object", "properties": {}}


class FunctionDefinition(StrictModel):
    """A function that the model may call."""

    name: str = Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=make_empty_parameters_schema)
    # Has no effect. Calls that tool_choice requires always follow the schema; other calls are
    # generated without it.
    strict: bool = False


class ToolDefinition(StrictModel):
    """A tool. Functions are the only kind."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(StrictModel):
    """The name of a function."""

    name: str


class NamedTool(StrictModel):
    """The tool that must be called, in `tool_choice`."""

    type: Literal["function"]
    function: FunctionName


class ResponseFormat(StrictModel):
    """The required form of an answer.

    json_schema: {"schema": ...}; its other keys have no effect
    """

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] = {}

    @model_validator(mode="after")
    def check_schema_and_type(self) -> "ResponseFormat":
        """Raise ValueError for a schema without its type, or the type without a schema."""
        if (self.type == "json_schema") != ("schema" in self.json_schema):
            raise ValueError("response_format: type json_schema and json_schema.schema go together")
        return self
