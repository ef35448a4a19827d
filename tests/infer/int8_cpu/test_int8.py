"""Targets in int8: against integer arithmetic, against float32, and bit-identical in every batch
shape.

B batch rows, T positions, D hidden size, V vocabulary.
"""

from dataclasses import replace

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoConfig, AutoModelForCausalLM

from infer.api import decode_prompts
from infer.attention.kv_cache import LayerCacheView
from infer.attention.masks import build_tree_mask
from infer.config import DecodeOptions, TargetConfig
from infer.engine.budget import AutoNodeBudget, Calibration
from infer.int8_cpu import calibration, kernels, matmul
from infer.int8_cpu.attention import attend
from infer.int8_cpu.modules import Int8Linear
from infer.int8_cpu.recording import RecordingDecoder
from infer.int8_cpu.weights import Int8Weights
from infer.kernels import reference
from infer.targets.kernel_decoder import KernelDecoder
from infer.targets.layers import UnsupportedLayer, join_linears
from infer.targets.loading import load_target
from infer.targets.target import Target, supports_ragged_trees
from infer.trees.tree import DraftTree

VOCABULARY_SIZE = 97
INT8_MODEL_SIZES = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
INT8_MODEL_FAMILIES = {
    "llama": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen2": {},  # biases
    "gemma3_text": {
        "sliding_window": 3,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}


def make_normal_tensor(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def make_random_codes(*shape: int) -> torch.Tensor:
    """Return random int64 values from -127 to 127."""
    return torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(sum(shape)))


def make_random_ids(*shape: int) -> torch.Tensor:
    return make_random_codes(*shape).abs() % VOCABULARY_SIZE


def make_chain_trees(sequences: list[list[int]], nodes: int) -> DraftTree:
    """Return trees of one branch over the first tokens of sequences."""
    tokens = torch.tensor(sequences)[:, :nodes]
    steps = torch.arange(nodes).expand(len(sequences), -1)
    parents = (steps - 1).clamp(min=0)
    return DraftTree(tokens, parents, steps, torch.zeros(tokens.shape), nodes - 1)


@pytest.fixture(scope="module", params=INT8_MODEL_FAMILIES)
def float_and_int8_targets(request) -> tuple[Target, Target]:
    """The same random target in float32 and in int8."""
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        sizes = INT8_MODEL_SIZES | INT8_MODEL_FAMILIES[request.param]
        config = AutoConfig.for_model(request.param, **sizes)
        model = AutoModelForCausalLM.from_config(config).eval()
        for weight in model.parameters():
            weight.data.mul_(3 if weight.ndim > 1 else 1)
        models.append(model)
    float_model, int8_model = models
    calibration.quantise_model(int8_model, (int8_model(make_random_ids(4, 40)) for _ in range(1)))
    return Target(float_model), Target(int8_model)


def compute_final_states(
    target: Target, sequences: list[list[int]], ends: list[int]
) -> torch.Tensor:
    """Return the final states (B, T, D) of sequences of one length, computed in one pass for each
    chunk of positions; the chunks end at `ends`."""
    cache = target.allocate_cache(len(sequences), 60)
    with cache.add_rows(len(sequences)):
        pass
    states = []
    for start, end in zip([0, *ends], ends, strict=False):
        chunk = [sequence[start:end] for sequence in sequences]
        states.append(target.extend_cache(chunk, cache, ()).last_hidden_states)
    return torch.cat(states, 1)


@pytest.mark.parametrize("avx2_kernel, amx", [(True, False), (False, False), (False, True)])
def test_matmuls_are_integer_arithmetic(avx2_kernel, amx, monkeypatch):
    if avx2_kernel and not torch.cpu.get_capabilities().get("avx2"):
        pytest.skip("needs a CPU with AVX2")
    capabilities = {"avx2": avx2_kernel, "avx512_vnni": False, "avx_vnni": False, "amx_int8": amx}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    for name in ("pad_rows_for_transposed_matmul", "uses_avx2_kernel"):  # without their caches
        monkeypatch.setattr(matmul, name, getattr(matmul, name).__wrapped__)
    assert matmul.uses_avx2_kernel(64) == avx2_kernel
    assert not matmul.uses_avx2_kernel(33)
    for inputs, outputs, rows in (
        (576, 96, 17),
        (33, 5, 1),
        (1536, 40, 65),
        (64, 2051, 2),
        (64, 48, 300),
        (16, 1, 1),
    ):
        codes = make_random_codes(outputs, inputs)
        states = make_random_codes(rows, inputs)
        codes[0] = 127  # the largest accumulators possible
        states[0] = -127
        states[:, 0] = 127  # so that the scale of each row is 1
        weights = Int8Weights(codes.to(torch.int8), None, torch.ones(inputs), 1)
        accumulators, scales = kernels.compute_accumulators(states.float(), weights)
        assert torch.equal(accumulators, (states @ codes.t()).int())
        assert torch.equal(scales, torch.ones(rows))


@pytest.mark.parametrize("avx2_kernel", [True, False])
def test_a_recording_computes_what_its_layers_do(float_and_int8_targets, avx2_kernel, monkeypatch):
    _, target = float_and_int8_targets
    if avx2_kernel and not torch.cpu.get_capabilities().get("avx2"):
        pytest.skip("needs a CPU with AVX2")
    assert type(target.kernel_decoder) is RecordingDecoder
    monkeypatch.setattr(matmul, "uses_avx2_kernel", lambda inputs: avx2_kernel)
    target.kernel_decoder.recordings.clear()
    sequences = make_random_ids(3, 24).tolist()
    ends = [7, 8, 9, 24]
    with torch.inference_mode():  # its recordings are replayed outside inference mode below
        compute_final_states(target, sequences, ends)

    outputs_by_decoder = []
    for run in (RecordingDecoder.run, KernelDecoder.run):
        monkeypatch.setattr(RecordingDecoder, "run", run)
        cache = target.allocate_cache(3, 30)
        with cache.add_rows(3):
            pass
        outputs = []
        for start, end in zip([0, *ends], ends, strict=False):
            chunk = [sequence[start:end] for sequence in sequences]
            outputs.append(target.extend_cache(chunk, cache, (0, 2, 4)))
        node_counts = torch.tensor([[2], [5], [1]])
        tree = replace(make_chain_trees(sequences, 5), node_mask=torch.arange(5) < node_counts)
        outputs.append(target.verify(tree, tree.build_ancestor_mask(), cache, (0, 2, 4)))
        outputs_by_decoder.append(outputs)
    for recorded, eager in zip(*outputs_by_decoder, strict=True):
        assert torch.equal(recorded.layer_features, eager.layer_features)
        assert torch.equal(recorded.last_hidden_states, eager.last_hidden_states)


@pytest.mark.parametrize("codes_per_activation", [1, 2])
def test_argmax_head_is_the_argmax_of_the_outputs(codes_per_activation):
    head = Int8Linear(32, 2500, True, codes_per_activation)
    head.codes.data = (make_random_codes(2500, 32) // 2).to(torch.int8)
    head.scales.data = make_normal_tensor(2500).abs()
    head.smooth.data = make_normal_tensor(32).abs()
    head.bias.data = make_normal_tensor(2500)
    for states in (make_normal_tensor(2, 40, 32), torch.zeros(1, 3, 32)):
        assert torch.equal(kernels.argmax_head(states, head), head(states).argmax(-1))


def test_gptq_compensates_for_rounding_errors():
    weight = make_normal_tensor(24, 32)
    # The inputs are correlated.
    inputs = make_normal_tensor(200, 8) @ make_normal_tensor(8, 32)
    inputs = inputs + 0.1 * make_normal_tensor(200, 32)
    weight[3, 4:6] = 50.0
    codes, scales = calibration.gptq_round_weight(weight, inputs.t() @ inputs / 200)
    assert codes.min() >= -127
    assert codes[3, 4:6].eq(127).all()
    gptq_weight = codes.float() * scales
    assert (gptq_weight - weight).abs().max() < 10 * scales.max()
    nearest_weight = (weight / scales).round() * scales
    gptq_error = (inputs @ (gptq_weight - weight).t()).norm()
    nearest_error = (inputs @ (nearest_weight - weight).t()).norm()
    assert gptq_error < 0.8 * nearest_error, "the following inputs do not compensate for the error"


@pytest.mark.parametrize(
    ("rows", "width", "visible"), [(1, 1, 37), (2, 5, 21), (1, 40, 40), (2, 130, 300)]
)
def test_ordered_attention_equals_the_reference(rows, width, visible):
    key_heads = 2
    groups = 3
    size = 24 if width == 40 else 16
    capacity = visible + 10
    buffer = make_normal_tensor(2, rows * capacity, key_heads * size)
    keys, values = (
        plane.view(rows, capacity, key_heads, size)[:, :visible].transpose(1, 2) for plane in buffer
    )
    lengths = torch.tensor([visible - width] * rows)
    random_pairs = make_normal_tensor(width, width) < 0
    inside = torch.eye(width, dtype=torch.bool).logical_or(random_pairs).tril()[None]
    mask = build_tree_mask(lengths, lengths[:, None] + inside[0].sum(0), inside, visible)
    queries = make_normal_tensor(rows * width, key_heads * groups, size)
    layer_cache = LayerCacheView(buffer, 0, torch.empty(0), keys, values, rows, width)
    actual = attend(queries, layer_cache, mask, 0.3)
    torch.testing.assert_close(actual, reference.attend(queries, layer_cache, mask, 0.3))

    # Batch rows with fewer positions: only the first half of each row.
    half = width // 2 + 1
    layer_cache.cu_seqlens = torch.arange(1, rows + 1) * half
    in_first_half = torch.arange(rows * width) % width < half
    actual_half = attend(queries[in_first_half], layer_cache, mask, 0.3)
    assert torch.equal(actual_half, actual[in_first_half])


def make_interleaved_trees(tokens: list[int], rows: int) -> DraftTree:
    """Return trees in which `tokens` are the even nodes, a chain; each but the root has a sibling
    with another token as the next node."""
    node_tokens = [tokens[0]]
    parents = [0]
    depths = [0]
    for index, token in enumerate(tokens[1:]):
        sibling = token + 1 if token + 1 < VOCABULARY_SIZE else 0
        node_tokens += [sibling, token]
        parents += [2 * index, 2 * index]
        depths += [index + 1, index + 1]
    columns = [torch.tensor([column] * rows) for column in (node_tokens, parents, depths)]
    return DraftTree(*columns, torch.zeros(rows, len(node_tokens)), len(tokens) - 1)


def test_states_do_not_depend_on_the_batch(float_and_int8_targets):
    """Final states are bit-identical alone, in prompts of any chunks, in a batch, in a tree, and
    with any number of threads."""
    _, target = float_and_int8_targets
    assert target.kernel_decoder is not None
    assert target.is_int8
    sequences = make_random_ids(3, 24).tolist()
    expected = compute_final_states(target, sequences[:1], list(range(1, 25)))[0]
    for ends in ([24], [7, 8, 24]):
        assert torch.equal(compute_final_states(target, sequences, ends)[0], expected)

    logits = target.compute_logits(expected)
    threads = torch.get_num_threads()
    torch.set_num_threads(1 + threads % 2)
    assert torch.equal(compute_final_states(target, sequences, [24])[0], expected)
    torch.set_num_threads(threads)
    for state, state_logits in zip(expected, logits, strict=True):
        assert torch.equal(target.compute_logits(state), state_logits)

    cache = target.allocate_cache(2, 60)
    with cache.add_rows(2):
        pass
    target.extend_cache([sequence[:18] for sequence in sequences[:2]], cache, ())
    tree = make_interleaved_trees(sequences[0][18:], 2)
    states = target.verify(tree, tree.build_ancestor_mask(), cache).last_hidden_states
    assert torch.equal(states[0, 0::2], expected[18:])

    assert supports_ragged_trees(target)
    num_nodes = tree.tokens.shape[1]
    real = torch.arange(num_nodes) < torch.tensor([[3], [num_nodes]])
    ragged_states = target.verify(
        replace(tree, node_mask=real), tree.build_ancestor_mask(), cache
    ).last_hidden_states
    assert torch.equal(ragged_states[0, :3], states[0, :3])
    assert torch.equal(ragged_states[1], states[1])


def test_distributions_are_nearly_those_of_float32(float_and_int8_targets):
    float_target, int8_target = float_and_int8_targets
    sequences = make_random_ids(4, 30).tolist()
    log_probs = []
    for target in (int8_target, float_target):
        states = compute_final_states(target, sequences, [30])
        log_probs.append(target.compute_logits(states).log_softmax(-1))
    actual, expected = log_probs
    assert (expected.exp() * (expected - actual)).sum(-1).mean() < 0.01
    positions, documents = torch.arange(30).repeat(2, 4, 1).unbind()
    features = int8_target.compute_packed_features(
        torch.tensor(sequences), positions, documents, (1, 3)
    )
    assert features.layer_features.shape == (4, 30, 64)


def test_outputs_are_those_of_baseline_decoding(
    float_and_int8_targets, scripted_drafter, monkeypatch
):
    _, target = float_and_int8_targets
    prompts = make_random_ids(3, 9).tolist()
    for temperature, penalty in ((0.0, 1.0), (1.0, 1.0), (0.0, 1.2)):
        settings = {
            "temperature": temperature,
            "repetition_penalty": penalty,
            "seed": 1,
            "ignore_eos": True,
        }
        baseline = DecodeOptions(20, method="plain", **settings)
        expected = [output.ids for output in decode_prompts(target, None, prompts, baseline)]
        sequences = [prompt + ids for prompt, ids in zip(prompts, expected, strict=True)]
        drafter = scripted_drafter(sequences, 4, VOCABULARY_SIZE)
        options = DecodeOptions(20, method="ddtree", budget=6, **settings)
        actual = [output.ids for output in decode_prompts(target, drafter, prompts, options)]
        assert actual == expected

        monkeypatch.setattr(
            "infer.engine.budget.get_calibration", lambda *_: Calibration((1, 9), (1.0, 2.0), 1.0)
        )
        monkeypatch.setattr(AutoNodeBudget, "choose_num_nodes", lambda *_: 2)
        monkeypatch.setattr(AutoNodeBudget, "_count_paying_nodes", lambda *_: 2)
        outputs = decode_prompts(target, drafter, prompts, replace(options, budget="auto"))
        assert [output.ids for output in outputs] == expected
        node_counts = {nodes for output in outputs for nodes in output.drafted}
        assert len(node_counts) > 1, "all batch rows have the same number of nodes"


def test_int8_weights_are_written_once_and_loaded(shallow, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    monkeypatch.setattr(calibration, "INT8_CALIBRATION_TOKENS_PER_SEQUENCE", 12)
    first = load_target(str(shallow), quantization="int8")
    monkeypatch.setattr(calibration, "quantise_model", None)
    second = load_target(str(shallow), quantization="int8")
    messages = [line for line in capsys.readouterr().err.splitlines() if "so far" not in line]
    assert sum("in int8 to" in line for line in messages) == 1
    ids = [list(range(9))]
    first_states = compute_final_states(first, ids, [9])
    assert torch.equal(first_states, compute_final_states(second, ids, [9]))
    assert second.name == str(shallow)
    assert second.vocab_size == len(second.head_weight) == len(second.embedding.weight)

    attention = second.decoder.layers[0].self_attn
    codes = [attention.q_proj.codes, attention.v_proj.codes]
    storages = {tensor.untyped_storage().data_ptr() for tensor in codes}
    assert len(storages) == 1, "the codes are not in one block"
    shallowest = load_target(str(shallow), quantization="int8", only_layers=(0,))
    assert shallowest.head_weight.is_floating_point()


def test_a_damaged_int8_folder_is_written_again_and_is_the_same(
    load_program, tmp_path, monkeypatch, capsys
):
    load_program("damaged_targets").make_targets(tmp_path)
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    monkeypatch.setattr(calibration, "INT8_CALIBRATION_TOKENS_PER_SEQUENCE", 8)
    monkeypatch.setattr(calibration, "INT8_CALIBRATION_SEQUENCE_COUNT", 8)

    def load_weights() -> dict[str, torch.Tensor]:
        return load_target(str(tmp_path / "single"), quantization="int8").model.state_dict()

    first = load_weights()
    (file,) = (tmp_path / "blockdraft").glob("*/model.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    capsys.readouterr()
    second = load_weights()
    lines = capsys.readouterr().err.splitlines()
    messages = [line for line in lines if line.startswith("writing ")]
    assert len(messages) == 1
    assert "model.safetensors" in messages[0]
    assert "damaged" in messages[0]
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_layers_with_other_codes_per_activation_are_not_joined():
    layers = [Int8Linear(4, 3, False, codes_per_activation) for codes_per_activation in (1, 2)]
    layers[1].smooth = layers[0].smooth
    with pytest.raises(UnsupportedLayer, match="int8"):
        join_linears(layers)


@pytest.mark.parametrize(
    "option", [{"dtype": "bfloat16"}, {"shard": True}, {"quantization": "int4"}]
)
def test_incompatible_options_are_refused(option):
    with pytest.raises(ValueError, match="quantization"):
        TargetConfig(**{"quantization": "int8"} | option).check()
