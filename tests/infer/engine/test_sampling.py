"""Sampling filters and noise: their definition, independent of chunk sizes, and their memory."""

import math
from pathlib import Path

import pytest
import torch

from infer import generate
from infer.config import SamplingOptions
from infer.engine.sampling import (
    SamplingTensors,
    adjust_logits,
    apply_sampling_to_marginals,
    find_top_p_threshold,
    gumbel_noise,
    make_round_noise,
    sample_tokens,
)
from infer.engine.verification import (
    MAX_LOGIT_CHUNK_NODES_PER_ROW,
    MAX_ROWS_WITH_FULL_LOGIT_CHUNKS,
    count_chunk_nodes,
)

CPU_DEVICE = torch.device("cpu")


def sorted_top_p(logits: torch.Tensor, p: float) -> torch.Tensor:
    """Apply top-p filtering by its definition: keep tokens whose likelier tokens have less than
    probability p together, and tokens with equal logits."""
    sorted_logits = logits.sort(dim=-1, descending=True).values
    probabilities = sorted_logits.double().softmax(-1)
    is_in_nucleus = probabilities.cumsum(-1) - probabilities < p
    count = is_in_nucleus.sum(-1, keepdim=True).clamp(min=1)
    return logits.masked_fill(logits < sorted_logits.gather(-1, count - 1), -math.inf)


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("p", [1e-6, 0.3, 0.9, 0.995])
# bfloat16: hundreds of equal logits
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top_p_of_a_large_vocabulary_keeps_what_sorting_keeps(spread, p, dtype):
    """Flat distributions need many tokens, peaked ones a few."""
    logits = spread * torch.randn(2, 3, 9000, generator=torch.Generator().manual_seed(0))
    logits[1] *= 3
    logits = logits.to(dtype)
    options = [SamplingOptions(temperature=1.0, top_p=p)] * 2
    sampling = SamplingTensors.from_options(options, 9000, CPU_DEVICE)
    actual = adjust_logits(logits, sampling)
    expected = sorted_top_p(logits.float(), p)
    num_different = (actual.isinf() != expected.isinf()).sum(-1).max()
    is_flat = dtype == torch.float32 and spread < 1  # rounding errors at the edge of 0.995
    assert num_different <= (1 if is_flat else 0)
    copied_logits = logits[..., torch.arange(9000)]
    assert torch.equal(actual.isinf(), adjust_logits(copied_logits, sampling).isinf())

    thresholds = find_top_p_threshold(logits.float(), sampling["top_p"])
    for b in range(2):
        for q in range(3):
            node_logits = logits[b : b + 1, q : q + 1].float()
            threshold = find_top_p_threshold(node_logits, sampling["top_p"][:1])
            assert torch.equal(threshold[0, 0], thresholds[b, q])


def test_sampling_in_chunks_equals_sampling_at_once(monkeypatch):
    """Rows with different options in one batch, in chunks of one node and in one chunk."""
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(5, 7, 60, generator=generator)
    depths = torch.randint(4, (5, 7), generator=generator)
    seen = torch.rand(5, 7, 60, generator=generator) < 0.3
    options = [
        SamplingOptions(),
        SamplingOptions(temperature=0.8, top_p=0.7, seed=1),
        SamplingOptions(repetition_penalty=1.7),
        SamplingOptions(temperature=1.3, top_k=4, repetition_penalty=1.2, seed=2),
        SamplingOptions(temperature=1.0, min_p=0.1, seed=3),
    ]
    is_sampled = [row.temperature > 0 for row in options]
    sampling = SamplingTensors.from_options(options, 60, CPU_DEVICE)
    noise = make_round_noise(sampling, torch.arange(5), 4, 60)
    assert noise.any(-1).all(-1).tolist() == is_sampled
    scores = adjust_logits(logits, sampling, seen)
    for row in range(5):
        scores[row] += noise[row, depths[row]]
    old_logits = logits.clone()
    for chunk_values in (1, 10**9):
        monkeypatch.setattr("infer.engine.sampling.MIN_SAMPLING_CHUNK_VALUES_ON_CPU", chunk_values)
        tokens = sample_tokens(logits, depths, sampling, noise, lambda nodes: seen[:, nodes])
        assert torch.equal(tokens, scores.argmax(-1)) and torch.equal(logits, old_logits)


