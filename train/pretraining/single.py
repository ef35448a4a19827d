"""The steps of a small model's training in one process, without an engine: what language_model.py and
masked/diffusion.py share."""

import sys
from collections.abc import Callable, Iterator

from torch import nn

from infer.utils.progress import Progress
from train.config import OptimConfig
from train.optim import make_optimizer, set_rate, trapezoid

WARMUP, DECAY = 0.05, 0.9  # shares of the steps


def take_steps(
    model: nn.Module, rate: float, steps: int, backward: Callable[[int], float]
) -> Iterator[tuple[int, float]]:
    """Take the steps, with Muon for matrices, which decay, and AdamW for the rest; yield how many are
    taken and the loss, after each.

    rate: the peak rate; backward(step): computes the gradients of a step, counted from 0, and returns
        its loss.
    """
    optimizer = make_optimizer(model, OptimConfig(name="muon", lr=rate), decay=0.05)
    progress = Progress("training", "steps", stream=sys.stdout)
    for step in range(steps):
        set_rate(optimizer, rate * trapezoid(step, steps, WARMUP, DECAY))
        loss = backward(step)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress(step + 1, steps, f"loss {loss:.3f}")
        yield step + 1, loss
