"""Trees of drafters with a conditional head: the best prefixes by exhaustive enumeration."""

import math
from itertools import product

import pytest
import torch

from infer.kernels.cpu_search import best_first_search
from infer.kernels.reference_search import search_tree_by_depth
from infer.ngrams.model import NGramModel
from infer.trees.chain import build_chain
from infer.trees.guided import build_guided_ddtree
from infer.trees.methods import TREE_METHODS
from infer.trees.static import build_static_tree
from infer.trees.tree import DraftNodes, Proposal


class RandomConditionals:
    """Random conditional distributions over candidates (B, L, M).

    With `grain`, log-probabilities are multiples of it, so that there are many ties. With
    `forbidden`, some candidates are impossible. If recurrent, distributions depend on the whole
    prefix, whose number is the state; otherwise on its last candidate.
    """

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
        for num_contexts in contexts:
            logits = 2 * torch.randn(rows, num_contexts, count + 1, generator=generator)
            scores = logits.log_softmax(-1)[..., :count]
            if grain:
                scores = (scores / grain).round().clamp(max=0) * grain
            if forbidden:
                is_forbidden = torch.rand(scores.shape, generator=generator) < 0.4
                scores = scores.masked_fill(is_forbidden, -torch.inf)
            self.log_q.append(scores)

    @property
    def candidate_log_probs(self):
        first = self.log_q[0][:, 0]
        others = self.log_q[1:]
        rows, _, count = self.shape
        if not others:
            return first, first.new_zeros(rows, 0, count, count)
        return first, torch.stack(others, 1)

    def compute_first_log_probs(self):
        if not self.recurrent:
            return self.log_q[0], None
        return self.log_q[0], torch.zeros(len(self.tokens), 1, 1, dtype=torch.long)

    def compute_next_log_probs(self, slot, candidates, state):
        context = candidates
        if self.recurrent:
            context = state[..., 0] * self.shape[2] + candidates
            state = context[..., None]
        rows = context[..., None].expand(-1, -1, self.shape[2])
        return self.log_q[slot].gather(1, rows), state

    def last_log_q(self, row, prefix):
        """Return log q of a prefix's last candidate after the others."""
        context = 0
        for candidate in prefix[:-1] if self.recurrent else prefix[-2:-1]:
            context = context * self.shape[2] + candidate
        return self.log_q[len(prefix) - 1][row, context, prefix[-1]]

    def rank_prefixes(self, row) -> list[tuple[tuple[int, ...], float]]:
        """Return every prefix of candidates with its score, in the order of the searches: by score,
        then by depth, then by the order of the parents, then by candidate."""
        _, length, count = self.shape
        scores = {(): torch.zeros(())}
        rank = {(): 0}
        prefixes = []
        for depth in range(1, length + 1):
            level = list(product(range(count), repeat=depth))
            for prefix in level:
                scores[prefix] = scores[prefix[:-1]] + self.last_log_q(row, prefix)
            level.sort(key=lambda prefix: (-float(scores[prefix]), rank[prefix[:-1]], prefix[-1]))
            rank |= {prefix: index for index, prefix in enumerate(level)}
            prefixes += level
        prefixes.sort(key=lambda prefix: (-float(scores[prefix]), len(prefix), rank[prefix]))
        return [(prefix, float(scores[prefix])) for prefix in prefixes]


def list_prefixes(
    nodes: DraftNodes, conditionals: RandomConditionals, row: int
) -> list[tuple[int, ...]]:
    """Return the prefixes of the nodes as tuples of candidates, and check depths."""
    prefixes = [()]
    columns = [column[row].tolist() for column in (nodes.tokens, nodes.parents, nodes.depths)]
    for token, parent, depth in zip(*columns, strict=True):
        path = prefixes[parent]
        assert depth == len(path) + 1
        candidate = conditionals.tokens[row, depth - 1].tolist().index(token)
        prefixes.append((*path, candidate))
    return prefixes[1:]


SEARCH_CASES = [
    (shape, recurrent, kind)
    for shape in [(2, 1, 6), (3, 2, 5), (2, 3, 4), (1, 5, 3), (2, 4, 1)]
    for recurrent in (0, 1)
    for kind in range(4)
]


