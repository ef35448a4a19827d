"""Structured output: valid, and the same tokens as constrained baseline decoding."""

import itertools
import json
import math
import re
from collections import Counter
from unittest.mock import Mock

import llguidance
import numpy as np
import pytest
import torch
from llguidance.hf import from_tokenizer
from transformers import LogitsProcessor, LogitsProcessorList

from infer import Engine, generate, load_drafter
from infer.config import DecodeOptions, DrafterConfig, EngineConfig, SamplingOptions
from infer.drafters.build import create_drafter
from infer.engine import grammar
from infer.engine.grammar import MAX_GRAMMAR_CHARS, make_grammar_state
from infer.engine.grammar_sandbox import GRAMMAR_PARSER_LIMITS, GrammarSandbox
from infer.targets.target import Target
from infer.trees.constrained import GrammarRule, search_constrained
from infer.trees.tree import Proposal

RECORD_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "cc"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SUM_GRAMMAR = 'start: "x = " NUM " + " NUM (" + " NUM)?\nNUM: /[0-9]{1,3}/'
GRAMMAR_SOURCES = {
    "json_schema": json.dumps(RECORD_SCHEMA),
    "regex": r"(yes|no), [0-9]{3,5}\.",
    "grammar": SUM_GRAMMAR,
}
CODE_PROMPTS = ["# a record\nrow = ", "def f(x):\n    return "]
MAX_GRAMMAR_OUTPUT_TOKENS = 26


@pytest.fixture(scope="module")
def drafter():
    return load_drafter("embedded")


def is_valid(kind: str, text: str) -> bool:
    """Return whether a text matches the grammar of that kind."""
    if kind == "json_schema":
        record = json.loads(text)
        types = [type(record[name]) for name in ("name", "age", "tags")]
        has_types = types == [str, int, list] and len(record) == 3
        return has_types and 0 <= record["age"] <= 120 and len(record["tags"]) <= 2
    pattern = r"x = [0-9]{1,3}( \+ [0-9]{1,3}){1,2}"
    if kind == "regex":
        pattern = GRAMMAR_SOURCES[kind]
    return re.fullmatch(pattern, text) is not None


@pytest.mark.parametrize(
    ("kind", "temperature"), [("json_schema", 1.0), ("regex", 0.0), ("grammar", 1.0)]
)
def test_trees_are_lossless_under_a_grammar(embedded, drafter, kind, temperature):
    options = {
        kind: GRAMMAR_SOURCES[kind],
        "temperature": temperature,
        "max_new_tokens": MAX_GRAMMAR_OUTPUT_TOKENS,
        "seed": 5,
    }
    expected = generate(embedded, None, CODE_PROMPTS, method="plain", **options)
    assert kind == "json_schema" or {output.finish_reason for output in expected} == {"stop"}
    for output in expected:
        assert output.finish_reason == "length" or is_valid(kind, output.text), output.text
    num_tokens = sum(len(output.ids) for output in expected)
    for rows, method, budget in ((1, "chain", 7), (2, "ddtree", 12)):
        actual = generate(
            embedded,
            drafter,
            CODE_PROMPTS,
            method=method,
            budget=budget,
            max_num_seqs=rows,
            **options,
        )
        assert [output.ids for output in actual] == [output.ids for output in expected], method
        # Trees that do not follow the grammar would hardly ever be accepted.
        assert sum(output.stats.rounds for output in actual) < 0.8 * num_tokens


def test_rows_with_and_without_a_grammar_share_a_batch(embedded, drafter):
    grammar_options = [{}, {"regex": GRAMMAR_SOURCES["regex"]}]
    engine = Engine(embedded, drafter, EngineConfig("ddtree", 8, max_num_seqs=2), 80)
    ids = embedded.tokenizer(CODE_PROMPTS[0])["input_ids"]
    sequences = [
        engine.submit(ids, SamplingOptions(max_new_tokens=20, **options))
        for options in grammar_options
    ]
    while engine.has_unfinished_sequences:
        engine.step()
    for sequence, options in zip(sequences, grammar_options, strict=True):
        expected = generate(embedded, None, ids, method="plain", max_new_tokens=20, **options)
        assert sequence.ids == expected.ids


def test_the_grammar_state_reads_only_new_tokens(embedded, drafter):
    """Output tokens that were consumed before are not compared again."""
    state = make_grammar_state(SamplingOptions(regex="[a-z ]*"), embedded)
    ids = embedded.tokenizer("so it goes on and on")["input_ids"]

    class NewTokensOnly(list):
        def __getitem__(self, key):
            assert isinstance(key, slice) and (key.start or 0) >= state.checked_length
            return super().__getitem__(key)

    for length in range(len(ids)):
        for path in ([], ids[length : length + 2], ids[length : length + 1], [ids[0]]):
            assert state.compute_allowed_mask(NewTokensOnly(ids[:length]), path).any()
        assert len(state.consumed) == 1 and state.checked_length == length


