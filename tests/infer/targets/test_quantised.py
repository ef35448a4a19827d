"""Quantised weights, and kernels that refuse them."""

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from infer.api import decode
from infer.config import DecodeOptions
from infer.targets import loading
from infer.targets.loading import load_target

V = 97


@pytest.fixture
def folder(tmp_path, repo):
    """A tiny random model on disk, with the embedded tokenizer."""
    torch.manual_seed(0)
    sizes = {"vocab_size": V, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, eos_token_id=None, pad_token_id=0)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    for file in (repo / "data" / "embedded").glob("tokenizer*.json"):
        shutil.copy(file, tmp_path / "model")
    return tmp_path


def test_quantised_weights_are_loaded_as_they_are(folder, scripted_drafter):
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    options = {"device_map": {"": "cpu"}, "dtype": torch.float32}
    quantised = BitsAndBytesConfig(load_in_4bit=True)
    own = AutoModelForCausalLM.from_pretrained(folder / "model", quantization_config=quantised, **options)
    own.save_pretrained(folder / "small")
    for file in (folder / "model").glob("tokenizer*.json"):
        shutil.copy(file, folder / "small")
    target = load_target(str(folder / "small"), "float32", "cpu")
    assert target.dtype == torch.float32 and target.head_weight.is_floating_point()
    prompt = [5, 9, 33, 60, 2]
    expected = own.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0].tolist()
    options = DecodeOptions(16, method="ddtree", budget=6, ignore_eos=True)
    written = decode(target, scripted_drafter([expected], 4, V), [prompt], options)
    assert written[0].ids == expected[len(prompt) :]


def test_kernels_that_refuse_are_named_when_the_target_is_loaded(folder, monkeypatch):
    import json

    def refuses(*args: object, **kwargs: object) -> torch.Tensor:
        raise AssertionError("N must be divisible by block_n")

    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    model.model.layers[1].mlp.down_proj.forward = refuses
    monkeypatch.setattr(loading, "load_model", lambda path, place, config, options: model)
    file = folder / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ValueError, match="qwen3.* does not run on this machine: N must be divisible by block_n"):
        load_target(str(folder / "model"), "float32", "cpu")


def test_what_cannot_be_run_here_is_said_in_a_sentence(monkeypatch):
    def fails(*args: object, **kwargs: object) -> None:
        raise ImportError("Using `bitsandbytes` needs a package")

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", fails)
    config = Qwen3Config(quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(ValueError, match="quantised weights do not run on this machine: Using"):
        loading.load_model("some/model", torch.device("cpu"), config, {})
