"""What an answer is made of: thoughts, words, and calls of tools.

A model writes all of these as one text, each between marks of its family. transformers' response parser tells them
apart, by the tokenizer's own `response_template` where it has one, else by a row of `FORMATS` whose marks the chat
template has. Calls that a request demands are written under a grammar of the same row.
"""

import json
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from infer.serving.dialogue import opens_thought

THOUGHTS = ("reasoning_content", "thinking")  # names that response templates have for thoughts
MARKED = {"open": "<think>", "close": "</think>"}
TAG_END = "\n</parameter>\n"
SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # JSON as models learnt it


@dataclass(frozen=True)
class Tool:
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str
    parameters: dict

    @property
    def properties(self) -> dict[str, dict]:
        """Return the schemas of its parameters. Raises ValueError where there are none to be read."""
        found = self.parameters.get("properties", {})
        if not isinstance(found, dict) or not all(isinstance(schema, dict) for schema in found.values()):
            raise ValueError(
                f"tools: the parameters of {self.name} are not those of an object, as a JSON schema has them"
            )
        return found

    @property
    def shared(self) -> dict:
        """Return what its schemas refer to."""
        return {key: self.parameters[key] for key in ("$defs", "definitions") if key in self.parameters}


@dataclass(frozen=True)
class Wish:
    """Calls that an answer must be made of, of any of these tools: one, or at least one."""

    tools: tuple[Tool, ...]
    several: bool


def quoted(text: str, special: Sequence[str] = ()) -> str:
    """Return text in Lark's syntax, special tokens as such."""
    parts = re.split("(" + "|".join(map(re.escape, special)) + ")", text) if special else [text]
    return " ".join(part if part in special else json.dumps(part) for part in parts if part)


def json_rule(schema: dict) -> str:
    """Return JSON of a schema in Lark's syntax."""
    return "%json " + json.dumps(schema | {"x-guidance": SPACED})


def named_object(key: str, tool: Tool, quote: Callable[[str], str]) -> str:
    """Return the grammar of a call as JSON with a name and, under `key`, arguments."""
    schema = {"type": "object", "properties": {"name": {"const": tool.name}, key: tool.parameters}}
    return json_rule(schema | {"required": ["name", key], "additionalProperties": False} | tool.shared)


def tagged(tool: Tool, quote: Callable[[str], str]) -> str:
    """Return the grammar of a call whose parameters stand between tags, words as they are and all else as JSON."""
    required, parts = tool.parameters.get("required", ()), []
    for name, schema in tool.properties.items():
        value = "words" if of_words(schema) else f"{json_rule(schema | tool.shared)} {quote(TAG_END)}"
        parts.append(f"({quote(f'<parameter={name}>' + chr(10))} {value})" + "?" * (name not in required))
    return " ".join([quote(f"<function={tool.name}>\n"), *parts, quote("</function>")])


def of_words(schema: dict) -> bool:
    """Return whether a schema is of texts."""
    return schema.get("type") == "string" or not schema.keys() & {"type", "$ref", "anyOf", "oneOf", "allOf", "enum"}


def arguments_behind(opening: str, tool: Tool, quote: Callable[[str], str]) -> str:
    """Return the grammar of a call whose name stands in its opening."""
    return f"{quote(opening.format(tool.name))} {json_rule(tool.parameters)}"


def read_object(name: str, body: str, tools: dict[str, Tool]) -> list[dict]:
    """Read calls in JSON, one behind the other. Raises ValueError."""
    found, decoder, body = [], json.JSONDecoder(), body.strip()
    while body:
        call, end = decoder.raw_decode(body)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise ValueError("no call")
        arguments = call.get("arguments", call.get("parameters", {}))
        found.append({"name": call["name"], "arguments": in_json(arguments)})
        body = body[end:].lstrip("; \n")
    return found


