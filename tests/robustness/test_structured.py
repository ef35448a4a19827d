"""Structured output in number: texts of 200 prompts, their distribution, and grammars from strangers."""

import collections
import json
import math
import random
import string

import llguidance
import pytest
import regex
import torch
from llguidance.hf import from_tokenizer
from starlette.testclient import TestClient

from infer import Engine, generate
from infer.config import DecodeOptions, DrafterConfig, EngineConfig
from infer.drafters.base import new_drafter
from infer.engine.grammar import follow
from infer.serving.config import ServerConfig
from infer.serving.server import create_app
from infer.targets.target import Target

pytestmark = pytest.mark.robustness

SCHEMAS = [
    {
        "type": "object",
        "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"type": "boolean"}},
        "required": ["id", "ok"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
    {
        "type": "object",
        "properties": {
            "kind": {"const": "row"},
            "name": {"type": "string", "maxLength": 5},
            "rest": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "integer"}, "maxItems": 2}]},
        },
        "required": ["kind", "name", "rest"],
        "additionalProperties": False,
    },
]
PATTERN = r"(yes|no|maybe): [0-9]{1,4}(\.[0-9]{2})?;"
SUM = 'start: "x = " term (" + " term)* ";"\nterm: NUM | "(" term " - " NUM ")"\nNUM: /[1-9][0-9]?/'
ASKED = [*(("json_schema", json.dumps(schema)) for schema in SCHEMAS), ("regex", PATTERN), ("grammar", SUM)]


@pytest.fixture(scope="module")
def tiny(embedded, random_qwen3):
    """A random target with the embedded tokenizer, and a random drafter."""
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "head_dim": 16}
    own = {"initializer_range": 0.02, "eos_token_id": embedded.tokenizer.eos_token_id, "tie_word_embeddings": True}
    target = Target(random_qwen3(**sizes, **own), embedded.tokenizer, "tiny")
    drafter = new_drafter(DrafterConfig(layers=1, block_size=6), target)
    drafter.init_weights(torch.Generator().manual_seed(0))
    return target, drafter


def is_valid(which: int, text: str) -> bool:
    """Judge by other code than the grammar's."""
    if which == 3:
        return regex.fullmatch(PATTERN, text) is not None
    if which == 4:
        number = "[1-9][0-9]?"
        term = rf"(?P<term>{number}|\((?&term) - {number}\))"
        return regex.fullmatch(rf"x = {term}( \+ (?&term))*;", text) is not None
    row = json.loads(text)
    if which == 0:
        return row.keys() == {"id", "ok"} and row["id"] in range(100) and isinstance(row["ok"], bool)
    if which == 1:
        return 1 <= len(row) <= 3 and set(row) <= {"red", "green", "blue"}
    rest = row["rest"]
    whole = rest is None or (len(rest) <= 2 and all(isinstance(number, int) for number in rest))
    return row.keys() == {"kind", "name", "rest"} and row["kind"] == "row" and len(row["name"]) <= 5 and whole


def begins(kind: str, text: str, tokenizer, ids: list[int]) -> bool:
    """Return whether ids are the beginning of something valid, by a fresh matcher."""
    make = {"json_schema": "json_schema", "regex": "regex", "grammar": "lark"}[kind]
    grammar = getattr(llguidance.LLMatcher, f"grammar_from_{make}")(text)
    return llguidance.LLMatcher(from_tokenizer(tokenizer), grammar).try_consume_tokens(ids) == len(ids)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_200_prompts_in_every_way(tiny, embedded, temperature):
    """Three schemas, an expression and a grammar; alone and in batches, chain and DDTree."""
    target, drafter = tiny
    ended = cut = 0
    for which, (kind, text) in enumerate(ASKED):
        dice = random.Random(which)
        prompts = [[dice.randrange(3, 512) for _ in range(dice.randrange(3, 20))] for _ in range(20)]
        options = {kind: text, "temperature": temperature, "max_new_tokens": 20 + 12 * (which < 3), "seed": 7}
        plain = generate(target, None, prompts, method="plain", rows=8, **options)
        for answer in plain:
            if answer.finish_reason == "stop":
                assert is_valid(which, answer.text), answer.text
            else:
                assert begins(kind, text, embedded.tokenizer, answer.ids), answer.text
            ended, cut = ended + (answer.finish_reason == "stop"), cut + (answer.finish_reason == "length")
        for method, budget, rows in (("chain", 5, 1), ("chain", 5, 8), ("ddtree", 12, 1), ("ddtree", 12, 8)):
            found = generate(target, drafter, prompts, method=method, budget=budget, rows=rows, **options)
            assert [answer.ids for answer in found] == [answer.ids for answer in plain], (which, method, rows)
    assert ended + cut == 100 and ended >= 20


