"""The options of a masked diffusion model's training. This module does not import torch, so that an
invalid option raises an error before torch is loaded."""

from dataclasses import dataclass

from data.rows import DataConfig
from infer.utils.checks import require_at_least, require_one_of, require_positive


@dataclass
class DiffusionConfig:
    """Options of training a masked diffusion model. The defaults are the recipe of the small one
    that benchmarks/embedded_model.py describes.

    out: the folder that is written
    seed: seed of data order and noise
    init: the causal model to start from, with its tokenizer: a folder or hub id of a Qwen3 model
    mask_token_id: id of the mask token; null: the tokenizer's mask token, else an unused id
    block_length: tokens of a block in decoding; null: noise is applied to whole documents
    weighting: weights of the loss. elbo: the exact bound on the log-likelihood; flat: every masked
        token counts once
    path: texts or chats, a file or folder (see data/rows.py); null: half the Python standard
        library, half outputs of the embedded target. The bound is measured on held-out text of the
        first
    length: tokens of a packed sequence, and the maximum of a document
    batch_size: packed sequences per step
    steps: training steps
    lr: peak learning rate of both optimisers
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
        """Raise ValueError, with one sentence, for invalid options."""
        for data in self.data_configs():
            data.check()
        require_at_least(self, batch_size=1, steps=1)
        num_data_sets = len(self.data_configs())
        if self.batch_size % num_data_sets:
            raise ValueError(
                f"batch_size={self.batch_size} cannot be divided evenly among {num_data_sets} data "
                "sets"
            )
        if self.block_length is not None and not 1 <= self.block_length <= self.length:
            raise ValueError(
                f"block_length={self.block_length}: it must be from 1 to length={self.length} "
                "tokens, or null"
            )
        require_positive(self, "", "lr")
        require_one_of(self, weighting=("elbo", "flat"))

    def data_configs(self) -> list[DataConfig]:
        """Return the data sets, which have equal shares of every batch."""
        if self.path is not None:
            return [DataConfig(source="jsonl", path=self.path, length=self.length)]
        return [DataConfig(source=source, length=self.length) for source in ("stdlib", "embedded")]
