"""Find the tokens that end an output. A model's configs, its tokenizer and its chat template each
name such tokens, and the tokens from all of them are used.

Fine-tuned models often name the token that ends a turn in only one of these sources. Without this
token, generation would continue with the user's next turn. A token that the model never generates
does no harm.
"""

import re
from collections.abc import Collection, Iterable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

END_TOKEN_SEARCH_QUESTION_PLACEHOLDER = "QUESTIONGOESHERE"
END_TOKEN_SEARCH_ANSWER_PLACEHOLDER = "ANSWERGOESHERE"


def find_eos_token_ids(
    configs: "Iterable[GenerationConfig | PretrainedConfig | None]",
    tokenizer: "PreTrainedTokenizerBase | None",
    vocab_size: int,
) -> frozenset[int]:
    """Return the ids of the tokens that end an output.

    configs: the model's generation config, its config and its text config; None for a config that
        the model does not have
    tokenizer: names an end-of-text token; its chat template shows the token that ends a turn
    vocab_size: number of ids that the model can generate; other ids are left out
    """
    ids: set[Any] = set()
    for config in configs:
        ids.update(find_config_eos_ids(config, tokenizer))
    if tokenizer is not None:
        ids.add(tokenizer.eos_token_id)
        ids.add(find_turn_end_id(tokenizer, str(tokenizer.chat_template)))
    return frozenset(id for id in ids if type(id) is int and 0 <= id < vocab_size)


def find_config_eos_ids(
    config: "GenerationConfig | PretrainedConfig | None",
    tokenizer: "PreTrainedTokenizerBase | None",
) -> list[Any]:
    """Return the token ids in a config's eos_token_id as a list.

    A config that does not set eos_token_id has the default of its class, such as 2 for Llama. The
    default is left out if the tokenizer uses this id for ordinary text.
    """
    value = getattr(config, "eos_token_id", None)
    if value is None:
        return []
    ids = list(value) if isinstance(value, list | tuple) else [value]
    is_class_default = value == getattr(type(config), "eos_token_id", None)
    if is_class_default and tokenizer is not None:
        added_ids = get_added_tokens(tokenizer).values()
        ids = [id for id in ids if id in added_ids]
    return ids


def get_added_tokens(tokenizer: "PreTrainedTokenizerBase") -> dict[str, int]:
    """Return a tokenizer's added tokens, including special tokens, as a dictionary from a token's
    text to its id. Ordinary text is never tokenised to an added token. Tokens that consist of
    whitespace are left out."""
    # The base class does not declare this attribute.
    added_tokens = cast(Any, tokenizer).added_tokens_decoder
    ids = {token.content: id for id, token in added_tokens.items()}
    return {text: id for text, id in ids.items() if text.strip()}


@lru_cache(maxsize=16)
def find_turn_end_id(tokenizer: "PreTrainedTokenizerBase", template: str) -> int | None:
    """Return the id of the token that ends an assistant's turn in a chat template, or None if the
    template shows no such token.

    A chat is rendered twice: once with the assistant's answer as the last message, once with
    another question after the answer. The added tokens that directly follow the answer in both
    renderings belong to the assistant's turn, and the last of them ends the turn. A token that
    follows the answer in only one rendering begins the next turn (GLM), or it ends a message after
    which the same turn may continue (`<|end|>` of gpt-oss).

    template: text of the chat template; part of this function's cache key, so that a changed
        template is analysed again
    """
    if tokenizer.chat_template is None:
        return None
    question = {"role": "user", "content": END_TOKEN_SEARCH_QUESTION_PLACEHOLDER}
    chat = [question, {"role": "assistant", "content": END_TOKEN_SEARCH_ANSWER_PLACEHOLDER}]
    render = partial(tokenizer.apply_chat_template, tokenize=False)

    def render_after_answer(messages: list[dict[str, str]], **options: Any) -> str:
        return str(render(messages, **options)).partition(END_TOKEN_SEARCH_ANSWER_PLACEHOLDER)[2]

    try:
        prompt = str(render([question]))
        after_inner_answer = render_after_answer([*chat, question])
        after_last_answer = render_after_answer(chat)
        if not after_last_answer.strip():
            # Some templates write the token that ends a turn only when another turn follows.
            after_last_answer = render_after_answer(chat, add_generation_prompt=True)
    except Exception:  # noqa: BLE001  a template is a program and can raise any exception
        return None

    ids = get_added_tokens(tokenizer)
    prompt_tokens = find_leading_tokens(prompt, ids)
    last_tokens = find_leading_tokens(after_last_answer, ids)
    inner_tokens = find_leading_tokens(after_inner_answer, ids)
    turn_end_id = None
    for last, inner in zip(last_tokens, inner_tokens, strict=False):
        if last != inner or last in prompt_tokens:
            break
        turn_end_id = ids[last]
    return turn_end_id


def find_leading_tokens(text: str, tokens: Collection[str]) -> list[str]:
    """Return which of the strings `tokens` a text begins with, in order. The search ends where the
    text continues with anything but one of `tokens` or whitespace."""
    if not tokens:
        return []
    choices = "|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True))
    leading = re.match(rf"(\s*({choices}))+", text)
    if leading is None:
        return []
    return re.findall(choices, leading[0])
