"""The target's tokens at the nodes of draft trees, and the walk: the drafted path that the target
accepts, and the bonus token after it (DDTree section 4.4).

B batch rows, M tree nodes, W = max depth + 1, D hidden size, V vocabulary size.
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

# Nodes of a batch row whose logits are in memory at the same time. With more than
# MAX_ROWS_WITH_FULL_LOGIT_CHUNKS rows, the number is reduced so that all rows together have no more logits.
MAX_LOGIT_CHUNK_NODES_PER_ROW = 65
MAX_ROWS_WITH_FULL_LOGIT_CHUNKS = 4

NO_TOKEN = -1  # no drafted node has this token, so the walk ends there


@dataclass(frozen=True)
class SamplingBatch:
    """The sampling options of a round's batch rows, and the noise of the round's positions."""

    tensors: SamplingTensors
    root_positions: torch.Tensor  # (B,)
    num_positions: int  # positions after the root, more than the depth of any tree
    vocab_size: int
    seen: torch.Tensor | None  # (B, V) the tokens of every row's sequence, if a row has a penalty

    @cached_property
    def noise(self) -> torch.Tensor | None:
        """The noise of all positions, (B, num_positions, V). None if no row is sampled."""
        return self.make_noise(slice(None), 0, self.num_positions, self.vocab_size)

    def make_noise(
        self, rows: slice, first_depth: int, num_positions: int, tokens: int | torch.Tensor
    ) -> torch.Tensor | None:
        """Return the noise of some rows, depths and tokens; `tokens` as in `gumbel_noise`."""
        start = self.root_positions[rows] + first_depth
        return make_round_noise(self.tensors.select_rows(rows), start, num_positions, tokens)


def make_sampling_tensors(
    target: Target, sequences: abc.Sequence[Sequence]
) -> tuple[SamplingTensors, torch.Tensor | None]:
    """Return the sampling options of sequences, and the tokens that each contains, (B, V) bool, or
    None if no sequence has a penalty."""
    vocab_size = target.vocab_size
    options = [sequence.options for sequence in sequences]
    tensors = SamplingTensors.from_options(options, vocab_size, target.device)
    seen = None
    if tensors.kind.uses_penalty:
        token_ids = [sequence.token_ids for sequence in sequences]
        seen = mark_seen_tokens(token_ids, vocab_size, target.device)
    return tensors, seen


def make_sampling_batch(
    target: Target,
    sequences: abc.Sequence[Sequence],
    root_positions: torch.Tensor,
    max_depth: int,
) -> SamplingBatch:
    """Return the sampling options for a round of sequences with roots at positions (B,)."""
    tensors, seen = make_sampling_tensors(target, sequences)
    return SamplingBatch(tensors, root_positions, max_depth + 1, target.vocab_size, seen)


def count_chunk_nodes(rows: int) -> int:
    """Return the number of nodes per row whose logits are in memory at the same time."""
    return max(
        1, MAX_LOGIT_CHUNK_NODES_PER_ROW * min(rows, MAX_ROWS_WITH_FULL_LOGIT_CHUNKS) // rows
    )


def argmax_tokens(target: Target, hidden: torch.Tensor) -> torch.Tensor:
    """Return the target's likeliest token for final hidden states (B, n, D), (B, n)."""
    if target.logit_scale == IDENTITY_LOGIT_SCALE:
        return target.kernels.argmax_head(hidden, target.model.get_output_embeddings())
    return target.compute_logits(hidden).argmax(-1)


def make_seen_tokens_lookup(
    sampling: SamplingBatch, tree: DraftTree, ancestors: torch.Tensor
) -> SeenTokensLookup | None:
    """Return a function that marks the tokens of the prefixes of nodes, or None if no row has a
    penalty."""
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
    """Return the target's token after every node, (B, M), from the nodes' final hidden states (B,
    M, D), on the device alone.

    Logits processors and grammars are not applied. Logits are computed for some nodes at a time.
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
    """Return the target's likeliest token after every node, (B, M), from final hidden states (B, M,
    D). Padding keeps the tree's token."""
    chunk_nodes = count_chunk_nodes(len(hidden)) * len(hidden)
    is_dense = tree.node_mask is None
    flat_hidden = hidden.flatten(0, 1) if is_dense else hidden[tree.node_mask]  # (nodes, D)
    tokens = torch.cat([argmax_tokens(target, chunk) for chunk in flat_hidden.split(chunk_nodes)])
    if is_dense:
        return tokens.view(hidden.shape[:2])
    return tree.tokens.index_put((tree.node_mask,), tokens)


