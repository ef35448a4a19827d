"""The doctor: replays equal decoding, engines' counters are read, and causes are named."""

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from unittest.mock import patch

import httpx
import numpy as np
import pytest
import torch

from data.prompts import load_external_prompts
from infer import Engine, Target, load_drafter, save_drafter
from infer.api import decode_prompts
from infer.cli.doctor import DoctorCommand, run as run_doctor
from infer.config import DecodeOptions, EngineConfig, HeadConfig
from infer.doctor.comparison import (
    EngineMeasurement,
    is_significantly_lower,
    sum_absolute_count_differences,
)
from infer.doctor.engines import choose_num_tokens_to_request, measure_engine
from infer.doctor.examine import diagnose_drafter, format_diagnosis
from infer.doctor.replay import (
    FeatureLayer,
    TargetStates,
    compute_features_and_agreement,
    find_next_norm,
    replay_chains,
)
from infer.doctor.variations import copy_with_config, list_feature_layers, share_first_key_norm
from infer.evaluation.acceptance import (
    ACCEPTANCE_REFERENCE_FILE_NAME,
    load_stored_reference,
    measure_reference,
)
from infer.evaluation.card import write_card
from infer.evaluation.engine_metrics import open_client
from infer.evaluation.results import (
    AcceptanceCounts,
    AcceptanceReference,
    ReferenceAnswer,
    write_result,
)

LOW_ACCEPTANCE = [AcceptanceCounts(60, [25])]


@pytest.fixture(scope="module")
def drafter():
    return load_drafter("embedded")


@pytest.fixture(scope="module")
def reference(embedded, drafter):
    plain = load_external_prompts(embedded.tokenizer, 48, False)
    chats = load_external_prompts(embedded.tokenizer, 48, True)
    with patch("infer.evaluation.acceptance.MAX_ACCEPTANCE_REFERENCE_ANSWER_TOKENS", 32):
        return measure_reference(embedded, drafter, [plain[0], plain[4], chats[2]])


@pytest.fixture(scope="module")
def short_reference(embedded, drafter):
    """The reference of one short plain prompt."""
    prompt = load_external_prompts(embedded.tokenizer, 24, False)[0]
    with patch("infer.evaluation.acceptance.MAX_ACCEPTANCE_REFERENCE_ANSWER_TOKENS", 24):
        return measure_reference(embedded, drafter, [prompt])


def compute_states(
    target: Target, reference: AcceptanceReference, feature_layers: list[FeatureLayer]
) -> TargetStates:
    prompts = [answer.prompt_ids for answer in reference.answers]
    answers = [answer.answer_ids for answer in reference.answers]
    return compute_features_and_agreement(target, prompts, answers, feature_layers)


def make_engine_measurement(
    target: Target,
    reference: AcceptanceReference,
    answer_ids: list[list[int]],
    acceptance: list[AcceptanceCounts],
) -> EngineMeasurement:
    """Return what an engine with these answers and this acceptance would give."""
    texts = [target.tokenizer.decode(ids) for ids in answer_ids]
    prompt_tokens = [len(answer.prompt_ids) for answer in reference.answers]
    return EngineMeasurement(
        "vLLM", texts, answer_ids, prompt_tokens, acceptance, acceptance, draft_tokens_per_round=7.0
    )


def lengthen_prompts(engine: EngineMeasurement, reference: AcceptanceReference, chats_only: bool):
    """Return the measurement of an engine that reads more tokens in its prompts."""
    lengths = [
        tokens + (9 if answer.chat or not chats_only else 0)
        for tokens, answer in zip(engine.prompt_token_counts, reference.answers, strict=True)
    ]
    return replace(engine, prompt_token_counts=lengths)


def get_window(drafter) -> int | None:
    """Return how many positions the drafter sees, None for all."""
    [window] = {window for _, window in drafter.attention_patterns}
    return window


@pytest.fixture
def engine_measurement(embedded, drafter, reference, running):
    """What our own server gives."""
    engine = Engine(
        embedded,
        drafter,
        EngineConfig("chain", 7, max_num_seqs=2, max_num_batched_tokens=None),
        300,
    )
    with running(engine) as (url, _), open_client(f"{url}/v1") as client:
        return measure_engine(client, reference)


