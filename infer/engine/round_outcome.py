"""The outcome of a round: committed tokens, accepted nodes and log-probabilities. It is copied to
the host as one tensor."""

from dataclasses import dataclass

import torch

from infer.engine.sequence import Sequence, TokenLogprob
from infer.engine.verification import AcceptedPath
from infer.targets.target import Target
from infer.trees.tree import DraftTree


@dataclass(frozen=True)
class RowOutcome:
    """The result of a round for one batch row, as Python lists on the host."""

    tokens: list[int]  # the committed tokens after the root; the last one is the bonus token
    path: list[int]  # indices of the accepted nodes, without the root
    node_log_probs: list[float]  # drafter's log-probabilities of all nodes; empty if not requested
    # For each committed token the list of numbers that `compute_token_logprobs` describes. Empty if
    # no sequence of the batch asks for log-probabilities.
    token_logprobs: list[list[float]]


def pack_outcomes(
    target: Target,
    tree: DraftTree,
    hidden: torch.Tensor,
    target_tokens: torch.Tensor,
    accepted: AcceptedPath,
    num_logprobs: int | None,
    node_log_probs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the outcome of a round as one tensor (B, columns). It is float64, which represents
    token ids exactly.

    The path consists of the committed nodes. It is `accepted.path` (B, path_length), padding
    included. The columns are, in this order: the number of committed nodes; the bonus token; the
    tokens of the path; the node indices of the path; `node_log_probs`, if given; and the result of
    `compute_token_logprobs` for the path, unless `num_logprobs` is None.

    hidden: (B, num_nodes, hidden_size), final hidden states of all nodes
    target_tokens: (B, num_nodes), the target's token after each node
    node_log_probs: (B, nodes before pruning), the drafter's log-probabilities
    """
    path_tokens = tree.tokens.gather(1, accepted.path)  # (B, path_length)
    columns = [accepted.lengths[:, None], accepted.bonus[:, None], path_tokens, accepted.path]
    if node_log_probs is not None:
        columns.append(node_log_probs)
    if num_logprobs is not None:
        path_index = accepted.path[..., None].expand(-1, -1, hidden.shape[-1])
        path_hidden = hidden.gather(1, path_index)  # (B, path_length, hidden_size)
        next_tokens = target_tokens.gather(1, accepted.path)
        logprobs = compute_token_logprobs(target, path_hidden, next_tokens, num_logprobs)
        columns.append(logprobs.flatten(1))
    return torch.cat([column.double() for column in columns], 1)


def unpack_outcome(values: list[float], path_width: int, num_node_log_probs: int) -> RowOutcome:
    """Convert one row of the result of `pack_outcomes` to a `RowOutcome`.

    values: the row, as a list of numbers
    path_width: the padded length of the path
    num_node_log_probs: number of columns with the drafter's log-probabilities of nodes
    """
    length = int(values[0])
    bonus = int(values[1])
    tokens_end = 2 + path_width
    path_end = tokens_end + path_width
    path_tokens = [int(value) for value in values[2:tokens_end]]
    path = [int(value) for value in values[tokens_end:path_end]]

    log_probs_end = path_end + num_node_log_probs
    node_log_probs = values[path_end:log_probs_end]

    logprobs_size = (len(values) - log_probs_end) // path_width
    token_logprobs = []
    if logprobs_size:
        for index in range(length):
            start = log_probs_end + logprobs_size * index
            token_logprobs.append(values[start : start + logprobs_size])
    return RowOutcome(
        [*path_tokens[1:length], bonus], path[1:length], node_log_probs, token_logprobs
    )


def compute_token_logprobs(
    target: Target, hidden: torch.Tensor, tokens: torch.Tensor, num_logprobs: int
) -> torch.Tensor:
    """Return the target's log-probabilities of `tokens` (B, num_tokens), and of the likeliest
    tokens at the same positions. Sampling options are not applied.

    `hidden` (B, num_tokens, hidden_size) are the final hidden states from which the tokens are
    predicted. The result is (B, num_tokens, 1 + 2 * num_logprobs) float64. Its last dimension holds
    the token's log-probability, the `num_logprobs` highest log-probabilities, and the ids of the
    tokens that have these.
    """
    log_probs = target.compute_logits(hidden).float().log_softmax(-1)
    top_log_probs, top_ids = log_probs.topk(num_logprobs, dim=-1)
    token_log_probs = log_probs.gather(2, tokens[..., None])
    return torch.cat([token_log_probs, top_log_probs, top_ids.double()], -1)


def append_logprobs(sequence: Sequence, token_logprobs: list[list[float]]) -> None:
    """Append the log-probabilities of new tokens to a sequence, if the sequence asks for any.
    `token_logprobs` has one list per token, with the numbers that `compute_token_logprobs`
    describes."""
    num_requested = sequence.options.logprobs
    if num_requested is None:
        return
    for logprob, *alternatives in token_logprobs:
        half = len(alternatives) // 2
        top_log_probs = alternatives[:half]
        top_ids = [int(value) for value in alternatives[half:]]
        top = list(zip(top_ids, top_log_probs, strict=True))
        sequence.logprobs.append(TokenLogprob(logprob, top[:num_requested]))


def find_rejected_path(tree: DraftTree, row: int, node: int) -> list[int]:
    """Return the tokens of the likeliest path that the target rejected in a batch row.

    The path begins after `node`, the last accepted node. It continues with the first child of each
    node, which is the likeliest child.
    """
    tokens = tree.tokens[row].tolist()
    parents = tree.parents[row, : tree.drafted_counts[row] + 1].tolist()
    rejected = []
    while node in parents[node + 1 :]:
        node = parents.index(node, node + 1)
        rejected.append(tokens[node])
    return rejected
