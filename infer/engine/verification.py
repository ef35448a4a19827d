"""Verification of draft trees: choose the target's token after each node, and find the path of
nodes that the target accepts (DDTree section 4.4). The target's token after the last accepted node
is the bonus token.

In shapes, B is the number of batch rows.
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

# Logits are computed for this many nodes per batch row at a time, to save memory. With more than
# MAX_ROWS_WITH_FULL_LOGIT_CHUNKS rows it is fewer nodes per row, so that the total memory does not
# grow further.
MAX_LOGIT_CHUNK_NODES_PER_ROW = 65
MAX_ROWS_WITH_FULL_LOGIT_CHUNKS = 4

# In place of the target's token after a node: no token was chosen. No drafted node has this token,
# so no child of that node is accepted.
NO_TOKEN = -1


@dataclass(frozen=True)
class SamplingBatch:
    """The sampling options of all batch rows in a round, and the sampling noise at the positions of
    the round."""

    tensors: SamplingTensors
    root_positions: torch.Tensor  # (B,): the absolute position of each batch row's root
    # number of positions after the root, one more than the maximum depth of a node
    num_positions: int
    vocab_size: int
    # (B, vocab_size) bool: which tokens each row's sequence contains. None if no row has a
    # repetition penalty.
    seen: torch.Tensor | None

    @cached_property
    def noise(self) -> torch.Tensor | None:
        """The Gumbel noise (B, num_positions, vocab_size) of all positions of the round. None if no
        batch row is sampled."""
        return self.make_noise(slice(None), 0, self.num_positions, self.vocab_size)

    def make_noise(
        self, rows: slice, first_depth: int, num_positions: int, tokens: int | torch.Tensor
    ) -> torch.Tensor | None:
        """Return the Gumbel noise (number of rows, num_positions, num_tokens) that is added to the
        logits of nodes at depths from `first_depth` on. Return None if no batch row is sampled.

        `rows` is a slice of batch rows. `tokens` is the vocabulary size, or a tensor (num_tokens,)
        of token ids.
        """
        start = self.root_positions[rows] + first_depth
        return make_round_noise(self.tensors.select_rows(rows), start, num_positions, tokens)


def make_sampling_tensors(
    target: Target, sequences: abc.Sequence[Sequence]
) -> tuple[SamplingTensors, torch.Tensor | None]:
    """Return the sampling options of the sequences as tensors, and a mask (number of sequences,
    vocab_size) bool of the tokens that each sequence contains. The mask is None if no sequence has
    a repetition penalty."""
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
    the trees' roots, and `max_depth` is the maximum depth of a node."""
    tensors, seen = make_sampling_tensors(target, sequences)
    return SamplingBatch(tensors, root_positions, max_depth + 1, target.vocab_size, seen)


def count_chunk_nodes(rows: int) -> int:
    """Return for how many nodes of each batch row logits are computed at the same time. The number
    is smaller if there are many batch rows."""
    return max(
        1, MAX_LOGIT_CHUNK_NODES_PER_ROW * min(rows, MAX_ROWS_WITH_FULL_LOGIT_CHUNKS) // rows
    )


def argmax_tokens(target: Target, hidden: torch.Tensor) -> torch.Tensor:
    """Return the target's likeliest next tokens. `hidden` (..., hidden_size) are final hidden
    states; the result has their shape without the last dimension."""
    if target.logit_scale == IDENTITY_LOGIT_SCALE:
        return target.kernels.argmax_head(hidden, target.model.get_output_embeddings())
    return target.compute_logits(hidden).argmax(-1)


