"""Warm starts from gated attention layers: exact where gates are constant and where only entries
that rotate contribute to attention."""

import pytest
import torch
from transformers import Qwen3_5TextConfig

from infer.config import DrafterConfig
from infer.drafters.build import create_drafter
from infer.drafters.warm_start import (
    compute_rotary_permutation,
    fold_mean_gates_into_weights,
    measure_mean_gates,
)
from infer.targets.support import get_attention_layer_ids

HEAD_SIZE = 32
ROTATING_ENTRIES = 8  # a quarter of a head rotates in Qwen3.5


@pytest.fixture(scope="module")
def target(random_target):
    """A random target with Qwen3.5's architecture; layers 1, 3 and 5 of six have attention."""
    config = Qwen3_5TextConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        layer_types=["linear_attention", "full_attention"] * 3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_SIZE,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        eos_token_id=None,
    )
    return random_target(config)


def create_random_drafter(target, **options):
    drafter = create_drafter(DrafterConfig(mask_token_id=96, block_size=4, **options), target)
    drafter.init_weights(torch.Generator().manual_seed(0))
    return drafter


def test_a_layer_without_gates_equals_one_with_constant_gates(target):
    target_layer = target.decoder.layers[3]
    with torch.no_grad():
        # Constant gates, and keys that are zero in the entries that do not rotate.
        query_projection = target_layer.self_attn.q_proj.weight
        query_projection.unflatten(0, (4, 2, HEAD_SIZE))[:, 1] = 0
        key_projection = target_layer.self_attn.k_proj.weight
        key_projection.unflatten(0, (2, HEAD_SIZE))[:, ROTATING_ENTRIES:] = 0
    drafter = create_random_drafter(target, layers=1)
    layer = drafter.layers[0]
    layer.load_state_dict(fold_mean_gates_into_weights(target_layer, target))

    states = torch.randn(1, 7, 64)
    positions = torch.arange(3, 10)[None]
    mask = torch.full((7, 7), -torch.inf).triu(1)[None, None]

    def attend(queries, keys, values):
        return torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=True
        )

    with torch.no_grad():
        target_output = target_layer(
            states,
            position_embeddings=target.decoder.rotary_emb(states, positions),
            attention_mask=mask,
        )
        if not isinstance(target_output, torch.Tensor):
            target_output = target_output[0]
        output = layer(states, drafter.compute_rotary(positions), attend)
    assert (output - target_output).norm() < 1e-6 * target_output.norm()


@pytest.mark.parametrize(
    ("layers", "expected_layers"), [(2, [3, 5]), (3, [1, 3, 5]), (4, [])], ids=str
)
def test_drafters_start_from_attention_layers(target, layers, expected_layers):
    assert get_attention_layer_ids(target.config) == [1, 3, 5]
    drafter = create_random_drafter(target, layers=layers, target_layer_ids=[1, 4])
    chosen_layers = drafter.choose_warm_start_layers(drafter.layer_ids, layers, target.config)
    assert chosen_layers == expected_layers
    assert drafter.warm_start(target) == bool(expected_layers)

    # Norms of Qwen3.5 multiply by one plus their weight.
    for layer, index in zip(drafter.layers, expected_layers, strict=False):
        target_layer = target.decoder.layers[index]
        assert torch.equal(layer.mlp.down_proj.weight, target_layer.mlp.down_proj.weight)
        norm_weight = 1 + target_layer.input_layernorm.weight
        assert torch.allclose(layer.input_layernorm.weight, norm_weight)
    if expected_layers:
        assert torch.allclose(drafter.norm.weight, 1 + target.decoder.norm.weight)
    # The target's rotary parameters describe positions of images too.
    rope_theta = target.config.rope_parameters["rope_theta"]
    expected_rope = {"rope_type": "default", "rope_theta": rope_theta}
    assert drafter.config.rope_parameters == expected_rope


def test_dart_starts_from_an_attention_layer(target):
    drafter = create_random_drafter(target, family="dart", layers=1)
    assert drafter.warm_start(target)


def test_mean_gates_differ_and_are_reproducible(target):
    gates = measure_mean_gates(target.decoder.layers[5], target)
    assert gates.shape == (4 * HEAD_SIZE,)
    assert 0.2 < gates.min() < gates.max() < 0.8
    assert gates.std() > 0.01
    assert torch.equal(gates, measure_mean_gates(target.decoder.layers[5], target))


def test_rotating_entries_keep_their_angles():
    # Four pairs rotate in the target: every fourth pair of the drafter.
    order = compute_rotary_permutation(HEAD_SIZE, 0.25)
    assert sorted(order.tolist()) == list(range(HEAD_SIZE))
    assert order[[0, 4, 8, 12]].tolist() == [0, 1, 2, 3]
    assert order[[16, 20, 24, 28]].tolist() == [4, 5, 6, 7]
    base = 1e4
    target_frequencies = base ** (-torch.arange(0, ROTATING_ENTRIES, 2) / ROTATING_ENTRIES)
    drafter_frequencies = base ** (-torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)
    assert torch.allclose(drafter_frequencies[::4], target_frequencies)
    assert compute_rotary_permutation(HEAD_SIZE, 0.3) is None
