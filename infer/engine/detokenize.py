"""Convert token ids to text while the output is still growing. The search for stop strings,
streaming and final answers all use these functions, so that all see the same text.

Adjacent byte tokens (`<0xNN>`) are decoded together. If one more byte token follows, all of them
may become replacement characters, or may become characters again. Special tokens between byte
tokens are removed before decoding. An output may therefore be split into separately decoded parts
only after a token with stable text: a token that has text and is not a byte token.
"""

import re
from typing import cast

from transformers import PreTrainedTokenizerBase

BYTE_TOKEN_PATTERN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# Bytes of the longest UTF-8 character, and therefore the most byte tokens that a character needs.
MAX_CHARACTER_BYTES = 4


def detokenize(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], keep_special: bool = False
) -> str:
    """Return the text of the tokens `ids`. Special tokens are left out unless `keep_special` is
    true.

    Spaces are not cleaned up, because changing "do n't" to "don't" would alter text that has
    already been streamed.
    """
    text = tokenizer.decode(
        ids, skip_special_tokens=not keep_special, clean_up_tokenization_spaces=False
    )
    return cast(str, text)


def has_stable_text(tokenizer: PreTrainedTokenizerBase, id: int) -> bool:
    """Return whether no later token can change the text up to and including token `id`.

    This is the case if the token has text and is not a byte token (`<0xNN>`). A token of a
    byte-level tokenizer may end within a UTF-8 character, and its text then ends with a replacement
    character. It also counts as stable, because callers recognise the replacement character.
    """
    token = cast(str, tokenizer.convert_ids_to_tokens(id) or "")
    if BYTE_TOKEN_PATTERN.fullmatch(token):
        return False
    return detokenize(tokenizer, [id]) != ""


def count_stable_tokens(tokenizer: PreTrainedTokenizerBase, ids: list[int], first: int = 0) -> int:
    """Return how many tokens there are up to and including the last one with stable text (see
    `has_stable_text`). The first `first` tokens always count as stable, so the result is at least
    `first`."""
    length = len(ids)
    while length > first and not has_stable_text(tokenizer, ids[length - 1]):
        length -= 1
    return length


def detokenize_end(tokenizer: PreTrainedTokenizerBase, ids: list[int], num_chars: int) -> str:
    """Return the end of an output's text: all text that the last token may have changed, and at
    least `num_chars` characters before it (fewer if the output is shorter)."""
    stable_end = count_stable_tokens(tokenizer, ids)
    start = stable_end
    text = ""
    step = MAX_CHARACTER_BYTES * num_chars + 2 * MAX_CHARACTER_BYTES
    while start > 0 and len(text) < num_chars + MAX_CHARACTER_BYTES:
        start = count_stable_tokens(tokenizer, ids[: max(0, start - step)])
        text = detokenize(tokenizer, ids[start:stable_end])
        step = 2 * step
    if stable_end < len(ids):
        text = detokenize(tokenizer, ids[start:])
    if start == 0:
        return text
    # Decoding started in the middle of the output, so the first characters may be incomplete or
    # lack a leading space.
    return text[MAX_CHARACTER_BYTES:]


def completes_stop_string(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], stop_strings: list[str]
) -> bool:
    """Return whether the last token of an output completes one of the stop strings. The output must
    not contain a stop string before its last token.

    Special tokens are not part of the text. A stop string may also be the name of a special token;
    it is then complete if the last token is this special token.
    """
    if not stop_strings:
        return False
    last_id = ids[-1:]
    if not detokenize(tokenizer, last_id) and tokenizer.decode(last_id) in stop_strings:
        return True
    text = detokenize_end(tokenizer, ids, max(map(len, stop_strings)))
    return any(stop in text for stop in stop_strings)
