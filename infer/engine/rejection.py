"""Recursive rejection sampling: the walk through a tree whose children were drawn from an explicit distribution.

Sources. The tree and the idea of trying sibling after sibling: "Tree-Based Speculative Decoding" for NanoGPT; but its
rule, every node accepted on its own with min(1, p / q) and the longest accepted path kept, does not give the target's
distribution, whether children are the likeliest tokens or drawn. Going from sibling to sibling with the residual of
the target's distribution: SpecInfer's multi-step speculative sampling (Miao et al. 2024), there for independent
draws. The same for draws without replacement, the proposal being renormalised over the tokens not yet tried:
Recursive Speculative Decoding (Jeon et al. 2024) and Sequoia (Chen et al. 2024).

B rows, M nodes with the root, W width, D depth of the tree, V vocabulary.
"""

from collections.abc import Callable, Sequence

import torch

from infer.config import TextOptions
from infer.engine.controls import column, index, sampled_rows
from infer.engine.sampling import SeenAt, adjust, gumbel_noise, rows_noise
from infer.engine.verify import Accepted
from infer.trees.tree import DraftTree

_DRAFT, _ACCEPT = 0x6A09E667F3BCC909, 0x3C6EF372FE94F82B  # seed masks: fractions of the roots of 2 and 5


