"""Hostile expressions, schemas and grammars at a server with little address space, and a stream
beside them.

    python tests/robustness/hostile_grammars.py --requests 200

Repetition, nesting, alternation, recursion, Unicode classes, and what is no grammar. Fails (exit
code 1) if a request is not answered with 200 and no more tokens than it asked for, or with 400 and
a sentence, if a text without a grammar is another one afterwards, if the server's memory has grown
by more than 100 MiB, or if an event of the stream comes more than `--pause` seconds later than the
longest it took while nobody was hostile.
"""

import argparse
import json
import random
import string
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
from server import memory, serving

GROWTH = 100  # MiB
CLIENTS = 4
TOKENS = 24


def regexes(dice: random.Random) -> Iterator[str]:
    """Yield expressions."""
    letter = partial(dice.choice, "abcxyz.")
    many = partial(dice.choice, [1000, 30_000, 3_000_000, 10**9])
    yield from (
        "a{3000000}",
        "(((((a{100}){100}){100}){100}){100})",
        "(x|y)a{3000000}",
        "[ab]{3000000}",
        "(a|b){0,3000000}c",
    )
    for _ in range(9):
        yield f"{letter()}{{{many()}}}"
        yield f"({letter()}|{letter()}{letter()}){{{many()},{4 * many()}}}"
        inner = letter()
        for _ in range(dice.randrange(2, 9)):
            inner = f"({inner}{{{dice.choice(['0,100', '100', '1,9', '50,', '1000'])}}})"
        yield inner
        yield f"(x|y)+{inner}"
        yield "(" * (depth := dice.choice([50, 200, 5000, 30_000])) + "a" + ")" * depth
        yield "(" * (depth := dice.choice([50, 200, 5000, 10_000])) + "a" + "?)+" * depth
        yield "|".join(
            "".join(dice.choices("abcdef", k=8)) for _ in range(dice.choice([100, 1000, 7000]))
        )
        yield (
            "("
            + "|".join(
                f"{letter()}*{letter()}{letter()}" for _ in range(dice.choice([20, 500, 4000]))
            )
            + ")*"
        )
        yield f"(.*{letter()}){{{dice.choice([10, 100, 1000, 100000])}}}"
        yield f"[ab]*a[ab]{{{dice.choice([10, 30, 300, 3000])}}}"  # 2^n states
        yield f"(\\p{{L}}|\\p{{N}}|{letter()}){{{many()}}}"
        yield f"[\\w&&[^{letter()}]]*\\W{{{dice.choice([5, 500, 100000])}}}"
        yield f"(\\p{{Lu}}\\p{{Ll}}*\\s?){{{many()}}}"
        yield (
            "["
            + "".join(chr(dice.randrange(0x100, 0xD000)) for _ in range(dice.choice([100, 3000])))
            + "]*"
            + "é" * 300
        )
        yield "(" + "a?" * (n := dice.choice([30, 1000, 20_000])) + "a" * n + ")*"
        yield "".join(f"(?:{letter()}+)+" for _ in range(dice.choice([10, 1000, 8000])))
        yield "x" * dice.choice([1000, 60_000])


