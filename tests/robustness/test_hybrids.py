"""A small Qwen3.5-shaped target, from training a drafter for it to its evaluation."""

import shutil

import pytest
import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

pytestmark = pytest.mark.robustness


@pytest.fixture
def folder(tmp_path, repo):
    """A random Qwen3.5-shaped model with the embedded tokenizer."""
    embedded = repo / "data" / "embedded"
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=2048,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        eos_token_id=None,
        tie_word_embeddings=True,
    )
    Qwen3_5ForCausalLM(config).save_pretrained(tmp_path / "target")
    for file in embedded.glob("tokenizer*.json"):
        shutil.copy(file, tmp_path / "target")
    return tmp_path


def test_a_drafter_is_trained_and_evaluated_for_a_hybrid(folder, start_command):
    """Its texts are the target's own, and the run ends with a checkpoint that decodes."""
    settings = [f"target.path={folder / 'target'}", "data=stdlib", "data.length=96", "optim.steps=4", "optim.batch=2"]
    settings += ["anchors=4", "evaluation.prompts=2", "evaluation.max_new_tokens=24", "evaluation.budgets=[8]"]
    settings += ["drafter.layers=1", "drafter.block_size=4", "checkpoints=1", f"runs_dir={folder}"]
    settings += ["name=hybrid", "data.limit=24", "evaluation.prompt_tokens=24"]
    said = start_command("train/main.py", settings).finish()
    rows = [line for line in said.splitlines() if line.rstrip().endswith(("yes", "no"))]
    assert len(rows) >= 3 and all(row.rstrip().endswith("yes") for row in rows), said
