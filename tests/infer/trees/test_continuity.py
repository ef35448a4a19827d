"""Trees with an n-gram model: equal to a simple version of DART's algorithm 1, and to exhaustive
enumeration."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from infer.kernels.cpu_search import search_tree
from infer.ngrams.count import count_ngrams
from infer.ngrams.model import NGramModel
from infer.trees import guided
from infer.trees.ddtree import MarginalConditionals
from infer.trees.guided import build_guided_ddtree
from infer.trees.methods import TREE_METHODS
from infer.trees.tree import DraftTree, Proposal

NGRAM_EPSILON = 1e-5  # of the guided DDTree
NGRAM_TREE_BUILDERS = [row.load_builder() for row in TREE_METHODS.values() if row.needs_ngrams]


@pytest.fixture(scope="module")
def model(ngrams) -> NGramModel:
    return NGramModel.open(ngrams)


def make_marginals(rows: int, length: int, vocabulary: int = 97, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, length, vocabulary, generator=generator) * 3).log_softmax(-1)


def make_contexts(rows: int, seed: int = 0) -> list[list[int]]:
    """Return contexts of 1 to 4 tokens, some of which the n-gram model has not seen."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(97, (1 + row % 4,), generator=generator).tolist() for row in range(rows)]


def make_repetitive_contexts(rows: int) -> list[list[int]]:
    """Return contexts with many repeated n-grams, one of them longer than the search looks for."""
    dice = np.random.default_rng(5)
    texts = [dice.integers(0, 20, 30 + 10 * row).tolist() for row in range(rows)]
    return [text + text[5:20] for text in texts]


def get_prefixes(tree: DraftTree, row: int) -> dict[tuple[int, ...], float]:
    """Return the prefixes of the drafted nodes with their log_probs, in the tree's order, and check
    parents and depths."""
    prefixes = {0: ()}
    for node in range(1, tree.max_drafted + 1):
        parent = int(tree.parents[row, node])
        assert parent < node
        assert int(tree.depths[row, node]) == int(tree.depths[row, parent]) + 1
        prefixes[node] = (*prefixes[parent], int(tree.tokens[row, node]))
    assert len(set(prefixes.values())) == len(prefixes)
    return {prefix: float(tree.log_probs[row, node]) for node, prefix in prefixes.items() if node}


def make_corpus(vocabulary: int, seed: int) -> list[list[int]]:
    """Return texts of 0 to 40 tokens, in which three tokens are likely to follow each token."""
    generator = np.random.default_rng(seed)
    favourites = generator.integers(0, vocabulary, (vocabulary, 3))
    texts = []
    for length in generator.integers(0, 41, 60):
        ids = [int(generator.integers(vocabulary))]
        while len(ids) < length:
            if generator.random() < 0.7:
                token = favourites[ids[-1], generator.integers(3)]
            else:
                token = generator.integers(vocabulary)
            ids.append(int(token))
        texts.append(ids[:length])
    return texts


def count_all_ngrams(texts: list[list[int]], order: int) -> Counter:
    """Count all n-grams of 0 to `order` tokens. The count of the empty one is that of tokens."""
    counts = Counter()
    for text in texts:
        for start in range(len(text)):
            for end in range(start, min(start + order, len(text)) + 1):
                counts[tuple(text[start:end])] += 1
    return counts


def ngram_probability(counts: Counter, order: int, context: list[int], token: int) -> float:
    """Return Pr(token | context) from the longest suffix of 1 to order - 1 tokens after which the
    token was seen, or 0."""
    for length in range(min(order - 1, len(context)), 0, -1):
        suffix = tuple(context[len(context) - length :])
        if counts[(*suffix, token)]:
            return counts[(*suffix, token)] / counts[suffix]
    return 0.0