def find_seen_with_offset(find_seen: SeenTokensLookup, first: int, nodes: slice) -> torch.Tensor:
    """Call `find_seen` with nodes that are counted from node `first`."""
    return find_seen(slice(nodes.start + first, nodes.stop + first))


def select_host_rows(
    sequences: abc.Sequence[Sequence], tree: DraftTree, sampling: SamplingBatch, is_captured: bool
) -> dict[int, Sequence]:
    """Return the sequences whose tokens are chosen on the host, by batch row: those with logits
    processors or a grammar.

    On a CPU these are all sequences of a small sampled round. Noise takes as long as a target pass
    there, and the host makes it only for the nodes on the target's path.
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
    """Write the target's tokens into the rows of `target_tokens` (B, M) that `sequences` names.

    `hidden` (B, M, D) are the final hidden states of all nodes.
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

    Only nodes on the target's path get a token, the others NO_TOKEN. Logits processors and grammars
    thus see the true prefix of one node at a time. After the end of the sequence its last token is
    repeated; it is cut off later.
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
            # Processors may change the scores in place.
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
    """Return whether the last of the output tokens ends the sequence."""
    end = find_sequence_end(output_ids, len(output_ids) - 1, sequence.options, target)
    return end is not None


def apply_logits_processors(
    scores: torch.Tensor, sequence: Sequence, output_ids: list[int]
) -> torch.Tensor:
    """Apply a sequence's logits processors and grammar to scores (1, V) after its prompt and
    `output_ids`, which may include drafted tokens."""
    for processor in sequence.processors:
        input_ids = torch.tensor([sequence.prompt + output_ids], device=scores.device)
        scores = processor(input_ids, scores)
    if sequence.grammar is not None:
        drafted_ids = output_ids[len(sequence.ids) :]
        scores = sequence.grammar.mask_scores(scores, sequence.ids, drafted_ids)
    return scores


def find_child(tokens: list[int], parents: list[int], node: int, token: int) -> int | None:
    """Return the first child of a node that carries a token, or None."""
    for child in range(node + 1, len(tokens)):
        if parents[child] == node and tokens[child] == token:
            return child
    return None


@dataclass(frozen=True)
class AcceptedPath:
    """The nodes that a round commits, and the token after them."""

    # (B, W), W = min(max depth, nodes) + 1: node indices from the root down, padded by repeating
    # the last accepted one
    path: torch.Tensor
    lengths: torch.Tensor  # (B,) number of committed nodes including the root, 1 to W
    bonus: torch.Tensor  # (B,) the target's token after the path: the root of the next round


def walk(
    tree: DraftTree, target_tokens: torch.Tensor, ancestors: torch.Tensor | None = None
) -> AcceptedPath:
    """Walk from the root to a child for as long as a child carries the target's token.

    `target_tokens` (B, M) is the target's token after every node, greedy or sampled; the same rule
    makes both lossless. There is no synchronisation: a node is accepted if it and all its ancestors
    carry the target's token after their parents, and the deepest accepted node ends the path.
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

    # Node i of the path goes to column depths[i]. Other nodes go to an extra column, which is
    # dropped. A path cannot be longer than the number of nodes, and must not be: it would not fit
    # into the cache.
    max_length = min(tree.max_depth, tree.max_drafted)
    columns = torch.where(on_path, tree.depths, max_length + 1)
    nodes = torch.arange(columns.shape[1], device=columns.device).expand_as(columns)
    path = last.expand(-1, max_length + 2).clone().scatter_(1, columns, nodes)[:, :-1]

    lengths = tree.depths.gather(1, last)[:, 0] + 1
    bonus = target_tokens.gather(1, last)[:, 0]
    return AcceptedPath(path, lengths, bonus)
