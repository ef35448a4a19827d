"""DFlash 2's convolutions: every slot of a block sees a little of the slots before it, around attention
and around the feed-forward half of a layer.

Conv(x)_t = sum_o (base[o] + delta_t[o, group]) x_{t-o}, zero across the block's edge; one before the
sublayer and one behind it, both with kernels made from what the sublayer is given.

B rows, Q queries of all blocks, W queries of a block, D hidden size, O taps, C channels that share a
kernel.
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import Qwen3Config


class Convolution(nn.Module):
    """The two convolutions around a sublayer; a fresh one changes nothing."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        own, size = config.dflash_config, config.hidden_size
        self.width, self.taps, self.channels = config.block_size, own["conv_kernel_size"], own["conv_group_size"]
        self.base_kernel = nn.Parameter(torch.empty(2, self.taps, size))
        self.kernel_projection = nn.Linear(size, 2 * self.taps * size // self.channels, bias=False)

    def init_weights(self) -> None:
        """Begin as the identity."""
        nn.init.zeros_(self.kernel_projection.weight)
        nn.init.zeros_(self.base_kernel)
        nn.init.ones_(self.base_kernel[:, 0])

    def kernels(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the kernels before and behind the sublayer, (B, Q, O, D) each, from what it is given,
        (B, Q, D)."""
        delta = self.kernel_projection(states).unflatten(-1, (2, self.taps, -1))  # (B, Q, 2, O, D / C)
        before, behind = (self.base_kernel + delta.repeat_interleave(self.channels, -1)).unbind(2)
        return before, behind

    def convolve(self, states: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
        """Return states (B, Q, D) under a kernel (B, Q, O, D)."""
        blocks = states.unflatten(1, (-1, self.width))  # (B, N, W, D)
        shifted = [F.pad(blocks, (0, 0, tap, 0))[:, :, : self.width].flatten(1, 2) for tap in range(self.taps)]
        return (torch.stack(shifted, 2) * kernel).sum(2)