@pytest.mark.robustness
def test_a_replay_equals_decoding_and_the_counters_of_a_server(
    embedded, drafter, reference, engine_measurement
):
    feature_layers = list_feature_layers(drafter)
    states = compute_states(embedded, reference, feature_layers)
    assert states.greedy_agreement == 1
    assert reference.acceptance.rounds > 20
    replayed = replay_chains(embedded, drafter, states, feature_layers, drafter.block_size - 1)
    assert replayed == reference.acceptance_by_answer
    assert engine_measurement.acceptance_by_answer == reference.acceptance_by_answer
    assert engine_measurement.draft_tokens_per_round == 7

    for engine, compared in ((engine_measurement, "its card and"), (None, "with its card.")):
        assert compared in diagnose_drafter(embedded, drafter, reference, engine).verdict
    diagnosis = diagnose_drafter(embedded, drafter, reference, engine_measurement)
    assert diagnosis.healthy
    assert diagnosis.cause is None
    assert "Healthy" in format_diagnosis(diagnosis)


@pytest.mark.robustness
def test_causes_that_are_detected_directly(embedded, drafter, reference, engine_measurement):
    def diagnose(engine: EngineMeasurement):
        return diagnose_drafter(embedded, drafter, reference, engine)

    one_draft = replace(
        engine_measurement,
        draft_tokens_per_round=1.0,
        acceptance_by_answer=LOW_ACCEPTANCE,
        repeated_acceptance=LOW_ACCEPTANCE,
    )
    diagnosis = diagnose(one_draft)
    assert diagnosis.cause.name == "another number of drafts a round"
    assert "num_speculative_tokens" in diagnosis.advice

    diagnosis = diagnose(replace(engine_measurement, repeated_acceptance=LOW_ACCEPTANCE))
    assert diagnosis.cause.name == "the prefix cache hides the drafter's context"
    assert "1.42 tokens" in diagnosis.verdict

    longer_prompts = lengthen_prompts(engine_measurement, reference, chats_only=False)
    assert diagnose(longer_prompts).cause.name == "another tokenizer or vocabulary"
    longer_chats = lengthen_prompts(engine_measurement, reference, chats_only=True)
    assert diagnose(longer_chats).cause.name == "another chat template or thinking mode"


@pytest.mark.robustness
def test_a_drafter_that_is_distracted_by_long_contexts_is_healthy(
    embedded, drafter, reference, engine_measurement, monkeypatch
):
    monkeypatch.setattr("infer.doctor.causes.LONG_CONTEXT_ANSWER_TOKENS", 32)
    # All answers together are no longer than the window.
    assert diagnose_drafter(embedded, drafter, reference, engine_measurement).cause is None

    by_window = {None: AcceptanceCounts(100, [20, 5]), 256: AcceptanceCounts(100, [50, 30])}
    monkeypatch.setattr(
        "infer.doctor.causes.replay_chains",
        lambda target, drafter, *arguments: [by_window[get_window(drafter)]],
    )
    diagnosis = diagnose_drafter(embedded, drafter, reference, engine_measurement)
    assert diagnosis.healthy
    assert diagnosis.cause.name == "trained on shorter texts"
    assert "drafter.sliding_window=256" in format_diagnosis(diagnosis)


