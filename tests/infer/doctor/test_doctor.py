"""The doctor: replays equal decoding, engines' counters are read, and causes are named."""

import json
from copy import deepcopy
from dataclasses import replace
from unittest.mock import patch

import httpx
import numpy as np
import pytest
import torch

from data.prompts import outside_prompts
from infer import Engine, Target, load_drafter, save_drafter
from infer.api import decode
from infer.cli.doctor import DoctorCommand, run as run_doctor
from infer.config import DecodeOptions, EngineConfig, HeadConfig
from infer.doctor.causes import Served, altered, difference, falls_short, one_key_norm, taps_of
from infer.doctor.engines import examine_engine, open_client, tokens_of
from infer.doctor.examine import examine, report
from infer.doctor.replay import Tap, chains, compute, next_norm
from infer.evaluation.acceptance import FILE, find_reference, measure_reference
from infer.evaluation.card import write_card
from infer.evaluation.results import Acceptance, KnownText, Reference, write_result


@pytest.fixture(scope="module")
def drafter():
    return load_drafter("embedded")


@pytest.fixture(scope="module")
def reference(embedded, drafter):
    plain, chats = (outside_prompts(embedded.tokenizer, 48, chat) for chat in (False, True))
    with patch("infer.evaluation.acceptance.TOKENS", 32):
        return measure_reference(embedded, drafter, [plain[0], plain[4], chats[2]])


def window_of(drafter):
    """How many positions the drafter sees, None for all."""
    [window] = {window for _, window in drafter.attention_patterns}
    return window


@pytest.mark.robustness
def test_a_replay_is_what_decoding_did_and_a_server_tells_the_same(
    embedded, drafter, reference, running, monkeypatch
):
    material = compute(
        embedded,
        [t.prompt for t in reference.texts],
        [t.ids for t in reference.texts],
        taps_of(drafter),
    )
    assert material.agreement == 1 and reference.acceptance.rounds > 20
    assert (
        chains(embedded, drafter, material, taps_of(drafter), drafter.block_size - 1)
        == reference.by_text
    )
    engine = Engine(
        embedded,
        drafter,
        EngineConfig("chain", 7, max_num_seqs=2, max_num_batched_tokens=None),
        300,
    )
    with running(engine) as (url, _), open_client(f"{url}/v1") as client:
        served = examine_engine(client, reference)
    assert served.by_text == reference.by_text and served.drafted == 7
    for other, compared in ((served, "its card and"), (None, "with its card.")):
        assert compared in examine(embedded, drafter, reference, other, carded=True).verdict
    found = examine(embedded, drafter, reference, served)
    assert found.healthy and found.cause is None and "Healthy" in report(found)
    few = [Acceptance(60, [25])]
    cut = examine(
        embedded, drafter, reference, replace(served, drafted=1.0, by_text=few, again=few)
    )
    assert (
        cut.cause.name == "another number of drafts a round"
        and "num_speculative_tokens" in cut.mend
    )
    monkeypatch.setattr("infer.doctor.causes.LAST", 32)
    assert examine(embedded, drafter, reference, served).cause is None  # as long a text as a window
    by_window = {None: Acceptance(100, [20, 5]), 256: Acceptance(100, [50, 30])}
    monkeypatch.setattr(
        "infer.doctor.causes.chains", lambda _, one, *rest: [by_window[window_of(one)]]
    )
    short = examine(embedded, drafter, reference, served)
    assert (
        short.healthy
        and short.cause.name == "trained on shorter texts"
        and "drafter.sliding_window=256" in report(short)
    )
    hidden = examine(embedded, drafter, reference, replace(served, again=few))
    assert (
        hidden.cause.name == "the prefix cache hides the drafter's context"
        and "1.42 tokens" in hidden.verdict
    )
    longer = examine(
        embedded,
        drafter,
        reference,
        replace(served, prompt_tokens=[n + 9 for n in served.prompt_tokens]),
    )
    assert longer.cause.name == "another tokenizer or vocabulary"
    chat = [
        n + 9 * text.chat for n, text in zip(served.prompt_tokens, reference.texts, strict=True)
    ]
    assert examine(
        embedded, drafter, reference, replace(served, prompt_tokens=chat)
    ).cause.name == ("another chat template or thinking mode")


