"""Options of a masked diffusion model's training. No torch here: a wrong option is refused before
it loads."""

from dataclasses import dataclass

from data.rows import DataConfig
from infer.utils.checks import above_zero, at_least, one_of


@dataclass
class DiffusionConfig:
    """Options of a masked diffusion model's training; every default is the recipe of the embedded
    one.

    out: the folder that is written
    seed: seed of data order and noise
    start: the causal model to begin as, and its tokenizer: a Qwen3's folder or hub id
    mask_token_id: id of the mask; None: the tokenizer's mask token, else an id that no text uses
    block_length: tokens decoded as one block; None: documents are noised whole
    weighting: how the loss is weighted. elbo: the bound itself; flat: every covered token counts
        once, less noisy
    path: texts or chats, a file or folder (see data/rows.py); None: half the standard library, half
        what the embedded target wrote. The bound is measured on held-out text of the first
    length: tokens of a packed row, and of a document at most
    batch: rows a step
    steps: training steps
    lr: peak rate of both optimisers
    """

    out: str = "runs/embedded-diffusion"
    seed: int = 0
    start: str = "embedded"
    mask_token_id: int | None = None
    block_length: int | None = 32
    weighting: str = "flat"
    path: str | None = None
    length: int = 256
    batch: int = 16
    steps: int = 440
    lr: float = 1e-3

    def check(self) -> None:
        """Raise ValueError, one sentence, for a run that cannot work."""
        for data in self.sets():
            data.check()
        at_least(self, batch=1, steps=1)
        if self.batch % len(self.sets()):
            raise ValueError(
                f"batch={self.batch} cannot be shared equally by {len(self.sets())} data sets"
            )
        if self.block_length is not None and not 1 <= self.block_length <= self.length:
            raise ValueError(
                f"block_length={self.block_length}: 1 to length={self.length} tokens, or null"
            )
        above_zero(self, "", "lr")
        one_of(self, weighting=("elbo", "flat"))

    def sets(self) -> list[DataConfig]:
        """The data sets to learn from, equal shares of every batch."""
        if self.path is not None:
            return [DataConfig(source="jsonl", path=self.path, length=self.length)]
        return [DataConfig(source=source, length=self.length) for source in ("stdlib", "embedded")]
