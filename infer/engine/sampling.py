"""How the target chooses a token: greedily, or with Gumbel noise that is a function of the
position.

The token at absolute position t is argmax(logits / temperature + G(seed, t, token)) with standard
Gumbel noise G. This is an exact sample from softmax(logits / temperature). The noise depends only
on seed, position and token. For the same seed, every method, draft tree, node budget and batch
therefore gives the same output.

A row is sampled if its temperature is above 0, and greedy otherwise.

B batch rows, M tree nodes, Q nodes of a chunk, L drafted positions, V vocabulary size.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from infer.config import TextOptions

# Operations on tensors with a vocabulary dimension work on chunks of at least so many values. The
# chunks are small on a CPU, so that a chunk fits into its cache. They are large on a GPU, where the
# number of kernel launches determines the time.
MIN_SAMPLING_CHUNK_VALUES_ON_CPU = 1 << 18
MIN_SAMPLING_CHUNK_VALUES_ON_GPU = 1 << 24
MAX_SAMPLING_CHUNKS_PER_TENSOR = 64
# Bytes per value while noise is generated, divided by the bytes of a float32 value. The int64
# random bits and temporary copies are counted.
SAMPLING_NOISE_MEMORY_FACTOR = 4

TOP_P_BISECTION_STEPS = 40
# exp(-110) underflows in float32. Logits that are lower than the highest logit minus 110 therefore
# have probability 0.
TOP_P_LOGIT_RANGE = 110

# Takes a slice of Q nodes. Returns which tokens the prefix of each node contains, (B, Q, V) bool.
SeenTokensLookup = Callable[[slice], torch.Tensor]


@dataclass(frozen=True)
class SamplingKind:
    """Which sampling features at least one row of a batch uses. Rounds with different kinds have
    different CUDA graphs."""

    uses_sampling: bool = False
    max_top_k: int = 0  # the largest top_k, rounded up to a power of two; 0: no row uses it
    uses_top_p: bool = False
    uses_min_p: bool = False
    uses_penalty: bool = False
    # How many of the highest log-probabilities are returned, rounded up to a power of two. None: no
    # row returns log-probabilities.
    num_logprobs: int | None = None

    @classmethod
    def from_options(cls, rows: Sequence[TextOptions], vocab_size: int) -> "SamplingKind":
        """Return the kind of a batch whose rows have the options `rows`."""
        sampled_rows = [row for row in rows if row.temperature > 0]
        top_ks = [row.top_k for row in sampled_rows if row.top_k < vocab_size]
        max_top_k = round_up_to_power_of_two(max(top_ks, default=0))

        num_logprobs = None
        requested_logprobs = [row.logprobs for row in rows if row.logprobs is not None]
        if requested_logprobs:
            num_logprobs = min(round_up_to_power_of_two(max(requested_logprobs)), vocab_size)

        return cls(
            uses_sampling=bool(sampled_rows),
            max_top_k=min(max_top_k, vocab_size - 1),
            uses_top_p=any(row.top_p < 1 for row in sampled_rows),
            uses_min_p=any(row.min_p > 0 for row in sampled_rows),
            uses_penalty=any(row.repetition_penalty != 1 for row in rows),
            num_logprobs=num_logprobs,
        )


def round_up_to_power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least `count`. For `count` = 0 return 0."""
    if count == 0:
        return 0
    return 1 << (count - 1).bit_length()


