"""Options of a masked diffusion model's training. No torch here: a wrong option is refused before it loads."""

from dataclasses import dataclass, field

from data.rows import DataConfig
from infer.utils.checks import above_zero, at_least, one_of


@dataclass
class DiffusionConfig:
    """Options of a masked diffusion model's training; every default is the recipe of the embedded one.

    out: the folder that is written
    seed: seed of data order and noise
    start: the causal model to begin with, and its tokenizer: a Qwen3's folder or hub id
    device: cpu, cuda, cuda:1, ..., or auto
    warm_start: begin with that model's weights, whose output at i - 1 predicts the token at i; false: with its sizes
        only, and the output at i predicts the token at i
    mask_token_id: id of the mask; None: the tokenizer's mask token, else an id that no text uses
    block_length: tokens decoded as one block; None: documents are noised whole
    whole: share of the rows whose documents are noised whole all the same
    weighting: how the loss is weighted. elbo: the bound itself; flat: every covered token counts once, less
        noisy
    sources: equal shares of every batch: stdlib, embedded, jsonl, hub (see data/rows.py); the bound is measured on
        held-out text of the first
    path: of jsonl, a file or folder; of hub, the data set's name
    length: tokens of a packed row, and of a document at most
    batch: rows a step
    steps: training steps
    lr: peak rate of both optimisers
    precision: dtype of products: float32 or bfloat16; weights stay float32
    save_every: steps between saves, and between measurements of the held-out bound
    held_out: rows that the bound is measured on, each under 4 noise levels
    """

    out: str = "runs/embedded-diffusion"
    seed: int = 0
    start: str = "embedded"
    device: str = "auto"
    warm_start: bool = True
    mask_token_id: int | None = None
    block_length: int | None = 32
    whole: float = 0.25
    weighting: str = "flat"
    sources: list[str] = field(default_factory=lambda: ["stdlib", "embedded"])
    path: str | None = None
    length: int = 256
    batch: int = 16
    steps: int = 440
    lr: float = 1e-3
    precision: str = "bfloat16"
    save_every: int = 40
    held_out: int = 32

    def check(self) -> None:
        """Raise ValueError, one sentence, for a run that cannot work."""
        if not self.start:
            raise ValueError("start=<folder or hub id>: which causal model shall it begin as?")
        if not self.sources or any(source not in ("stdlib", "embedded", "jsonl", "hub") for source in self.sources):
            raise ValueError(f"sources={list(self.sources)}: a list of stdlib, embedded, jsonl, hub")
        for data in self.sets():
            data.check()
        if self.path and not {"jsonl", "hub"} & set(self.sources):
            raise ValueError(f"path={self.path}: for sources=[jsonl] or [hub], not for {list(self.sources)}")
        at_least(self, batch=1, steps=1, save_every=1, held_out=1)
        if self.batch % len(self.sources):
            raise ValueError(f"batch={self.batch} cannot be shared equally by {len(self.sources)} sources")
        if self.block_length is not None and not 1 <= self.block_length <= self.length:
            raise ValueError(
                f"block_length={self.block_length}: 1 to length={self.length} tokens, or null for whole rows"
            )
        if not 0 <= self.whole <= 1:
            raise ValueError(f"whole={self.whole}: a share of the rows, from 0 to 1")
        above_zero(self, "", "lr")
        one_of(self, weighting=("elbo", "flat"), precision=("float32", "bfloat16"))
        if not self.out:
            raise ValueError("out=<folder>: where should the model go?")

    def sets(self) -> list[DataConfig]:
        """The data sets to learn from."""
        return [DataConfig(source=source, path=self.path, length=self.length) for source in self.sources]
