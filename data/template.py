"""What a chat template makes of a conversation: its tokens, and which of them the target wrote.

The template is asked twice a chat, once with marks in the places of the answers; and once more for
every answer whose thought it does not show where more is said behind it (Qwen3): that answer is
then a sequence of its own, in the context that it was written in.
"""

import json
import re
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import lru_cache

from jinja2 import TemplateError

from data.chat import ENDED, THOUGHT
from data.counts import ExcludedExample, InvalidExample
from infer.utils.chat_template import readable_messages

# A thought within an answer's content: what opens it, itself, what closes it, and the rest.
INLINE = re.compile(r"(\s*<think>\s*)(.*?)(\s*</think>\s*)(.*)", re.DOTALL)
# marks of an answer's parts
WORDS = {"thought": "THOUGHTGOESHERE", "said": "ANSWERGOESHERE", "call": "CALLGOESHERE"}
MARK = re.compile(f"({'|'.join(WORDS.values())})([0-9]+)Z")
NOT_SHOWN = "the chat template does not show an answer as it is"
CALLS_NOT_SHOWN = "the chat template does not show the tool calls of an answer as they are"
FIELDS = (
    THOUGHT,
    "reasoning",
    "thinking",
)  # what templates call a thought, the first that they know


@dataclass(frozen=True)
class Learnt:
    """A piece of a sequence that the target wrote: [start, end) in characters, and the answer that
    it is."""

    start: int
    end: int
    answer: dict

    @property
    def ended(self) -> bool:
        """Whether the target ended it, so that the token behind it is the target's too."""
        return self.answer.get("finish") in ENDED


Sequence = tuple[str, list[Learnt]]  # a text to learn from


@dataclass(frozen=True)
class TemplateHabits:
    """What a template writes around an answer."""

    asks: str  # asks the assistant to speak
    ends: str  # behind an answer
    # the key of a message that it reads thoughts from, None where they stand in the content
    thought: str | None


def apply(tokenizer, messages: list[dict], chat: dict, ask: bool = False) -> str:
    """Return messages as the chat's template writes them. Raises ExcludedExample with what the
    template says against it."""
    try:
        options = {"tools": chat["tools"] or None, "add_generation_prompt": ask} | chat["template"]
        messages = readable_messages(tokenizer, messages, **options)
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except (
        TemplateError,
        TypeError,
    ) as error:  # roles in an order that it refuses; adding what is none to a text
        raise ExcludedExample(f"the chat template says: {error}") from error


def source(tokenizer) -> str:
    """Return the text of a tokenizer's templates."""
    template = tokenizer.chat_template or ""
    return "\n".join(template.values()) if isinstance(template, dict) else template


def habits(tokenizer, told: dict) -> TemplateHabits:
    """Return what the template writes around an answer when it is told so."""
    return _habits(tokenizer, source(tokenizer), json.dumps(told, sort_keys=True))


@lru_cache(maxsize=64)
def _habits(tokenizer, template: str, told: str) -> TemplateHabits:
    chat = {"tools": [], "template": json.loads(told)}
    asked = [{"role": "user", "content": "x"}]
    before = apply(tokenizer, asked, chat)
    asking = apply(tokenizer, asked, chat, ask=True)
    mark = WORDS["said"]
    _, _, ends = apply(tokenizer, [*asked, {"role": "assistant", "content": mark}], chat).partition(
        mark
    )
    fields = (name for name in FIELDS if re.search(rf"\.{name}\b|['\"]{name}['\"]", template))
    return TemplateHabits(
        asking[len(before) :] if asking.startswith(before) else "", ends, next(fields, None)
    )


def readable(tokenizer, chat: dict) -> list[dict]:
    """Return a chat's messages as its template reads them: thoughts by its name for them, without
    what only we know. Raises ExcludedExample for what it has no place for."""
    template = source(tokenizer)
    known = habits(tokenizer, chat["template"])
    if chat["tools"] and not re.search(r"\btools\b", template):
        raise ExcludedExample("the chat template does not show tools")
    messages = []
    for i, turn in enumerate(chat["messages"]):
        turn = {
            key: value
            for key, value in turn.items()
            if key not in ("finish", "weight", "token_ids")
        }
        thought = turn.pop(THOUGHT, None)
        if thought is not None and known.thought is not None:
            turn[known.thought] = thought
        elif thought is not None and "</think>" in template:
            turn["content"] = f"<think>\n{thought.strip()}\n</think>\n\n{turn['content']}"
        elif thought is not None:
            raise ExcludedExample(
                "the chat template does not show the thought of an answer", f"message {i}"
            )
        messages.append(turn)
    return messages


