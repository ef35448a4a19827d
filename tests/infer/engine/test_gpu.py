"""Decoding and training on a GPU, with layers of the size of real models."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from infer import Engine, Target
from infer.config import DrafterConfig, EngineConfig, SamplingOptions
from infer.drafters.build import create_drafter
from infer.kernels.table import REFERENCE_KERNELS, select_kernels
from infer.targets.kernel_decoder import KernelDecoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
# Heads of size 128, 32 for queries and 8 for keys, as in Qwen3-4B.
QWEN3_HEAD_SIZES = {
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
    """Return a function (dtype, sliding window) -> a target and a drafter on the GPU."""

    def make(dtype: torch.dtype, window: int | None = None):
        torch.manual_seed(0)
        layer_types = [
            "sliding_attention" if window and i % 2 else "full_attention" for i in range(6)
        ]
        sliding = {
            "use_sliding_window": bool(window),
            "sliding_window": window,
            "layer_types": layer_types,
        }
        config = Qwen3Config(num_hidden_layers=6, **sliding, **QWEN3_HEAD_SIZES)
        target = Target(Qwen3ForCausalLM(config).to("cuda", dtype))
        drafter = create_drafter(DrafterConfig(layers=2, block_size=8, mask_token_id=999), target)
        drafter.init_weights(torch.Generator().manual_seed(0))
        return target, drafter.to("cuda", dtype)

    return make


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(900, (20 + 60 * i,), generator=generator).tolist() for i in range(6)]


def decode_prompts(target, drafter, method: str, rows: int, **options) -> list[list[int]]:
    """Return the outputs of all prompts. Options are those of the engine and of sampling."""
    sampling_options = {
        key: options.pop(key)
        for key in ("temperature", "top_p", "top_k", "repetition_penalty")
        if key in options
    }
    engine = Engine(target, drafter, EngineConfig(method, 24, max_num_seqs=rows, **options), 700)
    sequences = [
        engine.submit(prompt, SamplingOptions(max_new_tokens=40, seed=5, **sampling_options))
        for prompt in make_prompts()
    ]
    while engine.has_unfinished_sequences:
        engine.step()
    if not sampling_options:
        assert engine.runner.graphs.is_enabled
        assert not engine.runner.uses_cuda_graphs or any(engine.runner.graphs.graphs.values())
    return [sequence.ids for sequence in sequences]


def test_fast_versions_equal_their_references():
    kernels = select_kernels(torch.device("cuda"), torch.bfloat16)
    for name in ("attend", "attention", "best_first_search"):
        assert getattr(kernels, name) is not getattr(REFERENCE_KERNELS, name), name


@pytest.mark.parametrize("window", [None, 32])
@pytest.mark.parametrize(
    "sampling_options", [{}, {"temperature": 1.0, "top_p": 0.9}, {"repetition_penalty": 1.3}]
)
def test_outputs_are_the_same_by_all_methods_in_float32(pair, window, sampling_options):
    torch.backends.cuda.matmul.allow_tf32 = False
    target, drafter = pair(torch.float32, window)
    assert (
        isinstance(target.run_decoder, KernelDecoder)
        and target.kernels.attend is not REFERENCE_KERNELS.attend
    )
    expected = decode_prompts(target, None, "plain", 1, compile=False, **sampling_options)
    for method, rows, compile in (
        ("plain", 4, True),
        ("chain", 1, True),
        ("ddtree", 1, False),
        ("ddtree", 4, True),
    ):
        actual = decode_prompts(target, drafter, method, rows, compile=compile, **sampling_options)
        assert actual == expected, (method, rows, compile)


def test_outputs_in_bfloat16_differ_from_the_baseline_only_at_ties(pair):
    target, drafter = pair(torch.bfloat16)
    expected = decode_prompts(target, None, "plain", 1, compile=False)
    outputs = decode_prompts(target, drafter, "ddtree", 4)
    exact_model = target.model.float()
    for prompt, actual_ids, expected_ids in zip(make_prompts(), outputs, expected, strict=True):
        first = next(
            (
                i
                for i, (actual_id, expected_id) in enumerate(
                    zip(actual_ids, expected_ids, strict=True)
                )
                if actual_id != expected_id
            ),
            None,
        )
        assert first is None or first > 0  # both prefills are the same
        if first is not None:
            ids = torch.tensor([prompt + actual_ids[:first]], device=exact_model.device)
            logits = exact_model(ids).logits[0, -1]
            difference = (logits[actual_ids[first]] - logits[expected_ids[first]]).abs()
            assert difference < 0.02 * (logits.max() - logits.mean()), first


def test_a_greedy_round_synchronises_once(pair):
    target, drafter = pair(torch.bfloat16)
    engine = Engine(target, drafter, EngineConfig("ddtree", 24, max_num_seqs=2), 700)
    engine.submit([1] * 50, SamplingOptions(max_new_tokens=200, ignore_eos=True))
    for _ in range(4):
        engine.step()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchroniz") as caught:
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    messages = [str(warning.message) for warning in caught]
    assert len([message for message in messages if "prototype" not in message]) == 1


def test_a_training_step_lowers_the_loss(pair):
    from train.batches import draw_blocks
    from train.config import ObjectiveConfig, TrainConfig
    from train.step import compute_block_loss

    target, drafter = pair(torch.bfloat16)
    drafter = drafter.float()
    ids = torch.randint(
        900, (2, 256), device="cuda", generator=torch.Generator("cuda").manual_seed(0)
    )
    positions = torch.arange(256, device="cuda").expand_as(ids).contiguous()
    rows = {"ids": ids, "positions": positions, "documents": torch.zeros_like(ids)}
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
        loss = compute_block_loss(drafter, target, rows, blocks, config).loss
        losses.append(float(loss))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
