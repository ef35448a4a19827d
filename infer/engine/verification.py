"""Verification of draft trees: choose the target's token after each node, and walk along the nodes
that the target accepts (DDTree section 4.4). The target's token after the last accepted node is the
bonus token.

B batch rows, M tree nodes, W = maximum number of nodes on a path, D hidden size, V vocabulary size.
"""

from collections import abc
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from infer.engine.sampling import (
    SamplingTensors,
    SeenTokensLookup,
    adjust_logits,
    make_round_noise,
    mark_seen_tokens,
    mark_tokens_seen_at_nodes,
    sample_tokens,
)
from infer.engine.sequence import Sequence, find_sequence_end
from infer.targets.support import IDENTITY_LOGIT_SCALE
from infer.targets.target import Target
from infer.trees.tree import DraftTree

# The logits of so many nodes per batch row are in memory at the same time. With more than
# MAX_ROWS_WITH_FULL_LOGIT_CHUNKS rows the number is reduced, so that the logits of all rows
# together do not take more memory than those of MAX_ROWS_WITH_FULL_LOGIT_CHUNKS rows.
MAX_LOGIT_CHUNK_NODES_PER_ROW = 65
MAX_ROWS_WITH_FULL_LOGIT_CHUNKS = 4

NO_TOKEN = -1  # no drafted node has this token, so the walk ends there


@dataclass(frozen=True)
class SamplingBatch:
    """The sampling options of a round's batch rows, and the noise of the round's positions."""

    tensors: SamplingTensors
    root_positions: torch.Tensor  # (B,) the absolute position of each row's root
    num_positions: int  # number of positions after the root; more than the depth of any tree
    vocab_size: int
    seen: torch.Tensor | None  # (B, V) the tokens of each row's sequence; None without a penalty

    @cached_property
    def noise(self) -> torch.Tensor | None:
        """The Gumbel noise of all positions, (B, num_positions, V). None if no row is sampled."""
        return self.make_noise(slice(None), 0, self.num_positions, self.vocab_size)

    def make_noise(
        self, rows: slice, first_depth: int, num_positions: int, tokens: int | torch.Tensor
    ) -> torch.Tensor | None:
        """Return the Gumbel noise of the batch rows `rows`, (rows, num_positions, tokens), for
        nodes of depth `first_depth` and deeper. `tokens` has the same meaning as in `gumbel_noise`.
        None if no row is sampled."""
        start = self.root_positions[rows] + first_depth
        return make_round_noise(self.tensors.select_rows(rows), start, num_positions, tokens)


def make_sampling_tensors(
    target: Target, sequences: abc.Sequence[Sequence]
) -> tuple[SamplingTensors, torch.Tensor | None]:
    """Return the sampling options of B sequences as tensors, and which tokens each sequence
    contains, (B, V) bool. The latter is None if no sequence has a repetition penalty."""
    vocab_size = target.vocab_size
    options = [sequence.options for sequence in sequences]
    tensors = SamplingTensors.from_options(options, vocab_size, target.device)
    seen = None
    if tensors.kind.uses_penalty:
        token_ids = [sequence.token_ids for sequence in sequences]
        seen = mark_seen_tokens(token_ids, vocab_size, target.device)
    return tensors, seen


def make_sampling_batch(
    target: Target, sequences: abc.Sequence[Sequence], root_positions: torch.Tensor, max_depth: int
) -> SamplingBatch:
    """Return the sampling options of a round. `root_positions` (B,) are the absolute positions of
    the sequences' roots, and `max_depth` is the maximum depth of a node."""
    tensors, seen = make_sampling_tensors(target, sequences)
    return SamplingBatch(tensors, root_positions, max_depth + 1, target.vocab_size, seen)


def count_chunk_nodes(rows: int) -> int:
    """Return for how many nodes per row the logits are computed at the same time."""
    return max(
        1, MAX_LOGIT_CHUNK_NODES_PER_ROW * min(rows, MAX_ROWS_WITH_FULL_LOGIT_CHUNKS) // rows
    )


def argmax_tokens(target: Target, hidden: torch.Tensor) -> torch.Tensor:
    """Return the target's likeliest next tokens, (B, n), from final hidden states (B, n, D) of n
    positions per row."""
    if target.logit_scale == IDENTITY_LOGIT_SCALE:
        return target.kernels.argmax_head(hidden, target.model.get_output_embeddings())
    return target.compute_logits(hidden).argmax(-1)


def make_seen_tokens_lookup(
    sampling: SamplingBatch, tree: DraftTree, ancestors: torch.Tensor
) -> SeenTokensLookup | None:
    """Return a function that marks the tokens in the prefixes of nodes. Return None if no row has a
    repetition penalty."""
    if sampling.seen is None:
        return None
    return partial(mark_tokens_seen_at_nodes, sampling.seen, tree.tokens.clamp(min=0), ancestors)