def run_algorithm_1(
    marginal: torch.Tensor, context: list[int], counts: Counter, order: int, budget: int, ends=()
) -> list[tuple]:
    """Run DART algorithm 1 with the weights of appendix D and the authors' other choices. Return
    (prefix, score, log-probability under the drafter), best first."""
    top_log_q, ids = marginal.topk(min(25, marginal.shape[-1]), dim=-1)
    probabilities = top_log_q.softmax(-1)
    active = [((), 0.0, 0.0)]
    all_prefixes = []
    for level in range(len(marginal)):
        extended = []
        for prefix, score, drafted in active:
            path = context + list(prefix)
            columns = (ids[level], probabilities[level], top_log_q[level])
            for token, q, log_q in zip(*(column.tolist() for column in columns), strict=True):
                step = 0.9**level * math.log(q + 1e-10)
                if level > 0:
                    step += 0.5 * math.log(ngram_probability(counts, order, path, token) + 1e-10)
                step = min(step * (level + 1) ** -0.7, 0.0)
                extended.append(((*prefix, token), score + step, drafted + log_q))
        all_prefixes += extended
        active = sorted(extended, key=lambda entry: (entry[0][-1] in ends, -entry[1]))[:20]
    return sorted(all_prefixes, key=lambda entry: -entry[1])[:budget]


# Vocabulary size, order, maximum depth, end tokens. Vocabularies are small, so that prefixes with
# an end token have to be extended too.
NGRAM_MODEL_CASES = [
    (97, 3, 8, ()),
    (97, 2, 8, (5,)),
    (60, 4, 8, (7, 11)),
    (12, 3, 5, (0, 3)),
    (30, 5, 3, (1,)),
    (97, 1, 4, ()),
]


@pytest.mark.parametrize("case", range(len(NGRAM_MODEL_CASES)))
def test_continuity_is_algorithm_1(tmp_path, case):
    """25 trees of each of 6 models: the same nodes in the same order."""
    build_continuity_tree = TREE_METHODS["continuity"].load_builder()
    vocabulary, order, length, ends = NGRAM_MODEL_CASES[case]
    texts = make_corpus(vocabulary, case)
    model = count_ngrams(texts, vocabulary, order, tmp_path / "x.ngrams", "0" * 64)
    counts = count_all_ngrams(texts, order)
    generator = torch.Generator().manual_seed(case)
    for number in range(25):
        spread = float(torch.rand((), generator=generator)) * 4 + 0.5
        logits = torch.randn(1, length, vocabulary, generator=generator) * spread
        if number % 2:  # a drafter that is more confident in the first positions
            logits *= torch.linspace(2, 0.5, length)[:, None]
        logits[..., list(ends)] += 3.0
        marginals = logits.log_softmax(-1)
        budget = int(torch.randint(8, 60, (), generator=generator))
        text = texts[number % len(texts)] or [0]
        context = text[: 1 + number % len(text)]
        bonus = torch.tensor([context[-1]])
        proposal = Proposal(bonus, marginals, budget, model, [context], eos_token_ids=ends)
        tree = build_continuity_tree(proposal)
        expected = run_algorithm_1(marginals[0], context, counts, order, budget, ends)
        prefixes = get_prefixes(tree, 0)
        assert list(prefixes) == [prefix for prefix, _, _ in expected], number
        expected_log_probs = [log_prob for _, _, log_prob in expected]
        assert list(prefixes.values()) == pytest.approx(expected_log_probs, abs=1e-4)


def compute_conditionals(
    marginal: torch.Tensor,
    text: list[int],
    drafted: list[int],
    model: NGramModel,
    weight: float,
    reference_functions: tuple,
) -> dict[int, float]:
    """Return log p(token | path): marginal times n-gram probability to the power of `weight`, for
    the likeliest tokens and those that n-grams add, normalised to their joint marginal."""
    recalled, widened, probabilities = reference_functions
    path = text + drafted
    ids = marginal[len(drafted)].topk(min(25, marginal.shape[-1])).indices.tolist()
    ids += widened(text, path, ids, model)
    log_q = marginal[len(drafted)][ids].double()
    ngram_probabilities = torch.from_numpy(
        recalled(text, path, ids, probabilities(model, path, ids))
    )
    scores = log_q + weight * (ngram_probabilities + NGRAM_EPSILON).log()
    scores = scores.log_softmax(-1) + min(float(log_q.exp().sum().log()), 0.0)
    return dict(zip(ids, scores.tolist(), strict=True))


