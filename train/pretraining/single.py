"""The steps of a small model's training in one process, without an engine: what language_model.py and
masked/diffusion.py share."""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from infer.utils.progress import Progress
from train.config import OptimConfig
from train.optim import make_optimizer, set_rate, trapezoid

if TYPE_CHECKING:
    from train.pretraining.config import PretrainConfig

CLIP = 1.0  # largest norm of the gradient


@dataclass(frozen=True)
class StepTaken:
    """One step, as the log has it."""

    step: int  # counted from 1
    loss: float
    gradient_norm: float  # before clipping
    lr: float
    tokens_per_second: float


def small_optimizer(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """Return Muon for matrices, which decay, and AdamW for the rest."""
    return make_optimizer(model, OptimConfig(name="muon", lr=rate, weight_decay=0.05))


def take_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: "PretrainConfig",
    first: int,
    backward: Callable[[int], float],
    warmup: float,
    decay: float,
) -> Iterator[StepTaken]:
    """Take the steps after the `first`, and yield each; show the loss, a running mean.

    config: or another with its steps, lr, batch and length; backward(step): computes the gradients of a step, counted
    from 0, and returns its loss.
    """
    began, progress = time.time(), Progress("training", "steps", first, stream=sys.stdout)
    mean = None
    for step in range(first, config.steps):
        rate = set_rate(optimizer, config.lr * trapezoid(step, config.steps, warmup, decay))
        loss = backward(step)
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP).item()
        optimizer.step()
        optimizer.zero_grad()
        done, seconds = step + 1, time.time() - began
        speed = (done - first) * config.batch * config.length / seconds
        mean = loss if mean is None else 0.95 * mean + 0.05 * loss
        progress(done, config.steps, f"loss {mean:.3f}, {speed:,.0f} tokens/s")
        yield StepTaken(done, loss, norm, rate, speed)
