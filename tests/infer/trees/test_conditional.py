"""Trees of drafters whose tokens depend on each other: the best prefixes by exhaustive enumeration,
in their order."""

import math
from itertools import product

import pytest
import torch

from infer.kernels.cpu_search import best_first_search
from infer.kernels.reference_search import search_by_depth
from infer.ngrams.model import NGram
from infer.trees.chain import chain
from infer.trees.fixed import static
from infer.trees.guided import guided_ddtree
from infer.trees.methods import TREES
from infer.trees.tree import Nodes, Proposal


class RandomSteps:
    """Random conditional distributions over candidates (B, L, M), whose probabilities are multiples
    of `grain` in log space, so that ties are many; `forbidden`: some of them are impossible.
    Recurrent: they depend on the whole prefix, of which the memory is the number, else on its last
        candidate."""

    def __init__(self, shape, seed, recurrent=False, grain=0.0, forbidden=False) -> None:
        rows, length, count = shape
        self.recurrent = recurrent
        self.shape = shape
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.stack(
            [torch.randperm(97, generator=generator)[:count] for _ in range(rows * length)]
        )
        self.tokens = self.tokens.view(shape)
        contexts = [count**slot if recurrent else count ** min(slot, 1) for slot in range(length)]
        self.log_q = []  # by slot: (B, contexts, M)
        for many in contexts:
            scores = (2 * torch.randn(rows, many, count + 1, generator=generator)).log_softmax(-1)[
                ..., :count
            ]
            if grain:
                scores = (scores / grain).round().clamp(max=0) * grain
            if forbidden:
                scores = scores.masked_fill(
                    torch.rand(scores.shape, generator=generator) < 0.4, -torch.inf
                )
            self.log_q.append(scores)

    @property
    def table(self):
        first = self.log_q[0][:, 0]
        rest = self.log_q[1:]
        rows, _, count = self.shape
        return first, torch.stack(rest, 1) if rest else first.new_zeros(rows, 0, count, count)

    def begin(self):
        return self.log_q[0], torch.zeros(
            len(self.tokens), 1, 1, dtype=torch.long
        ) if self.recurrent else None

    def extend(self, slot, which, memory):
        context = which
        if self.recurrent:
            context = memory[..., 0] * self.shape[2] + which
            memory = context[..., None]
        rows = context[..., None].expand(-1, -1, self.shape[2])
        return self.log_q[slot].gather(1, rows), memory

    def step(self, row, prefix):
        """log q of a prefix's last candidate behind the others."""
        context = 0
        for which in prefix[:-1] if self.recurrent else prefix[-2:-1]:
            context = context * self.shape[2] + which
        return self.log_q[len(prefix) - 1][row, context, prefix[-1]]

    def ranked(self, row) -> list[tuple[tuple[int, ...], float]]:
        """Every prefix of candidates with its score, in the order that `infer.trees.ddtree`
        promises: by score, of equal ones the shallower first, then the one whose parent goes first,
            then the first candidate."""
        _, length, count = self.shape
        scores = {(): torch.zeros(())}
        place = {(): 0}
        everything = []
        for depth in range(1, length + 1):
            level = list(product(range(count), repeat=depth))
            scores |= {p: scores[p[:-1]] + self.step(row, p) for p in level}
            level.sort(key=lambda p: (-float(scores[p]), place[p[:-1]], p[-1]))
            place |= {p: at for at, p in enumerate(level)}
            everything += level
        everything.sort(key=lambda p: (-float(scores[p]), len(p), place[p]))
        return [(p, float(scores[p])) for p in everything]


def prefixes(nodes: Nodes, steps: RandomSteps, row: int) -> list[tuple[int, ...]]:
    """The nodes as tuples of candidates."""
    found = [()]
    for token, parent, depth in zip(*(part[row].tolist() for part in nodes[:3]), strict=True):
        path = found[parent]
        assert depth == len(path) + 1
        found.append((*path, steps.tokens[row, depth - 1].tolist().index(token)))
    return found[1:]


