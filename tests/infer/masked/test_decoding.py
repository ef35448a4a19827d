"""Masked diffusion decoding: every method makes the same writes as a simple step-by-step loop."""

import math
from dataclasses import replace
from itertools import permutations, product

import pytest
import torch

from infer.engine.sampling import gumbel_noise
from infer.masked.config import MaskedOptions
from infer.masked.drafting import (
    DraftPlan,
    Prediction,
    accept_writes,
    draft_likeliest_writes,
    draft_states,
    estimate_position_probabilities,
    estimate_token_probabilities,
    make_chain_and_swapped_states,
    make_chain_states,
    parse_predictions,
    search_guided_states,
    summarise_logits,
)
from infer.masked.engine import MaskedEngine
from infer.masked.model import MaskedModel
from infer.masked.ngram_statistics import HitRate, SequenceStatistics
from infer.masked.sequence import MaskedSequence

MASK_TOKEN_ID = 60


@pytest.fixture(scope="module")
def model(make_masked) -> MaskedModel:
    return make_masked()


@pytest.fixture(scope="module")
def shifted(make_masked) -> MaskedModel:
    return make_masked(shifted=True)


def make_options(length: int = 16, block_length: int = 8, **options) -> MaskedOptions:
    return MaskedOptions(
        ignore_eos=True, max_new_tokens=length, block_length=block_length, **options
    )


def decode(model: MaskedModel, prompt: list[int], options: MaskedOptions) -> MaskedSequence:
    """Decode one sequence alone."""
    engine = MaskedEngine(
        model, replace(options, max_num_seqs=1), len(prompt) + options.max_new_tokens
    )
    sequence = engine.submit(prompt, options)
    while engine.has_unfinished_sequences:
        engine.step()
    return sequence


class ReferenceDualCache:
    """Keys and values of the last full pass. A pass over a block replaces those of the block."""

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
def make_reference_writes(
    model: MaskedModel, prompt: list[int], options: MaskedOptions
) -> list[tuple[int, int]]:
    """Decode one token per pass. Of our code this uses only the noise."""
    ids = torch.tensor([prompt + [MASK_TOKEN_ID] * options.max_new_tokens])
    width = ids.shape[1]
    cache = ReferenceDualCache()
    writes = []
    shift = int(model.shifted)

    def run(begin: int, end: int) -> torch.Tensor:
        output = model.model.model(
            input_ids=ids[:, begin:end],
            position_ids=torch.arange(begin, end)[None],
            attention_mask=torch.zeros(1, 1, end - begin, width),
            past_key_values=cache,
            use_cache=True,
        )
        return model.model.lm_head(output.last_hidden_state)[0]

    for first in range(len(prompt), width, options.block_length):
        last = first + options.block_length
        for step in range(options.block_length):
            if options.cache == "none" or step == 0:
                cache.block = None
                outputs = dict(enumerate(run(0, width)))
            else:
                cache.block = first - shift, last
                outputs = dict(enumerate(run(*cache.block), first - shift))
            best = None
            for position in range(first, last):
                if ids[0, position] != MASK_TOKEN_ID:
                    continue
                logits = outputs[position - shift].double()
                logits[MASK_TOKEN_ID] = -torch.inf
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


MASKED_PROMPTS = [[3], [7, 8, 9, 10, 11, 12, 13], [1, 40, 2, 5, 5, 5, 33, 21, 9, 14, 50, 4]]
METHOD_AND_DRAFT_LENGTH = [("greedy", 1), ("greedy", 8), ("mixed", 5), ("guided", 4), ("guided", 8)]


@pytest.mark.parametrize(
    "kind, block_length, temperature",
    [("model", 4, 0.8), ("model", 8, 0.0), ("model", 16, 0.0), ("shifted", 8, 0.8)],
)
def test_every_method_makes_the_writes_of_a_step_by_step_loop(
    kind, block_length, temperature, request
):
    model = request.getfixturevalue(kind)
    rounds_by_writes = [0] * 9
    for prompt, cache in zip(MASKED_PROMPTS, ("dual", "none", "dual"), strict=True):
        options = make_options(
            16, block_length, method="steps", temperature=temperature, seed=4, cache=cache
        )
        expected = make_reference_writes(model, prompt, options)
        baseline = decode(model, prompt, options)
        assert baseline.writes == expected
        assert baseline.stats.rounds == baseline.stats.written == 16
        assert baseline.stats.histogram[0] == 16
        for method, length in METHOD_AND_DRAFT_LENGTH:
            draft_options = replace(options, method=method, draft_length=length, budget=9)
            sequence = decode(model, prompt, draft_options)
            assert sequence.writes == expected, draft_options
            for index, rounds in enumerate(sequence.stats.histogram):
                rounds_by_writes[index] += rounds
    # Drafts were accepted, sometimes several per round.
    assert sum(rounds_by_writes[1:]) > sum(rounds_by_writes) / 20
    assert sum(rounds_by_writes[2:]) > 0


