"""How the target chooses a token: greedily, or by position-keyed Gumbel noise.

B rows, Q nodes, q of them in a part, L drafted positions, V vocabulary.

The token at absolute position t is argmax(logits / temperature + G(seed, t, token)) with standard
Gumbel noise G. That is an exact sample from softmax(logits / temperature), and since the noise
depends on nothing but seed, position and token, every method, tree, budget and batch gives the same
text for the same seed.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from infer.config import TextOptions

SLAB = 1 << 18  # numbers that one step of sampling works on at least
ON_DEVICE = (
    1 << 24
)  # the same elsewhere than on the CPU, where the number of steps is what takes time
NOISE = 4  # how much more room one of noise takes: its bits have eight bytes, and there are copies

SeenAt = Callable[
    [slice], torch.Tensor
]  # nodes -> which tokens their true prefixes hold, (B, q, V) bool


@dataclass(frozen=True)
class Kind:
    """Which options some row uses; each kind of captured rounds is a graph of its own."""

    sampled: bool = False
    most_k: int = 0  # the largest top_k, up to the next power of two
    top_p: bool = False
    min_p: bool = False
    penalised: bool = False
    # alternatives that are told, up to the next power of two; None: none, nor the token's
    logprobs: int | None = None

    @classmethod
    def of(cls, rows: Sequence[TextOptions], vocabulary: int) -> "Kind":
        """Return the kind of these rows."""
        drawn = [row for row in rows if row.temperature > 0]
        most = max((row.top_k for row in drawn if row.top_k < vocabulary), default=0)
        told = max((row.logprobs for row in rows if row.logprobs is not None), default=None)
        return cls(
            bool(drawn),
            min(_bucket(most), vocabulary - 1),
            any(row.top_p < 1 for row in drawn),
            any(row.min_p > 0 for row in drawn),
            any(row.repetition_penalty != 1 for row in rows),
            None if told is None else min(_bucket(told), vocabulary),
        )


def _bucket(count: int) -> int:
    """Return the next power of two, of 0 itself."""
    return 1 << (count - 1).bit_length() if count else 0


@dataclass(frozen=True)
class Sampling:
    """What B rows ask of sampling: columns (B,) on the device, where options that a row does not
    use change nothing."""

    kind: Kind
    columns: dict[str, torch.Tensor]

    @classmethod
    def of(cls, rows: Sequence[TextOptions], vocabulary: int, device: torch.device) -> "Sampling":
        """Return what texts with these options ask: no columns where none is sampled or
        penalised."""
        kind = Kind.of(rows, vocabulary)
        if not (kind.sampled or kind.penalised):
            return cls(kind, {})
        columns = {
            "sampled": [row.temperature > 0 for row in rows],
            "temperature": [row.temperature or 1.0 for row in rows],
            "top_k": [
                row.top_k if row.temperature and row.top_k < vocabulary else 0 for row in rows
            ],
            "top_p": [row.top_p if row.temperature else 1.0 for row in rows],
            "log_min_p": [
                math.log(row.min_p) if row.temperature and row.min_p else -math.inf for row in rows
            ],
            "repetition_penalty": [row.repetition_penalty for row in rows],
            "seed": [row.seed for row in rows],
        }
        return cls(kind, {name: to_device(column, device) for name, column in columns.items()})

    def rows(self, which: slice, kind: Kind | None = None) -> "Sampling":
        """Return the same of some rows, as if they used no more than `kind`."""
        return Sampling(
            kind or self.kind, {name: column[which] for name, column in self.columns.items()}
        )

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a column, (B, 1, 1)."""
        return self.columns[name][:, None, None]


def to_device(values: Sequence, device: torch.device) -> torch.Tensor:
    """Return values of the host as a tensor on a device, without waiting for the device."""
    tensor = torch.tensor(values)
    return (
        tensor.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else tensor.to(device)
    )