def read_tags(name: str, body: str, tools: dict[str, Tool]) -> list[dict]:
    """Read a call whose parameters stand between tags."""
    properties = tools[name].properties if name in tools else {}
    arguments = {}
    for key, value in re.findall(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", body, re.DOTALL):
        try:
            arguments[key] = value if of_words(properties.get(key, {})) else json.loads(value)
        except ValueError:
            arguments[key] = value
    return [{"name": name, "arguments": in_json(arguments)}]


def read_arguments(name: str, body: str, tools: dict[str, Tool]) -> list[dict]:
    """Read a call whose body is its arguments. Raises ValueError where they are no JSON."""
    json.loads(body)
    return [{"name": name, "arguments": body.strip()}]


def in_json(arguments: object) -> str:
    """Return a call's arguments as JSON in a text, which they may be already."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


@dataclass(frozen=True)
class Format:
    """How a family of models marks thoughts and calls."""

    marks: tuple[str, ...]  # in its chat template, all of them
    fields: dict  # of a response template
    read: Callable[[str, str, dict[str, Tool]], list[dict]] = read_object
    rule: Callable[[Tool, Callable[[str], str]], str] | None = None  # of one call, in Lark's syntax
    around: tuple[str, str] = ("", "")  # what stands before and behind it
    thought: tuple[str, str] = ("<think>", "</think>")
    several: bool = True  # whether calls may follow each other

    @property
    def words(self) -> set[str]:
        """Return the marks that its texts have, as they may be special tokens."""
        return set(re.findall(r"<\|?/?\w+\|?>", json.dumps(self.fields).replace("\\\\|", "|").replace("\\\\", "")))


def call_field(open_pattern: str, **close: str) -> dict:
    """Return the field of calls, whose body stays a text: what is no JSON must not be lost."""
    named = "(?P<name>" in open_pattern
    rule = {"open_pattern": open_pattern, "repeats": True, "content_args": {"strip": False}} | close
    return rule | ({"transform": {"name": "{name}", "body": "{content}"}} if named else {})


CHANNEL = "<|channel|>"
HARMONY = {
    "reasoning_content": {"open": f"{CHANNEL}analysis<|message|>", "close": ["<|end|>", "<|return|>"]},
    "tool_calls": call_field(
        r"(?:<\|channel\|>commentary)? to=functions\.(?P<name>[\w.-]+)(?:<\|channel\|>commentary)?"
        r"\s*(?:<\|constrain\|>)?(?:json)?<\|message\|>",
        close_pattern=r"<\|call\|>",
    ),
    "content": {
        "open_pattern": r"<\|channel\|>(?:final|commentary)<\|message\|>",
        "close": ["<|end|>", "<|return|>"],
    },
}
# The first row whose marks are there: rows with more marks stand before those that have some of them.
FORMATS = {
    "harmony": Format(  # gpt-oss
        (CHANNEL, "functions."),
        HARMONY,
        read_arguments,
        partial(arguments_behind, CHANNEL + "commentary to=functions.{} <|constrain|>json<|message|>"),
        thought=(CHANNEL + "analysis<|message|>", "<|end|><|start|>assistant"),
        several=False,
    ),
    "tags": Format(  # Qwen3-Coder, Qwen3.5
        ("<tool_call>", "<function="),
        {
            "reasoning_content": MARKED,
            "tool_calls": call_field(
                r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>", close_pattern=r"</function>\s*</tool_call>"
            ),
            "content": {},
        },
        read_tags,
        tagged,
        ("<tool_call>\n", "\n</tool_call>"),
    ),
    "hermes": Format(  # Hermes, Qwen2.5, Qwen3
        ("<tool_call>",),
        {
            "reasoning_content": MARKED,
            "tool_calls": call_field(r"\s*<tool_call>", close="</tool_call>"),
            "content": {},
        },
        rule=partial(named_object, "arguments"),
        around=("<tool_call>\n", "\n</tool_call>"),
    ),
    "llama3": Format(
        ("ipython",),
        {"tool_calls": call_field(r"\A\s*(?:<\|python_tag\|>)?(?=\{)"), "content": {}},
        rule=partial(named_object, "parameters"),
        several=False,
    ),
    "thoughts": Format(("<think>",), {"reasoning_content": MARKED, "content": {}}),
}


@dataclass(frozen=True)
class Reading:
    """How the answers of one model are read. own: the tokenizer's response template."""

    tokenizer: object
    format: Format | None
    own: dict | None = None

    @property
    def special(self) -> bool:
        """Whether texts must be read with their special tokens, since marks are among them."""
        return self.own is not None or not self.format.words.isdisjoint(self.tokenizer.all_special_tokens)

    def thinks(self, prompt: list[int]) -> bool:
        """Return whether a prompt has opened the thought that the answer begins with."""
        return opens_thought(self.tokenizer.decode(prompt[-16:]))

    def prefix(self, prompt: list[int]) -> str:
        """Return what of a prompt the answer's parser is to see: the thought that it opens, or all of it for the
        tokenizer's own response template."""
        if self.own is not None:
            return self.tokenizer.decode(prompt)
        return "<think>" if self.thinks(prompt) else ""

    def template(self, calls: bool) -> dict:
        """Return the response template; without `calls` these are words like all others."""
        template = self.own or {"start_anchor_pattern": r"\A", "fields": self.format.fields}
        fields = {name: rule for name, rule in template["fields"].items() if calls or name != "tool_calls"}
        return template | {"fields": fields}

    def grammar(self, wish: Wish, thinking: bool) -> str:
        """Return the grammar of an answer that is calls, behind a thought where the model thinks; `thinking`: the
        prompt has opened one. Raises ValueError where the format is not known here."""
        form = self.format
        if form is None or form.rule is None:
            raise ValueError("tool_choice: how this model writes calls is not known here, use auto")
        special = [token for token in self.tokenizer.all_special_tokens if re.fullmatch(r"<\|?\w+\|?>", token)]
        quote = partial(quoted, special=special)
        begin, end = (quote(part) for part in form.around)
        names = " | ".join(f"call{i}" for i in range(len(wish.tools)))
        more = ' ("\\n" call)*' if wish.several and form.several else ""
        rules = [f"call: {begin} ({names}) {end}"]
        rules += [f"call{i}: {form.rule(tool, quote)}" for i, tool in enumerate(wish.tools)]
        rules.append(f"words[suffix={json.dumps(TAG_END)}]: /(?s:.*)/")
        opening, close = form.thought
        thought = ""
        if thinking or opening in str(self.tokenizer.get_chat_template()):
            thought = "thought " if thinking else "thought? "
            if any(close.startswith(token) for token in special):
                rules += [f"thinking: ANY {quote(close)}", "ANY: /(?s:.*)/"]
            else:
                rules.append(f"thinking[suffix={json.dumps(close)}]: /(?s:.*)/")
            rules.append(rf"thought: {'' if thinking else quote(opening)} thinking /\s{{0,2}}/")
        return "\n".join([f"start: {thought}call{more}", *rules])


def reading_of(tokenizer: object) -> Reading | None:
    """Return how a model's answers are read; None where they are words alone, as far as is known here."""
    if getattr(tokenizer, "chat_template", None) is None or response_parser() is None:
        return None
    template = str(tokenizer.get_chat_template())
    form = next((form for form in FORMATS.values() if all(mark in template for mark in form.marks)), None)
    own = getattr(tokenizer, "response_template", None)
    return None if form is None and own is None else Reading(tokenizer, form, own)


def response_parser() -> type | None:
    """Return transformers' parser of answers, which tells parts apart as a text grows; None in versions without."""
    try:
        from transformers.utils.chat_parsing import ResponseParser
    except ImportError:
        return None
    return ResponseParser


class Answer:
    """One answer as it is read. `read` takes what is new of its text and returns what is new of its parts, as OpenAI's
    deltas have them."""

    def __init__(self, reading: Reading, tools: Sequence[Tool], prefix: str) -> None:
        self.parser = response_parser()(reading.template(bool(tools)), prefix=prefix)
        self.form, self.tools = reading.format, {tool.name: tool for tool in tools}
        self.calls = 0  # that were begun
        self.body = ""  # of the call in work
        self.spaces: dict[str, str] = {}  # by part, at its end so far: they may turn out to be its very end
        self.begun: set[str] = set()  # parts that have words
        self.thought = any(event["field"] in THOUGHTS for event in self.parser.initial_events)
        self.broken = False

    def read(self, text: str, final: bool) -> dict:
        """Return the delta that `text` adds; `final`: the answer ends behind it."""
        delta: dict = {}
        try:
            if self.broken:
                raise ValueError
            events = self.parser.feed(text)
            events += self.parser.finalize()[1] if final else []
        except (ValueError, KeyError, TypeError):  # no call, under the tokenizer's own template: words
            self.broken, text, self.body = True, self.body + text, ""
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
        """Add to a thought or to the words; spaces around thoughts, and between words and calls, are nobody's."""
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
        body, self.body = self.body, ""
        try:
            found = self._read(event["value"], body)
        except (ValueError, KeyError, TypeError, AttributeError):
            return add(delta, "content", body)
        for call in found:
            named = {"index": self.calls, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
            delta.setdefault("tool_calls", []).append(named | {"function": call})
            self.calls += 1

    def _read(self, value: object, body: str) -> list[dict]:
        """Return the calls, {"name", "arguments"}, that a body is. Raises what `_take_call` catches."""
        if isinstance(value, dict) and "function" in value:  # the tokenizer's own template
            call = value["function"]
            return [{"name": call["name"], "arguments": in_json(call["arguments"])}]
        name = value.get("name", "") if isinstance(value, dict) else ""
        return self.form.read(name, body, self.tools)


def add(delta: dict, name: str, text: str) -> None:
    """Add words to a part of a delta."""
    delta[name] = delta.get(name, "") + text