LOG_ODDS = [1.0, 4.0, 0.5, 2.0, 3.0, 9.0, -1.0, -2.0]


def test_chain_and_swapped_drafts_are_those_of_the_paper():
    predictions = {
        position: Prediction([position, 0], [-0.1, -3.0], log_odds)
        for position, log_odds in zip(range(4, 12), LOG_ODDS, strict=True)
    }
    plan = DraftPlan(range(4, 12), output_start=0, block_length=8, max_writes=8)
    writes = draft_likeliest_writes(predictions, plan, 5)
    # The first block by confidence, then the next one.
    assert [position for position, _ in writes] == [5, 7, 4, 6, 9]
    assert [len(state) for state in make_chain_states(writes)] == [0, 1, 2, 3, 4, 5]
    one_block = DraftPlan(range(4, 12), output_start=4, block_length=8, max_writes=8)
    for length in range(1, 6):
        chain_writes = draft_likeliest_writes(predictions, one_block, length)
        states = make_chain_and_swapped_states(chain_writes, one_block)
        # Table 3: 6, 8 and 10 states for draft lengths 3, 4 and 5.
        assert len(states) == len(set(states)) == 2 * length
    a, b, c, d, e = draft_likeliest_writes(predictions, plan, 5)
    swapped = make_chain_and_swapped_states([a, b, c, d, e], plan)[6:]
    # d and e are in different blocks, and are not swapped.
    assert swapped == [frozenset([b]), frozenset([a, c]), frozenset([a, b, d])]
    mixed = MaskedOptions(method="mixed")
    # Without predictions, only the sequence itself is computed.
    assert draft_states({}, plan, mixed, SequenceStatistics({})) == [frozenset()]


def test_steps_continue_where_two_orders_meet():
    """The draft is "a, b", the model writes b, then a. The state after both was computed as part of
    the chain."""
    a = (5, 50)
    b = (6, 51)
    c = (7, 52)
    plan = DraftPlan([5, 6, 7], output_start=5, block_length=4, max_writes=2)

    def predict_next(write) -> dict[int, Prediction]:
        """Return predictions by which `write` comes next."""
        return {
            position: Prediction([token], [0.0], 9.0 if position == write[0] else 1.0)
            for position, token in (a, b, c)
        }

    states = make_chain_and_swapped_states([a, b], plan)
    next_writes = {frozenset(): b, frozenset([b]): a}
    predictions = [predict_next(next_writes.get(state, c)) for state in states]
    writes, last_state = accept_writes(states, predictions, plan)
    assert writes == [b, a, c] and states[last_state] == {a, b}


def test_guided_states_are_the_likeliest():
    """Compared with all orders of all states of up to three writes."""
    predictions = {
        position: Prediction([1, 2], [math.log(p), math.log(0.9 - p)], log_odds)
        for position, p, log_odds in [(4, 0.6, 1.0), (5, 0.85, 1.5), (6, 0.5, -0.5), (8, 0.8, 3.0)]
    }
    plan = DraftPlan(
        [4, 5, 6, 8], output_start=4, block_length=4, max_writes=3
    )  # 8 is in the next block
    best: dict[frozenset, float] = {}
    for count in range(4):
        for order in permutations(predictions, count):
            for ranks in product((0, 1), repeat=count):
                state = frozenset()
                log_prob = 0.0
                for position, rank in zip(order, ranks, strict=True):
                    open_positions = plan.open_positions(state)
                    if position not in open_positions:
                        log_prob = -math.inf
                        break
                    prediction = predictions[position]
                    total = sum(math.exp(predictions[other].confidence) for other in open_positions)
                    log_prob += prediction.confidence - math.log(total) + prediction.log_probs[rank]
                    state = state | {(position, rank + 1)}
                if log_prob > -math.inf:
                    best[state] = max(log_prob, best.get(state, -math.inf))
    for num_states in (1, 2, 5, 12, 100):
        states = search_guided_states(
            predictions, plan, 3, num_states, SequenceStatistics({}, HitRate(0, 1))
        )
        assert states[0] == frozenset()
        assert len(states) == len(set(states)) == min(num_states, len(best))
        expected = sorted(best.values(), reverse=True)[:num_states]
        assert [best[state] for state in states] == pytest.approx(expected)
        for state in states[1:]:  # a step leads to each of them
            assert any(state - {write} in states for write in state)


