"""Render chats with the tokenizer's chat template, and find out which tokens the target generated.

Only tokens that the target generated carry loss (are trained on). To locate these tokens, a chat is
rendered twice: once as it is, and once with placeholders instead of the answers. Some templates,
such as Qwen3's, remove the reasoning from all answers but the last. For each answer whose reasoning
is removed, a separate training text is built: the messages before this answer, and then the answer
with its reasoning.
"""

import json
import re
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, cast

from jinja2 import TemplateError

from data.chat import CANONICAL_MESSAGE_REASONING_KEY, FINISH_REASONS_OF_COMPLETE_ANSWERS
from data.counts import ExcludedExample, InvalidExample
from infer.utils.chat_template import convert_tool_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Matches an answer with reasoning. The four groups are the opening tag, the reasoning, the closing
# tag and the content.
INLINE_REASONING_PATTERN = re.compile(r"(\s*<think>\s*)(.*?)(\s*</think>\s*)(.*)", re.DOTALL)

# Message keys that different chat templates use for reasoning. The first key that occurs in a
# template is used for this template.
MESSAGE_REASONING_KEYS = (CANONICAL_MESSAGE_REASONING_KEY, "reasoning", "thinking")

# Message keys that only training uses; they are removed before a chat template is applied.
MESSAGE_KEYS_HIDDEN_FROM_TEMPLATES = ("finish", "weight", "token_ids")

# Keys are sections of an answer, values are their placeholders. The index of the message and "Z"
# are appended to a placeholder.
ANSWER_SECTION_PLACEHOLDERS = {
    "reasoning": "THOUGHTGOESHERE",
    "content": "ANSWERGOESHERE",
    "tool_call": "CALLGOESHERE",
}
ANSWER_SECTION_PLACEHOLDER_PATTERN = re.compile(
    f"({'|'.join(ANSWER_SECTION_PLACEHOLDERS.values())})([0-9]+)Z"
)

ANSWER_CHANGED_EXCLUSION_REASON = "the chat template changes or leaves out an answer"
TOOL_CALLS_CHANGED_EXCLUSION_REASON = (
    "the chat template changes or leaves out the tool calls of an answer"
)


@dataclass(frozen=True)
class LossSpan:
    """The characters [start, end) of a training text, which the target generated as one answer.

    answer: the message that contains the answer
    """

    start: int
    end: int
    answer: dict

    @property
    def is_complete(self) -> bool:
        """Whether the answer was not cut off. Only then does its end token carry loss."""
        return self.answer.get("finish") in FINISH_REASONS_OF_COMPLETE_ANSWERS


# A training text, and its character ranges that carry loss.
TextWithSpans = tuple[str, list[LossSpan]]


@dataclass(frozen=True)
class TemplateMarkers:
    """The texts that a chat template puts around an answer, and the message key from which it reads
    the reasoning.

    generation_prompt: the text that the template adds before an answer is generated
    answer_suffix: the text that the template adds after an answer
    reasoning_field: the message key from which the template reads reasoning; None if the template
        reads no such key. Reasoning must then be part of the content
    """

    generation_prompt: str
    answer_suffix: str
    reasoning_field: str | None


@dataclass
class AnswerLocation:
    """The position of an answer in a rendered chat.

    prefix: the text between the previous answer and this answer
    start: index of the first character after the prefix
    sections: keys are the sections "reasoning", "content" and "tool_call" that the answer has,
        values are their ranges of characters [start, end)
    """

    prefix: str
    start: int
    sections: dict[str, tuple[int, int]] = field(default_factory=dict)


