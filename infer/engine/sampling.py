"""How the target chooses a token: greedily, or by position-keyed Gumbel noise.

B rows, of which S are sampled, Q nodes, L drafted positions, V vocabulary; b rows and q nodes of a part.

The token at absolute position t is argmax(logits / temperature + G(seed, t, token)) with standard Gumbel noise G. That
is an exact sample from softmax(logits / temperature), and since the noise depends on nothing but seed, position and
token, every method, tree, budget and batch gives the same text for the same seed.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from infer.config import TextOptions
from infer.engine.controls import FixedRows, column, index, pick, sampled_rows, to_device

SLAB = 1 << 18  # numbers that one step of sampling works on at least
ON_DEVICE = 1 << 24  # the same elsewhere than on the CPU, where the number of steps is what takes time
NOISE = 1 << 22  # the same for noise, whose bits take eight bytes a number, and several copies of them
NUCLEUS = 1024  # likeliest tokens that top-p puts in order first

# (rows (b, 1), nodes (b or 1, q)) -> which tokens their true prefixes hold, (b, q, V) bool
SeenAt = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


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


def derived_seed(seed: int, number: int) -> int:
    """Return the seed of text `number` (from 0) of those that are asked for with one seed: the seed itself for
    the first, else 53 bits of its own, which every reader of JSON keeps exactly. Texts that share a seed share their
    noise, and with it much of what they say."""
    if number == 0:
        return seed
    return int(_shift(_mix(_mix(torch.tensor(seed) * _GOLDEN + 2) + torch.tensor(number) * _GOLDEN), 11))


def gumbel_noise(seed: torch.Tensor, positions: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return Gumbel(0, 1) noise (B, Q, V) float32 for seeds (B,) and positions (B, Q), both int64: a pure function of
    seed, position and token id, whatever the shape around them and the device."""
    tokens = torch.arange(vocabulary, device=positions.device)
    keys = _mix(_mix(seed * _GOLDEN + 1)[:, None] + positions * _GOLDEN).flatten()  # (B Q,)
    noise = torch.empty(len(keys), vocabulary, device=positions.device)
    for part in slabs(len(keys), vocabulary, keys.device, NOISE):
        bits = _shift(_mix(keys[part, None] + tokens * _GOLDEN), 11)  # 53 random bits
        uniform = bits.double().add_(0.5).mul_(2.0**-53)  # inside (0, 1)
        noise[part] = uniform.log_().neg_().log_().neg_()
    return noise.view(*positions.shape, vocabulary)


def slabs(count: int, width: int, device: torch.device, on_device: int = ON_DEVICE) -> Iterator[slice]:
    """Cut `count` rows of `width` numbers into slices that one step works on: of SLAB numbers (elsewhere than on the
    CPU `on_device`) or 1/64 of all, whichever is more, so that steps are few and what lies between them is small."""
    size = max(1, (SLAB if device.type == "cpu" else on_device) // width, count // 64)
    return (slice(first, min(first + size, count)) for first in range(0, count, size))


def round_noise(rows: Sequence[TextOptions], start: torch.Tensor, steps: int, vocabulary: int) -> torch.Tensor | None:
    """Return the noise of one round's positions start + 1 .. start + steps, start (B,), for the S sampled rows
    in their order: (S, steps, V); None when there are none. It belongs to positions, not to nodes."""
    return rows_noise(gumbel_noise, rows, start, steps, vocabulary)


def rows_noise(
    noise: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor],
    rows: Sequence[TextOptions],
    start: torch.Tensor,
    steps: int,
    vocabulary: int,
) -> torch.Tensor | None:
    """Return a stream of noise as `round_noise` does; in a captured round of all rows, 0 for greedy ones."""
    sampled = sampled_rows(rows)
    if not sampled:
        return None
    drawn, device = pick(rows, sampled), start.device
    places = start[index(rows, sampled, device), None] + 1 + torch.arange(steps, device=device)
    found = noise(column(drawn, "seed", device).flatten(), places, vocabulary)
    return found * column(drawn, "sampled", device) if isinstance(rows, FixedRows) else found


