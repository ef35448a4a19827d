"""Filters and noise: what they are, whatever the way of computing them, and what memory they
take."""

import math
from pathlib import Path

import pytest
import torch

from infer import generate
from infer.config import TextOptions
from infer.engine.choices import MANY, PIECE, piece
from infer.engine.sampling import (
    Sampling,
    adjust,
    choose,
    condition_on_noise,
    gumbel_noise,
    lowest_of_top_p,
    round_noise,
)

CPU = torch.device("cpu")


def sorted_top_p(logits: torch.Tensor, p: float) -> torch.Tensor:
    """The filter by its definition: tokens whose likelier ones together have less than p, and their
    equals."""
    order = logits.sort(dim=-1, descending=True).values
    shares = order.double().softmax(-1)
    kept = (shares.cumsum(-1) - shares < p).sum(-1, keepdim=True).clamp(min=1)
    return logits.masked_fill(logits < order.gather(-1, kept - 1), -math.inf)


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("p", [1e-6, 0.3, 0.9, 0.995])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16]
)  # bfloat16: hundreds of equal logits
def test_top_p_of_a_large_vocabulary_keeps_what_sorting_keeps(spread, p, dtype):
    """Flat distributions need many tokens, peaked ones a few."""
    logits = spread * torch.randn(2, 3, 9000, generator=torch.Generator().manual_seed(0))
    logits[1] *= 3
    logits = logits.to(dtype)
    rows = Sampling.of([TextOptions(temperature=1.0, top_p=p)] * 2, 9000, CPU)
    ours = adjust(logits, rows)
    expected = sorted_top_p(logits.float(), p)
    differ = ours.isinf() != expected.isinf()
    assert differ.sum(-1).max() <= (
        1 if dtype == torch.float32 and spread < 1 else 0
    )  # rounding at the edge of 0.995
    assert torch.equal(ours.isinf(), adjust(logits[..., torch.arange(9000)], rows).isinf())
    for b in range(2):
        for q in range(3):
            alone = lowest_of_top_p(logits[b : b + 1, q : q + 1].float(), rows["top_p"][:1])
            assert torch.equal(alone[0, 0], lowest_of_top_p(logits.float(), rows["top_p"])[b, q])


def test_choosing_in_parts_is_choosing_at_once(monkeypatch):
    """Rows of every kind beside each other, in parts of one node and in one part."""
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(5, 7, 60, generator=generator)
    depths = torch.randint(4, (5, 7), generator=generator)
    seen = torch.rand(5, 7, 60, generator=generator) < 0.3
    rows = [
        TextOptions(),
        TextOptions(temperature=0.8, top_p=0.7, seed=1),
        TextOptions(repetition_penalty=1.7),
        TextOptions(temperature=1.3, top_k=4, repetition_penalty=1.2, seed=2),
        TextOptions(temperature=1.0, min_p=0.1, seed=3),
    ]
    drawn = [row.temperature > 0 for row in rows]
    rows = Sampling.of(rows, 60, CPU)
    noise = round_noise(rows, torch.arange(5), 4, 60)
    assert noise.any(-1).all(-1).tolist() == drawn
    scores = adjust(logits, rows, seen)
    for row in range(5):
        scores[row] += noise[row, depths[row]]
    before = logits.clone()
    for size in (1, 10**9):
        monkeypatch.setattr("infer.engine.sampling.SLAB", size)
        chosen = choose(logits, depths, rows, noise, lambda nodes: seen[:, nodes])
        assert torch.equal(chosen, scores.argmax(-1)) and torch.equal(logits, before)


