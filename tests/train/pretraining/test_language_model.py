"""The embedded target's pre-training: what is held out, and a model that learns and is gone on with."""

from transformers import Qwen3Config

from data.corpus import stdlib_prose
from train.pretraining.config import PretrainConfig
from train.pretraining.language_model import pretrain


def test_chapters_are_held_out_by_their_name() -> None:
    train, held = ({document.name for document in stdlib_prose(split)} for split in ("train", "held_out"))
    assert len(train) > 10 * len(held) > 0 and not train & held and "reference:with" in train | held


def test_a_model_is_trained_and_gone_on_with(tmp_path, monkeypatch) -> None:
    """Two steps from random weights, one more from the folder they wrote."""
    page = [document for document in stdlib_prose("train") if len(document.text) > 4000][:3]
    for name in ("stdlib_documents", "stdlib_prose"):
        monkeypatch.setattr(f"train.pretraining.language_model.{name}", lambda split: page)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    sizes = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    Qwen3Config(eos_token_id=0, **heads, **sizes).save_pretrained(tmp_path)
    first = pretrain(PretrainConfig(str(tmp_path / "a"), sizes=str(tmp_path), batch=2, steps=2))
    again = pretrain(PretrainConfig(str(tmp_path / "b"), init=str(tmp_path / "a"), batch=2, steps=1))
    assert again["held_out_loss"] < first["held_out_loss"] < 7
    assert (tmp_path / "a/tokenizer.json").read_bytes() == (tmp_path / "b/tokenizer.json").read_bytes()
