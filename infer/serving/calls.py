"""What an answer is made of: thoughts, words, and calls of tools.

A model writes all of these as one text, each between marks of its family. transformers' response
parser tells them apart, by the tokenizer's own `response_template` where it has one, else by a row
of `FORMATS` whose mark the chat template has. Calls that a request demands are written under a
grammar of the same row.
"""

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers.utils.chat_parsing import ResponseParser

from infer.serving.dialogue import opens_thought
from infer.serving.protocol import Tool
from infer.utils.chat_template import arguments_text

THOUGHTS = ("reasoning_content", "thinking")  # names that response templates have for thoughts
MARKS = {
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
}  # which may be special tokens
# JSON as models learnt it
SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True)
class Format:
    """How a family of models marks thoughts and calls."""

    mark: str  # in its chat template
    calls: dict | None = None  # their field of a response template; None: it makes none
    key: str | None = (
        None  # under which calls in JSON have their arguments; None: calls are no JSON
    )
    around: tuple[str, str] = ("", "")  # what stands before and behind a call
    several: bool = True  # whether calls may follow each other

    @property
    def fields(self) -> dict:
        """Return the fields of a response template. The body of calls stays a text: what is no JSON
        must not be lost."""
        fields = {"reasoning_content": {"open": "<think>", "close": "</think>"}, "content": {}}
        called = {"repeats": True, "content_args": {"strip": False}} | (self.calls or {})
        return fields | ({"tool_calls": called} if self.calls else {})


