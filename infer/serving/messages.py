"""Chat messages and tools of OpenAI's HTTP API, as pydantic models."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from infer.serving.regeneration_task import parse_call_arguments

# This field setting makes pydantic stop at the first invalid element of a list. A list may have
# 100,000 elements, and an error for each would be too much.
FAIL_FAST_LIST_FIELD = Field(fail_fast=True)
MAX_TOOL_CALLS_PER_REQUEST_MESSAGE = 128  # maximum number of tool calls in one message


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    parameters: JSON schema of the function's arguments
    """

    name: str
    parameters: dict


class StrictModel(BaseModel):
    """Base class for objects of a request in which an unknown field is an error.

    An error is better than an option that is ignored silently. A field with the value null counts
    as missing. An unknown field is accepted if its value has no effect, which means null, false, 0
    or an empty value. Values are not converted, so that true, for example, is not a number.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def drop_neutral_fields(cls, fields: Any) -> Any:
        """Remove known fields with the value null, and unknown fields whose value has no effect.

        Of the remaining unknown fields, only the first one is kept. pydantic reports it as an
        error.
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
    """Base class for parts of a chat message, in which unknown fields are ignored, as in vLLM.

    Clients send earlier answers back as they received them. Answers of other servers may contain
    additional fields, such as annotations.
    """

    model_config = ConfigDict(extra="ignore", strict=True)


class TextPart(LenientModel):
    """A part of a message that is text."""

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
    """The name of a called function, and the arguments of the call as JSON text."""

    name: str
    arguments: str = "{}"


class ToolCall(LenientModel):
    """A tool call in an assistant message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall

    def to_template_call(self) -> dict[str, Any]:
        """Return the call as chat templates read it, with the arguments as a Python object."""
        arguments = parse_call_arguments(self.function.model_dump())
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class Message(LenientModel):
    """A message of a chat.

    An answer that this server or another one has sent is accepted unchanged as a message.
    """

    role: str
    content: str | Annotated[list[ContentPart], FAIL_FAST_LIST_FIELD] = ""
    refusal: str | None = None  # OpenAI sends this instead of the content
    reasoning_content: str | None = None  # the reasoning, as this server names it
    reasoning: str | None = None  # the reasoning, as vLLM names it
    thinking: str | None = None  # the reasoning, as Ollama names it
    name: str | None = None  # the name of the chat participant
    tool_calls: list[ToolCall] | None = Field(None, max_length=MAX_TOOL_CALLS_PER_REQUEST_MESSAGE)
    tool_call_id: str | None = None  # id of the call whose result a message with role "tool" has
    # A spoken answer has no text that the chat template could use, so it is refused.
    audio: None = None
    function_call: None = None  # the predecessor of tool_calls in OpenAI's API; it is refused

    @model_validator(mode="before")
    @classmethod
    def require_content(cls, fields: Any) -> Any:
        """Raise ValueError if a message of another role than assistant has no field "content".

        Unknown fields are ignored, so a misspelt "content" would otherwise not be noticed.
        """
        if not isinstance(fields, dict):
            return fields
        if "content" not in fields and fields.get("role") != "assistant":
            raise ValueError('the message has no field "content": add it')
        return fields

    @property
    def any_reasoning(self) -> str | None:
        """The reasoning, from whichever of the three fields for reasoning is set."""
        return self.reasoning_content or self.reasoning or self.thinking

    def to_template_message(self) -> dict[str, Any]:
        """Return the message as a dictionary for the chat template.

        The reasoning has the key "reasoning_content". If the template reads reasoning from another
        place, `place_reasoning` moves it there later.
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
    # This field has no effect. Calls that tool_choice requires always follow the schema of the
    # parameters, and other calls are generated without a schema.
    strict: bool = False


class ToolDefinition(StrictModel):
    """A tool that the model may call. Functions are the only supported type of tool."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(StrictModel):
    """An object that contains only the name of a function."""

    name: str


class NamedTool(StrictModel):
    """A value of the field `tool_choice` that names the tool which the answer must call."""

    type: Literal["function"]
    function: FunctionName


class ResponseFormat(StrictModel):
    """The required form of an answer.

    json_schema: an object whose key "schema" is the JSON schema of the answer; other keys have no
        effect
    """

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] = {}

    @model_validator(mode="after")
    def check_schema_and_type(self) -> "ResponseFormat":
        """Raise ValueError unless type is "json_schema" exactly if a schema is given."""
        if (self.type == "json_schema") != ("schema" in self.json_schema):
            raise ValueError(
                'response_format: type "json_schema" and json_schema.schema must be given '
                f"together (type is {self.type!r})"
            )
        return self
