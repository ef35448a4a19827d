"""Weights whose memory moves: what stores addresses holds the memory, and is made anew once it has
moved. The larger version, with random sequences of operations, is
tests/robustness/moved_weights.py."""

import gc
import weakref

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from infer import Engine, generate
from infer.config import EngineConfig, SamplingOptions
from infer.int8_cpu import calibration, recording
from infer.int8_cpu.recording import RecordingDecoder
from infer.targets.target import Target

TINY_SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
PROMPT_IDS = list(range(5, 25))


def random_model(family: str, quantised: bool) -> torch.nn.Module:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **TINY_SIZES)).eval()
    for parameter in model.parameters():
        parameter.data = (
            torch.rand(parameter.shape) + 0.5 if parameter.ndim == 1 else 3 * parameter.data
        )
    if quantised:
        calibration.quantise_model(model, (model(torch.randint(97, (4, 40))) for _ in range(1)))
    return model


def output(target: Target) -> list[int]:
    return generate(target, None, PROMPT_IDS, method="plain", max_new_tokens=16).ids


def share_memory(model: torch.nn.Module) -> None:
    model.share_memory()


def clone_data(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def assign_state(model: torch.nn.Module) -> None:
    model.load_state_dict(
        {name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True
    )


def convert_and_back(model: torch.nn.Module) -> None:
    model.to(torch.float64).to(torch.float32)


def overwrite_freed_memory(model: torch.nn.Module) -> None:
    """Fill memory of the sizes of all weights, as a later allocation may, so that reading freed
    memory shows."""
    gc.collect()
    for _ in range(4):
        [torch.full(parameter.shape, 77, dtype=parameter.dtype) for parameter in model.parameters()]


@pytest.mark.parametrize("midway", [False, True], ids=["between sequences", "midway"])
@pytest.mark.parametrize("move", [share_memory, clone_data, assign_state, convert_and_back])
@pytest.mark.parametrize(
    ("family", "quantised"), [("llama", True), ("llama", False), ("qwen3", True)]
)
def test_moved_weights_give_the_same_output(family, quantised, move, midway):
    target = Target(random_model(family, quantised))
    assert type(target.kernel_decoder) is RecordingDecoder or not quantised
    expected = output(target)
    engine = Engine(target, None, EngineConfig("plain"), 64)
    sequence = engine.submit(PROMPT_IDS, SamplingOptions(max_new_tokens=16))
    for _ in range(5 if midway else 0):
        engine.step()
    move(target.model)
    overwrite_freed_memory(target.model)
    while engine.has_unfinished_sequences:
        engine.step()
    assert sequence.ids == expected == output(target)


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize(
    "name", ["self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj", "mlp.up_proj", "q_norm", "v"]
)
def test_a_partial_write_is_seen_by_every_target_of_the_model(quantised, name):
    """The write changes none of a matrix's values that `WeightWatcher` compares. Matrices are read
    in place; vectors are copied, and all their values are compared."""
    family = "qwen2" if name == "v" else "qwen3"  # with biases, or with norms of queries and keys
    model = random_model(family, quantised)
    targets = [Target(model), Target(model)]
    before = [output(target) for target in targets]
    layer = model.model.layers[1]
    if name == "q_norm":
        written = layer.self_attn.q_norm.weight.data[-8:]
    elif name == "v":
        written = layer.self_attn.v_proj.bias.data[-8:]
    elif quantised:
        written = layer.get_submodule(name).codes.data[:2]
    else:
        written = layer.get_submodule(name).weight.data[:2]
    written.copy_(torch.full_like(written, 100))
    after = [output(target) for target in targets]
    fresh = random_model(family, quantised)
    fresh.load_state_dict(model.state_dict())
    assert after[0] == after[1] == output(Target(fresh)) != before[0]


@pytest.mark.parametrize("move", [share_memory, clone_data])
def test_a_pass_behind_a_move_reads_the_weights_where_they_are(move):
    """Passes alone, without an engine that looks for changes."""
    target = Target(random_model("llama", True))
    cache = target.allocate_cache(1, 40)
    with cache.add_rows(1):
        pass
    states = []
    for _ in range(2):
        states.append(target.extend_cache([PROMPT_IDS[:1]], cache, ()).last_hidden_states)
        assert target.kernel_decoder.recordings
        move(target.model)
        overwrite_freed_memory(target.model)
        cache.keep_rows([])
        with cache.add_rows(1):
            pass
    assert torch.equal(*states)


@pytest.mark.parametrize("quantised", [True, False])
def test_weights_can_be_written_to_after_decoding(quantised):
    """The engine decodes in inference mode, whose tensors nobody can write to outside of it."""
    target = Target(random_model("qwen2", quantised))
    engine = Engine(target, None, EngineConfig("plain"), 64)
    for _ in range(2):
        engine.submit(PROMPT_IDS, SamplingOptions(max_new_tokens=4))
        while engine.has_unfinished_sequences:
            engine.step()
        for parameter in target.model.parameters():
            assert not parameter.is_inference()
            parameter.data = parameter.data.clone()


def test_targets_of_one_model_share_its_memory():
    """A second target joins nothing anew: weights stay where they are."""
    for quantised in (True, False):
        model = random_model("qwen2", quantised)
        first = Target(model)
        output(first)
        addresses = [parameter.data_ptr() for parameter in model.parameters()]
        output(Target(model))
        assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
        assert not first.weight_watcher.detect_changes()


def test_a_table_of_angles_serves_all_shorter_caches():
    target = Target(random_model("llama", False))
    longest = [
        generate(target, None, PROMPT_IDS, method="plain", max_new_tokens=n).ids
        for n in (30, 3, 17)
    ][0]
    assert {kind: len(cos) for kind, (cos, _) in target.kernel_decoder.rope_tables.items()} == {
        "all": 51
    }
    generate(target, None, PROMPT_IDS, method="plain", max_new_tokens=200)
    assert len(target.kernel_decoder.rope_tables) == 1
    assert generate(target, None, PROMPT_IDS, method="plain", max_new_tokens=30).ids == longest


def test_recordings_hold_what_they_address():
    target = Target(random_model("llama", True))
    output(target)
    recorded_passes = list(target.kernel_decoder.recordings.values())
    assert recorded_passes
    held_addresses = {
        tensor.data_ptr()
        for recorded_pass in recorded_passes
        for tensor in recorded_pass.referenced_tensors.values()
    }
    codes = target.model.model.layers[2].mlp.down_proj.codes
    old_memory = codes.data_ptr()
    clone_data(target.model)
    assert (
        old_memory in held_addresses
        and codes.data_ptr() != old_memory
        and not any(recorded_pass.has_moved_tensors() for recorded_pass in recorded_passes)
    )
    references = [weakref.ref(recorded_pass) for recorded_pass in recorded_passes]
    del recorded_passes
    target.kernel_decoder.recordings.clear()
    gc.collect()
    assert not any(reference() for reference in references)


def test_recordings_are_bounded_in_number_and_memory(monkeypatch):
    """The recordings used last are kept."""
    monkeypatch.setattr(recording, "MAX_INT8_CPU_CALL_RECORDINGS", 4)
    monkeypatch.setattr(recording, "MAX_RECORDED_INT8_CPU_POSITIONS", 8)
    target = Target(random_model("llama", True))

    def run_passes(lengths: list[int]) -> list[int]:
        for length in lengths:
            cache = target.allocate_cache(1, 64)
            with cache.add_rows(1):
                pass
            target.extend_cache([list(range(length))], cache, ())
        return [key[1] for key in target.kernel_decoder.recordings]

    assert run_passes([1, 2, 3, 4, 5, 6, 4, 9]) == [3, 5, 6, 4]
    sizes = {
        key[1]: recorded_pass.buffer_bytes
        for key, recorded_pass in target.kernel_decoder.recordings.items()
    }
    assert sizes[3] < sizes[6]
    monkeypatch.setattr(recording, "MAX_INT8_CPU_RECORDING_BYTES", sizes[6] + sizes[4] + sizes[5])
    assert run_passes([6]) == [5, 4, 6]