class ReferenceProcessor(LogitsProcessor):
    """llguidance in transformers' generate: a matcher that consumes one token after the other."""

    def __init__(self, tokenizer, grammar: str, prompt_length: int) -> None:
        self.matcher = llguidance.LLMatcher(from_tokenizer(tokenizer), grammar)
        self.consumed_length = prompt_length

    def __call__(self, ids, scores):
        for token in ids[0, self.consumed_length :].tolist():
            assert self.matcher.consume_token(token)
        self.consumed_length = ids.shape[1]
        allowed = np.frombuffer(self.matcher.compute_logit_bias(), np.uint8)[: scores.shape[1]] > 0
        return scores.masked_fill(~torch.from_numpy(allowed), -torch.inf)


@pytest.mark.parametrize("kind", GRAMMAR_SOURCES)
def test_greedy_outputs_equal_those_of_transformers_with_llguidance(embedded, drafter, kind):
    convert = {
        "json_schema": llguidance.LLMatcher.grammar_from_json_schema,
        "regex": llguidance.LLMatcher.grammar_from_regex,
        "grammar": llguidance.LLMatcher.grammar_from_lark,
    }[kind]
    prompt = embedded.tokenizer(CODE_PROMPTS[1], return_tensors="pt")["input_ids"]
    source = GRAMMAR_SOURCES[kind]
    processor = ReferenceProcessor(embedded.tokenizer, convert(source), prompt.shape[1])
    expected = embedded.model.generate(
        prompt,
        max_new_tokens=MAX_GRAMMAR_OUTPUT_TOKENS,
        do_sample=False,
        logits_processor=LogitsProcessorList([processor]),
    )
    actual = generate(
        embedded,
        drafter,
        prompt[0].tolist(),
        max_new_tokens=MAX_GRAMMAR_OUTPUT_TOKENS,
        budget=8,
        **{kind: source},
    )
    assert actual.ids == expected[0, prompt.shape[1] :].tolist()


@pytest.mark.robustness
def test_sampled_outputs_have_the_distribution_of_the_constrained_target(embedded, random_qwen3):
    """Compared with an enumeration of all outputs of a small grammar (chi-square, one seed)."""
    target_options = {
        "vocab_size": 512,
        "initializer_range": 0.02,
        "eos_token_id": embedded.tokenizer.eos_token_id,
    }
    target = Target(random_qwen3(num_hidden_layers=4, **target_options), embedded.tokenizer, "tiny")
    drafter = create_drafter(DrafterConfig(layers=1, block_size=6, target_layer_ids=[1]), target)
    drafter.init_weights(torch.Generator().manual_seed(0))
    prompt = [5, 6, 7]
    count = 800
    options = DecodeOptions(
        regex="[ab]{1,3}", temperature=1.0, max_new_tokens=8, budget=8, max_num_seqs=16
    )
    probabilities: dict[tuple[int, ...], float] = {}

    def enumerate_outputs(ids: tuple[int, ...], probability: float) -> None:
        with torch.no_grad():
            logits = target.model(torch.tensor([[*prompt, *ids]])).logits[0, -1].float()
        state = make_grammar_state(options, target)
        token_probabilities = state.mask_scores(logits[None], list(ids), [])[0].softmax(-1)
        for token in token_probabilities.nonzero()[:, 0].tolist():
            output_probability = probability * float(token_probabilities[token])
            if token in target.eos_token_ids:
                probabilities[(*ids, token)] = output_probability
            else:
                enumerate_outputs((*ids, token), output_probability)

    enumerate_outputs((), 1.0)
    assert math.isclose(sum(probabilities.values()), 1, abs_tol=1e-4) and len(probabilities) > 12
    outputs = generate(target, drafter, [prompt] * count, options)
    counts = Counter(tuple(output.ids) for output in outputs)
    assert counts.keys() <= probabilities.keys()
    statistic = 0.0
    for ids, probability in probabilities.items():
        expected_count = count * probability
        statistic += (counts[ids] - expected_count) ** 2 / expected_count
    degrees = len(probabilities) - 1
    assert statistic < degrees + 4 * math.sqrt(2 * degrees), (statistic, degrees)  # p < 0.001


