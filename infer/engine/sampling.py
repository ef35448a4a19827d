"""How the target chooses a token: greedily, or with Gumbel noise that is a function of the
position.

The token at absolute position t is argmax(logits / temperature + G(seed, t, token)) with standard
Gumbel noise G. This is an exact sample from softmax(logits / temperature). The noise depends only
on seed, position and token. For the same seed, the output therefore does not depend on the decoding
method, the draft tree, the node budget or the batch.

A batch row is called sampled if its temperature is above 0, and greedy otherwise. B is the number
of batch rows.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from infer.config import SamplingOptions

# Tensors with a vocabulary dimension are processed in chunks of at least this many values. On a CPU
# a chunk is small enough for the cache. On a GPU chunks are large, because the number of kernel
# launches determines the time.
MIN_SAMPLING_CHUNK_VALUES_ON_CPU = 1 << 18
MIN_SAMPLING_CHUNK_VALUES_ON_GPU = 1 << 24
MAX_SAMPLING_CHUNKS_PER_TENSOR = 64
# Memory for generating noise, divided by the memory of the float32 result. It includes the int64
# random bits and temporary copies.
SAMPLING_NOISE_MEMORY_FACTOR = 4

TOP_P_BISECTION_STEPS = 40
# exp(-110) is 0 in float32. A token whose logit is more than 110 below the highest logit therefore
# has probability 0.
TOP_P_LOGIT_RANGE = 110

# Takes a slice of node indices. Returns a mask (B, nodes in the slice, vocab_size) bool of the
# tokens that occur in each node's prefix, that is in the sequence and on the path to the node.
SeenTokensLookup = Callable[[slice], torch.Tensor]


@dataclass(frozen=True)
class SamplingKind:
    """Which sampling features are used by at least one row of a batch. There is a separate CUDA
    graph for each `SamplingKind`."""

    uses_sampling: bool = False
    # the largest top_k of all rows, rounded up to a power of two; 0 if no row uses top_k
    max_top_k: int = 0
    uses_top_p: bool = False
    uses_min_p: bool = False
    uses_penalty: bool = False
    # How many of the likeliest tokens are returned with their log-probabilities, rounded up to a
    # power of two. None if no row asks for log-probabilities.
    num_logprobs: int | None = None

    @classmethod
    def from_options(cls, rows: Sequence[SamplingOptions], vocab_size: int) -> "SamplingKind":
        """Return the `SamplingKind` of a batch. `rows` has the options of every batch row."""
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
    """Return the smallest power of two that is at least `count`, or 0 if `count` is 0."""
    if count == 0:
        return 0
    return 1 << (count - 1).bit_length()


@dataclass(frozen=True)
class SamplingTensors:
    """The sampling options of a batch, as one tensor (B,) on the device for each option.

    If a row does not use an option, its entry has no effect, for example 1 as repetition penalty.
    """

    kind: SamplingKind
    # keys are option names, values have shape (B,); empty if all rows are greedy without penalty
    columns: dict[str, torch.Tensor]

    @classmethod
    def from_options(
        cls, rows: Sequence[SamplingOptions], vocab_size: int, device: torch.device
    ) -> "SamplingTensors":
        """Copy the sampling options of a batch to the device. `rows` has the options of every batch
        row."""
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
        """Return the options of the batch rows in the slice `rows`, as views. `kind` tells which
        sampling features the result applies; the default is the kind of this batch."""
        if kind is None:
            kind = self.kind
        return SamplingTensors(kind, {name: column[rows] for name, column in self.columns.items()})

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the values of the option `name` for all batch rows, (B, 1, 1)."""
        return self.columns[name][:, None, None]