def test_noise_is_the_same_in_parts(monkeypatch):
    seeds = torch.tensor([1, -2])
    positions = torch.arange(80).view(2, 40)
    whole = gumbel_noise(seeds, positions, 33)
    rows = Sampling.of(
        [TextOptions(temperature=0.8, top_k=9), TextOptions(temperature=1.1, seed=4)], 33, CPU
    )
    noise = whole.view(2, 40, 33)
    marginals = torch.randn(2, 7, 33, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    judged = condition_on_noise(marginals, rows, noise, None)
    monkeypatch.setattr("infer.engine.sampling.SLAB", 1)
    assert torch.equal(gumbel_noise(seeds, positions, 33), whole)
    assert torch.equal(condition_on_noise(marginals, rows, noise, None), judged)


@pytest.mark.parametrize("rows", [1, 5, 8, 16, 100, 1000])
def test_logits_of_many_rows_are_no_more_than_those_of_a_few(rows):
    assert 1 <= piece(rows) <= PIECE and rows * piece(rows) <= max(PIECE * MANY, rows)


PROGRAM = """
import ctypes, re, torch
from pathlib import Path
from transformers import Qwen3Config, Qwen3ForCausalLM
from infer import Engine
from infer.config import DrafterConfig, EngineConfig, TextOptions
from infer.drafters.base import new_drafter
from infer.targets.target import Target

ctypes.CDLL(None).mallopt(-3, 65536)  # what is freed is given back: mmap for all that is larger
torch.set_num_threads(1)
torch.manual_seed(0)
sizes = dict(hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
config = Qwen3Config(vocab_size=151936, num_hidden_layers=2, tie_word_embeddings=True, eos_token_id=None, **sizes)
target = Target(Qwen3ForCausalLM(config), None)
drafter = new_drafter(DrafterConfig(layers=1, block_size=8, mask_token_id=5), target)
drafter.init_weights(torch.Generator().manual_seed(0))
engine = Engine(target, drafter, EngineConfig(max_num_seqs=1, budget=63, compile=False), 200)

def resident(name):
    return int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024

nucleus = {"temperature": 1.0, "top_p": 0.9}
for option in {}, nucleus, nucleus | {"top_k": 50, "min_p": 0.01}:
    engine.submit([1, 2, 3], TextOptions(max_new_tokens=100, ignore_eos=True, **option))
    engine.step()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    engine.step()
    print(resident("VmHWM") - before)
    engine.reset()
"""


@pytest.mark.robustness
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(),
    reason="reads the peak of resident memory from /proc",
)
def test_a_sampled_rounds_memory_is_little_more_than_a_greedy_ones(start_command, tmp_path):
    """One row, 64 nodes, 151,936 tokens: what a round adds to the process at its peak, in MiB."""
    (tmp_path / "program.py").write_text(PROGRAM)
    printed = start_command(str(tmp_path / "program.py"), []).finish()
    greedy, *sampled = map(float, printed.split())
    assert greedy > 30 and max(sampled) <= 1.3 * greedy, printed


class InPlace:
    """A processor that writes into what it is given, and notes the prefixes it saw."""

    def __init__(self) -> None:
        self.seen = []

    def __call__(self, ids, scores):
        self.seen.append(ids[0].tolist())
        scores[:, ::2] -= 5.0
        return scores


@pytest.mark.parametrize("method", ["plain", "chain", "ddtree"])
def test_a_processor_in_place_changes_what_is_chosen_and_no_log_probability(make_tiny, method):
    target, drafter = make_tiny()

    class Copying(InPlace):
        def __call__(self, ids, scores):
            return super().__call__(ids, scores.clone())

    options = {"method": method, "budget": 7, "max_new_tokens": 20, "logprobs": 2}
    ours, theirs = (
        generate(target, drafter, [4, 5, 6], processors=[kind()], **options)
        for kind in (InPlace, Copying)
    )
    assert ours.ids == theirs.ids and ours.logprobs == theirs.logprobs


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_processors_see_no_prefix_behind_the_end(make_tiny, scripted_drafter, temperature):
    """Neither behind an end token nor beyond the last token, though the drafter goes on there."""
    target, _ = make_tiny()
    settings = {"budget": 16, "max_new_tokens": 30, "temperature": temperature, "seed": 2}
    ended = 0
    for end in range(1, 96, 8):
        target.model.generation_config.eos_token_id = None
        prompt = [4, 5, end]
        free = generate(
            target, None, prompt, method="plain", processors=[InPlace()], **settings
        ).ids
        target.model.generation_config.eos_token_id = [free[end % 20]]
        drafter = scripted_drafter([prompt + free], 8, 97, skill=0.95)
        watch = InPlace()
        answer = generate(target, drafter, prompt, processors=[watch], logprobs=1, **settings)
        assert answer.ids == free[: len(answer.ids)] and len(answer.logprobs) == len(answer.ids)
        assert sorted(map(len, watch.seen)) == [3 + i for i in range(len(answer.ids))]
        ended += answer.finish_reason == "stop"
    target.model.generation_config.eos_token_id = None
    assert ended > 6


def test_a_token_that_does_not_exist_is_refused_in_a_sentence(make_tiny):
    target, drafter = make_tiny()
    for bad in (97, -1, 2**40):
        with pytest.raises(ValueError, match=f"token {bad} does not exist, the model has 0 to 96"):
            generate(target, drafter, [3, bad, 4], max_new_tokens=4)
