"""Targets in 8-bit integers: against integer arithmetic, against float32, and to the last bit
against themselves."""

from dataclasses import replace

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoConfig, AutoModelForCausalLM

from infer.api import decode
from infer.attention.kv_cache import LayerWindow
from infer.attention.masks import tree_mask
from infer.config import DecodeOptions, TargetConfig
from infer.engine.budget import AutoBudget, Calibration
from infer.int8_cpu import calibration, kernels, matmul
from infer.int8_cpu.attention import attend
from infer.int8_cpu.modules import Int8Linear
from infer.int8_cpu.recording import RecordedDecoder
from infer.int8_cpu.weights import Int8Weights
from infer.kernels import reference
from infer.targets.layers import UnknownLayer, join_linears
from infer.targets.lean import LeanDecoder
from infer.targets.loading import load_target
from infer.targets.target import Target, takes_uneven
from infer.trees.tree import DraftTree

V = 97
SIZES = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
FAMILIES = {
    "llama": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen2": {},  # biases
    "gemma3_text": {
        "sliding_window": 3,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def whole(*shape: int) -> torch.Tensor:
    return torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(sum(shape)))


def chains(rows: list[list[int]], nodes: int) -> DraftTree:
    """Return trees of one branch over the first tokens of rows."""
    tokens = torch.tensor(rows)[:, :nodes]
    steps = torch.arange(nodes).expand(len(rows), -1)
    return DraftTree(tokens, (steps - 1).clamp(min=0), steps, torch.zeros(tokens.shape), nodes - 1)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request) -> tuple[Target, Target]:
    """A random target in float32 and in int8."""
    targets = []
    for _ in range(2):
        torch.manual_seed(3)
        config = AutoConfig.for_model(request.param, **SIZES | FAMILIES[request.param])
        model = AutoModelForCausalLM.from_config(config).eval()
        for weight in model.parameters():
            weight.data.mul_(3 if weight.ndim > 1 else 1)
        targets.append(model)
    calibration.quantise(targets[1], (targets[1](whole(4, 40).abs() % V) for _ in range(1)))
    return Target(targets[0]), Target(targets[1])


def states_of(target: Target, rows: list[list[int]], cuts: list[int]) -> torch.Tensor:
    """Return the final states of rows of one length (B, T, D), in pieces that end at the cuts."""
    cache = target.cache(len(rows), 60)
    with cache.add(len(rows)):
        pass
    pieces = zip([0, *cuts], cuts, strict=False)
    return torch.cat(
        [target.extend([row[a:b] for row in rows], cache, ()).last for a, b in pieces], 1
    )


@pytest.mark.parametrize("avx2_loop, amx", [(True, False), (False, False), (False, True)])
def test_matmuls_are_integer_arithmetic(avx2_loop, amx, monkeypatch):
    if avx2_loop and not torch.cpu.get_capabilities().get("avx2"):
        pytest.skip("the loop is AVX2's")
    able = {"avx2": avx2_loop, "avx512_vnni": False, "avx_vnni": False}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able | {"amx_int8": amx})
    for name in ("swapped_rows", "uses_avx2_loop"):
        monkeypatch.setattr(matmul, name, getattr(matmul, name).__wrapped__)
    assert matmul.uses_avx2_loop(64) == avx2_loop and not matmul.uses_avx2_loop(33)
    for inputs, outputs, rows in (
        (576, 96, 17),
        (33, 5, 1),
        (1536, 40, 65),
        (64, 2051, 2),
        (64, 48, 300),
        (16, 1, 1),
    ):
        codes = whole(outputs, inputs)
        states = whole(rows, inputs)
        codes[0], states[0] = 127, -127  # the greatest sums there are
        states[:, 0] = 127  # so that a row's step is 1
        weights = Int8Weights(codes.to(torch.int8), None, torch.ones(inputs), 1)
        sums, steps = kernels.code_sums(states.float(), weights)
        assert torch.equal(sums, (states @ codes.t()).int()) and torch.equal(
            steps, torch.ones(rows)
        )


@pytest.mark.parametrize("avx2_loop", [True, False])
def test_a_recording_computes_what_its_layers_do(pair, avx2_loop, monkeypatch):
    _, target = pair
    if avx2_loop and not torch.cpu.get_capabilities().get("avx2"):
        pytest.skip("the loop is AVX2's")
    assert type(target.lean) is RecordedDecoder
    monkeypatch.setattr(matmul, "uses_avx2_loop", lambda inputs: avx2_loop)
    target.lean.recordings.clear()
    rows = (whole(3, 24).abs() % V).tolist()
    cuts = [7, 8, 9, 24]
    found = []
    with torch.inference_mode():  # a recording made here serves outside of it too
        states_of(target, rows, cuts)
    for run in (RecordedDecoder.run, LeanDecoder.run):
        monkeypatch.setattr(RecordedDecoder, "run", run)
        cache = target.cache(3, 30)
        with cache.add(3):
            pass
        pieces = zip([0, *cuts], cuts, strict=False)
        found.append(
            [target.extend([row[a:b] for row in rows], cache, (0, 2, 4)) for a, b in pieces]
        )
        tree = replace(chains(rows, 5), real=torch.arange(5) < torch.tensor([[2], [5], [1]]))
        found[-1].append(target.verify(tree, tree.ancestors(), cache, (0, 2, 4)))
    for recorded, eager in zip(*found, strict=True):
        assert torch.equal(recorded.context, eager.context) and torch.equal(
            recorded.last, eager.last
        )


