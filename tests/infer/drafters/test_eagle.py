"""EAGLE-3 and MTP drafters in speculators' layout: the log-probabilities of a plain forward pass written here, the best
tree of all prefixes, lossless decoding, and what they cannot do in a sentence."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from data.prompts import Prompt
from infer import generate, load_drafter
from infer.config import DrafterConfig, EngineConfig, EvaluationConfig
from infer.engine.engine import Engine
from infer.evaluation.evaluate import evaluate
from infer.formats.compatibility import check_folder
from infer.formats.export import export_drafter
from infer.trees.ddtree import ddtree
from infer.trees.methods import TREES
from infer.trees.tree import Proposal

D, V, HEADS, GROUPS, E, LAYERS = 32, 97, 4, 2, 8, 6  # of `make_tiny`'s targets
IDS = torch.randint(90, (9,), generator=torch.Generator().manual_seed(9))  # the last one is the bonus token
KINDS = {  # what config.json says
    "eagle3": {"transformer_layer_config": {"model_type": "llama"}, "norm_before_residual": True},
    "eagle3 pruned": {"transformer_layer_config": {"model_type": "qwen3"}, "draft_vocab_size": 30, "fc_norm": True},
    "eagle3.1": {"transformer_layer_config": {"model_type": "llama"}, "norm_before_fc": True, "norm_output": True},
    "mtp": {"transformer_layer_config": {"model_type": "qwen3"}},
}


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def folder_of(kind: str, folder, length: int = 3) -> tuple[dict, dict]:
    """Write a drafter of a kind with random weights; return its config.json and tensors."""
    mtp, changes = kind == "mtp", KINDS[kind]
    size = D if mtp else 2 * D
    shapes = {"self_attn.q_proj": (HEADS * E, size), "self_attn.k_proj": (GROUPS * E, size)}
    shapes |= {"self_attn.v_proj": (GROUPS * E, size), "self_attn.o_proj": (D, HEADS * E)}
    shapes |= {"mlp.gate_proj": (48, D), "mlp.up_proj": (48, D), "mlp.down_proj": (D, 48)}
    shapes |= {"input_layernorm": (D,), "post_attention_layernorm": (D,)}
    if changes["transformer_layer_config"]["model_type"] == "qwen3":
        shapes |= {"self_attn.q_norm": (E,), "self_attn.k_norm": (E,)}
    if mtp:
        shapes |= {"token_layernorm": (D,), "hidden_layernorm": (D,), "input_proj": (D, 2 * D), "final_layernorm": (D,)}
        shapes = {f"mtp_layers.0.{name}": shape for name, shape in shapes.items()}
    else:
        shapes |= {"hidden_norm": (D,)}
        shapes = {f"layers.0.{name}": shape for name, shape in shapes.items()}
        shapes |= {"fc": (D, 3 * D), "norm": (D,), "embed_tokens": (V, D)}
        shapes |= {"lm_head": (changes.get("draft_vocab_size", V), D)}
    if changes.get("norm_before_fc"):
        shapes["input_norm"] = (3 * D,)
    if changes.get("fc_norm"):
        shapes |= {f"fc_norm.{i}": (D,) for i in range(3)}
    generator = torch.Generator().manual_seed(1)
    weights = {
        f"{name}.weight": torch.randn(shape, generator=generator, dtype=torch.float64) * 0.3 + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    if "draft_vocab_size" in changes:
        tokens = torch.randperm(V, generator=generator)[:30].sort().values
        weights |= {
            "d2t": tokens - torch.arange(30),
            "t2d": torch.zeros(V, dtype=torch.bool).index_fill_(0, tokens, True),
        }
    inner = {"hidden_size": D, "intermediate_size": 48, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS}
    inner |= {"head_dim": E, "rms_norm_eps": 1e-6, "vocab_size": V, "max_position_embeddings": 512}
    inner |= {"num_hidden_layers": LAYERS if mtp else 1, "rope_theta": 10000.0} | changes["transformer_layer_config"]
    method = {"proposal_type": "greedy", "speculative_tokens": length}
    name = "mtp" if mtp else "eagle3"
    config = {
        "architectures": ["MTPDraftModel" if mtp else "Eagle3DraftModel"],
        "speculators_model_type": name,
        "speculators_config": {
            "algorithm": name,
            "proposal_methods": [method],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "x/y", "architectures": ["Qwen3ForCausalLM"]},
        },
        **({} if mtp else {"draft_vocab_size": V, "eagle_aux_hidden_state_layer_ids": [2, 3, 5]}),
        **changes,
        "transformer_layer_config": inner,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return config, weights


def plain_forward(config: dict, w: dict, target, path: list[int]) -> torch.Tensor:
    """Log-probabilities (V,) of the token behind IDS and the drafted tokens `path`, one item at a time, causally."""
    mtp = config["speculators_model_type"] == "mtp"
    with torch.no_grad():
        hidden = []
        hooks = [layer.register_forward_hook(lambda m, i, out: hidden.append(out)) for layer in target.body.layers]
        target.model(IDS[None, :-1])
        for hook in hooks:
            hook.remove()
    hidden = [out if isinstance(out, torch.Tensor) else out[0] for out in hidden]
    layer = {name.split("layers.0.")[1]: t for name, t in w.items() if "layers.0." in name}
    if mtp:
        states = hidden[-1][0]
    else:
        parts = [hidden[i - 1][0] for i in config["eagle_aux_hidden_state_layer_ids"]]
        if config.get("fc_norm"):
            parts = [rms(part, w[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)]
        states = torch.cat(parts, -1)
        states = (rms(states, w["input_norm.weight"]) if config.get("norm_before_fc") else states) @ w["fc.weight"].T
    embedding = w.get("embed_tokens.weight", target.embedding.weight)
    tokens, keys, values, state = [*IDS[1:].tolist(), *path], [], [], None
    frequencies = 10000.0 ** (-torch.arange(0, E, 2).double() / E)
    for at, token in enumerate(tokens):
        state = states[at] if at < len(states) else state
        if mtp:
            pair = [
                rms(embedding[token], layer["token_layernorm.weight"]),
                rms(state, layer["hidden_layernorm.weight"]),
            ]
            residual = layer["input_proj.weight"] @ torch.cat(pair)
            inputs = rms(residual, layer["input_layernorm.weight"])
        else:
            normed = rms(state, layer["hidden_norm.weight"])
            residual = normed if config.get("norm_before_residual") else state
            inputs = torch.cat([rms(embedding[token], layer["input_layernorm.weight"]), normed])
        q, k, v = ((layer[f"self_attn.{n}_proj.weight"] @ inputs).view(-1, E) for n in "qkv")
        if "self_attn.q_norm.weight" in layer:
            q, k = rms(q, layer["self_attn.q_norm.weight"]), rms(k, layer["self_attn.k_norm.weight"])
        cos, sin = (at * frequencies).cos(), (at * frequencies).sin()
        q, k = (torch.cat([a * cos - b * sin, b * cos + a * sin], -1) for a, b in (x.chunk(2, -1) for x in (q, k)))
        keys.append(k.repeat_interleave(HEADS // GROUPS, 0))
        values.append(v.repeat_interleave(HEADS // GROUPS, 0))
        shares = ((torch.stack(keys) * q).sum(-1) / E**0.5).softmax(0)  # (S, H)
        mixed = (shares[..., None] * torch.stack(values)).sum(0).flatten()
        out = residual + layer["self_attn.o_proj.weight"] @ mixed
        inner = rms(out, layer["post_attention_layernorm.weight"])
        gate = F.silu(layer["mlp.gate_proj.weight"] @ inner) * (layer["mlp.up_proj.weight"] @ inner)
        out = out + layer["mlp.down_proj.weight"] @ gate
        normed = rms(out, layer["final_layernorm.weight"] if mtp else w["norm.weight"])
        state = normed if mtp or config.get("norm_output") else out
    logits = w.get("lm_head.weight", target.head_weight) @ normed
    if "d2t" not in w:
        return logits.log_softmax(-1)
    known = w["d2t"] + torch.arange(len(w["d2t"]))
    return torch.full((V,), -torch.inf).double().index_copy_(0, known, logits.log_softmax(-1))


@pytest.fixture(scope="module")
def target(make_tiny):
    return make_tiny(torch.float64)[0]


def begun(target, drafter):
    """The drafter's memory of IDS but for the bonus token, taken in in two pieces."""
    ids = IDS[None, :-1]
    features = target.packed_features(ids, torch.arange(8)[None], torch.zeros_like(ids), drafter.layer_ids).context
    state = drafter.state(1, 40)
    with state.add(1) as row:
        drafter.update_context(target, features[:, :5], ids[:, :5], [5], row)
    drafter.update_context(target, features[:, 5:], ids[:, 5:], [3], state)
    return state