# method and budget of our server, and the options for which its acceptance cannot be compared
SERVER_OPTIONS = [
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


@pytest.mark.parametrize(("method", "budget", "incomparable_options"), SERVER_OPTIONS)
def test_our_server_is_healthy_with_any_method(
    embedded, drafter, short_reference, running, monkeypatch, method, budget, incomparable_options
):
    """An automatic budget may be 0 drafts, as it was on the machine of a user who followed the
    tutorial."""
    if budget == "auto":
        monkeypatch.setattr("infer.engine.budget.AutoNodeBudget.choose_num_nodes", lambda *_: 0)
    ngrams = str(drafter.ngram_path) if method == "continuity" else None
    engine = Engine(embedded, drafter, EngineConfig(method, budget, ngrams, max_num_seqs=1), 128)
    with running(engine) as (url, _), open_client(url) as client:
        measurement = measure_engine(client, short_reference)
    assert measurement.incomparable_options == incomparable_options
    diagnosis = diagnose_drafter(embedded, drafter, short_reference, measurement)
    assert diagnosis.healthy and diagnosis.cause is None, diagnosis.verdict
    assert ("To compare the acceptance too" in diagnosis.verdict) == bool(incomparable_options)
    assert incomparable_options in diagnosis.verdict

    other_engine = replace(
        measurement,
        engine="vLLM",
        incomparable_options="",
        draft_tokens_per_round=1.0,
        acceptance_by_answer=LOW_ACCEPTANCE,
        repeated_acceptance=LOW_ACCEPTANCE,
    )
    diagnosis = diagnose_drafter(embedded, drafter, short_reference, other_engine)
    assert diagnosis.cause.name == "another number of drafts a round"
    longer_prompts = lengthen_prompts(measurement, short_reference, chats_only=False)
    diagnosis = diagnose_drafter(embedded, drafter, short_reference, longer_prompts)
    assert diagnosis.cause.name == "another tokenizer or vocabulary"


@pytest.mark.robustness
def test_another_reading_is_named_even_if_it_costs_little(embedded, drafter, reference):
    """Both layers' context keys use one norm, as in vLLM's CPU kernel: the loss is smaller than
    noise."""
    [variation] = share_first_key_norm(embedded, drafter)
    feature_layers = variation.feature_layers
    states = compute_states(embedded, reference, feature_layers)
    acceptance = replay_chains(
        embedded, variation.drafter, states, feature_layers, drafter.block_size - 1
    )
    assert acceptance != reference.acceptance_by_answer
    answer_ids = [answer.answer_ids for answer in reference.answers]
    engine = make_engine_measurement(embedded, reference, answer_ids, acceptance)
    diagnosis = diagnose_drafter(embedded, drafter, reference, engine)
    assert diagnosis.cause.name == "norms of the context's keys"
    assert "explains 100 %" in diagnosis.verdict
    assert "kernel for CPUs" in diagnosis.advice


def normalise_features(target, drafter):
    """Return an engine that gives the drafter features after the next norm."""
    altered = copy_with_config(drafter)
    update_context = altered.update_context
    norms = [find_next_norm(target, layer) for layer in drafter.layer_ids]

    def update_with_norms(target, features, *arguments, **options) -> None:
        by_layer = features.chunk(len(norms), dim=-1)
        normed = [norm(feature) for norm, feature in zip(norms, by_layer, strict=True)]
        update_context(target, torch.cat(normed, -1), *arguments, **options)

    altered.update_context = update_with_norms
    return target, altered


def perturb_target(target, drafter):
    """Return an engine with other weights of the target."""
    model = deepcopy(target.model)
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if name.endswith("_proj.weight"):
            weight.data += 0.2 * weight.std() * torch.randn(weight.shape, generator=generator)
    return Target(model, target.tokenizer), drafter


def change_config(family_keys: dict, **keys) -> Callable:
    """Return an engine that reads the drafter with other config keys."""
    return lambda target, drafter: (target, copy_with_config(drafter, family_keys, **keys))


# by cause: a function that returns the engine's target and drafter
ENGINE_BUGS = {
    "tapped layers off by one": change_config({"target_layer_ids": [4, 12, 20]}),
    "features taken behind a norm": normalise_features,
    "causality inside the block": change_config({"causal": True}),
    "rotary base": change_config({}, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "another target's weights, or the same in few bits": perturb_target,
}


@pytest.mark.robustness
@pytest.mark.parametrize("cause", ENGINE_BUGS)
def test_an_engines_bug_is_named(embedded, drafter, reference, cause):
    """The engine really decodes with the bug."""
    engine_target, engine_drafter = ENGINE_BUGS[cause](embedded, drafter)
    sequences = []
    for answer in reference.answers:
        max_new_tokens = choose_num_tokens_to_request(answer, reference)
        options = DecodeOptions(max_new_tokens, method="chain", budget=7, max_num_seqs=1)
        sequences += decode_prompts(engine_target, engine_drafter, [answer.prompt_ids], options)
    acceptance = []
    for sequence in sequences:
        accepted = [sum(count > k for count in sequence.accepted) for k in range(7)]
        acceptance.append(AcceptanceCounts(len(sequence.accepted), accepted))
    answer_ids = [sequence.ids for sequence in sequences]
    engine = make_engine_measurement(embedded, reference, answer_ids, acceptance)
    assert diagnose_drafter(embedded, drafter, reference, engine).cause.name == cause


def test_acceptance_is_compared_answer_by_answer():
    expected = [AcceptanceCounts(20, [12, 5])] * 12
    noisy = [AcceptanceCounts(20 + (-1) ** i, [12 - (-1) ** i, 5]) for i in range(12)]
    assert sum_absolute_count_differences(expected, expected) == 0
    assert sum_absolute_count_differences(noisy, expected) == 24
    assert sum_absolute_count_differences([AcceptanceCounts.pool(noisy)], expected) == 0
    answer = replace(SMALL_REFERENCE.answers[0], acceptance=SMALL_REFERENCE.acceptance)
    with_counts = replace(SMALL_REFERENCE, answers=[answer])
    assert SMALL_REFERENCE.acceptance_by_answer == [SMALL_REFERENCE.acceptance]
    assert with_counts.acceptance_by_answer == [SMALL_REFERENCE.acceptance]


# acceptance, expected acceptance, and whether the first is significantly lower
LOWER_ACCEPTANCE_CASES = [
    # 5.5 % fewer, but few drafts: chance explains it
    (AcceptanceCounts(1021, [92, 5]), AcceptanceCounts(1015, [95, 6, 1]), False),
    (AcceptanceCounts(1000, [70]), AcceptanceCounts(1000, [100]), True),
    (AcceptanceCounts(10_210, [920, 50]), AcceptanceCounts(10_150, [950, 60, 10]), False),
    (AcceptanceCounts(102_100, [9_200, 500]), AcceptanceCounts(101_500, [9_500, 600, 100]), True),
    # 4 % fewer: rounding explains it
    (AcceptanceCounts(100_000, [96_000]), AcceptanceCounts(100_000, [100_000]), False),
]


@pytest.mark.parametrize(("acceptance", "expected", "is_lower"), LOWER_ACCEPTANCE_CASES)
def test_lower_acceptance_than_rounding_and_chance_explain(acceptance, expected, is_lower):
    assert is_significantly_lower(acceptance, expected) == is_lower


def test_the_standard_error_is_that_of_the_rounds():
    drafts = np.random.default_rng(0).integers(0, 8, 50)
    acceptance = AcceptanceCounts(len(drafts), [int((drafts > k).sum()) for k in range(7)])
    assert acceptance.mean_accepted == drafts.mean()
    assert acceptance.standard_error == pytest.approx(drafts.std() / len(drafts) ** 0.5)


def test_the_advice_for_a_changed_folder_says_what_to_write(
    embedded, drafter, reference, tmp_path, capsys
):
    altered = copy_with_config(drafter, {"sample_from_anchor": True})
    save_drafter(altered.config, altered.state_dict(), tmp_path)
    write_result(tmp_path / ACCEPTANCE_REFERENCE_FILE_NAME, reference)
    assert load_stored_reference(tmp_path) == reference
    with pytest.raises(SystemExit):
        run_doctor(DoctorCommand(checkpoint=str(tmp_path)))
    output = capsys.readouterr().out
    assert output.startswith("The anchor's slot: sample_from_anchor false explains 100 %")
    advice = "write it into config.json of the drafter's folder (sample_from_anchor false)"
    assert advice in output


def test_the_card_shows_the_acceptance_to_expect_of_an_engine(reference, tmp_path):
    drafter = load_drafter("embedded")
    source = tmp_path / "source"
    out = tmp_path / "out"
    for folder in (source, out):
        save_drafter(drafter.config, drafter.state_dict(), folder)
    write_result(source / ACCEPTANCE_REFERENCE_FILE_NAME, reference)
    card = write_card(source, out, None, "embedded").read_text()
    rates = " | ".join(f"{100 * rate:.1f} %" for rate in reference.acceptance.acceptance_rates)
    assert f"| accepted in | {rates} |" in card
    assert "chat_template_kwargs" in card
    assert load_stored_reference(out) == reference


SMALL_REFERENCE = AcceptanceReference(
    "float32",
    4,
    AcceptanceCounts(2, [1, 1, 0]),
    [ReferenceAnswer("abc", False, [1, 2], [3, 4, 5, 6, 7, 8])],
)
VLLM_METRICS = (
    'vllm:spec_decode_num_drafts_total{{engine="0"}} {rounds}\n'
    "vllm:spec_decode_num_draft_tokens_total {drafted}\n"
    'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {first}\n'
    'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="1"}} {second}\n'
)


def test_the_growth_of_counters_is_measured():
    requests = []

    def respond(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            factor = 1 + len(requests)
            metrics = VLLM_METRICS.format(
                rounds=10 * factor, drafted=30 * factor, first=6 * factor, second=factor
            )
            return httpx.Response(200, text=metrics)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        requests.append(json.loads(request.content))
        choice = {"text": "de", "token_ids": [3, 4]}
        return httpx.Response(200, json={"choices": [choice], "usage": {"prompt_tokens": 2}})

    client = httpx.Client(transport=httpx.MockTransport(respond), base_url="http://here")
    measurement = measure_engine(client, SMALL_REFERENCE)
    assert measurement.engine == "vLLM"
    assert measurement.acceptance_by_answer == [AcceptanceCounts(10, [6, 1, 0])]
    assert measurement.repeated_acceptance == measurement.acceptance_by_answer
    assert measurement.draft_tokens_per_round == 3.0
    assert measurement.answer_ids == [[3, 4]]
    first, second = requests
    assert first["max_tokens"] == 3
    assert first["ignore_eos"]
    assert first["cache_salt"]
    assert first == second


def test_an_engine_without_counters_is_named():
    without_counters = httpx.MockTransport(lambda request: httpx.Response(200, text="up 1\n"))
    with pytest.raises(ValueError, match="no known counters of draft tokens"):
        measure_engine(
            httpx.Client(transport=without_counters, base_url="http://here"), SMALL_REFERENCE
        )


@pytest.mark.needs("int8_cpu")
@pytest.mark.parametrize("head", ["none", "markov"])
def test_an_int8_drafter_has_variations(make_tiny, head):
    """As with `target=smollm2`: a variation has the drafter's codes, and an unchanged copy drafts
    as the drafter does."""
    from infer.int8_cpu.loading import quantise_drafter

    target, drafter = make_tiny(seed=4, head=HeadConfig(name=head))
    quantise_drafter(drafter)
    copy = copy_with_config(drafter)
    assert copy.quantised
    prompts = [list(range(9))]
    commits = []
    for each in (drafter, copy):
        [sequence] = decode_prompts(target, each, prompts, DecodeOptions(12, budget=6))
        commits.append(sequence.commits)
        assert next(share_first_key_norm(target, each)).label
    assert commits[0] == commits[1]


@pytest.mark.needs("int8_cpu")
def test_an_int8_targets_states_are_those_of_decoding(random_qwen3):
    """They are equal to the last bit: other rounding gives other codes, by which 3 % of SmolLM2's
    own tokens seemed to be another target's."""
    from infer.int8_cpu.calibration import quantise_model

    model = random_qwen3(3, num_hidden_layers=6).eval()
    quantise_model(model, (model(torch.randint(97, (4, 40))) for _ in range(1)))
    target = Target(model)
    prompt = list(range(20))
    options = DecodeOptions(40, method="plain", ignore_eos=True)
    [sequence] = decode_prompts(target, None, [prompt], options)
    states = compute_features_and_agreement(target, [prompt], [sequence.ids], [FeatureLayer(5)])
    cache = target.allocate_cache(1, 60)
    with cache.add_rows(1) as row:
        expected = [
            target.extend_cache([[token]], row, (5,)).layer_features[0]
            for token in prompt + sequence.ids
        ]
    assert torch.equal(states.states[FeatureLayer(5)][0], torch.cat(expected))
    assert states.greedy_agreement == 1.0
