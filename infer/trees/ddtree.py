"""DDTree: the draft tree of B nodes that maximises the expected acceptance length under the drafter's
distributions.

DDTree section 4.3: the B likeliest prefixes. The score of a node is its parent's plus log q of its
token behind its own path, at most 0, so that a prefix never scores above its parent: lemma 1 and
proposition 1 hold with the conditionals of a drafter's head for marginals, which are conditionals with
one row, and the best B prefixes are found exactly. Two ways to the same nodes in the same order: best
first (the paper's algorithm 1) over the table of a first-order head or of marginals, compiled for the
CPU and in one Triton kernel for GPUs; and `by_depth`, in tensor operations of fixed shapes, wherever
neither is at hand and for recurrent heads, whose memories the kept prefixes carry.

Of equal scores the shallower prefix goes first, then the one whose parent does, then the candidate that
is likelier by itself: the first of two equal candidates.

B rows, L drafted positions, M candidates a position, N nodes, P prefixes, S entries of a memory, V
vocabulary.
"""

import torch

from infer.attention.attend import has_kernel
from infer.trees import compiled
from infer.trees.tree import Conditionals, DraftTree, Nodes, Proposal, behind, comparable, node_count
from infer.trees.vocabulary import ALL, Vocabulary


class Marginals:
    """Marginals (B, L, V) of a vocabulary as conditionals with one row, over their `count` likeliest
    tokens."""

    recurrent = False

    def __init__(self, marginals: torch.Tensor, count: int, vocabulary: Vocabulary = ALL) -> None:
        top, columns = marginals.topk(min(count, marginals.shape[-1]), dim=-1)
        self.tokens = vocabulary.ids(columns)  # (B, L, M)
        self.table = top[:, 0], top[:, 1:, None]  # (B, M), (B, L - 1, 1, M)


def ddtree(proposal: Proposal) -> DraftTree:
    """Return the top `budget` prefixes (all of them, if there are fewer) of the marginals (B, L, V), in
    descending order of probability: the first n nodes are the tree of budget n. The top K = min(budget,
    V) tokens of a position suffice (lemma 1). With a conditional head, prefixes of the head's
    candidates by their conditional probability."""
    steps = proposal.steps or Marginals(proposal.marginals, proposal.budget, proposal.vocabulary)
    fast = compiled.available(proposal.bonus) or has_kernel(proposal.bonus.device)
    search = best_first if fast and not steps.recurrent else by_depth
    return behind(proposal.bonus, search(steps, proposal.budget), steps.tokens.shape[1])


def best_first(steps: Conditionals, budget: int) -> Nodes:
    """Search best first: the drafted nodes, best first. For steps that are not recurrent."""
    rows, length, count = steps.tokens.shape
    table, before, number = comparable(one_table(steps)), steps.table[1].shape[2], node_count(length, count, budget)
    if has_kernel(table.device):
        from infer.trees import search_kernel

        return search_kernel.best_first(table, before, steps.tokens, number)
    nodes = torch.empty(rows, 3, number, dtype=torch.long)
    scores = torch.empty(rows, number)
    parts = (part.contiguous().numpy() for part in (table, steps.tokens, nodes, scores))
    for log_q, tokens, *found in zip(*parts, strict=True):
        compiled.search(log_q, tokens, length, before, None, *found)
    return Nodes(*nodes.unbind(1), scores)


def one_table(steps: Conditionals) -> torch.Tensor:
    """Return log q (B, 1 + (L - 1) R, M) float32 of the first slot's candidates, and of the others'
    behind each of the R of the one before."""
    first, others = steps.table
    return torch.cat([first[:, None], others.flatten(1, 2)], 1).float()


def by_depth(steps: Conditionals, budget: int) -> Nodes:
    """Find the same nodes depth by depth on the candidates' device: extend the best prefixes of a depth
    by all candidates, keep the best of these, and at the end take the best of all depths.

    Exact: a prefix among the best B has its parent among them. Sorting is stable, so that equal scores
        stay in order.
    """
    rows, length, count = steps.tokens.shape
    scores, levels, first, memory = torch.zeros(rows, 1, device=steps.tokens.device), [], 0, None
    which = torch.zeros_like(scores, dtype=torch.long)  # (B, P) the last candidate of every prefix
    for slot in range(length):
        log_q, memory = behind_candidates(steps, slot, which, memory)
        extended = (scores[:, :, None] + comparable(log_q)).flatten(1)  # (B, P M)
        scores, order = extended.sort(dim=1, descending=True, stable=True)
        scores, order = scores[:, :budget], order[:, :budget]  # (B, P)
        which, prefix = order % count, order // count
        if memory is not None:
            memory = memory.gather(1, prefix[..., None].expand(-1, -1, memory.shape[-1]))
        parents = prefix + first - levels[-1][0].shape[1] if slot else torch.full_like(prefix, -1)
        first += order.shape[1]
        tokens = steps.tokens[:, slot].gather(1, which)
        levels.append((scores, tokens, parents, torch.full_like(tokens, slot + 1)))
    return best_of_levels(levels, budget)


def behind_candidates(
    steps: Conditionals, slot: int, which: torch.Tensor, memory: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log q (B, P, M) of a slot behind candidates `which` (B, P) of the one before; and a
    recurrent head's memory."""
    if steps.recurrent:
        return steps.extend(slot, which, memory) if slot else steps.begin()
    first, others = steps.table
    if slot == 0:
        return first[:, None], None
    rows = which.clamp(max=others.shape[2] - 1)[..., None]  # of marginals there is one
    return others[:, slot - 1].gather(1, rows.expand(-1, -1, others.shape[3])), None


def best_of_levels(levels: list[tuple[torch.Tensor, ...]], budget: int) -> Nodes:
    """Return the best `budget` prefixes of all depths, best first. Of every depth, best first and (B,
    P) each: scores, tokens, parents among the prefixes of all depths (-1 for the root), and depths."""
    scores, tokens, parents, depths = (torch.cat(column, 1) for column in zip(*levels, strict=True))
    order = scores.sort(dim=1, descending=True, stable=True).indices
    node = order.argsort(1) + 1  # of every kept prefix, by its place in the order; the root is node 0
    order = order[:, :budget]
    parents = parents.gather(1, order)
    parents = torch.where(parents < 0, 0, node.gather(1, parents.clamp(min=0)))
    return Nodes(tokens.gather(1, order), parents, depths.gather(1, order), scores.gather(1, order))