@dataclass(frozen=True)
class SamplingTensors:
    """The sampling options of B batch rows as tensors (B,) on the device.

    If a row does not use an option, its entry is the neutral value of the option.
    """

    kind: SamplingKind
    columns: dict[str, torch.Tensor]  # key: option's name; empty if no row needs any

    @classmethod
    def from_options(
        cls, rows: Sequence[TextOptions], vocab_size: int, device: torch.device
    ) -> "SamplingTensors":
        """Copy the sampling options of B batch rows to the device."""
        kind = SamplingKind.from_options(rows, vocab_size)
        if not (kind.uses_sampling or kind.uses_penalty):
            return cls(kind, {})

        columns = {
            "sampled": [row.temperature > 0 for row in rows],
            "temperature": [row.temperature or 1.0 for row in rows],
            "top_k": [
                row.top_k if row.temperature and row.top_k < vocab_size else 0 for row in rows
            ],
            "top_p": [row.top_p if row.temperature else 1.0 for row in rows],
            "log_min_p": [
                math.log(row.min_p) if row.temperature and row.min_p else -math.inf for row in rows
            ],
            "repetition_penalty": [row.repetition_penalty for row in rows],
            "seed": [row.seed for row in rows],
        }
        return cls(kind, {name: copy_to_device(values, device) for name, values in columns.items()})

    def select_rows(self, rows: slice, kind: SamplingKind | None = None) -> "SamplingTensors":
        """Return the options of the batch rows `rows`. Only the features in `kind` are applied; the
        default is this batch's kind."""
        if kind is None:
            kind = self.kind
        return SamplingTensors(kind, {name: column[rows] for name, column in self.columns.items()})

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the values of the option `name` of all rows, (B, 1, 1)."""
        return self.columns[name][:, None, None]


def copy_to_device(values: Sequence, device: torch.device) -> torch.Tensor:
    """Return a tensor with these values on `device`. The copy does not synchronise."""
    tensor = torch.tensor(values)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _as_signed_int64(value: int) -> int:
    """Return the signed 64-bit integer that has the same bits as the unsigned integer `value`."""
    return value - (value >> 63 << 64)


# Constants of the random number generator splitmix64.
_SPLITMIX_INCREMENT = _as_signed_int64(0x9E3779B97F4A7C15)
_SPLITMIX_FACTOR_1 = _as_signed_int64(0xBF58476D1CE4E5B9)
_SPLITMIX_FACTOR_2 = _as_signed_int64(0x94D049BB133111EB)


def _logical_shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift int64 values to the right by `bits` bits, and fill with zeros from the left."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix_bits(x: torch.Tensor) -> torch.Tensor:
    """Hash int64 values in place with the finaliser of splitmix64. Every bit of a result depends on
    every bit of the value. Multiplications wrap around."""
    x.bitwise_xor_(_logical_shift_right(x, 30)).mul_(_SPLITMIX_FACTOR_1)
    x.bitwise_xor_(_logical_shift_right(x, 27)).mul_(_SPLITMIX_FACTOR_2)
    return x.bitwise_xor_(_logical_shift_right(x, 31))


def derive_seed(seed: int, index: int) -> int:
    """Return the seed of sequence `index`, counted from 0, if several sequences are generated from
    one seed.

    The first sequence uses `seed` itself. The other sequences get 53-bit seeds, which every JSON
    parser reads exactly. If all sequences had the same seed, they would have the same noise, and
    much of their outputs would be equal.
    """
    if index == 0:
        return seed
    seed_hash = _mix_bits(torch.tensor(seed) * _SPLITMIX_INCREMENT + 2)
    index_hash = _mix_bits(seed_hash + torch.tensor(index) * _SPLITMIX_INCREMENT)
    return int(_logical_shift_right(index_hash, 11))


def gumbel_noise(
    seed: torch.Tensor, positions: torch.Tensor, tokens: int | torch.Tensor
) -> torch.Tensor:
    """Return Gumbel(0, 1) noise (B, Q, V) float32 for seeds (B,) and positions (B, Q), both int64.

    A value depends only on seed, position and token id, not on shapes or the device. `tokens` is
    the vocabulary size V, or a tensor (V,) with the ids of the tokens.
    """
    if isinstance(tokens, int):
        token_keys = torch.arange(tokens, device=positions.device) * _SPLITMIX_INCREMENT
    else:
        token_keys = tokens * _SPLITMIX_INCREMENT
    seed_keys = _mix_bits(seed * _SPLITMIX_INCREMENT + 1)
    keys = _mix_bits(seed_keys[:, None] + positions * _SPLITMIX_INCREMENT).flatten()  # (B Q,)

    noise = torch.empty(len(keys), len(token_keys), device=positions.device)
    for chunk in iterate_chunks(*noise.shape, keys.device, SAMPLING_NOISE_MEMORY_FACTOR):
        random_bits = _logical_shift_right(_mix_bits(keys[chunk, None] + token_keys), 11)  # 53 bits
        uniform = random_bits.double().add_(0.5).mul_(2.0**-53)  # inside (0, 1)
        noise[chunk] = uniform.log_().neg_().log_().neg_()
    return noise.view(*positions.shape, -1)


def iterate_chunks(
    count: int, width: int, device: torch.device, memory_factor: int = 1
) -> Iterator[slice]:
    """Split `count` rows of `width` values each into chunks, and return the chunks as slices of
    rows.

    A chunk has MIN_SAMPLING_CHUNK_VALUES_ON_CPU or MIN_SAMPLING_CHUNK_VALUES_ON_GPU values divided
    by `memory_factor`, or the share 1 / MAX_SAMPLING_CHUNKS_PER_TENSOR of all rows, whichever is
    more.
    """
    chunk_values = (
        MIN_SAMPLING_CHUNK_VALUES_ON_CPU
        if device.type == "cpu"
        else MIN_SAMPLING_CHUNK_VALUES_ON_GPU
    )
    chunk_rows = chunk_values // (memory_factor * width)
    chunk_rows = max(1, chunk_rows, count // MAX_SAMPLING_CHUNKS_PER_TENSOR)
    return (slice(first, min(first + chunk_rows, count)) for first in range(0, count, chunk_rows))


def make_round_noise(
    sampling: SamplingTensors, start: torch.Tensor, steps: int, tokens: int | torch.Tensor
) -> torch.Tensor | None:
    """Return the Gumbel noise of the positions start + 1 .. start + steps of each row, (B, steps,
    V).

    `start` has shape (B,). `tokens` has the same meaning as in `gumbel_noise`. The noise of greedy
    rows is 0. Return None if all rows are greedy.
    """
    if not sampling.kind.uses_sampling:
        return None
    positions = start[:, None] + 1 + torch.arange(steps, device=start.device)
    noise = gumbel_noise(sampling.columns["seed"], positions, tokens)
    return noise.mul_(sampling["sampled"])


def adjust_logits(
    logits: torch.Tensor, sampling: SamplingTensors, seen: torch.Tensor | None = None
) -> torch.Tensor:
    """Apply each row's repetition penalty, temperature and filters to logits (B, Q, V), in the
    order of Hugging Face's logits processors.

    The result is float32, and minus infinity for tokens that are filtered out. `seen` (B, Q, V)
    bool marks the tokens in the prefix of each node. It is None if no row has a penalty.
    """
    logits = logits.float()
    kind = sampling.kind
    if seen is not None:
        logits = penalise_repetition(logits, sampling["repetition_penalty"], seen)
    if not kind.uses_sampling:
        return logits

    logits = logits / sampling["temperature"]
    if kind.max_top_k:
        threshold = find_top_k_threshold(logits, sampling["top_k"], kind.max_top_k)
        logits.masked_fill_(logits < threshold, -math.inf)
    if kind.uses_top_p:
        threshold = find_top_p_threshold(logits, sampling["top_p"])
        logits.masked_fill_(logits < threshold, -math.inf)
    if kind.uses_min_p:
        threshold = logits.amax(-1, keepdim=True) + sampling["log_min_p"]
        logits.masked_fill_(logits < threshold, -math.inf)
    return logits


def penalise_repetition(
    logits: torch.Tensor, penalty: torch.Tensor, seen: torch.Tensor
) -> torch.Tensor:
    """Apply repetition penalties (B, 1, 1) to the logits (B, Q, V) of tokens marked in `seen`."""
    penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, penalised, logits)


def find_top_k_threshold(logits: torch.Tensor, top_k: torch.Tensor, max_top_k: int) -> torch.Tensor:
    """Return the lowest logit that top-k filtering keeps, (B, Q, 1).

    `logits` has shape (B, Q, V). `top_k` (B, 1, 1) is at most `max_top_k`. Where it is 0, nothing
    is filtered, and the result is minus infinity.
    """
    count = min(max_top_k, logits.shape[-1])  # a drafter's vocabulary may be smaller
    highest = logits.topk(count).values
    index = (top_k - 1).clamp(0, count - 1).expand(*logits.shape[:2], 1)
    return highest.gather(-1, index).masked_fill(top_k == 0, -math.inf)


def find_top_p_threshold(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return the lowest logit that top-p filtering keeps, (B, Q, 1).

    `logits` has shape (B, Q, V), `top_p` has shape (B, 1, 1). Where `top_p` is 1, nothing is
    filtered, and the result is minus infinity.

    The total probability of the tokens above the threshold is less than `top_p`. Together with the
    token at the threshold, it is at least `top_p`. The threshold is found by bisection down to
    neighbouring floats, so that it does not depend on the other rows of the batch.
    """
    probabilities = logits.softmax(-1)
    is_above = torch.empty_like(logits)
    high = logits.amax(-1, keepdim=True)
    low = high - TOP_P_LOGIT_RANGE
    for _ in range(TOP_P_BISECTION_STEPS):
        middle = (low + high) / 2
        torch.gt(logits, middle, out=is_above)
        reaches_top_p = torch.linalg.vecdot(is_above, probabilities)[..., None] >= top_p
        low = torch.where(reaches_top_p, middle, low)
        high = torch.where(reaches_top_p, high, middle)
    return high.masked_fill(top_p >= 1, -math.inf)


