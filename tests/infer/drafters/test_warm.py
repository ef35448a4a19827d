"""Warm starts from gated attention layers: exact where gates are constant and all that attends
rotates."""

import pytest
import torch
from transformers import Qwen3_5TextConfig

from infer.config import DrafterConfig
from infer.drafters.base import new_drafter
from infer.drafters.warm import openness, plain_order, plain_weights
from infer.targets.support import attention_layers


@pytest.fixture(scope="module")
def target(random_target):
    """Qwen3.5's shape: layers 1, 3 and 5 of six attend, a quarter of a head rotates."""
    config = Qwen3_5TextConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        layer_types=["linear_attention", "full_attention"] * 3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        eos_token_id=None,
    )
    return random_target(config)


def drafter_of(target, **options):
    drafter = new_drafter(DrafterConfig(mask_token_id=96, block_size=4, **options), target)
    drafter.init_weights(torch.Generator().manual_seed(0))
    return drafter


def test_a_plain_layer_is_the_gated_one_where_it_can_be(target):
    layer = target.body.layers[3]
    size = 32
    with torch.no_grad():  # constant gates, and keys whose entries that stand still are nothing
        layer.self_attn.q_proj.weight.unflatten(0, (4, 2, size))[:, 1] = 0
        layer.self_attn.k_proj.weight.unflatten(0, (2, size))[:, 8:] = 0
    drafter = drafter_of(target, layers=1)
    ours = drafter.layers[0]
    ours.load_state_dict(plain_weights(layer, target))
    states = torch.randn(1, 7, 64)
    positions = torch.arange(3, 10)[None]
    angles = target.body.rotary_emb(states, positions)
    mask = torch.full((7, 7), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        theirs = layer(states, position_embeddings=angles, attention_mask=mask)
        theirs = theirs if isinstance(theirs, torch.Tensor) else theirs[0]
        attend = torch.nn.functional.scaled_dot_product_attention
        mine = ours(
            states,
            drafter.angles(positions),
            lambda q, k, v: attend(q, k, v, is_causal=True, enable_gqa=True),
        )
    assert (mine - theirs).norm() < 1e-6 * theirs.norm()


def test_drafters_start_from_the_layers_that_attend(target):
    assert attention_layers(target.config) == [1, 3, 5]
    for options, chosen in (
        ({"layers": 2}, [3, 5]),
        ({"layers": 3}, [1, 3, 5]),
        ({"layers": 4}, []),
    ):
        drafter = drafter_of(target, **options, target_layer_ids=[1, 4])
        assert drafter.warm_layers(drafter.layer_ids, options["layers"], target.config) == chosen
        assert drafter.warm_start(target) == bool(chosen)
        for layer, source in zip(drafter.layers, chosen, strict=False):
            assert torch.equal(
                layer.mlp.down_proj.weight, target.body.layers[source].mlp.down_proj.weight
            )
            expected = 1 + target.body.layers[source].input_layernorm.weight
            assert torch.allclose(layer.input_layernorm.weight, expected)
        if chosen:
            assert torch.allclose(drafter.norm.weight, 1 + target.body.norm.weight)
        theta = target.config.rope_parameters["rope_theta"]  # of positions in three parts
        assert drafter.config.rope_parameters == {"rope_type": "default", "rope_theta": theta}


def test_dart_starts_from_a_layer_that_attends(target):
    drafter = drafter_of(target, family="dart", layers=1)
    assert drafter.warm_start(target)


def test_gates_are_taken_at_their_average(target):
    gates = openness(target.body.layers[5], target)
    assert gates.shape == (4 * 32,) and 0.2 < gates.min() < gates.max() < 0.8
    assert gates.std() > 0.01 and torch.equal(gates, openness(target.body.layers[5], target))


def test_entries_that_rotate_keep_their_angles():
    order = plain_order(32, 0.25)  # four pairs, one in four of ours
    assert sorted(order.tolist()) == list(range(32))
    assert order[[0, 4, 8, 12]].tolist() == [0, 1, 2, 3] and order[[16, 20, 24, 28]].tolist() == [
        4,
        5,
        6,
        7,
    ]
    base = 1e4
    theirs = base ** (-torch.arange(0, 8, 2) / 8)
    ours = base ** (-torch.arange(0, 32, 2) / 32)
    assert torch.allclose(ours[::4], theirs)
    assert plain_order(32, 0.3) is None
