"""Drafters in the layouts that others publish: written here by hand, they have the logits of a
plain forward pass, also written here, decode losslessly, and whatever is wrong with them is
named."""

import json
import os
import re
from copy import deepcopy
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from infer import generate, load_drafter, save_drafter
from infer.drafters.base import get_head_weight
from infer.drafters.blocks import compute_packed_block_states
from infer.drafters.families import DRAFTER_FAMILIES
from infer.drafters.heads.draft import teacher_forced_log_probs
from infer.formats.folders import DrafterFolder
from infer.formats.layouts import parse_drafter_config

# of `make_tiny`'s targets
D = 32
V = 97
NUM_HEADS = 4
NUM_KEY_VALUE_HEADS = 2
E = 8
TARGET_LAYER_COUNT = 6
BLOCK_SIZE = 5
MASK_TOKEN_ID = 96
FEATURE_LAYER_IDS = [1, 4]
QWEN3_SIZES = {
    "hidden_size": D,
    "intermediate_size": 48,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KEY_VALUE_HEADS,
    "head_dim": E,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "vocab_size": V,
}


def make_weights(seed: int, **shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Random float64 weights: matrices small, vectors (norms) around one. Names have __ for
    dots."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        tensor = torch.randn(shape, generator=generator, dtype=torch.float64)
        weights[name.replace("__", ".")] = tensor * 0.2 + (
            1.0 if len(shape) == 1 and "mask" not in name else 0.0
        )
    return weights


def layer_shapes(inputs: int, norms: bool = True) -> dict[str, tuple[int, ...]]:
    shapes = {
        "input_layernorm__weight": (D,),
        "post_attention_layernorm__weight": (D,),
        "self_attn__q_proj__weight": (NUM_HEADS * E, inputs),
        "self_attn__k_proj__weight": (NUM_KEY_VALUE_HEADS * E, inputs),
        "self_attn__v_proj__weight": (NUM_KEY_VALUE_HEADS * E, inputs),
        "self_attn__o_proj__weight": (D, NUM_HEADS * E),
        "mlp__gate_proj__weight": (48, D),
        "mlp__up_proj__weight": (48, D),
        "mlp__down_proj__weight": (D, 48),
    }
    return shapes | (
        {"self_attn__q_norm__weight": (E,), "self_attn__k_norm__weight": (E,)} if norms else {}
    )


def dflash_weights(layers: int = 2, **more: tuple[int, ...]) -> dict[str, torch.Tensor]:
    shapes = {
        "fc__weight": (D, len(FEATURE_LAYER_IDS) * D),
        "hidden_norm__weight": (D,),
        "norm__weight": (D,),
    }
    for i in range(layers):
        shapes |= {f"layers__{i}__{name}": shape for name, shape in layer_shapes(D).items()}
    return make_weights(1, **shapes, **more)


def dart_weights(rows: int) -> dict[str, torch.Tensor]:
    shapes = {
        f"midlayer__{name}": shape for name, shape in layer_shapes(2 * D, norms=False).items()
    }
    shapes |= {"midlayer__hidden_norm__weight": (D,), "midlayer__mask_rep": (2 * D,)}
    return make_weights(
        2, **shapes, fc__weight=(D, 3 * D), norm__weight=(D,), lm_head__weight=(rows, D)
    )


def make_draft_vocabulary(rows: int) -> dict[str, torch.Tensor]:
    """t2d and d2t of `rows` of the tokens."""
    tokens = torch.randperm(V, generator=torch.Generator().manual_seed(4))[:rows].sort().values
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[tokens] = True
    return {"t2d": t2d, "d2t": tokens - torch.arange(rows)}


def make_public_config(**changes: object) -> dict:
    """config.json of the public DFlash layout."""
    config = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "block_size": BLOCK_SIZE,
        "dflash_config": {"mask_token_id": MASK_TOKEN_ID, "target_layer_ids": FEATURE_LAYER_IDS},
        "num_target_layers": TARGET_LAYER_COUNT,
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        **QWEN3_SIZES,
        **changes,
    }
    return {key: value for key, value in config.items() if value is not None}


def make_deepspec_config(**changes: object) -> dict:
    """config.json of DeepSpec's DFlash drafters."""
    dflash_keys = {
        "mask_token_id": MASK_TOKEN_ID,
        "target_layer_ids": FEATURE_LAYER_IDS,
        "markov_rank": 0,
    }
    return make_public_config(
        architectures=["Qwen3DSparkModel"],
        dflash_config=None,
        auto_map=None,
        **dflash_keys | changes,
    )


def make_speculators_config(**changes: object) -> dict:
    layer_config = {
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2,
        **QWEN3_SIZES,
    }
    layer_config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": BLOCK_SIZE - 1}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "x/y", "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformer_layer_config": layer_config,
        "draft_vocab_size": V,
        "block_size": BLOCK_SIZE,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in FEATURE_LAYER_IDS],
        "mask_token_id": MASK_TOKEN_ID,
        **changes,
    }


def make_dart_config(rows: int, **changes: object) -> dict:
    keys = {
        "architectures": ["LlamaForCausalLMDart"],
        "model_type": "llama",
        "num_hidden_layers": 1,
    }
    return (
        keys
        | {"draft_length": 3, "draft_vocab_size": rows, "rope_scaling": None}
        | QWEN3_SIZES
        | changes
    )


def test_a_layer_count_that_counts_taps_is_not_believed(tmp_path):
    """TorchSpec's and AngelSpec's folders, whose first slot drafts nothing, but DSpark's."""
    for layer_count in (len(FEATURE_LAYER_IDS), TARGET_LAYER_COUNT):
        reading = parse_drafter_config(
            DrafterFolder(tmp_path, make_public_config(num_target_layers=layer_count), {}, []),
            TARGET_LAYER_COUNT,
        )
        assert (
            reading.config_kwargs["num_target_layers"] == TARGET_LAYER_COUNT
            and not reading.problems
        )
    counts = {
        "num_target_layers": len(FEATURE_LAYER_IDS),
        "target_num_hidden_layers": TARGET_LAYER_COUNT,
    }
    for name, kind, more in (
        ("DFlash", "dflash", {"model_arch": "dflash"}),
        ("DSpark", "dspark", {"markov_rank": 4}),
    ):
        config = (
            make_deepspec_config(model_type=kind, **counts)
            | {"architectures": [f"{name}DraftModel"]}
            | more
        )
        reading = parse_drafter_config(
            DrafterFolder(tmp_path, config, {"context_proj.weight": None}, [])
        )
        assert (reading.layout_name, reading.problems, reading.warnings) == ("TorchSpec", [], [])
        assert reading.renamed_tensors == {"context_proj.weight": "fc.weight"}
        assert reading.config_kwargs["num_target_layers"] == TARGET_LAYER_COUNT
        assert bool(reading.family_config.get("sample_from_anchor")) == (name == "DSpark")