# The first row whose mark is there.
FORMATS = {
    "tags": Format(  # Qwen3-Coder, Qwen3.5
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
    "hermes": Format(  # Hermes, Qwen2.5, Qwen3
        "<tool_call>",
        {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>"},
        "arguments",
        ("<tool_call>\n", "\n</tool_call>"),
    ),
    "llama3": Format(
        "ipython",
        {"open_pattern": r"\A\s*(?:<\|python_tag\|>)?(?=\{)"},
        "parameters",
        several=False,
    ),
    "thoughts": Format("<think>"),
}


def call_schema(tool: Tool, arguments_key: str) -> dict:
    """Return the JSON schema of a call of a tool: its name and, under a key, its arguments. What
    the parameters refer to stands at the schema's top."""
    properties = {"name": {"const": tool.name}, arguments_key: tool.parameters}
    schema = {"type": "object", "properties": properties, "required": ["name", arguments_key]}
    shared = {
        key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters
    }
    return schema | {"additionalProperties": False, "x-guidance": SPACED} | shared


def quoted(text: str, special: Sequence[str] = ()) -> str:
    """Return text in Lark's syntax, special tokens as such."""
    parts = re.split("(" + "|".join(map(re.escape, special)) + ")", text) if special else [text]
    return " ".join(part if part in special else json.dumps(part) for part in parts if part)


def calls_in(body: str) -> list[dict]:
    """Read calls in JSON, one behind the other, as {"name", "arguments"}. Raises ValueError,
    KeyError or TypeError."""
    found = []
    decoder = json.JSONDecoder()
    body = body.strip()
    while body:
        call, end = decoder.raw_decode(body)
        found.append(
            {"name": call["name"], "arguments": call.get("arguments", call.get("parameters", {}))}
        )
        body = body[end:].lstrip("; \n")
    return found


@dataclass(frozen=True)
class Reading:
    """How the answers of one model are read. own: the tokenizer's response template."""

    tokenizer: object
    format: Format | None
    own: dict | None = None

    @property
    def special(self) -> bool:
        """Whether texts must be read with their special tokens, since marks are among them."""
        return self.own is not None or not MARKS.isdisjoint(self.tokenizer.all_special_tokens)

    def thinks(self, prompt: list[int]) -> bool:
        """Return whether a prompt has opened the thought that the answer begins with."""
        return opens_thought(self.tokenizer.decode(prompt[-16:]))

    def prefix(self, prompt: list[int]) -> str:
        """Return what of a prompt the answer's parser is to see: the thought that it opens, or all
        of it for the tokenizer's own response template."""
        if self.own is not None:
            return self.tokenizer.decode(prompt)
        return "<think>" if self.thinks(prompt) else ""

    def reader(self, tools: Sequence[Tool], prompt: list[int]) -> "AnswerReader":
        """Return a reader of one answer to a prompt, which may call these tools."""
        return AnswerReader(self, tools, self.prefix(prompt))

    def template(self, calls: bool) -> dict:
        """Return the response template; without `calls` these are words like all others."""
        template = self.own or {"start_anchor_pattern": r"\A", "fields": self.format.fields}
        fields = {
            name: rule for name, rule in template["fields"].items() if calls or name != "tool_calls"
        }
        return template | {"fields": fields}

    def grammar(self, tools: Sequence[Tool], several: bool, thinking: bool) -> str:
        """Return the grammar of an answer that is a call of one of these tools, or `several`,
        behind a thought where the model thinks; `thinking`: the prompt has opened one. Raises
        ValueError where that is not known here."""
        form = self.format
        if form is None or form.key is None:
            raise ValueError("tool_choice: how this model writes calls is not known here, use auto")
        special = [
            token
            for token in self.tokenizer.all_special_tokens
            if re.fullmatch(r"<\|?\w+\|?>", token)
        ]
        begin, end = (quoted(part, special) for part in form.around)
        names = " | ".join(f"call{i}" for i in range(len(tools)))
        more = ' ("\\n" call)*' if several and form.several else ""
        rules = [f"call: {begin} ({names}) {end}"]
        rules += [
            f"call{i}: %json {json.dumps(call_schema(tool, form.key))}"
            for i, tool in enumerate(tools)
        ]
        thought = ""
        if thinking or "<think>" in str(self.tokenizer.get_chat_template()):
            thought = "thought " if thinking else "thought? "
            rules.append('thinking[suffix="</think>"]: /(?s:.*)/')
            rules.append(
                rf"thought: {'' if thinking else quoted('<think>', special)} thinking /\s{{0,2}}/"
            )
        return "\n".join([f"start: {thought}call{more}", *rules])


def reading_of(tokenizer: object) -> Reading | None:
    """Return how a model's answers are read; None where they are words alone, as far as is known
    here."""
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    template = str(tokenizer.get_chat_template())
    form = next((form for form in FORMATS.values() if form.mark in template), None)
    own = getattr(tokenizer, "response_template", None)
    return None if form is None and own is None else Reading(tokenizer, form, own)


@dataclass
class AnswerReader:
    """Reads one answer. `read` takes what is new of its text and returns what is new of its parts,
    as OpenAI's deltas have them. prefix: what the parser is to see before it."""

    reading: Reading
    tools: Sequence[Tool]
    prefix: str
    calls: int = 0  # that were begun
    body: str = ""  # of the call in work
    # by part, at its end so far: they may turn out its very end
    spaces: dict[str, str] = field(default_factory=dict)
    begun: set[str] = field(default_factory=set)  # parts that have words
    broken: bool = False

    def __post_init__(self) -> None:
        template = self.reading.template(bool(self.tools))
        tools = [vars(tool) for tool in self.tools]
        self.parser = ResponseParser(template, prefix=self.prefix, tools=tools)
        self.thought = any(event["field"] in THOUGHTS for event in self.parser.initial_events)

    def read(self, text: str, final: bool) -> dict:
        """Return the delta that `text` adds; `final`: the answer ends behind it."""
        delta: dict = {}
        try:
            events = [] if self.broken else self.parser.feed(text)
            events += self.parser.finalize()[1] if final and not self.broken else []
        except (
            ValueError,
            KeyError,
            TypeError,
        ):  # no call, under the tokenizer's own template: words from here on
            self.broken = True
            text = self.body + text
            self.body = ""
            events = []
        if self.broken:
            return {"content": text} if text else {}
        for event in events:
            if event["field"] == "tool_calls":
                self._take_call(event, delta)
            elif event["type"] == "region_chunk":
                self._take_words(event["field"], event["text"], delta)
        if final and not self.calls and self.spaces.get("content"):
            add(delta, "content", self.spaces["content"])
        return delta

    def _take_words(self, field: str, text: str, delta: dict) -> None:
        """Add to a thought or to the words; spaces around thoughts, and between words and calls,
        are nobody's."""
        name = "reasoning_content" if field in THOUGHTS else "content"
        self.thought |= name != "content"
        text = self.spaces.pop(name, "") + text
        if name not in self.begun and (self.thought or self.calls):
            text = text.lstrip()
        solid = text.rstrip()
        self.spaces[name] = text[len(solid) :]
        if solid:
            self.begun.add(name)
            add(delta, name, solid)

    def _take_call(self, event: dict, delta: dict) -> None:
        """Add a call at its end; one that cannot be read is words."""
        if event["type"] == "region_chunk":
            self.body += event["text"]
        if event["type"] != "region_close":
            return
        body = self.body
        self.body = ""
        try:
            value = event["value"]
            called = calls_in(body) if isinstance(value, str) else [value["function"]]
            found = [
                {"name": call["name"], "arguments": arguments_text(call["arguments"])}
                for call in called
            ]
        except (ValueError, KeyError, TypeError, AttributeError):
            return add(delta, "content", body)
        for call in found:
            named = {"index": self.calls, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
            delta.setdefault("tool_calls", []).append(named | {"function": call})
            self.calls += 1


def add(delta: dict, name: str, text: str) -> None:
    """Add words to a part of a delta."""
    delta[name] = delta.get(name, "") + text
