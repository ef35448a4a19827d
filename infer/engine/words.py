"""A text's tokens as the words that users see: without special tokens. Where stop strings are
looked for, where streams may go on, and what an answer says all come from here, and so agree.

Byte tokens (`<0xNN>`) that stand side by side are decoded together: one more may turn all of them
from characters to replacement signs, or back. Special tokens between them vanish first. A text is
therefore only cut behind a firm token, one that says something by itself and is no byte.
"""

import re

BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
CHARACTER = 4  # bytes of the longest character, and so the most tokens it takes


def words_of(tokenizer: object, ids: list[int], special: bool = False) -> str:
    """Return the text of tokens, without special ones unless `special`. Spaces stay as they are: a
    tokenizer that cleans them up, "do n't" to "don't", would change words that a stream has given
    away."""
    return tokenizer.decode(
        ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False
    )


def is_firm(tokenizer: object, id: int) -> bool:
    """Return whether no later token can change what this one says or said before it. A byte-level
    token with half a character counts as firm: its text ends with a replacement sign, which shows
    it."""
    return (
        not BYTE.fullmatch(tokenizer.convert_ids_to_tokens(id) or "")
        and words_of(tokenizer, [id]) != ""
    )


def firm_length(tokenizer: object, ids: list[int], first: int = 0) -> int:
    """Return how many tokens there are up to the last firm one, or `first` where none follows
    it."""
    length = len(ids)
    while length > first and not is_firm(tokenizer, ids[length - 1]):
        length -= 1
    return length


def last_words(tokenizer: object, ids: list[int], size: int) -> str:
    """Return the end of a text: what its last tokens may have changed and `size` characters before
    that, or more."""
    firm = start = firm_length(tokenizer, ids)
    words = ""
    step = CHARACTER * size + 2 * CHARACTER
    while start > 0 and len(words) < size + CHARACTER:
        start = firm_length(tokenizer, ids[: max(0, start - step)])
        words = words_of(tokenizer, ids[start:firm])
        step = 2 * step
    if firm < len(ids):
        words = words_of(tokenizer, ids[start:])
    # The first characters may be half ones, or lack a leading space.
    return words[CHARACTER:] if start else words


def reaches_stop(tokenizer: object, ids: list[int], stops: list[str]) -> bool:
    """Return whether the last of these tokens completes a stop string: in the words of the text, or
    as a special token of that very name, which has no words."""
    if not stops:
        return False
    last = ids[-1:]
    if not words_of(tokenizer, last) and tokenizer.decode(last) in stops:
        return True
    words = last_words(tokenizer, ids, max(map(len, stops)))
    return any(stop in words for stop in stops)