@pytest.fixture(scope="module")
def short_reference(embedded, drafter):
    """The reference of one short plain text."""
    prompt = outside_prompts(embedded.tokenizer, 24, False)[0]
    with patch("infer.evaluation.acceptance.TOKENS", 24):
        return measure_reference(embedded, drafter, [prompt])


SERVED = [  # method, budget, what the server has that cannot be compared with chains of whole blocks
    ("chain", 7, ""),
    ("chain", 64, ""),
    ("chain", "auto", "decoding.method=chain decoding.budget=auto"),
    ("chain", 2, "decoding.method=chain decoding.budget=2"),
    ("plain", 64, "decoding.method=plain decoding.budget=64"),
    ("ddtree", "auto", "decoding.method=ddtree decoding.budget=auto"),
    ("ddtree", 3, "decoding.method=ddtree decoding.budget=3"),
    ("static", 7, "decoding.method=static decoding.budget=7"),
    ("continuity", 7, "decoding.method=continuity decoding.budget=7"),
]


@pytest.mark.parametrize(("method", "budget", "drafting"), SERVED)
def test_our_own_server_is_healthy_however_it_decodes(
    embedded, drafter, short_reference, running, monkeypatch, method, budget, drafting
):
    """A budget of its own choice may be 0 drafts, as it was on the machine of a user who followed
    the tutorial."""
    if budget == "auto":
        monkeypatch.setattr("infer.engine.budget.AutoBudget.choose_nodes", lambda *_: 0)
    ngrams = str(drafter.ngrams) if method == "continuity" else None
    engine = Engine(embedded, drafter, EngineConfig(method, budget, ngrams, max_num_seqs=1), 128)
    with running(engine) as (url, _), open_client(url) as client:
        served = examine_engine(client, short_reference)
    assert served.drafting == drafting
    diagnosis = examine(embedded, drafter, short_reference, served)
    assert diagnosis.healthy and diagnosis.cause is None, diagnosis.verdict
    assert ("To compare that too" in diagnosis.verdict) == bool(
        drafting
    ) and drafting in diagnosis.verdict
    few = [Acceptance(60, [25])]
    of_others = replace(served, engine="vLLM", drafting="", drafted=1.0, by_text=few, again=few)
    assert (
        examine(embedded, drafter, short_reference, of_others).cause.name
        == "another number of drafts a round"
    )
    longer = replace(served, prompt_tokens=[n + 9 for n in served.prompt_tokens])
    assert (
        examine(embedded, drafter, short_reference, longer).cause.name
        == "another tokenizer or vocabulary"
    )


@pytest.mark.robustness
def test_what_is_read_otherwise_is_named_where_it_costs_little(embedded, drafter, reference):
    """Two layers' context keys under one norm, as vLLM's kernel for CPUs has them: fewer drafts, by
    less than noise."""
    texts = reference.texts
    [trial] = one_key_norm(embedded, drafter)
    material = compute(embedded, [t.prompt for t in texts], [t.ids for t in texts], trial.taps)
    told = chains(embedded, trial.drafter, material, trial.taps, drafter.block_size - 1)
    words = [embedded.tokenizer.decode(text.ids) for text in texts]
    served = Served(
        "vLLM", words, [t.ids for t in texts], [len(t.prompt) for t in texts], told, told, 7.0
    )
    assert told != reference.by_text
    found = examine(embedded, drafter, reference, served)
    assert found.cause.name == "norms of the context's keys" and "explains 100 %" in found.verdict
    assert "kernel for CPUs" in found.mend


def behind_norms(target, drafter):
    """What the norms behind its taps make of the features."""
    other = altered(drafter)
    update = other.update_context
    norms = [next_norm(target, layer) for layer in drafter.layer_ids]

    def normed(target, features, *rest, **more) -> None:
        parts = features.chunk(len(norms), dim=-1)
        update(
            target,
            torch.cat([norm(part) for norm, part in zip(norms, parts, strict=True)], -1),
            *rest,
            **more,
        )

    other.update_context = normed
    return target, other


