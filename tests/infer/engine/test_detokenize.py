"""The pieces of a stream join to the answer, and contain no stop string, also with byte tokens and
special tokens."""

import random
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from infer.api import IncrementalDetokenizer, decode_output
from infer.config import SamplingOptions
from infer.engine.detokenize import detokenize, detokenize_end
from infer.engine.sequence import Sequence

TEXT_TOKENS = ["a", "b", "c", "ab", "▁", "▁a", "▁b", "ca", "中", "\n", "▁▁"]
BYTE_VALUES = [0x61, 0x62, 0x20, 0xE4, 0xB8, 0xAD, 0xC3, 0xA9, 0xFF, 0xF0]
OUTPUT_TOKENS = 60


@pytest.fixture(scope="module")
def byte_fallback():
    """Return a target with a Llama-like tokenizer that has a small vocabulary."""
    tokens = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), *TEXT_TOKENS]
    backend = Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True)
    )
    steps = (
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    )
    backend.decoder = decoders.Sequence(list(steps))
    backend.add_special_tokens(
        [AddedToken("<|s|>", special=True), AddedToken("<|t|>", special=True)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    return SimpleNamespace(tokenizer=tokenizer, eos_token_ids=frozenset(), name="bytes")


def draw_ids(target, dice: random.Random) -> list[int]:
    """Return random tokens: text, special tokens, and bytes that are seldom whole characters."""
    names = [
        *TEXT_TOKENS,
        *TEXT_TOKENS,
        *(f"<0x{byte:02X}>" for byte in BYTE_VALUES),
        "<|s|>",
        "<|s|>",
        "<|t|>",
    ]
    ids = target.tokenizer.convert_tokens_to_ids(names)
    character = target.tokenizer.convert_tokens_to_ids(["<0xE4>", "<0xB8>", "<0xAD>"])
    drawn = []
    while len(drawn) < OUTPUT_TOKENS:
        drawn += character if dice.random() < 0.1 else [dice.choice(ids)]
    return drawn[:OUTPUT_TOKENS]


def stream_ids(
    target, ids: list[int], options: SamplingOptions, dice: random.Random
) -> tuple[Sequence, list[str]]:
    """Append tokens in rounds of 1 to 6. Return the finished sequence, and its stream's pieces."""
    sequence = Sequence([1], options)
    stream = IncrementalDetokenizer(target, sequence)
    pieces = []
    while sequence.finish_reason is None:
        sequence.append(ids[len(sequence.ids) :][: dice.randint(1, 6)], target)
        pieces.append(stream.next_text())
    return sequence, pieces


@pytest.mark.parametrize("num_sequences", [200, pytest.param(1500, marks=pytest.mark.robustness)])
@pytest.mark.parametrize(
    "stops", [[], ["ab"], ["a b", "c\n"], ["中", "é"], ["b中a", "ca c", " \n"], ["aab abc", "ba"]]
)
def test_streams_of_random_tokens_are_the_answer_and_contain_no_stop_string(
    byte_fallback, stops, num_sequences
):
    dice = random.Random(7)
    options = SamplingOptions(max_new_tokens=OUTPUT_TOKENS, stop=stops)
    num_with_early_pieces = 0
    for _ in range(num_sequences):
        ids = draw_ids(byte_fallback, dice)
        sequence, pieces = stream_ids(byte_fallback, ids, options, dice)
        text = "".join(pieces)
        assert text == decode_output(byte_fallback, sequence.ids, options)
        assert not any(stop in text for stop in stops)
        # The sequence ends at the first token whose text so far contains a stop string.
        expected_length = OUTPUT_TOKENS
        for length in range(OUTPUT_TOKENS, 0, -1):
            text = detokenize(byte_fallback.tokenizer, ids[:length])
            if any(stop in text for stop in stops):
                expected_length = length
        assert len(sequence.ids) == expected_length
        num_with_early_pieces += any(pieces[:-1])
    assert num_with_early_pieces > num_sequences // 3  # streams have several pieces


def test_special_tokens_inside_a_stop_string_are_ignored(byte_fallback):
    ids = byte_fallback.tokenizer.convert_tokens_to_ids(["c", "a", *["<|s|>"] * 50, "b", "c", "c"])
    options = SamplingOptions(max_new_tokens=len(ids), stop=["ab"])
    sequence, pieces = stream_ids(byte_fallback, ids, options, random.Random(0))
    assert "".join(pieces) == decode_output(byte_fallback, sequence.ids, options) == "c"
    assert sequence.finish_reason == "stop" and len(sequence.ids) == 53


def test_a_special_token_may_be_a_stop_string(byte_fallback):
    ids = byte_fallback.tokenizer.convert_tokens_to_ids(["c", "<|s|>", "a", "<|t|>", "b"])
    options = SamplingOptions(max_new_tokens=9, stop=["<|t|>"])
    sequence, pieces = stream_ids(byte_fallback, ids, options, random.Random(0))
    assert "".join(pieces) == "ca"
    assert sequence.finish_reason == "stop" and len(sequence.ids) == 4


def test_only_the_end_of_a_long_text_is_decoded(byte_fallback):
    ids = byte_fallback.tokenizer.convert_tokens_to_ids(["▁a", "<|s|>", "b"] * 2000)
    end = detokenize_end(byte_fallback.tokenizer, ids, 5)
    assert detokenize(byte_fallback.tokenizer, ids).endswith(end) and 5 <= len(end) < 200


def test_a_tokenizer_that_cleans_up_spaces_streams_its_answer():
    """The tokenizer would clean up "do n't ." to "don't."."""
    words = ["[UNK]", "do", "n", "'", "t", ".", ",", "I", "'m", "n't"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(
            models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]")
        ),
        clean_up_tokenization_spaces=True,
    )
    ids = list(range(1, len(words))) * 3
    assert tokenizer.decode([1, 9, 5]) == "don't."
    assert detokenize(tokenizer, [1, 9, 5]) == "do n't ."
    target = SimpleNamespace(tokenizer=tokenizer, eos_token_ids=frozenset())
    options = SamplingOptions(max_new_tokens=len(ids), stop=["t ; x"])
    for seed in range(5):
        sequence, pieces = stream_ids(target, ids, options, random.Random(seed))
        assert decode_output(target, sequence.ids, options) == detokenize(tokenizer, ids)
        assert "".join(pieces) == detokenize(tokenizer, ids)