@pytest.mark.parametrize("shape, recurrent, kind", SEARCH_CASES)
def test_the_tree_is_the_exhaustive_top_b_in_order(shape, recurrent, kind):
    """Random distributions, ties, and impossible tokens; both searches, every budget."""
    conditionals = RandomConditionals(
        shape,
        7 * kind + shape[1],
        bool(recurrent),
        grain=(0, 0.5, 0, 1.0)[kind],
        forbidden=kind > 1,
    )
    ranked = [conditionals.rank_prefixes(row) for row in range(shape[0])]
    for budget in (1, 2, 3, 8, 21, 1000):
        searches = [search_tree_by_depth] + [best_first_search] * (not recurrent)
        for search in searches:
            nodes = search(conditionals, budget)
            for row in range(shape[0]):
                expected = ranked[row][:budget]
                expected_prefixes = [prefix for prefix, _ in expected]
                assert list_prefixes(nodes, conditionals, row) == expected_prefixes, search
                assert nodes.log_probs[row].tolist() == [score for _, score in expected]


@pytest.mark.parametrize("length, count, budget", [(7, 32, 64), (15, 16, 33), (3, 64, 256)])
def test_both_searches_find_the_same_nodes_at_real_sizes(length, count, budget):
    for grain in (0.0, 0.25):
        conditionals = RandomConditionals(
            (3, length, count), length, grain=grain, forbidden=grain > 0
        )
        best_first = best_first_search(conditionals, budget)
        by_depth = search_tree_by_depth(conditionals, budget)
        for best_first_column, by_depth_column in zip(best_first, by_depth, strict=True):
            assert torch.equal(best_first_column, by_depth_column)


DRAFTING_METHODS = sorted(
    (method for method in TREE_METHODS.values() if method.needs_drafter),
    key=lambda method: method.name,
)


@pytest.mark.parametrize("degeneration", ["one", "none", "nan"])
@pytest.mark.parametrize("recurrent", [None, False, True])
@pytest.mark.parametrize("method", DRAFTING_METHODS, ids=lambda method: method.name)
def test_degenerate_distributions_make_valid_trees(ngrams, method, recurrent, degeneration):
    """Filters leave one token per position, or no drafted token, or a drafter returns NaN. Still
    every node has a distinct prefix, and its parent comes before it."""
    conditionals = None if recurrent is None else RandomConditionals((2, 4, 6), 1, recurrent)
    marginals = torch.randn(2, 4, 97, generator=torch.Generator().manual_seed(4)).log_softmax(-1)
    for log_q in (marginals, *(conditionals.log_q if conditionals else ())):
        log_q[1] = {"one": -torch.inf, "none": -torch.inf, "nan": torch.nan}[degeneration]
        if degeneration == "one":
            log_q[1, ..., 3] = 0.0
    if method.name == "chain" and conditionals:
        conditionals.draft_greedy_chain = lambda length: (
            conditionals.tokens[..., 0][:, :length],
            conditionals.log_q[0][:, 0, :length],
        )
    contexts = [[5, 60, 2], [2, 2, 2, 2, 2, 2]]
    tree = method.load_builder()(
        Proposal(
            torch.tensor([2, 2]),
            marginals,
            300,
            NGramModel.open(ngrams),
            contexts,
            width=2,
            conditionals=conditionals,
        )
    )
    assert tree.max_drafted > 3
    for row in range(2):
        paths = {0: ()}
        for node in range(1, tree.max_drafted + 1):
            parent = int(tree.parents[row, node])
            paths[node] = (*paths[parent], int(tree.tokens[row, node]))
            assert tree.depths[row, node] == len(paths[node])
        assert len(set(paths.values())) == len(paths)
    parent_log_probs = tree.log_probs.gather(1, tree.parents)
    is_at_most_parent = tree.log_probs[:, 1:] <= parent_log_probs[:, 1:]
    assert is_at_most_parent.all() or degeneration == "nan" or not method.sorts_nodes_by_probability