def choose_tokens(
    target: Target,
    tree: DraftTree,
    ancestors: torch.Tensor,
    hidden: torch.Tensor,
    sampling: SamplingBatch,
) -> torch.Tensor:
    """Return the target's token after each node, (B, M), from the final hidden states (B, M, D) of
    the nodes.

    This runs on the device alone, so logits processors and grammars are not applied. Logits are
    computed for `count_chunk_nodes` nodes per row at a time.
    """
    find_seen = make_seen_tokens_lookup(sampling, tree, ancestors)
    if find_seen is None and not sampling.tensors.kind.uses_sampling:
        return choose_greedy_tokens(target, tree, hidden)

    chunk_nodes = count_chunk_nodes(len(hidden))
    chunks = []
    for first in range(0, hidden.shape[1], chunk_nodes):
        nodes = slice(first, first + chunk_nodes)
        find_seen_in_chunk = None
        if find_seen is not None:
            find_seen_in_chunk = partial(find_seen_with_offset, find_seen, first)
        logits = target.compute_logits(hidden[:, nodes])  # (B, n, V)
        depths = tree.depths[:, nodes]
        tokens = sample_tokens(logits, depths, sampling.tensors, sampling.noise, find_seen_in_chunk)
        chunks.append(tokens)
    if len(chunks) == 1:
        return chunks[0]
    return torch.cat(chunks, 1)


def choose_greedy_tokens(target: Target, tree: DraftTree, hidden: torch.Tensor) -> torch.Tensor:
    """Return the target's likeliest token after each node, (B, M), from the final hidden states (B,
    M, D) of the nodes. Padding nodes keep their tokens in the tree."""
    chunk_nodes = count_chunk_nodes(len(hidden)) * len(hidden)
    is_dense = tree.node_mask is None
    flat_hidden = hidden.flatten(0, 1) if is_dense else hidden[tree.node_mask]  # (nodes, D)
    tokens = torch.cat([argmax_tokens(target, chunk) for chunk in flat_hidden.split(chunk_nodes)])
    if is_dense:
        return tokens.view(hidden.shape[:2])
    return tree.tokens.index_put((tree.node_mask,), tokens)


def find_seen_with_offset(find_seen: SeenTokensLookup, first: int, nodes: slice) -> torch.Tensor:
    """Call `find_seen` with a slice of nodes whose indices are counted from node `first`."""
    return find_seen(slice(nodes.start + first, nodes.stop + first))


def select_host_rows(
    sequences: abc.Sequence[Sequence], tree: DraftTree, sampling: SamplingBatch, is_captured: bool
) -> dict[int, Sequence]:
    """Return the sequences whose tokens are chosen on the host, as a dictionary from batch row to
    sequence.

    These are the sequences with logits processors or a grammar. On a CPU they are all sequences, if
    the round is sampled and small: generating noise takes as long there as a target pass, and the
    host generates noise only for the nodes on the target's path. `is_captured` tells whether the
    round runs as CUDA graphs.
    """
    num_nodes = tree.tokens.shape[1]
    saves_noise = (
        sampling.tensors.kind.uses_sampling
        and sampling.seen is None
        and tree.tokens.device.type == "cpu"
        and not is_captured
        and 1 < num_nodes <= count_chunk_nodes(len(tree.tokens))
    )
    if saves_noise:
        return dict(enumerate(sequences))
    return {
        row: sequence for row, sequence in enumerate(sequences) if sequence.has_logits_processors
    }


def choose_tokens_on_host(
    target: Target,
    tree: DraftTree,
    ancestors: torch.Tensor,
    hidden: torch.Tensor,
    sampling: SamplingBatch,
    sequences: dict[int, Sequence],
    target_tokens: torch.Tensor,
) -> None:
    """Choose the target's tokens for the batch rows in `sequences` on the host, and write them into
    `target_tokens` (B, M).

    `sequences` maps batch rows to sequences. `hidden` (B, M, D) are the final hidden states of all
    nodes.
    """
    if not sequences:
        return
    find_seen = make_seen_tokens_lookup(sampling, tree, ancestors)
    rows = list(sequences)
    if len(rows) < len(hidden):
        hidden = hidden[rows]
    logits = target.compute_logits(hidden)  # (rows, M, V)
    for index, row in enumerate(rows):
        target_tokens[row] = choose_tokens_of_row(
            target, tree, row, sequences[row], sampling, logits[index], find_seen
        )