def make_seen_tokens_lookup(
    sampling: SamplingBatch, tree: DraftTree, ancestors: torch.Tensor
) -> SeenTokensLookup | None:
    """Return a function that takes a slice of node indices and marks the tokens in the prefixes of
    these nodes. Return None if no batch row has a repetition penalty. `ancestors` is the result of
    `tree.build_ancestor_mask()`."""
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
    """Return the target's token after each node, (B, num_nodes), for the final hidden states (B,
    num_nodes, hidden_size) of the nodes. `ancestors` is the result of `tree.build_ancestor_mask()`.

    Everything runs on the device, so logits processors and grammars are not applied. Logits are
    computed for `count_chunk_nodes` nodes per batch row at a time.
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
        logits = target.compute_logits(hidden[:, nodes])  # (B, nodes in the chunk, vocab_size)
        depths = tree.depths[:, nodes]
        tokens = sample_tokens(logits, depths, sampling.tensors, sampling.noise, find_seen_in_chunk)
        chunks.append(tokens)
    if len(chunks) == 1:
        return chunks[0]
    return torch.cat(chunks, 1)


def choose_greedy_tokens(target: Target, tree: DraftTree, hidden: torch.Tensor) -> torch.Tensor:
    """Return the target's likeliest token after each node, (B, num_nodes), for the final hidden
    states (B, num_nodes, hidden_size) of the nodes. At padding nodes, the result has the node's own
    token."""
    chunk_nodes = count_chunk_nodes(len(hidden)) * len(hidden)
    is_dense = tree.node_mask is None
    # (nodes of all rows, hidden_size)
    flat_hidden = hidden.flatten(0, 1) if is_dense else hidden[tree.node_mask]
    tokens = torch.cat([argmax_tokens(target, chunk) for chunk in flat_hidden.split(chunk_nodes)])
    if is_dense:
        return tokens.view(hidden.shape[:2])
    return tree.tokens.index_put((tree.node_mask,), tokens)


def find_seen_with_offset(find_seen: SeenTokensLookup, first: int, nodes: slice) -> torch.Tensor:
    """Call `find_seen`, which marks the tokens in the prefixes of nodes, for the slice `nodes`
    shifted by `first` nodes."""
    return find_seen(slice(nodes.start + first, nodes.stop + first))


def select_host_sequences(
    sequences: abc.Sequence[Sequence], tree: DraftTree, sampling: SamplingBatch, is_captured: bool
) -> dict[int, Sequence]:
    """Return the sequences whose tokens are chosen on the host. Keys are batch rows, values are
    sequences.

    These are the sequences with logits processors or a grammar. On a CPU, all sequences are
    returned if the round uses sampling and its trees are small. The host generates noise only for
    the nodes on the path of accepted nodes. Noise for all nodes would take as long as a forward
    pass of the target. `is_captured` tells whether the round runs as CUDA graphs.
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
        row: sequence
        for row, sequence in enumerate(sequences)
        if sequence.has_processors_or_grammar
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
    """Choose the target's tokens for some batch rows on the host, and write them into
    `target_tokens` (B, num_nodes).

    `sequences` has these batch rows as keys and their sequences as values. `hidden` (B, num_nodes,
    hidden_size) are the final hidden states of all nodes of all rows, and `ancestors` is the result
    of `tree.build_ancestor_mask()`.
    """
    if not sequences:
        return
    find_seen = make_seen_tokens_lookup(sampling, tree, ancestors)
    rows = list(sequences)
    if len(rows) < len(hidden):
        hidden = hidden[rows]
    logits = target.compute_logits(hidden)  # (chosen rows, num_nodes, vocab_size)
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
    """Return the target's tokens after the nodes of batch row `row`, (num_nodes,). `logits`
    (num_nodes, vocab_size) are the target's logits after the nodes.

    Only the nodes on the path of accepted nodes get a token; all other nodes get NO_TOKEN. Logits
    processors and grammars are therefore called for one node at a time, with the node's prefix. If
    the output ends at a token on the path, later nodes of the path get the same token again; the
    caller removes these repetitions.
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
            # Copy the logits, because logits processors may change them in place.
            scores = logits[node][None].to(torch.float32, copy=True)
            scores = apply_logits_processors(scores, sequence, output_ids)
            seen = None
            if find_seen is not None:
                seen = find_seen(slice(node, node + 1))[row_slice]
            scores = adjust_logits(scores[None], row_sampling, seen)  # (1, 1, vocab_size)
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
    """Return whether the sequence ends at the last token of `output_ids`, for example because it is
    an end token."""
    end = find_sequence_end(output_ids, len(output_ids) - 1, sequence.options, target)
    return end is not None


def apply_logits_processors(
    scores: torch.Tensor, sequence: Sequence, output_ids: list[int]
) -> torch.Tensor:
    """Apply a sequence's logits processors and grammar to the scores (1, vocab_size) of the token
    after `output_ids`, and return the result. `output_ids` are the output tokens, perhaps followed
    by drafted tokens."""
    for processor in sequence.processors:
        input_ids = torch.tensor([sequence.prompt + output_ids], device=scores.device)
        scores = processor(input_ids, scores)
    if sequence.grammar is not None:
        drafted_ids = output_ids[len(sequence.ids) :]
        scores = sequence.grammar.mask_scores(scores, sequence.ids, drafted_ids)
    return scores


def find_child(tokens: list[int], parents: list[int], node: int, token: int) -> int | None:
    """Return the index of the first child of `node` that has the token `token`, or None if there is
    none. `tokens` and `parents` have one entry per node of the tree."""
    for child in range(node + 1, len(tokens)):
        if parents[child] == node and tokens[child] == token:
            return child
    return None


@dataclass(frozen=True)
class AcceptedPath:
    """The nodes that a round commits in each batch row, and the bonus token after these nodes."""

    # (B, path_length): node indices from the root down, padded by repeating the last accepted node.
    # path_length is min(maximum depth, number of drafted nodes) + 1.
    path: torch.Tensor
    lengths: torch.Tensor  # (B,): number of committed nodes, root included
    bonus: torch.Tensor  # (B,): the target's token after the path, the root of the next round


def walk(
    tree: DraftTree, target_tokens: torch.Tensor, ancestors: torch.Tensor | None = None
) -> AcceptedPath:
    """Find the path of accepted nodes in each tree. It begins at the root, and goes on to the child
    that has the target's token, for as long as there is one. `target_tokens` (B, num_nodes) are the
    target's tokens after the nodes, greedy or sampled.

    There is no GPU-to-CPU synchronisation, because all nodes are tested at once. A node is accepted
    if its token, and the token of each ancestor except the root, is the target's token after the
    respective parent. The path ends at the deepest accepted node.
    """
    if tree.max_depth == 0:
        lengths = torch.ones_like(tree.parents[:, 0])
        return AcceptedPath(tree.parents, lengths, target_tokens[:, 0])
    if ancestors is None:
        ancestors = tree.build_ancestor_mask()

    match = tree.tokens == target_tokens.gather(1, tree.parents)  # (B, num_nodes)
    match[:, 0] = True
    accepted = (match[:, None] | ~ancestors).all(-1)  # (B, num_nodes)
    # (B, 1): the deepest accepted node
    last = (accepted * (tree.depths + 1)).argmax(1, keepdim=True)
    last_ancestors = last[..., None].expand(-1, -1, ancestors.shape[-1])  # (B, 1, num_nodes)
    on_path = ancestors.gather(1, last_ancestors)[:, 0]  # (B, num_nodes)

    # Column d of `path` gets the path's node at depth d. All nodes that are not on the path go to
    # an extra column, which is dropped. The path has at most as many columns as the tree has nodes,
    # because the KV cache has no space for more.
    max_length = min(tree.max_depth, tree.max_drafted)
    columns = torch.where(on_path, tree.depths, max_length + 1)
    nodes = torch.arange(columns.shape[1], device=columns.device).expand_as(columns)
    path = last.expand(-1, max_length + 2).clone().scatter_(1, columns, nodes)[:, :-1]

    lengths = tree.depths.gather(1, last)[:, 0] + 1
    bonus = target_tokens.gather(1, last)[:, 0]
    return AcceptedPath(path, lengths, bonus)
