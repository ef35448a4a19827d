"""Streams are the answer in pieces and stop strings never come through, whatever the tokens: bytes,
special ones."""

import random
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from infer.api import TextStream, answer_text
from infer.config import TextOptions
from infer.engine.sequence import Sequence
from infer.engine.words import last_words, words_of

PLAIN = ["a", "b", "c", "ab", "▁", "▁a", "▁b", "ca", "中", "\n", "▁▁"]
BYTES = [0x61, 0x62, 0x20, 0xE4, 0xB8, 0xAD, 0xC3, 0xA9, 0xFF, 0xF0]
TOKENS = 60


@pytest.fixture(scope="module")
def byte_fallback():
    """A target with a Llama-like tokenizer, of which only the vocabulary is small."""
    tokens = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), *PLAIN]
    inner = Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True)
    )
    steps = (
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    )
    inner.decoder = decoders.Sequence(list(steps))
    inner.add_special_tokens([AddedToken("<|s|>", special=True), AddedToken("<|t|>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    return SimpleNamespace(tokenizer=tokenizer, end_ids=frozenset(), name="bytes")


def drawn_ids(target, dice: random.Random) -> list[int]:
    """Return random tokens: words, special ones, and bytes that are seldom characters."""
    names = [*PLAIN, *PLAIN, *(f"<0x{byte:02X}>" for byte in BYTES), "<|s|>", "<|s|>", "<|t|>"]
    ids = target.tokenizer.convert_tokens_to_ids(names)
    whole = target.tokenizer.convert_tokens_to_ids(["<0xE4>", "<0xB8>", "<0xAD>"])
    return [
        id for _ in range(TOKENS) for id in (whole if dice.random() < 0.1 else [dice.choice(ids)])
    ][:TOKENS]


def streamed(
    target, ids: list[int], options: TextOptions, dice: random.Random
) -> tuple[Sequence, list[str]]:
    """Write tokens in rounds of a few; return the finished text and its stream."""
    text = Sequence([1], options)
    pieces = TextStream(target, text)
    seen = []
    while text.finish is None:
        text.append(ids[len(text.ids) :][: dice.randint(1, 6)], target)
        seen.append(pieces.next())
    return text, seen


@pytest.mark.parametrize("texts", [200, pytest.param(1500, marks=pytest.mark.robustness)])
@pytest.mark.parametrize(
    "stops", [[], ["ab"], ["a b", "c\n"], ["中", "é"], ["b中a", "ca c", " \n"], ["aab abc", "ba"]]
)
def test_streams_of_random_tokens_are_the_answer_and_hold_no_stop_string(
    byte_fallback, stops, texts
):
    dice = random.Random(7)
    options = TextOptions(max_new_tokens=TOKENS, stop=stops)
    early = 0
    for _ in range(texts):
        ids = drawn_ids(byte_fallback, dice)
        text, seen = streamed(byte_fallback, ids, options, dice)
        assert "".join(seen) == answer_text(byte_fallback, text.ids, options)
        assert not any(stop in "".join(seen) for stop in stops)
        # The text ends with the first of its beginnings that has a stop string.
        beginnings = (
            words_of(byte_fallback.tokenizer, ids[:length]) for length in range(1, TOKENS + 1)
        )
        found = (
            i + 1 for i, words in enumerate(beginnings) if any(stop in words for stop in stops)
        )
        assert len(text.ids) == next(found, TOKENS)
        early += any(seen[:-1])
    assert early > texts // 3  # they come in pieces


def test_special_tokens_inside_a_stop_string_are_no_part_of_it(byte_fallback):
    ids = byte_fallback.tokenizer.convert_tokens_to_ids(["c", "a", *["<|s|>"] * 50, "b", "c", "c"])
    options = TextOptions(max_new_tokens=len(ids), stop=["ab"])
    text, seen = streamed(byte_fallback, ids, options, random.Random(0))
    assert "".join(seen) == answer_text(byte_fallback, text.ids, options) == "c"
    assert text.finish == "stop" and len(text.ids) == 53


def test_a_special_token_may_be_a_stop_string_itself(byte_fallback):
    ids = byte_fallback.tokenizer.convert_tokens_to_ids(["c", "<|s|>", "a", "<|t|>", "b"])
    options = TextOptions(max_new_tokens=9, stop=["<|t|>"])
    text, seen = streamed(byte_fallback, ids, options, random.Random(0))
    assert "".join(seen) == "ca" and text.finish == "stop" and len(text.ids) == 4


def test_only_the_end_of_a_long_text_is_decoded(byte_fallback):
    ids = byte_fallback.tokenizer.convert_tokens_to_ids(["▁a", "<|s|>", "b"] * 2000)
    words = last_words(byte_fallback.tokenizer, ids, 5)
    assert words_of(byte_fallback.tokenizer, ids).endswith(words) and 5 <= len(words) < 200


def test_a_tokenizer_that_cleans_up_spaces_streams_what_it_answers():
    """Word pieces, of which decoding whole texts would join "do n't ." to "don't."."""
    words = ["[UNK]", "do", "n", "'", "t", ".", ",", "I", "'m", "n't"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(
            models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]")
        ),
        clean_up_tokenization_spaces=True,
    )
    ids = list(range(1, len(words))) * 3
    assert tokenizer.decode([1, 9, 5]) == "don't." and words_of(tokenizer, [1, 9, 5]) == "do n't ."
    target = SimpleNamespace(tokenizer=tokenizer, end_ids=frozenset())
    for seed in range(5):
        text, seen = streamed(
            target, ids, TextOptions(max_new_tokens=len(ids), stop=["t ; x"]), random.Random(seed)
        )
        assert (
            "".join(seen) == answer_text(target, text.ids, text.options) == words_of(tokenizer, ids)
        )
