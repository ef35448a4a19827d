"""Masked diffusion decoding: every way of drafting writes what a plain step-by-step loop writes, write for write."""

import json
from dataclasses import replace
from itertools import product

import pytest
import torch

from infer.config import MaskedOptions
from infer.diffusion import fill, generate_masked
from infer.masked import MaskedModel, load_masked
from infer.sampling import gumbel_noise
from infer.selfdraft import Guess, Plan, chain, drafts, mixed, pick, tree, walk

MASK = 60


@pytest.fixture(scope="module")
def model() -> MaskedModel:
    return tiny()


@pytest.fixture(scope="module")
def shifted() -> MaskedModel:
    return tiny(shifted=True)


def tiny(shifted: bool = False, seed: int = 0) -> MaskedModel:
    """A random bidirectional model of 64 tokens, sharp enough that positions differ in confidence."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=0.4,
        eos_token_id=None,
        bos_token_id=None,
    )
    return MaskedModel(Qwen3ForCausalLM(config).eval().requires_grad_(False), None, MASK, shifted, "tiny")


class Kept:
    """Keys and values of the last full pass; a block's pass sees its own in place of the kept ones of the block."""

    def __init__(self) -> None:
        self.layers, self.block = {}, None

    def update(self, keys, values, layer):
        if self.block is None:
            self.layers[layer] = keys, values
            return keys, values
        begin, end = self.block
        return tuple(
            torch.cat([old[:, :, :begin], new, old[:, :, end:]], 2)
            for old, new in zip(self.layers[layer], (keys, values), strict=True)
        )

    def get_seq_length(self, layer=0):
        return 0


@torch.no_grad()
def reference(model: MaskedModel, prompt: list[int], options: MaskedOptions) -> list[tuple[int, int]]:
    """One token a pass, with nothing of ours but the noise."""
    ids = torch.tensor([prompt + [MASK] * options.length])
    width, kept, since, writes, shift = ids.shape[1], Kept(), 0, [], int(model.shifted)

    def run(begin: int, end: int) -> torch.Tensor:
        out = model.model.model(
            input_ids=ids[:, begin:end],
            position_ids=torch.arange(begin, end)[None],
            attention_mask=torch.zeros(1, 1, end - begin, width),
            past_key_values=kept,
            use_cache=True,
        )
        return model.model.lm_head(out.last_hidden_state)[0]

    for first in range(len(prompt), width, options.block_length):
        last = first + options.block_length
        for count in range(options.block_length):
            if options.cache == "none" or count == 0 or since == options.refresh:
                kept.block, since = None, 0
                outputs = dict(enumerate(run(0, width)))
            else:
                kept.block = first - shift, last
                outputs = dict(enumerate(run(*kept.block), first - shift))
            best = None
            for position in range(first, last):
                if ids[0, position] != MASK:
                    continue
                logits = outputs[position - shift].double()
                logits[MASK] = -torch.inf
                scores = logits
                if options.temperature:
                    noise = gumbel_noise(torch.tensor([options.seed]), torch.tensor([[position]]), len(logits))
                    scores = logits / options.temperature + noise[0, 0]
                token = int(scores.argmax())
                confidence = float(logits.softmax(-1)[token])
                if best is None or confidence > best[0]:
                    best = confidence, position, token
            ids[0, best[1]] = best[2]
            writes.append((best[1] - len(prompt), best[2]))
            since += 1
    return writes


PROMPTS = [[3], [7, 8, 9, 10, 11, 12, 13], [1, 40, 2, 5, 5, 5, 33, 21, 9, 14, 50, 4]]
POLICIES = [("none", 8), ("dual", 3), ("dual", 8)]
WAYS = [(order, length) for order in ("greedy", "mixed") for length in (1, 2, 3, 4, 5)]
WAYS += [("greedy", 8), ("greedy", "auto"), ("tree", 3), ("tree", "auto")]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("block_length", [4, 8, 16])
@pytest.mark.parametrize("kind", ["model", "shifted"])
def test_every_way_of_drafting_writes_what_a_plain_loop_writes(kind, block_length, temperature, request):
    model = request.getfixturevalue(kind)
    saved = 0
    for prompt, (cache, refresh) in product(PROMPTS, POLICIES):
        options = MaskedOptions(16, block_length, temperature, seed=4, cache=cache, refresh=refresh, method="steps")
        expected = reference(model, prompt, options)
        plain = fill(model, prompt, options)
        assert plain.writes == expected
        assert plain.stats.passes == plain.stats.steps == 16
        for order, length in WAYS:
            way = replace(options, method="ssd", order=order, draft_length=length, nodes=9)
            done = fill(model, prompt, way)
            assert done.writes == expected, way
            saved += 16 - done.stats.passes
    assert saved > 0