def draft_noise(seed: torch.Tensor, positions: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return Gumbel noise (B, D, V) float32 to draw children with, for seeds (B,) and positions (B, D), both int64.

    A function of seed, position and token like `gumbel_noise`, in a stream of its own: with the target's own noise, the
    draw after a rejection would depend on what was rejected.
    """
    return gumbel_noise(seed ^ _DRAFT, positions, vocabulary)


def acceptance_uniforms(seed: torch.Tensor, positions: torch.Tensor, width: int) -> torch.Tensor:
    """Return uniforms (B, D, W) float64 in (0, 1) that decide about the W children at positions (B, D), for seeds (B,),
    both int64: the Gumbel distribution function of a third stream of noise."""
    return (-(-gumbel_noise(seed ^ _ACCEPT, positions, width).double()).exp()).exp()


def children_noise(texts: Sequence[TextOptions], start: torch.Tensor, depth: int, vocabulary: int) -> torch.Tensor:
    """Return Gumbel noise (B, D, V) to draw the children of sampled texts with, in trees whose roots are at positions
    start (B,); 0 for greedy texts, whose children are the likeliest tokens."""
    return _for_all(texts, rows_noise(draft_noise, texts, start, depth, vocabulary))


def _for_all(texts: Sequence[TextOptions], noise: torch.Tensor) -> torch.Tensor:
    """Return the noise (S, D, V) of the sampled texts as (B, D, V), 0 for the others."""
    if len(noise) == len(texts):
        return noise
    everything = noise.new_zeros(len(texts), *noise.shape[1:])
    everything[index(texts, sampled_rows(texts), noise.device)] = noise
    return everything


def decide(
    tree: DraftTree,
    logits: torch.Tensor,
    texts: Sequence[TextOptions],
    start: torch.Tensor,
    noise: torch.Tensor,
    seen: SeenAt | None,
) -> tuple[Accepted, torch.Tensor]:
    """Return what a round of drawn trees commits, and the committed token behind every node of the path, (B, M), 0
    elsewhere: from the target's logits (B, M, V), the round's noise (S, > depth, V), and the tokens of every node's
    prefix, needed for a penalty only. Only logits behind nodes that the walk comes to are adjusted."""
    depth, greedy = tree.max_depth, ~column(texts, "sampled", logits.device)  # (B, 1, 1)
    rows = torch.arange(len(logits), device=logits.device)[:, None]

    def log_p(nodes: torch.Tensor) -> torch.Tensor:
        nodes = nodes[:, None]
        scores = adjust(logits[rows, nodes], texts, None if seen is None else seen(rows, nodes))  # (B, 1, V)
        certain = torch.full_like(scores, -torch.inf).scatter_(2, scores.argmax(-1, keepdim=True), 0.0)
        return torch.where(greedy, certain, scores).log_softmax(-1)[:, 0]

    positions = start[:, None] + 1 + torch.arange(depth, device=start.device)
    seeds = column(texts, "seed", start.device).flatten()
    uniforms = acceptance_uniforms(seeds, positions, tree.draws.width)
    accepted = rejection_walk(tree, log_p, uniforms, _for_all(texts, noise[:, : depth + 1]))
    following = tree.tokens.gather(1, accepted.path).roll(-1, dims=1)
    steps = torch.arange(depth + 1, device=logits.device)
    following = torch.where(steps >= accepted.lengths[:, None] - 1, accepted.bonus[:, None], following)
    return accepted, torch.zeros_like(tree.tokens).scatter_(1, accepted.path, following)


def rejection_walk(
    tree: DraftTree, log_p: Callable[[torch.Tensor], torch.Tensor], uniforms: torch.Tensor, noise: torch.Tensor
) -> Accepted:
    """Go from the root to a child as long as one is accepted; what is committed follows the target's distribution.

    log_p(nodes (B,)) -> (B, V): the target's log-probabilities after a node a row, `adjust(...).log_softmax(-1)`;
    uniforms (B, D, W) and noise (B, D + 1, V), standard Gumbel, where index d belongs to the position behind a node of
    depth d.

    At a node the children are tried in order. Child x, proposed by q, is accepted with probability min(1, p(x) / q(x));
    after a rejection p becomes norm(max(p - q, 0)) and q loses x and is renormalised. If none is accepted the bonus
    token is drawn from the last p; behind a node of depth D, from the target's own.

    A child that q gives no probability was not drawn from it: q has no more tokens, or `draws.q` is None. It counts as
    proposed by a point mass: accepted with probability p(x), and p loses x. That is lossless for any child that was
    chosen without looking at uniforms and noise, and accepts as often as `infer.engine.verify.walk`, which is the
    better choice for undrawn trees (the same text as plain decoding). A one-hot p (greedy) is followed exactly
    whatever the children are: nothing else is ever accepted or left in the residual.
    """
    draws = tree.draws
    rows = torch.arange(len(tree.tokens), device=tree.tokens.device)
    node = torch.zeros_like(tree.tokens[:, 0])  # (B,) the last accepted one
    going = torch.ones_like(node, dtype=torch.bool)  # (B,) rows whose walk has not ended
    p = _probabilities(log_p(node))  # (B, V) what the token behind `node` is still to be drawn from
    path = [node]
    for depth in range(tree.max_depth):
        q = torch.zeros_like(p) if draws.q is None else _probabilities(draws.q[rows, draws.row[node]])
        first, undecided = node * draws.width + 1, going
        for i in range(draws.width):
            token = tree.tokens.gather(1, first[:, None] + i)  # (B, 1)
            drawn = q.gather(1, token) > 0
            point = torch.zeros_like(q).scatter_(1, token, 1.0)
            proposal = torch.where(drawn, q / q.sum(1, keepdim=True), point)  # (B, V)
            enough = uniforms[:, depth, i, None] * proposal.gather(1, token) < p.gather(1, token)
            accepted = undecided & enough[:, 0]
            node = torch.where(accepted, first + i, node)
            undecided = undecided & ~accepted
            p = torch.where(undecided[:, None], _residual(p, proposal), p)
            q = q.scatter(1, token, 0.0)
        going = going & ~undecided
        p = torch.where(going[:, None], _probabilities(log_p(node)), p)
        path.append(node)
    depths = tree.depths[rows, node]
    bonus = (p.log() + noise[rows, depths]).argmax(-1)
    return Accepted(torch.stack(path, 1), depths + 1, bonus)


def _probabilities(log_probs: torch.Tensor) -> torch.Tensor:
    """Return probabilities in float64: small differences of p and q matter."""
    return log_probs.double().softmax(-1)


def _residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return norm(max(p - q, 0)), (B, V). Where that is 0, p equals q but for rounding, and so the rejection is
    rounding too: then p itself, so that a one-hot p stays one."""
    left = (p - q).clamp(min=0)
    total = left.sum(1, keepdim=True)
    return torch.where(total > 0, left / total, p)