@pytest.mark.parametrize("kind", KINDS)
def test_the_tree_is_the_best_of_all_prefixes_under_a_plain_forward(kind, target, tmp_path):
    """Prefixes of two tokens, out of the ten likeliest behind the bonus token and behind each of them."""
    config, weights = folder_of(kind, tmp_path / "drafter")
    drafter = load_drafter(tmp_path / "drafter", target_layers=LAYERS)
    drafter.check_target(target)
    state, bonus = begun(target, drafter), IDS[-1:]
    first = plain_forward(config, weights, target, [])
    chain = drafter.draft(target, bonus, state)[0].double()
    assert chain.shape == (3, V) and torch.equal(chain[0].isinf(), first.isinf())
    assert torch.allclose(chain[0], first, atol=1e-5)
    two = chain.argmax(-1)[:2].tolist()
    assert torch.allclose(chain[2], plain_forward(config, weights, target, two), atol=1e-5)
    steps = drafter.conditional_draft(target, bonus, drafter.draft_block(target, bonus, state), None, 10)
    tokens, log_probs = steps.chain(3)
    assert tokens[0].tolist() == chain.argmax(-1).tolist()
    assert torch.allclose(log_probs[0].double(), chain.max(-1).values, atol=1e-5)

    drafter.block_size = 3
    steps = drafter.conditional_draft(target, bonus, drafter.draft_block(target, bonus, state), None, 10)
    tree = ddtree(Proposal(bonus, None, 25, steps=steps))
    top = first.topk(10).indices.tolist()
    score = {(x,): float(first[x]) for x in top}
    for x in top:
        behind = plain_forward(config, weights, target, [x])
        score |= {(x, y): score[(x,)] + float(behind[y]) for y in behind.topk(10).indices.tolist()}
    best = sorted(score, key=score.get, reverse=True)[:25]
    found = [()]
    for node in range(1, 26):
        found.append((*found[int(tree.parents[0, node])], int(tree.tokens[0, node])))
    assert set(found[1:]) == set(best)
    assert torch.allclose(
        tree.log_probs[0, 1:].double(), torch.tensor([score[p] for p in found[1:]]).double(), atol=2e-5
    )


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_the_targets_own(kind, target, tmp_path):
    folder_of(kind, tmp_path / "drafter", length=4)
    drafter = load_drafter(tmp_path / "drafter", target_layers=LAYERS)
    prompts = [IDS.tolist(), IDS[:3].tolist(), [5]]
    for sampling in ({}, {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.2}):
        options = {"max_new_tokens": 10, "compile": False, **sampling}
        plain = [answer.ids for answer in generate(target, None, prompts, method="plain", **options)]
        for method, budget in (("chain", 3), ("ddtree", 1), ("ddtree", 20), *((("ddtree", "auto"),) * (not sampling))):
            done = generate(target, drafter, prompts, method=method, budget=budget, **options)
            assert [answer.ids for answer in done] == plain, (method, budget)