def test_sampled_texts_have_the_distribution_of_the_masked_target(tiny):
    """Against the enumeration of all that a small grammar allows (chi-square, one seed)."""
    target, drafter = tiny
    prompt, pattern, ends = [5, 6, 7], "[ab]{1,3}", target.end_ids
    options = DecodeOptions(regex=pattern, temperature=1.0, max_new_tokens=8, budget=8, rows=16)
    shares: dict[tuple[int, ...], float] = {}

    def spread(ids: tuple[int, ...], share: float) -> None:
        with torch.no_grad():
            logits = target.model(torch.tensor([[*prompt, *ids]])).logits[0, -1].float()
        odds = follow(options, target).mask(logits[None], list(ids), [])[0].softmax(-1)
        for token in odds.nonzero()[:, 0].tolist():
            if token in ends:
                shares[(*ids, token)] = share * float(odds[token])
            else:
                spread((*ids, token), share * float(odds[token]))

    spread((), 1.0)
    assert math.isclose(sum(shares.values()), 1, abs_tol=1e-4) and len(shares) > 12
    count = 800
    found = collections.Counter(tuple(a.ids) for a in generate(target, drafter, [prompt] * count, options))
    assert found.keys() <= shares.keys()
    square = sum((found[ids] - count * share) ** 2 / (count * share) for ids, share in shares.items())
    freedom = len(shares) - 1
    assert square < freedom + 4 * math.sqrt(2 * freedom), (square, freedom)  # beyond p = 0.001


def deep(dice: random.Random) -> dict:
    """A schema nested in itself, sometimes deeper than any parser goes."""
    schema: dict | list = {"type": "string"}
    for _ in range(dice.choice([5, 40, 90, 200])):
        schema = dice.choice(
            [
                {"type": "array", "items": schema},
                {"type": "object", "properties": {"a": schema}},
                {"anyOf": [schema, {"type": "null"}]},
                {"allOf": [schema, schema]} if dice.random() < 0.03 else {"oneOf": [schema]},
            ]
        )
    return {"guided_json": schema}


