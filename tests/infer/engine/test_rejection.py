"""Recursive rejection on toy distributions written out as tables: lossless by chi-square, and where others are not.

All statistics have fixed seeds. A chi-square test fails below PROBABILITY, the rate of false alarms over seeds.
"""

import random
from itertools import permutations, product

import pytest
import torch

from infer.engine.rejection import acceptance_uniforms, draft_noise, rejection_walk
from infer.engine.sampling import gumbel_noise
from infer.engine.verify import walk
from infer.trees.fixed import by_position, full_tree, static_depth
from infer.trees.tree import DraftTree

VOCABULARY, DEPTH, DRAWS = 6, 2, 40_000
PROBABILITY = 1e-4


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """The probability of counts at least as far off. Impossible cells must be empty; those below five are one."""
    expected = probabilities.double() * counts.sum() / probabilities.sum()
    assert (counts[expected == 0] == 0).all()
    rare = expected < 5
    counts = torch.cat([counts[~rare].double(), counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    used = expected > 0
    statistic = ((counts - expected)[used] ** 2 / expected[used]).sum()
    return torch.special.gammaincc((used.sum() - 1) / 2.0, statistic / 2).item()


def tables(seed: int, temperature: float = 1.0, longest: int = DEPTH + 1) -> list[torch.Tensor]:
    """Random log-probabilities of the next token after every path of 0, 1, .. tokens: (V,), (V, V), (V, V, V)."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(VOCABULARY,) * (n + 1) for n in range(longest)]
    return [(torch.randn(shape, generator=generator) / temperature).log_softmax(-1) for shape in shapes]


def without(logs: list[torch.Tensor], share: float, seed: int) -> list[torch.Tensor]:
    """The same with about that share of the probabilities zero."""
    generator = torch.Generator().manual_seed(seed)
    gone = [torch.rand(table.shape, generator=generator) < share for table in logs]
    for mask in gone:
        mask[..., 0] &= ~mask.all(-1)
    return [table.masked_fill(mask, -torch.inf).log_softmax(-1) for table, mask in zip(logs, gone, strict=True)]


def conditional_of(q: list[torch.Tensor], rows: int, positional: bool):
    """The tables as drafter: by position (after token 0s), or depending on the node's own token."""
    marginals = torch.stack([q[0], q[1][0]])
    if positional:
        return by_position(marginals.expand(rows, -1, -1))
    return lambda depth, tokens: q[1][tokens] if depth else q[0].expand(rows, 1, -1)


def draft_of(q, width: int, rows: int, positional: bool, drawn: bool, first_seed: int = 0) -> DraftTree:
    seeds, positions = torch.arange(rows) + first_seed, torch.arange(1, DEPTH + 1).expand(rows, -1)
    noise = draft_noise(seeds, positions, VOCABULARY) if drawn else None
    root = torch.zeros(rows, dtype=torch.long)
    return full_tree(root, conditional_of(q, rows, positional), width, DEPTH, noise)


def target_at_nodes(tree: DraftTree, p: list[torch.Tensor]) -> torch.Tensor:
    """log p after every node, (B, M, V): it depends on the whole path."""
    parents = tree.tokens.gather(1, tree.parents)
    after = [p[0].expand(*tree.tokens.shape, -1), p[1][tree.tokens], p[2][parents, tree.tokens]]
    return torch.stack(after).gather(0, tree.depths[None, ..., None].expand(1, -1, -1, VOCABULARY))[0]


def behind(log_p: torch.Tensor):
    """Log-probabilities (B, M, V) as `rejection_walk` asks for them."""
    return lambda nodes: log_p[torch.arange(len(log_p)), nodes]


def walked(draft: DraftTree, log_p: torch.Tensor, first_seed: int = 0):
    rows = len(log_p)
    seeds, positions = torch.arange(rows) + first_seed, torch.arange(1, DEPTH + 2).expand(rows, -1)
    uniforms = acceptance_uniforms(seeds, positions[:, :DEPTH], draft.draws.width)
    return rejection_walk(draft, behind(log_p), uniforms, gumbel_noise(seeds, positions, VOCABULARY))


def committed(draft: DraftTree, accepted) -> torch.Tensor:
    """The tokens behind the root, the bonus token included, -1 behind them: (B, D + 1)."""
    drafted = draft.tokens.gather(1, accepted.path)[:, 1:]
    text = torch.cat([drafted, drafted[:, :1]], 1)
    text.scatter_(1, accepted.lengths[:, None] - 1, accepted.bonus[:, None])
    return text.masked_fill(torch.arange(DEPTH + 1) >= accepted.lengths[:, None], -1)


def judged(texts: torch.Tensor, p: list[torch.Tensor]) -> list[float]:
    """Chi-square probabilities of the first token, the first two and the first three of texts (B, 3). Where a text is
    shorter (-1), plain decoding goes on: the rest is drawn from p itself."""
    generator = torch.Generator().manual_seed(1)

    def going_on(column: int, log_p: torch.Tensor) -> torch.Tensor:
        drawn = log_p.exp().multinomial(1, generator=generator)[:, 0]
        return torch.where(texts[:, column] < 0, drawn, texts[:, column])

    first = texts[:, 0]
    second = going_on(1, p[1][first])
    third = going_on(2, p[2][first, second])
    cells = (first * VOCABULARY + second) * VOCABULARY + third
    joint = torch.bincount(cells, minlength=VOCABULARY**3).view((VOCABULARY,) * 3)
    one = p[0].exp()
    two = one[:, None] * p[1].exp()
    three = two[..., None] * p[2].exp()
    return [chi_square(joint.sum((1, 2)), one), chi_square(joint.sum(2), two), chi_square(joint, three)]


PAIRS = {
    "near": (tables(1), [(0.7 * a + 0.3 * b).log_softmax(-1) for a, b in zip(tables(1), tables(2), strict=True)]),
    "far": (tables(3, 0.4), tables(4, 0.4)),
    "very sharp draft": (tables(3), tables(4, 0.05)),
    "equal": (tables(5), tables(5)),
    "draft with zeros": (tables(6), without(tables(7), 0.5, 8)),
    "draft of one token": (tables(6), without(tables(7), 1.0, 8)),
    "target with zeros": (without(tables(9), 0.4, 13), tables(11)),
    "both with zeros": (without(tables(9), 0.4, 13), without(tables(11), 0.4, 14)),
}


# every pair with children of every kind, by turns in both widths; the others under the robustness marker
CASES = [
    pytest.param(*case, id="-".join(map(str, case)), marks=[] if (i + i // 2 + i // 4) % 2 else pytest.mark.robustness)
    for i, case in enumerate(product(PAIRS, ["by position", "by path"], ["drawn", "likeliest"], [2, 3]))
]


@pytest.mark.parametrize(("pair", "kind", "children", "width"), CASES)
def test_committed_tokens_follow_the_target(pair, kind, children, width):
    p, q = PAIRS[pair]
    draft = draft_of(q, width, DRAWS, positional=kind == "by position", drawn=children == "drawn")
    accepted = walked(draft, target_at_nodes(draft, p))
    assert min(judged(committed(draft, accepted), p)) > PROBABILITY
    assert set(accepted.lengths.tolist()) <= {1, 2, 3}


def test_rounds_on_end_follow_the_target():
    """Noise is keyed by absolute position: a round that ends early leaves noise behind that the next one uses again.
    Four tokens of a Markov chain over four, all 256 texts by chi-square."""
    generator = torch.Generator().manual_seed(3)
    p, q = torch.randn(2, 4, 4, generator=generator).log_softmax(-1)
    seeds = torch.arange(DRAWS)
    bonus, at = torch.zeros(2, DRAWS, dtype=torch.long)  # of the newest token, the first being the prompt's last
    text = torch.zeros(DRAWS, 16, dtype=torch.long)
    while at.min() < 4:
        positions = at[:, None] + torch.arange(1, DEPTH + 2)
        noise = draft_noise(seeds, positions[:, :DEPTH], 4)
        draft = full_tree(bonus, lambda depth, tokens: q[tokens], 2, DEPTH, noise)
        uniforms = acceptance_uniforms(seeds, positions[:, :DEPTH], 2)
        accepted = rejection_walk(draft, behind(p[draft.tokens]), uniforms, gumbel_noise(seeds, positions, 4))
        tokens = torch.cat([draft.tokens.gather(1, accepted.path), accepted.bonus[:, None]], 1)
        text.scatter_(1, at[:, None] + torch.arange(DEPTH + 1), tokens[:, :-1])
        at, bonus = at + accepted.lengths, accepted.bonus
        text.scatter_(1, at[:, None], bonus[:, None])
    counts = torch.bincount(text[:, 1:5] @ torch.tensor([64, 16, 4, 1]), minlength=256)
    p = p.exp()
    chances = torch.einsum("a,ab,bc,cd->abcd", p[0], p, p, p).flatten()
    assert chi_square(counts, chances) > PROBABILITY


def test_a_perfect_draft_is_always_accepted():
    """A drafter that is the target, one token after a token: first children all the way."""
    p = tables(5)
    draft = draft_of(p, 2, DRAWS, positional=False, drawn=True)
    accepted = walked(draft, target_at_nodes(draft, p))
    assert (accepted.path == torch.tensor([0, 1, 3])).all() and (accepted.lengths == 3).all()


def article_text(draft: DraftTree, row: int, p, q, generator: random.Random) -> list[int]:
    """The rule of "Tree-Based Speculative Decoding": every node on its own, the longest accepted path, first in
    depth-first order; then a token of the target's, or of the residual if no child of the root is accepted; then -1."""
    tokens, width, count = draft.tokens[row].tolist(), draft.draws.width, draft.budget
    best = []

    def search(node: int, text: list[int]) -> None:
        nonlocal best
        for child in range(node * width + 1, node * width + width + 1):
            if child > count:
                return
            token = tokens[child]
            if generator.random() < min(1.0, p[tuple(text)][token] / q[tuple(text)][token]):
                if len(text) + 1 > len(best):
                    best = [*text, token]
                search(child, [*text, token])

    search(0, [])
    weights = p[tuple(best)]
    if not best:
        weights = [max(a - b, 0.0) for a, b in zip(weights, q[()], strict=True)]
    return [*best, *generator.choices(range(VOCABULARY), weights), -1, -1][: DEPTH + 1]


@pytest.mark.parametrize("drawn", [False, True], ids=["likeliest", "drawn"])
def test_the_articles_rule_is_biased(drawn):
    """With the likeliest tokens as children, as written there, and with drawn ones: far below any false alarm. Ours
    passes with as many draws of the same tree."""
    p_tables, q_tables = PAIRS["near"]
    paths = [path for n in range(3) for path in product(range(VOCABULARY), repeat=n)]
    p, q = ({path: logs[len(path)][path].exp().tolist() for path in paths} for logs in (p_tables, q_tables))
    draft = draft_of(q_tables, 2, DRAWS, positional=False, drawn=drawn)
    generator = random.Random(0)
    theirs = torch.tensor([article_text(draft, row, p, q, generator) for row in range(DRAWS)])
    assert max(judged(theirs, p_tables)) < 1e-30
    ours = committed(draft, walked(draft, target_at_nodes(draft, p_tables)))
    assert min(judged(ours, p_tables)) > PROBABILITY


@pytest.mark.parametrize("drawn", [True, False])
def test_a_greedy_target_is_followed_exactly(drawn):
    """p one-hot: the path is the argmax path, as the ordinary walk finds it, whatever noise and uniforms say."""
    for seed in range(4):
        p = [torch.where(table == table.amax(-1, keepdim=True), 0.0, -torch.inf) for table in tables(seed)]
        q = [tables(20), tables(21, 0.05), without(tables(22), 0.6, 23), p][seed]
        draft = draft_of(q, 2, 500, positional=False, drawn=drawn)
        log_p = target_at_nodes(draft, p)
        accepted, expected = walked(draft, log_p), walk(draft, log_p.argmax(-1))
        for name in ("path", "lengths", "bonus"):
            assert torch.equal(getattr(accepted, name), getattr(expected, name))


def slow_walk(tree: DraftTree, row: int, log_p, uniforms, noise) -> tuple[list[int], int]:
    """One row in plain Python."""
    draws, path = tree.draws, [0]
    while True:
        node, depth = path[-1], len(path) - 1
        p = log_p[row, node].double().exp().tolist()
        children = [k for k in range(1, tree.budget + 1) if tree.parents[row, k] == node]
        q = [0.0] * len(p)
        if draws.q is not None and children:
            q = draws.q[row, draws.row[node]].double().exp().tolist()
        for i, child in enumerate(children):
            x = int(tree.tokens[row, child])
            point = [float(token == x) for token in range(len(p))]
            proposal = [value / sum(q) for value in q] if q[x] > 0 else point
            if uniforms[row, depth, i] < p[x] / proposal[x]:
                path.append(child)
                break
            residual = [max(a - b, 0.0) for a, b in zip(p, proposal, strict=True)]
            p = [value / sum(residual) for value in residual]
            q[x] = 0.0
        if path[-1] == node:
            scores = [torch.tensor(value).log() + g for value, g in zip(p, noise[row, depth], strict=True)]
            return path, int(torch.stack(scores).argmax())


@pytest.mark.parametrize("pair", ["near", "far", "both with zeros"])
@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize("positional", [True, False])
def test_walk_equals_a_plain_walk(pair, drawn, positional):
    p, q = PAIRS[pair]
    rows = 60
    draft = draft_of(q, 3, rows, positional, drawn)
    log_p = target_at_nodes(draft, p)
    generator = torch.Generator().manual_seed(0)
    uniforms = torch.rand(rows, DEPTH, 3, generator=generator, dtype=torch.double)
    noise = gumbel_noise(torch.arange(rows), torch.arange(DEPTH + 1).expand(rows, -1), VOCABULARY)
    accepted = rejection_walk(draft, behind(log_p), uniforms, noise)
    for row in range(rows):
        path, bonus = slow_walk(draft, row, log_p, uniforms, noise)
        assert accepted.lengths[row] == len(path)
        assert accepted.path[row].tolist() == path + path[-1:] * (DEPTH + 1 - len(path))
        assert accepted.bonus[row] == bonus


def test_a_row_does_not_depend_on_its_batch():
    p, q = PAIRS["near"]
    together = draft_of(q, 3, 40, positional=False, drawn=True)
    accepted = walked(together, target_at_nodes(together, p))
    for row in range(40):
        alone = draft_of(q, 3, 1, positional=False, drawn=True, first_seed=row)
        assert torch.equal(alone.tokens[0], together.tokens[row])
        single = walked(alone, target_at_nodes(alone, p), first_seed=row)
        for name in ("path", "lengths", "bonus"):
            assert torch.equal(getattr(single, name)[0], getattr(accepted, name)[row])


def test_a_draft_without_more_tokens_goes_on_with_point_masses():
    """Width 3 of a draft that knows one token: nothing is proposed twice, and nothing rejected comes back."""
    p, q = PAIRS["draft of one token"]
    draft = draft_of(q, 3, 50, positional=False, drawn=True)
    children = draft.tokens[:, 1:].unflatten(1, (-1, 3)).sort(-1).values
    assert (children.diff(dim=-1) > 0).all()
    log_p = target_at_nodes(draft, p)
    never = torch.full((50, DEPTH, 3), 1 - 2.0**-53, dtype=torch.double)
    noise = gumbel_noise(torch.arange(50), torch.arange(DEPTH + 1).expand(50, -1), VOCABULARY)
    accepted = rejection_walk(draft, behind(log_p), never, noise)
    assert (accepted.lengths == 1).all()
    assert (accepted.bonus[:, None] != draft.tokens[:, 1:4]).all()


@pytest.mark.parametrize("width", [1, 2])
def test_a_residual_that_rounds_to_nothing(width):
    """The unlikely child comes first, and without it q is one to the last bit at the token that the target wants."""
    q = torch.tensor([0.0, -60.0, -80.0])
    noise = torch.tensor([0.0, 100.0, 0.0]).expand(1, 1, -1)
    draft = full_tree(torch.tensor([2]), by_position(q.expand(1, 1, -1)), width, 1, noise)
    assert draft.tokens.tolist() == [[2, 1, 0][: width + 1]]
    log_p = torch.tensor([0.0, -torch.inf, -torch.inf]).expand(1, width + 1, -1)
    accepted = rejection_walk(draft, behind(log_p), torch.full((1, 1, width), 0.5), torch.zeros(1, 2, 3))
    assert accepted.lengths.tolist() == [width] and accepted.bonus.tolist() == [0]
    assert accepted.path.tolist() == [[0, 0], [0, 2]][width - 1 : width]


@pytest.mark.parametrize("width, depth", [(1, 4), (2, 3), (3, 2), (4, 1)])
@pytest.mark.parametrize("drawn", [True, False])
def test_the_tree_is_full_and_breadth_first(width, depth, drawn):
    logits = torch.randn(3, depth, 9, generator=torch.Generator().manual_seed(0))
    marginals = logits.log_softmax(-1)
    seeds, positions = torch.arange(3), torch.arange(depth).expand(3, -1)
    noise = draft_noise(seeds, positions, 9) if drawn else None
    tree = full_tree(torch.tensor([4, 5, 6]), by_position(marginals), width, depth, noise)
    assert tree.max_depth == depth and tree.budget == sum(width**level for level in range(1, depth + 1))
    assert tree.tokens[:, 0].tolist() == [4, 5, 6]
    assert tree.draws.row.tolist() == [level for level in range(depth) for _ in range(width**level)]
    assert (tree.draws.q is None) != drawn
    assert tree.draws.q is None or torch.equal(tree.draws.q, marginals)
    scores = marginals if noise is None else marginals + noise
    expected = scores.topk(width).indices
    for row in range(3):
        for node in range(1, tree.budget + 1):
            parent, rank = (node - 1) // width, (node - 1) % width
            level, token = int(tree.depths[row, node]), tree.tokens[row, node]
            assert tree.parents[row, node] == parent < node
            assert level == tree.depths[row, parent] + 1
            assert token == expected[row, level - 1, rank]
            score = tree.log_probs[row, parent] + marginals[row, level - 1, token]
            assert tree.log_probs[row, node] == pytest.approx(float(score), abs=1e-6)
    assert tree.log_probs.shape == tree.tokens.shape and tree.log_probs.dtype == torch.float32


def test_a_path_conditioned_tree_keeps_a_row_for_every_inner_node():
    q = tables(2)
    draft = draft_of(q, 3, 5, positional=False, drawn=True)
    assert draft.draws.q.shape == (5, 4, VOCABULARY) and draft.draws.row.tolist() == [0, 1, 2, 3]
    assert torch.equal(draft.draws.q[:, 0], q[0].expand(5, -1))
    assert torch.equal(draft.draws.q[:, 1:], q[1][draft.tokens[:, 1:4]])


@pytest.mark.parametrize(
    "width, budget, longest, depth", [(2, 14, 9, 3), (2, 13, 9, 2), (2, 100, 4, 4), (1, 5, 9, 5), (3, 3, 9, 1)]
)
def test_static_depth(width, budget, longest, depth):
    assert static_depth(width, budget, longest) == depth


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="width=4 does not fit into budget=3"):
        static_depth(4, 3, 5)
    with pytest.raises(ValueError, match="width=0"):
        static_depth(0, 3, 5)
    with pytest.raises(ValueError, match="width=7 is more than the 6 tokens"):
        draft_of(tables(0), 7, 1, positional=True, drawn=False)


def test_drawn_children_are_an_ordered_sample_without_replacement():
    """All ordered triples of five tokens, at both depths: probability q(a) q(b) / (1 - q(a)) and so on."""
    q = tables(30)
    draft = draft_of(q, 3, DRAWS, positional=True, drawn=True)
    for children, log_q in ((draft.tokens[:, 1:4], q[0]), (draft.tokens[:, 4:7], q[1][0])):
        triples = list(permutations(range(VOCABULARY), 3))
        probabilities = []
        for triple in triples:
            chance, left = 1.0, 1.0
            for token in triple:
                share = float(log_q[token].exp())
                chance, left = chance * share / left, left - share
            probabilities.append(chance)
        codes = children @ torch.tensor([36, 6, 1])
        counts = torch.bincount(codes, minlength=216)[[36 * a + 6 * b + c for a, b, c in triples]]
        assert counts.sum() == DRAWS
        assert chi_square(counts, torch.tensor(probabilities)) > PROBABILITY


def test_the_three_streams_are_uniform_and_independent():
    """300,000 values each. Correlations within 5 standard errors (false alarm 6e-7 each), also with the neighbours in
    seed and position; a chi-square over 100 cells each, and one over 10 x 10 cells for every pair."""
    seeds, positions = torch.arange(-50, 50), torch.arange(7, 307).expand(100, -1)
    drafts, target = draft_noise(seeds, positions, 10), gumbel_noise(seeds, positions, 10)
    uniforms = acceptance_uniforms(seeds, positions, 10)
    assert uniforms.dtype == torch.float64 and uniforms.min() > 0 and uniforms.max() < 1
    streams = [uniforms] + [(-(-noise.double()).exp()).exp() for noise in (drafts, target)]
    for stream in streams:
        cells = torch.bincount((stream * 100).long().flatten(), minlength=100)
        assert chi_square(cells, torch.ones(100)) > PROBABILITY
    for a, b in ((0, 1), (0, 2), (1, 2)):
        one, other = streams[a], streams[b]
        cells = torch.bincount(((one * 10).long() * 10 + (other * 10).long()).flatten(), minlength=100)
        assert chi_square(cells, torch.ones(100)) > PROBABILITY
        shifted = [(one, other), (one[1:], other[:-1]), (one[:-1], other[1:])]
        shifted += [(one[:, 1:], other[:, :-1]), (one[:, :-1], other[:, 1:]), (one[..., 1:], other[..., :-1])]
        for x, y in shifted:
            assert abs((12 * (x - 0.5) * (y - 0.5)).mean().item()) < 5 / x.numel() ** 0.5