class Thirds:
    """A grammar: of every three tokens one, which one the tokens before decide; 3 has to follow 2."""

    def allowed(self, text: list[int], path: list[int]) -> np.ndarray:
        before, may = [*text, *path], np.zeros(V, bool)
        assert all(self.allowed([], before[:i])[token] for i, token in enumerate(before)), "asked behind a wrong path"
        may[sum(before) % 3 :: 3] = True
        return may if before[-1:] != [2] else np.arange(V) == 3

    def forced(self, text: list[int]) -> list[int]:
        return []

    def mask(self, scores: torch.Tensor, text: list[int], path: list[int]) -> torch.Tensor:
        return scores.masked_fill(~torch.from_numpy(self.allowed(text, path)), -torch.inf)


@pytest.mark.parametrize("kind", ["eagle3 pruned", "mtp"])
def test_the_tree_is_the_best_one_under_a_grammar(kind, target, tmp_path, monkeypatch):
    """Of prefixes of two tokens, against a plain forward; and texts of the whole engine."""
    config, weights = folder_of(kind, tmp_path / "drafter")
    drafter, grammar = load_drafter(tmp_path / "drafter", target_layers=LAYERS), Thirds()
    state, bonus = begun(target, drafter), IDS[-1:]
    drafter.block_size = 3
    steps = drafter.conditional_draft(target, bonus, drafter.draft_block(target, bonus, state), None, 40)
    steps.narrow({0: partial(grammar.allowed, [])})
    tree = ddtree(Proposal(bonus, None, 20, steps=steps))
    score, found = {(): 0.0}, [()]
    for path in ((), *((x,) for x in range(V))):
        if path in score:
            log_q = grammar.mask(plain_forward(config, weights, target, list(path))[None], [], list(path))[0]
            log_q = log_q.log_softmax(-1)
            score |= {(*path, y): score[path] + float(log_q[y]) for y in range(V) if log_q[y] > -torch.inf}
    best = sorted(score, key=score.get, reverse=True)[:21]
    for node in range(1, 21):
        found.append((*found[int(tree.parents[0, node])], int(tree.tokens[0, node])))
    assert set(found) == set(best)
    assert torch.allclose(tree.log_probs[0].double(), torch.tensor([score[p] for p in found]).double(), atol=2e-5)

    monkeypatch.setattr("infer.engine.base.follow", lambda options, target: Thirds())
    drafter.block_size = 4
    for sampling in ({}, {"temperature": 0.8, "seed": 3}):
        options = {"max_new_tokens": 10, "compile": False, **sampling}
        plain = generate(target, None, [IDS.tolist(), [5]], method="plain", **options)
        for method, budget in (("chain", 3), ("ddtree", 20)):
            done = generate(target, drafter, [IDS.tolist(), [5]], method=method, budget=budget, **options)
            assert [answer.ids for answer in done] == [answer.ids for answer in plain]


