"""Masked diffusion decoding: every way of drafting writes what a plain step-by-step loop writes,
write for write."""

import math
from dataclasses import replace
from itertools import permutations, product

import pytest
import torch

from infer.engine.sampling import gumbel_noise
from infer.masked.config import MaskedOptions
from infer.masked.drafting import (
    Guess,
    Plan,
    as_guesses,
    chain_states,
    drafts,
    follow_steps,
    guided_states,
    mixed_states,
    order_shares,
    pick_states,
    summarize,
    token_shares,
)
from infer.masked.engine import MaskedEngine
from infer.masked.habits import Rate, TextHabits
from infer.masked.model import MaskedModel
from infer.masked.sequence import MaskedSequence

MASK = 60


@pytest.fixture(scope="module")
def model(make_masked) -> MaskedModel:
    return make_masked()


@pytest.fixture(scope="module")
def shifted(make_masked) -> MaskedModel:
    return make_masked(shifted=True)


def options_of(length: int = 16, block_length: int = 8, **more) -> MaskedOptions:
    settings = {"ignore_eos": True, "max_new_tokens": length, "block_length": block_length} | more
    return MaskedOptions(**settings)


def fill(model: MaskedModel, prompt: list[int], options: MaskedOptions) -> MaskedSequence:
    """One text, alone."""
    engine = MaskedEngine(
        model, replace(options, max_num_seqs=1), len(prompt) + options.max_new_tokens
    )
    text = engine.submit(prompt, options)
    while engine.busy:
        engine.step()
    return text


class Kept:
    """Keys and values of the last full pass; a block's pass sees its own in place of the kept ones
    of the block."""

    def __init__(self) -> None:
        self.layers = {}
        self.block = None

    def update(self, keys, values, layer):
        if self.block is None:
            self.layers[layer] = keys, values
            return keys, values
        begin, end = self.block
        return tuple(
            torch.cat([old[:, :, :begin], new, old[:, :, end:]], 2)
            for old, new in zip(self.layers[layer], (keys, values), strict=True)
        )

    def get_seq_length(self, layer=0):
        return 0


@torch.no_grad()
def reference(
    model: MaskedModel, prompt: list[int], options: MaskedOptions
) -> list[tuple[int, int]]:
    """One token a pass, with nothing of ours but the noise."""
    ids = torch.tensor([prompt + [MASK] * options.max_new_tokens])
    width = ids.shape[1]
    kept = Kept()
    writes = []
    shift = int(model.shifted)

    def run(begin: int, end: int) -> torch.Tensor:
        out = model.model.model(
            input_ids=ids[:, begin:end],
            position_ids=torch.arange(begin, end)[None],
            attention_mask=torch.zeros(1, 1, end - begin, width),
            past_key_values=kept,
            use_cache=True,
        )
        return model.model.lm_head(out.last_hidden_state)[0]

    for first in range(len(prompt), width, options.block_length):
        last = first + options.block_length
        for count in range(options.block_length):
            if options.cache == "none" or count == 0:
                kept.block = None
                outputs = dict(enumerate(run(0, width)))
            else:
                kept.block = first - shift, last
                outputs = dict(enumerate(run(*kept.block), first - shift))
            best = None
            for position in range(first, last):
                if ids[0, position] != MASK:
                    continue
                logits = outputs[position - shift].double()
                logits[MASK] = -torch.inf
                scores = logits
                if options.temperature:
                    noise = gumbel_noise(
                        torch.tensor([options.seed]), torch.tensor([[position]]), len(logits)
                    )
                    scores = logits / options.temperature + noise[0, 0]
                token = int(scores.argmax())
                confidence = float(logits.softmax(-1)[token])
                if best is None or confidence > best[0]:
                    best = confidence, position, token
            ids[0, best[1]] = best[2]
            writes.append((best[1] - len(prompt), best[2]))
    return writes


PROMPTS = [[3], [7, 8, 9, 10, 11, 12, 13], [1, 40, 2, 5, 5, 5, 33, 21, 9, 14, 50, 4]]
WAYS = [("greedy", 1), ("greedy", 8), ("mixed", 5), ("guided", 4), ("guided", 8)]


