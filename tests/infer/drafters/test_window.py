"""Drafters whose layers all slide: their drafts along sequences that are much longer than their
cache."""

import random

import pytest
import torch
from transformers import Qwen3Config, Qwen3Model

from infer.attention.masks import build_training_mask
from infer.drafters.base import get_head_weight, limit_attention_window

CONTEXT_LENGTH = 400
WINDOW_POSITIONS = 9
MAX_ROUND_POSITIONS = 4


def fill_state(drafter, target, features, round_ends, **options):
    """Return a drafter's state after the features (B, T, F), in one or more rounds.

    `round_ends` are the numbers of positions of each batch row after each round.
    """
    state = drafter.allocate_state(len(features), CONTEXT_LENGTH, **options)
    lengths = [0] * len(features)

    def add_positions(ends, state):
        counts = [end - length for length, end in zip(lengths, ends, strict=True)]
        if max(counts) > 0:
            positions = torch.tensor(lengths)[:, None] + torch.arange(max(counts))
            positions = positions.clamp(max=CONTEXT_LENGTH - 1)
            indices = positions[..., None].expand(-1, -1, features.shape[2])
            drafter.update_context(target, features.gather(1, indices), positions, counts, state)
            lengths[:] = ends

    with state.add(len(features)) as new_rows:
        add_positions(round_ends[0], new_rows)
    for ends in round_ends[1:]:
        add_positions(ends, state)
    return state


def random_round_ends(final_ends):
    """Return the ends of rounds in which each batch row gets 0 to MAX_ROUND_POSITIONS positions,
    after a first round of 5."""
    rng = random.Random(0)
    round_ends = [[min(end, 5) for end in final_ends]]
    while round_ends[-1] != final_ends:
        next_ends = []
        for final_end, end in zip(final_ends, round_ends[-1], strict=True):
            next_ends.append(min(final_end, end + rng.randrange(MAX_ROUND_POSITIONS + 1)))
        round_ends.append(next_ends)
    return round_ends


def make_sliding_qwen3(drafter):
    """Return a transformers model of one sliding layer with the weights of a drafter's first."""
    names = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "rope_parameters",
    )
    config = Qwen3Config(
        num_hidden_layers=1,
        vocab_size=8,
        layer_types=["sliding_attention"],
        use_sliding_window=True,
        sliding_window=WINDOW_POSITIONS,
        **{name: getattr(drafter.config, name) for name in names},
    )
    model = Qwen3Model(config).eval()
    model.layers[0].load_state_dict(drafter.layers[0].state_dict())
    model.norm.load_state_dict(drafter.norm.state_dict())
    return model


def test_a_causal_sliding_layer_is_that_of_transformers(make_tiny):
    """transformers runs the layer over the context and the block with its own mask, and drops
    nothing."""
    target, drafter = make_tiny(layers=1, sliding_window=WINDOW_POSITIONS, causal=True)
    hidden_size = drafter.config.hidden_size
    with torch.no_grad():
        drafter.fc.weight.copy_(torch.eye(hidden_size))
        norm_weight = drafter.layers[0].input_layernorm.weight.uniform_(0.5, 2)
        drafter.hidden_norm.weight.copy_(norm_weight)
    model = make_sliding_qwen3(drafter)
    features = torch.randn(1, CONTEXT_LENGTH, hidden_size)
    bonus = torch.tensor([7])
    for length in (5, 60, 143, 320):
        state = fill_state(drafter, target, features, random_round_ends([length]))
        marginals = drafter.draft_block(target, bonus, state).marginals[0]

        block = target.embed(drafter.build_block_ids(bonus))
        inputs = torch.cat([features[:, :length], block], 1)
        with torch.no_grad():
            output = model(inputs_embeds=inputs)
            draft_states = output.last_hidden_state[0, length + 1 :]
            expected = target.compute_logits(draft_states).log_softmax(-1)
        assert (marginals - expected).abs().max() < 1e-5
        uniform = 1 / drafter.config.vocab_size
        assert (expected.exp() - uniform).abs().max() > 1e-5
    assert state.cache.capacity < CONTEXT_LENGTH / 2
    assert state.cache.evicted_counts[0] > 0