def test_noise_is_the_same_in_chunks(monkeypatch):
    seeds = torch.tensor([1, -2])
    positions = torch.arange(80).view(2, 40)
    noise = gumbel_noise(seeds, positions, 33)
    sampling = SamplingTensors.from_options(
        [SamplingOptions(temperature=0.8, top_k=9), SamplingOptions(temperature=1.1, seed=4)],
        33,
        CPU_DEVICE,
    )
    marginals = torch.randn(2, 7, 33, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    expected = apply_sampling_to_marginals(marginals, sampling, noise, None)
    monkeypatch.setattr("infer.engine.sampling.MIN_SAMPLING_CHUNK_VALUES_ON_CPU", 1)
    assert torch.equal(gumbel_noise(seeds, positions, 33), noise)
    assert torch.equal(apply_sampling_to_marginals(marginals, sampling, noise, None), expected)


@pytest.mark.parametrize("rows", [1, 5, 8, 16, 100, 1000])
def test_logits_of_many_rows_are_no_more_than_those_of_a_few(rows):
    nodes_per_row = count_chunk_nodes(rows)
    assert 1 <= nodes_per_row <= MAX_LOGIT_CHUNK_NODES_PER_ROW
    assert rows * nodes_per_row <= max(
        MAX_LOGIT_CHUNK_NODES_PER_ROW * MAX_ROWS_WITH_FULL_LOGIT_CHUNKS, rows
    )


MEMORY_PROGRAM = """
import ctypes, re, torch
from pathlib import Path
from transformers import Qwen3Config, Qwen3ForCausalLM
from infer import Engine
from infer.config import DrafterConfig, EngineConfig, SamplingOptions
from infer.drafters.build import create_drafter
from infer.targets.target import Target

ctypes.CDLL(None).mallopt(-3, 65536)  # use mmap for larger blocks, so that freed memory is returned
torch.set_num_threads(1)
torch.manual_seed(0)
config = Qwen3Config(
    vocab_size=151936,
    num_hidden_layers=2,
    hidden_size=64,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    tie_word_embeddings=True,
    eos_token_id=None,
)
target = Target(Qwen3ForCausalLM(config), None)
drafter = create_drafter(DrafterConfig(layers=1, block_size=8, mask_token_id=5), target)
drafter.init_weights(torch.Generator().manual_seed(0))
engine = Engine(target, drafter, EngineConfig(max_num_seqs=1, budget=63, compile=False), 200)

def resident(name):
    return int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024

nucleus = {"temperature": 1.0, "top_p": 0.9}
for option in {}, nucleus, nucleus | {"top_k": 50, "min_p": 0.01}:
    engine.submit([1, 2, 3], SamplingOptions(max_new_tokens=100, ignore_eos=True, **option))
    engine.step()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    resident_before = resident("VmRSS")
    engine.step()
    print(resident("VmHWM") - resident_before)
    engine.reset()
"""


@pytest.mark.robustness
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(),
    reason="reads the peak of resident memory from /proc",
)
def test_a_sampled_rounds_memory_is_little_more_than_a_greedy_ones(start_command, tmp_path):
    """One row, 64 nodes, 151,936 tokens: the peak memory of a round in MiB."""
    (tmp_path / "program.py").write_text(MEMORY_PROGRAM)
    printed = start_command(str(tmp_path / "program.py"), []).finish()
    greedy, *sampled = map(float, printed.split())
    assert greedy > 30 and max(sampled) <= 1.3 * greedy, printed


class InPlaceProcessor:
    """A logits processor that changes scores in place, and records the prefixes it was given."""

    def __init__(self) -> None:
        self.prefixes = []

    def __call__(self, ids, scores):
        self.prefixes.append(ids[0].tolist())
        scores[:, ::2] -= 5.0
        return scores


@pytest.mark.parametrize("method", ["plain", "chain", "ddtree"])
def test_a_processor_in_place_changes_what_is_chosen_and_no_log_probability(make_tiny, method):
    target, drafter = make_tiny()

    class CopyingProcessor(InPlaceProcessor):
        def __call__(self, ids, scores):
            return super().__call__(ids, scores.clone())

    options = {"method": method, "budget": 7, "max_new_tokens": 20, "logprobs": 2}
    actual, expected = (
        generate(target, drafter, [4, 5, 6], processors=[processor()], **options)
        for processor in (InPlaceProcessor, CopyingProcessor)
    )
    assert actual.ids == expected.ids and actual.logprobs == expected.logprobs


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_processors_see_no_prefix_after_the_end(make_tiny, scripted_drafter, temperature):
    """Neither after an end token nor after max_new_tokens, although the drafter continues there."""
    target, _ = make_tiny()
    settings = {"budget": 16, "max_new_tokens": 30, "temperature": temperature, "seed": 2}
    num_stopped = 0
    for end in range(1, 96, 8):
        target.model.generation_config.eos_token_id = None
        prompt = [4, 5, end]
        endless_ids = generate(
            target, None, prompt, method="plain", processors=[InPlaceProcessor()], **settings
        ).ids
        target.model.generation_config.eos_token_id = [endless_ids[end % 20]]
        drafter = scripted_drafter([prompt + endless_ids], 8, 97, skill=0.95)
        processor = InPlaceProcessor()
        output = generate(target, drafter, prompt, processors=[processor], logprobs=1, **settings)
        assert output.ids == endless_ids[: len(output.ids)] and len(output.logprobs) == len(
            output.ids
        )
        assert sorted(map(len, processor.prefixes)) == [3 + i for i in range(len(output.ids))]
        num_stopped += output.finish_reason == "stop"
    target.model.generation_config.eos_token_id = None
    assert num_stopped > 6


def test_a_token_that_does_not_exist_is_refused_in_a_sentence(make_tiny):
    target, drafter = make_tiny()
    for invalid_id in (97, -1, 2**40):
        with pytest.raises(
            ValueError, match=f"token id {invalid_id}, but the model has only the ids 0 to 96"
        ):
            generate(target, drafter, [3, invalid_id, 4], max_new_tokens=4)