@pytest.mark.parametrize(
    "kind, block_length, temperature",
    [("model", 4, 0.8), ("model", 8, 0.0), ("model", 16, 0.0), ("shifted", 8, 0.8)],
)
def test_every_way_of_drafting_writes_what_a_plain_loop_writes(
    kind, block_length, temperature, request
):
    model = request.getfixturevalue(kind)
    accepted = [0] * 9
    for prompt, cache in zip(PROMPTS, ("dual", "none", "dual"), strict=True):
        policy = {"temperature": temperature, "seed": 4, "cache": cache}
        options = options_of(16, block_length, method="steps", **policy)
        expected = reference(model, prompt, options)
        plain = fill(model, prompt, options)
        assert plain.writes == expected
        assert plain.stats.rounds == plain.stats.written == 16 and plain.stats.histogram[0] == 16
        for method, length in WAYS:
            way = replace(options, method=method, draft_length=length, budget=9)
            done = fill(model, prompt, way)
            assert done.writes == expected, way
            accepted = [sum(counts) for counts in zip(accepted, done.stats.histogram, strict=True)]
    assert (
        sum(accepted[1:]) > sum(accepted) / 20 and sum(accepted[2:]) > 0
    )  # drafts were accepted, several at once


def test_chain_and_swapped_drafts_are_the_papers():
    guesses = {
        position: Guess([position, 0], [-0.1, -3.0], odds)
        for position, odds in zip(range(4, 12), ODDS, strict=True)
    }
    plan = Plan(range(4, 12), start=0, block_length=8, longest=8)
    writes = drafts(guesses, plan, 5)
    assert [position for position, _ in writes] == [
        5,
        7,
        4,
        6,
        9,
    ]  # the first block by confidence, then the next one
    assert [len(state) for state in chain_states(writes)] == [0, 1, 2, 3, 4, 5]
    within = Plan(range(4, 12), start=4, block_length=8, longest=8)
    for length in range(1, 6):
        states = mixed_states(drafts(guesses, within, length), within)
        assert (
            len(states) == len(set(states)) == 2 * length
        )  # 6, 8 and 10 for draft lengths 3, 4, 5 (table 3)
    a, b, c, d, e = drafts(guesses, plan, 5)
    swapped = mixed_states([a, b, c, d, e], plan)[6:]
    assert swapped == [
        frozenset(x) for x in ([b], [a, c], [a, b, d])
    ]  # d and e are in different blocks
    mixed = MaskedOptions(method="mixed")
    assert pick_states({}, plan, mixed, TextHabits({})) == [
        frozenset()
    ]  # nothing is known yet: the text alone


ODDS = [1.0, 4.0, 0.5, 2.0, 3.0, 9.0, -1.0, -2.0]


def test_a_walk_goes_on_where_two_orders_meet():
    """Drafted "a, b"; the model takes b first, then a: the state after both is the chain's, and was
    computed."""
    a = (5, 50)
    b = (6, 51)
    c = (7, 52)
    plan = Plan([5, 6, 7], start=5, block_length=4, longest=2)

    def sure_of(write) -> dict[int, Guess]:
        return {x: Guess([token], [0.0], 9.0 if x == write[0] else 1.0) for x, token in (a, b, c)}

    states = mixed_states([a, b], plan)
    found = [
        {frozenset(): sure_of(b), frozenset([b]): sure_of(a)}.get(state, sure_of(c))
        for state in states
    ]
    writes, last = follow_steps(states, found, plan)
    assert writes == [b, a, c] and states[last] == {a, b}


def test_a_tree_has_the_likeliest_states():
    """Against all orders of all states of up to three writes."""
    guesses = {
        position: Guess([1, 2], [math.log(share), math.log(0.9 - share)], odds)
        for position, share, odds in [(4, 0.6, 1.0), (5, 0.85, 1.5), (6, 0.5, -0.5), (8, 0.8, 3.0)]
    }
    plan = Plan([4, 5, 6, 8], start=4, block_length=4, longest=3)  # 8 is in the next block
    best: dict[frozenset, float] = {}
    for count in range(4):
        for order in permutations(guesses, count):
            for ranks in product((0, 1), repeat=count):
                state = frozenset()
                worth = 0.0
                for position, rank in zip(order, ranks, strict=True):
                    open_ = plan.open(state)
                    if position not in open_:
                        worth = -math.inf
                        break
                    total = sum(math.exp(guesses[other].confidence) for other in open_)
                    worth += (
                        guesses[position].confidence
                        - math.log(total)
                        + guesses[position].log_shares[rank]
                    )
                    state = state | {(position, rank + 1)}
                if worth > -math.inf:
                    best[state] = max(worth, best.get(state, -math.inf))
    for nodes in (1, 2, 5, 12, 100):
        states = guided_states(guesses, plan, 3, nodes, TextHabits({}, Rate(0, 1)))
        assert states[0] == frozenset() and len(states) == len(set(states)) == min(nodes, len(best))
        expected = sorted(best.values(), reverse=True)[:nodes]
        assert [best[state] for state in states] == pytest.approx(expected)
        for state in states[1:]:  # and a way to each of them
            assert any(state - {write} in states for write in state)