CASES = [
    (shape, recurrent, kind)
    for shape in [(2, 1, 6), (3, 2, 5), (2, 3, 4), (1, 5, 3), (2, 4, 1)]
    for recurrent in (0, 1)
    for kind in range(4)
]


@pytest.mark.parametrize("shape, recurrent, kind", CASES)
def test_the_tree_is_the_exhaustive_top_b_in_order(shape, recurrent, kind):
    """Random ones, ties, and impossible tokens; both searches, every budget."""
    steps = RandomSteps(
        shape,
        7 * kind + shape[1],
        bool(recurrent),
        grain=(0, 0.5, 0, 1.0)[kind],
        forbidden=kind > 1,
    )
    ranked = [steps.ranked(row) for row in range(shape[0])]
    for budget in (1, 2, 3, 8, 21, 1000):
        searches = [search_by_depth] + [best_first_search] * (not recurrent)
        for search in searches:
            nodes = search(steps, budget)
            for row in range(shape[0]):
                expected = ranked[row][:budget]
                assert prefixes(nodes, steps, row) == [prefix for prefix, _ in expected], search
                assert nodes.log_probs[row].tolist() == [score for _, score in expected]


@pytest.mark.parametrize("length, count, budget", [(7, 32, 64), (15, 16, 33), (3, 64, 256)])
def test_both_searches_find_the_same_nodes_at_real_sizes(length, count, budget):
    for grain in (0.0, 0.25):
        steps = RandomSteps((3, length, count), length, grain=grain, forbidden=grain > 0)
        for one, other in zip(
            best_first_search(steps, budget), search_by_depth(steps, budget), strict=True
        ):
            assert torch.equal(one, other)


METHODS = sorted(
    (method for method in TREES.values() if method.drafts), key=lambda method: method.name
)


@pytest.mark.parametrize("left", ["one", "none", "nan"])
@pytest.mark.parametrize("recurrent", [None, False, True])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_degenerate_distributions_make_whole_trees(ngrams, method, recurrent, left):
    """Filters leave one token of each position, or none of those drafted; a drafter answers with
    NaN. There is little to rank by, and every node still has a prefix of its own behind a node
    before it. With a head, recurrent or not, or without one."""
    steps = None if recurrent is None else RandomSteps((2, 4, 6), 1, recurrent)
    alone = torch.randn(2, 4, 97, generator=torch.Generator().manual_seed(4)).log_softmax(-1)
    for log_q in (alone, *(steps.log_q if steps else ())):
        log_q[1] = {"one": -torch.inf, "none": -torch.inf, "nan": torch.nan}[left]
        if left == "one":
            log_q[1, ..., 3] = 0.0
    if method.name == "chain" and steps:
        steps.chain = lambda length: (
            steps.tokens[..., 0][:, :length],
            steps.log_q[0][:, 0, :length],
        )
    contexts = [[5, 60, 2], [2, 2, 2, 2, 2, 2]]
    tree = method.load()(
        Proposal(
            torch.tensor([2, 2]), alone, 300, NGram.open(ngrams), contexts, width=2, steps=steps
        )
    )
    assert tree.budget > 3
    for row in range(2):
        paths = {0: ()}
        for node in range(1, tree.budget + 1):
            parent = int(tree.parents[row, node])
            paths[node] = (*paths[parent], int(tree.tokens[row, node]))
            assert tree.depths[row, node] == len(paths[node])
        assert len(set(paths.values())) == len(paths)
    bounds = tree.log_probs[:, 1:] <= tree.log_probs.gather(1, tree.parents)[:, 1:]
    assert bounds.all() or left == "nan" or not method.ranked