def huge(dice: random.Random) -> dict:
    """A schema, an expression or a grammar that says little in large numbers."""
    many = dice.choice([50, 500, 3000])
    name = "".join(dice.choices(string.ascii_lowercase, k=6))
    return dice.choice(
        [
            {"guided_json": {"enum": [f"{name}{i}" for i in range(many)]}},
            {"guided_json": {"type": "string", "minLength": 10**9, "maxLength": 10 ** dice.choice([2, 9, 30])}},
            {"guided_json": {"type": "array", "minItems": 10 ** dice.choice([3, 9]), "items": {"type": "integer"}}},
            {"guided_json": {"type": "object", "properties": {f"{name}{i}": {"type": "integer"} for i in range(many)}}},
            {"guided_json": {"type": "object", "patternProperties": {f"^{name}{i}": {} for i in range(many)}}},
            {"guided_json": {"type": "integer", "multipleOf": 7**19, "minimum": -(10**30)}},
            {"guided_regex": f"({name}{{1,{many}}}){{1,{many}}}"},
            {"guided_regex": "(" + "|".join(f"{name}{i}" for i in range(many)) + ")*"},
            {"guided_regex": f".{{{many}}}[{name}].{{{many}}}"},
            {"guided_grammar": "start: " + " | ".join(f'"{name}{i}"' for i in range(many))},
            {"guided_grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(many)) + f'r{many}: "a"'},
            {"guided_grammar": "start: R0\n" + "".join(f"R{i}: R{i + 1}\n" for i in range(many)) + f"R{many}: /a/"},
            {"guided_choice": [name * dice.choice([1, 40]) + str(i) for i in range(min(many, 256))]},
        ]
    )


def ambiguous(dice: random.Random) -> dict:
    """Texts that can be read in very many ways."""
    return dice.choice(
        [
            {"guided_grammar": 'start: start start | "a" |'},
            {"guided_grammar": "start: e\ne: e e | e e e | /[a-z]+/ |"},
            {"guided_grammar": "start: (A | B | A B)*\nA: /[a-z]*/\nB: /[a-y]*z?/"},
            {"guided_grammar": 'start: x*\nx: y*\ny: z*\nz: "a"*'},
            {"guided_grammar": "start: a b c d\na: /.*/\nb: /.*/\nc: /.*/\nd: /(.|\\n)*/"},
            {"guided_regex": "(a|a|aa)*(a|aa|aaa)*b"},
            {"guided_regex": "((a*)*)*" * dice.choice([1, 20])},
            {"guided_regex": f"(.*){{{dice.choice([2, 60, 900])}}}x"},
            {"guided_regex": "(?:[a-z]*[a-y]*){" + str(dice.choice([3, 300])) + "}"},
            {"guided_grammar": "start: A\nA: " + " & ".join(["/[a-z]*(ab|ba)[a-z]*/"] * dice.choice([2, 30]))},
            {"guided_grammar": "start: A\nA: ~(/.*a.{" + str(dice.choice([3, 14, 200])) + "}/)"},
            {"guided_json": {"allOf": [{"anyOf": [{"type": "string"}, {"type": "array"}]}] * dice.choice([2, 40])}},
            {"guided_json": {"type": "string", "pattern": f"^(a|b)*a(a|b){{{dice.choice([4, 15, 60])}}}$"}},
        ]
    )


def recursive(dice: random.Random) -> dict:
    """What refers to itself, with an end or without."""
    size = dice.choice([2, 30, 400])
    chain = {f"a{i}": {"$ref": f"#/$defs/a{(i + 1) % size}"} for i in range(size)}
    tree = {"type": "object", "properties": {"l": {"$ref": "#"}, "r": {"$ref": "#"}}, "additionalProperties": False}
    return dice.choice(
        [
            {"guided_json": {"$ref": "#"}},
            {"guided_json": {"$ref": "#/$defs/a0", "$defs": chain}},
            {"guided_json": tree},
            {"guided_json": tree | {"required": ["l"]}},
            {"guided_json": {"$ref": "http://127.0.0.1:1/x.json"}},
            {"guided_json": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}},
            {"guided_json": {"type": "array", "items": {"$ref": "#"}, "minItems": 3}},
            {"guided_grammar": "start: start"},
            {"guided_grammar": 'start: "(" start ")" |'},
            {"guided_grammar": "start: a\na: b\nb: a"},
            {"guided_grammar": 'start: a "x"\na: b "y" | "z"\nb: a "w" | a'},
            {"guided_grammar": "start: A\nA: A"},
            {"guided_grammar": 'start: %json {"$ref": "#"}'},
        ]
    )


def broken(dice: random.Random) -> dict:
    """No grammar of any kind."""
    text = "".join(dice.choices(string.printable + "é\u2028\U0001f600", k=dice.choice([1, 30, 2000])))
    return {dice.choice(["guided_json", "guided_regex", "guided_grammar"]): text + dice.choice(["", "(" * 20000, "\\"])}


def test_300_grammars_of_strangers(tiny):
    """Each is refused with a reason, or followed within its limits; the server lives, and others have their texts."""
    target, drafter = tiny
    dice, kinds = random.Random(11), (deep, huge, ambiguous, recursive, broken)
    asked = [kinds[i % len(kinds)](dice) for i in range(300)]
    engine = Engine(target, drafter, EngineConfig("ddtree", 8, rows=4), 128)
    expected = generate(target, None, [5, 6, 7], method="plain", max_new_tokens=8).ids
    said: collections.Counter = collections.Counter()
    app = create_app(engine, ServerConfig(max_texts=8, max_body=200_000))
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        for number, fields in enumerate(asked):
            body = {"prompt": [5, 6, 7], "max_tokens": 12, "seed": number, "return_token_ids": True, **fields}
            answer = client.post("/v1/completions", json=body)
            said[answer.status_code] += 1
            assert answer.status_code in (200, 400, 413), (fields, answer.text[:300])
            if answer.status_code != 200:
                assert answer.json()["error"]["message"]
            else:
                assert len(answer.json()["choices"][0]["token_ids"]) <= 12
            if number % 20 == 0:
                plain = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "return_token_ids": True}
                assert client.post("/v1/completions", json=plain).json()["choices"][0]["token_ids"] == expected
        assert client.get("/health").json() == {"status": "ok"}
    assert said[200] > 30 and said[400] > 30, said
