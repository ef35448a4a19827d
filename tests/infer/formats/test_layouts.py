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

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from infer import generate, load_drafter, save_drafter
from infer.drafters.base import head_weight, packed_states
from infer.drafters.families import FAMILIES
from infer.drafters.heads.draft import behind
from infer.formats.folders import Folder
from infer.formats.layouts import read

# of `make_tiny`'s targets
D = 32
V = 97
HEADS = 4
GROUPS = 2
E = 8
LAYERS = 6
BLOCK = 5
MASK = 96
TAPPED = [1, 4]
SIZES = {
    "hidden_size": D,
    "intermediate_size": 48,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": E,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "vocab_size": V,
}


def matrices(seed: int, **shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
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
        "self_attn__q_proj__weight": (HEADS * E, inputs),
        "self_attn__k_proj__weight": (GROUPS * E, inputs),
        "self_attn__v_proj__weight": (GROUPS * E, inputs),
        "self_attn__o_proj__weight": (D, HEADS * E),
        "mlp__gate_proj__weight": (48, D),
        "mlp__up_proj__weight": (48, D),
        "mlp__down_proj__weight": (D, 48),
    }
    return shapes | (
        {"self_attn__q_norm__weight": (E,), "self_attn__k_norm__weight": (E,)} if norms else {}
    )


def dflash_weights(layers: int = 2, **more: tuple[int, ...]) -> dict[str, torch.Tensor]:
    shapes = {"fc__weight": (D, len(TAPPED) * D), "hidden_norm__weight": (D,), "norm__weight": (D,)}
    for i in range(layers):
        shapes |= {f"layers__{i}__{name}": shape for name, shape in layer_shapes(D).items()}
    return matrices(1, **shapes, **more)


def dart_weights(rows: int) -> dict[str, torch.Tensor]:
    shapes = {
        f"midlayer__{name}": shape for name, shape in layer_shapes(2 * D, norms=False).items()
    }
    shapes |= {"midlayer__hidden_norm__weight": (D,), "midlayer__mask_rep": (2 * D,)}
    return matrices(
        2, **shapes, fc__weight=(D, 3 * D), norm__weight=(D,), lm_head__weight=(rows, D)
    )


def vocabulary(rows: int) -> dict[str, torch.Tensor]:
    """t2d and d2t of `rows` of the tokens."""
    tokens = torch.randperm(V, generator=torch.Generator().manual_seed(4))[:rows].sort().values
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[tokens] = True
    return {"t2d": t2d, "d2t": tokens - torch.arange(rows)}


def public(**changes: object) -> dict:
    """config.json of the public DFlash layout."""
    config = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": TAPPED},
        "num_target_layers": LAYERS,
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        **SIZES,
        **changes,
    }
    return {key: value for key, value in config.items() if value is not None}


def flat(**changes: object) -> dict:
    """config.json of DeepSpec's DFlash drafters."""
    own = {"mask_token_id": MASK, "target_layer_ids": TAPPED, "markov_rank": 0}
    return public(
        architectures=["Qwen3DSparkModel"], dflash_config=None, auto_map=None, **own | changes
    )


def speculators(**changes: object) -> dict:
    part = {
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2,
        **SIZES,
    }
    part["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": BLOCK - 1}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "x/y", "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformer_layer_config": part,
        "draft_vocab_size": V,
        "block_size": BLOCK,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in TAPPED],
        "mask_token_id": MASK,
        **changes,
    }


def dart(rows: int, **changes: object) -> dict:
    own = {"architectures": ["LlamaForCausalLMDart"], "model_type": "llama", "num_hidden_layers": 1}
    return (
        own | {"draft_length": 3, "draft_vocab_size": rows, "rope_scaling": None} | SIZES | changes
    )


def test_a_layer_count_that_counts_taps_is_not_believed(tmp_path):
    """TorchSpec's and AngelSpec's folders, whose first slot drafts nothing, but DSpark's."""
    for said in (len(TAPPED), LAYERS):
        reading = read(Folder(tmp_path, public(num_target_layers=said), {}, []), LAYERS)
        assert reading.options["num_target_layers"] == LAYERS and not reading.problems
    counts = {"num_target_layers": len(TAPPED), "target_num_hidden_layers": LAYERS}
    for name, kind, more in (
        ("DFlash", "dflash", {"model_arch": "dflash"}),
        ("DSpark", "dspark", {"markov_rank": 4}),
    ):
        config = flat(model_type=kind, **counts) | {"architectures": [f"{name}DraftModel"]} | more
        reading = read(Folder(tmp_path, config, {"context_proj.weight": None}, []))
        assert (reading.layout, reading.problems, reading.doubts) == ("TorchSpec", [], [])
        assert reading.renamed == {"context_proj.weight": "fc.weight"}
        assert reading.options["num_target_layers"] == LAYERS
        assert bool(reading.own.get("sample_from_anchor")) == (name == "DSpark")


