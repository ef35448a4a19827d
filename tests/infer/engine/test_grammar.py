"""Texts that follow a schema, an expression or a grammar: valid, and token for token constrained
plain decoding's."""

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
from infer.config import DecodeOptions, DrafterConfig, EngineConfig, TextOptions
from infer.drafters.base import new_drafter
from infer.engine import grammar
from infer.engine.grammar import MOST_LETTERS, follow
from infer.engine.trial import LIMITS, Trial
from infer.targets.target import Target
from infer.trees.constrained import Rule, search
from infer.trees.tree import Proposal

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "cc"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SUM = 'start: "x = " NUM " + " NUM (" + " NUM)?\nNUM: /[0-9]{1,3}/'
ASKED = {"json_schema": json.dumps(SCHEMA), "regex": r"(yes|no), [0-9]{3,5}\.", "grammar": SUM}
PROMPTS = ["# a record\nrow = ", "def f(x):\n    return "]
TOKENS = 26


@pytest.fixture(scope="module")
def drafter():
    return load_drafter("embedded")


def valid(kind: str, text: str) -> bool:
    if kind == "json_schema":
        row = json.loads(text)
        kinds = [type(row[name]) for name in ("name", "age", "tags")]
        return (
            kinds == [str, int, list]
            and len(row) == 3
            and 0 <= row["age"] <= 120
            and len(row["tags"]) <= 2
        )
    return (
        re.fullmatch(
            ASKED[kind] if kind == "regex" else r"x = [0-9]{1,3}( \+ [0-9]{1,3}){1,2}", text
        )
        is not None
    )


@pytest.mark.parametrize(
    ("kind", "temperature"), [("json_schema", 1.0), ("regex", 0.0), ("grammar", 1.0)]
)
def test_trees_write_what_constrained_plain_decoding_writes(embedded, drafter, kind, temperature):
    options = {kind: ASKED[kind], "temperature": temperature, "max_new_tokens": TOKENS, "seed": 5}
    plain = generate(embedded, None, PROMPTS, method="plain", **options)
    assert kind == "json_schema" or {answer.finish_reason for answer in plain} == {"stop"}
    for answer in plain:
        assert answer.finish_reason == "length" or valid(kind, answer.text), answer.text
    for rows, method, budget in ((1, "chain", 7), (2, "ddtree", 12)):
        found = generate(
            embedded, drafter, PROMPTS, method=method, budget=budget, max_num_seqs=rows, **options
        )
        assert [answer.ids for answer in found] == [answer.ids for answer in plain], (method, rows)
        # trees that did not follow the grammar would hardly ever draft what comes
        assert sum(answer.stats.rounds for answer in found) < 0.8 * sum(
            len(answer.ids) for answer in plain
        )


def test_rows_with_and_without_a_grammar_share_a_batch(embedded, drafter):
    free = TextOptions(max_new_tokens=20)
    bound = TextOptions(max_new_tokens=20, regex=ASKED["regex"])
    engine = Engine(embedded, drafter, EngineConfig("ddtree", 8, max_num_seqs=2), 80)
    ids = embedded.tokenizer(PROMPTS[0])["input_ids"]
    texts = [engine.submit(ids, options) for options in (free, bound)]
    while engine.busy:
        engine.step()
    for text, asked in zip(texts, ({}, {"regex": ASKED["regex"]}), strict=True):
        alone = generate(embedded, None, ids, method="plain", max_new_tokens=20, **asked)
        assert text.ids == alone.ids


def test_going_on_costs_nothing_for_the_text_before(embedded, drafter):
    """Only what is new is compared with what was consumed: the text may not be looked at again."""
    state = follow(TextOptions(regex="[a-z ]*"), embedded)
    ids = embedded.tokenizer("so it goes on and on")["input_ids"]

    class Text(list):
        def __getitem__(self, key):
            assert isinstance(key, slice) and (key.start or 0) >= state.length
            return super().__getitem__(key)

    for length in range(len(ids)):
        for path in ([], ids[length : length + 2], ids[length : length + 1], [ids[0]]):
            assert state.allowed(Text(ids[:length]), path).any()
        assert len(state.path) == 1 and state.length == length


