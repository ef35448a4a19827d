"""The options of a masked diffusion model's training. This module does not import torch, so that an
invalid option raises an error before torch is loaded."""

from dataclasses import dataclass

from data.rows import DataConfig
from infer.utils.checks import require_at_least, require_one_of, require_positive


@dataclass
class DiffusionConfig:
    """Options for the training of a masked diffusion language model. The defaults train the small
    diffusion model that benchmarks/embedded_model.py describes.

    out: the folder that the command writes
    seed: seed of the order of the data and of the masking
    init: the causal language model to start from, and its tokenizer. A folder or hub id of a Qwen3
        model; 'embedded' is the small model that this project contains
    mask_token_id: id of the mask token. null means the tokenizer's mask token, or an unused token
        id if the tokenizer has none
    block_length: number of tokens of a block in decoding. In training, one block of each document
        is masked. null means that whole documents are masked
    weighting: how masked tokens are weighted in the loss. With 'elbo' the loss is an estimate of
        the upper bound on the negative log-likelihood; with 'flat' every masked token has weight 1
    path: the training data, a file or folder of texts or chats (see data/rows.py). null means half
        the Python standard library and half outputs of the small target model in this repository.
        The upper bound on the negative log-likelihood is measured on held-out text of path, or of
        the standard library
    length: number of tokens of a packed sequence; longer documents are split
    batch_size: packed sequences per step
    steps: number of training steps
    lr: peak learning rate of Muon and AdamW
    """

    out: str = "runs/embedded-diffusion"
    seed: int = 0
    init: str = "embedded"
    mask_token_id: int | None = None
    block_length: int | None = 32
    weighting: str = "flat"
    path: str | None = None
    length: int = 256
    batch_size: int = 16
    steps: int = 440
    lr: float = 1e-3

    def check(self) -> None:
        """Raise ValueError, with a message for the user, for invalid options."""
        for data in self.data_configs():
            data.check()
        require_at_least(self, batch_size=1, steps=1)
        num_data_sets = len(self.data_configs())
        if self.batch_size % num_data_sets:
            raise ValueError(
                f"batch_size={self.batch_size} cannot be divided evenly among {num_data_sets} "
                f"data sets: choose a multiple of {num_data_sets}"
            )
        if self.block_length is not None and not 1 <= self.block_length <= self.length:
            raise ValueError(
                f"block_length={self.block_length} is not allowed: it must be from 1 to "
                f"length={self.length} tokens, or null"
            )
        require_positive(self, "", "lr")
        require_one_of(self, weighting=("elbo", "flat"))

    def data_configs(self) -> list[DataConfig]:
        """Return the options of each training data set. Every batch has the same number of packed
        sequences from each data set."""
        if self.path is not None:
            return [DataConfig(source="jsonl", path=self.path, length=self.length)]
        return [DataConfig(source=source, length=self.length) for source in ("stdlib", "embedded")]
