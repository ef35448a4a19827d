"""Training from an existing drafter: it starts with exactly its weights and its loss, and refuses
options that contradict it."""

import json

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from data.packing import load_packed_dataset, read_batch
from infer import load_drafter
from infer.config import DrafterConfig, TargetConfig
from infer.drafters.build import build_drafter_config, create_drafter
from infer.drafters.dflash.model import DFlash
from infer.formats.checkpoint import save_drafter
from infer.formats.export import export_drafter
from infer.targets.target import Target
from train.batches import draw_blocks
from train.config import TrainConfig
from train.objective import position_weights
from train.run.initial import create_initial_drafter, format_mask_token, resolve_drafter_options
from train.run.state import set_mask_token
from train.step import compute_block_loss

EMBEDDED_TARGET = TargetConfig()


def make_drafter(target, layer_ids=(2, 7)) -> DFlash:
    """Return a drafter with random weights and one sliding-window layer."""
    config = build_drafter_config(
        DrafterConfig(layers=1, block_size=6, target_layer_ids=list(layer_ids)), target
    )
    config.layer_types = ["sliding_attention"]
    config.use_sliding_window = True
    config.sliding_window = 20
    drafter = DFlash(config)
    drafter.init_weights(torch.Generator().manual_seed(11))
    return drafter


def test_a_run_starts_with_the_drafters_weights_and_loss(small, run_here, shallow_target, tmp_path):
    target = shallow_target
    drafter = make_drafter(target, (1, 2))
    export_drafter(drafter, "speculators", target, tmp_path / "init")
    options = [
        f"drafter.init={tmp_path}/init",
        "drafter.block_size=6",
        "optim.lr=1e-30",
        "optim.steps=1",
    ]
    config = small(*options, "optim.precision=float32")  # the precision of the loss below
    run = run_here(config)
    saved = run / "checkpoints" / "best" / "drafter"
    weights = load_file(saved / "model.safetensors")  # the learning rate changes no bit
    # without embedding and head, which are the target's
    assert weights.keys() == drafter.state_dict().keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in drafter.state_dict().items())
    assert load_drafter(saved).attention_patterns == drafter.attention_patterns == [(True, 20)]
    recorded = json.loads((run / "config.json").read_text())["drafter"]
    assert recorded["target_layer_ids"] == [1, 2]
    assert recorded["mask_token_id"] == drafter.mask_token_id

    dataset = load_packed_dataset(config.data, target.tokenizer, target.tokenizer_digest)
    columns = read_batch(dataset, 0, 2, seed=0)
    blocks = draw_blocks(columns, config, 0)
    loss = compute_block_loss(drafter, target, columns, blocks, config).loss
    total_weight = (blocks.supervised.sum((0, 1)) * position_weights(config.objective, 5)).sum()
    first_line = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert first_line["loss"] == pytest.approx((loss / total_weight).item(), rel=1e-5)


def test_options_that_contradict_the_drafter_are_refused(embedded, tmp_path):
    drafter = make_drafter(embedded)
    save_drafter(drafter.config, drafter.state_dict(), tmp_path)
    init = str(tmp_path)
    options = resolve_drafter_options(
        DrafterConfig(init=init, layers=1, block_size=6), EMBEDDED_TARGET
    )
    assert options.target_layer_ids == [2, 7] and options.mask_token_id == drafter.mask_token_id
    with pytest.raises(
        ValueError, match=r"has other values for some of the given options: give drafter\.layers=1 "
    ):
        resolve_drafter_options(DrafterConfig(init=init), EMBEDDED_TARGET)
    with pytest.raises(ValueError, match=r"give drafter\.target_layer_ids=\[2,7\]"):
        resolve_drafter_options(
            DrafterConfig(init=init, layers=1, block_size=6, target_layer_ids=[1, 7]),
            EMBEDDED_TARGET,
        )
    with pytest.raises(ValueError, match=r"give drafter\.family=dflash"):
        resolve_drafter_options(
            DrafterConfig(init=init, layers=1, block_size=6, family="dart"), EMBEDDED_TARGET
        )
    with pytest.raises(FileNotFoundError, match="is neither a folder nor an id"):
        resolve_drafter_options(DrafterConfig(init=str(tmp_path / "gone")), EMBEDDED_TARGET)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"drafter\.init=.*model\.safetensors is missing"):
        resolve_drafter_options(DrafterConfig(init=init, layers=1, block_size=6), EMBEDDED_TARGET)


