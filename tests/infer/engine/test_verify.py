"""The walk against a simple implementation, and the distribution of the noise."""

import re
from pathlib import Path

import torch

from infer.engine import round as round_module
from infer.engine.sampling import gumbel_noise
from infer.engine.verification import walk
from infer.trees.ddtree import build_ddtree
from infer.trees.tree import Proposal


def walk_in_python(tree, target_tokens, row: int) -> tuple[list[int], int]:
    """Return the accepted path of a row, and the bonus token after it."""
    path = [0]
    while True:
        token = int(target_tokens[row, path[-1]])
        children = [
            node
            for node in range(1, tree.max_drafted + 1)
            if int(tree.parents[row, node]) == path[-1] and int(tree.tokens[row, node]) == token
        ]
        if not children:
            return path, token
        assert len(children) == 1
        path += children


def test_walk_equals_a_walk_in_python():
    generator = torch.Generator().manual_seed(0)
    path_lengths = set()
    for budget in (1, 3, 10, 40):
        for _ in range(40):
            marginals = torch.randn(3, 6, 4, generator=generator).log_softmax(-1)
            bonus_tokens = torch.randint(4, (3,), generator=generator)
            tree = build_ddtree(Proposal(bonus_tokens, marginals, budget))
            target_tokens = torch.randint(4, tree.tokens.shape, generator=generator)
            # Make the target often choose the token of a node's first child.
            is_chosen = torch.rand(tree.tokens.shape, generator=generator) < 0.7
            for row in range(3):
                for node in range(tree.max_drafted, 0, -1):
                    if is_chosen[row, node]:
                        target_tokens[row, tree.parents[row, node]] = tree.tokens[row, node]
            accepted = walk(tree, target_tokens)
            for row in range(3):
                path, bonus = walk_in_python(tree, target_tokens, row)
                assert accepted.lengths[row] == len(path)
                assert accepted.path[row, : len(path)].tolist() == path
                assert accepted.path[row, len(path) :].tolist() == path[-1:] * (
                    min(6, budget) + 1 - len(path)
                )
                assert accepted.bonus[row] == bonus
                path_lengths.add(len(path))
    assert path_lengths == {1, 2, 3, 4, 5, 6, 7}


def test_noise_is_a_function_of_seed_position_and_token_alone():
    seeds = torch.tensor([1, 2, -5])
    positions = torch.tensor([[4, 9], [9, 4], [0, 10**9]])
    noise = gumbel_noise(seeds, positions, 50)
    assert torch.isfinite(noise).all()
    for row in range(3):
        for column in range(2):
            single = gumbel_noise(
                seeds[row : row + 1], positions[row : row + 1, column : column + 1], 50
            )
            assert torch.equal(single[0, 0], noise[row, column])
    assert torch.equal(gumbel_noise(seeds, positions, 20), noise[..., :20])
    assert torch.equal(gumbel_noise(torch.tensor([1]), torch.tensor([[4]]), 50)[0, 0], noise[0, 0])
    assert not torch.equal(noise[0, 0], noise[1, 1])  # the same position, another seed


def test_noise_is_gumbel_and_uncorrelated():
    """2 million values; bounds at 5 standard errors (false alarm 6e-7 each)."""
    noise = gumbel_noise(torch.arange(10), torch.arange(200).expand(10, 200), 1000).double()
    count = noise.numel()
    assert abs(noise.mean().item() - 0.5772157) < 5 * 1.2825 / count**0.5
    assert abs(noise.var().item() - 1.6449341) < 5 * 3.5 / count**0.5
    centred = (noise - noise.mean()) / noise.std()
    for a, b in (
        (centred[1:], centred[:-1]),
        (centred[:, 1:], centred[:, :-1]),
        (centred[..., 1:], centred[..., :-1]),
    ):
        assert abs((a * b).mean().item()) < 5 / a.numel() ** 0.5


def test_the_documentation_quotes_the_round():
    """Every statement that docs/how-it-works.md quotes is in round.py, in this order."""
    code = Path(round_module.__file__).read_text()
    page = (Path(__file__).parents[3] / "docs/how-it-works.md").read_text()
    quoted = re.findall(r"\| `([^`]{20,})` \|", page)
    offsets = [code.index(line) for line in quoted]
    assert len(quoted) == 5 and offsets == sorted(offsets)