def choose_tokens_of_row(
    target: Target,
    tree: DraftTree,
    row: int,
    sequence: Sequence,
    sampling: SamplingBatch,
    logits: torch.Tensor,
    find_seen: SeenTokensLookup | None,
) -> torch.Tensor:
    """Return the target's tokens after the nodes of one batch row, (M,), from logits (M, V).

    Only nodes on the target's path get a token; the other nodes get NO_TOKEN. Logits processors and
    grammars are therefore called for one node at a time, with the true prefix of the node. After
    the end of the sequence, the last token is repeated; the repetitions are cut off later.
    """
    row_slice = slice(row, row + 1)
    row_sampling = sampling.tensors.select_rows(row_slice)
    tokens = tree.tokens[row].tolist()
    parents = tree.parents[row].tolist()
    target_tokens = torch.full_like(tree.tokens[row], NO_TOKEN)
    output_ids = sequence.ids[:]
    node: int | None = 0
    depth = 0
    token = NO_TOKEN
    while node is not None:
        if depth == 0 or not ends_at_last_token(output_ids, sequence, target):
            # Copy the logits, since logits processors may change them in place.
            scores = logits[node][None].to(torch.float32, copy=True)
            scores = apply_logits_processors(scores, sequence, output_ids)
            seen = None
            if find_seen is not None:
                seen = find_seen(slice(node, node + 1))[row_slice]
            scores = adjust_logits(scores[None], row_sampling, seen)  # (1, 1, V)
            noise = sampling.make_noise(row_slice, depth, 1, target.vocab_size)
            if noise is not None:
                scores = scores + noise
            token = int(scores.argmax())
            output_ids.append(token)
        target_tokens[node] = token
        node = find_child(tokens, parents, node, token)
        depth += 1
    return target_tokens


def ends_at_last_token(output_ids: list[int], sequence: Sequence, target: Target) -> bool:
    """Return whether the sequence ends at the last token of `output_ids`."""
    end = find_sequence_end(output_ids, len(output_ids) - 1, sequence.options, target)
    return end is not None


def apply_logits_processors(
    scores: torch.Tensor, sequence: Sequence, output_ids: list[int]
) -> torch.Tensor:
    """Apply a sequence's logits processors and grammar to the scores (1, V) of the token that comes
    after the prompt and `output_ids`. `output_ids` may end with drafted tokens."""
    for processor in sequence.processors:
        input_ids = torch.tensor([sequence.prompt + output_ids], device=scores.device)
        scores = processor(input_ids, scores)
    if sequence.grammar is not None:
        drafted_ids = output_ids[len(sequence.ids) :]
        scores = sequence.grammar.mask_scores(scores, sequence.ids, drafted_ids)
    return scores


def find_child(tokens: list[int], parents: list[int], node: int, token: int) -> int | None:
    """Return the first child of `node` whose token is `token`, or None if there is no such child.
    `tokens` and `parents` have one entry per node."""
    for child in range(node + 1, len(tokens)):
        if parents[child] == node and tokens[child] == token:
            return child
    return None


@dataclass(frozen=True)
class AcceptedPath:
    """The nodes that a round commits for each batch row, and the bonus token after these nodes."""

    # (B, W) node indices from the root down, padded by repeating the last accepted node. W is
    # min(maximum depth, number of drafted nodes) + 1.
    path: torch.Tensor
    lengths: torch.Tensor  # (B,) number of committed nodes including the root, 1 to W
    bonus: torch.Tensor  # (B,) the target's token after the path: the root of the next round


def walk(
    tree: DraftTree, target_tokens: torch.Tensor, ancestors: torch.Tensor | None = None
) -> AcceptedPath:
    """Walk from the root to a child for as long as a child has the target's token.

    `target_tokens` (B, M) are the target's tokens after the nodes, greedy or sampled. The walk is
    lossless for both. It runs without a GPU-to-CPU synchronisation, since all nodes are tested at
    once. A node is accepted if the node and each of its ancestors has the target's token after its
    parent. The path ends at the deepest accepted node.
    """
    if tree.max_depth == 0:
        lengths = torch.ones_like(tree.parents[:, 0])
        return AcceptedPath(tree.parents, lengths, target_tokens[:, 0])
    if ancestors is None:
        ancestors = tree.ancestors()

    match = tree.tokens == target_tokens.gather(1, tree.parents)  # (B, M)
    match[:, 0] = True
    accepted = (match[:, None] | ~ancestors).all(-1)  # (B, M)
    last = (accepted * (tree.depths + 1)).argmax(1, keepdim=True)  # (B, 1) the deepest accepted
    last_ancestors = last[..., None].expand(-1, -1, ancestors.shape[-1])  # (B, 1, M)
    on_path = ancestors.gather(1, last_ancestors)[:, 0]  # (B, M)

    # Node i of the path goes to column depths[i]. All other nodes go to an extra column, which is
    # dropped. A path has at most as many nodes as the tree; wider paths would not fit into the
    # KV cache.
    max_length = min(tree.max_depth, tree.max_drafted)
    columns = torch.where(on_path, tree.depths, max_length + 1)
    nodes = torch.arange(columns.shape[1], device=columns.device).expand_as(columns)
    path = last.expand(-1, max_length + 2).clone().scatter_(1, columns, nodes)[:, :-1]

    lengths = tree.depths.gather(1, last)[:, 0] + 1
    bonus = target_tokens.gather(1, last)[:, 0]
    return AcceptedPath(path, lengths, bonus)