@pytest.mark.parametrize("digits", [1, 2])
def test_the_greatest_output_is_that_of_the_floats(digits):
    head = Int8Linear(32, 2500, True, digits)
    for part, numbers in (
        ("codes", (whole(2500, 32) // 2).to(torch.int8)),
        ("scales", normal(2500).abs()),
    ):
        getattr(head, part).data = numbers
    head.smooth.data, head.bias.data = normal(32).abs(), normal(2500)
    for states in (normal(2, 40, 32), torch.zeros(1, 3, 32)):
        assert torch.equal(kernels.argmax_head(states, head), head(states).argmax(-1))


def test_codes_of_weights_make_up_for_errors():
    # that go together
    weight = normal(24, 32)
    inputs = normal(200, 8) @ normal(8, 32) + 0.1 * normal(200, 32)
    weight[3, 4:6] = 50.0
    codes, scales = calibration.round_weight(weight, inputs.t() @ inputs / 200)
    assert codes.min() >= -127 and codes[3, 4:6].eq(127).all()
    assert (codes.float() * scales - weight).abs().max() < 10 * scales.max()
    plain = (weight / scales).round() * scales
    ours, theirs = ((inputs @ (found - weight).t()).norm() for found in (codes * scales, plain))
    assert ours < 0.8 * theirs, "inputs still to come do not make up for the error"


@pytest.mark.parametrize(
    ("rows", "width", "seen"), [(1, 1, 37), (2, 5, 21), (1, 40, 40), (2, 130, 300)]
)
def test_attention_in_order_is_attention(rows, width, seen):
    shared = 2
    groups = 3
    size = 24 if width == 40 else 16
    capacity = seen + 10
    planes = normal(2, rows * capacity, shared * size)
    keys, values = (
        plane.view(rows, capacity, shared, size)[:, :seen].transpose(1, 2) for plane in planes
    )
    ends = torch.tensor([seen - width] * rows)
    inside = torch.eye(width, dtype=torch.bool).logical_or(normal(width, width) < 0).tril()[None]
    mask = tree_mask(ends, ends[:, None] + inside[0].sum(0), inside, seen)
    queries = normal(rows * width, shared * groups, size)
    memory = LayerWindow(planes, 0, torch.empty(0), keys, values, rows, width)
    found = attend(queries, memory, mask, 0.3)
    torch.testing.assert_close(found, reference.attend(queries, memory, mask, 0.3))
    memory.stops = torch.arange(1, rows + 1) * (width // 2 + 1)  # of every row the first half
    first = torch.arange(rows * width) % width <= width // 2
    assert torch.equal(attend(queries[first], memory, mask, 0.3), found[first])


def test_numbers_do_not_depend_on_what_is_beside_them(pair):
    """Bit-equal: alone, in prompts cut anywhere, beside other texts, in a tree, on any number of
    threads."""
    _, target = pair
    assert target.lean is not None and target.quantised
    rows = (whole(3, 24).abs() % V).tolist()
    alone = states_of(target, rows[:1], list(range(1, 25)))[0]
    for cuts in ([24], [7, 8, 24]):
        assert torch.equal(states_of(target, rows, cuts)[0], alone)
    before = target.head(alone)
    threads = torch.get_num_threads()
    torch.set_num_threads(1 + threads % 2)
    assert torch.equal(states_of(target, rows, [24])[0], alone)
    torch.set_num_threads(threads)
    assert all(
        torch.equal(target.head(state), logits) for state, logits in zip(alone, before, strict=True)
    )
    cache = target.cache(2, 60)
    with cache.add(2):
        pass
    target.extend([row[:18] for row in rows[:2]], cache, ())
    text = rows[0][18:]  # the tree's second, fourth .. nodes; beside each stands another token
    nodes = [text[0]] + [
        token for kept in text[1:] for token in (kept + 1 if kept + 1 < V else 0, kept)
    ]
    parents = [0] + [parent for i in range(len(text) - 1) for parent in (2 * i, 2 * i)]
    depths = [0] + [depth for i in range(1, len(text)) for depth in (i, i)]
    table = [torch.tensor([row, row]) for row in (nodes, parents, depths)]
    tree = DraftTree(*table, torch.zeros(2, len(nodes)), len(text) - 1)
    found = target.verify(tree, tree.ancestors(), cache).last
    assert torch.equal(found[0, 0::2], alone[18:])
    real = torch.arange(len(nodes)) < torch.tensor(
        [[3], [len(nodes)]]
    )  # rows that have numbers of their own
    uneven = target.verify(replace(tree, real=real), tree.ancestors(), cache).last
    assert (
        takes_uneven(target)
        and torch.equal(uneven[0, :3], found[0, :3])
        and torch.equal(uneven[1], found[1])
    )


def test_distributions_are_nearly_those_of_float32(pair):
    exact, target = pair
    rows = (whole(4, 30).abs() % V).tolist()
    ours, theirs = (
        model.head(states_of(model, rows, [30])).log_softmax(-1) for model in (target, exact)
    )
    assert (theirs.exp() * (theirs - ours)).sum(-1).mean() < 0.01
    features = target.packed_features(
        *(torch.tensor(rows), *torch.arange(30).repeat(2, 4, 1).unbind()), (1, 3)
    )
    assert features.context.shape == (4, 30, 64)


def test_texts_are_those_of_plain_decoding(pair, scripted_drafter, monkeypatch):
    _, target = pair
    prompts = (whole(3, 9).abs() % V).tolist()
    for temperature, penalty in ((0.0, 1.0), (1.0, 1.0), (0.0, 1.2)):
        settings = {
            "temperature": temperature,
            "repetition_penalty": penalty,
            "seed": 1,
            "ignore_eos": True,
        }
        plain = DecodeOptions(20, method="plain", **settings)
        texts = [text.ids for text in decode(target, None, prompts, plain)]
        drafter = scripted_drafter([p + t for p, t in zip(prompts, texts, strict=True)], 4, V)
        options = DecodeOptions(20, method="ddtree", budget=6, **settings)
        assert [text.ids for text in decode(target, drafter, prompts, options)] == texts
        monkeypatch.setattr(
            "infer.engine.budget.calibration_of", lambda *_: Calibration((1, 9), (1.0, 2.0), 1.0)
        )
        monkeypatch.setattr(AutoBudget, "choose_nodes", lambda budget, rows, most: 2)
        monkeypatch.setattr(AutoBudget, "_paying_nodes", lambda budget, rows, most: 2)
        found = decode(target, drafter, prompts, replace(options, budget="auto"))
        assert [text.ids for text in found] == texts
        assert len({nodes for text in found for nodes in text.drafted}) > 1, (
            "all rows have as many nodes"
        )


def test_codes_are_written_once_and_loaded(shallow, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    monkeypatch.setattr(calibration, "LENGTH", 12)
    first = load_target(str(shallow), quantization="int8")
    monkeypatch.setattr(calibration, "quantise", None)
    again = load_target(str(shallow), quantization="int8")
    said = [line for line in capsys.readouterr().err.splitlines() if "so far" not in line]
    assert sum("in integers, once" in line for line in said) == 1
    ids = [list(range(9))]
    assert torch.equal(
        states_of(first, ids, [9]), states_of(again, ids, [9])
    ) and again.name == str(shallow)
    assert again.vocabulary == len(again.head_weight) == len(again.embedding.weight)
    parts = again.body.layers[0].self_attn.q_proj.codes, again.body.layers[0].self_attn.v_proj.codes
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1  # joined: not the file's
    assert load_target(
        str(shallow), quantization="int8", only_layers=(0,)
    ).head_weight.is_floating_point()


def test_a_damaged_folder_of_codes_is_made_again_and_is_the_same(
    load_program, tmp_path, monkeypatch, capsys
):
    load_program("damaged_targets").make_targets(tmp_path)
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    monkeypatch.setattr(calibration, "LENGTH", 8)
    monkeypatch.setattr(calibration, "TEXTS", 8)

    def weights() -> dict[str, torch.Tensor]:
        return load_target(str(tmp_path / "single"), quantization="int8").model.state_dict()

    first = weights()
    (file,) = (tmp_path / "blockdraft").glob("*/model.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    capsys.readouterr()
    again = weights()
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("writing ")]
    assert len(said) == 1 and said[0].endswith(
        "again: model.safetensors of the one that was there was damaged"
    )
    assert first.keys() == again.keys() and all(
        torch.equal(first[name], again[name]) for name in first
    )


def test_layers_of_other_digits_are_not_joined():
    layers = [Int8Linear(4, 3, False, digits) for digits in (1, 2)]
    layers[1].smooth = layers[0].smooth
    with pytest.raises(UnknownLayer, match="factors or digits"):
        join_linears(layers)


@pytest.mark.parametrize(
    "other", [{"dtype": "bfloat16"}, {"shard": True}, {"quantization": "int4"}]
)
def test_what_does_not_go_together_is_refused(other):
    with pytest.raises(ValueError, match="quantization"):
        TargetConfig(**{"quantization": "int8"} | other).check()
