"""Weights that are changed under a target: an adapter is merged, a state dict loaded. What is
written next is what a target of the new weights writes."""

import json
import urllib.request
from copy import deepcopy

import pytest
import torch

from infer import DecodeOptions, Engine, generate
from infer.config import EngineConfig, TextOptions
from infer.serving.hf import speculative
from infer.targets.target import Target

PROMPT = [(7 * i) % 90 for i in range(140)]  # two blocks of the prefix memory
TOKENS = 24


def merge_adapter(model: torch.nn.Module) -> None:
    """Add a product of low rank to some projections as peft merges one, by way of `.data`: versions
    stay."""
    generator = torch.Generator().manual_seed(1)
    for layer in model.model.layers:
        weight = layer.self_attn.v_proj.weight
        low, high = (
            torch.randn(*shape, generator=generator)
            for shape in ((len(weight), 2), (2, weight.shape[1]))
        )
        weight.data += 0.3 * low @ high


def load_state(model: torch.nn.Module) -> None:
    """Load other weights."""
    generator = torch.Generator().manual_seed(2)
    noise = {
        name: x + 0.1 * torch.randn(x.shape, generator=generator)
        for name, x in model.state_dict().items()
    }
    model.load_state_dict(noise)


def replace_weights(model: torch.nn.Module) -> None:
    """Load other weights without a copy: the parameters are others then."""
    noise = {name: x * 1.2 for name, x in model.state_dict().items()}
    model.load_state_dict(noise, assign=True)
    model.tie_weights()
    model.requires_grad_(False)


def fresh_text(target: Target) -> list[int]:
    """Return what a target that was just made of the same weights writes."""
    return generate(
        Target(deepcopy(target.model)), None, PROMPT, method="plain", max_new_tokens=TOKENS
    ).ids


def by_generate(target, drafter):
    return lambda: generate(target, drafter, PROMPT, budget=6, max_new_tokens=TOKENS).ids


def by_engine(target, drafter):
    engine = Engine(target, drafter, EngineConfig(budget=6, prefix_cache_mib=8), 256)

    def write() -> list[int]:
        text = engine.submit(PROMPT, TextOptions(max_new_tokens=TOKENS))
        while engine.busy:
            engine.step()
        return text.ids

    return write


def by_transformers(target, drafter):
    loop = speculative(target, drafter, budget=6)
    ids = torch.tensor([PROMPT])
    options = {"max_new_tokens": TOKENS, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    return lambda: target.model.generate(ids, custom_generate=loop, **options)[
        0, len(PROMPT) :
    ].tolist()


ROUTES = [(by_generate, replace_weights), (by_engine, merge_adapter), (by_engine, replace_weights)]
ROUTES += [(by_engine, load_state), (by_transformers, merge_adapter)]


@pytest.mark.parametrize(("route", "change"), ROUTES)
def test_a_text_is_that_of_the_new_weights(make_tiny, route, change):
    target, drafter = make_tiny(seed=4)
    write = route(target, drafter)
    before = write()
    assert before == fresh_text(target)
    change(target.model)
    after = write()
    assert after == fresh_text(target) != before


def test_a_server_answers_with_the_new_weights(shallow_target, running):
    target = Target(deepcopy(shallow_target.model), shallow_target.tokenizer)
    engine = Engine(target, None, EngineConfig("plain", max_num_seqs=2, prefix_cache_mib=8), 256)
    with running(engine) as (url, _):

        def ask() -> list[int]:
            asked = {"model": "embedded", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
            body = json.dumps(asked | {"return_token_ids": True}).encode()
            request = urllib.request.Request(
                f"{url}/v1/completions", body, {"Content-Type": "application/json"}
            )
            return json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["token_ids"]

        before = ask()
        merge_adapter(target.model)
        after = ask()
    assert after == fresh_text(target) != before


@pytest.mark.parametrize("change", [load_state, replace_weights])
def test_a_text_in_work_goes_on_with_the_new_weights(make_tiny, change):
    """Its tokens stay; what follows is what the new weights write behind them."""
    target, drafter = make_tiny(seed=4)
    engine = Engine(target, drafter, EngineConfig(budget=6, max_num_seqs=2), 256)
    text = engine.submit(PROMPT, TextOptions(max_new_tokens=TOKENS, logprobs=0))
    while len(text.ids) < 6:
        engine.step()
    written = len(text.ids)
    change(target.model)
    while engine.busy:
        engine.step()
    rest = generate(
        Target(target.model),
        None,
        PROMPT + text.ids[:written],
        method="plain",
        max_new_tokens=TOKENS,
    )
    assert text.ids[written:] == rest.ids[: TOKENS - written] and len(text.logprobs) == TOKENS


def test_a_drafter_drafts_with_its_new_weights(make_tiny):
    """A long-lived engine drafts as a new one does."""
    target, drafter = make_tiny(seed=4)
    engine = Engine(target, drafter, EngineConfig(budget=6), 256)

    def commits(engine: Engine) -> list[int]:
        text = engine.submit(PROMPT, TextOptions(max_new_tokens=TOKENS))
        while engine.busy:
            engine.step()
        return text.commits

    before = commits(engine)
    drafter.init_weights(torch.Generator().manual_seed(9))
    options = DecodeOptions(budget=6)
    assert commits(engine) == commits(Engine(target, drafter, options, 256)) != before