def test_statistics_predict_what_followed_before():
    statistics = SequenceStatistics(dict(enumerate([1, 2, 3, 9, 2, 3])))
    assert statistics.predict_token(6, {}) == (2, 9)  # "2 3" was followed by 9
    assert statistics.predict_token(7, {6: 1}) == (1, 2)  # "2 3 1" is new, "1" was followed by 2
    assert statistics.predict_token(8, {6: 1}) == (0, 0)  # after a mask
    assert statistics.predict_token(7, {6: 50}) == (0, 0)  # after a token that is new
    # Predicted; not the prediction, which was 2; after a mask.
    statistics.record_writes([(6, 9), (7, 4), (9, 5)])
    assert statistics.last_position == 9
    assert [rate.value for rate in statistics.context_rates[1:]] == [1 / 2, 2 / 3, 1 / 3]
    # One hit in advance; 7 is right of 6; 9 is not right of 7.
    assert statistics.right_neighbour_rate.value == 2 / 4
    assert statistics.predict_token(8, {}) == (0, 0)  # nothing ever followed a 4
    statistics.record_writes([(8, 7)])
    assert statistics.predict_token(20, {19: 4}) == (1, 7) and statistics.predict_token(
        20, {19: 7}
    ) == (1, 5)


def test_guided_states_follow_the_statistics_by_their_hit_rate():
    statistics = SequenceStatistics(dict(enumerate([1, 2, 3, 1, 2, 3, 1])))
    predictions = {position: Prediction([50, 51], [-0.7, -0.8], 0.0) for position in (7, 8, 9)}
    plan = DraftPlan([7, 8, 9], output_start=7, block_length=3, max_writes=3)
    for written in ({}, {7: 2}):
        tokens = dict(estimate_token_probabilities(predictions[8], 8, written, statistics))
        assert sum(tokens.values()) <= 1
        assert (3 in tokens) == bool(written)  # 3 is predicted only after the 2
    positions = estimate_position_probabilities(predictions, [7, 8, 9], 7, statistics)
    assert [position for position, _ in positions] == [7, 8, 9]
    assert sum(probability for _, probability in positions) == pytest.approx(1)
    assert positions[1][1] == pytest.approx(0.5 + 0.5 / 3)

    statistics.right_neighbour_rate = HitRate(99, 100)
    statistics.context_rates = [HitRate(99, 100)] * 4
    statistics.last_position = 6
    writes = [(7, 2), (8, 3), (9, 1)]
    expected = [frozenset(writes[:size]) for size in range(4)]
    assert search_guided_states(predictions, plan, 3, 4, statistics) == expected
    assert search_guided_states(predictions, plan, 3, 4, SequenceStatistics({})) != expected


def test_confidences_close_to_one_stay_distinct():
    """As float32 probabilities both would be 1, and the order of positions arbitrary."""
    logits = torch.tensor([[[40.0, 1.0, 2.0], [41.0, 1.0, 2.0]]])  # (1, P, V)
    predictions = parse_predictions(summarise_logits(logits[0], 0.0, None).tolist(), [7, 8])
    assert logits[0].softmax(-1).max(-1).values.tolist() == [1.0, 1.0]
    assert predictions[8].confidence - predictions[7].confidence == pytest.approx(1.0)
    assert predictions[7].tokens == [0, 2]


def test_a_model_attends_to_both_sides_and_not_to_padding(model, shifted):
    ids = torch.tensor([MASKED_PROMPTS[2], MASKED_PROMPTS[2]])
    ids[1, -1] = 9
    logits = model.compute_logits(ids)
    assert (logits[..., MASK_TOKEN_ID] == -torch.inf).all()
    assert not torch.allclose(logits[0, 0, :MASK_TOKEN_ID], logits[1, 0, :MASK_TOKEN_ID])
    padded = torch.cat([ids, torch.zeros(2, 5, dtype=torch.long)], 1)
    is_token = (torch.arange(17) < 12).expand(2, -1)
    assert torch.allclose(model.compute_logits(padded, is_token)[:, :12], logits, atol=1e-5)
    selected = (torch.tensor([1, 0, 0]), torch.tensor([3, 11, 3]))
    assert torch.allclose(
        model.compute_logits(ids, output_indices=selected), logits[selected], atol=1e-5
    )
    unshifted = MaskedModel(shifted.model, None, MASK_TOKEN_ID, shifted=False)
    assert torch.allclose(
        shifted.compute_logits(ids)[:, 1:], unshifted.compute_logits(ids)[:, :-1], atol=1e-5
    )