# as signed integers
_GOLDEN, _MIX_1, _MIX_2 = (
    v - (v >> 63 << 64) for v in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The splitmix64 finaliser, in place: every bit of the result depends on every bit of x. int64,
    wrapping around."""
    for bits, factor in ((30, _MIX_1), (27, _MIX_2)):
        x.bitwise_xor_(_shift(x, bits)).mul_(factor)
    return x.bitwise_xor_(_shift(x, 31))


def derived_seed(seed: int, number: int) -> int:
    """Return the seed of text `number` (from 0) of those that are asked for with one seed: the seed
    itself for the first, else 53 bits of its own, which every reader of JSON keeps exactly. Texts
    that share a seed share their noise, and with it much of what they say."""
    if number == 0:
        return seed
    return int(
        _shift(_mix(_mix(torch.tensor(seed) * _GOLDEN + 2) + torch.tensor(number) * _GOLDEN), 11)
    )


def gumbel_noise(
    seed: torch.Tensor, positions: torch.Tensor, tokens: int | torch.Tensor
) -> torch.Tensor:
    """Return Gumbel(0, 1) noise (B, Q, V) float32 for seeds (B,) and positions (B, Q), both int64:
    a pure function of seed, position and token id, whatever the shape around them and the device.
    tokens: V, or which (V,)."""
    which = (
        torch.arange(tokens, device=positions.device) if isinstance(tokens, int) else tokens
    ) * _GOLDEN
    keys = _mix(_mix(seed * _GOLDEN + 1)[:, None] + positions * _GOLDEN).flatten()  # (B Q,)
    noise = torch.empty(len(keys), len(which), device=positions.device)
    for part in slabs(*noise.shape, keys.device, NOISE):
        bits = _shift(_mix(keys[part, None] + which), 11)  # 53 random bits
        uniform = bits.double().add_(0.5).mul_(2.0**-53)  # inside (0, 1)
        noise[part] = uniform.log_().neg_().log_().neg_()
    return noise.view(*positions.shape, -1)


def slabs(count: int, width: int, device: torch.device, room: int = 1) -> Iterator[slice]:
    """Cut `count` rows of `width` numbers into slices that one step works on: of SLAB numbers
    (elsewhere than on the CPU ON_DEVICE) that take so much `room`, or 1/64 of all, whichever is
    more, so that steps are few and what lies between them is small."""
    size = max(1, (SLAB if device.type == "cpu" else ON_DEVICE) // (room * width), count // 64)
    return (slice(first, min(first + size, count)) for first in range(0, count, size))


def round_noise(
    asked: Sampling, start: torch.Tensor, steps: int, tokens: int | torch.Tensor
) -> torch.Tensor | None:
    """Return the noise of one round's positions start + 1 .. start + steps, start (B,): (B, steps,
    V), 0 for greedy rows; None where no row is sampled. It belongs to positions, not to nodes."""
    if not asked.kind.sampled:
        return None
    places = start[:, None] + 1 + torch.arange(steps, device=start.device)
    return gumbel_noise(asked.columns["seed"], places, tokens).mul_(asked["sampled"])


def adjust(logits: torch.Tensor, asked: Sampling, seen: torch.Tensor | None = None) -> torch.Tensor:
    """Return logits (B, Q, V) under every row's own penalty, temperature and filters, as Hugging
    Face's processors would leave them: float32, tokens that may not be chosen at minus infinity.
    `seen` (B, Q, V) bool marks the tokens in a node's true prefix."""
    logits = logits.float()
    kind = asked.kind
    if seen is not None:
        penalty = asked["repetition_penalty"]
        logits = torch.where(
            seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits
        )
    if not kind.sampled:
        return logits
    logits = logits / asked["temperature"]
    if kind.most_k:
        most = min(kind.most_k, logits.shape[-1])  # a drafter may know fewer tokens
        k = asked["top_k"]
        highest = logits.topk(most).values
        which = (k - 1).clamp(0, most - 1).expand(*logits.shape[:2], 1)
        lowest = highest.gather(-1, which).masked_fill(k == 0, -math.inf)
        logits.masked_fill_(logits < lowest, -math.inf)
    if kind.top_p:
        logits.masked_fill_(logits < lowest_of_top_p(logits, asked["top_p"]), -math.inf)
    if kind.min_p:
        logits.masked_fill_(logits < logits.amax(-1, keepdim=True) + asked["log_min_p"], -math.inf)
    return logits


