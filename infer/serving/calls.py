"""Separates an answer into reasoning, content and tool calls.

A model generates all three as one text, with marks such as "<think>" around reasoning and tool
calls. The marks differ between model families. The response parser of transformers separates the
text. It needs a description of the marks, which is called a response template. The response
template comes from the tokenizer or, if the tokenizer has none, from `TOOL_CALL_FORMATS`.

If a request requires a tool call, a grammar constrains the answer. The grammar is built from an
entry of `TOOL_CALL_FORMATS`.
"""

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from transformers.utils.chat_parsing import ResponseParser

from infer.serving.messages import Tool
from infer.serving.regeneration_task import opens_reasoning
from infer.utils.chat_template import tool_arguments_to_json

# Names that response templates of transformers use for the reasoning
REASONING_FIELDS_OF_RESPONSE_TEMPLATES = ("reasoning_content", "thinking")
# Marks of reasoning and tool calls. Some tokenizers have them as special tokens.
REASONING_AND_TOOL_CALL_MARKS = {
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
}
# Options of llguidance that allow only the white space which models usually generate in JSON
LLGUIDANCE_JSON_WHITESPACE_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
# Keys of a JSON schema that contain the definitions to which "$ref" refers
JSON_SCHEMA_DEFINITION_KEYS = ("$defs", "definitions")
ANGLE_BRACKET_SPECIAL_TOKEN_PATTERN = re.compile(r"<\|?\w+\|?>")
PROMPT_TOKENS_SEARCHED_FOR_REASONING_TAG = (
    16  # "<think>" is searched in this number of tokens at the end of a prompt
)


@dataclass(frozen=True)
class FamilyAnswerFormat:
    """How a family of models marks reasoning and tool calls in the text of an answer.

    template_marker: a text that all chat templates of the family contain
    call_field: how tool calls are marked, as the field "tool_calls" in a response template of
        transformers; None if the family does not call tools
    arguments_key: the key that contains the arguments, if a tool call is a JSON object; None if
        tool calls are not JSON
    call_delimiters: the mark before each tool call and the mark after it
    allows_several: whether an answer may contain several tool calls
    """

    template_marker: str
    call_field: dict | None = None
    arguments_key: str | None = None
    call_delimiters: tuple[str, str] = ("", "")
    allows_several: bool = True

    @property
    def response_template_fields(self) -> dict:
        """The entry "fields" of a response template of transformers for this family.

        With these fields, the response parser returns a tool call as text and does not parse it as
        JSON. A call that is not valid JSON is therefore not lost.
        """
        fields: dict[str, dict] = {
            "reasoning_content": {"open": "<think>", "close": "</think>"},
            "content": {},
        }
        if self.call_field:
            defaults = {"repeats": True, "content_args": {"strip": False}}
            fields["tool_calls"] = defaults | self.call_field
        return fields