def sequences(tokenizer, chat: dict) -> list[Sequence]:
    """Return a chat as texts to learn from, every answer of weight 1 learnt in one of them. Raises
    ValueError where the template does not show an answer, tools or a tool's result: the loss would
    fall on other tokens than the target's.
    """
    messages = readable(tokenizer, chat)
    whole = apply(tokenizer, messages, chat)
    marked = [
        _marked(turn, i) if turn["role"] == "assistant" else turn for i, turn in enumerate(messages)
    ]
    places = find(whole, apply(tokenizer, marked, chat), messages)
    _check_results(messages, whole)
    known = habits(tokenizer, chat["template"])
    learnt = []
    alone = []
    for i, turn in enumerate(messages):
        if turn["role"] != "assistant":
            continue
        thought = parts_of(turn)["thought"]
        if thought and "</think>" in known.asks:
            reason = "an answer has a thought, and the chat template is told that there is none"
            raise ExcludedExample(reason, f"message {i}")
        piece = _span(whole, places[i], known, chat["messages"][i], bool(thought))
        if chat["messages"][i].get("weight") == 0:
            continue
        if thought and "thought" not in places[i]:
            alone.append(
                _alone(tokenizer, chat, messages, i, known, whole[places[i]["said"][1] : piece.end])
            )
        else:
            learnt.append(piece)
    if learnt and not learnt[-1].ended:
        whole = whole[: learnt[-1].end]  # an answer that was cut is the last one
    return alone + ([(whole, learnt)] if learnt else [])


def parts_of(answer: dict) -> dict[str, str]:
    """Return what an answer consists of: its thought, what it says, and the name of its first tool
    call."""
    inline = INLINE.fullmatch(answer["content"])
    calls = answer.get("tool_calls")
    parts = {"thought": next((answer[field] for field in FIELDS if answer.get(field)), "")}
    if inline:
        parts |= {"thought": inline[2], "said": inline[4]}
    elif answer["content"] or not calls:
        parts["said"] = answer["content"]
    if calls:
        parts["call"] = calls[0]["function"]["name"]
    return parts


def _marked(answer: dict, i: int) -> dict:
    """Return answer i with marks in the places of its parts."""
    marks = {kind: f"{word}{i}Z" for kind, word in WORDS.items()}
    marked = answer | {field: marks["thought"] for field in FIELDS if answer.get(field)}
    # stays where it is: some templates treat it in their own way
    if inline := INLINE.fullmatch(answer["content"]):
        marked["content"] = inline[1] + marks["thought"] + inline[3] + marks["said"]
    elif "said" in parts_of(answer):
        marked["content"] = marks["said"]
    if answer.get("tool_calls"):
        first, *others = answer["tool_calls"]
        marked["tool_calls"] = [
            first | {"function": first["function"] | {"name": marks["call"]}},
            *others,
        ]
    return marked


def find(whole: str, marked: str, messages: list[dict]) -> dict[int, dict]:
    """Return where in `whole`, by message, its thought, what it said and its tool call stand:
    [start, end) each; and "from", the start of the first of them, and "before", the template's text
    before that. `marked` is the same with marks. Raises ExcludedExample where the two do not
    agree."""
    whole += "\0"
    before, *rest = MARK.split(marked + "\0")  # text, then word, number and text of each mark
    kinds = {word: kind for kind, word in WORDS.items()}
    places: dict[int, dict] = {}
    at = len(before) if whole.startswith(before) else len(whole)
    for word, number, behind in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        i = int(number)
        kind = kinds[word]
        place = places.setdefault(i, {"before": before, "from": at})
        text = parts_of(messages[i])[kind]
        forms = (text, text.rstrip(), text.lstrip(), text.strip(), text.strip("\n"))
        shown = next((form for form in forms if whole.startswith(form + behind, at)), None)
        if shown is None or kind in place:
            raise ExcludedExample(NOT_SHOWN, f"message {i}")
        place[kind] = (at, at + len(shown))
        at = at + len(shown + behind)
        before = behind
    for i, turn in enumerate(messages):
        if turn["role"] == "assistant":
            kind = "call" if turn.get("tool_calls") else "said"
            place = places.get(i, {})
            if kind not in place or (turn["content"].strip() and "said" not in place):
                raise ExcludedExample(
                    CALLS_NOT_SHOWN if kind == "call" else NOT_SHOWN, f"message {i}"
                )
            place.setdefault("said", (place[kind][0],) * 2)  # a call without words
    return places