def schemas(dice: random.Random) -> Iterator[object]:
    """Yield JSON schemas."""

    def nested(depth, kind):
        schema = {"type": "string"}
        for _ in range(depth):
            schema = {
                "object": {"type": "object", "properties": {"a": schema}, "required": ["a"]},
                "array": {"type": "array", "items": schema},
                "anyOf": {"anyOf": [schema, {"type": "null"}]},
                "allOf": {"allOf": [schema, {}]},
                "not": {"not": schema},
            }[kind]
        return schema

    many = partial(dice.choice, [1000, 100_000, 3_000_000, 10**12])
    chain = {f"a{i}": {"$ref": f"#/$defs/a{(i + 1) % 400}"} for i in range(400)}
    yield {"$ref": "#/$defs/a0", "$defs": chain}
    for reference in ("#", "http://127.0.0.1:1/x.json"):
        yield {"type": "array", "items": {"$ref": reference}, "minItems": 3}
    for _ in range(5):
        for kind in ("object", "array", "anyOf", "allOf", "not"):
            yield nested(dice.choice([20, 100, 150]), kind)
        yield {"type": "string", "minLength": many(), "maxLength": 2 * 10**12}
        yield {"type": "string", "pattern": f"^(a{{{many()}}}|b)*$"}
        yield {"type": "array", "items": {"type": "integer"}, "minItems": many()}
        yield {"type": "array", "items": {"const": "x"}, "minItems": many(), "uniqueItems": True}
        yield {
            "type": "integer",
            "minimum": -(10 ** dice.choice([10, 300])),
            "maximum": 10 ** dice.choice([10, 300]),
            "multipleOf": dice.choice([7, 10**9 + 7]),
        }
        yield {"type": "number", "multipleOf": 1e-300}
        yield {
            "enum": ["x" * dice.randrange(1, 40) + str(i) for i in range(dice.choice([10, 5000]))]
        }
        yield {"const": "x" * dice.choice([3000, 50_000])}
        yield {
            "type": "object",
            "properties": {f"p{i}": {"type": "string"} for i in range(dice.choice([50, 1500]))},
        }
        yield {
            "type": "object",
            "properties": {f"p{i}": {"enum": list(range(20))} for i in range(100)},
            "required": [f"p{i}" for i in range(100)],
        }
        yield {
            "$ref": "#/$defs/a",
            "$defs": {
                "a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]},
                "b": {"$ref": "#/$defs/a"},
            },
        }
        yield {
            "$ref": "#/$defs/n",
            "$defs": {
                "n": {
                    "type": "object",
                    "properties": {"l": {"$ref": "#/$defs/n"}, "r": {"$ref": "#/$defs/n"}},
                    "required": ["l", "r"],
                }
            },
        }
        yield {
            "$ref": "#/$defs/t0",
            "$defs": {
                f"t{i}": {"allOf": [{"$ref": f"#/$defs/t{i + 1}"}, {"$ref": f"#/$defs/t{i + 1}"}]}
                for i in range(24)
            }
            | {"t24": {"type": "string"}},
        }
        yield {
            "$ref": "#/$defs/t0",
            "$defs": {
                f"t{i}": {
                    "type": "array",
                    "prefixItems": [{"$ref": f"#/$defs/t{i + 1}"}] * 3,
                    "items": False,
                    "minItems": 3,
                }
                for i in range(40)
            }
            | {"t40": {"const": 1}},
        }
        yield {
            "anyOf": [
                {"type": "object", "properties": {f"k{i}": {"const": i}}, "required": [f"k{i}"]}
                for i in range(dice.choice([30, 400]))
            ]
        }
        yield {
            "allOf": [
                {
                    "type": "object",
                    "patternProperties": {
                        f"^{c}.*{d}$": {"type": "string", "pattern": f"{d}{{1000}}"}
                    },
                }
                for c in "abcde"
                for d in "xyz"
            ]
        }
        yield {
            "type": "string",
            "format": dice.choice(["date-time", "email", "ipv6", "uri", "uuid", "nonsense"]),
            "maxLength": 10**9,
        }


def grammars(dice: random.Random) -> Iterator[str]:
    """Yield grammars in Lark's syntax."""
    yield "start: a\na: b\nb: a"
    yield "start: A\nA: A"
    yield 'start: %json {"$ref": "#"}'
    for _ in range(5):
        n = dice.choice([20, 40, 2000])
        yield "start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(n)) + f'r{n}: "a"'
        yield (
            "start: r0\n"
            + "".join(f"r{i}: r{i + 1} | r{i + 1} r{i + 1}\n" for i in range(n))
            + f'r{n}: "a"'
        )
        yield "start: A0\n" + "".join(f"A{i}: A{i + 1} A{i + 1}\n" for i in range(n)) + f'A{n}: "a"'
        yield "start: A0\n" + "".join(f"A{i}: (A{i + 1} | /b/)+\n" for i in range(n)) + f'A{n}: "a"'
        yield 'start: s\ns: s s | "a" | ""'
        yield 'start: s\ns: s s s | s s | "a" | "b" s'
        yield 'start: "(" start ")" | "[" start "]" | start start | ""'
        yield "start: " + "(" * (d := dice.choice([100, 3000, 30_000])) + '"a"' + ")" * d
        yield f'start: "a"{{{dice.choice([1000, 100_000, 3_000_000])}}}'
        yield f"start: x{{{dice.choice([1000, 100_000])}}}\nx: y{{1000}}\ny: /[a-z]/{{1000}}"
        yield "start: " + " | ".join(f'"{i}" start' for i in range(dice.choice([50, 3000])))
        yield "start: start"
        yield "start: A & B\nA: /" + "(a|b)*a(a|b){12}" + "/\nB: ~/" + "(a|b)*b(a|b){12}" + "/"
        yield "start: X\nX: " + " & ".join(f"/.*{c}.{{{k}}}.*/" for k, c in enumerate("abcdefghij"))
        yield (
            "start: X\nX: ~("
            + " | ".join(f"/(.*{c}.*){{{k + 3}}}/" for k, c in enumerate("abcdef"))
            + ")"
        )
        yield "%llguidance {}\nstart: %json " + json.dumps(
            {"type": "string", "minLength": 3_000_000}
        )


