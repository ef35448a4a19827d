"""Training that goes on from a drafter that is there already: exactly its weights and its loss, and
nothing that contradicts it."""

import json

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from data.packing import batch, packed_rows
from infer import load_drafter
from infer.config import DrafterConfig, TargetConfig
from infer.drafters.base import config_for, new_drafter
from infer.drafters.dflash.model import DFlash
from infer.formats.checkpoint import save_drafter
from infer.formats.export import export_drafter
from infer.targets.target import Target
from train.batches import draw_blocks
from train.config import TrainConfig
from train.objective import position_weights
from train.run.initial import initial_drafter, named_mask, resolve_init
from train.run.state import with_mask_token
from train.step import block_loss

EMBEDDED = TargetConfig()


def drafter_of(target, layer_ids=(2, 7)) -> DFlash:
    """Random weights, one sliding layer, in the embedded target's sizes."""
    config = config_for(
        DrafterConfig(layers=1, block_size=6, target_layer_ids=list(layer_ids)), target
    )
    config.layer_types = ["sliding_attention"]
    config.use_sliding_window = True
    config.sliding_window = 20
    drafter = DFlash(config)
    drafter.init_weights(torch.Generator().manual_seed(11))
    return drafter


def test_a_run_starts_from_exactly_those_weights_with_their_loss(
    small, run_here, shallow_target, tmp_path
):
    target = shallow_target
    drafter = drafter_of(target, (1, 2))
    export_drafter(drafter, "speculators", target, tmp_path / "init")
    options = [
        f"drafter.init={tmp_path}/init",
        "drafter.block_size=6",
        "optim.lr=1e-30",
        "optim.steps=1",
    ]
    config = small(*options, "optim.precision=float32")  # as the loss below
    run = run_here(config)
    saved = run / "checkpoints" / "best" / "drafter"
    weights = load_file(saved / "model.safetensors")  # a step of that size changes no bit
    assert (
        weights.keys() == drafter.state_dict().keys()
    )  # neither embedding nor head: they are the target's own
    assert all(torch.equal(weights[name], tensor) for name, tensor in drafter.state_dict().items())
    assert load_drafter(saved).attention_patterns == drafter.attention_patterns == [(True, 20)]
    written = json.loads((run / "config.json").read_text())["drafter"]
    assert (
        written["target_layer_ids"] == [1, 2] and written["mask_token_id"] == drafter.mask_token_id
    )

    rows = batch(packed_rows(config.data, target.tokenizer, target.tokenizer_digest), 0, 2, seed=0)
    blocks = draw_blocks(rows, config, 0)
    loss = block_loss(drafter, target, rows, blocks, config).loss
    weight = (blocks.supervised.sum((0, 1)) * position_weights(config.objective, 5)).sum()
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx((loss / weight).item(), rel=1e-5)


def test_options_that_contradict_it_are_refused_with_those_to_give(embedded, tmp_path):
    drafter = drafter_of(embedded)
    save_drafter(drafter.config, drafter.state_dict(), tmp_path)
    init = str(tmp_path)
    options = resolve_init(DrafterConfig(init=init, layers=1, block_size=6), EMBEDDED)
    assert options.target_layer_ids == [2, 7] and options.mask_token_id == drafter.mask_token_id
    with pytest.raises(
        ValueError, match=r"another drafter than the options say: give drafter\.layers=1 "
    ):
        resolve_init(DrafterConfig(init=init), EMBEDDED)
    with pytest.raises(ValueError, match=r"give drafter\.target_layer_ids=\[2,7\]"):
        resolve_init(
            DrafterConfig(init=init, layers=1, block_size=6, target_layer_ids=[1, 7]), EMBEDDED
        )
    with pytest.raises(ValueError, match=r"give drafter\.family=dflash"):
        resolve_init(DrafterConfig(init=init, layers=1, block_size=6, family="dart"), EMBEDDED)
    with pytest.raises(FileNotFoundError, match="is no folder"):
        resolve_init(DrafterConfig(init=str(tmp_path / "gone")), EMBEDDED)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"drafter\.init=.*model\.safetensors is missing"):
        resolve_init(DrafterConfig(init=init, layers=1, block_size=6), EMBEDDED)