def render_chat(
    tokenizer: "PreTrainedTokenizerBase",
    messages: list[dict],
    chat: dict,
    add_generation_prompt: bool = False,
) -> str:
    """Render messages with the tokenizer's chat template, and return the text.

    chat: a chat from which only the tools and the template variables are taken
    add_generation_prompt: whether the text ends where the model has to start an answer

    Raises ExcludedExample if the template refuses the messages.
    """
    options = {
        "tools": chat["tools"] or None,
        "add_generation_prompt": add_generation_prompt,
    } | chat["template"]
    try:
        messages = convert_tool_arguments(tokenizer, messages, **options)
        return cast("str", tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except (TemplateError, TypeError) as error:
        # Templates raise TemplateError, for example if the roles do not alternate. Jinja raises
        # TypeError, for example if a template adds None to a string.
        raise ExcludedExample(f"the chat template raises an error: {error}") from error


def get_template_source(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the source code of a tokenizer's chat templates, or "" if it has no chat template."""
    template = tokenizer.chat_template or ""
    if isinstance(template, dict):
        return "\n".join(template.values())
    return template


def detect_template_markers(
    tokenizer: "PreTrainedTokenizerBase", template_kwargs: dict
) -> TemplateMarkers:
    """Find out which texts the tokenizer's chat template puts around an answer.

    template_kwargs: variables of the chat template, such as {"enable_thinking": False}
    """
    variables = json.dumps(template_kwargs, sort_keys=True)
    return _detect_template_markers(tokenizer, get_template_source(tokenizer), variables)


@lru_cache(maxsize=64)
def _detect_template_markers(
    tokenizer: "PreTrainedTokenizerBase", template: str, variables_json: str
) -> TemplateMarkers:
    """Implement `detect_template_markers`. Results are cached, so all arguments are hashable.

    template: source code of the tokenizer's chat templates
    variables_json: variables of the chat template, as JSON
    """
    chat = {"tools": [], "template": json.loads(variables_json)}
    question = {"role": "user", "content": "x"}
    answer = {"role": "assistant", "content": ANSWER_SECTION_PLACEHOLDERS["content"]}

    without_prompt = render_chat(tokenizer, [question], chat)
    with_prompt = render_chat(tokenizer, [question], chat, add_generation_prompt=True)
    generation_prompt = ""
    if with_prompt.startswith(without_prompt):
        generation_prompt = with_prompt[len(without_prompt) :]

    answered = render_chat(tokenizer, [question, answer], chat)
    _, _, answer_suffix = answered.partition(ANSWER_SECTION_PLACEHOLDERS["content"])

    reasoning_field = None
    for name in MESSAGE_REASONING_KEYS:
        if re.search(rf"\.{name}\b|['\"]{name}['\"]", template):
            reasoning_field = name
            break
    return TemplateMarkers(generation_prompt, answer_suffix, reasoning_field)


def prepare_messages(tokenizer: "PreTrainedTokenizerBase", chat: dict) -> list[dict]:
    """Return the messages of a chat with the keys that the tokenizer's chat template reads.

    Reasoning is moved to the key from which the template reads reasoning. If there is no such key,
    it is moved into the content. Keys that only training uses are removed. Raises ExcludedExample
    if the chat has tools or reasoning and the template would leave them out.
    """
    template = get_template_source(tokenizer)
    markers = detect_template_markers(tokenizer, chat["template"])
    if chat["tools"] and not re.search(r"\btools\b", template):
        raise ExcludedExample("the chat template leaves out the definitions of the tools")

    messages = []
    for index, original in enumerate(chat["messages"]):
        message = {
            key: value
            for key, value in original.items()
            if key not in MESSAGE_KEYS_HIDDEN_FROM_TEMPLATES
        }
        reasoning = message.pop(CANONICAL_MESSAGE_REASONING_KEY, None)
        if reasoning is not None:
            if markers.reasoning_field is not None:
                message[markers.reasoning_field] = reasoning
            elif "</think>" in template:
                message["content"] = _join_reasoning(reasoning, message["content"])
            else:
                reason = "the chat template leaves out the reasoning of an answer"
                raise ExcludedExample(reason, f"message {index}")
        messages.append(message)
    return messages


def _join_reasoning(reasoning: str, content: str) -> str:
    """Return the reasoning of an answer in <think> tags, followed by the content of the answer."""
    return f"<think>\n{reasoning.strip()}\n</think>\n\n{content}"


def build_training_texts(tokenizer: "PreTrainedTokenizerBase", chat: dict) -> list[TextWithSpans]:
    """Render a chat as one or more training texts, and find the character ranges that carry loss.

    Each answer carries loss in exactly one training text. Answers with the weight 0 carry no loss.

    Raises ExcludedExample if the chat template changes or omits an answer, the tools or the result
    of a tool. The rendered text would then differ from the text that the target saw and generated.
    """
    messages = prepare_messages(tokenizer, chat)
    rendered = render_chat(tokenizer, messages, chat)

    with_placeholders = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            message = _insert_placeholders(message, index)
        with_placeholders.append(message)
    locations = locate_answers(rendered, render_chat(tokenizer, with_placeholders, chat), messages)
    _check_tool_results(messages, rendered)

    markers = detect_template_markers(tokenizer, chat["template"])
    spans = []
    separate_texts = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        has_reasoning = bool(extract_answer_sections(message)["reasoning"])
        if has_reasoning and "</think>" in markers.generation_prompt:
            reason = "an answer has reasoning, but the chat template's variables turn reasoning off"
            raise ExcludedExample(reason, f"message {index}")

        location = locations[index]
        answer = chat["messages"][index]
        span = _find_loss_span(rendered, location, markers, answer, has_reasoning)
        if answer.get("weight") == 0:
            continue
        if has_reasoning and "reasoning" not in location.sections:
            content_end = location.sections["content"][1]
            tool_calls_text = rendered[content_end : span.end]
            separate_texts.append(
                _build_single_answer_text(
                    tokenizer, chat, messages, index, markers, tool_calls_text
                )
            )
        else:
            spans.append(span)

    # If the last answer was cut off, the target generated no end token after it. The training text
    # then ends with this answer, without the end token that the template adds.
    if spans and not spans[-1].is_complete:
        rendered = rendered[: spans[-1].end]
    if spans:
        return [*separate_texts, (rendered, spans)]
    return separate_texts


def extract_answer_sections(answer: dict) -> dict[str, str]:
    """Split an answer into sections. Return a dictionary from the section's name to its text.

    The sections are "reasoning" (may be ""), "content" and "tool_call". "content" is missing if the
    answer has only tool calls, and "tool_call" is missing if it has none. The text of "tool_call"
    is the name of the first function that the answer calls.
    """
    sections = {"reasoning": ""}
    for name in MESSAGE_REASONING_KEYS:
        if answer.get(name):
            sections["reasoning"] = answer[name]
            break

    tool_calls = answer.get("tool_calls")
    inline = INLINE_REASONING_PATTERN.fullmatch(answer["content"])
    if inline:
        sections["reasoning"] = inline[2]
        sections["content"] = inline[4]
    elif answer["content"] or not tool_calls:
        sections["content"] = answer["content"]
    if tool_calls:
        sections["tool_call"] = tool_calls[0]["function"]["name"]
    return sections


def _insert_placeholders(answer: dict, index: int) -> dict:
    """Return a copy of an answer with placeholders for its reasoning, content and function name.

    index: index of the answer among the messages, which becomes part of each placeholder
    """
    placeholders = {
        section: f"{word}{index}Z" for section, word in ANSWER_SECTION_PLACEHOLDERS.items()
    }
    result = dict(answer)
    for name in MESSAGE_REASONING_KEYS:
        if answer.get(name):
            result[name] = placeholders["reasoning"]

    # Reasoning in <think> tags within the content stays within the content, because some templates
    # render it differently from reasoning with a separate key.
    inline = INLINE_REASONING_PATTERN.fullmatch(answer["content"])
    if inline:
        reasoning = inline[1] + placeholders["reasoning"] + inline[3]
        result["content"] = reasoning + placeholders["content"]
    elif "content" in extract_answer_sections(answer):
        result["content"] = placeholders["content"]

    if answer.get("tool_calls"):
        first_call, *other_calls = answer["tool_calls"]
        function = first_call["function"] | {"name": placeholders["tool_call"]}
        result["tool_calls"] = [first_call | {"function": function}, *other_calls]
    return result


def locate_answers(
    rendered: str, placeholder_text: str, messages: list[dict]
) -> dict[int, AnswerLocation]:
    """Find the answers of a chat in its rendered text. Return {message index: location}.

    rendered: the rendered chat
    placeholder_text: the same chat, rendered with placeholders instead of the answers

    Raises ExcludedExample if the two texts differ outside the answers, or if an answer is missing.
    """
    # "\0" marks the end of both texts. Without the mark, the text after the last placeholder could
    # match only the beginning of the text after the last answer.
    rendered += "\0"
    prefix, *fragments = ANSWER_SECTION_PLACEHOLDER_PATTERN.split(placeholder_text + "\0")
    section_names = {word: section for section, word in ANSWER_SECTION_PLACEHOLDERS.items()}
    locations: dict[int, AnswerLocation] = {}
    position = len(prefix) if rendered.startswith(prefix) else len(rendered)

    # `fragments` has three entries for each placeholder: the placeholder's word, the index of its
    # message, and the text between this placeholder and the next one.
    for word, number, suffix in zip(fragments[::3], fragments[1::3], fragments[2::3], strict=True):
        index = int(number)
        section = section_names[word]
        location = locations.setdefault(index, AnswerLocation(prefix, position))
        text = extract_answer_sections(messages[index])[section]
        shown_text = _match_stripped(rendered, position, text, suffix)
        if shown_text is None or section in location.sections:
            raise ExcludedExample(ANSWER_CHANGED_EXCLUSION_REASON, f"message {index}")
        location.sections[section] = (position, position + len(shown_text))
        position += len(shown_text) + len(suffix)
        prefix = suffix

    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            _check_sections(locations.get(index), message, index)
    return locations


def _match_stripped(rendered: str, position: int, text: str, suffix: str) -> str | None:
    """Return the part of the rendered chat that starts at `position` and equals `text`, apart from
    white space that the chat template removed from its start or end. Return None if there is no
    such part, or if `suffix` does not follow it.

    rendered: the chat as the chat template rendered it
    position: index of a character in `rendered`
    suffix: text that must follow the returned part in `rendered`
    """
    for form in (text, text.rstrip(), text.lstrip(), text.strip(), text.strip("\n")):
        if rendered.startswith(form + suffix, position):
            return form
    return None


def _check_sections(location: AnswerLocation | None, message: dict, index: int) -> None:
    """Raise ExcludedExample if the content or tool calls of an answer are not in the rendered chat.

    If the answer has only tool calls, an empty section "content" is added to `location`.

    location: position of the answer; None if no section of the answer was found
    """
    sections = {} if location is None else location.sections
    if message.get("tool_calls"):
        required_section = "tool_call"
        reason = TOOL_CALLS_CHANGED_EXCLUSION_REASON
    else:
        required_section = "content"
        reason = ANSWER_CHANGED_EXCLUSION_REASON

    is_content_missing = message["content"].strip() and "content" not in sections
    if required_section not in sections or is_content_missing:
        raise ExcludedExample(reason, f"message {index}")
    start, _ = sections[required_section]
    sections.setdefault("content", (start, start))


def _check_tool_results(messages: list[dict], rendered: str) -> None:
    """Raise ExcludedExample if the result of a tool is not in the rendered chat.

    Only the longest word of the result is searched for, because the template may escape characters
    such as quotes.
    """
    for index, message in enumerate(messages):
        longest_word = max(re.findall(r"\w+", message["content"]), key=len, default="")
        if message["role"] == "tool" and longest_word not in rendered:
            reason = "the chat template leaves out the result of a tool"
            raise ExcludedExample(reason, f"message {index}")


def _find_loss_span(
    rendered: str,
    location: AnswerLocation,
    markers: TemplateMarkers,
    answer: dict,
    has_reasoning: bool,
) -> LossSpan:
    """Return the range of characters of a rendered answer that the target generated.

    The range starts after the generation prompt. If the template puts empty reasoning tags before
    an answer without reasoning, the range starts after these tags. The range ends with the content
    or the last tool call.
    """
    start = location.start
    prompt_without_reasoning = markers.generation_prompt.partition("<think>")[0]
    for generation_prompt in (markers.generation_prompt, prompt_without_reasoning):
        offset = location.prefix.rfind(generation_prompt) if generation_prompt else -1
        if offset >= 0:
            prefix_start = location.start - len(location.prefix)
            start = prefix_start + offset + len(generation_prompt)
            break

    sections = location.sections
    content_start, content_end = sections["content"]
    empty_reasoning = rendered.rfind("</think>", start, location.start)
    if not has_reasoning and empty_reasoning >= 0:
        if "tool_call" not in sections or content_end > content_start:
            start = location.start
        else:
            start = empty_reasoning + len("</think>")
        text_before_answer = rendered[start : location.start]
        start += len(text_before_answer) - len(text_before_answer.lstrip())

    end = content_end
    if "tool_call" in sections:
        suffix = markers.answer_suffix.strip() or markers.answer_suffix
        _, name_end = sections["tool_call"]
        end = rendered.find(suffix, name_end) if suffix else len(rendered)
        if end < 0:
            raise ExcludedExample(
                "in this chat template, the text after an answer with tool calls differs from the "
                "text after an answer without them"
            )
    return LossSpan(start, end, answer)


def _build_single_answer_text(
    tokenizer: "PreTrainedTokenizerBase",
    chat: dict,
    messages: list[dict],
    index: int,
    markers: TemplateMarkers,
    tool_calls_text: str,
) -> TextWithSpans:
    """Build a training text that ends with one answer and its reasoning.

    The messages after the answer are left out, because with them the template would remove the
    reasoning of the answer.

    index: index of the answer among the messages
    tool_calls_text: the tool calls of the answer, as the template renders them
    """
    prompt = render_chat(tokenizer, messages[:index], chat, add_generation_prompt=True)
    message = messages[index]
    reasoning = None
    if markers.reasoning_field:
        reasoning = message.get(markers.reasoning_field)
    if reasoning:
        generated = _join_reasoning(reasoning, message["content"])
    else:
        generated = message["content"].lstrip()
    if prompt.rstrip().endswith("<think>"):
        generated = generated.removeprefix("<think>").lstrip()

    end = len(prompt) + len(generated) + len(tool_calls_text)
    span = LossSpan(len(prompt), end, chat["messages"][index])
    text = prompt + generated + tool_calls_text
    if span.is_complete:
        text += markers.answer_suffix
    return text, [span]


def tokenize_chat(
    tokenizer: "PreTrainedTokenizerBase", chat: dict
) -> list[tuple[list[int], list[bool]]]:
    """Render and tokenise a chat. Return the (token ids, loss mask) of each training text.

    The tokens that the target generated carry loss, including the end token of an answer that was
    not cut off.
    """
    texts = build_training_texts(tokenizer, chat)
    return [tokenize_with_loss_mask(tokenizer, text, spans) for text, spans in texts]


def tokenize_with_loss_mask(
    tokenizer: "PreTrainedTokenizerBase", text: str, spans: list[LossSpan]
) -> tuple[list[int], list[bool]]:
    """Tokenise a text. Return its token ids, and for each token id whether it carries loss.

    If the example contains the token ids of an answer, and they decode to the text of the answer,
    the result contains these ids. Tokenising the text could give other ids than the target
    generated.

    spans: the character ranges that carry loss
    """
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    text_ids = encoded["input_ids"]
    token_starts = [start for start, _ in encoded["offset_mapping"]]
    token_ends = [end for _, end in encoded["offset_mapping"]]
    special_ids = set(tokenizer.all_special_ids)

    output_ids = []
    loss_mask = []
    position = 0  # index of the first token of the text that is not in `output_ids` yet
    for span in spans:
        first = bisect_left(token_starts, span.start, position)
        last = bisect_right(token_ends, span.end, first)
        answer_ids = get_recorded_token_ids(tokenizer, span, text, special_ids)
        starts_at_token = first < len(text_ids) and token_starts[first] == span.start
        if answer_ids is None or not starts_at_token:
            answer_ids = text_ids[first:last]

        output_ids += text_ids[position:first] + answer_ids
        loss_mask += [False] * (first - position) + [True] * len(answer_ids)
        if span.is_complete and last < len(text_ids) and text_ids[last] in special_ids:
            output_ids.append(text_ids[last])
            loss_mask.append(True)
            last += 1
        position = last

    remaining_ids = text_ids[position:]
    return output_ids + remaining_ids, loss_mask + [False] * len(remaining_ids)


def get_recorded_token_ids(
    tokenizer: "PreTrainedTokenizerBase", span: LossSpan, text: str, special_ids: set[int]
) -> list[int] | None:
    """Return the token ids that the example has for an answer, without end tokens.

    Returns None if the example has none, or if they do not decode to the text of the answer.
    Raises InvalidExample for a token id outside the vocabulary.

    span: the answer and its range of characters in `text`
    """
    token_ids = list(span.answer.get("token_ids", ()))
    if token_ids and max(token_ids) >= len(tokenizer):
        detail = f"id {max(token_ids)}, vocabulary of {len(tokenizer)} ids"
        raise InvalidExample("token_ids are outside the vocabulary", detail)

    while token_ids and token_ids[-1] in special_ids:
        token_ids.pop()
    if token_ids and tokenizer.decode(token_ids) == text[span.start : span.end]:
        return token_ids
    return None
