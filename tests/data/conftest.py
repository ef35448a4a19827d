"""What tests of data share."""

from collections.abc import Callable

import pytest
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def train_tokenizer() -> Callable[[list[str], int], PreTrainedTokenizerFast]:
    """(texts, vocabulary) -> a byte-level BPE of so many ids."""

    def train(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
        special = ["<|endoftext|>", "<|mask|>", "<|pad|>"]
        bpe = ByteLevelBPETokenizer(add_prefix_space=False)
        bpe.train_from_iterator(
            texts, vocab_size=vocabulary, special_tokens=special, show_progress=False
        )
        end_of_text, mask, pad = special
        return PreTrainedTokenizerFast(
            tokenizer_object=bpe._tokenizer, eos_token=end_of_text, mask_token=mask, pad_token=pad
        )

    return train