def adjust(logits: torch.Tensor, rows: Sequence[TextOptions], seen: torch.Tensor | None = None) -> torch.Tensor:
    """Return logits (B, Q, V) under every row's own penalty, temperature and filters, as Hugging Face's processors
    would leave them: float32, tokens that may not be chosen at minus infinity. `seen` (B, Q, V) bool marks the tokens
    in a node's true prefix. Temperature and filters are skipped for greedy rows: neither changes the likeliest
    token."""
    logits = logits.float()

    if seen is not None:
        penalty = column(rows, "repetition_penalty", logits.device)
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    sampled = sampled_rows(rows)
    if not sampled:
        return logits
    logits = logits / column(rows, "temperature", logits.device)
    for asked, lowest in (
        ([i for i in sampled if 0 < rows[i].top_k < logits.shape[-1]], lowest_of_top_k),
        ([i for i in sampled if rows[i].top_p < 1], lowest_of_top_p),
        ([i for i in sampled if rows[i].min_p > 0], lowest_of_min_p),
    ):
        if asked:
            every = len(asked) == len(rows)
            which = None if every else to_device(asked, logits.device)
            part = logits if every else logits[which]
            filtered = part.masked_fill_(part < lowest(part, pick(rows, asked)), -math.inf)
            if not every:
                logits[which] = filtered
    return logits


def lowest_of_top_k(logits: torch.Tensor, rows: Sequence[TextOptions]) -> torch.Tensor:
    """Return the k-th highest logit, (B, Q, 1): what is lower is not among the row's k likeliest; for k = 0 minus
    infinity."""
    k = column(rows, "top_k", logits.device)
    highest = logits.topk(max(row.top_k for row in rows)).values
    return highest.gather(-1, (k - 1).clamp(min=0).expand(*logits.shape[:2], 1)).masked_fill(k == 0, -math.inf)


def lowest_of_top_p(logits: torch.Tensor, rows: Sequence[TextOptions]) -> torch.Tensor:
    """Return the lowest logit that is kept, (B, Q, 1): all likelier tokens together have less than the row's top_p.

    The NUCLEUS likeliest tokens are put in order. Where their mass does not reach top_p the edge is searched for among
    the others; no more of them is put in order. What comes out for one place is the same whatever stands beside it.
    For a top_p of 1 it is minus infinity.
    """
    p = column(rows, "top_p", logits.device).expand(*logits.shape[:2], 1)
    p, flat = p.reshape(-1, 1), logits.flatten(0, 1)  # (B Q, 1), (B Q, V)
    shares = flat.softmax(-1)
    order, ids = flat.topk(min(NUCLEUS, flat.shape[-1]))
    likely = shares.gather(-1, ids)
    inside = likely.cumsum(-1) - likely < p  # where all likelier tokens together have less than top_p
    lowest = order.gather(-1, inside.sum(-1, keepdim=True).clamp(min=1) - 1)
    if order.shape[-1] < flat.shape[-1] and flat.device.type != "cpu":  # to ask which they are would take a wait
        lowest = torch.where(inside[:, -1:], search_edge(flat, shares, p, order), lowest)
    elif order.shape[-1] < flat.shape[-1]:
        left = inside[:, -1].nonzero()[:, 0]
        if len(left):
            lowest[left] = search_edge(flat[left], shares[left], p[left], order[left])
    return lowest.masked_fill(p >= 1, -math.inf).view(*logits.shape[:2], 1)


