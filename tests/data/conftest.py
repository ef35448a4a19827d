"""Fixtures of the tests of data."""

from collections.abc import Callable

import pytest
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def train_tokenizer() -> Callable[[list[str], int], PreTrainedTokenizerFast]:
    """Return a function (texts, vocabulary size) -> byte-level BPE tokenizer."""

    def train(texts: list[str], vocabulary_size: int) -> PreTrainedTokenizerFast:
        special_tokens = ["<|endoftext|>", "<|mask|>", "<|pad|>"]
        bpe = ByteLevelBPETokenizer(add_prefix_space=False)
        bpe.train_from_iterator(
            texts, vocab_size=vocabulary_size, special_tokens=special_tokens, show_progress=False
        )
        end_of_text, mask, pad = special_tokens
        return PreTrainedTokenizerFast(
            tokenizer_object=bpe._tokenizer, eos_token=end_of_text, mask_token=mask, pad_token=pad
        )

    return train
