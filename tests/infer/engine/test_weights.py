"""Weights that change after a target was made: a merged adapter, a loaded state dict. The next
output is that of a target with the new weights."""

import json
import urllib.request
from copy import deepcopy

import pytest
import torch

from infer import DecodeOptions, Engine, generate
from infer.config import EngineConfig, SamplingOptions
from infer.serving.hf import speculative
from infer.targets.target import Target

TWO_BLOCK_PROMPT = [(7 * i) % 90 for i in range(140)]  # two blocks of the prefix cache
MAX_NEW_TOKENS = 24


def merge_adapter(model: torch.nn.Module) -> None:
    """Add a low-rank matrix to some projections through `.data`, as peft merges an adapter: PyTorch
    does not count the write."""
    generator = torch.Generator().manual_seed(1)
    for layer in model.model.layers:
        weight = layer.self_attn.v_proj.weight
        lora_b = torch.randn(len(weight), 2, generator=generator)
        lora_a = torch.randn(2, weight.shape[1], generator=generator)
        weight.data += 0.3 * lora_b @ lora_a


def load_state(model: torch.nn.Module) -> None:
    """Load new weights in place."""
    generator = torch.Generator().manual_seed(2)
    noise = {
        name: x + 0.1 * torch.randn(x.shape, generator=generator)
        for name, x in model.state_dict().items()
    }
    model.load_state_dict(noise)


def replace_weights(model: torch.nn.Module) -> None:
    """Load new weights by replacing the parameters."""
    noise = {name: x * 1.2 for name, x in model.state_dict().items()}
    model.load_state_dict(noise, assign=True)
    model.tie_weights()
    model.requires_grad_(False)


def decode_with_new_target(target: Target) -> list[int]:
    """Return the output of a new target with the same weights."""
    new_target = Target(deepcopy(target.model))
    return generate(
        new_target, None, TWO_BLOCK_PROMPT, method="plain", max_new_tokens=MAX_NEW_TOKENS
    ).ids


def by_generate(target, drafter):
    return lambda: (
        generate(target, drafter, TWO_BLOCK_PROMPT, budget=6, max_new_tokens=MAX_NEW_TOKENS).ids
    )


def build_engine_answerer(target, drafter):
    engine = Engine(target, drafter, EngineConfig(budget=6, prefix_cache_mib=8), 256)

    def decode() -> list[int]:
        sequence = engine.submit(TWO_BLOCK_PROMPT, SamplingOptions(max_new_tokens=MAX_NEW_TOKENS))
        while engine.has_unfinished_sequences:
            engine.step()
        return sequence.ids

    return decode


def by_transformers(target, drafter):
    loop = speculative(target, drafter, budget=6)
    ids = torch.tensor([TWO_BLOCK_PROMPT])
    options = {
        "max_new_tokens": MAX_NEW_TOKENS,
        "do_sample": False,
        "attention_mask": torch.ones_like(ids),
    }
    return lambda: target.model.generate(ids, custom_generate=loop, **options)[
        0, len(TWO_BLOCK_PROMPT) :
    ].tolist()


API_AND_CHANGE = [
    (by_generate, replace_weights),
    (build_engine_answerer, merge_adapter),
    (build_engine_answerer, replace_weights),
    (build_engine_answerer, load_state),
    (by_transformers, merge_adapter),
]


@pytest.mark.parametrize(("api", "change"), API_AND_CHANGE)
def test_the_output_is_that_of_the_new_weights(make_tiny, api, change):
    target, drafter = make_tiny(seed=4)
    decode = api(target, drafter)
    old_output = decode()
    assert old_output == decode_with_new_target(target)
    change(target.model)
    new_output = decode()
    assert new_output == decode_with_new_target(target) != old_output


def test_a_server_answers_with_the_new_weights(shallow_target, running):
    target = Target(deepcopy(shallow_target.model), shallow_target.tokenizer)
    engine = Engine(target, None, EngineConfig("plain", max_num_seqs=2, prefix_cache_mib=8), 256)
    with running(engine) as (url, _):

        def request_completion() -> list[int]:
            parameters = {
                "model": "embedded",
                "prompt": TWO_BLOCK_PROMPT,
                "max_tokens": MAX_NEW_TOKENS,
                "temperature": 0,
                "return_token_ids": True,
            }
            body = json.dumps(parameters).encode()
            request = urllib.request.Request(
                f"{url}/v1/completions", body, {"Content-Type": "application/json"}
            )
            return json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["token_ids"]

        old_output = request_completion()
        merge_adapter(target.model)
        new_output = request_completion()
    assert new_output == decode_with_new_target(target) != old_output


@pytest.mark.parametrize("change", [load_state, replace_weights])
def test_a_running_sequence_continues_with_the_new_weights(make_tiny, change):
    """Its tokens stay. The new weights decode what follows them."""
    target, drafter = make_tiny(seed=4)
    engine = Engine(target, drafter, EngineConfig(budget=6, max_num_seqs=2), 256)
    sequence = engine.submit(
        TWO_BLOCK_PROMPT, SamplingOptions(max_new_tokens=MAX_NEW_TOKENS, logprobs=0)
    )
    while len(sequence.ids) < 6:
        engine.step()
    old_length = len(sequence.ids)
    change(target.model)
    while engine.has_unfinished_sequences:
        engine.step()
    continuation = generate(
        Target(target.model),
        None,
        TWO_BLOCK_PROMPT + sequence.ids[:old_length],
        method="plain",
        max_new_tokens=MAX_NEW_TOKENS,
    )
    assert sequence.ids[old_length:] == continuation.ids[: MAX_NEW_TOKENS - old_length]
    assert len(sequence.logprobs) == MAX_NEW_TOKENS


def test_a_drafter_drafts_with_its_new_weights(make_tiny):
    """An engine drafts as a new engine does."""
    target, drafter = make_tiny(seed=4)
    engine = Engine(target, drafter, EngineConfig(budget=6), 256)

    def commits(engine: Engine) -> list[int]:
        sequence = engine.submit(TWO_BLOCK_PROMPT, SamplingOptions(max_new_tokens=MAX_NEW_TOKENS))
        while engine.has_unfinished_sequences:
            engine.step()
        return sequence.commits

    old_commits = commits(engine)
    drafter.init_weights(torch.Generator().manual_seed(9))
    options = DecodeOptions(budget=6)
    assert commits(engine) == commits(Engine(target, drafter, options, 256)) != old_commits
