"""A drafter is trained and evaluated for a small Qwen3.5-shaped target, also in 4 bits."""

import shutil

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

pytestmark = pytest.mark.robustness


@pytest.fixture
def folder(tmp_path, repo):
    """Return a folder with a random Qwen3.5-shaped model and the embedded tokenizer in "target"."""
    embedded = repo / "data" / "embedded"
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=16,
        linear_num_value_heads=32,  # bitsandbytes, 4 bits on a CPU: rows by 32, columns by 64
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        eos_token_id=None,
        tie_word_embeddings=True,
    )
    Qwen3_5ForCausalLM(config).save_pretrained(tmp_path / "target")
    for file in embedded.glob("tokenizer*.json"):
        shutil.copy(file, tmp_path / "target")
    return tmp_path


@pytest.fixture
def train_and_evaluate(folder, start_command):
    """Return a function (*settings) that trains a drafter in a few steps and evaluates it.

    Every method must give the outputs of baseline decoding and of transformers' `generate`.
    """

    def run(*settings: str) -> None:
        common = [
            "data=stdlib",
            "data.length=96",
            "optim.steps=4",
            "optim.batch_size=2",
            "anchors_per_sequence=4",
            "checkpoints=1",
        ]
        common += [
            "evaluation.prompts=2",
            "evaluation.max_new_tokens=24",
            "evaluation.budgets=[8]",
            "data.max_examples=24",
        ]
        common += [
            "evaluation.max_prompt_tokens=24",
            "evaluation.external_prompts=0",
            "drafter.layers=1",
            "drafter.block_size=4",
        ]
        output = start_command(
            "train/main.py", [*common, f"runs_dir={folder}", "name=tiny", *settings]
        ).finish()
        rows = [
            line.rstrip()
            for line in output.splitlines()
            if line.rstrip().endswith((" yes |", " no |", " NO |"))
        ]
        assert len(rows) >= 3 and all(row.endswith(" yes |") for row in rows), output

    return run


def test_a_drafter_is_trained_and_evaluated_for_a_hybrid(folder, train_and_evaluate):
    train_and_evaluate(f"target.path={folder / 'target'}")


def test_a_drafter_is_trained_and_evaluated_for_quantised_weights(folder, train_and_evaluate):
    pytest.importorskip("bitsandbytes")
    quantised = BitsAndBytesConfig(load_in_4bit=True)
    options = {"device_map": {"": "cpu"}, "dtype": torch.float32, "quantization_config": quantised}
    AutoModelForCausalLM.from_pretrained(folder / "target", **options).save_pretrained(
        folder / "small"
    )
    for file in (folder / "target").glob("tokenizer*.json"):
        shutil.copy(file, folder / "small")
    train_and_evaluate(f"target.path={folder / 'small'}")
