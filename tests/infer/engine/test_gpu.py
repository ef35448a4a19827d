"""Decoding and training on a GPU at the sizes of real models' layers: only where there is one."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from infer import Engine, Target
from infer.config import DrafterConfig, EngineConfig, TextOptions
from infer.drafters.base import new_drafter
from infer.kernels.table import REFERENCE, kernels_for
from infer.targets.lean import LeanDecoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="decoding on CUDA: there is no CUDA device"
    ),
]
SIZES = {  # heads of 128, 32 for queries and 8 for keys, as in Qwen3-4B
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
    "eos_token_id": None,
    "bos_token_id": None,
}


@pytest.fixture(scope="module")
def pair():
    """(dtype, sliding window) -> a target on the GPU and a drafter for it."""

    def make(dtype: torch.dtype, window: int | None = None):
        torch.manual_seed(0)
        kinds = ["sliding_attention" if window and i % 2 else "full_attention" for i in range(6)]
        sliding = {
            "use_sliding_window": bool(window),
            "sliding_window": window,
            "layer_types": kinds,
        }
        config = Qwen3Config(num_hidden_layers=6, **sliding, **SIZES)
        target = Target(Qwen3ForCausalLM(config).to("cuda", dtype))
        drafter = new_drafter(DrafterConfig(layers=2, block_size=8, mask_token_id=999), target)
        drafter.init_weights(torch.Generator().manual_seed(0))
        return target, drafter.to("cuda", dtype)

    return make


def prompts() -> list[list[int]]:
    dice = torch.Generator().manual_seed(1)
    return [torch.randint(900, (20 + 60 * i,), generator=dice).tolist() for i in range(6)]


def written(target, drafter, method: str, rows: int, **options) -> list[list[int]]:
    text = {
        key: options.pop(key)
        for key in ("temperature", "top_p", "top_k", "repetition_penalty")
        if key in options
    }
    engine = Engine(target, drafter, EngineConfig(method, 24, max_num_seqs=rows, **options), 700)
    texts = [
        engine.submit(prompt, TextOptions(max_new_tokens=40, seed=5, **text))
        for prompt in prompts()
    ]
    while engine.busy:
        engine.step()
    if not text:
        assert engine.runner.graphs.works
        assert not engine.runner.captures or any(engine.runner.graphs.graphs.values())
    return [text.ids for text in texts]


def test_fast_versions_equal_their_references():
    kernels = kernels_for(torch.device("cuda"), torch.bfloat16)
    for name in ("attend", "attention", "best_first_search"):
        assert getattr(kernels, name) is not getattr(REFERENCE, name), name


@pytest.mark.parametrize("window", [None, 32])
@pytest.mark.parametrize(
    "text", [{}, {"temperature": 1.0, "top_p": 0.9}, {"repetition_penalty": 1.3}]
)
def test_all_ways_write_the_same_in_float32(pair, window, text):
    torch.backends.cuda.matmul.allow_tf32 = False
    target, drafter = pair(torch.float32, window)
    assert (
        isinstance(target.decoder_pass, LeanDecoder)
        and target.kernels.attend is not REFERENCE.attend
    )
    expected = written(target, None, "plain", 1, compile=False, **text)
    for method, rows, compile in (
        ("plain", 4, True),
        ("chain", 1, True),
        ("ddtree", 1, False),
        ("ddtree", 4, True),
    ):
        assert written(target, drafter, method, rows, compile=compile, **text) == expected, (
            method,
            rows,
            compile,
        )


def test_texts_in_bfloat16_differ_from_plain_ones_at_ties_only(pair):
    target, drafter = pair(torch.bfloat16)
    expected = written(target, None, "plain", 1, compile=False)
    found = written(target, drafter, "ddtree", 4)
    exact = target.model.float()
    for prompt, ours, theirs in zip(prompts(), found, expected, strict=True):
        first = next(
            (i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None
        )
        assert first is None or first > 0  # the first token comes out of the same prefill
        if first is not None:
            ids = torch.tensor([prompt + ours[:first]], device=exact.device)
            logits = exact(ids).logits[0, -1]
            assert (logits[ours[first]] - logits[theirs[first]]).abs() < 0.02 * (
                logits.max() - logits.mean()
            ), first


def test_a_round_of_greedy_texts_waits_once(pair):
    target, drafter = pair(torch.bfloat16)
    engine = Engine(target, drafter, EngineConfig("ddtree", 24, max_num_seqs=2), 700)
    engine.submit([1] * 50, TextOptions(max_new_tokens=200, ignore_eos=True))
    for _ in range(4):
        engine.step()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchroniz") as caught:
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([one for one in caught if "prototype" not in str(one.message)]) == 1


def test_a_training_step_lowers_the_loss(pair):
    from train.batches import draw_blocks
    from train.config import ObjectiveConfig, TrainConfig
    from train.step import block_loss

    target, drafter = pair(torch.bfloat16)
    drafter = drafter.float()
    ids = torch.randint(
        900, (2, 256), device="cuda", generator=torch.Generator("cuda").manual_seed(0)
    )
    places = torch.arange(256, device="cuda").expand_as(ids).contiguous()
    rows = {"ids": ids, "positions": places, "documents": torch.zeros_like(ids)}
    rows["loss"] = torch.ones_like(ids, dtype=torch.bool)
    config = TrainConfig(
        anchors_per_sequence=16,
        drafter=DrafterConfig(layers=2, block_size=8),
        objective=ObjectiveConfig(),
    )
    config.data.length = 256
    config.optim.batch_size = 2
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-3)
    losses = []
    for _ in range(8):
        blocks = draw_blocks(rows, config, 0)
        loss = block_loss(drafter, target, rows, blocks, config).loss
        losses.append(float(loss))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