def lowest_of_top_p(logits: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Return the lowest logit that is kept, (B, Q, 1), of logits (B, Q, V) and top_p (B, 1, 1): all
    likelier tokens together have less than top_p, and with it they have as much; minus infinity for
    1. By bisection down to neighbouring floats: what comes out for one place is the same whatever
    stands beside it."""
    shares = logits.softmax(-1)
    above = torch.empty_like(logits)
    high = logits.amax(-1, keepdim=True)
    low = high - 110  # e^-110 is no float32: all mass lies above `low`
    for _ in range(40):
        middle = (low + high) / 2
        enough = torch.linalg.vecdot(torch.gt(logits, middle, out=above), shares)[..., None] >= p
        low = torch.where(enough, middle, low)
        high = torch.where(enough, high, middle)
    return high.masked_fill(p >= 1, -math.inf)


def choose(
    logits: torch.Tensor,
    depths: torch.Tensor,
    asked: Sampling,
    noise: torch.Tensor | None,
    seen: SeenAt | None = None,
) -> torch.Tensor:
    """Return the target's token after every node: (B, Q) int64, from logits (B, Q, V) at nodes of
    depths (B, Q), the round's noise (B, > max depth, V), and the tokens of every node's prefix,
    needed for a penalty only. Where a row is sampled or penalised, a few nodes at a time, so that
    no second tensor of all logits comes about."""
    if noise is None and seen is None:
        return logits.argmax(-1)
    chosen = torch.empty_like(depths)
    rows = torch.arange(len(logits), device=logits.device)[:, None]
    for part in slabs(logits.shape[1], logits[:, 0].numel(), logits.device):
        scores = adjust(logits[:, part], asked, None if seen is None else seen(part))  # (B, q, V)
        if noise is not None:
            scores += noise[rows, depths[:, part]]
        chosen[:, part] = scores.argmax(-1)
    return chosen


def with_noise(
    scores: torch.Tensor,
    slots: slice | torch.Tensor,
    asked: Sampling,
    noise: torch.Tensor | None,
    seen: torch.Tensor | None,
) -> torch.Tensor:
    """Return the adjusted scores (B, c, V) of `slots` with the target's noise there: the target's
    draw at a position is a known function of its distribution and of the noise there, so that a
    drafter with the same noise guesses the draw itself (DECODING.md). Lossless in any case, since a
    tree only proposes. `seen` (B, 1, V) is for the penalty."""
    scores = adjust(scores, asked, seen)
    return scores if noise is None else scores.add_(noise[:, slots])


def condition_on_noise(
    marginals: torch.Tensor, asked: Sampling, noise: torch.Tensor | None, seen: torch.Tensor | None
) -> torch.Tensor:
    """Return marginals (B, L, V), log space, with the target's noise added."""
    if noise is None and seen is None:
        return marginals
    judged = torch.empty_like(marginals)
    for part in slabs(marginals.shape[1], marginals[:, 0].numel(), marginals.device):
        judged[:, part] = with_noise(marginals[:, part], part, asked, noise, seen).log_softmax(-1)
    return judged


def judge_on_noise(asked: Sampling, noise: torch.Tensor | None, seen: torch.Tensor | None):
    """Return what `condition_on_noise` does to marginals as a function of scores (B, c, V) and
    their slots (c,), not normalised; None where it does nothing."""
    if noise is None and seen is None:
        return None
    return lambda scores, slots: with_noise(scores.log_softmax(-1), slots, asked, noise, seen)


def seen_tokens(
    texts: Sequence[Sequence[int]], vocabulary: int, device: torch.device
) -> torch.Tensor:
    """Return which tokens each text holds: (B, V) bool."""
    seen = torch.zeros(len(texts), vocabulary, dtype=torch.bool, device=device)
    for row, ids in enumerate(texts):
        seen[row].index_fill_(0, to_device(ids, device), True)
    return seen


def seen_at_nodes(
    seen: torch.Tensor, tokens: torch.Tensor, ancestors: torch.Tensor, nodes: slice
) -> torch.Tensor:
    """Return which tokens the true prefix of a node holds, itself included: (B, q, V) bool, from
    the trees' tokens (B, M) and ancestors (B, M, M), and from the committed tokens' `seen` (B, V),
    which holds the root."""
    carried = torch.where(ancestors[:, nodes], tokens[:, None], tokens[:, :1, None])  # (B, q, M)
    return seen[:, None].repeat(1, carried.shape[1], 1).scatter_(2, carried, True)
