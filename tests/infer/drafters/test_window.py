"""Drafters whose layers all slide: what they draft along a text that is much longer than their
memory."""

import random

import pytest
import torch
from transformers import Qwen3Config, Qwen3Model

from infer.attention.masks import block_mask
from infer.drafters.base import head_weight, narrow

LENGTH = 400
WINDOW = 9


def told(drafter, target, features, cuts, **options):
    """The drafter's memory of rows of features (B, T, F) that were taken in up to one list of ends
    after the other."""
    state = drafter.state(len(features), LENGTH, **options)
    begins = [0] * len(features)

    def take(ends, state):
        counts = [end - begin for begin, end in zip(begins, ends, strict=True)]
        if not any(counts):
            return
        places = (torch.tensor(begins)[:, None] + torch.arange(max(counts))).clamp(max=LENGTH - 1)
        part = features.gather(1, places[..., None].expand(-1, -1, features.shape[2]))
        drafter.update_context(target, part, places, counts, state)
        begins[:] = ends

    with state.add(len(features)) as rows:
        take(cuts[0], rows)
    for ends in cuts[1:]:
        take(ends, state)
    return state


def rounds(ends, most):
    """Lists of ends up to these, each row of a round at most so many positions further."""
    dice = random.Random(0)
    cuts = [[min(end, 5) for end in ends]]
    while cuts[-1] != ends:
        cuts.append(
            [
                min(end, last + dice.randrange(most + 1))
                for end, last in zip(ends, cuts[-1], strict=True)
            ]
        )
    return cuts


def test_a_causal_layer_is_transformers_own_sliding_one(make_tiny):
    """Its layer over the context's states and the block's embeddings, under its own mask, with
    nothing forgotten."""
    target, drafter = make_tiny(layers=1, sliding_window=WINDOW, causal=True)
    layer = drafter.layers[0]
    size = drafter.config.hidden_size
    with torch.no_grad():
        drafter.fc.weight.copy_(torch.eye(size))
        drafter.hidden_norm.weight.copy_(layer.input_layernorm.weight.uniform_(0.5, 2))
    keys = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    sizes = {
        key: getattr(drafter.config, key) for key in (*keys, "rms_norm_eps", "rope_parameters")
    }
    sliding = {
        "layer_types": ["sliding_attention"],
        "use_sliding_window": True,
        "sliding_window": WINDOW,
    }
    model = Qwen3Model(Qwen3Config(num_hidden_layers=1, vocab_size=8, **sizes, **sliding)).eval()
    model.layers[0].load_state_dict(layer.state_dict())
    model.norm.load_state_dict(drafter.norm.state_dict())
    features = torch.randn(1, LENGTH, size)
    bonus = torch.tensor([7])
    for cut in (5, 60, 143, 320):
        state = told(drafter, target, features, rounds([cut], 4))
        block = target.embed(drafter.block_ids(bonus))
        with torch.no_grad():
            theirs = model(
                inputs_embeds=torch.cat([features[:, :cut], block], 1)
            ).last_hidden_state[0, cut + 1 :]
            expected = target.head(theirs).log_softmax(-1)
        found = drafter.draft_block(target, bonus, state).marginals[0]
        assert (found - expected).abs().max() < 1e-5 < (expected.exp() - 1 / 97).abs().max()
    assert state.cache.capacity < LENGTH / 2 and state.cache.forgotten[0] > 0


def test_drafts_do_not_depend_on_what_is_forgotten_and_when(make_tiny):
    """Rows of several lengths, taken in at once or round by round, kept whole or not, and one that
    another moves up
    for: the drafts are those of the training's blocks."""
    target, drafter = make_tiny(sliding_window=WINDOW)
    features = torch.randn(3, LENGTH, drafter.fc.in_features)
    ends = [333, 7, 150]
    bonus = torch.tensor([7, 8, 9])
    positions = torch.arange(LENGTH).expand(3, -1)
    ids = positions.clone()
    anchors = torch.tensor(ends)[:, None]
    ids.scatter_(1, anchors, bonus[:, None])
    mask = block_mask(anchors, torch.zeros_like(ids), 4, *drafter.attention_patterns[0])
    with torch.no_grad():
        states = drafter(
            features, positions, *drafter.inputs(target, ids % 97, positions, anchors), mask
        )[:, 1:]
    expected = (states @ head_weight(drafter, target).T).log_softmax(-1)
    whole = told(drafter, target, features, [ends], whole=True)
    for state in (
        whole,
        told(drafter, target, features, [ends]),
        told(drafter, target, features, rounds(ends, 4)),
    ):
        for order in ([0, 1, 2], [0, 2]):
            state.keep(order)
            found = drafter.draft_block(target, bonus[order], state).marginals
            assert torch.equal(found.argmax(-1), expected[order].argmax(-1))
            assert (found - expected[order]).abs().max() < 1e-5
        assert (state.cache.forgotten > 0).tolist() == [state is not whole] * 2 + [False]
    assert whole.cache.capacity > LENGTH > 2 * state.cache.capacity
    assert state.cache.window(4).extent <= state.cache.capacity
    state.keep([1])
    assert (
        state.cache.window(4).extent - state.cache.window(4).first == WINDOW - 1 + 4
    )  # columns that one text reads


def test_a_trained_drafter_is_given_a_window(make_tiny):
    """It then drafts as one that was trained with it and has its weights, and forgets what is
    beyond."""
    (target, drafter), (_, sliding) = make_tiny(), make_tiny(sliding_window=WINDOW)
    sliding.load_state_dict(drafter.state_dict())
    features = torch.randn(1, LENGTH, drafter.fc.in_features)
    bonus = torch.tensor([7])
    before = drafter.draft_block(target, bonus, told(drafter, target, features, [[300]])).marginals
    narrow(drafter, WINDOW)
    state = told(drafter, target, features, rounds([300], 4))
    found = drafter.draft_block(target, bonus, state).marginals
    expected = sliding.draft_block(
        target, bonus, told(sliding, target, features, [[300]])
    ).marginals
    assert (found - expected).abs().max() < 1e-5 < (
        found - before
    ).abs().max() and state.cache.forgotten > 0
    with pytest.raises(ValueError, match="window=3: at least a block, 4"):
        narrow(drafter, 3)