def write_layout(folder: Path, config: dict, weights: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


def reference_rms_norm(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return states / (states.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def reference_rotate(states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions with base 10000 to (T, H, E)."""
    angles = positions[:, None].double() * 10000.0 ** (-torch.arange(0, E, 2).double() / E)
    cos = angles.cos()[:, None]
    sin = angles.sin()[:, None]
    low, high = states.chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def reference_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor
) -> torch.Tensor:
    """Softmax attention of (Q, H, E) over (S, H', E), both sides rotated: (Q, H * E)."""
    k, v = (x.repeat_interleave(NUM_HEADS // NUM_KEY_VALUE_HEADS, 1) for x in (k, v))
    scores = torch.einsum("qhe,khe->hqk", q, k) / E**0.5
    return torch.einsum(
        "hqk,khe->qhe", scores.masked_fill(~allowed, -torch.inf).softmax(-1), v
    ).flatten(1)


def reference_mlp(w: dict, states: torch.Tensor) -> torch.Tensor:
    gate = states @ w["mlp.gate_proj.weight"].T
    up = states @ w["mlp.up_proj.weight"].T
    return (torch.nn.functional.silu(gate) * up) @ w["mlp.down_proj.weight"].T


def select_layer_weights(weights: dict, prefix: str) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in weights.items()
        if name.startswith(prefix)
    }


def reference_convolutions(w: dict, name: str, states: torch.Tensor, sublayer) -> torch.Tensor:
    """DFlash 2's convolutions around a sublayer, if there are any, entry by entry: states
    (BLOCK_SIZE, D), normalised."""
    if f"{name}.base_kernel" not in w:
        return sublayer(states)
    delta = (
        (states @ w[f"{name}.kernel_projection.weight"].T)
        .view(BLOCK_SIZE, 2, 2, -1)
        .repeat_interleave(16, -1)
    )
    kernel = w[f"{name}.base_kernel"] + delta  # (BLOCK_SIZE, side, tap, D)

    def convolve(x: torch.Tensor, side: int) -> torch.Tensor:
        return torch.stack(
            [
                sum(kernel[t, side, o] * x[t - o] for o in range(min(2, t + 1)))
                for t in range(BLOCK_SIZE)
            ]
        )

    return convolve(sublayer(convolve(states, 0)), 1)


def reference_dflash(
    weights: dict,
    target,
    features,
    bonus: int,
    views: list[tuple[bool, int | None]],
    raw: bool = False,
) -> torch.Tensor:
    """States (BLOCK_SIZE, D) behind the last norm, or before it, of a block after features (T, K *
    D), by the layout's description."""
    context = reference_rms_norm(features @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    embedding = weights.get("embed_tokens.weight", target.embedding.weight)
    block = embedding[torch.tensor([bonus] + [MASK_TOKEN_ID] * (BLOCK_SIZE - 1))]
    length = len(context)
    keys_at = torch.arange(length + BLOCK_SIZE)
    queries_at = keys_at[length:]
    distance = queries_at[:, None] - keys_at
    for i, (causal, window) in enumerate(views):
        w = select_layer_weights(weights, f"layers.{i}.")
        allowed = torch.ones_like(distance, dtype=torch.bool)
        if causal:
            allowed &= distance >= 0
        if window:
            allowed &= distance.abs() < window

        def attention(states: torch.Tensor, w=w, allowed=allowed) -> torch.Tensor:
            both = torch.cat([context, states])
            q = (states @ w["self_attn.q_proj.weight"].T).unflatten(-1, (-1, E))
            k = (both @ w["self_attn.k_proj.weight"].T).unflatten(-1, (-1, E))
            v = (both @ w["self_attn.v_proj.weight"].T).unflatten(-1, (-1, E))
            q = reference_rotate(reference_rms_norm(q, w["self_attn.q_norm.weight"]), queries_at)
            k = reference_rotate(reference_rms_norm(k, w["self_attn.k_norm.weight"]), keys_at)
            return reference_attention(q, k, v, allowed) @ w["self_attn.o_proj.weight"].T

        block = block + reference_convolutions(
            w, "attention_conv", reference_rms_norm(block, w["input_layernorm.weight"]), attention
        )
        states = reference_rms_norm(block, w["post_attention_layernorm.weight"])
        block = block + reference_convolutions(w, "mlp_conv", states, partial(reference_mlp, w))
    return block if raw else reference_rms_norm(block, weights["norm.weight"])


def reference_dart(
    weights: dict, target, features, following: torch.Tensor, masks: int
) -> torch.Tensor:
    """Logits (masks + 1, rows) of DART's published inference code, as FORMATS.md describes it."""
    w = select_layer_weights(weights, "midlayer.")
    projected = features @ weights["fc.weight"].T
    embedded = reference_rms_norm(target.embedding.weight[following], w["input_layernorm.weight"])
    items = torch.cat([embedded, reference_rms_norm(projected, w["hidden_norm.weight"])], -1)
    items = torch.cat([items, w["mask_rep"].expand(masks, -1)])
    residual = torch.cat([projected, w["mask_rep"][:D].expand(masks, -1)])
    at = torch.arange(len(items))
    q, k, v = (
        (items @ w[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, E)) for name in "qkv"
    )
    mixed = reference_attention(
        reference_rotate(q, at), reference_rotate(k, at), v, at[:, None] >= at
    )
    states = residual + mixed @ w["self_attn.o_proj.weight"].T
    states = (
        states + reference_mlp(w, reference_rms_norm(states, w["post_attention_layernorm.weight"]))
    )[-masks - 1 :]
    return (
        reference_rms_norm(
            reference_rms_norm(states, weights["norm.weight"]), weights["norm.weight"]
        )
        @ weights["lm_head.weight"].T
    )


def expand_to_vocabulary(drafter, log_probs: torch.Tensor) -> torch.Tensor:
    return drafter.vocabulary.expand_to_full(log_probs).double()


def scatter_log_probs(logits: torch.Tensor, d2t: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of a draft vocabulary, (L, rows), among all tokens, (L, V)."""
    out = torch.full((len(logits), V), -torch.inf, dtype=logits.dtype)
    for row, offset in enumerate(d2t.tolist()):
        out[:, row + offset] = logits.log_softmax(-1)[:, row]
    return out


CONTEXT_IDS = torch.randint(
    90, (14,), generator=torch.Generator().manual_seed(9)
)  # the last one is the bonus token


def draft_marginals(target, drafter, fixed: int = 0) -> torch.Tensor:
    """Marginals (L, V) behind CONTEXT_IDS, its context taken in in two pieces."""
    features = extract_features(target, drafter.layer_ids)[None]
    state = drafter.allocate_state(1, 40)
    with state.add(1) as row:
        drafter.update_context(target, features[:, :5], CONTEXT_IDS[None, :5], [5], row)
    drafter.update_context(
        target, features[:, 5:], CONTEXT_IDS[None, 5:-1], [len(CONTEXT_IDS) - 6], state
    )
    with state.cache.fix_batch_size(fixed):
        return expand_to_vocabulary(
            drafter, drafter.draft_block(target, CONTEXT_IDS[-1:], state).marginals[0]
        )


def extract_features(target, layers) -> torch.Tensor:
    with torch.no_grad():
        states = target.model(CONTEXT_IDS[None, :-1], output_hidden_states=True).hidden_states
    return torch.cat([states[layer + 1][0] for layer in layers], -1)


DFLASH_KEYS = {"mask_token_id": MASK_TOKEN_ID, "target_layer_ids": FEATURE_LAYER_IDS}
FULL_ATTENTION = [(False, None)] * 2
CAUSAL_ATTENTION = [(True, None)] * 2
EMBEDDING_AND_HEAD_SHAPES = {"embed_tokens__weight": (V, D), "lm_head__weight": (V, D)}
MIXED_WINDOW_KEYS = {
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 7,
}
# config.json, what its layers see, the first slot that drafts, and whether embedding and head are
# stored
LAYOUT_CASES = {
    "full": (make_public_config(), FULL_ATTENTION, 1, {}),
    # The sliding layer is causal inside the block; its window reaches 3 to 7 context positions.
    "sliding": (
        make_public_config(
            dflash_config=DFLASH_KEYS | {"block_size": BLOCK_SIZE},
            block_size=None,
            **MIXED_WINDOW_KEYS,
        ),
        [(True, 7), (False, None)],
        1,
        {},
    ),
    "causal": (
        make_public_config(dflash_config=DFLASH_KEYS | {"causal": True}),
        CAUSAL_ATTENTION,
        1,
        {},
    ),
    "jetspec": (
        make_public_config(
            dflash_config=DFLASH_KEYS | {"causal_head": True}, use_cache=True, dtype="bfloat16"
        ),
        CAUSAL_ATTENTION,
        1,
        {},
    ),
    "nemo": (
        make_public_config(architectures=["Qwen3DFlashDraftModel"], is_causal=False, auto_map=None),
        FULL_ATTENTION,
        1,
        {},
    ),
    "own ends": (make_public_config(), FULL_ATTENTION, 1, EMBEDDING_AND_HEAD_SHAPES),
    "deepspec": (
        make_deepspec_config(),
        FULL_ATTENTION,
        0,
        EMBEDDING_AND_HEAD_SHAPES,
    ),  # the bonus token's slot drafts too
    "speculators": (make_speculators_config(), FULL_ATTENTION, 1, EMBEDDING_AND_HEAD_SHAPES),
    "pruned speculators": (
        make_speculators_config(draft_vocab_size=20),
        FULL_ATTENTION,
        1,
        EMBEDDING_AND_HEAD_SHAPES | {"lm_head__weight": (20, D)},
    ),
    "dart": (make_dart_config(20), [], 0, {}),
}


def write_layout_case(kind: str, folder: Path, target) -> tuple[Path, torch.Tensor]:
    """A folder of some layout, and the marginals (L, V) that its drafter must have behind IDS."""
    config, views, first, ends = LAYOUT_CASES[kind]
    map = make_draft_vocabulary(20) if kind in ("dart", "pruned speculators") else {}
    if kind == "dart":
        weights = dart_weights(20)
        logits = reference_dart(
            weights, target, extract_features(target, [1, 2, 2]), CONTEXT_IDS[1:], masks=3
        )  # 1, N // 2 - 1, N - 4
    else:
        weights = dflash_weights(**ends)
        states = reference_dflash(
            weights,
            target,
            extract_features(target, FEATURE_LAYER_IDS),
            int(CONTEXT_IDS[-1]),
            views,
        )[first:]
        logits = states @ weights.get("lm_head.weight", target.head_weight).T
    expected = scatter_log_probs(logits, map["d2t"]) if map else logits.log_softmax(-1)
    return write_layout(folder, config, weights | map), expected


FOLLOWING_IDS = torch.randint(
    90, (BLOCK_SIZE,), generator=torch.Generator().manual_seed(10)
)  # the tokens behind the bonus token
# rank of a head, entries of a GRU
R = 6
S = 10
HEAD_SHAPES = {  # of the heads' tensors
    "vanilla": {"markov_head__markov_w1__weight": (V, R), "markov_head__markov_w2__weight": (V, R)},
    "selector": {
        "candidate_selector__predecessor_codebook": (V, R),
        "candidate_selector__successor_codebook": (V, R),
        "candidate_selector__hidden_projection__weight": (R, D),
    },
    "swiglu": {
        "ar_approximation__ug__weight": (96, 2 * D),
        "ar_approximation__ug__bias": (96,),
        "ar_approximation__d__weight": (D, 48),
        "ar_approximation__norm__weight": (D,),
    },
    "gru": {
        "prefix_gru__weight_ih_l0": (3 * S, D),
        "prefix_gru__weight_hh_l0": (3 * S, S),
        "embed_proj__0__weight": (R, D + S),
        "embed_proj__2__weight": (V, R),
    },
}
HEAD_SHAPES["gated"] = HEAD_SHAPES["vanilla"] | {
    "markov_head__gate_proj__weight": (R, D + R),
    "markov_head__gate_proj__bias": (R,),
}
HEAD_SHAPES["rnn"] = HEAD_SHAPES["vanilla"] | {
    "markov_head__joint_proj__weight": (3 * R, 2 * R + D),
    "markov_head__joint_proj__bias": (3 * R,),
}
CONVOLUTION_SHAPES = {
    f"layers__{i}__{name}__{tensor}": shape
    for i in range(2)
    for name in ("attention_conv", "mlp_conv")
    for tensor, shape in {
        "base_kernel": (2, 2, D),
        "kernel_projection__weight": (2 * 2 * D // 16, D),
    }.items()
}
CONFIDENCE_HEAD_SHAPES = {
    "confidence_head__proj__weight": (1, D + R),
    "confidence_head__proj__bias": (1,),
}


def reference_head_logits(
    head: str, w: dict, target, states: torch.Tensor, path: list[int], unary: torch.Tensor
):
    """Logits (V,) of the slot behind `path`, which begins with the bonus token, as HEADS.md has
    them: states (L, D) of the drafted slots, its logits `unary` without the head."""
    h = states[len(path) - 1]
    x = path[-1]
    if head == "vanilla":
        return unary + w["markov_head.markov_w2.weight"] @ w["markov_head.markov_w1.weight"][x]
    if head == "gated":
        e = w["markov_head.markov_w1.weight"][x]
        gate = (
            w["markov_head.gate_proj.weight"] @ torch.cat([h, e]) + w["markov_head.gate_proj.bias"]
        )
        return unary + w["markov_head.markov_w2.weight"] @ (gate.sigmoid() * e)
    if head == "rnn":
        s = torch.zeros(R).double()
        for slot, token in enumerate(path):
            z = torch.cat([s, w["markov_head.markov_w1.weight"][token], states[slot]])
            g, c, o = (
                w["markov_head.joint_proj.weight"] @ z + w["markov_head.joint_proj.bias"]
            ).view(3, R)
            s = g.sigmoid() * s + (1 - g.sigmoid()) * c.tanh()
        return unary + w["markov_head.markov_w2.weight"] @ o.tanh()
    if head == "selector":
        a = w["candidate_selector.predecessor_codebook"][x]
        b = w["candidate_selector.successor_codebook"]
        scores = unary + b @ (a * (w["candidate_selector.hidden_projection.weight"] @ h))
        return scores.masked_fill(unary < unary.topk(7).values[-1], -torch.inf)
    s = torch.zeros(S).double()
    for token in target.embedding.weight[torch.tensor(path)]:
        r, z, n = (w["prefix_gru.weight_ih_l0"] @ token).view(3, S)
        hr, hz, hn = (w["prefix_gru.weight_hh_l0"] @ s).view(3, S)
        r = (r + hr).sigmoid()
        z = (z + hz).sigmoid()
        s = (1 - z) * (n + r * hn).tanh() + z * s
    inner = torch.nn.functional.silu(w["embed_proj.0.weight"] @ torch.cat([h, s]))
    return unary + (w["embed_proj.2.weight"] @ inner) * (len(path) > 1)  # pure_draft_prefix_len 1


class HeadLayout(NamedTuple):
    """A folder with a conditional head: config.json, shapes of the tensors besides DFlash's, what
    the layers see, and the first slot that drafts."""

    config: dict
    shapes: dict[str, tuple[int, ...]]
    attention: list[tuple[bool, int | None]] = FULL_ATTENTION
    first_draft_slot: int = 0


def make_dspark_layout(kind: str, head: str) -> HeadLayout:
    """Return a layout of a Markov head: DeepSpec's, SpecForge's, or that of speculators."""
    markov_keys = {"markov_rank": R, "markov_head_type": head}
    shapes = HEAD_SHAPES[head] | CONFIDENCE_HEAD_SHAPES
    if kind.startswith("DeepSpec"):
        config = make_deepspec_config(
            **markov_keys,
            enable_confidence_head=True,
            confidence_head_with_markov=True,
            num_anchors=512,
            confidence_head_alpha=1.0,
        )
        return HeadLayout(config, shapes | EMBEDDING_AND_HEAD_SHAPES)
    if kind.startswith("SpecForge"):
        dflash_keys = DFLASH_KEYS | markov_keys
        dflash_keys |= {"projector_type": "dspark", "attention_mode": "gqa"}
        # that there is a confidence head is known from its tensors
        dflash_keys |= {"confidence_head_alpha": 1.0, "confidence_head_with_markov": True}
        config = make_public_config(
            architectures=["DSparkDraftModel"], dflash_config=dflash_keys, markov_rank=R
        )
        return HeadLayout(config, shapes)
    is_plain = head == "vanilla"
    config = make_speculators_config(
        **markov_keys,
        speculators_model_type="dspark",
        confidence_head_with_markov=False,
        sample_from_anchor=not is_plain,
    )
    shapes = shapes | {"confidence_head__proj__weight": (1, D)}
    return HeadLayout(config, shapes, first_draft_slot=int(is_plain))


def make_domino_layout() -> HeadLayout:
    dflash_keys = DFLASH_KEYS | {
        "projector_type": "domino",
        "emb_dim": R,
        "gru_hidden_dim": S,
        "pure_draft_prefix_len": 1,
        "shift_label": True,
    }
    config = make_public_config(
        architectures=["DominoDraftModel"], dflash_config=dflash_keys, emb_dim=R
    )
    return HeadLayout(config, HEAD_SHAPES["gru"])


def make_selector_layout(kind: str) -> HeadLayout:
    shapes = HEAD_SHAPES["selector"] | CONVOLUTION_SHAPES
    selector_keys = {"selector_rank": R, "selector_top_k": 7}
    if kind.startswith("speculators"):
        # speculators' defaults are convolutions of 2 and 16
        config = make_speculators_config(speculators_model_type="dflash2", **selector_keys)
        return HeadLayout(config, shapes, first_draft_slot=1)
    dflash_keys = DFLASH_KEYS | selector_keys
    dflash_keys |= {"block_size": BLOCK_SIZE, "conv_kernel_size": 2, "conv_group_size": 16}
    config = make_public_config(
        architectures=["DFlash2DraftModel"],
        dflash_config=dflash_keys,
        block_size=None,
        use_sliding_window=True,
        sliding_window=7,
        layer_types=["sliding_attention"] * 2,
    )
    config["is_causal"] = False  # sliding layers that are not causal
    return HeadLayout(config, shapes, attention=[(False, 7)] * 2, first_draft_slot=1)


def make_treeflash_layout() -> HeadLayout:
    config = make_public_config(
        architectures=["TreeFlashDraftModel"],
        dflash_config=DFLASH_KEYS,
        treeflash_config={"ar_approximation": "swiglu", "candidate_tokens": 16},
    )
    return HeadLayout(config, HEAD_SHAPES["swiglu"], first_draft_slot=1)


def reference_treeflash_logits(
    w: dict, target, state: torch.Tensor, previous: int, lm_head: torch.Tensor
) -> torch.Tensor:
    """Return the logits (V,) of TreeFlash's step: state (D,) of a slot before the last norm, after
    the token `previous`."""
    embedding = target.embedding.weight[previous]
    embedded = reference_rms_norm(embedding, w["ar_approximation.norm.weight"])
    inputs = torch.cat([embedded, reference_rms_norm(state, w["norm.weight"])])
    projected = w["ar_approximation.ug.weight"] @ inputs + w["ar_approximation.ug.bias"]
    up, gate = projected.view(2, 48)
    step = w["ar_approximation.d.weight"] @ (torch.nn.functional.silu(gate) * up)
    return lm_head @ reference_rms_norm(state + step, w["norm.weight"])


def write_head_case(kind: str, folder: Path, target) -> tuple[Path, torch.Tensor]:
    """Write a folder with a conditional head. Return it, and the log-probabilities (L, V) after the
    bonus token and the first tokens of FOLLOWING_IDS."""
    head = kind.split()[-1]
    if head == "gru":
        layout = make_domino_layout()
    elif head == "selector":
        layout = make_selector_layout(kind)
    elif head == "swiglu":
        layout = make_treeflash_layout()
    else:
        layout = make_dspark_layout(kind, head)

    path = [int(CONTEXT_IDS[-1]), *FOLLOWING_IDS.tolist()]
    features = extract_features(target, FEATURE_LAYER_IDS)
    weights = dflash_weights(**layout.shapes)
    is_treeflash = head == "swiglu"
    states = reference_dflash(
        weights, target, features, path[0], layout.attention, raw=is_treeflash
    )
    states = states[layout.first_draft_slot :]
    lm_head = weights.get("lm_head.weight", target.head_weight)
    logits = []
    for slot, state in enumerate(states):
        if is_treeflash:
            logits.append(reference_treeflash_logits(weights, target, state, path[slot], lm_head))
        else:
            unary = lm_head @ state
            logits.append(
                reference_head_logits(head, weights, target, states, path[: slot + 1], unary)
            )

    stored = weights
    if is_treeflash:
        stored = {
            name if name.startswith("ar_approximation.") else f"model.{name}": tensor
            for name, tensor in weights.items()
        }
    return write_layout(folder, layout.config, stored), torch.stack(logits).log_softmax(-1)


HEAD_KINDS = (
    "DeepSpec vanilla",
    "DeepSpec gated",
    "DeepSpec rnn",
    "SpecForge vanilla",
    "SpecForge rnn",
    "Domino gru",
    "DFlash 2 selector",
    "TreeFlash swiglu",
    "speculators vanilla",
    "speculators gated",
    "speculators selector",
)


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_heads_of_others_have_the_log_probabilities_of_a_plain_forward_and_decode_losslessly(
    kind, target, tmp_path
):
    folder, expected = write_head_case(kind, tmp_path / "drafter", target)
    drafter = load_drafter(folder, target_layers=TARGET_LAYER_COUNT)
    drafter.check_target(target)
    features = extract_features(target, drafter.layer_ids)[None]
    state = drafter.allocate_state(1, 40)
    with state.add(1) as row:
        drafter.update_context(
            target, features, CONTEXT_IDS[None, :-1], [len(CONTEXT_IDS) - 1], row
        )
    block = drafter.draft_block(target, CONTEXT_IDS[-1:], state)
    log_probs = teacher_forced_log_probs(
        drafter,
        target,
        block,
        torch.cat([CONTEXT_IDS[-1:], FOLLOWING_IDS])[None, : drafter.block_size - 1],
    )[0].double()
    assert log_probs.shape == expected.shape == (drafter.block_size - 1, V)
    assert torch.equal(log_probs.isinf(), expected.isinf())
    assert torch.allclose(log_probs, expected, atol=1e-5)
    plain = generate(target, None, CONTEXT_IDS.tolist(), method="plain", max_new_tokens=10)
    done = generate(
        target, drafter, CONTEXT_IDS.tolist(), budget=12, max_new_tokens=10, compile=False
    )
    assert done.ids == plain.ids and done.stats.rounds > 0


@pytest.fixture(scope="module")
def target(make_tiny):
    return make_tiny(torch.float64)[0]


@pytest.mark.parametrize("kind", LAYOUT_CASES)
def test_a_folder_written_by_hand_has_the_logits_of_a_plain_forward_and_decodes_losslessly(
    kind, target, tmp_path
):
    folder, expected = write_layout_case(kind, tmp_path / "drafter", target)
    drafter = load_drafter(folder, target_layers=TARGET_LAYER_COUNT)
    drafter.check_target(target)
    marginals = draft_marginals(target, drafter)
    assert marginals.shape == expected.shape == (drafter.block_size - 1, V)
    assert torch.equal(marginals.isinf(), expected.isinf())
    assert torch.allclose(marginals, expected, atol=1e-5)
    prompts = [CONTEXT_IDS.tolist(), CONTEXT_IDS[:5].tolist()]
    for method, budget, temperature in (("chain", 4, 0.0), ("ddtree", 30, 1.0)):
        options = {"max_new_tokens": 12, "temperature": temperature, "seed": 3}
        plain = generate(target, None, prompts, method="plain", **options)
        done = generate(
            target, drafter, prompts, method=method, budget=budget, compile=False, **options
        )
        assert [answer.ids for answer in done] == [answer.ids for answer in plain]
        assert all(answer.stats.rounds > 0 for answer in done)


def pad_draft_vocabulary(folder: Path, rows: int) -> Path:
    """The folder with a draft vocabulary of so many rows, those behind the vocabulary's large in
    all tensors: a draft among them would have the highest score."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"draft_vocab_size": rows}))
    weights = load_file(folder / "model.safetensors")
    names = [name for name, tensor in weights.items() if tensor.shape[:1] == (V,)]
    assert names
    for name in names:
        weights[name] = torch.cat(
            [weights[name], torch.full((rows - V, *weights[name].shape[1:]), 50.0).double()]
        )
    weights |= {
        "d2t": torch.zeros(rows, dtype=torch.long),
        "t2d": torch.ones(rows, dtype=torch.bool),
    }
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kind", ["own ends", "deepspec", "speculators"])
def test_a_padded_draft_vocabulary_drafts_no_token_that_the_target_lacks(kind, target, tmp_path):
    folder, expected = write_layout_case(kind, tmp_path / "drafter", target)
    drafter = load_drafter(pad_draft_vocabulary(folder, V + 7), target_layers=TARGET_LAYER_COUNT)
    drafter.check_target(target)
    assert torch.allclose(draft_marginals(target, drafter), expected, atol=1e-5)
    assert not [name for name, tensor in drafter.state_dict().items() if len(tensor) == V + 7]
    for method, budget, temperature in (("chain", 4, 0.0), ("ddtree", 30, 1.0)):
        options = {"max_new_tokens": 12, "temperature": temperature, "seed": 3}
        plain = generate(target, None, CONTEXT_IDS.tolist(), method="plain", **options)
        done = generate(
            target,
            drafter,
            CONTEXT_IDS.tolist(),
            method=method,
            budget=budget,
            compile=False,
            **options,
        )
        assert done.ids == plain.ids and done.stats.rounds > 0
    save_drafter(drafter.config, drafter.state_dict(), tmp_path / "again")
    assert torch.allclose(
        draft_marginals(target, load_drafter(tmp_path / "again")), expected, atol=1e-5
    )

    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"d2t": torch.ones(V + 7, dtype=torch.long)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="is more than vocab_size, and the tensor d2t"):
        load_drafter(folder)


def test_a_head_of_a_padded_draft_vocabulary_drafts_no_token_that_the_target_lacks(
    target, tmp_path
):
    """Its matrices have a row for each token, padded as the target's head is."""
    folder, _ = write_head_case("DeepSpec vanilla", tmp_path / "drafter", target)
    unpadded = load_drafter(folder, target_layers=TARGET_LAYER_COUNT)
    drafter = load_drafter(pad_draft_vocabulary(folder, V + 7), target_layers=TARGET_LAYER_COUNT)
    for name, tensor in unpadded.state_dict().items():
        assert torch.equal(tensor, drafter.state_dict()[name]), name
    plain = generate(target, None, CONTEXT_IDS.tolist(), method="plain", max_new_tokens=10)
    done = generate(
        target, drafter, CONTEXT_IDS.tolist(), budget=12, max_new_tokens=10, compile=False
    )
    assert done.ids == plain.ids and done.stats.rounds > 0


@pytest.mark.parametrize("kind", ["sliding", "causal", "deepspec"])
def test_the_trained_block_is_the_drafted_one(kind, target, tmp_path):
    """Many blocks of a packed row under shared masks have the logits of the block that decoding
    drafts."""
    drafter = load_drafter(write_layout_case(kind, tmp_path / "drafter", target)[0])
    rows = {
        "ids": torch.cat([CONTEXT_IDS[:6], CONTEXT_IDS])[None],
        "documents": torch.tensor([[0] * 6 + [1] * 14]),
    }
    rows["positions"] = torch.cat([torch.arange(6), torch.arange(14)])[None]
    anchors = torch.tensor([[3, 12, 19]])  # the last one is where CONTEXT_IDS ends
    features = target.compute_packed_features(
        rows["ids"], rows["positions"], rows["documents"], drafter.layer_ids
    )
    with torch.no_grad():
        states = compute_packed_block_states(
            drafter, target, rows, anchors, features.layer_features, drafter
        )
    trained = (
        states[0, 2, drafter.first_draft_slot :] @ get_head_weight(drafter, target).T
    ).log_softmax(-1)
    assert torch.allclose(trained, draft_marginals(target, drafter), atol=1e-5)


def test_drafts_of_fixed_shapes_of_a_sliding_drafter_are_the_same(target, tmp_path):
    drafter = load_drafter(write_layout_case("sliding", tmp_path / "drafter", target)[0])
    with torch.inference_mode():
        assert torch.allclose(
            draft_marginals(target, drafter, fixed=1), draft_marginals(target, drafter), atol=1e-5
        )


@pytest.mark.parametrize(
    ("method", "temperature"), [("chain", 0.0), ("ddtree", 1.0), ("static", 0.0), ("guided", 1.0)]
)
def test_trees_and_sampling_survive_tokens_without_probability(
    method, temperature, target, tmp_path, ngrams
):
    """A draft vocabulary of 3 tokens, fewer than a tree's children: all others are at minus
    infinity."""
    weights = dflash_weights(lm_head__weight=(3, D))
    folder = write_layout(
        tmp_path / "drafter",
        make_speculators_config(draft_vocab_size=3),
        weights | make_draft_vocabulary(3),
    )
    drafter = load_drafter(folder)
    options = {
        "method": method,
        "budget": 20,
        "max_new_tokens": 20,
        "temperature": temperature,
        "seed": 1,
    }
    options |= {"repetition_penalty": 1.3, "top_p": 0.9, "compile": False}
    if method in ("continuity", "guided"):
        options |= {"method": "ddtree" if method == "guided" else method, "ngrams": str(ngrams)}
    if method == "static":
        options["width"] = 4
    answer = generate(target, drafter, CONTEXT_IDS.tolist(), **options)
    assert len(answer.ids) == 20
    if method != "static" or not temperature:  # a sampled static tree has draws of its own
        rest = ("temperature", "seed", "repetition_penalty", "top_p", "max_new_tokens")
        plain = generate(
            target,
            None,
            CONTEXT_IDS.tolist(),
            method="plain",
            **{key: options[key] for key in rest},
        )
        assert answer.ids == plain.ids


ROPE_SCALING_KEYS = {  # that transformers requires besides the base
    "default": {},
    "linear": {"factor": 3.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize("kind", ROPE_SCALING_KEYS)
def test_rotary_positions_in_both_spellings(kind, target, tmp_path):
    """Cosines and sines are transformers' own for the same parameters, and both spellings draft the
    same."""
    new = {"rope_type": kind, "rope_theta": 500.0} | ROPE_SCALING_KEYS[kind]
    old = (
        {"type" if kind == "linear" else "rope_type": kind} | ROPE_SCALING_KEYS[kind]
        if ROPE_SCALING_KEYS[kind]
        else None
    )
    folders = [
        write_layout(
            tmp_path / "new",
            make_public_config(rope_theta=None, rope_parameters=new),
            dflash_weights(),
        ),
        write_layout(
            tmp_path / "old",
            make_public_config(rope_theta=500.0, rope_scaling=old),
            dflash_weights(),
        ),
    ]
    drafters = [load_drafter(folder) for folder in folders]
    rotary = Qwen3RotaryEmbedding(
        Qwen3Config(head_dim=E, max_position_embeddings=512, rope_parameters=dict(new))
    )
    positions = torch.arange(60)[None]
    cos, sin = rotary(torch.zeros(1), positions)
    ours_cos, ours_sin = drafters[0].compute_rotary(positions)
    assert torch.allclose(ours_cos, cos.double(), atol=1e-6)
    assert torch.allclose(ours_sin[..., E // 2 :], sin[..., E // 2 :].double(), atol=1e-6)
    first, second = (draft_marginals(target, drafter) for drafter in drafters)
    assert torch.equal(first, second)
    save_drafter(drafters[0].config, drafters[0].state_dict(), tmp_path / "again")
    assert torch.equal(draft_marginals(target, load_drafter(tmp_path / "again")), first)
    if old is not None:  # and scaling is not lost on the way
        simple = load_drafter(
            write_layout(
                tmp_path / "simple", make_public_config(rope_theta=500.0), dflash_weights()
            )
        )
        assert not torch.allclose(first, draft_marginals(target, simple), atol=1e-3)


def test_null_counts_as_missing(target, tmp_path):
    dflash_keys = {
        "block_size": BLOCK_SIZE,
        "mask_token_id": MASK_TOKEN_ID,
        "target_layer_ids": FEATURE_LAYER_IDS,
        "causal": None,
    }
    config = make_public_config(dflash_config=dflash_keys) | dict.fromkeys(
        ["block_size", "head_dim", "rope_scaling", "draft_vocab_size"]
    )
    config |= dict.fromkeys(
        ["num_target_layers", "sliding_window", "use_sliding_window", "hidden_act", "is_causal"]
    )
    weights = dflash_weights()
    drafter = load_drafter(write_layout(tmp_path / "null", config, weights))
    plain = load_drafter(write_layout(tmp_path / "plain", make_public_config(), weights))
    assert torch.equal(draft_marginals(target, drafter), draft_marginals(target, plain))


def test_layer_types_follow_from_the_window_where_they_are_not_given(tmp_path):
    options = {
        "layer_types": None,
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
    }
    drafter = load_drafter(
        write_layout(tmp_path / "drafter", make_public_config(**options), dflash_weights())
    )
    assert drafter.attention_patterns == [
        (False, None),
        (True, 9),
    ] and drafter.pattern_of_layer == [0, 1]


def test_shards_with_an_index(target, tmp_path):
    folder = write_layout(tmp_path / "one file", make_public_config(), dflash_weights())
    expected = draft_marginals(target, load_drafter(folder))
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {
        name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(weights)
    }
    for file in set(weight_map.values()):
        save_file(
            {name: weights[name] for name in weight_map if weight_map[name] == file}, folder / file
        )
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(draft_marginals(target, load_drafter(folder)), expected)

    def refused(**changes: str) -> str:
        index.write_text(json.dumps({"weight_map": weight_map | changes}))
        with pytest.raises(ValueError) as error:
            load_drafter(folder)
        return str(error.value)

    other = tmp_path / "model.safetensors"
    save_file(weights, other)
    for path in (
        "../model.safetensors",
        str(other),
        "..",
        "sub/model.safetensors",
        "gone.safetensors",
    ):
        assert f"{path!r}, but this folder contains no such safetensors file" in refused(
            **{"norm.weight": path}
        )
    for content, word in (
        ("{", "cannot be read"),
        ("[]", "does not contain a JSON object"),
        ("{}", "no object weight_map"),
    ):
        index.write_text(content)
        with pytest.raises((ValueError, FileNotFoundError), match=word):
            load_drafter(folder)


TORCHSPEC_CONFIG = make_deepspec_config(model_type="dflash") | {
    "architectures": ["DFlashDraftModel"]
}
INVALID_CONFIGS = [
    (make_public_config(hidden_size=None), ["drafter: config.json: hidden_size is missing$"]),
    (make_public_config(block_size=None), ["block_size is missing"]),
    (make_public_config(block_size=1), ["block_size is 1"]),
    (
        make_public_config(dflash_config=None),
        ["mask_token_id is missing", "target_layer_ids is missing"],
    ),
    (
        make_public_config(dflash_config={"mask_token_id": V, "target_layer_ids": [1, 6]}),
        [f"mask_token_id is {V}", r"\[1, 6\], expected layers"],
    ),
    (
        make_public_config(dflash_config={"mask_token_id": "x", "target_layer_ids": 3}),
        ["'x', expected", "3, expected a list"],
    ),
    (make_public_config(layer_types=["full_attention"]), ["layer_types"]),
    (make_public_config(layer_types=["full_attention", "linear"]), ["linear"]),
    (make_public_config(layer_types=["sliding_attention"] * 2), ["sliding_window is missing"]),
    (make_public_config(num_key_value_heads=3), ["num_key_value_heads is 3"]),
    (
        make_public_config(hidden_act="gelu", attention_bias=True),
        ["hidden_act is 'gelu'", "attention_bias is True"],
    ),
    (make_public_config(rope_scaling={"rope_type": "longrope"}), ["rope_type is 'longrope'"]),
    (
        make_public_config(rope_scaling={"rope_type": "llama3", "factor": 8}),
        ["low_freq_factor is missing", "high_freq_factor"],
    ),
    (
        make_public_config(rms_norm_eps="tiny", vocab_size=0),
        ["rms_norm_eps is 'tiny'", "vocab_size is 0"],
    ),
    (make_public_config(target_hidden_size=64), ["target_hidden_size is 64"]),
    (make_public_config(architectures=["DFlash2DraftModel"]), ["selector_rank is missing"]),
    (
        make_public_config(
            dflash_config=make_public_config()["dflash_config"] | {"projector_type": "domino"}
        ),
        ["gru_hidden_dim is missing"],
    ),
    (
        make_public_config(
            dflash_config=make_public_config()["dflash_config"] | {"markov_rank": 4}, markov_rank=5
        ),
        ["markov_rank is given twice, as 4 and as 5"],
    ),
    (
        make_deepspec_config(sample_from_anchor=True, shift_label=False),
        ["shift_label is False, but sample_from_anchor is True"],
    ),
    (
        make_deepspec_config(enable_confidence_head=True),
        ["enable_confidence_head is true, but markov_rank is 0 or missing"],
    ),
    (
        make_public_config(architectures="DFlashDraftModel"),
        ["architectures is DFlashDraftModel, expected"],
    ),
    (
        make_public_config(
            is_causal=False, dflash_config=make_public_config()["dflash_config"] | {"causal": True}
        ),
        ["is_causal contradicts"],
    ),
    (
        make_public_config(
            dflash_config=make_public_config()["dflash_config"] | {"last_tap": "both"}
        ),
        ["last_tap is 'both'"],
    ),
    (make_deepspec_config(markov_rank=-1), ["markov_rank is -1"]),
    (
        make_deepspec_config(markov_rank=4),
        ["missing tensors: markov_head.markov_w1.weight, markov_head.markov_w2.weight"],
    ),
    (make_speculators_config(markov_rank=256), ["missing tensors: markov_head.markov_w1.weight"]),
    (
        make_speculators_config(speculators_model_type="peagle"),
        ["this is a P-EAGLE drafter .*, which this project does not support$"],
    ),
    (
        make_public_config(architectures=["LlamaForCausalLMEagle3"], parallel_drafting=True),
        ["this is a P-EAGLE drafter"],
    ),
    (
        make_public_config(architectures=["Qwen3DFlyModel"]),
        ["this is a DFly drafter .*, which this project does not support$"],
    ),
    (TORCHSPEC_CONFIG | {"block_size": None}, ["block_size is missing$"]),
    (
        make_public_config(architectures=["QwenDFlareDraftModel"]),
        ["missing tensors: layer_fusion_weights, .*unknown tensors: fc.w"],
    ),
    (
        make_speculators_config(speculators_model_type="eagle3"),
        ["'eagle3', expected .* one token per pass are not supported"],
    ),
    (
        make_speculators_config(transformer_layer_config=None),
        ["config.json: hidden_size is missing"],
    ),
    (
        make_speculators_config(aux_hidden_state_layer_ids=[0, 2]),
        [r"\[0, 2\], expected layers from 1 upwards"],
    ),
    (
        make_speculators_config(aux_hidden_state_layer_ids=None, mask_token_id=None),
        ["aux_hidden_state_layer_ids is", "mask_token_id"],
    ),
    (
        make_speculators_config(draft_vocab_size=V + 1) | {"vocab_size": V + 1},
        ["vocab_size is given twice, as 97 and as 98"],
    ),
]


@pytest.mark.parametrize("config, words", INVALID_CONFIGS, ids=range(len(INVALID_CONFIGS)))
def test_wrong_and_missing_keys_are_named_all_of_them(config, words, tmp_path):
    folder = write_layout(tmp_path / "drafter", config, dflash_weights())
    with pytest.raises(ValueError) as error:
        load_drafter(folder)
    for word in words:
        assert re.search(word, str(error.value)), str(error.value)


TRANSFORMERS_CONFIG = {
    "architectures": ["MuseGlimmerAssistantModel"],
    "model_type": "muse_glimmer_assistant",
    "block_size": BLOCK_SIZE,
    "mask_token_id": MASK_TOKEN_ID,
    "target_layer_ids": FEATURE_LAYER_IDS,
    "num_hidden_layers": 2,
    "layer_types": ["full_attention"] * 2,
    "rope_parameters": {"rope_type": "yarn", "factor": 2.0},
    **QWEN3_SIZES,
}
OUR_DART_KEYS = {
    "dart_config": {"target_layer_ids": FEATURE_LAYER_IDS, "shifted": True, "qk_norm": True},
    "block_size": 5,
}
STORED_TENSORS = {"lm_head.weight": None, "d2t": None}
VALID_CONFIGS = {
    "public": make_public_config(rope_scaling={"rope_type": "linear", "factor": 2.0}),
    "deepspec": make_deepspec_config(),
    "torchspec": TORCHSPEC_CONFIG,
    "angelslim": make_public_config(architectures=["QwenDFlashDraftModel"]),
    "xpress": make_public_config(
        architectures=["Qwen3XPressModel"], xpress_rank=4, xpress_mlp_hidden=8, xpress_num_passes=6
    ),
    "speculators xpress": make_speculators_config(speculators_model_type="xpress"),
    "dspark": make_deepspec_config(
        markov_rank=4, markov_head_type="rnn", enable_confidence_head=True
    ),
    "domino": make_public_config(
        dflash_config=make_public_config()["dflash_config"]
        | {"projector_type": "domino", "gru_hidden_dim": 4}
    ),
    "treeflash": make_public_config(
        architectures=["TreeFlashDraftModel"], treeflash_config={"ar_approximation": "swiglu"}
    ),
    "speculators": make_speculators_config(),
    "speculators dspark": make_speculators_config(speculators_model_type="dspark"),
    "speculators dflash2": make_speculators_config(speculators_model_type="dflash2"),
    "transformers": TRANSFORMERS_CONFIG,
}
if "dart" in DRAFTER_FAMILIES:
    named = {"architectures": ["DARTDraftModel"], "num_target_layers": TARGET_LAYER_COUNT}
    VALID_CONFIGS["dart"] = make_dart_config(20, num_target_layers=TARGET_LAYER_COUNT)
    VALID_CONFIGS["our dart"] = make_dart_config(20, draft_length=None, **named) | OUR_DART_KEYS


@pytest.mark.parametrize("layout", VALID_CONFIGS)
def test_an_unknown_key_is_a_fault_unless_it_asks_for_nothing_or_is_bookkeeping(layout):
    """At the top, and in every object whose keys count: nothing else changes."""
    config = VALID_CONFIGS[layout]
    unchanged = parse_drafter_config(DrafterFolder(Path(), config, STORED_TENSORS, []))
    assert unchanged.problems == unchanged.warnings == [] and unchanged.config_kwargs
    objects = ("dflash_config", "dart_config", "treeflash_config", "transformer_layer_config")
    for section in (None, *(key for key in objects if key in config)):
        for name, value in product(
            ("of_another_kind", "train_steps"), (True, 0, 2.5, "word", [1], {"inner": 1}, None)
        ):
            changed = deepcopy(config)
            (changed if section is None else changed[section])[name] = value
            again = parse_drafter_config(DrafterFolder(Path(), changed, STORED_TENSORS, []))
            if value and name == "of_another_kind":
                assert len(again.problems) == 1 and "of_another_kind is" in again.problems[0], (
                    section
                )
            else:
                assert again.problems == [] and again.config_kwargs == unchanged.config_kwargs
                assert [f" {name}" in doubt for doubt in again.warnings] == [True] * (
                    value is not None
                ), section


# for each key a value that changes what a drafter computes, and one that does not
COMPUTATION_KEYS = {
    "logit_scale": (2.0, 1.0),
    "rope_interleave": (True, False),
    "use_rope": (False, True),
    "residual_multiplier": (0.22, 1),
    "hidden_activation": ("gelu", "silu"),
    "attn_logit_softcapping": (50.0, None),
}


@pytest.mark.parametrize("key", COMPUTATION_KEYS)
def test_keys_that_change_what_is_computed_are_faults_unless_they_are_neutral(key):
    other, neutral = COMPUTATION_KEYS[key]
    for layout, config in VALID_CONFIGS.items():
        problems = parse_drafter_config(
            DrafterFolder(Path(), config | {key: other}, STORED_TENSORS, [])
        ).problems
        assert len(problems) == 1 and f"{key} is {other!r}" in problems[0], layout
        reading = parse_drafter_config(
            DrafterFolder(Path(), config | {key: neutral}, STORED_TENSORS, [])
        )
        assert reading.problems == reading.warnings == [], layout


@pytest.mark.parametrize("kind", ["default", "yarn"])
def test_keys_within_rotary_parameters_are_judged_too(kind):
    """LiquidAI's drafters rotate neighbouring entries, and say so in one place or the other."""
    rope = {"rope_type": kind} | ROPE_SCALING_KEYS[kind]

    def problems(**more: object) -> list[str]:
        return parse_drafter_config(
            DrafterFolder(
                Path(), make_public_config(rope_parameters=rope | more), STORED_TENSORS, []
            )
        ).problems

    assert problems() == problems(rope_interleave=False) == problems(mrope_section=[1, 1, 2]) == []
    assert "rope_interleave is True" in problems(rope_interleave=True)[0]
    assert "partial_rotary_factor is 0.5" in problems(partial_rotary_factor=0.5)[0]
    assert "turned_twice is True, but this key is unknown" in problems(turned_twice=True)[0]


def test_unknown_keys_stop_loading_and_bookkeeping_gives_a_warning(tmp_path):
    with pytest.raises(
        ValueError, match="config.json: new_idea is 1, but this key is unknown .* remove the key if"
    ):
        load_drafter(write_layout(tmp_path, make_public_config(new_idea=1), dflash_weights()))
    with pytest.warns(UserWarning, match="the key training_tokens is unknown"):
        load_drafter(
            write_layout(tmp_path, make_public_config(training_tokens=10**9), dflash_weights())
        )


UNKNOWN_TENSOR_SHAPES = {  # of drafters with DFlash's keys and more tensors
    "DSpine": {"readouts.0.weight": (R, D), "writes.0.weight": (D, R), "writes.1.weight": (D, R)},
    "UBTree": {"bigram.predecessor.weight": (V, R), "bigram.successor.weight": (V, R)},
    "a norm behind fc": {"layers.0.self_attn.rope.freqs": (E,), "fc.bias": (D,)},
}


@pytest.mark.parametrize("name", UNKNOWN_TENSOR_SHAPES)
@pytest.mark.parametrize("kind", ["full", "deepspec", "speculators"])
def test_a_drafter_with_more_tensors_is_never_loaded_without_them(name, kind, target, tmp_path):
    folder, _ = write_layout_case(kind, tmp_path / "drafter", target)
    weights = load_file(folder / "model.safetensors")
    load_drafter(folder)
    save_file(
        weights | {key: torch.zeros(shape) for key, shape in UNKNOWN_TENSOR_SHAPES[name].items()},
        folder / "model.safetensors",
    )
    with pytest.raises(
        ValueError, match=f"unknown tensors: {', '.join(sorted(UNKNOWN_TENSOR_SHAPES[name]))}"
    ):
        load_drafter(folder)
    # nor if they are in another file
    save_file(weights, folder / "model.safetensors")
    (folder / "adapter").mkdir()
    save_file({"x": torch.zeros(1)}, folder / "adapter" / "adapter.safetensors")
    with pytest.raises(
        ValueError, match="tensors that would not be loaded: adapter/adapter.safetensors"
    ):
        load_drafter(folder)


def test_tensors_under_two_names_are_refused(tmp_path):
    weights = dflash_weights() | {"model.norm.weight": torch.ones(D)}
    tree = {"ar_approximation": "swiglu"}
    config = make_public_config(architectures=["TreeFlashDraftModel"], treeflash_config=tree)
    with pytest.raises(ValueError, match="also stored under a second name: model.norm.weight"):
        load_drafter(write_layout(tmp_path, config, weights))


def test_what_transformers_writes_into_every_config_is_harmless(tmp_path):
    """Its class, with all that it saves, defaults included."""
    config = Qwen3Config(**QWEN3_SIZES, num_hidden_layers=2, layer_types=["full_attention"] * 2)
    raw = config.to_dict() | {
        key: value for key, value in make_public_config().items() if key != "rope_theta"
    }
    assert load_drafter(write_layout(tmp_path, raw, dflash_weights())).layer_ids == tuple(
        FEATURE_LAYER_IDS
    )


def test_files_that_never_end_are_not_read(tmp_path):
    folder = write_layout(tmp_path / "drafter", make_public_config(), dflash_weights())
    config = folder / "config.json"
    for make in (lambda: config.symlink_to("/dev/zero"), lambda: os.mkfifo(config)):
        config.unlink()
        make()
        with pytest.raises(FileNotFoundError, match="config.json is a device, pipe or folder"):
            load_drafter(folder)
    config.unlink()
    with config.open("wb") as file:
        file.truncate(65 << 20)
    with pytest.raises(FileNotFoundError, match="but at most .* bytes are allowed"):
        load_drafter(folder)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("/dev/zero")
    with pytest.raises(FileNotFoundError, match="model.safetensors is missing"):
        load_drafter(folder)


def test_missing_keys_of_published_dart_are_named(tmp_path):
    folder = write_layout(
        tmp_path / "drafter", make_dart_config(20), dart_weights(20) | make_draft_vocabulary(20)
    )
    with pytest.raises(ValueError, match="num_target_layers is missing; use load_drafter"):
        load_drafter(folder)
    write_layout(
        folder,
        make_dart_config(20, draft_length=None, num_hidden_layers=2),
        dart_weights(20) | make_draft_vocabulary(20),
    )
    with pytest.raises(ValueError, match="draft_length is missing.*num_hidden_layers is 2"):
        load_drafter(folder, target_layers=TARGET_LAYER_COUNT)


def test_missing_unknown_and_wrong_tensors_are_named(tmp_path):
    weights = dflash_weights(lm_head__weight=(20, D)) | make_draft_vocabulary(20)
    config = make_public_config(draft_vocab_size=20)
    folder = tmp_path / "drafter"

    def refused(**changes: torch.Tensor | None) -> str:
        changes = {name.replace("__", "."): tensor for name, tensor in changes.items()}
        stored = {
            name: tensor for name, tensor in (weights | changes).items() if tensor is not None
        }
        write_layout(folder, config, stored)
        with pytest.raises(ValueError) as error:
            load_drafter(folder)
        return str(error.value)

    text = refused(
        norm__weight=None, layers__1__mlp__up_proj__weight=None, layers__2__bias=torch.zeros(2)
    )
    assert (
        "missing tensors: layers.1.mlp.up_proj.weight, norm.weight; unknown tensors: layers.2.bias"
        in text
    )
    assert "fc.weight [3, 4], expected [32, 64]" in refused(fc__weight=torch.zeros(3, 4))
    assert "wrong type tensors: fc.weight I8" in refused(
        fc__weight=torch.zeros(D, 2 * D, dtype=torch.int8)
    )
    assert "missing tensors: d2t" in refused(d2t=None, lm_head__weight=None)
    twice = weights["d2t"] - torch.arange(20).clamp(max=1) * (weights["d2t"][1] + 1)
    for wrong in (torch.full((20,), 90), twice):
        assert "d2t maps two draft tokens to the same target token" in refused(d2t=wrong)
    write_layout(folder, config, weights)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-8])
    with pytest.raises(FileNotFoundError, match="truncated or altered"):
        load_drafter(folder)
    (folder / "model.safetensors").write_bytes(content)
    (folder / "mask_embedding.pt").touch()
    with pytest.raises(ValueError, match="mask_embedding"):
        load_drafter(folder)


def test_a_name_on_the_hub_needs_a_network_and_a_path_is_never_taken_for_one(tmp_path, monkeypatch):
    with pytest.raises(
        FileNotFoundError, match="found neither as a local folder nor on the Hugging Face hub"
    ):
        load_drafter("nobody/no-such-drafter")
    with pytest.raises(FileNotFoundError, match="is neither a folder nor an id"):
        load_drafter(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match="is neither a folder nor an id"):
        load_drafter("../no-such-drafter")
    folder = write_layout(tmp_path / "drafter", make_public_config(), dflash_weights())
    downloads = []

    def download(name: str, allow_patterns: list[str]) -> str:
        downloads.append((name, allow_patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert load_drafter("some/drafter").layer_ids == tuple(FEATURE_LAYER_IDS)
    assert downloads == [("some/drafter", ["*.json", "*.safetensors"])]  # no code, no pickles


def test_a_drafter_of_another_target_is_refused(target, tmp_path):
    dflash_keys = {"mask_token_id": 96, "target_layer_ids": [1, 7]}
    folder = write_layout(
        tmp_path / "drafter",
        make_public_config(num_target_layers=8, dflash_config=dflash_keys),
        dflash_weights(),
    )
    with pytest.raises(
        ValueError, match=r"num_target_layers 8, the target has 6; target_layer_ids \[1, 7\]"
    ):
        load_drafter(folder).check_target(target)
