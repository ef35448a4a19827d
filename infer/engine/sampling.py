"""How the target chooses a token: greedily, or by position-keyed Gumbel noise.

B rows, Q nodes, L drafted positions, V vocabulary.

The token at absolute position t is argmax(logits / temperature + G(seed, t, token)) with standard Gumbel noise G. That
is an exact sample from softmax(logits / temperature), and since the noise depends on nothing but seed, position and
token, every method, tree, budget and batch gives the same text for the same seed.
"""

import math
from collections.abc import Sequence

import torch

from infer.config import TextOptions


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
    """Return Gumbel(0, 1) noise (B, Q, V) float32 for seeds (B,) and positions (B, Q), both int64: a pure function of
    seed, position and token id, whatever the shape around them and the device."""
    tokens = torch.arange(vocabulary, device=positions.device)
    key = _mix(_mix(seed * _GOLDEN + 1)[:, None] + positions * _GOLDEN)  # (B, Q)
    bits = _shift(_mix(key[..., None] + tokens * _GOLDEN), 11)  # (B, Q, V) 53 random bits
    uniform = (bits.double() + 0.5) * 2.0**-53  # inside (0, 1)
    return -torch.log(-torch.log(uniform)).float()


def round_noise(rows: Sequence[TextOptions], start: torch.Tensor, steps: int, vocabulary: int) -> torch.Tensor | None:
    """Return the noise of one round's positions start + 1 .. start + steps, start (B,): (B, steps, V), zero for greedy
    rows; None when all rows are greedy. It belongs to positions, not to nodes."""
    if all(row.temperature == 0 for row in rows):
        return None
    seeds = torch.tensor([row.seed for row in rows], device=start.device)
    noise = gumbel_noise(seeds, start[:, None] + 1 + torch.arange(steps, device=start.device), vocabulary)
    greedy = torch.tensor([row.temperature == 0 for row in rows], device=start.device)
    return noise.masked_fill_(greedy[:, None, None], 0.0)


def adjust(logits: torch.Tensor, rows: Sequence[TextOptions], seen: torch.Tensor | None = None) -> torch.Tensor:
    """Return logits (B, Q, V) under every row's own penalty, temperature and filters, as Hugging Face's processors
    would leave them: float32, tokens that may not be chosen at minus infinity. `seen` (B, Q, V) bool marks the tokens
    in a node's true prefix. Temperature and filters are skipped for greedy rows: neither changes the likeliest
    token."""
    logits = logits.float()

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, device=logits.device).view(-1, 1, 1)

    if seen is not None:
        penalty = column([row.repetition_penalty for row in rows])
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    sampled = [row.temperature > 0 for row in rows]
    if not any(sampled):
        return logits
    logits = logits / column([row.temperature if row.temperature > 0 else 1.0 for row in rows])
    vocabulary = logits.shape[-1]
    top_k = [
        min(row.top_k, vocabulary) if row.top_k and on else vocabulary for row, on in zip(rows, sampled, strict=True)
    ]
    top_p = [row.top_p if on else 1.0 for row, on in zip(rows, sampled, strict=True)]
    min_p = [row.min_p if on else 0.0 for row, on in zip(rows, sampled, strict=True)]
    if min(top_k) < vocabulary or min(top_p) < 1:
        order = logits.sort(dim=-1, descending=True).values
        k = column(top_k)
        lowest = order.gather(-1, (k - 1).expand(*logits.shape[:2], 1))  # (B, Q, 1)
        if min(top_p) < 1:
            shares = order.masked_fill(order < lowest, -math.inf).softmax(-1)
            before = shares.cumsum(-1) - shares  # the probability of all likelier tokens
            kept = (before < column(top_p)).sum(-1, keepdim=True).clamp(min=1)
            kept = torch.where(column(top_p) < 1, kept, vocabulary)
            lowest = torch.maximum(lowest, order.gather(-1, kept - 1))
        logits = logits.masked_fill(logits < lowest, -math.inf)
    if max(min_p) > 0:
        lowest = logits.amax(-1, keepdim=True) + column([math.log(p) if p else -math.inf for p in min_p])
        logits = logits.masked_fill(logits < lowest, -math.inf)
    return logits


def choose(
    logits: torch.Tensor,
    depths: torch.Tensor,
    rows: Sequence[TextOptions],
    noise: torch.Tensor | None,
    seen: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the target's token after every node: (B, Q) int64, from logits (B, Q, V) at nodes of depths (B, Q), the
    round's noise (B, > max depth, V), and the tokens of every node's prefix, needed for a penalty only."""
    if noise is None and seen is None:
        return logits.argmax(-1)
    scores = adjust(logits, rows, seen)
    if noise is not None:
        scores = scores + noise.gather(1, depths[..., None].expand(-1, -1, logits.shape[-1]))
    return scores.argmax(-1)


def condition_on_noise(
    marginals: torch.Tensor, rows: Sequence[TextOptions], noise: torch.Tensor | None, seen: torch.Tensor | None
) -> torch.Tensor:
    """Return marginals (B, L, V), log space, with the target's noise added: the target's draw at a position is a known
    function of its distribution and of the noise there, so that a drafter with the same noise guesses the draw itself
    (DECODING.md). Lossless in any case, since a tree only proposes. `seen` (B, 1, V) is for the repetition penalty."""
    if noise is None and seen is None:
        return marginals
    scores = adjust(marginals, rows, seen)
    if noise is not None:
        scores = scores + noise[:, : marginals.shape[1]]
    return scores.log_softmax(-1)


def seen_tokens(texts: Sequence[Sequence[int]], vocabulary: int, device: torch.device) -> torch.Tensor:
    """Return which tokens each text holds: (B, V) bool."""
    seen = torch.zeros(len(texts), vocabulary, dtype=torch.bool, device=device)
    for row, ids in enumerate(texts):
        seen[row, torch.tensor(ids, device=device)] = True
    return seen


def seen_at_nodes(seen: torch.Tensor, tokens: torch.Tensor, ancestors: torch.Tensor) -> torch.Tensor:
    """Return which tokens the true prefix of every node holds, itself included: (B, M, V) bool, from a tree's tokens
    (B, M), and from the committed tokens' `seen` (B, V), which holds the root."""
    tokens = torch.where(ancestors, tokens[:, None].expand_as(ancestors), tokens[:, :1, None])
    return seen[:, None].repeat(1, ancestors.shape[1], 1).scatter_(2, tokens, True)
