"""How the target chooses a token: greedily, or by position-keyed Gumbel noise.

B rows, Q nodes, V vocabulary.

The token at absolute position t is argmax(log p + G(seed, t, token)) with standard Gumbel noise G. That is an exact
sample from p, and since the noise depends on nothing but seed, position and token, every method, tree, budget and batch
gives the same text for the same seed.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; the seed matters only above it."""

    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature}: 0 for greedy decoding, or above")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN, _MIX_1, _MIX_2 = (_signed(v) for v in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The splitmix64 finaliser: every bit of the result depends on every bit of x. int64, wrapping around."""
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def gumbel_noise(seed: torch.Tensor, positions: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Gumbel(0, 1) noise (B, Q, V) float32 for seeds (B,) and positions (B, Q), both int64: a pure function of seed,
    position and token id, whatever the shape around them and the device."""
    tokens = torch.arange(vocabulary, device=positions.device)
    key = _mix(_mix(seed * _GOLDEN + 1)[:, None] + positions * _GOLDEN)  # (B, Q)
    bits = _shift(_mix(key[..., None] + tokens * _GOLDEN), 11)  # (B, Q, V) 53 random bits
    uniform = (bits.double() + 0.5) * 2.0**-53  # inside (0, 1)
    return -torch.log(-torch.log(uniform)).float()


def choose(
    logits: torch.Tensor,
    depths: torch.Tensor,
    start: torch.Tensor,
    max_depth: int,
    sampling: Sampling,
    row_seeds: torch.Tensor | None = None,
) -> torch.Tensor:
    """The target's token after every node: (B, Q) int64.

    logits (B, Q, V) at nodes of depths (B, Q) <= max_depth under roots at positions start (B,): the token chosen at a
    node stands at position start + depth + 1. Noise is made once a position, not once a node. row_seeds (B,) gives
    every row a seed of its own; by default all rows have sampling.seed, so that a text does not depend on its batch.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    if row_seeds is None:
        row_seeds = torch.full_like(start, sampling.seed)
    positions = start[:, None] + 1 + torch.arange(max_depth + 1, device=start.device)  # (B, max_depth + 1)
    noise = gumbel_noise(row_seeds, positions, logits.shape[-1])
    noise = noise.gather(1, depths[..., None].expand(-1, -1, logits.shape[-1]))  # (B, Q, V)
    return ((logits.float() / sampling.temperature).log_softmax(-1) + noise).argmax(-1)