def _check_results(messages: list[dict], whole: str) -> None:
    """Raise ExcludedExample where a tool's result is not in the text: its longest word, as the rest
    may be quoted."""
    for i, turn in enumerate(messages):
        word = max(re.findall(r"\w+", turn["content"]), key=len, default="")
        if turn["role"] == "tool" and word not in whole:
            raise ExcludedExample(
                "the chat template does not show the result of a tool", f"message {i}"
            )


def _span(whole: str, place: dict, known: TemplateHabits, answer: dict, thinks: bool) -> Learnt:
    """Return what the target wrote of an answer: from behind the words that ask for it to the end
    of its last tool call. An empty thought that the template puts before an answer without one is
    the template's."""
    before = place["before"]
    first = place["from"]
    start = first
    for asks in (known.asks, known.asks.partition("<think>")[0]):
        found = before.rfind(asks) if asks else -1
        if found >= 0:
            start = first - len(before) + found + len(asks)
            break
    empty = whole.rfind("</think>", start, first)
    if not thinks and empty >= 0:
        start = (
            first
            if "call" not in place or place["said"][1] > place["said"][0]
            else empty + len("</think>")
        )
        start += len(whole[start:first]) - len(whole[start:first].lstrip())
    end = place["said"][1]
    if "call" in place:
        ends = known.ends.strip() or known.ends
        end = whole.find(ends, place["call"][1]) if ends else len(whole)
        if end < 0:
            raise ExcludedExample("the chat template does not show where tool calls end")
    return Learnt(start, end, answer)


def _alone(
    tokenizer, chat: dict, messages: list[dict], i: int, known: TemplateHabits, calls: str
) -> Sequence:
    """Return answer i, whose thought the template drops when more is said, behind what it
    answers."""
    context = apply(tokenizer, messages[:i], chat, ask=True)
    turn = messages[i]
    thought = turn.get(known.thought) if known.thought else None
    said = (
        f"<think>\n{thought.strip()}\n</think>\n\n{turn['content']}"
        if thought
        else turn["content"].lstrip()
    )
    if context.rstrip().endswith("<think>"):
        said = said.removeprefix("<think>").lstrip()
    learnt = Learnt(len(context), len(context) + len(said) + len(calls), chat["messages"][i])
    return context + said + calls + (known.ends if learnt.ended else ""), [learnt]


def tokenize_chat(tokenizer, chat: dict) -> list[tuple[list[int], list[bool]]]:
    """Return the sequences of a conversation as token ids, and which of them carry loss: what the
    target wrote, and the special token that ends each answer that came to its end."""
    return [tokenize_sequence(tokenizer, *sequence) for sequence in sequences(tokenizer, chat)]


def tokenize_sequence(tokenizer, text: str, pieces: list[Learnt]) -> tuple[list[int], list[bool]]:
    """Return a sequence's token ids, and which of them carry loss. An answer that comes with the
    ids which the target wrote has these, where they stand for the same text."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = encoded["input_ids"]
    offsets = encoded["offset_mapping"]
    special = set(tokenizer.all_special_ids)
    starts, ends = ([offset[i] for offset in offsets] for i in (0, 1))
    learnt_ids = []
    loss = []
    at = 0
    for piece in pieces:
        first = bisect_left(starts, piece.start, at)
        last = bisect_right(ends, piece.end, first)
        said = written(tokenizer, piece, text, special)
        if said is None or first == len(ids) or starts[first] != piece.start:
            said = ids[first:last]
        learnt_ids += ids[at:first] + said
        loss += [False] * (first - at) + [True] * len(said)
        if piece.ended and last < len(ids) and ids[last] in special:
            learnt_ids.append(ids[last])
            loss.append(True)
            last += 1
        at = last
    return learnt_ids + ids[at:], loss + [False] * (len(ids) - at)


def written(tokenizer, piece: Learnt, text: str, special: set[int]) -> list[int] | None:
    """Return the ids that the target wrote an answer in, without what ended it, if they are known
    and say the same. Raises InvalidExample for an id that the tokenizer does not have."""
    ids = list(piece.answer.get("token_ids", ()))
    if ids and max(ids) >= len(tokenizer):
        raise InvalidExample(
            "token_ids are outside the vocabulary", f"{max(ids)} of {len(tokenizer)}"
        )
    while ids and ids[-1] in special:
        ids.pop()
    return ids if ids and tokenizer.decode(ids) == text[piece.start : piece.end] else None