def search_edge(logits: torch.Tensor, shares: torch.Tensor, p: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return the lowest number (n, 1) above which logits (n, V) have less than the mass p (n, 1), by bisection down to
    neighbouring floats. `order` (n, k) are the highest logits, which do not reach that mass."""
    high, low = order[:, -1:], order[:, :1] - 110  # e^-110 is no float32: all mass lies above `low`
    above = torch.empty_like(logits)
    for _ in range(40):
        middle = (low + high) / 2
        enough = torch.linalg.vecdot(torch.gt(logits, middle, out=above), shares)[:, None] >= p
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return high


def lowest_of_min_p(logits: torch.Tensor, rows: Sequence[TextOptions]) -> torch.Tensor:
    """Return the lowest logit that is kept, (B, Q, 1): min_p of the likeliest token's probability."""
    return logits.amax(-1, keepdim=True) + column(rows, "log_min_p", logits.device)


def choose(
    logits: torch.Tensor,
    depths: torch.Tensor,
    rows: Sequence[TextOptions],
    noise: torch.Tensor | None,
    seen: SeenAt | None = None,
) -> torch.Tensor:
    """Return the target's token after every node: (B, Q) int64, from logits (B, Q, V) at nodes of depths (B, Q), the
    round's noise (S, > max depth, V), and the tokens of every node's prefix, needed for a penalty only.

    Rows that are neither sampled nor penalised cost nothing more than their argmax; the others are adjusted a few nodes
    at a time, so that no second tensor of all logits comes about.
    """
    chosen = logits.argmax(-1)
    sampled = sampled_rows(rows)
    penalised = [i for i, row in enumerate(rows) if row.temperature == 0 and row.repetition_penalty != 1]
    for group in filter(None, (sampled, penalised)):
        which = index(rows, group, logits.device)[:, None]  # (b, 1)
        options = pick(rows, group)
        prefixes = seen if any(row.repetition_penalty != 1 for row in options) else None
        for part in slabs(logits.shape[1], len(group) * logits.shape[2], logits.device):
            nodes = torch.arange(part.start, part.stop, device=logits.device)[None]  # (1, q)
            within = None if prefixes is None else prefixes(which, nodes)
            scores = adjust(logits[which, nodes], options, within)  # (b, q, V)
            if group is sampled:
                scores += noise[torch.arange(len(group), device=logits.device)[:, None], depths[which, nodes]]
            chosen[which, nodes] = scores.argmax(-1)
    return chosen


def condition_on_noise(
    marginals: torch.Tensor, rows: Sequence[TextOptions], noise: torch.Tensor | None, seen: torch.Tensor | None
) -> torch.Tensor:
    """Return marginals (B, L, V), log space, with the target's noise added: the target's draw at a position is a known
    function of its distribution and of the noise there, so that a drafter with the same noise guesses the draw itself
    (DECODING.md). Lossless in any case, since a tree only proposes. `seen` (B, 1, V) is for the repetition penalty."""
    if noise is None and seen is None:
        return marginals
    judged = torch.empty_like(marginals)
    for part in slabs(marginals.shape[1], marginals[:, 0].numel(), marginals.device):
        judged[:, part] = with_noise(marginals[:, part], rows, noise, seen, part).log_softmax(-1)
    return judged


def with_noise(
    scores: torch.Tensor,
    rows: Sequence[TextOptions],
    noise: torch.Tensor | None,
    seen: torch.Tensor | None,
    slots: slice | torch.Tensor,
) -> torch.Tensor:
    """Return the adjusted scores (B, c, V) of `slots`, the target's noise there added where a row is sampled."""
    scores = adjust(scores, rows, seen)
    if noise is not None and len(noise) == len(rows):
        scores += noise[:, slots]
    elif noise is not None:
        scores[index(rows, sampled_rows(rows), scores.device)] += noise[:, slots]
    return scores


def judge_on_noise(rows: Sequence[TextOptions], noise: torch.Tensor | None, seen: torch.Tensor | None):
    """Return what `condition_on_noise` does to marginals as a function of scores (B, c, V) and their slots (c,), not
    normalised; None where it does nothing."""
    if noise is None and seen is None:
        return None

    def judge(scores: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return with_noise(scores.log_softmax(-1), rows, noise, seen, slots)

    return judge


def seen_tokens(texts: Sequence[Sequence[int]], vocabulary: int, device: torch.device) -> torch.Tensor:
    """Return which tokens each text holds: (B, V) bool."""
    seen = torch.zeros(len(texts), vocabulary, dtype=torch.bool, device=device)
    for row, ids in enumerate(texts):
        seen[row].index_fill_(0, to_device(ids, device), True)
    return seen


def seen_at_nodes(
    seen: torch.Tensor, tokens: torch.Tensor, ancestors: torch.Tensor, rows: torch.Tensor, nodes: torch.Tensor
) -> torch.Tensor:
    """Return which tokens the true prefix of a node holds, itself included: (b, q, V) bool for rows (b, 1) and nodes (b
    or 1, q), from the trees' tokens (B, M) and ancestors (B, M, M), and from the committed tokens' `seen` (B, V), which
    holds the root."""
    path = ancestors[rows, nodes]  # (b, q, M)
    carried = torch.where(path, tokens[rows], tokens[rows, :1])
    return seen[rows].repeat(1, path.shape[1], 1).scatter_(2, carried, True)