def test_a_vocabulary_of_another_size_replaces_the_drafters(embedded, tmp_path):
    drafter = make_drafter(embedded)
    draft_tokens = torch.arange(3, 83, 2)
    save_drafter(drafter.config, drafter.state_dict(), tmp_path)
    options = resolve_drafter_options(
        DrafterConfig(init=str(tmp_path), layers=1, block_size=6, draft_vocab_size=40),
        EMBEDDED_TARGET,
    )
    initial = create_initial_drafter(TrainConfig(drafter=options), embedded, draft_tokens)
    save_drafter(initial.config, initial.state_dict(), tmp_path / "reduced")
    full = load_drafter(tmp_path)
    reduced = load_drafter(tmp_path / "reduced")
    assert torch.equal(reduced.vocabulary.tokens, draft_tokens)
    generator = torch.Generator().manual_seed(2)
    states = torch.randn(1, 5, drafter.config.hidden_size, generator=generator)
    expected = full.compute_logits(embedded, states)[..., draft_tokens]
    assert torch.equal(reduced.compute_logits(embedded, states), expected)


def test_drafters_that_do_not_fit_the_target_are_refused(embedded, tmp_path):
    drafter = make_drafter(embedded)
    export_drafter(drafter, "speculators", embedded, tmp_path / "matching")
    config = TrainConfig(
        drafter=DrafterConfig(init=str(tmp_path / "matching"), layers=1, block_size=6)
    )
    initial = create_initial_drafter(config, embedded)
    assert initial.lm_head is None and initial.embed_tokens is None
    assert initial.training
    assert all(p.requires_grad and p.dtype == torch.float32 for p in initial.parameters())
    other_head = load_drafter(tmp_path / "matching")
    other_head.lm_head.weight[3] += 1
    save_drafter(other_head.config, other_head.state_dict(), tmp_path / "other-head")
    config.drafter.init = str(tmp_path / "other-head")
    with pytest.raises(
        ValueError, match="cannot be trained here: the drafter's lm_head differs from the target's"
    ):
        create_initial_drafter(config, embedded)
    other_target = make_drafter(embedded)
    other_target.config.num_target_layers = 13
    save_drafter(other_target.config, other_target.state_dict(), tmp_path / "other-target")
    config.drafter.init = str(tmp_path / "other-target")
    with pytest.raises(
        ValueError, match="made for another target: its config has num_target_layers 13"
    ):
        create_initial_drafter(config, embedded)


def test_a_drafter_that_cannot_copy_target_layers_warns(embedded):
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    target = Target(LlamaForCausalLM(LlamaConfig(vocab_size=512, **sizes)), embedded.tokenizer)
    with pytest.warns(UserWarning, match="starts from random weights"):
        create_initial_drafter(TrainConfig(drafter=DrafterConfig(layers=1)), target)


def test_darts_published_layout_is_trained_with_its_head(embedded, tmp_path):
    drafter = create_drafter(DrafterConfig(family="dart", layers=1, block_size=5), embedded)
    drafter.config.dart_config |= {"qk_norm": False, "norm_twice": True}
    drafter = type(drafter)(drafter.config)
    drafter.init_weights(torch.Generator().manual_seed(1))
    save_drafter(drafter.config, drafter.state_dict(), tmp_path / "init")
    options = resolve_drafter_options(
        DrafterConfig(init=str(tmp_path / "init"), family="dart", layers=1, block_size=5),
        TargetConfig(),
    )
    initial = create_initial_drafter(TrainConfig(drafter=options), embedded)
    assert initial.state_dict().keys() == drafter.state_dict().keys()
    assert all(
        torch.equal(tensor, drafter.state_dict()[name])
        for name, tensor in initial.state_dict().items()
    )


def test_the_mask_token_does_not_occur_in_the_data(embedded):
    # special tokens of the embedded vocabulary
    end_id = 0
    mask_id = 1
    padding_id = 2
    cases = (([end_id, 400], mask_id), ([end_id, mask_id, 400], padding_id), ([*range(511)], 511))
    for ids, expected in cases:
        dataset = Dataset.from_dict({"ids": [ids, ids]})
        assert set_mask_token(DrafterConfig(), embedded, dataset).mask_token_id == expected
    options = set_mask_token(DrafterConfig(mask_token_id=7), embedded, dataset)
    assert options.mask_token_id == 7
    assert format_mask_token(mask_id, embedded.tokenizer) == ", mask token 1 (<|mask|>)"
    assert format_mask_token(None, None) == ""


def test_dart_needs_no_mask_token(embedded):
    dataset = Dataset.from_dict({"ids": [[0, 400]]})
    options = set_mask_token(DrafterConfig(family="dart", layers=1), embedded, dataset)
    assert options.mask_token_id is None