def copy_to_device(values: Sequence, device: torch.device) -> torch.Tensor:
    """Return a tensor with these values on `device`. On CUDA the copy is asynchronous."""
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
    """Shift int64 values to the right by `bits` bits, filling with zeros instead of the sign
    bit."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix_bits(x: torch.Tensor) -> torch.Tensor:
    """Hash int64 values in place with the finaliser of splitmix64, so that every bit of a result
    depends on every bit of the value. Multiplications are modulo 2 ** 64."""
    x.bitwise_xor_(_logical_shift_right(x, 30)).mul_(_SPLITMIX_FACTOR_1)
    x.bitwise_xor_(_logical_shift_right(x, 27)).mul_(_SPLITMIX_FACTOR_2)
    return x.bitwise_xor_(_logical_shift_right(x, 31))


def derive_seed(seed: int, index: int) -> int:
    """Return the seed for output number `index`, counted from 0, if a request asks for several
    outputs with one seed.

    The first output uses `seed` itself. The others get 53-bit seeds, which every JSON parser reads
    exactly. If all outputs used the same seed, they would have the same noise and be nearly
    identical.
    """
    if index == 0:
        return seed
    seed_hash = _mix_bits(torch.tensor(seed) * _SPLITMIX_INCREMENT + 2)
    index_hash = _mix_bits(seed_hash + torch.tensor(index) * _SPLITMIX_INCREMENT)
    return int(_logical_shift_right(index_hash, 11))


def gumbel_noise(
    seed: torch.Tensor, positions: torch.Tensor, tokens: int | torch.Tensor
) -> torch.Tensor:
    """Return Gumbel(0, 1) noise (B, num_positions, num_tokens) in float32 for seeds (B,) int64 and
    absolute positions (B, num_positions) int64.

    A value depends only on the seed, the position and the token id, not on shapes or the device.
    `tokens` is the vocabulary size, or a tensor (num_tokens,) of token ids.
    """
    if isinstance(tokens, int):
        token_keys = torch.arange(tokens, device=positions.device) * _SPLITMIX_INCREMENT
    else:
        token_keys = tokens * _SPLITMIX_INCREMENT
    seed_keys = _mix_bits(seed * _SPLITMIX_INCREMENT + 1)
    # (B * num_positions,)
    keys = _mix_bits(seed_keys[:, None] + positions * _SPLITMIX_INCREMENT).flatten()

    noise = torch.empty(len(keys), len(token_keys), device=positions.device)
    for chunk in iterate_chunks(*noise.shape, keys.device, SAMPLING_NOISE_MEMORY_FACTOR):
        # 53 bits, as many as a float64 represents exactly
        random_bits = _logical_shift_right(_mix_bits(keys[chunk, None] + token_keys), 11)
        uniform = random_bits.double().add_(0.5).mul_(2.0**-53)  # between 0 and 1, never 0 or 1
        noise[chunk] = uniform.log_().neg_().log_().neg_()
    return noise.view(*positions.shape, -1)


def iterate_chunks(
    count: int, values_per_row: int, device: torch.device, memory_factor: int = 1
) -> Iterator[slice]:
    """Split `count` rows of `values_per_row` values each into chunks, and yield each chunk as a
    slice of rows.

    A chunk has MIN_SAMPLING_CHUNK_VALUES_ON_CPU (or MIN_SAMPLING_CHUNK_VALUES_ON_GPU) values,
    divided by `memory_factor`. It is larger if there would otherwise be more than about
    MAX_SAMPLING_CHUNKS_PER_TENSOR chunks. `memory_factor` is the memory needed to process a chunk,
    divided by the memory of the chunk itself.
    """
    chunk_values = (
        MIN_SAMPLING_CHUNK_VALUES_ON_CPU
        if device.type == "cpu"
        else MIN_SAMPLING_CHUNK_VALUES_ON_GPU
    )
    chunk_rows = chunk_values // (memory_factor * values_per_row)
    chunk_rows = max(1, chunk_rows, count // MAX_SAMPLING_CHUNKS_PER_TENSOR)
    return (slice(first, min(first + chunk_rows, count)) for first in range(0, count, chunk_rows))


def make_round_noise(
    sampling: SamplingTensors,
    previous_positions: torch.Tensor,
    num_positions: int,
    tokens: int | torch.Tensor,
) -> torch.Tensor | None:
    """Return the Gumbel noise (B, num_positions, num_tokens) for the positions that follow position
    previous_positions[b] in each batch row b. Return None if all rows are greedy. If only some rows
    are greedy, their noise is 0.

    `previous_positions` (B,) are absolute positions. `tokens` is the vocabulary size, or a tensor
    (num_tokens,) of token ids.
    """
    if not sampling.kind.uses_sampling:
        return None
    positions = (
        previous_positions[:, None]
        + 1
        + torch.arange(num_positions, device=previous_positions.device)
    )
    noise = gumbel_noise(sampling.columns["seed"], positions, tokens)
    return noise.mul_(sampling["sampled"])


def adjust_logits(
    logits: torch.Tensor, sampling: SamplingTensors, seen: torch.Tensor | None = None
) -> torch.Tensor:
    """Apply each row's repetition penalty, temperature, top-k, top-p and min-p to logits (B,
    num_nodes, vocab_size), in the order of Hugging Face's logits processors.

    Return float32 logits, which are minus infinity for tokens that are filtered out. `seen` has the
    same shape as `logits`, and is true for tokens to which the repetition penalty applies. It is
    None if no row has a penalty.
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
    """Divide positive logits by the repetition penalty and multiply negative logits by it, where
    `seen` is true. `logits` and `seen` are (B, num_nodes, vocab_size), `penalty` is (B, 1, 1)."""
    penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, penalised, logits)


def find_top_k_threshold(logits: torch.Tensor, top_k: torch.Tensor, max_top_k: int) -> torch.Tensor:
    """Return the lowest logit that top-k filtering keeps, (B, num_nodes, 1). It is minus infinity
    in rows where `top_k` is 0, which means no filtering.

    `logits` has shape (B, num_nodes, vocab_size), and `top_k` (B, 1, 1) is at most `max_top_k`.
    """
    count = min(max_top_k, logits.shape[-1])  # a drafter may score only a subset of the vocabulary
    highest = logits.topk(count).values
    index = (top_k - 1).clamp(0, count - 1).expand(*logits.shape[:2], 1)
    return highest.gather(-1, index).masked_fill(top_k == 0, -math.inf)