def test_a_drafter_that_agrees_with_the_target_is_accepted(target, tmp_path):
    """An MTP layer whose projection leads from each token of the target's text to the head's row of the next one."""
    _, weights = folder_of("mtp", tmp_path / "drafter", length=4)
    plain = generate(target, None, IDS.tolist(), method="plain", max_new_tokens=12)
    following = dict(zip(plain.ids, plain.ids[1:], strict=False))
    tokens, after = (torch.tensor(list(part)) for part in (following, following.values()))
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"mtp_layers.0.{name}.weight"].zero_()
    for name in ("token_layernorm", "final_layernorm"):
        weights[f"mtp_layers.0.{name}.weight"].fill_(1)
    embedded = rms(target.embedding.weight[tokens], torch.ones(D).double())  # (n, D)
    leads = (torch.linalg.pinv(embedded) @ target.head_weight[after]).T.detach()
    weights["mtp_layers.0.input_proj.weight"] = torch.cat([leads, torch.zeros(D, D)], 1).double()
    save_file(weights, tmp_path / "drafter" / "model.safetensors")
    drafter = load_drafter(tmp_path / "drafter")
    answer = generate(target, drafter, IDS.tolist(), method="ddtree", budget=16, max_new_tokens=12, compile=False)
    assert answer.ids == plain.ids and answer.stats.tau > 2


def test_an_evaluation_has_its_chain_and_its_trees(target, tmp_path):
    """What compares drafters measures it like block drafters, but for the trees that it cannot have."""
    folder_of("eagle3", tmp_path / "drafter")
    drafter = load_drafter(tmp_path / "drafter")
    options = EvaluationConfig(max_new_tokens=8, budgets=[4], samples=0)
    result = evaluate(target, drafter, [Prompt(IDS.tolist(), "any")], options)
    ours = [method for method in result.methods if method.name in TREES]
    assert [method.name for method in ours] == ["plain", "chain", "ddtree"]
    assert all(method.identical for method in ours)


