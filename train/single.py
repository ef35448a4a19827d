"""The steps of a small model's training in one process, without an engine: what pretrain.py and masked/diffusion.py
share."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

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
    """Take the steps after the `first`, and yield each; print the loss of every 20.

    config: PretrainConfig or DiffusionConfig; backward(step): computes the gradients of a step, counted from 0, and
    returns its loss.
    """
    began, recent = time.time(), []
    for step in range(first, config.steps):
        rate = set_rate(optimizer, config.lr * trapezoid(step, config.steps, config.warmup, config.decay))
        loss = backward(step)
        norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip).item()
        optimizer.step()
        optimizer.zero_grad()
        recent.append(loss)
        done, seconds = step + 1, time.time() - began
        speed = (done - first) * config.batch * config.length / seconds
        if done % 20 == 0 or done == config.steps:
            left = seconds / (done - first) * (config.steps - done) / 60
            mean = sum(recent) / len(recent)
            print(f"step {done}/{config.steps} loss {mean:.3f} {speed:,.0f} tokens/s, {left:.0f} min left", flush=True)
            recent.clear()
        yield StepTaken(done, loss, norm, rate, speed)
