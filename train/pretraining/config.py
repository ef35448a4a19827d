"""Options of the embedded target's pre-training. No torch here: a wrong option is refused before it
loads."""

from dataclasses import dataclass

from infer.utils.checks import above_zero, at_least


@dataclass
class PretrainConfig:
    """Options of the embedded target's pre-training; data/embedded/pretraining.json has those of the
    shipped one.

    out: the folder that is written
    init: a folder to go on from, tokenizer and weights, instead of random weights
    sizes: a model whose config.json has the sizes of the new one: a folder, or embedded
    seed: seed of weights and data order
    batch: windows of 512 tokens a step
    steps: training steps
    lr: peak rate of both optimisers
    """

    out: str = "runs/embedded-target"
    init: str | None = None
    sizes: str = "embedded"
    seed: int = 0
    batch: int = 16
    steps: int = 1000
    lr: float = 3e-3

    def check(self) -> None:
        """Raise ValueError for a recipe that cannot run."""
        at_least(self, steps=1, batch=1)
        above_zero(self, "", "lr")
