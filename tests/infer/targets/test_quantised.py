"""Quantised weights, and kernels that refuse them."""

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from infer.targets import loading
from infer.targets.loading import load_target

V = 97


@pytest.fixture
def folder(tmp_path, repo):
    """A tiny random model on disk, with the embedded tokenizer."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": V,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "head_dim": 16,
    }
    config = Qwen3Config(
        **sizes, num_attention_heads=4, num_key_value_heads=2, eos_token_id=None, pad_token_id=0
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    for file in (repo / "data" / "embedded").glob("tokenizer*.json"):
        shutil.copy(file, tmp_path / "model")
    return tmp_path


def test_kernels_that_refuse_are_named_when_the_target_is_loaded(folder, monkeypatch):
    import json

    def refuses(*args: object, **kwargs: object) -> torch.Tensor:
        raise AssertionError("N must be divisible by block_n")

    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    model.model.layers[1].mlp.down_proj.forward = refuses
    monkeypatch.setattr(loading, "load_model", lambda path, device, config, options: model)
    file = folder / "model" / "config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "fp8"}})
    )
    with pytest.raises(
        ValueError, match="qwen3.* does not run on this machine \\(N must be divisible by block_n"
    ):
        load_target(str(folder / "model"), "float32", "cpu")


def test_what_cannot_be_run_here_is_said_in_a_sentence(monkeypatch):
    def fails(*args: object, **kwargs: object) -> None:
        raise ImportError("Using `bitsandbytes` needs a package")

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", fails)
    config = Qwen3Config(quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(
        ValueError, match="quantised weights do not run on this machine \\(ImportError: Using"
    ):
        loading.load_model("some/model", torch.device("cpu"), config, {})