def sample_tokens(
    logits: torch.Tensor,
    depths: torch.Tensor,
    sampling: SamplingTensors,
    noise: torch.Tensor | None,
    find_seen: SeenTokensLookup | None = None,
) -> torch.Tensor:
    """Return the target's token after each node, (B, Q) int64.

    logits (B, Q, V): the target's logits after the nodes. depths (B, Q): the depths of the nodes.
    noise (B, positions, V): entry d is added to nodes of depth d; None if no row is sampled.
    find_seen: returns the tokens in the nodes' prefixes; None if no row has a repetition penalty.
    The nodes are processed in chunks, so that the adjusted logits of all nodes never exist at the
    same time.
    """
    if noise is None and find_seen is None:
        return logits.argmax(-1)

    tokens = torch.empty_like(depths)
    rows = torch.arange(len(logits), device=logits.device)[:, None]
    for chunk in iterate_chunks(logits.shape[1], logits[:, 0].numel(), logits.device):
        seen = None if find_seen is None else find_seen(chunk)
        scores = adjust_logits(logits[:, chunk], sampling, seen)  # (B, chunk, V)
        if noise is not None:
            scores += noise[rows, depths[:, chunk]]
        tokens[:, chunk] = scores.argmax(-1)
    return tokens


def apply_sampling_to_scores(
    scores: torch.Tensor,
    slots: slice | torch.Tensor,
    sampling: SamplingTensors,
    noise: torch.Tensor | None,
    seen: torch.Tensor | None,
) -> torch.Tensor:
    """Apply the sampling options and the target's noise to the drafter's scores (B, slots, V).

    A slot is a drafted position of the block; `slots` selects the noise of the given slots. The
    target's choice at a position is a function of the target's distribution and of the noise at
    that position. The drafter therefore predicts the choice itself if it uses the same noise.
    Decoding stays lossless in any case, since the target verifies all drafted tokens. `seen` (B, 1,
    V) marks the tokens that the repetition penalty applies to; it is None without a penalty.
    """
    scores = adjust_logits(scores, sampling, seen)
    if noise is None:
        return scores
    return scores.add_(noise[:, slots])