def test_habits_are_what_the_text_has_shown():
    habits = TextHabits(dict(enumerate([1, 2, 3, 9, 2, 3])))
    assert habits.expects(6, {}) == (2, 9)  # "2 3" was followed by 9
    assert habits.expects(7, {6: 1}) == (1, 2)  # "2 3 1" is new, "1" was followed by 2
    assert habits.expects(8, {6: 1}) == (0, 0) and habits.expects(7, {6: 50}) == (
        0,
        0,
    )  # a mask, a new token before it
    habits.wrote([(6, 9), (7, 4), (9, 5)])  # expected; not expected (2); behind a mask
    assert habits.last == 9
    assert (
        habits.right[2].value == 2 / 3
        and habits.right[3].value == 1 / 3
        and habits.right[1].value == 1 / 2
    )
    assert (
        habits.follows_last.value == 2 / 4
    )  # once in advance; 7 stood behind 6; 9 did not stand behind 7
    assert habits.expects(8, {}) == (0, 0)  # nothing ever followed a 4
    habits.wrote([(8, 7)])
    assert habits.expects(20, {19: 4}) == (1, 7) and habits.expects(20, {19: 7}) == (1, 5)


def test_a_guided_tree_follows_them_as_far_as_they_were_right():
    habits = TextHabits(dict(enumerate([1, 2, 3, 1, 2, 3, 1])))
    guesses = {position: Guess([50, 51], [-0.7, -0.8], 0.0) for position in (7, 8, 9)}
    plan = Plan([7, 8, 9], start=7, block_length=3, longest=3)
    for written in ({}, {7: 2}):
        shares = dict(token_shares(guesses[8], 8, written, habits))
        assert sum(shares.values()) <= 1 and (3 in shares) == bool(written)  # 3 behind the 2 alone
    shares = order_shares(guesses, [7, 8, 9], 7, habits)
    assert [position for position, _ in shares] == [7, 8, 9]
    assert sum(share for _, share in shares) == pytest.approx(1)
    assert shares[1][1] == pytest.approx(0.5 + 0.5 / 3)
    habits.follows_last, habits.right = Rate(99, 100), [Rate(99, 100)] * 4
    habits.last = 6
    followed = [frozenset(), *(frozenset([(7, 2), (8, 3), (9, 1)][:size]) for size in (1, 2, 3))]
    assert guided_states(guesses, plan, 3, 4, habits) == followed
    assert guided_states(guesses, plan, 3, 4, TextHabits({})) != followed


def test_confidences_next_to_one_stay_apart():
    """As probabilities in float32 both are 1: which position comes first would be chance."""
    logits = torch.tensor([[[40.0, 1.0, 2.0], [41.0, 1.0, 2.0]]])  # (1, P, V)
    guesses = as_guesses(summarize(logits[0], 0.0, None).tolist(), [7, 8])
    assert logits[0].softmax(-1).max(-1).values.tolist() == [1.0, 1.0]
    assert guesses[8].confidence - guesses[7].confidence == pytest.approx(1.0)
    assert guesses[7].tokens == [0, 2]


def test_a_model_sees_both_sides_its_mask_and_no_padding(model, shifted):
    ids = torch.tensor([PROMPTS[2], PROMPTS[2]])
    ids[1, -1] = 9
    logits = model.logits(ids)
    assert (logits[..., MASK] == -torch.inf).all()
    assert not torch.allclose(logits[0, 0, :MASK], logits[1, 0, :MASK])
    padded = torch.cat([ids, torch.zeros(2, 5, dtype=torch.long)], 1)
    real = (torch.arange(17) < 12).expand(2, -1)
    assert torch.allclose(model.logits(padded, real)[:, :12], logits, atol=1e-5)
    at = torch.tensor([1, 0, 0]), torch.tensor([3, 11, 3])
    assert torch.allclose(model.logits(ids, at=at), logits[at], atol=1e-5)
    twin = MaskedModel(shifted.model, None, MASK, shifted=False)
    assert torch.allclose(shifted.logits(ids)[:, 1:], twin.logits(ids)[:, :-1], atol=1e-5)