# Keys are names of formats. The first format whose `template_marker` is in the chat template of a
# model is used.
TOOL_CALL_FORMATS = {
    # The format of Qwen3-Coder and Qwen3.5
    "tags": FamilyAnswerFormat(
        "<function=",
        {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
            },
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
    ),
    # The format of Hermes, Qwen2.5 and Qwen3
    "hermes": FamilyAnswerFormat(
        "<tool_call>",
        {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>"},
        "arguments",
        ("<tool_call>\n", "\n</tool_call>"),
    ),
    "llama3": FamilyAnswerFormat(
        "ipython",
        {"open_pattern": r"\A\s*(?:<\|python_tag\|>)?(?=\{)"},
        "parameters",
        allows_several=False,
    ),
    "reasoning": FamilyAnswerFormat("<think>"),
}


def build_call_schema(tool: Tool, arguments_key: str) -> dict:
    """Return the JSON schema of a call of the tool.

    The call has the form {"name": tool.name, arguments_key: arguments}. If the schema of the
    arguments contains definitions, it refers to them by paths such as "#/$defs/Item". The
    definitions are copied to the top level of the returned schema, so that these paths stay valid.
    """
    schema = {
        "type": "object",
        "properties": {"name": {"const": tool.name}, arguments_key: tool.parameters},
        "required": ["name", arguments_key],
        "additionalProperties": False,
        "x-guidance": LLGUIDANCE_JSON_WHITESPACE_OPTIONS,
    }
    for key in JSON_SCHEMA_DEFINITION_KEYS:
        if key in tool.parameters:
            schema[key] = tool.parameters[key]
    return schema


def to_lark_literal(text: str, special_tokens: Sequence[str] = ()) -> str:
    """Return a text as an expression of a Lark grammar that matches exactly this text.

    special_tokens: special tokens of the tokenizer. In the expression, they are written without
        quotes, as llguidance requires, and all other text is written in quotes
    """
    if not special_tokens:
        return json.dumps(text) if text else ""
    separator = "(" + "|".join(map(re.escape, special_tokens)) + ")"
    literals = []
    for piece in re.split(separator, text):
        if piece:
            literals.append(piece if piece in special_tokens else json.dumps(piece))
    return " ".join(literals)


def parse_json_calls(body: str) -> list[dict]:
    """Parse a text that contains one or more tool calls in JSON, one after another.

    Returns a dictionary with the keys "name" and "arguments" for each call. Raises ValueError,
    KeyError or TypeError if the text is not a sequence of calls.
    """
    calls = []
    decoder = json.JSONDecoder()
    body = body.strip()
    while body:
        call, end = decoder.raw_decode(body)
        arguments = call.get("arguments", call.get("parameters", {}))
        calls.append({"name": call["name"], "arguments": arguments})
        body = body[end:].lstrip("; \n")
    return calls


@dataclass(frozen=True)
class AnswerFormat:
    """How the answers of one model are parsed, and how its tool calls are constrained.

    call_format: the format of the model's family; None if the family is unknown
    response_template: the response template of the tokenizer; None if the tokenizer has none
    """

    tokenizer: Any
    call_format: FamilyAnswerFormat | None
    response_template: dict | None = None

    @property
    def needs_special_tokens(self) -> bool:
        """Whether the text of answers must include special tokens, because special tokens mark the
        reasoning or the tool calls.
        """
        if self.response_template is not None:
            return True
        return not REASONING_AND_TOOL_CALL_MARKS.isdisjoint(self.tokenizer.all_special_tokens)

    def prompt_opens_reasoning(self, prompt: list[int]) -> bool:
        """Return whether a prompt ends with "<think>", so that the answer begins with reasoning.

        prompt: token ids
        """
        return opens_reasoning(
            self.tokenizer.decode(prompt[-PROMPT_TOKENS_SEARCHED_FOR_REASONING_TAG:])
        )

    def parser_prefix(self, prompt: list[int]) -> str:
        """Return the text that the response parser must read before the answer.

        If the tokenizer has a response template, this text is the whole prompt. Otherwise it is
        "<think>" if the prompt ends with "<think>", else an empty string.

        prompt: token ids
        """
        if self.response_template is not None:
            return self.tokenizer.decode(prompt)
        return "<think>" if self.prompt_opens_reasoning(prompt) else ""

    def create_parser(self, tools: Sequence[Tool], prompt: list[int]) -> "AnswerParser":
        """Return a parser for one answer to a prompt.

        tools: the tools that the answer may call
        prompt: token ids
        """
        return AnswerParser(self, tools, self.parser_prefix(prompt))

    def build_response_template(self, includes_calls: bool) -> dict:
        """Return the response template with which transformers parses an answer.

        includes_calls: whether tool calls are separated from the content; if false, they are left
            in the content as text
        """
        template: dict[str, Any] | None = self.response_template
        if template is None:
            assert self.call_format is not None
            template = {
                "start_anchor_pattern": r"\A",
                "fields": self.call_format.response_template_fields,
            }
        fields = dict(template["fields"])
        if not includes_calls:
            fields.pop("tool_calls", None)
        return template | {"fields": fields}

    def build_tool_call_grammar(
        self, tools: Sequence[Tool], allows_several: bool, reasoning_is_open: bool
    ) -> str:
        """Return a Lark grammar for answers that call one of the tools.

        If the chat template supports reasoning, the answer may contain reasoning before the call.

        allows_several: whether the answer may contain several calls
        reasoning_is_open: whether the prompt ends with "<think>"

        Raises ValueError if the format of the model's tool calls is unknown.
        """
        call_format = self.call_format
        if call_format is None or call_format.arguments_key is None:
            raise ValueError(
                "tool_choice requires a tool call, but the format of this model's tool calls is "
                'unknown: use tool_choice="auto"'
            )
        special_tokens = [
            token
            for token in self.tokenizer.all_special_tokens
            if ANGLE_BRACKET_SPECIAL_TOKEN_PATTERN.fullmatch(token)
        ]
        opening, closing = call_format.call_delimiters
        opening = to_lark_literal(opening, special_tokens)
        closing = to_lark_literal(closing, special_tokens)
        call_names = " | ".join(f"call{i}" for i in range(len(tools)))
        rules = [f"call: {opening} ({call_names}) {closing}"]
        for i, tool in enumerate(tools):
            schema = build_call_schema(tool, call_format.arguments_key)
            rules.append(f"call{i}: %json {json.dumps(schema)}")

        reasoning = ""
        if reasoning_is_open or "<think>" in str(self.tokenizer.get_chat_template()):
            if reasoning_is_open:
                reasoning = "reasoning "
                reasoning_start = ""
            else:
                reasoning = "reasoning? "
                reasoning_start = to_lark_literal("<think>", special_tokens)
            rules.append('reasoning_text[suffix="</think>"]: /(?s:.*)/')
            rules.append(rf"reasoning: {reasoning_start} reasoning_text /\s{{0,2}}/")
        more_calls = ' ("\\n" call)*' if allows_several and call_format.allows_several else ""
        return "\n".join([f"start: {reasoning}call{more_calls}", *rules])


def find_answer_format(tokenizer: Any) -> AnswerFormat | None:
    """Return the `AnswerFormat` of a model, from its tokenizer.

    Returns None if the tokenizer has no chat template, or if neither the chat template nor a
    response template shows how the model marks reasoning or tool calls. The answers of such a model
    are returned as content only.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    chat_template = str(tokenizer.get_chat_template())
    matching_formats = (
        call_format
        for call_format in TOOL_CALL_FORMATS.values()
        if call_format.template_marker in chat_template
    )
    call_format = next(matching_formats, None)
    response_template = getattr(tokenizer, "response_template", None)
    if call_format is None and response_template is None:
        return None
    return AnswerFormat(tokenizer, call_format, response_template)


@dataclass
class AnswerParser:
    """Parses one answer piece by piece while it is generated.

    `parse` takes the next piece of text and returns what it adds to the message, as a "delta" of
    OpenAI's API.

    prefix: the text that the parser reads before the answer, see `AnswerFormat.parser_prefix`
    call_count: number of the answer's tool calls that are already parsed
    call_body: the text that has arrived of a tool call that is not complete yet
    trailing_spaces: keys are "content" and "reasoning_content". Values are white space at the end
        of these fields that was not returned yet. It is returned only if more text follows
    started_fields: names of the fields that already have text
    is_broken: whether the parser has failed on the answer; all further text is then content
    """

    answer_format: AnswerFormat
    tools: Sequence[Tool]
    prefix: str
    call_count: int = 0
    call_body: str = ""
    trailing_spaces: dict[str, str] = field(default_factory=dict)
    started_fields: set[str] = field(default_factory=set)
    is_broken: bool = False

    def __post_init__(self) -> None:
        template = self.answer_format.build_response_template(bool(self.tools))
        tools = cast(list[Any], [vars(tool) for tool in self.tools])
        self.parser = ResponseParser(template, prefix=self.prefix, tools=tools)
        self.has_reasoning = any(
            event["field"] in REASONING_FIELDS_OF_RESPONSE_TEMPLATES
            for event in self.parser.initial_events
        )

    def parse(self, text: str, is_final: bool) -> dict:
        """Return what the next piece of text adds to the message, as a delta of OpenAI's API.

        is_final: whether the answer ends after this text
        """
        events = []
        if not self.is_broken:
            try:
                events = self.parser.feed(text)
                if is_final:
                    events += self.parser.finalize()[1]
            except (ValueError, KeyError, TypeError):
                # The tokenizer's response template does not match the text, so the text becomes
                # content.
                self.is_broken = True
                text = self.call_body + text
                self.call_body = ""
        if self.is_broken:
            return {"content": text} if text else {}

        delta: dict = {}
        for event in events:
            if event["field"] == "tool_calls":
                self._parse_call(event, delta)
            elif event["type"] == "region_chunk":
                self._parse_text(event["field"], event["text"], delta)
        if is_final and not self.call_count and self.trailing_spaces.get("content"):
            append_text(delta, "content", self.trailing_spaces["content"])
        return delta

    def _parse_text(self, field: str, text: str, delta: dict) -> None:
        """Append text of the field `field` to the reasoning or to the content of the delta.

        White space is dropped before and after the reasoning, and between the content and tool
        calls.
        """
        name = "reasoning_content" if field in REASONING_FIELDS_OF_RESPONSE_TEMPLATES else "content"
        if name == "reasoning_content":
            self.has_reasoning = True
        text = self.trailing_spaces.pop(name, "") + text
        if name not in self.started_fields and (self.has_reasoning or self.call_count):
            text = text.lstrip()
        stripped_text = text.rstrip()
        self.trailing_spaces[name] = text[len(stripped_text) :]
        if stripped_text:
            self.started_fields.add(name)
            append_text(delta, name, stripped_text)

    def _parse_call(self, event: dict, delta: dict) -> None:
        """Handle an event of the response parser that belongs to a tool call.

        When the text of the call is complete, the call is added to the delta. Text that is not a
        valid call is added as content.
        """
        if event["type"] == "region_chunk":
            self.call_body += event["text"]
        if event["type"] != "region_close":
            return
        body = self.call_body
        self.call_body = ""
        functions = []
        try:
            value = event["value"]
            calls = parse_json_calls(body) if isinstance(value, str) else [value["function"]]
            for call in calls:
                arguments = tool_arguments_to_json(call["arguments"])
                functions.append({"name": call["name"], "arguments": arguments})
        except (ValueError, KeyError, TypeError, AttributeError):
            append_text(delta, "content", body)
            return
        for function in functions:
            call_delta = {
                "index": self.call_count,
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": function,
            }
            delta.setdefault("tool_calls", []).append(call_delta)
            self.call_count += 1


def append_text(delta: dict, field: str, text: str) -> None:
    """Append text to a field of a delta, and create the field if it is missing.

    A delta is what a piece of text adds to a message.
    """
    delta[field] = delta.get(field, "") + text
