"""Trees that ask an n-gram model: equal to DART's algorithm 1 and to exhaustive enumeration,
written plainly here."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from infer.kernels.cpu_search import search
from infer.ngrams.count import count_ngrams
from infer.ngrams.model import NGram
from infer.trees import guided
from infer.trees.ddtree import Marginals
from infer.trees.guided import guided_ddtree
from infer.trees.methods import TREES
from infer.trees.tree import DraftTree, Proposal

EPSILON = 1e-5  # of the guided DDTree
BUILDERS = [row.load() for row in TREES.values() if row.ngrams]


@pytest.fixture(scope="module")
def model(ngrams) -> NGram:
    return NGram.open(ngrams)


def marginals(rows: int, length: int, vocabulary: int = 97, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, length, vocabulary, generator=generator) * 3).log_softmax(-1)


def contexts(rows: int, seed: int = 0) -> list[list[int]]:
    """Of all lengths, some of them never seen."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(97, (1 + row % 4,), generator=generator).tolist() for row in range(rows)]


def repeating(rows: int) -> list[list[int]]:
    """Texts of few tokens that say many things twice, one of them longer than what is looked
    for."""
    dice = np.random.default_rng(5)
    texts = [dice.integers(0, 20, 30 + 10 * row).tolist() for row in range(rows)]
    return [text + text[5:20] for text in texts]


def prefixes(tree: DraftTree, row: int) -> dict[tuple[int, ...], float]:
    """The drafted nodes as token tuples with their log_probs, in the tree's order; checks parents
    and depths."""
    found = {0: ()}
    for node in range(1, tree.budget + 1):
        parent = int(tree.parents[row, node])
        assert parent < node
        assert int(tree.depths[row, node]) == int(tree.depths[row, parent]) + 1
        found[node] = (*found[parent], int(tree.tokens[row, node]))
    assert len(set(found.values())) == len(found)
    return {prefix: float(tree.log_probs[row, node]) for node, prefix in found.items() if node}


def corpus(vocabulary: int, seed: int) -> list[list[int]]:
    """Texts of 0 to 40 tokens, each token likelier after some than after others; their last ones
    are counted too."""
    generator = np.random.default_rng(seed)
    favourites = generator.integers(0, vocabulary, (vocabulary, 3))
    texts = []
    for length in generator.integers(0, 41, 60):
        ids = [int(generator.integers(vocabulary))]
        while len(ids) < length:
            often = generator.random() < 0.7
            ids.append(
                int(
                    favourites[ids[-1], generator.integers(3)]
                    if often
                    else generator.integers(vocabulary)
                )
            )
        texts.append(ids[:length])
    return texts


def counted(texts: list[list[int]], order: int) -> Counter:
    """How often every n-gram of 0 to `order` tokens stands in the texts; the empty one: all
    tokens."""
    counts = Counter()
    for text in texts:
        for start in range(len(text)):
            for end in range(start, min(start + order, len(text)) + 1):
                counts[tuple(text[start:end])] += 1
    return counts


def fluency(counts: Counter, order: int, context: list[int], token: int) -> float:
    """Pr(token | context) behind the longest suffix of 1 to order - 1 tokens that it was seen
    behind, or 0."""
    for length in range(min(order - 1, len(context)), 0, -1):
        suffix = tuple(context[len(context) - length :])
        if counts[(*suffix, token)]:
            return counts[(*suffix, token)] / counts[suffix]
    return 0.0


def algorithm_1(
    marginal: torch.Tensor, context: list[int], counts: Counter, order: int, budget: int, ends=()
) -> list[tuple]:
    """DART algorithm 1 with appendix D's weights, and what the authors' code chooses where it says
    nothing, best first: (prefix, score, log-probability under the drafter)."""
    top, ids = marginal.topk(min(25, marginal.shape[-1]), dim=-1)
    judged = top.softmax(-1)
    active = [((), 0.0, 0.0)]
    everything = []
    for level in range(len(marginal)):
        grown = []
        for prefix, score, drafted in active:
            path = context + list(prefix)
            for token, q, log_q in zip(
                *(side[level].tolist() for side in (ids, judged, top)), strict=True
            ):
                step = 0.9**level * math.log(q + 1e-10)
                if level > 0:
                    step += 0.5 * math.log(fluency(counts, order, path, token) + 1e-10)
                step = min(step * (level + 1) ** -0.7, 0.0)
                grown.append(((*prefix, token), score + step, drafted + log_q))
        everything += grown
        active = sorted(grown, key=lambda entry: (entry[0][-1] in ends, -entry[1]))[:20]
    return sorted(everything, key=lambda entry: -entry[1])[:budget]


# vocabulary, order, longest path, ids that end a text: small vocabularies, so that ends must be
# gone on with too
MODELS = [
    (97, 3, 8, ()),
    (97, 2, 8, (5,)),
    (60, 4, 8, (7, 11)),
    (12, 3, 5, (0, 3)),
    (30, 5, 3, (1,)),
    (97, 1, 4, ()),
]