def find_top_p_threshold(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return the lowest logit that top-p filtering keeps, (B, num_nodes, 1). It is minus infinity
    in rows where `top_p` is 1, which means no filtering.

    `logits` has shape (B, num_nodes, vocab_size), and `top_p` has shape (B, 1, 1). The tokens above
    the threshold have a total probability below `top_p`; with the token at the threshold it is at
    least `top_p`. The threshold is found by bisection down to neighbouring floats, so that it does
    not depend on the other rows of the batch.
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
    """Return the target's token after each node, (B, num_nodes) int64. The nodes are processed in
    chunks to save memory.

    logits: (B, num_nodes, vocab_size), the target's logits after the nodes
    depths: (B, num_nodes), the depths of the nodes in their tree
    noise: (B, number of depths, vocab_size); entry [b, d] is added to the logits of nodes at depth
        d. None if no row is sampled.
    find_seen: marks the tokens in the nodes' prefixes. None if no row has a repetition penalty.
    """
    if noise is None and find_seen is None:
        return logits.argmax(-1)

    tokens = torch.empty_like(depths)
    rows = torch.arange(len(logits), device=logits.device)[:, None]
    for chunk in iterate_chunks(logits.shape[1], logits[:, 0].numel(), logits.device):
        seen = None if find_seen is None else find_seen(chunk)
        # (B, nodes in the chunk, vocab_size)
        scores = adjust_logits(logits[:, chunk], sampling, seen)
        if noise is not None:
            scores += noise[rows, depths[:, chunk]]
        tokens[:, chunk] = scores.argmax(-1)
    return tokens


def apply_sampling_to_scores(
    scores: torch.Tensor,
    position_indices: slice | torch.Tensor,
    sampling: SamplingTensors,
    noise: torch.Tensor | None,
    seen: torch.Tensor | None,
) -> torch.Tensor:
    """Apply the sampling options and the target's noise to the drafter's scores (B, num_positions,
    vocab_size). The drafter then predicts the token that the target will choose with this noise.
    The output stays lossless, because the target verifies all drafted tokens.

    position_indices: indices of the scored positions among all drafted positions
    noise: (B, number of drafted positions, vocab_size); None if no row is sampled
    seen: (B, 1, vocab_size) bool, tokens to which the repetition penalty applies; None if no row
        has a penalty
    """
    scores = adjust_logits(scores, sampling, seen)
    if noise is None:
        return scores
    return scores.add_(noise[:, position_indices])


def apply_sampling_to_marginals(
    marginals: torch.Tensor,
    sampling: SamplingTensors,
    noise: torch.Tensor | None,
    seen: torch.Tensor | None,
) -> torch.Tensor:
    """Apply the sampling options and the target's noise to the drafter's marginals (B,
    draft_length, vocab_size), and return normalised log-probabilities of the same shape.

    A marginal is the distribution of the token at one drafted position. `noise` and `seen` have the
    same meaning as in `apply_sampling_to_scores`.
    """
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
    conditional head (a head that scores a token given the token before it). Return None if there is
    neither noise nor a repetition penalty.

    The function takes scores (B, num_positions, vocab_size) and the indices (num_positions,) of the
    scored positions among all drafted positions. Its result is not normalised.
    """
    if noise is None and seen is None:
        return None

    def transform(scores: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return apply_sampling_to_scores(scores.log_softmax(-1), slots, sampling, noise, seen)

    return transform


def mark_seen_tokens(
    sequences: Sequence[Sequence[int]], vocab_size: int, device: torch.device
) -> torch.Tensor:
    """Return which tokens each sequence contains, (number of sequences, vocab_size) bool."""
    seen = torch.zeros(len(sequences), vocab_size, dtype=torch.bool, device=device)
    for row, token_ids in enumerate(sequences):
        seen[row].index_fill_(0, copy_to_device(token_ids, device), True)
    return seen


def mark_tokens_seen_at_nodes(
    seen: torch.Tensor, tokens: torch.Tensor, ancestors: torch.Tensor, nodes: slice
) -> torch.Tensor:
    """Return which tokens the prefix of each given node contains, (B, number of given nodes,
    vocab_size) bool. The prefix includes the node's own token.

    seen: (B, vocab_size), true for the committed tokens and the root's token
    tokens: (B, num_nodes), the tokens of all nodes
    ancestors: (B, num_nodes, num_nodes), the result of `DraftTree.build_ancestor_mask`
    nodes: slice of the given nodes
    """
    path_tokens = torch.where(ancestors[:, nodes], tokens[:, None], tokens[:, :1, None])
    return seen[:, None].repeat(1, path_tokens.shape[1], 1).scatter_(2, path_tokens, True)