def other_weights(target, drafter):
    model = deepcopy(target.model)
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if name.endswith("_proj.weight"):
            weight.data += 0.2 * weight.std() * torch.randn(weight.shape, generator=generator)
    return Target(model, target.tokenizer), drafter


def with_keys(own: dict, **keys):
    """The same target, and the drafter read with other keys."""
    return lambda target, drafter: (target, altered(drafter, own, **keys))


FAULTS = {  # the cause, and the engine's target and drafter
    "tapped layers off by one": with_keys({"target_layer_ids": [4, 12, 20]}),
    "features taken behind a norm": behind_norms,
    "causality inside the block": with_keys({"causal": True}),
    "rotary base": with_keys({}, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "another target's weights, or the same in few bits": other_weights,
}


@pytest.mark.robustness
@pytest.mark.parametrize("name", FAULTS)
def test_what_an_engine_does_otherwise_is_named(embedded, drafter, reference, name):
    """It decodes for real, with a fault."""
    pair = FAULTS[name](embedded, drafter)
    texts = []
    for text in reference.texts:
        options = DecodeOptions(
            tokens_of(text, reference), method="chain", budget=7, max_num_seqs=1
        )
        texts += decode(*pair, [text.prompt], options)
    counts = [
        Acceptance(len(t.accepted), [sum(n > k for n in t.accepted) for k in range(7)])
        for t in texts
    ]
    words = [embedded.tokenizer.decode(text.ids) for text in texts]
    served = Served(
        "x", words, [t.ids for t in texts], [len(t.prompt) for t in texts], counts, counts, 7.0
    )
    assert examine(embedded, drafter, reference, served).cause.name == name


def test_texts_are_compared_one_by_one():
    right = [Acceptance(20, [12, 5])] * 12
    noise = []
    for i in range(12):
        noise.append(Acceptance(20 + (-1) ** i, [12 - (-1) ** i, 5]))
    assert difference(right, right) == 0 and difference(noise, right) == 24
    assert difference([Acceptance.of_all(noise)], right) == 0
    known = replace(SHORT, texts=[replace(SHORT.texts[0], acceptance=SHORT.acceptance)])
    assert SHORT.by_text == known.by_text == [SHORT.acceptance]


SHORT_OF = [  # found, expected, whether what is found falls short
    (
        Acceptance(1021, [92, 5]),
        Acceptance(1015, [95, 6, 1]),
        False,
    ),  # 5.5 % fewer, of drafts that chance gives
    (Acceptance(1000, [70]), Acceptance(1000, [100]), True),
    (Acceptance(10_210, [920, 50]), Acceptance(10_150, [950, 60, 10]), False),
    (Acceptance(102_100, [9_200, 500]), Acceptance(101_500, [9_500, 600, 100]), True),
    (Acceptance(100_000, [96_000]), Acceptance(100_000, [100_000]), False),  # 4 %: rounding
]


@pytest.mark.parametrize(("found", "expected", "short"), SHORT_OF)
def test_fewer_drafts_than_rounding_and_chance_explain_are_too_few(found, expected, short):
    assert falls_short(found, expected) == short


def test_the_standard_error_is_that_of_the_rounds():
    drafts = np.random.default_rng(0).integers(0, 8, 50)
    acceptance = Acceptance(len(drafts), [int((drafts > k).sum()) for k in range(7)])
    assert acceptance.mean == drafts.mean()
    assert acceptance.standard_error == pytest.approx(drafts.std() / len(drafts) ** 0.5)


def test_a_folder_that_was_changed_is_told_what_to_write(
    embedded, drafter, reference, tmp_path, capsys
):
    wrong = altered(drafter, {"sample_from_anchor": True})
    save_drafter(wrong.config, wrong.state_dict(), tmp_path)
    write_result(tmp_path / FILE, reference)
    assert find_reference(tmp_path) == reference
    with pytest.raises(SystemExit):
        run_doctor(DoctorCommand(checkpoint=str(tmp_path)))
    said = capsys.readouterr().out
    assert said.startswith("The anchor's slot: sample_from_anchor false explains 100 %")
    assert "write it into config.json of the drafter's folder (sample_from_anchor false)" in said


def test_the_card_says_what_to_expect_of_an_engine(reference, tmp_path):
    drafter = load_drafter("embedded")
    source = tmp_path / "source"
    out = tmp_path / "out"
    for folder in (source, out):
        save_drafter(drafter.config, drafter.state_dict(), folder)
    write_result(source / FILE, reference)
    card = write_card(source, out, None, "embedded").read_text()
    shares = " | ".join(f"{100 * share:.1f} %" for share in reference.acceptance.shares)
    assert f"| accepted | {shares} |" in card and "chat_template_kwargs" in card
    assert find_reference(out) == reference


SHORT = Reference(
    "float32", 4, Acceptance(2, [1, 1, 0]), [KnownText("abc", False, [1, 2], [3, 4, 5, 6, 7, 8])]
)
COUNTED = (
    'vllm:spec_decode_num_drafts_total{{engine="0"}} {rounds}\nvllm:spec_decode_num_draft_tokens_total {drafted}\n'
    'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {first}\n'
    'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="1"}} {second}\n'
)


def test_counters_are_read_as_differences():
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            times = 1 + len(asked)
            return httpx.Response(
                200,
                text=COUNTED.format(
                    rounds=10 * times, drafted=30 * times, first=6 * times, second=times
                ),
            )
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        asked.append(json.loads(request.content))
        return httpx.Response(
            200,
            json={"choices": [{"text": "de", "token_ids": [3, 4]}], "usage": {"prompt_tokens": 2}},
        )

    client = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://here")
    served = examine_engine(client, SHORT)
    assert (served.engine, *served.by_text, served.drafted) == (
        "vLLM",
        Acceptance(10, [6, 1, 0]),
        3.0,
    )
    assert served.ids == [[3, 4]] and asked[0]["max_tokens"] == 3 and asked[0]["ignore_eos"]
    assert served.again == served.by_text and asked[0] == asked[1] and asked[0]["cache_salt"]


def test_an_engine_without_counters_is_named():
    off = httpx.MockTransport(lambda request: httpx.Response(200, text="up 1\n"))
    with pytest.raises(ValueError, match="no drafts"):
        examine_engine(httpx.Client(transport=off, base_url="http://here"), SHORT)


@pytest.mark.needs("int8_cpu")
@pytest.mark.parametrize("head", ["none", "markov"])
def test_a_drafter_in_int8_can_be_read_otherwise(make_tiny, head):
    """As `target=smollm2` loads it: what is tried has its codes, and drafts as it does where
    nothing is changed."""
    from infer.int8_cpu.loading import quantise_drafter

    target, drafter = make_tiny(seed=4, head=HeadConfig(name=head))
    quantise_drafter(drafter)
    same = altered(drafter)
    texts = [
        decode(target, each, [list(range(9))], DecodeOptions(12, budget=6))
        for each in (drafter, same)
    ]
    assert same.quantised and texts[0][0].commits == texts[1][0].commits
    assert [next(one_key_norm(target, each)).label for each in (drafter, same)]


@pytest.mark.needs("int8_cpu")
def test_what_an_int8_target_computes_of_an_answer_is_what_it_decoded(random_qwen3):
    """To the last bit: other rounding gives other codes, by which 3 % of SmolLM2's own tokens
    seemed another target's."""
    from infer.int8_cpu.calibration import quantise

    model = random_qwen3(3, num_hidden_layers=6).eval()
    quantise(model, (model(torch.randint(97, (4, 40))) for _ in range(1)))
    target = Target(model)
    prompt = list(range(20))
    [text] = decode(target, None, [prompt], DecodeOptions(40, method="plain", ignore_eos=True))
    material = compute(target, [prompt], [text.ids], [Tap(5)])
    cache = target.cache(1, 60)
    with cache.add(1) as row:
        states = [target.extend([[token]], row, (5,)).context[0] for token in prompt + text.ids]
    assert torch.equal(material.states[Tap(5)][0], torch.cat(states)) and material.agreement == 1.0
