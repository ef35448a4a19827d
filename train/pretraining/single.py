"""The steps of a small model's training in one process, without an engine: what language_model.py and
masked/diffusion.py share."""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from infer.utils.progress import Progress
from train.optim import set_rate, trapezoid


@dataclass(frozen=True)
class StepTaken:
    """One step, as the log has it."""

    step: int  # counted from 1
    loss: float
    gradient_norm: float  # before clipping
    lr: float
    tokens_per_second: float


def take_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, config, first: int, backward: Callable[[int], float]
) -> Iterator[StepTaken]:
    """Take the steps after the `first`, and yield each; show the loss, a running mean.

    config: PretrainConfig or DiffusionConfig; backward(step): computes the gradients of a step, counted from 0, and
    returns its loss.
    """
    began, progress = time.time(), Progress("training", "steps", first, stream=sys.stdout)
    mean = None
    for step in range(first, config.steps):
        rate = set_rate(optimizer, config.lr * trapezoid(step, config.steps, config.warmup, config.decay))
        loss = backward(step)
        norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip).item()
        optimizer.step()
        optimizer.zero_grad()
        done, seconds = step + 1, time.time() - began
        speed = (done - first) * config.batch * config.length / seconds
        mean = loss if mean is None else 0.95 * mean + 0.05 * loss
        progress(done, config.steps, f"loss {mean:.3f}, {speed:,.0f} tokens/s")
        yield StepTaken(done, loss, norm, rate, speed)