def written(folder: Path, config: dict, weights: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


def rms(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return states / (states.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turned(states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary positions, base 10000, on (T, H, E)."""
    angles = positions[:, None].double() * 10000.0 ** (-torch.arange(0, E, 2).double() / E)
    cos = angles.cos()[:, None]
    sin = angles.sin()[:, None]
    low, high = states.chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor
) -> torch.Tensor:
    """Softmax attention of (Q, H, E) over (S, H', E), both sides rotated: (Q, H * E)."""
    k, v = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (k, v))
    scores = torch.einsum("qhe,khe->hqk", q, k) / E**0.5
    return torch.einsum(
        "hqk,khe->qhe", scores.masked_fill(~allowed, -torch.inf).softmax(-1), v
    ).flatten(1)


def plain_mlp(w: dict, states: torch.Tensor) -> torch.Tensor:
    gate = states @ w["mlp.gate_proj.weight"].T
    up = states @ w["mlp.up_proj.weight"].T
    return (torch.nn.functional.silu(gate) * up) @ w["mlp.down_proj.weight"].T


def of_layer(weights: dict, prefix: str) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in weights.items()
        if name.startswith(prefix)
    }


def convolved(w: dict, name: str, states: torch.Tensor, sublayer) -> torch.Tensor:
    """DFlash 2's convolutions around a sublayer, if there are any, entry by entry: states (BLOCK,
    D), normalised."""
    if f"{name}.base_kernel" not in w:
        return sublayer(states)
    delta = (
        (states @ w[f"{name}.kernel_projection.weight"].T)
        .view(BLOCK, 2, 2, -1)
        .repeat_interleave(16, -1)
    )
    kernel = w[f"{name}.base_kernel"] + delta  # (BLOCK, side, tap, D)

    def one(x: torch.Tensor, side: int) -> torch.Tensor:
        return torch.stack(
            [sum(kernel[t, side, o] * x[t - o] for o in range(min(2, t + 1))) for t in range(BLOCK)]
        )

    return one(sublayer(one(states, 0)), 1)


def plain_dflash(
    weights: dict,
    target,
    features,
    bonus: int,
    views: list[tuple[bool, int | None]],
    raw: bool = False,
) -> torch.Tensor:
    """States (BLOCK, D) behind the last norm, or before it, of a block after features (T, K * D),
    by the layout's description."""
    context = rms(features @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    embedding = weights.get("embed_tokens.weight", target.embedding.weight)
    block = embedding[torch.tensor([bonus] + [MASK] * (BLOCK - 1))]
    length = len(context)
    keys_at = torch.arange(length + BLOCK)
    queries_at = keys_at[length:]
    distance = queries_at[:, None] - keys_at
    for i, (causal, window) in enumerate(views):
        w = of_layer(weights, f"layers.{i}.")
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
            q = turned(rms(q, w["self_attn.q_norm.weight"]), queries_at)
            k = turned(rms(k, w["self_attn.k_norm.weight"]), keys_at)
            return attended(q, k, v, allowed) @ w["self_attn.o_proj.weight"].T

        block = block + convolved(
            w, "attention_conv", rms(block, w["input_layernorm.weight"]), attention
        )
        states = rms(block, w["post_attention_layernorm.weight"])
        block = block + convolved(w, "mlp_conv", states, partial(plain_mlp, w))
    return block if raw else rms(block, weights["norm.weight"])


def plain_dart(
    weights: dict, target, features, following: torch.Tensor, masks: int
) -> torch.Tensor:
    """Logits (masks + 1, rows) of DART's published inference code, as FORMATS.md describes it."""
    w = of_layer(weights, "midlayer.")
    projected = features @ weights["fc.weight"].T
    embedded = rms(target.embedding.weight[following], w["input_layernorm.weight"])
    items = torch.cat([embedded, rms(projected, w["hidden_norm.weight"])], -1)
    items = torch.cat([items, w["mask_rep"].expand(masks, -1)])
    residual = torch.cat([projected, w["mask_rep"][:D].expand(masks, -1)])
    at = torch.arange(len(items))
    q, k, v = (
        (items @ w[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, E)) for name in "qkv"
    )
    mixed = attended(turned(q, at), turned(k, at), v, at[:, None] >= at)
    states = residual + mixed @ w["self_attn.o_proj.weight"].T
    states = (states + plain_mlp(w, rms(states, w["post_attention_layernorm.weight"])))[
        -masks - 1 :
    ]
    return (
        rms(rms(states, weights["norm.weight"]), weights["norm.weight"])
        @ weights["lm_head.weight"].T
    )


def whole(drafter, log_q: torch.Tensor) -> torch.Tensor:
    return drafter.vocabulary.whole(log_q).double()


def scattered(logits: torch.Tensor, d2t: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of a draft vocabulary, (L, rows), among all tokens, (L, V)."""
    out = torch.full((len(logits), V), -torch.inf, dtype=logits.dtype)
    for row, offset in enumerate(d2t.tolist()):
        out[:, row + offset] = logits.log_softmax(-1)[:, row]
    return out


IDS = torch.randint(
    90, (14,), generator=torch.Generator().manual_seed(9)
)  # the last one is the bonus token


def drafted(target, drafter, fixed: int = 0) -> torch.Tensor:
    """Marginals (L, V) behind IDS, its context taken in in two pieces."""
    features = features_of(target, drafter.layer_ids)[None]
    state = drafter.state(1, 40)
    with state.add(1) as row:
        drafter.update_context(target, features[:, :5], IDS[None, :5], [5], row)
    drafter.update_context(target, features[:, 5:], IDS[None, 5:-1], [len(IDS) - 6], state)
    with state.cache.fixed(fixed):
        return whole(drafter, drafter.draft_block(target, IDS[-1:], state).marginals[0])


def features_of(target, layers) -> torch.Tensor:
    with torch.no_grad():
        states = target.model(IDS[None, :-1], output_hidden_states=True).hidden_states
    return torch.cat([states[layer + 1][0] for layer in layers], -1)


OWN = {"mask_token_id": MASK, "target_layer_ids": TAPPED}
FULL = [(False, None)] * 2
CAUSAL = [(True, None)] * 2
ENDS = {"embed_tokens__weight": (V, D), "lm_head__weight": (V, D)}
MIXED = {
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 7,
}
KINDS = {  # config.json, what its layers see, the first slot that drafts, and the ends that are stored
    "full": (public(), FULL, 1, {}),
    "sliding": (  # block causal in the sliding layer, whose window of 7 reaches 3 to 7 context positions
        public(dflash_config=OWN | {"block_size": BLOCK}, block_size=None, **MIXED),
        [(True, 7), (False, None)],
        1,
        {},
    ),
    "causal": (public(dflash_config=OWN | {"causal": True}), CAUSAL, 1, {}),
    "jetspec": (
        public(dflash_config=OWN | {"causal_head": True}, use_cache=True, dtype="bfloat16"),
        CAUSAL,
        1,
        {},
    ),
    "nemo": (
        public(architectures=["Qwen3DFlashDraftModel"], is_causal=False, auto_map=None),
        FULL,
        1,
        {},
    ),
    "own ends": (public(), FULL, 1, ENDS),
    "deepspec": (flat(), FULL, 0, ENDS),  # the bonus token's slot drafts too
    "speculators": (speculators(), FULL, 1, ENDS),
    "pruned speculators": (
        speculators(draft_vocab_size=20),
        FULL,
        1,
        ENDS | {"lm_head__weight": (20, D)},
    ),
    "dart": (dart(20), [], 0, {}),
}


def by_hand(kind: str, folder: Path, target) -> tuple[Path, torch.Tensor]:
    """A folder of some layout, and the marginals (L, V) that its drafter must have behind IDS."""
    config, views, first, ends = KINDS[kind]
    map = vocabulary(20) if kind in ("dart", "pruned speculators") else {}
    if kind == "dart":
        weights = dart_weights(20)
        logits = plain_dart(
            weights, target, features_of(target, [1, 2, 2]), IDS[1:], masks=3
        )  # 1, N // 2 - 1, N - 4
    else:
        weights = dflash_weights(**ends)
        states = plain_dflash(weights, target, features_of(target, TAPPED), int(IDS[-1]), views)[
            first:
        ]
        logits = states @ weights.get("lm_head.weight", target.head_weight).T
    expected = scattered(logits, map["d2t"]) if map else logits.log_softmax(-1)
    return written(folder, config, weights | map), expected


BEFORE = torch.randint(
    90, (BLOCK,), generator=torch.Generator().manual_seed(10)
)  # the tokens behind the bonus token
# rank of a head, entries of a GRU
R = 6
S = 10
SHAPES = {  # of the heads' tensors
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
SHAPES["gated"] = SHAPES["vanilla"] | {
    "markov_head__gate_proj__weight": (R, D + R),
    "markov_head__gate_proj__bias": (R,),
}
SHAPES["rnn"] = SHAPES["vanilla"] | {
    "markov_head__joint_proj__weight": (3 * R, 2 * R + D),
    "markov_head__joint_proj__bias": (3 * R,),
}
CONVOLUTIONS = {
    f"layers__{i}__{name}__{part}": shape
    for i in range(2)
    for name in ("attention_conv", "mlp_conv")
    for part, shape in {
        "base_kernel": (2, 2, D),
        "kernel_projection__weight": (2 * 2 * D // 16, D),
    }.items()
}
CONFIDENCE = {"confidence_head__proj__weight": (1, D + R), "confidence_head__proj__bias": (1,)}


def behind_tokens(
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


def with_head(kind: str, folder: Path, target) -> tuple[Path, torch.Tensor]:
    """A folder of a layout with a conditional head, and the log-probabilities (L, V) behind the
    bonus token and the first tokens of BEFORE."""
    head = kind.split()[-1]
    path = [int(IDS[-1]), *BEFORE.tolist()]
    features = features_of(target, TAPPED)
    own = {"mask_token_id": MASK, "target_layer_ids": TAPPED}
    markov = {"markov_rank": R, "markov_head_type": head}
    confident = {"enable_confidence_head": True, "confidence_head_with_markov": True}
    views = [(False, None)] * 2
    more = SHAPES[head]
    first = 0
    stored_names = {}
    if kind.startswith("DeepSpec"):
        config = flat(**markov, **confident, num_anchors=512, confidence_head_alpha=1.0)
        more = more | CONFIDENCE
        more = more | {"embed_tokens__weight": (V, D), "lm_head__weight": (V, D)}
    elif kind.startswith("SpecForge") and head != "gru":
        own |= markov | {
            "projector_type": "dspark",
            "attention_mode": "gqa",
            "confidence_head_alpha": 1.0,
        }
        own |= {"confidence_head_with_markov": True}  # and that there is one, its tensors say
        config = public(architectures=["DSparkDraftModel"], dflash_config=own, markov_rank=R)
        more = more | CONFIDENCE
    elif head == "gru":
        own |= {
            "projector_type": "domino",
            "emb_dim": R,
            "gru_hidden_dim": S,
            "pure_draft_prefix_len": 1,
        }
        config = public(
            architectures=["DominoDraftModel"], dflash_config=own | {"shift_label": True}, emb_dim=R
        )
    elif kind == "DFlash 2 selector":  # sliding layers that are not causal
        own |= {"block_size": BLOCK, "conv_kernel_size": 2, "conv_group_size": 16}
        own |= {"selector_rank": R, "selector_top_k": 7}
        window = {
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention"] * 2,
        }
        config = public(
            architectures=["DFlash2DraftModel"], dflash_config=own, block_size=None, **window
        )
        config["is_causal"] = False
        views = [(False, 7)] * 2
        more = more | CONVOLUTIONS
        first = 1
    elif head == "swiglu":
        tree = {"ar_approximation": "swiglu", "candidate_tokens": 16}
        config = public(
            architectures=["TreeFlashDraftModel"], dflash_config=own, treeflash_config=tree
        )
        first = 1
    elif head == "selector":
        own = {"speculators_model_type": "dflash2", "selector_rank": R, "selector_top_k": 7}
        # their defaults: convolutions of 2 and 16
        config = speculators(**own)
        more = more | CONVOLUTIONS
        first = 1
    else:
        own = markov | {"speculators_model_type": "dspark", "confidence_head_with_markov": False}
        config = speculators(**own, sample_from_anchor=head != "vanilla")
        more = more | CONFIDENCE | {"confidence_head__proj__weight": (1, D)}
        first = int(head == "vanilla")
    weights = dflash_weights(**more)
    states = plain_dflash(weights, target, features, path[0], views, raw=head == "swiglu")[first:]
    lm_head = weights.get("lm_head.weight", target.head_weight)
    expected = []
    for slot in range(len(states)):
        if head == "swiglu":
            embedded = rms(
                target.embedding.weight[path[slot]], weights["ar_approximation.norm.weight"]
            )
            inputs = torch.cat([embedded, rms(states[slot], weights["norm.weight"])])
            u, g = (
                weights["ar_approximation.ug.weight"] @ inputs + weights["ar_approximation.ug.bias"]
            ).view(2, 48)
            changed = states[slot] + weights["ar_approximation.d.weight"] @ (
                torch.nn.functional.silu(g) * u
            )
            expected.append(lm_head @ rms(changed, weights["norm.weight"]))
        else:
            unary = lm_head @ states[slot]
            expected.append(behind_tokens(head, weights, target, states, path[: slot + 1], unary))
    if head == "swiglu":
        stored_names = {
            name: f"model.{name}" for name in weights if not name.startswith("ar_approximation.")
        }
    stored = {stored_names.get(name, name): tensor for name, tensor in weights.items()}
    return written(folder, config, stored), torch.stack(expected).log_softmax(-1)


HEAD_KINDS = (
    *(
        "DeepSpec vanilla",
        "DeepSpec gated",
        "DeepSpec rnn",
        "SpecForge vanilla",
        "SpecForge rnn",
        "Domino gru",
    ),
    *(
        "DFlash 2 selector",
        "TreeFlash swiglu",
        "speculators vanilla",
        "speculators gated",
        "speculators selector",
    ),
)


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_heads_of_others_have_the_log_probabilities_of_a_plain_forward_and_decode_losslessly(
    kind, target, tmp_path
):
    folder, expected = with_head(kind, tmp_path / "drafter", target)
    drafter = load_drafter(folder, target_layers=LAYERS)
    drafter.check_target(target)
    features = features_of(target, drafter.layer_ids)[None]
    state = drafter.state(1, 40)
    with state.add(1) as row:
        drafter.update_context(target, features, IDS[None, :-1], [len(IDS) - 1], row)
    block = drafter.draft_block(target, IDS[-1:], state)
    found = behind(
        drafter, target, block, torch.cat([IDS[-1:], BEFORE])[None, : drafter.block_size - 1]
    )[0].double()
    assert found.shape == expected.shape == (drafter.block_size - 1, V)
    assert torch.equal(found.isinf(), expected.isinf())
    assert torch.allclose(found, expected, atol=1e-5)
    plain = generate(target, None, IDS.tolist(), method="plain", max_new_tokens=10)
    done = generate(target, drafter, IDS.tolist(), budget=12, max_new_tokens=10, compile=False)
    assert done.ids == plain.ids and done.stats.rounds > 0


@pytest.fixture(scope="module")
def target(make_tiny):
    return make_tiny(torch.float64)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_written_by_hand_has_the_logits_of_a_plain_forward_and_decodes_losslessly(
    kind, target, tmp_path
):
    folder, expected = by_hand(kind, tmp_path / "drafter", target)
    drafter = load_drafter(folder, target_layers=LAYERS)
    drafter.check_target(target)
    marginals = drafted(target, drafter)
    assert marginals.shape == expected.shape == (drafter.block_size - 1, V)
    assert torch.equal(marginals.isinf(), expected.isinf())
    assert torch.allclose(marginals, expected, atol=1e-5)
    prompts = [IDS.tolist(), IDS[:5].tolist()]
    for method, budget, temperature in (("chain", 4, 0.0), ("ddtree", 30, 1.0)):
        options = {"max_new_tokens": 12, "temperature": temperature, "seed": 3}
        plain = generate(target, None, prompts, method="plain", **options)
        done = generate(
            target, drafter, prompts, method=method, budget=budget, compile=False, **options
        )
        assert [answer.ids for answer in done] == [answer.ids for answer in plain]
        assert all(answer.stats.rounds > 0 for answer in done)


def padded(folder: Path, rows: int) -> Path:
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
    folder, expected = by_hand(kind, tmp_path / "drafter", target)
    drafter = load_drafter(padded(folder, V + 7), target_layers=LAYERS)
    drafter.check_target(target)
    assert torch.allclose(drafted(target, drafter), expected, atol=1e-5)
    assert not [name for name, tensor in drafter.state_dict().items() if len(tensor) == V + 7]
    for method, budget, temperature in (("chain", 4, 0.0), ("ddtree", 30, 1.0)):
        options = {"max_new_tokens": 12, "temperature": temperature, "seed": 3}
        plain = generate(target, None, IDS.tolist(), method="plain", **options)
        done = generate(
            target, drafter, IDS.tolist(), method=method, budget=budget, compile=False, **options
        )
        assert done.ids == plain.ids and done.stats.rounds > 0
    save_drafter(drafter.config, drafter.state_dict(), tmp_path / "again")
    assert torch.allclose(drafted(target, load_drafter(tmp_path / "again")), expected, atol=1e-5)

    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"d2t": torch.ones(V + 7, dtype=torch.long)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="draft_vocab_size is more than vocab_size, and d2t"):
        load_drafter(folder)


def test_a_head_of_a_padded_draft_vocabulary_drafts_no_token_that_the_target_lacks(
    target, tmp_path
):
    """Its matrices have a row for each token, padded as the target's head is."""
    folder, _ = with_head("DeepSpec vanilla", tmp_path / "drafter", target)
    whole = load_drafter(folder, target_layers=LAYERS)
    drafter = load_drafter(padded(folder, V + 7), target_layers=LAYERS)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, drafter.state_dict()[name]), name
    plain = generate(target, None, IDS.tolist(), method="plain", max_new_tokens=10)
    done = generate(target, drafter, IDS.tolist(), budget=12, max_new_tokens=10, compile=False)
    assert done.ids == plain.ids and done.stats.rounds > 0


@pytest.mark.parametrize("kind", ["sliding", "causal", "deepspec"])
def test_the_trained_block_is_the_drafted_one(kind, target, tmp_path):
    """Many blocks of a packed row under shared masks have the logits of the block that decoding
    drafts."""
    drafter = load_drafter(by_hand(kind, tmp_path / "drafter", target)[0])
    rows = {"ids": torch.cat([IDS[:6], IDS])[None], "documents": torch.tensor([[0] * 6 + [1] * 14])}
    rows["positions"] = torch.cat([torch.arange(6), torch.arange(14)])[None]
    anchors = torch.tensor([[3, 12, 19]])  # the last one is where IDS ends
    given = target.packed_features(
        rows["ids"], rows["positions"], rows["documents"], drafter.layer_ids
    )
    with torch.no_grad():
        states = packed_states(drafter, target, rows, anchors, given.context, drafter)
    trained = (
        states[0, 2, drafter.first_draft_slot :] @ head_weight(drafter, target).T
    ).log_softmax(-1)
    assert torch.allclose(trained, drafted(target, drafter), atol=1e-5)


def test_drafts_of_fixed_shapes_of_a_sliding_drafter_are_the_same(target, tmp_path):
    drafter = load_drafter(by_hand("sliding", tmp_path / "drafter", target)[0])
    with torch.inference_mode():
        assert torch.allclose(
            drafted(target, drafter, fixed=1), drafted(target, drafter), atol=1e-5
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
    folder = written(tmp_path / "drafter", speculators(draft_vocab_size=3), weights | vocabulary(3))
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
    answer = generate(target, drafter, IDS.tolist(), **options)
    assert len(answer.ids) == 20
    if method != "static" or not temperature:  # a sampled static tree has draws of its own
        rest = ("temperature", "seed", "repetition_penalty", "top_p", "max_new_tokens")
        plain = generate(
            target, None, IDS.tolist(), method="plain", **{key: options[key] for key in rest}
        )
        assert answer.ids == plain.ids


SCALED = {  # what transformers asks for beside the base
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


@pytest.mark.parametrize("kind", SCALED)
def test_rotary_positions_in_both_spellings(kind, target, tmp_path):
    """Cosines and sines are transformers' own for the same parameters, and both spellings draft the
    same."""
    new = {"rope_type": kind, "rope_theta": 500.0} | SCALED[kind]
    old = (
        {"type" if kind == "linear" else "rope_type": kind} | SCALED[kind] if SCALED[kind] else None
    )
    folders = [
        written(tmp_path / "new", public(rope_theta=None, rope_parameters=new), dflash_weights()),
        written(tmp_path / "old", public(rope_theta=500.0, rope_scaling=old), dflash_weights()),
    ]
    drafters = [load_drafter(folder) for folder in folders]
    rotary = Qwen3RotaryEmbedding(
        Qwen3Config(head_dim=E, max_position_embeddings=512, rope_parameters=dict(new))
    )
    positions = torch.arange(60)[None]
    cos, sin = rotary(torch.zeros(1), positions)
    ours_cos, ours_sin = drafters[0].angles(positions)
    assert torch.allclose(ours_cos, cos.double(), atol=1e-6)
    assert torch.allclose(ours_sin[..., E // 2 :], sin[..., E // 2 :].double(), atol=1e-6)
    first, second = (drafted(target, drafter) for drafter in drafters)
    assert torch.equal(first, second)
    save_drafter(drafters[0].config, drafters[0].state_dict(), tmp_path / "again")
    assert torch.equal(drafted(target, load_drafter(tmp_path / "again")), first)
    if old is not None:  # and scaling is not lost on the way
        simple = load_drafter(
            written(tmp_path / "simple", public(rope_theta=500.0), dflash_weights())
        )
        assert not torch.allclose(first, drafted(target, simple), atol=1e-3)


def test_null_is_as_good_as_nothing(target, tmp_path):
    own = {"block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": TAPPED, "causal": None}
    config = public(dflash_config=own) | dict.fromkeys(
        ["block_size", "head_dim", "rope_scaling", "draft_vocab_size"]
    )
    config |= dict.fromkeys(
        ["num_target_layers", "sliding_window", "use_sliding_window", "hidden_act", "is_causal"]
    )
    weights = dflash_weights()
    drafter = load_drafter(written(tmp_path / "null", config, weights))
    plain = load_drafter(written(tmp_path / "plain", public(), weights))
    assert torch.equal(drafted(target, drafter), drafted(target, plain))


def test_layer_types_follow_from_the_window_where_they_are_not_given(tmp_path):
    options = {
        "layer_types": None,
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
    }
    drafter = load_drafter(written(tmp_path / "drafter", public(**options), dflash_weights()))
    assert drafter.attention_patterns == [
        (False, None),
        (True, 9),
    ] and drafter.pattern_of_layer == [0, 1]


def test_shards_with_an_index(target, tmp_path):
    folder = written(tmp_path / "whole", public(), dflash_weights())
    whole = drafted(target, load_drafter(folder))
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(weights)}
    for file in set(places.values()):
        save_file({name: weights[name] for name in places if places[name] == file}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    assert torch.equal(drafted(target, load_drafter(folder)), whole)

    def refused(**changes: str) -> str:
        index.write_text(json.dumps({"weight_map": places | changes}))
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
        assert f"{path!r}, which is no safetensors file of this folder" in refused(
            **{"norm.weight": path}
        )
    for content, word in (
        ("{", "cannot be read"),
        ("[]", "no JSON object"),
        ("{}", "no weight_map"),
    ):
        index.write_text(content)
        with pytest.raises((ValueError, FileNotFoundError), match=word):
            load_drafter(folder)


TORCHSPEC = flat(model_type="dflash") | {"architectures": ["DFlashDraftModel"]}
WRONG = [
    (public(hidden_size=None), ["drafter: config.json: hidden_size is missing$"]),
    (public(block_size=None), ["block_size is missing"]),
    (public(block_size=1), ["block_size is 1"]),
    (public(dflash_config=None), ["mask_token_id is missing", "target_layer_ids is missing"]),
    (
        public(dflash_config={"mask_token_id": V, "target_layer_ids": [1, 6]}),
        [f"mask_token_id is {V}", r"\[1, 6\]: the"],
    ),
    (
        public(dflash_config={"mask_token_id": "x", "target_layer_ids": 3}),
        ["'x', expected", "3, expected a list"],
    ),
    (public(layer_types=["full_attention"]), ["layer_types"]),
    (public(layer_types=["full_attention", "linear"]), ["linear"]),
    (public(layer_types=["sliding_attention"] * 2), ["sliding_window is missing"]),
    (public(num_key_value_heads=3), ["num_key_value_heads is 3"]),
    (
        public(hidden_act="gelu", attention_bias=True),
        ["hidden_act is 'gelu'", "attention_bias is True"],
    ),
    (public(rope_scaling={"rope_type": "longrope"}), ["rope_type is 'longrope'"]),
    (
        public(rope_scaling={"rope_type": "llama3", "factor": 8}),
        ["low_freq_factor is missing", "high_freq_factor"],
    ),
    (public(rms_norm_eps="tiny", vocab_size=0), ["rms_norm_eps is 'tiny'", "vocab_size is 0"]),
    (public(target_hidden_size=64), ["target_hidden_size is 64"]),
    (public(architectures=["DFlash2DraftModel"]), ["selector_rank is missing"]),
    (
        public(dflash_config=public()["dflash_config"] | {"projector_type": "domino"}),
        ["gru_hidden_dim is missing"],
    ),
    (
        public(dflash_config=public()["dflash_config"] | {"markov_rank": 4}, markov_rank=5),
        ["markov_rank is 4, and 5 outside"],
    ),
    (
        flat(sample_from_anchor=True, shift_label=False),
        ["shift_label is False, and sample_from_anchor True"],
    ),
    (
        flat(enable_confidence_head=True),
        ["enable_confidence_head is true, and there is no Markov head"],
    ),
    (public(architectures="DFlashDraftModel"), ["architectures is DFlashDraftModel, expected"]),
    (
        public(is_causal=False, dflash_config=public()["dflash_config"] | {"causal": True}),
        ["is_causal contradicts"],
    ),
    (
        public(dflash_config=public()["dflash_config"] | {"last_tap": "both"}),
        ["last_tap is 'both'"],
    ),
    (flat(markov_rank=-1), ["markov_rank is -1"]),
    (
        flat(markov_rank=4),
        ["missing tensors: markov_head.markov_w1.weight, markov_head.markov_w2.weight"],
    ),
    (speculators(markov_rank=256), ["missing tensors: markov_head.markov_w1.weight"]),
    (
        speculators(speculators_model_type="peagle"),
        ["this is a P-EAGLE drafter .*, which is not read here$"],
    ),
    (
        public(architectures=["LlamaForCausalLMEagle3"], parallel_drafting=True),
        ["this is a P-EAGLE drafter"],
    ),
    (
        public(architectures=["Qwen3DFlyModel"]),
        ["this is a DFly drafter .*, which is not read here$"],
    ),
    (TORCHSPEC | {"block_size": None}, ["block_size is missing$"]),
    (
        public(architectures=["QwenDFlareDraftModel"]),
        ["missing tensors: layer_fusion_weights, .*unknown tensors: fc.w"],
    ),
    (
        speculators(speculators_model_type="eagle3"),
        ["'eagle3', expected .* token by token are not read"],
    ),
    (speculators(transformer_layer_config=None), ["config.json: hidden_size is missing"]),
    (speculators(aux_hidden_state_layer_ids=[0, 2]), [r"\[0, 2\]: the target has layers 1 on"]),
    (
        speculators(aux_hidden_state_layer_ids=None, mask_token_id=None),
        ["aux_hidden_state_layer_ids is", "mask_token_id"],
    ),
    (
        speculators(draft_vocab_size=V + 1) | {"vocab_size": V + 1},
        ["vocab_size is 97, and 98 outside"],
    ),
]


@pytest.mark.parametrize("config, words", WRONG, ids=range(len(WRONG)))
def test_wrong_and_missing_keys_are_named_all_of_them(config, words, tmp_path):
    folder = written(tmp_path / "drafter", config, dflash_weights())
    with pytest.raises(ValueError) as error:
        load_drafter(folder)
    for word in words:
        assert re.search(word, str(error.value)), str(error.value)


NATIVE = {
    "architectures": ["MuseGlimmerAssistantModel"],
    "model_type": "muse_glimmer_assistant",
    "block_size": BLOCK,
    "mask_token_id": MASK,
    "target_layer_ids": TAPPED,
    "num_hidden_layers": 2,
    "layer_types": ["full_attention"] * 2,
    "rope_parameters": {"rope_type": "yarn", "factor": 2.0},
    **SIZES,
}
OURS = {
    "dart_config": {"target_layer_ids": TAPPED, "shifted": True, "qk_norm": True},
    "block_size": 5,
}
TENSORS = {"lm_head.weight": None, "d2t": None}
LAYOUTS = {
    "public": public(rope_scaling={"rope_type": "linear", "factor": 2.0}),
    "deepspec": flat(),
    "torchspec": TORCHSPEC,
    "angelslim": public(architectures=["QwenDFlashDraftModel"]),
    "xpress": public(
        architectures=["Qwen3XPressModel"], xpress_rank=4, xpress_mlp_hidden=8, xpress_num_passes=6
    ),
    "speculators xpress": speculators(speculators_model_type="xpress"),
    "dspark": flat(markov_rank=4, markov_head_type="rnn", enable_confidence_head=True),
    "domino": public(
        dflash_config=public()["dflash_config"] | {"projector_type": "domino", "gru_hidden_dim": 4}
    ),
    "treeflash": public(
        architectures=["TreeFlashDraftModel"], treeflash_config={"ar_approximation": "swiglu"}
    ),
    "speculators": speculators(),
    "speculators dspark": speculators(speculators_model_type="dspark"),
    "speculators dflash2": speculators(speculators_model_type="dflash2"),
    "transformers": NATIVE,
}
if "dart" in FAMILIES:
    named = {"architectures": ["DARTDraftModel"], "num_target_layers": LAYERS}
    LAYOUTS["dart"] = dart(20, num_target_layers=LAYERS)
    LAYOUTS["our dart"] = dart(20, draft_length=None, **named) | OURS


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_unknown_key_is_a_fault_unless_it_asks_for_nothing_or_is_bookkeeping(layout):
    """At the top, and in every object whose keys count: nothing else changes."""
    config = LAYOUTS[layout]
    found = read(Folder(Path(), config, TENSORS, []))
    assert found.problems == found.doubts == [] and found.options
    objects = ("dflash_config", "dart_config", "treeflash_config", "transformer_layer_config")
    for place in (None, *(key for key in objects if key in config)):
        for name, value in product(
            ("of_another_kind", "train_steps"), (True, 0, 2.5, "word", [1], {"inner": 1}, None)
        ):
            changed = deepcopy(config)
            (changed if place is None else changed[place])[name] = value
            again = read(Folder(Path(), changed, TENSORS, []))
            if value and name == "of_another_kind":
                assert len(again.problems) == 1 and "of_another_kind is" in again.problems[0], place
            else:
                assert again.problems == [] and again.options == found.options
                assert [f" {name}" in doubt for doubt in again.doubts] == [True] * (
                    value is not None
                ), place


COMPUTED = {  # a value that changes what a drafter computes, and the one that does not
    "logit_scale": (2.0, 1.0),
    "rope_interleave": (True, False),
    "use_rope": (False, True),
    "residual_multiplier": (0.22, 1),
    "hidden_activation": ("gelu", "silu"),
    "attn_logit_softcapping": (50.0, None),
}


@pytest.mark.parametrize("key", COMPUTED)
def test_keys_that_change_what_is_computed_are_faults_unless_they_are_neutral(key):
    other, neutral = COMPUTED[key]
    for layout, config in LAYOUTS.items():
        problems = read(Folder(Path(), config | {key: other}, TENSORS, [])).problems
        assert len(problems) == 1 and f"{key} is {other!r}" in problems[0], layout
        reading = read(Folder(Path(), config | {key: neutral}, TENSORS, []))
        assert reading.problems == reading.doubts == [], layout


@pytest.mark.parametrize("kind", ["default", "yarn"])
def test_keys_within_rotary_parameters_are_judged_too(kind):
    """LiquidAI's drafters rotate neighbouring entries, and say so in one place or the other."""
    rope = {"rope_type": kind} | SCALED[kind]

    def problems(**more: object) -> list[str]:
        return read(Folder(Path(), public(rope_parameters=rope | more), TENSORS, [])).problems

    assert problems() == problems(rope_interleave=False) == problems(mrope_section=[1, 1, 2]) == []
    assert "rope_interleave is True" in problems(rope_interleave=True)[0]
    assert "partial_rotary_factor is 0.5" in problems(partial_rotary_factor=0.5)[0]
    assert "turned_twice is True, and nobody here knows" in problems(turned_twice=True)[0]


def test_an_unknown_key_stops_the_loading_and_bookkeeping_is_said(tmp_path):
    with pytest.raises(
        ValueError, match="config.json: new_idea is 1, and nobody here knows .* remove the key if"
    ):
        load_drafter(written(tmp_path, public(new_idea=1), dflash_weights()))
    with pytest.warns(UserWarning, match="nobody here knows the key training_tokens"):
        load_drafter(written(tmp_path, public(training_tokens=10**9), dflash_weights()))


MORE = {  # tensors beside DFlash's, of drafters with DFlash's keys
    "DSpine": {"readouts.0.weight": (R, D), "writes.0.weight": (D, R), "writes.1.weight": (D, R)},
    "UBTree": {"bigram.predecessor.weight": (V, R), "bigram.successor.weight": (V, R)},
    "a norm behind fc": {"layers.0.self_attn.rope.freqs": (E,), "fc.bias": (D,)},
}


@pytest.mark.parametrize("name", MORE)
@pytest.mark.parametrize("kind", ["full", "deepspec", "speculators"])
def test_a_drafter_with_more_tensors_is_never_loaded_without_them(name, kind, target, tmp_path):
    folder, _ = by_hand(kind, tmp_path / "drafter", target)
    weights = load_file(folder / "model.safetensors")
    load_drafter(folder)
    save_file(
        weights | {key: torch.zeros(shape) for key, shape in MORE[name].items()},
        folder / "model.safetensors",
    )
    with pytest.raises(ValueError, match=f"unknown tensors: {', '.join(sorted(MORE[name]))}"):
        load_drafter(folder)
    # nor where they lie in another file, or under a name that is read as another's
    save_file(weights, folder / "model.safetensors")
    (folder / "adapter").mkdir()
    save_file({"x": torch.zeros(1)}, folder / "adapter" / "adapter.safetensors")
    with pytest.raises(
        ValueError, match="adapter/adapter.safetensors: tensors that would be left out"
    ):
        load_drafter(folder)


def test_tensors_under_two_names_are_refused(tmp_path):
    weights = dflash_weights() | {"model.norm.weight": torch.ones(D)}
    tree = {"ar_approximation": "swiglu"}
    config = public(architectures=["TreeFlashDraftModel"], treeflash_config=tree)
    with pytest.raises(
        ValueError, match="tensors stored twice, under two names: model.norm.weight"
    ):
        load_drafter(written(tmp_path, config, weights))


def test_what_transformers_writes_into_every_config_is_harmless(tmp_path):
    """Its class, with all that it saves, defaults included."""
    config = Qwen3Config(**SIZES, num_hidden_layers=2, layer_types=["full_attention"] * 2)
    raw = config.to_dict() | {key: value for key, value in public().items() if key != "rope_theta"}
    assert load_drafter(written(tmp_path, raw, dflash_weights())).layer_ids == tuple(TAPPED)


def test_files_that_never_end_are_not_read(tmp_path):
    folder = written(tmp_path / "drafter", public(), dflash_weights())
    config = folder / "config.json"
    for make in (lambda: config.symlink_to("/dev/zero"), lambda: os.mkfifo(config)):
        config.unlink()
        make()
        with pytest.raises(FileNotFoundError, match="config.json is no regular file"):
            load_drafter(folder)
    config.unlink()
    with config.open("wb") as file:
        file.truncate(65 << 20)
    with pytest.raises(FileNotFoundError, match="exceeds the limit of"):
        load_drafter(folder)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("/dev/zero")
    with pytest.raises(FileNotFoundError, match="model.safetensors is missing"):
        load_drafter(folder)


def test_published_dart_says_what_it_lacks(tmp_path):
    folder = written(tmp_path / "drafter", dart(20), dart_weights(20) | vocabulary(20))
    with pytest.raises(ValueError, match="num_target_layers is missing: load_drafter"):
        load_drafter(folder)
    written(
        folder, dart(20, draft_length=None, num_hidden_layers=2), dart_weights(20) | vocabulary(20)
    )
    with pytest.raises(ValueError, match="draft_length is missing.*num_hidden_layers is 2"):
        load_drafter(folder, target_layers=LAYERS)


def test_missing_unknown_and_wrong_tensors_are_named(tmp_path):
    weights = dflash_weights(lm_head__weight=(20, D)) | vocabulary(20)
    config = public(draft_vocab_size=20)
    folder = tmp_path / "drafter"

    def refused(**changes: torch.Tensor | None) -> str:
        changes = {name.replace("__", "."): tensor for name, tensor in changes.items()}
        kept = {name: tensor for name, tensor in (weights | changes).items() if tensor is not None}
        written(folder, config, kept)
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
        assert "d2t leads twice to a token, or outside the vocabulary" in refused(d2t=wrong)
    written(folder, config, weights)
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
        FileNotFoundError, match="found neither as a local folder nor on the model hub"
    ):
        load_drafter("nobody/no-such-drafter")
    with pytest.raises(FileNotFoundError, match="is no folder"):
        load_drafter(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match="is no folder"):
        load_drafter("../no-such-drafter")
    folder = written(tmp_path / "drafter", public(), dflash_weights())
    asked = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert load_drafter("some/drafter").layer_ids == tuple(TAPPED)
    assert asked == [("some/drafter", ["*.json", "*.safetensors"])]  # no code, no pickles


def test_a_drafter_of_another_target_is_refused(target, tmp_path):
    own = {"mask_token_id": 96, "target_layer_ids": [1, 7]}
    folder = written(
        tmp_path / "drafter", public(num_target_layers=8, dflash_config=own), dflash_weights()
    )
    with pytest.raises(
        ValueError, match=r"num_target_layers 8, the target has 6; target_layer_ids \[1, 7\]"
    ):
        load_drafter(folder).check_target(target)