def apply_sampling_to_marginals(
    marginals: torch.Tensor,
    sampling: SamplingTensors,
    noise: torch.Tensor | None,
    seen: torch.Tensor | None,
) -> torch.Tensor:
    """Apply the sampling options and the target's noise to the drafter's marginals (B, L, V), which
    are log-probabilities, and normalise the result. `noise` and `seen` have the same meaning as in
    `apply_sampling_to_scores`."""
    if noise is None and seen is None:
        return marginals
    conditioned = torch.empty_like(marginals)
    for chunk in iterate_chunks(marginals.shape[1], marginals[:, 0].numel(), marginals.device):
        conditioned[:, chunk] = apply_sampling_to_scores(
            marginals[:, chunk], chunk, sampling, noise, seen
        ).log_softmax(-1)
    return conditioned


def make_score_transform(
    sampling: SamplingTensors, noise: torch.Tensor | None, seen: torch.Tensor | None
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """Return a function that applies the sampling options and the target's noise to the scores of a
    conditional head.

    The function takes scores (B, n, V) and the indices (n,) of their drafted positions. Its result
    is not normalised. Return None if neither noise nor a penalty is to be applied.
    """
    if noise is None and seen is None:
        return None

    def transform(scores: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return apply_sampling_to_scores(scores.log_softmax(-1), slots, sampling, noise, seen)

    return transform


def mark_seen_tokens(
    sequences: Sequence[Sequence[int]], vocab_size: int, device: torch.device
) -> torch.Tensor:
    """Return which tokens each of B sequences contains, (B, V) bool."""
    seen = torch.zeros(len(sequences), vocab_size, dtype=torch.bool, device=device)
    for row, token_ids in enumerate(sequences):
        seen[row].index_fill_(0, copy_to_device(token_ids, device), True)
    return seen


def mark_tokens_seen_at_nodes(
    seen: torch.Tensor, tokens: torch.Tensor, ancestors: torch.Tensor, nodes: slice
) -> torch.Tensor:
    """Return which tokens the prefixes of the given nodes contain, (B, Q, V) bool. The prefix of a
    node includes the node's own token.

    seen (B, V): marks the committed tokens and the root's token. tokens (B, M): the tokens of all
    nodes. ancestors (B, M, M): the mask of `DraftTree.ancestors`. nodes: the slice of Q nodes.
    """
    path_tokens = torch.where(ancestors[:, nodes], tokens[:, None], tokens[:, :1, None])
    return seen[:, None].repeat(1, path_tokens.shape[1], 1).scatter_(2, path_tokens, True)