@pytest.mark.parametrize("width, budget, nodes", [(2, 14, 14), (3, 14, 12), (9, 3, 3), (5, 3, 3)])
@pytest.mark.parametrize("recurrent", [False, True])
def test_a_static_tree_has_the_likeliest_children_of_every_node(width, budget, nodes, recurrent):
    """The deepest full tree of that width within the budget; where not even the root's children
    fit, fewer of them."""
    steps = RandomSteps((2, 4, 6), 3, recurrent)
    tree = static(Proposal(torch.tensor([1, 2]), None, budget, width=width, steps=steps))
    found = Nodes(
        tree.tokens[:, 1:], tree.parents[:, 1:], tree.depths[:, 1:], tree.log_probs[:, 1:]
    )
    assert tree.budget == nodes
    for row in range(2):
        scores = dict(steps.ranked(row))
        paths = prefixes(found, steps, row)
        assert found.log_probs[row].tolist() == [scores[path] for path in paths]
        for parent in {path[:-1] for path in paths}:
            children = [path for path in paths if path[:-1] == parent]
            others = sorted(
                (path for path in scores if path[:-1] == parent), key=scores.get, reverse=True
            )
            assert children == others[: min(width, budget)]


def test_a_chain_follows_the_head():
    class Greedy:
        length = 3

        def chain(self, length):
            return torch.tensor([[4, 7, 9]])[:, :length], torch.tensor([[-0.5, -0.25, -1.0]])[
                :, :length
            ]

    tree = chain(Proposal(torch.tensor([3]), torch.zeros(1, 3, 10), 2, steps=Greedy()))
    assert tree.tokens.tolist() == [[3, 4, 7]] and tree.log_probs.tolist() == [[0, -0.5, -0.75]]


@pytest.mark.parametrize("shape, budget", [((2, 1, 9), 17), ((3, 3, 4), 17), ((1, 3, 4), 1)])
def test_with_an_ngram_model_the_products_are_searched(
    ngrams, recalled, widened, probabilities, shape, budget
):
    """A candidate's conditional probability times its n-gram probability behind the whole path, the
    candidates together as likely as they are under the head: the best of all prefixes. To a head's
    table n-grams add candidates, which have their marginals, as has what comes behind them."""
    model = NGram.open(ngrams)
    steps = RandomSteps(shape, 3)
    alone = torch.randn(*shape[:2], 97, generator=torch.Generator().manual_seed(4)).log_softmax(-1)
    contexts = [[5, 60, 2], [1], [90, 3]][: shape[0]]
    weight = 0.7
    contexts[0] = (
        steps.tokens[0].flatten().tolist() * 3 + contexts[0]
    )  # what may come has come before
    contexts[0][-1] = int(steps.tokens[0, 0, 0])
    bonus = torch.tensor([context[-1] for context in contexts])
    tree = guided_ddtree(Proposal(bonus, alone, budget, model, contexts, weight, steps=steps))
    for row, context in enumerate(contexts):
        listed = steps.tokens[row].tolist()
        score = {(): 0.0}

        def log_q(prefix, token, row=row, listed=listed):
            path = zip((*prefix, token), listed, strict=False)
            places = [
                candidates.index(one) if one in candidates else None for one, candidates in path
            ]
            if None not in places[-2:]:
                return float(steps.step(row, places))
            return float(alone[row, len(prefix), token])

        for depth in range(shape[1]):
            for prefix in [prefix for prefix in score if len(prefix) == depth]:
                path = context + list(prefix)
                tokens = listed[depth] + widened(context, path, listed[depth], model)
                drafted = [log_q(prefix, token) for token in tokens]
                seen = recalled(context, path, tokens, probabilities(model, path, tokens))
                product_of = [
                    math.exp(q) * (n + 1e-5) ** weight for q, n in zip(drafted, seen, strict=True)
                ]
                scale = min(1.0, sum(map(math.exp, drafted))) / sum(product_of)
                steps_down = zip(tokens, product_of, strict=True)
                score |= {
                    (*prefix, one): score[prefix] + min(0.0, math.log(scale * x))
                    for one, x in steps_down
                }
        best = sorted((p for p in score if p), key=score.get, reverse=True)[: tree.budget]
        found = {0: ()}
        for node, (token, parent) in enumerate(
            zip(tree.tokens[row].tolist(), tree.parents[row].tolist(), strict=True)
        ):
            found[node] = (*found[parent], token) if node else ()
        assert set(found.values()) - {()} == set(best)
        expected = torch.tensor([score[prefix] for prefix in found.values()])
        assert torch.allclose(tree.log_probs[row].float(), expected, atol=1e-5)