def test_the_tree_is_the_best_one_that_the_grammar_allows():
    """Compared with an enumeration of all prefixes of 3 tokens from 5, under random rules."""
    generator = torch.Generator().manual_seed(0)
    for seed in range(20):
        marginals = torch.randn(1, 3, 5, generator=generator).log_softmax(-1)
        allowed_after = {
            path: torch.rand(5, generator=generator) < 0.6
            for n in range(3)
            for path in itertools.product(range(5), repeat=n)
        }

        def allowed(path, allowed_after=allowed_after):
            return allowed_after[tuple(path)].numpy()

        def score(path, marginals=marginals, allowed_after=allowed_after):
            total = 0.0
            for depth, token in enumerate(path):
                is_allowed = allowed_after[path[:depth]]
                if not is_allowed[token]:
                    return -math.inf
                log_q = marginals[0, depth].masked_fill(~is_allowed, -torch.inf).log_softmax(-1)
                total += float(log_q[token])
            return total

        paths = [path for n in (1, 2, 3) for path in itertools.product(range(5), repeat=n)]
        scores = sorted((score(path) for path in paths if score(path) > -math.inf), reverse=True)
        proposal = Proposal(torch.tensor([0]), marginals)
        rule = GrammarRule(allowed, [])
        nodes = search_constrained(proposal, 0, 9, rule, branches=True)
        assert torch.allclose(nodes.log_probs, torch.tensor(scores[:9]), atol=1e-5), seed
        chain = search_constrained(proposal, 0, 3, rule, branches=False)
        assert chain.parents.tolist() == list(range(len(chain.parents)))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": '{"type": "nonsense"}'}, "json_schema"),
        ({"regex": "("}, "regex"),
        ({"grammar": "start: missing"}, "grammar"),
        ({"regex": "a" * (MAX_GRAMMAR_CHARS + 1)}, f"at most {MAX_GRAMMAR_CHARS} are allowed"),
        (
            {
                "json_schema": json.dumps(
                    {"items": [{"properties": {f"{i}": {} for i in range(1001)}}]}
                )
            },
            "1001 properties",
        ),
        ({"regex": "a", "grammar": 'start: "a"'}, "one of them"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_invalid_grammars_are_refused_in_one_sentence(embedded, options, message):
    with pytest.raises(ValueError, match=message):
        generate(embedded, None, "x", method="plain", **options)


def test_a_grammar_beyond_its_limits_is_refused(embedded):
    rules = []
    for i in range(200):
        alternatives = " | ".join(f'"{i}{j}"' for j in range(40))
        rules.append(f"({alternatives})")
    source = "start: " + " ".join(rules)
    with pytest.raises(ValueError, match="grammar"):
        generate(embedded, None, "x", method="plain", grammar=source * 3)
    assert GRAMMAR_PARSER_LIMITS["max_grammar_size"] < 500_000


def test_forced_text_is_bounded(embedded):
    """The output ends before a pattern forces 30,000 characters, which takes no time."""
    state = make_grammar_state(SamplingOptions(regex="(x|y)a{30000}"), embedded)
    assert state.compute_allowed_mask([], []).any()
    output_ids = embedded.tokenizer("x")["input_ids"]
    assert state.forced_tokens(output_ids) == []
    assert not state.compute_allowed_mask(output_ids, []).any()
    state = make_grammar_state(SamplingOptions(regex="a{1000000}"), embedded)
    assert state.forced_tokens([]) == [] and len(state.matcher.compute_ff_bytes()) < 100_000


def test_a_slow_grammar_is_not_used_for_drafts(embedded, drafter, monkeypatch):
    """One mask per output token is computed, and the output stays the same."""
    options = {"regex": GRAMMAR_SOURCES["regex"], "max_new_tokens": 20}
    expected = generate(embedded, None, CODE_PROMPTS[0], method="plain", **options)
    allowed_tokens = Mock(wraps=grammar.GrammarState.compute_allowed_mask)
    monkeypatch.setattr(grammar, "SLOW_GRAMMAR_TOKEN_MASK_SECONDS", -1.0)
    monkeypatch.setattr(
        grammar.GrammarState, "compute_allowed_mask", lambda *arguments: allowed_tokens(*arguments)
    )
    actual = generate(embedded, drafter, CODE_PROMPTS[0], method="ddtree", budget=8, **options)
    assert actual.ids == expected.ids
    assert allowed_tokens.call_count == len(expected.ids)


def test_a_target_without_grammar_support_starts_no_process():
    sandbox = GrammarSandbox(Mock(side_effect=ValueError("no end token")))
    for _ in range(2):
        with pytest.raises(ValueError, match="no end token"):
            sandbox.check("regex", "a")
    assert sandbox.process is None