def test_drafts_do_not_depend_on_dropped_positions(make_tiny):
    """Batch rows of several lengths draft what the blocks in training draft: filled at once or
    round by round, with and without dropped positions, and after a row was removed."""
    target, drafter = make_tiny(sliding_window=WINDOW_POSITIONS)
    features = torch.randn(3, CONTEXT_LENGTH, drafter.fc.in_features)
    lengths = [333, 7, 150]
    bonus = torch.tensor([7, 8, 9])
    positions = torch.arange(CONTEXT_LENGTH).expand(3, -1)
    anchors = torch.tensor(lengths)[:, None]
    ids = (positions % drafter.config.vocab_size).scatter(1, anchors, bonus[:, None])
    mask = build_training_mask(anchors, torch.zeros_like(ids), 4, *drafter.attention_patterns[0])
    inputs = drafter.prepare_training_inputs(target, ids, positions, anchors)
    with torch.no_grad():
        states = drafter(features, positions, *inputs, mask)[:, 1:]
    expected = (states @ get_head_weight(drafter, target).T).log_softmax(-1)

    full_state = fill_state(drafter, target, features, [lengths], keep_all_positions=True)
    sliding_state = fill_state(drafter, target, features, random_round_ends(lengths))
    other_states = [fill_state(drafter, target, features, [lengths]), sliding_state]
    for state in (full_state, *other_states):
        for order in ([0, 1, 2], [0, 2]):
            state.keep(order)
            marginals = drafter.draft_block(target, bonus[order], state).marginals
            assert torch.equal(marginals.argmax(-1), expected[order].argmax(-1))
            assert (marginals - expected[order]).abs().max() < 1e-5
        drops = state is not full_state
        assert (state.cache.evicted_counts > 0).tolist() == [drops, drops, False]

    assert full_state.cache.capacity > CONTEXT_LENGTH
    assert sliding_state.cache.capacity < CONTEXT_LENGTH / 2
    assert sliding_state.cache.make_view(4).visible_end <= sliding_state.cache.capacity
    # One sequence reads the positions in its window and the block.
    sliding_state.keep([1])
    cache_window = sliding_state.cache.make_view(4)
    assert cache_window.visible_end - cache_window.visible_start == WINDOW_POSITIONS - 1 + 4


def test_a_window_can_be_set_after_training(make_tiny):
    """The drafter then drafts as one with this window and the same weights, and drops positions
    that left the window."""
    target, drafter = make_tiny()
    _, sliding_drafter = make_tiny(sliding_window=WINDOW_POSITIONS)
    sliding_drafter.load_state_dict(drafter.state_dict())
    features = torch.randn(1, CONTEXT_LENGTH, drafter.fc.in_features)
    bonus = torch.tensor([7])

    def draft_marginals(drafter, state):
        return drafter.draft_block(target, bonus, state).marginals

    full_state = fill_state(drafter, target, features, [[300]])
    without_window = draft_marginals(drafter, full_state)
    limit_attention_window(drafter, WINDOW_POSITIONS)
    state = fill_state(drafter, target, features, random_round_ends([300]))
    marginals = draft_marginals(drafter, state)
    expected = draft_marginals(
        sliding_drafter, fill_state(sliding_drafter, target, features, [[300]])
    )
    assert (marginals - expected).abs().max() < 1e-5
    assert (marginals - without_window).abs().max() > 1e-5
    assert state.cache.evicted_counts > 0
    with pytest.raises(
        ValueError, match="window=3: the window must be at least as long as a block; use 4 or more"
    ):
        limit_attention_window(drafter, 3)