@pytest.mark.parametrize("width, budget, nodes", [(2, 14, 14), (3, 14, 12), (9, 3, 3), (5, 3, 3)])
@pytest.mark.parametrize("recurrent", [False, True])
def test_a_static_tree_has_the_likeliest_children_of_every_node(width, budget, nodes, recurrent):
    """The deepest full tree of that width within the budget, or some children of the root if not
    all of them fit."""
    conditionals = RandomConditionals((2, 4, 6), 3, recurrent)
    tree = build_static_tree(
        Proposal(torch.tensor([1, 2]), None, budget, width=width, conditionals=conditionals)
    )
    nodes_of_tree = DraftNodes(
        tree.tokens[:, 1:], tree.parents[:, 1:], tree.depths[:, 1:], tree.log_probs[:, 1:]
    )
    assert tree.max_drafted == nodes
    for row in range(2):
        scores = dict(conditionals.rank_prefixes(row))
        paths = list_prefixes(nodes_of_tree, conditionals, row)
        assert nodes_of_tree.log_probs[row].tolist() == [scores[path] for path in paths]
        for parent in {path[:-1] for path in paths}:
            children = [path for path in paths if path[:-1] == parent]
            candidates = [path for path in scores if path[:-1] == parent]
            candidates.sort(key=scores.get, reverse=True)
            assert children == candidates[: min(width, budget)]


def test_a_chain_follows_the_head():
    class FakeConditionals:
        def draft_greedy_chain(self, length):
            tokens = torch.tensor([[4, 7, 9]])
            log_probs = torch.tensor([[-0.5, -0.25, -1.0]])
            return tokens[:, :length], log_probs[:, :length]

    proposal = Proposal(
        torch.tensor([3]), torch.zeros(1, 3, 10), 2, conditionals=FakeConditionals()
    )
    tree = build_chain(proposal)
    assert tree.tokens.tolist() == [[3, 4, 7]] and tree.log_probs.tolist() == [[0, -0.5, -0.75]]


@pytest.mark.parametrize("shape, budget", [((2, 1, 9), 17), ((3, 3, 4), 17), ((1, 3, 4), 1)])
def test_with_an_ngram_model_the_tree_has_the_best_prefixes(
    ngrams, recalled, widened, probabilities, shape, budget
):
    """A candidate's score is its conditional probability times its n-gram probability after the
    whole path, normalised to the candidates' joint conditional probability. Candidates that n-grams
    add have their marginals, and so have tokens after them."""
    model = NGramModel.open(ngrams)
    conditionals = RandomConditionals(shape, 3)
    marginals = torch.randn(*shape[:2], 97, generator=torch.Generator().manual_seed(4)).log_softmax(
        -1
    )
    contexts = [[5, 60, 2], [1], [90, 3]][: shape[0]]
    weight = 0.7
    # Candidates occurred before in this context.
    contexts[0] = conditionals.tokens[0].flatten().tolist() * 3 + contexts[0]
    contexts[0][-1] = int(conditionals.tokens[0, 0, 0])
    bonus = torch.tensor([context[-1] for context in contexts])
    tree = build_guided_ddtree(
        Proposal(bonus, marginals, budget, model, contexts, weight, conditionals=conditionals)
    )
    for row, context in enumerate(contexts):
        listed = conditionals.tokens[row].tolist()
        score = {(): 0.0}

        def log_q(prefix, token, row=row, listed=listed):
            indices = []
            for path_token, candidates in zip((*prefix, token), listed, strict=False):
                index = candidates.index(path_token) if path_token in candidates else None
                indices.append(index)
            if None not in indices[-2:]:
                return float(conditionals.last_log_q(row, indices))
            return float(marginals[row, len(prefix), token])

        for depth in range(shape[1]):
            for prefix in [prefix for prefix in score if len(prefix) == depth]:
                path = context + list(prefix)
                tokens = listed[depth] + widened(context, path, listed[depth], model)
                drafted = [log_q(prefix, token) for token in tokens]
                ngram = recalled(context, path, tokens, probabilities(model, path, tokens))
                products = [
                    math.exp(q) * (p + 1e-5) ** weight for q, p in zip(drafted, ngram, strict=True)
                ]
                scale = min(1.0, sum(map(math.exp, drafted))) / sum(products)
                for token, token_product in zip(tokens, products, strict=True):
                    step = min(0.0, math.log(scale * token_product))
                    score[(*prefix, token)] = score[prefix] + step
        best = sorted((p for p in score if p), key=score.get, reverse=True)[: tree.max_drafted]
        prefix_of_node = {0: ()}
        tokens = tree.tokens[row].tolist()
        parents = tree.parents[row].tolist()
        for node in range(1, len(tokens)):
            prefix_of_node[node] = (*prefix_of_node[parents[node]], tokens[node])
        assert set(prefix_of_node.values()) - {()} == set(best)
        expected = torch.tensor([score[prefix] for prefix in prefix_of_node.values()])
        assert torch.allclose(tree.log_probs[row].float(), expected, atol=1e-5)
