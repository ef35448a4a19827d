"""Chat messages and tools in requests of OpenAI's HTTP API, as pydantic models."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from infer.serving.regeneration_task import parse_call_arguments

# Makes pydantic stop at the first invalid element of a list. Otherwise it would report an error for
# every invalid element, and a request may contain 100,000 of them.
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
    """Base class for parts of a request in which an unknown field is an error.

    Without this error, the server would silently ignore an option of the client. An unknown field
    is accepted only if its value has no effect: null, false, 0 or an empty value. A known field
    with the value null counts as missing. Values are not converted: true, for example, is not
    accepted as a number.
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

    Clients send earlier answers back in their next request. Answers of other servers may contain
    additional fields, such as annotations.
    """

    model_config = ConfigDict(extra="ignore", strict=True)


class TextPart(LenientModel):
    """A text in a message whose content is a list of parts."""

    type: Literal["text"]
    text: str


class RefusalPart(LenientModel):
    """The text of a refusal, in a message whose content is a list of parts."""

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
        """Return the call as a dictionary for the chat template, with the arguments as a Python
        object.
        """
        arguments = parse_call_arguments(self.function.model_dump())
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class Message(LenientModel):
    """A message of a chat.

    An answer of this server, or of another server with OpenAI's API, can be sent back unchanged as
    a message.
    """

    role: str
    content: str | Annotated[list[ContentPart], FAIL_FAST_LIST_FIELD] = ""
    refusal: str | None = None  # in answers of OpenAI's models: why the model did not answer
    reasoning_content: str | None = None  # the reasoning in answers of this server
    reasoning: str | None = None  # the reasoning in answers of vLLM
    thinking: str | None = None  # the reasoning in answers of Ollama
    name: str | None = None  # the name of the chat participant
    tool_calls: list[ToolCall] | None = Field(None, max_length=MAX_TOOL_CALLS_PER_REQUEST_MESSAGE)
    tool_call_id: str | None = None  # if the role is "tool": id of the call that has this result
    # Only null is accepted: audio has no text that the chat template could use.
    audio: None = None
    # Only null is accepted: tool_calls has replaced this field in OpenAI's API.
    function_call: None = None

    @model_validator(mode="before")
    @classmethod
    def require_content_except_assistant(cls, fields: Any) -> Any:
        """Raise ValueError if a message of another role than assistant has no field "content".

        Unknown fields are ignored, so a misspelt "content" would otherwise not be noticed.
        """
        if not isinstance(fields, dict):
            return fields
        if "content" not in fields and fields.get("role") != "assistant":
            raise ValueError(
                'the message has no field "content", which only role "assistant" may omit: add it'
            )
        return fields

    @property
    def any_reasoning(self) -> str | None:
        """The first of `reasoning_content`, `reasoning` and `thinking` that is set."""
        return self.reasoning_content or self.reasoning or self.thinking

    def to_template_message(self) -> dict[str, Any]:
        """Return the message as a dictionary for the chat template.

        The reasoning has the key "reasoning_content". `place_reasoning` moves it later if the
        template expects it elsewhere.
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
    """A function that the model may call, as the request defines it."""

    name: str = Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=make_empty_parameters_schema)
    # This field has no effect. The arguments of a call always follow the schema `parameters` if
    # tool_choice requires the call, and are not constrained otherwise.
    strict: bool = False


class ToolDefinition(StrictModel):
    """An entry of the request field `tools`. Functions are the only supported type of tool."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(StrictModel):
    """The field `function` of `NamedTool`, which contains only a name."""

    name: str


class NamedTool(StrictModel):
    """A value of the request field `tool_choice`. It names the tool that the answer must call."""

    type: Literal["function"]
    function: FunctionName


class ResponseFormat(StrictModel):
    """The request field `response_format`, which constrains the content of an answer.

    json_schema: an object whose key "schema" is the JSON schema of the answer; its other keys have
        no effect
    """

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] = {}

    @model_validator(mode="after")
    def check_schema_and_type(self) -> "ResponseFormat":
        """Raise ValueError if the type and the schema do not fit together.

        The type "json_schema" needs a schema. The other types must not have one.
        """
        if (self.type == "json_schema") != ("schema" in self.json_schema):
            raise ValueError(
                'response_format: type "json_schema" requires json_schema.schema, and other '
                f"types do not allow it; the type is {self.type!r}: change the type or the schema"
            )
        return self