@pytest.mark.parametrize("case", range(len(MODELS)))
def test_continuity_is_algorithm_1(tmp_path, case):
    """25 trees of each model, 150 in all: the same nodes in the same order, and the authors' own
    choices in theirs."""
    continuity = TREES["continuity"].load()
    vocabulary, order, length, ends = MODELS[case]
    texts = corpus(vocabulary, case)
    model = count_ngrams(texts, vocabulary, order, tmp_path / "x.ngrams", "0" * 64)
    counts = counted(texts, order)
    generator = torch.Generator().manual_seed(case)
    for number in range(25):
        spread = float(torch.rand((), generator=generator)) * 4 + 0.5
        logits = torch.randn(1, length, vocabulary, generator=generator) * spread
        if number % 2:  # drafters are surest of what comes next
            logits *= torch.linspace(2, 0.5, length)[:, None]
        logits[..., list(ends)] += 3.0
        some = logits.log_softmax(-1)
        budget = int(torch.randint(8, 60, (), generator=generator))
        text = texts[number % len(texts)] or [0]
        context = text[: 1 + number % len(text)]
        tree = continuity(
            Proposal(torch.tensor([context[-1]]), some, budget, model, [context], ends=ends)
        )
        expected = algorithm_1(some[0], context, counts, order, budget, ends)
        found = prefixes(tree, 0)
        assert list(found) == [prefix for prefix, _, _ in expected], number
        assert list(found.values()) == pytest.approx(
            [drafted for _, _, drafted in expected], abs=1e-4
        )


def conditionals(
    marginal: torch.Tensor,
    text: list[int],
    drafted: list[int],
    model: NGram,
    weight: float,
    plainly: tuple,
) -> dict[int, float]:
    """log p(token | path): marginal times n-gram probability ^ weight, of the likeliest tokens and
    those that n-grams add, with these tokens' joint probability."""
    recalled, widened, probabilities = plainly
    path = text + drafted
    ids = marginal[len(drafted)].topk(min(25, marginal.shape[-1])).indices.tolist()
    ids += widened(text, path, ids, model)
    top = marginal[len(drafted)][ids]
    fluent = torch.from_numpy(recalled(text, path, ids, probabilities(model, path, ids)))
    scores = top.double() + weight * (fluent + EPSILON).log()
    scores = scores.log_softmax(-1) + min(float(top.double().exp().sum().log()), 0.0)
    return dict(zip(ids, scores.tolist(), strict=True))


@pytest.mark.parametrize(("weight", "counts"), [(0.0, "file"), (0.5, "text"), (1.0, "file")])
def test_guided_ddtree_is_the_best_of_all_prefixes(
    model, recalled, widened, probabilities, weight, counts
):
    """Of the counts of a corpus corrected by those of the text, and of the text's own alone."""
    rows = 3
    length = 3
    budget = 40
    vocabulary = 97 if counts == "file" else 40
    model = model if counts == "file" else NGram.uniform(40)
    some = marginals(rows, length, vocabulary, seed=3)
    ends = contexts(2, 1) + repeating(rows)[2:]
    ends = ends if counts == "file" else repeating(rows)
    tree = guided_ddtree(Proposal(torch.arange(rows), some, budget, model, ends, weight))
    for row in range(rows):
        values: dict[tuple, float] = {(): 0.0}
        for depth in range(length):
            for prefix in [prefix for prefix in values if len(prefix) == depth]:
                steps = conditionals(
                    some[row],
                    ends[row],
                    list(prefix),
                    model,
                    weight,
                    (recalled, widened, probabilities),
                )
                values |= {(*prefix, token): values[prefix] + step for token, step in steps.items()}
        ranked = sorted(
            (prefix for prefix in values if prefix), key=lambda prefix: -values[prefix]
        )[:budget]
        found = prefixes(tree, row)
        assert list(found) == ranked
        assert list(found.values()) == pytest.approx(
            [values[prefix] for prefix in ranked], abs=1e-5
        )


def test_smaller_budgets_are_beginnings_of_larger_ones(model):
    some = marginals(2, 6, seed=8)
    ends = contexts(2)
    bonus = torch.tensor([3, 4])
    for build in BUILDERS:
        large = build(Proposal(bonus, some, 120, model, ends))
        for budget in (1, 16, 119):
            small = build(Proposal(bonus, some, budget, model, ends))
            for name in ("tokens", "parents", "depths", "log_probs"):
                assert torch.equal(getattr(large.first(budget), name), getattr(small, name)), name
    assert (
        guided_ddtree(Proposal(bonus, some, 120, model, ends)).log_probs.diff(dim=1)[:, 1:] <= 0
    ).all()


def test_a_row_does_not_depend_on_its_batch(model):
    some = marginals(5, 7, seed=6)
    ends = contexts(5)
    for build in BUILDERS:
        together = build(Proposal(torch.arange(5), some, 30, model, ends))
        for row in range(5):
            alone = build(
                Proposal(torch.tensor([row]), some[row : row + 1], 30, model, ends[row : row + 1])
            )
            assert torch.equal(alone.tokens[0], together.tokens[row])
            assert torch.equal(alone.parents[0], together.parents[row])


def test_tokens_that_are_not_listed_may_all_count_alike(model):
    """Where the marginals stay on another device, one number a position stands for all that are not
    listed."""
    some = marginals(1, 4, seed=2)
    text = np.array(repeating(1)[0])
    proposal = Proposal(torch.tensor([text[-1]]), some, 30, model, [text])
    floor = np.full((4, 1), -2.0, np.float32)
    found = []
    for alone in (floor, np.ascontiguousarray(np.broadcast_to(floor, some.shape[1:]))):
        guide = guided.guides(proposal, Marginals(some, 25), 30)[0]._replace(alone=alone)
        nodes = np.empty((3, 30), np.int64)
        scores = np.empty(30)
        tokens = np.empty_like(guide.listed)
        search(np.empty(tokens.shape), tokens, 4, 0, guide, nodes, scores)
        found.append((nodes, scores))
    assert np.array_equal(found[0][0], found[1][0]) and np.array_equal(found[0][1], found[1][1])
    tokens, _, depths = found[0][0]
    assert any(
        token not in guide.tokens[depth - 1] for token, depth in zip(tokens, depths, strict=True)
    )