def test_a_targets_own_mtp_layer_is_read_from_its_folder(random_target, tmp_path):
    """Qwen3.5's: gates, norms of one more than their weight, a part of the angles; the layer is transformers' own, and
    drafts what it computes for the whole text at once."""
    from transformers import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

    sizes = {"hidden_size": D, "intermediate_size": 48, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS}
    linear = {
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    kinds = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "head_dim": 8}
    config = Qwen3_5TextConfig(**sizes, **linear, **kinds, vocab_size=V, max_position_embeddings=512)
    target = random_target(config)
    one = Qwen3_5TextConfig(**sizes, **linear, head_dim=8, num_hidden_layers=1, layer_types=["full_attention"])
    one._attn_implementation = "sdpa"
    layer, parts = (
        Qwen3_5DecoderLayer(one, 0).float(),
        {name: Qwen3_5RMSNorm(D) for name in ("hidden", "embedding", "")},
    )
    fc = torch.nn.Linear(2 * D, D, bias=False)
    generator = torch.Generator().manual_seed(7)
    for parameter in (*layer.parameters(), *fc.parameters(), *(p for m in parts.values() for p in m.parameters())):
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    weights = {f"mtp.layers.0.{name}": tensor for name, tensor in layer.state_dict().items()}
    weights |= {"mtp.fc.weight": fc.weight.data, "mtp.norm.weight": parts[""].weight.data}
    weights |= {f"mtp.pre_fc_norm_{name}.weight": parts[name].weight.data for name in ("hidden", "embedding")}
    folder = tmp_path / "target"
    folder.mkdir()
    raw = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": config.to_dict()}
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(weights | {"model.embed_tokens.weight": torch.zeros(V, D)}, folder / "model.safetensors")

    drafter = load_drafter(folder)
    drafter.check_target(target)
    assert drafter.layer_ids == (2,)  # behind the last norm
    state = begun(target, drafter)
    chain = drafter.draft(target, IDS[-1:], state)[0]
    drafts = chain.argmax(-1).tolist()
    ids, positions = IDS[None, :-1], torch.arange(8)[None]
    hidden = target.packed_features(ids, positions, torch.zeros_like(ids), (2,)).context[0]
    tokens, expected = [*IDS[1:].tolist()], []
    with torch.no_grad():
        for draft in drafts:
            embedded = parts["embedding"](target.embed(torch.tensor(tokens)))
            mixed = fc(torch.cat([embedded, parts["hidden"](hidden)], -1))[None]
            at = torch.arange(len(tokens))[None]
            mask = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()[None, None]
            angles = drafter.layers[0].rotary[0](mixed, at)
            states = parts[""](layer(mixed, position_embeddings=angles, attention_mask=mask, position_ids=at)[0])
            expected.append(target.head(states[-1]).log_softmax(-1))
            hidden, tokens = torch.cat([hidden, states[-1:]]), [*tokens, draft]
    assert torch.allclose(chain, torch.stack(expected), atol=1e-4)
    prompts = [IDS.tolist(), IDS[:3].tolist()]
    plain = [text.ids for text in generate(target, None, prompts, method="plain", max_new_tokens=8, compile=False)]
    for method in ("chain", "ddtree"):
        done = generate(target, drafter, prompts, method=method, budget=12, max_new_tokens=8, compile=False)
        assert [text.ids for text in done] == plain


def test_what_it_cannot_do_is_said(target, tmp_path):
    config, weights = folder_of("eagle3", tmp_path / "drafter")
    drafter = load_drafter(tmp_path / "drafter")
    with pytest.raises(ValueError, match="method=static needs distributions .* use method=chain or ddtree"):
        Engine(target, drafter, EngineConfig(method="static"), 40)
    with pytest.raises(ValueError, match="EAGLE-3 drafters are read here, and not exported"):
        export_drafter(drafter, "speculators", target, tmp_path / "out")
    with pytest.raises(ValueError, match="drafter.family=eagle: use dflash or dart"):
        DrafterConfig(family="eagle", layers=1).check()
    verdicts = {verdict.engine: verdict.problems for verdict in check_folder(tmp_path / "drafter")}
    assert verdicts["speculators, and vLLM through it"] == verdicts["blockdraft"] == []
    assert all(problems for engine, problems in verdicts.items() if "SGLang" in engine or "authors" in engine)

    def refused(**changes: object) -> str:
        (tmp_path / "drafter" / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(ValueError) as error:
            load_drafter(tmp_path / "drafter")
        return str(error.value)

    inner = config["transformer_layer_config"]
    assert "num_hidden_layers is 2" in refused(transformer_layer_config=inner | {"num_hidden_layers": 2})
    assert "model_type is 'gemma'" in refused(transformer_layer_config=inner | {"model_type": "gemma"})
    assert "speculators_config.other is a key" in refused(
        speculators_config=config["speculators_config"] | {"other": 1}
    )
    assert "load_drafter(..., target_layers=" in refused(eagle_aux_hidden_state_layer_ids=None)
    assert "missing tensors: input_norm.weight" in refused(norm_before_fc=True)