class Guided(LogitsProcessor):
    """llguidance inside transformers' generate: a matcher that is fed one token after the other."""

    def __init__(self, tokenizer, grammar: str, prompt: int) -> None:
        self.matcher = llguidance.LLMatcher(from_tokenizer(tokenizer), grammar)
        self.done = prompt

    def __call__(self, ids, scores):
        for token in ids[0, self.done :].tolist():
            assert self.matcher.consume_token(token)
        self.done = ids.shape[1]
        allowed = np.frombuffer(self.matcher.compute_logit_bias(), np.uint8)[: scores.shape[1]] > 0
        return scores.masked_fill(~torch.from_numpy(allowed), -torch.inf)


@pytest.mark.parametrize("kind", ASKED)
def test_greedy_texts_are_those_of_transformers_under_the_same_library(embedded, drafter, kind):
    make = {
        "json_schema": llguidance.LLMatcher.grammar_from_json_schema,
        "regex": llguidance.LLMatcher.grammar_from_regex,
        "grammar": llguidance.LLMatcher.grammar_from_lark,
    }[kind]
    prompt = embedded.tokenizer(PROMPTS[1], return_tensors="pt")["input_ids"]
    guided = Guided(embedded.tokenizer, make(ASKED[kind]), prompt.shape[1])
    theirs = embedded.model.generate(
        prompt,
        max_new_tokens=TOKENS,
        do_sample=False,
        logits_processor=LogitsProcessorList([guided]),
    )
    ours = generate(
        embedded,
        drafter,
        prompt[0].tolist(),
        max_new_tokens=TOKENS,
        budget=8,
        **{kind: ASKED[kind]},
    )
    assert ours.ids == theirs[0, prompt.shape[1] :].tolist()


@pytest.mark.robustness
def test_sampled_texts_have_the_distribution_of_the_masked_target(embedded, random_qwen3):
    """Against the enumeration of all that a small grammar allows (chi-square, one seed)."""
    own = {
        "vocab_size": 512,
        "initializer_range": 0.02,
        "eos_token_id": embedded.tokenizer.eos_token_id,
    }
    target = Target(random_qwen3(num_hidden_layers=4, **own), embedded.tokenizer, "tiny")
    drafter = new_drafter(DrafterConfig(layers=1, block_size=6, target_layer_ids=[1]), target)
    drafter.init_weights(torch.Generator().manual_seed(0))
    prompt = [5, 6, 7]
    count = 800
    options = DecodeOptions(
        regex="[ab]{1,3}", temperature=1.0, max_new_tokens=8, budget=8, max_num_seqs=16
    )
    shares: dict[tuple[int, ...], float] = {}

    def spread(ids: tuple[int, ...], share: float) -> None:
        with torch.no_grad():
            logits = target.model(torch.tensor([[*prompt, *ids]])).logits[0, -1].float()
        odds = follow(options, target).mask(logits[None], list(ids), [])[0].softmax(-1)
        for token in odds.nonzero()[:, 0].tolist():
            if token in target.end_ids:
                shares[(*ids, token)] = share * float(odds[token])
            else:
                spread((*ids, token), share * float(odds[token]))

    spread((), 1.0)
    assert math.isclose(sum(shares.values()), 1, abs_tol=1e-4) and len(shares) > 12
    found = Counter(
        tuple(answer.ids) for answer in generate(target, drafter, [prompt] * count, options)
    )
    assert found.keys() <= shares.keys()
    square = sum(
        (found[ids] - count * share) ** 2 / (count * share) for ids, share in shares.items()
    )
    freedom = len(shares) - 1
    assert square < freedom + 4 * math.sqrt(2 * freedom), (square, freedom)  # beyond p = 0.001