def broken(dice: random.Random) -> Iterator[str]:
    """Yield what is no grammar of any kind."""
    for size in (1, 30, 2000):
        for end in ("", "(" * 20_000, "\\"):
            yield "".join(dice.choices(string.printable + "é\u2028\U0001f600", k=size)) + end


def hostile(count: int, seed: int = 0) -> list[tuple[str, object]]:
    """Return fields of requests and what they ask for, the known worst first."""
    dice = random.Random(seed)
    kinds = {
        "guided_regex": list(regexes(dice)),
        "guided_json": list(schemas(dice)),
        "guided_grammar": list(grammars(dice)),
    }
    found = [
        (field, value) for field, values in kinds.items() for value in [*values, *broken(dice)]
    ]
    first = found[:5]
    rest = found[5:]
    dice.shuffle(rest)
    return (first + rest)[:count]


class Beside(threading.Thread):
    """A client that streams one text after the other, and notes how long it waits for an event."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url = url
        self.pauses = []
        self.ended = False

    def run(self) -> None:
        body = {"prompt": "def read(", "max_tokens": 1000, "temperature": 1, "stream": True}
        while not self.ended:
            before = time.monotonic()
            with httpx.stream(
                "POST", f"{self.url}/v1/completions", json=body, timeout=600
            ) as answer:
                for _ in answer.iter_lines():
                    now = time.monotonic()
                    self.pauses.append(now - before)
                    before = now
                    if self.ended:
                        break

    def longest(self) -> float:
        """Return the longest wait since the last call."""
        pauses = self.pauses
        self.pauses = []
        return max(pauses)


def plain_text(url: str) -> str:
    """Return what the server writes without a grammar."""
    body = {"prompt": "x = ", "max_tokens": TOKENS, "temperature": 0}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=600).json()["choices"][0]["text"]


def ask(url: str, field: str, value: object) -> tuple[str, int, bool, float]:
    """Send a request under a grammar; return its field, its status, whether its answer is one, and
    its seconds."""
    body = {"prompt": "x = ", "max_tokens": TOKENS, "temperature": 1, field: value}
    began = time.monotonic()
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=600)
    said = answer.json()
    seconds = time.monotonic() - began
    if answer.status_code == 200:
        return field, 200, said["usage"]["completion_tokens"] <= TOKENS, seconds
    return (
        field,
        answer.status_code,
        answer.status_code == 400 and bool(said["error"]["message"]),
        seconds,
    )


def attack(url: str, pid: int, requests: int, quiet: float, pause: float) -> list[str]:
    """Send all requests; return what went wrong."""
    for field, value in (("guided_regex", "[ab]+"), ("guided_json", {"type": "object"})):
        ask(url, field, value)
    beside = Beside(url)
    beside.start()
    time.sleep(5)
    beside.longest()
    time.sleep(quiet)
    alone = beside.longest()
    before = memory(pid)
    text = plain_text(url)
    with ThreadPoolExecutor(CLIENTS) as clients:
        answers = list(clients.map(lambda case: ask(url, *case), cases := hostile(requests)))
    disturbed = beside.longest()
    beside.ended = True
    beside.join()
    time.sleep(2)
    after = memory(pid)
    counts = Counter((field, status) for field, status, *_ in answers)
    for (field, status), count in sorted(counts.items()):
        print(f"{field:<16}{status} {count}")
    print(f"slowest answer {max(seconds for *_, seconds in answers):.1f} s")
    print(
        f"longest wait of the stream beside: {alone:.2f} s without hostile requests, {disturbed:.2f} s with them"
    )
    print(f"memory {before:.0f} MiB before, {after:.0f} MiB after")
    faults = [
        f"{case}: {answer}" for case, answer in zip(cases, answers, strict=True) if not answer[2]
    ]
    if plain_text(url) != text:
        faults.append("a text without a grammar is another one than before")
    if after - before > GROWTH:
        faults.append("memory has grown")
    if disturbed > alone + pause:
        faults.append("the stream beside waited")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--memory", type=int, default=4096, help="MiB of address space")
    parser.add_argument("--quiet", type=float, default=20.0, help="seconds of the stream alone")
    parser.add_argument("--pause", type=float, default=0.5)
    options = parser.parse_args()
    with serving(f"server.memory_limit_mib={options.memory}", "server.model_name=small") as (
        url,
        server,
    ):
        faults = attack(url, server.pid, options.requests, options.quiet, options.pause)
        if server.poll() is not None:
            faults.append(f"the server ended with {server.returncode}")
    for fault in faults[:20]:
        print(fault[:500], file=sys.stderr)
    print(f"{len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