@pytest.mark.parametrize(("weight", "counts"), [(0.0, "file"), (0.5, "text"), (1.0, "file")])
def test_guided_ddtree_is_the_best_of_all_prefixes(
    model, recalled, widened, probabilities, weight, counts
):
    """With the counts of a corpus corrected by those of the sequence, and with the latter alone."""
    rows = 3
    length = 3
    budget = 40
    vocabulary = 97
    contexts = make_contexts(2, 1) + make_repetitive_contexts(rows)[2:]
    if counts == "text":
        vocabulary = 40
        model = NGramModel.uniform(40)
        contexts = make_repetitive_contexts(rows)
    marginals = make_marginals(rows, length, vocabulary, seed=3)
    proposal = Proposal(torch.arange(rows), marginals, budget, model, contexts, weight)
    tree = build_guided_ddtree(proposal)
    for row in range(rows):
        values: dict[tuple, float] = {(): 0.0}
        for depth in range(length):
            for prefix in [prefix for prefix in values if len(prefix) == depth]:
                steps = compute_conditionals(
                    marginals[row],
                    contexts[row],
                    list(prefix),
                    model,
                    weight,
                    (recalled, widened, probabilities),
                )
                values |= {(*prefix, token): values[prefix] + step for token, step in steps.items()}
        ranked = sorted(
            (prefix for prefix in values if prefix), key=lambda prefix: -values[prefix]
        )[:budget]
        prefixes = get_prefixes(tree, row)
        assert list(prefixes) == ranked
        expected = [values[prefix] for prefix in ranked]
        assert list(prefixes.values()) == pytest.approx(expected, abs=1e-5)


def test_trees_of_smaller_budgets_are_beginnings_of_larger_ones(model):
    marginals = make_marginals(2, 6, seed=8)
    contexts = make_contexts(2)
    bonus = torch.tensor([3, 4])
    for build in NGRAM_TREE_BUILDERS:
        large = build(Proposal(bonus, marginals, 120, model, contexts))
        for budget in (1, 16, 119):
            small = build(Proposal(bonus, marginals, budget, model, contexts))
            beginning = large.keep_first(budget)
            for name in ("tokens", "parents", "depths", "log_probs"):
                assert torch.equal(getattr(beginning, name), getattr(small, name)), name
    tree = build_guided_ddtree(Proposal(bonus, marginals, 120, model, contexts))
    assert (tree.log_probs.diff(dim=1)[:, 1:] <= 0).all()


def test_a_row_does_not_depend_on_its_batch(model):
    marginals = make_marginals(5, 7, seed=6)
    contexts = make_contexts(5)
    for build in NGRAM_TREE_BUILDERS:
        batch = build(Proposal(torch.arange(5), marginals, 30, model, contexts))
        for row in range(5):
            bonus = torch.tensor([row])
            row_slice = slice(row, row + 1)
            single = build(Proposal(bonus, marginals[row_slice], 30, model, contexts[row_slice]))
            assert torch.equal(single.tokens[0], batch.tokens[row])
            assert torch.equal(single.parents[0], batch.parents[row])


def test_added_tokens_may_share_one_marginal(model):
    """If the marginals stay on another device, one value per position replaces those of all tokens
    that n-grams add."""
    marginals = make_marginals(1, 4, seed=2)
    text = np.array(make_repetitive_contexts(1)[0])
    proposal = Proposal(torch.tensor([text[-1]]), marginals, 30, model, [text])
    shared_log_q = np.full((4, 1), -2.0, np.float32)
    repeated_log_q = np.ascontiguousarray(np.broadcast_to(shared_log_q, marginals.shape[1:]))
    results = []
    for alone in (shared_log_q, repeated_log_q):
        conditionals = MarginalConditionals(marginals, 25)
        guide = guided.make_ngram_search_buffers(proposal, conditionals, 30)[0]._replace(
            marginal_log_probs=alone
        )
        nodes = np.empty((3, 30), np.int64)
        scores = np.empty(30)
        tokens = np.empty_like(guide.candidate_columns)
        search_tree(np.empty(tokens.shape), tokens, 4, 0, guide, nodes, scores)
        results.append((nodes, scores))
    assert np.array_equal(results[0][0], results[1][0]) and np.array_equal(
        results[0][1], results[1][1]
    )
    tokens, _, depths = results[0][0]
    assert any(
        token not in guide.candidate_tokens[depth - 1]
        for token, depth in zip(tokens, depths, strict=True)
    )