def test_another_number_of_tokens_is_chosen_anew(embedded, tmp_path):
    drafter = drafter_of(embedded)
    tokens = torch.arange(3, 83, 2)
    save_drafter(drafter.config, drafter.state_dict(), tmp_path)
    options = resolve_init(
        DrafterConfig(init=str(tmp_path), layers=1, block_size=6, draft_vocab_size=40), EMBEDDED
    )
    started = initial_drafter(TrainConfig(drafter=options), embedded, tokens)
    save_drafter(started.config, started.state_dict(), tmp_path / "part")
    whole, part = (load_drafter(path) for path in (tmp_path, tmp_path / "part"))
    assert torch.equal(part.vocabulary.tokens, tokens)
    states = torch.randn(
        1, 5, drafter.config.hidden_size, generator=torch.Generator().manual_seed(2)
    )
    assert torch.equal(part.logits(embedded, states), whole.logits(embedded, states)[..., tokens])


def test_what_cannot_be_trained_is_refused(embedded, tmp_path):
    drafter = drafter_of(embedded)
    export_drafter(drafter, "speculators", embedded, tmp_path / "own")
    config = TrainConfig(drafter=DrafterConfig(init=str(tmp_path / "own"), layers=1, block_size=6))
    started = initial_drafter(config, embedded)
    assert started.lm_head is None and started.embed_tokens is None
    assert started.training
    assert all(p.requires_grad and p.dtype == torch.float32 for p in started.parameters())
    other = load_drafter(tmp_path / "own")
    other.lm_head.weight[3] += 1
    save_drafter(other.config, other.state_dict(), tmp_path / "other")
    config.drafter.init = str(tmp_path / "other")
    with pytest.raises(
        ValueError, match="cannot be trained here: its own lm_head is not the target's"
    ):
        initial_drafter(config, embedded)
    tiny = drafter_of(embedded)
    tiny.config.num_target_layers = 13
    save_drafter(tiny.config, tiny.state_dict(), tmp_path / "tiny")
    config.drafter.init = str(tmp_path / "tiny")
    with pytest.raises(
        ValueError, match="made for another target: its config says num_target_layers 13"
    ):
        initial_drafter(config, embedded)


def test_a_drafter_that_cannot_begin_as_its_target_says_so(embedded):
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    target = Target(LlamaForCausalLM(LlamaConfig(vocab_size=512, **sizes)), embedded.tokenizer)
    with pytest.warns(UserWarning, match="begins from noise"):
        initial_drafter(TrainConfig(drafter=DrafterConfig(layers=1)), target)


def test_darts_published_layout_is_gone_on_from_with_its_head(embedded, tmp_path):
    drafter = new_drafter(DrafterConfig(family="dart", layers=1, block_size=5), embedded)
    drafter.config.dart_config |= {"qk_norm": False, "norm_twice": True}
    drafter = type(drafter)(drafter.config)
    drafter.init_weights(torch.Generator().manual_seed(1))
    save_drafter(drafter.config, drafter.state_dict(), tmp_path / "init")
    options = resolve_init(
        DrafterConfig(init=str(tmp_path / "init"), family="dart", layers=1, block_size=5),
        TargetConfig(),
    )
    started = initial_drafter(TrainConfig(drafter=options), embedded)
    assert started.state_dict().keys() == drafter.state_dict().keys()
    assert all(
        torch.equal(tensor, drafter.state_dict()[name])
        for name, tensor in started.state_dict().items()
    )


def test_the_mask_token_is_one_that_the_rows_do_not_use(embedded):
    # the embedded vocabulary's special tokens
    end = 0
    mask = 1
    pad = 2
    for used, expected in (([end, 400], mask), ([end, mask, 400], pad), ([*range(511)], 511)):
        rows = Dataset.from_dict({"ids": [used, used]})
        assert with_mask_token(DrafterConfig(), embedded, rows).mask_token_id == expected
    assert with_mask_token(DrafterConfig(mask_token_id=7), embedded, rows).mask_token_id == 7
    assert named_mask(mask, embedded.tokenizer) == ", mask token 1 (<|mask|>)" and not named_mask(
        None, None
    )


def test_dart_needs_no_mask_token(embedded):
    rows = Dataset.from_dict({"ids": [[0, 400]]})
    assert (
        with_mask_token(DrafterConfig(family="dart", layers=1), embedded, rows).mask_token_id
        is None
    )