def test_the_tree_is_the_best_one_that_the_grammar_allows():
    """Against the enumeration of all prefixes of 3 of 5 tokens, under random rules."""
    generator = torch.Generator().manual_seed(0)
    for seed in range(20):
        marginals = torch.randn(1, 3, 5, generator=generator).log_softmax(-1)
        rules = {
            path: torch.rand(5, generator=generator) < 0.6
            for n in range(3)
            for path in itertools.product(range(5), repeat=n)
        }

        def allowed(path, rules=rules):
            return rules[tuple(path)].numpy()

        def score(path, marginals=marginals, rules=rules):
            total = 0.0
            for depth, token in enumerate(path):
                may = rules[path[:depth]]
                if not may[token]:
                    return -float("inf")
                total += float(
                    marginals[0, depth].masked_fill(~may, -torch.inf).log_softmax(-1)[token]
                )
            return total

        everything = [path for n in (1, 2, 3) for path in itertools.product(range(5), repeat=n)]
        scores = sorted(
            (score(path) for path in everything if score(path) > -float("inf")), reverse=True
        )
        nodes = search(
            Proposal(torch.tensor([0]), marginals), 0, 9, Rule(allowed, []), branches=True
        )
        assert torch.allclose(nodes.log_probs, torch.tensor(scores[:9]), atol=1e-5), seed
        chain = search(
            Proposal(torch.tensor([0]), marginals), 0, 3, Rule(allowed, []), branches=False
        )
        assert chain.parents.tolist() == list(range(len(chain.parents)))


@pytest.mark.parametrize(
    "options, said",
    [
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": '{"type": "nonsense"}'}, "json_schema"),
        ({"regex": "("}, "regex"),
        ({"grammar": "start: missing"}, "grammar"),
        ({"regex": "a" * (MOST_LETTERS + 1)}, f"{MOST_LETTERS} may be"),
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
def test_what_cannot_be_followed_is_refused_in_a_sentence(embedded, options, said):
    with pytest.raises(ValueError, match=said):
        generate(embedded, None, "x", method="plain", **options)


def test_a_grammar_beyond_its_limits_is_refused(embedded):
    wide = "start: " + " ".join(
        "(" + " | ".join(f'"{i}{j}"' for j in range(40)) + ")" for i in range(200)
    )
    with pytest.raises(ValueError, match="grammar"):
        generate(embedded, None, "x", method="plain", grammar=wide * 3)
    assert LIMITS["max_grammar_size"] < 500_000


def test_what_is_forced_is_bounded(embedded):
    """A pattern that forces 30,000 letters behind its first is cut there, and costs no time."""
    state = follow(TextOptions(regex="(x|y)a{30000}"), embedded)
    assert state.allowed([], []).any()
    text = embedded.tokenizer("x")["input_ids"]
    assert state.forced(text) == [] and not state.allowed(text, []).any()
    first = follow(TextOptions(regex="a{1000000}"), embedded)
    assert first.forced([]) == [] and len(first.matcher.compute_ff_bytes()) < 100_000


def test_a_slow_grammar_is_not_asked_for_drafts(embedded, drafter, monkeypatch):
    """It is asked once for each token that is written; the text stays the same."""
    options = {"regex": ASKED["regex"], "max_new_tokens": 20}
    plain = generate(embedded, None, PROMPTS[0], method="plain", **options)
    asked = []
    allowed = grammar.GrammarState.allowed
    monkeypatch.setattr(grammar, "SLOW", -1.0)
    monkeypatch.setattr(grammar.GrammarState, "allowed", lambda *a: asked.append(1) or allowed(*a))
    found = generate(embedded, drafter, PROMPTS[0], method="ddtree", budget=8, **options)
    assert found.ids == plain.ids and len(asked) == len(plain.ids)


def test_a_target_that_follows_no_grammars_starts_no_process():
    trial = Trial(Mock(side_effect=ValueError("no end token")))
    for _ in range(2):
        with pytest.raises(ValueError, match="no end token"):
            trial.check("regex", "a")
    assert trial.process is None
