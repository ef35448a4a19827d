"""Detokenization of growing outputs. The search for stop strings, streams and final answers all use
these functions, so that all have the same text.

Adjacent byte tokens (`<0xNN>`) are decoded together. One more byte token may turn all of them from
characters into replacement characters, or back. Special tokens between byte tokens are removed
before decoding. An output is therefore split only after a token with stable text, which is a token
with text that is no byte token.
"""

import re
from typing import cast

from transformers import PreTrainedTokenizerBase

BYTE_TOKEN_PATTERN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# Bytes of the longest UTF-8 character. A character therefore has at most so many byte tokens.
MAX_CHARACTER_BYTES = 4


def detokenize(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], keep_special: bool = False
) -> str:
    """Return the text of the tokens `ids`. Special tokens are left out unless `keep_special`.

    Spaces are not cleaned up, since changing "do n't" to "don't" would alter text that was streamed
    before.
    """
    text = tokenizer.decode(
        ids, skip_special_tokens=not keep_special, clean_up_tokenization_spaces=False
    )
    return cast(str, text)


def has_stable_text(tokenizer: PreTrainedTokenizerBase, id: int) -> bool:
    """Return whether no later token can change the text of token `id` and of the tokens before it.

    A byte-level token that ends with part of a character counts as stable: the replacement
    character at its end shows that it is incomplete.
    """
    token = cast(str, tokenizer.convert_ids_to_tokens(id) or "")
    if BYTE_TOKEN_PATTERN.fullmatch(token):
        return False
    return detokenize(tokenizer, [id]) != ""


def count_stable_tokens(tokenizer: PreTrainedTokenizerBase, ids: list[int], first: int = 0) -> int:
    """Return the number of tokens up to and including the last token with stable text. The result
    is at least `first`."""
    length = len(ids)
    while length > first and not has_stable_text(tokenizer, ids[length - 1]):
        length -= 1
    return length


def detokenize_end(tokenizer: PreTrainedTokenizerBase, ids: list[int], num_chars: int) -> str:
    """Return the end of an output's text.

    It consists of the text that the last token may have changed, and of at least `num_chars`
    characters before (fewer if the output is shorter).
    """
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
    # Cut the first characters off: they may be incomplete, or lack a leading space.
    return text[MAX_CHARACTER_BYTES:]


def completes_stop_string(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], stop_strings: list[str]
) -> bool:
    """Return whether the last token completes one of the stop strings.

    The stop string appears in the text, or the last token is a special token with this name.
    Special tokens are not part of the text.
    """
    if not stop_strings:
        return False
    last_id = ids[-1:]
    if not detokenize(tokenizer, last_id) and tokenizer.decode(last_id) in stop_strings:
        return True
    text = detokenize_end(tokenizer, ids, max(map(len, stop_strings)))
    return any(stop in text for stop in stop_strings)
