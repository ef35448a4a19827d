"""The tokens that end an output: all that the four places name which may name one.

Fine-tuned models often name the end of their turns in one place alone; a model that is stopped by
the others only goes on as the user. A token that the model never generates does no harm.
"""

import re
from collections.abc import Collection, Iterable
from functools import lru_cache, partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig

QUESTION_MARK = "QUESTIONGOESHERE"
ANSWER_MARK = "ANSWERGOESHERE"


def end_tokens(
    configs: "Iterable[GenerationConfig | PretrainedConfig | None]",
    tokenizer: object | None,
    vocabulary_size: int,
) -> frozenset[int]:
    """Return the ids of the tokens that end an output.

    configs: the model's generation config, its config and its text config; None: there is none.
    tokenizer: names its end of text, and by its chat template the end of a turn (`turn_end`).
    vocabulary_size: ids outside it are left out, as the model cannot generate them.
    """
    named: set[int | None] = set()
    for config in configs:
        named.update(config_end_tokens(config, tokenizer))
    if tokenizer is not None:
        named.add(tokenizer.eos_token_id)
        named.add(turn_end(tokenizer, str(tokenizer.chat_template)))
    return frozenset(id for id in named if type(id) is int and 0 <= id < vocabulary_size)


def config_end_tokens(
    config: "GenerationConfig | PretrainedConfig | None", tokenizer: object | None
) -> list[int]:
    """Return the end tokens that a config names: none, one or several.

    A config class may have a default, such as 2 for Llama, which the text config of an image model
    falls back to. It does not count where the tokenizer has ordinary text under that id.
    """
    value = getattr(config, "eos_token_id", None)
    if value is None:
        return []
    ids = list(value) if isinstance(value, list | tuple) else [value]
    is_class_default = value == getattr(type(config), "eos_token_id", None)
    if is_class_default and tokenizer is not None:
        added = added_tokens(tokenizer).values()
        ids = [id for id in ids if id in added]
    return ids


def added_tokens(tokenizer: object) -> dict[str, int]:
    """Return the tokens of a tokenizer that no ordinary text has, special ones included: name to
    id."""
    added = {token.content: id for id, token in tokenizer.added_tokens_decoder.items()}
    return {name: id for name, id in added.items() if name.strip()}


@lru_cache(maxsize=16)
def turn_end(tokenizer: object, template: str) -> int | None:
    """Return the token that ends an assistant's turn in a tokenizer's chat template; None where the
    template shows none.

    An answer is rendered as the last message and before another question. Added tokens that follow
    it in both cases, before any other text, belong to the turn; the last of them ends it. What
    follows in one case only begins the next turn (GLM), or ends a message after which the same turn
    may go on (`<|end|>` of gpt-oss).

    template: the template's text, which the cached result belongs to.
    """
    if tokenizer.chat_template is None:
        return None
    question = {"role": "user", "content": QUESTION_MARK}
    chat = [question, {"role": "assistant", "content": ANSWER_MARK}]
    render = partial(tokenizer.apply_chat_template, tokenize=False)
    try:
        opening = render([question])
        behind_inner = render([*chat, question]).partition(ANSWER_MARK)[2]
        behind_last = render(chat).partition(ANSWER_MARK)[2]
        if not behind_last.strip():  # some templates leave the last turn open unless asked to go on
            behind_last = render(chat, add_generation_prompt=True).partition(ANSWER_MARK)[2]
    except Exception:  # noqa: BLE001  a template is a program, and may fail in any way
        return None

    ids = added_tokens(tokenizer)
    beginning = leading_tokens(opening, ids)
    end = None
    for last, inner in zip(
        leading_tokens(behind_last, ids), leading_tokens(behind_inner, ids), strict=False
    ):
        if last != inner or last in beginning:
            break
        end = ids[last]
    return end


def leading_tokens(text: str, names: Collection[str]) -> list[str]:
    """Return the tokens at the beginning of a text, of those with the given names, with nothing but
    whitespace between them."""
    choices = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    leading = re.match(rf"(\s*({choices}))+", text)
    return re.findall(choices, leading[0]) if names and leading else []
