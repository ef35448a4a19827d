"""Send hostile expressions, schemas and grammars to a server with little address space.

    python tests/robustness/hostile_grammars.py --requests 200

They have repetition, nesting, alternation, recursion, Unicode classes, or are no grammars. Another
client streams completions meanwhile. Fails (exit code 1) if a request is not answered with 200 and
at most the requested tokens, or with 400 and a message; if an output without a grammar changes; if
the server's memory grows by more than 100 MiB; or if the longest pause of the stream grows by more
than `--pause` seconds.
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
from server import read_memory_mib, run_server

MAX_MEMORY_GROWTH_MIB = 100  # MiB
ATTACK_CLIENTS = 4
GRAMMAR_ANSWER_TOKENS = 24


def generate_regexes(random_numbers: random.Random) -> Iterator[str]:
    """Yield expressions."""
    letter = partial(random_numbers.choice, "abcxyz.")
    pick_repetitions = partial(random_numbers.choice, [1000, 30_000, 3_000_000, 10**9])
    yield from (
        "a{3000000}",
        "(((((a{100}){100}){100}){100}){100})",
        "(x|y)a{3000000}",
        "[ab]{3000000}",
        "(a|b){0,3000000}c",
    )
    for _ in range(9):
        yield f"{letter()}{{{pick_repetitions()}}}"
        yield f"({letter()}|{letter()}{letter()}){{{pick_repetitions()},{4 * pick_repetitions()}}}"
        inner = letter()
        for _ in range(random_numbers.randrange(2, 9)):
            inner = f"({inner}{{{random_numbers.choice(['0,100', '100', '1,9', '50,', '1000'])}}})"
        yield inner
        yield f"(x|y)+{inner}"
        yield "(" * (depth := random_numbers.choice([50, 200, 5000, 30_000])) + "a" + ")" * depth
        yield "(" * (depth := random_numbers.choice([50, 200, 5000, 10_000])) + "a" + "?)+" * depth
        yield "|".join(
            "".join(random_numbers.choices("abcdef", k=8))
            for _ in range(random_numbers.choice([100, 1000, 7000]))
        )
        yield (
            "("
            + "|".join(
                f"{letter()}*{letter()}{letter()}"
                for _ in range(random_numbers.choice([20, 500, 4000]))
            )
            + ")*"
        )
        yield f"(.*{letter()}){{{random_numbers.choice([10, 100, 1000, 100000])}}}"
        yield f"[ab]*a[ab]{{{random_numbers.choice([10, 30, 300, 3000])}}}"  # 2^n states
        yield f"(\\p{{L}}|\\p{{N}}|{letter()}){{{pick_repetitions()}}}"
        yield f"[\\w&&[^{letter()}]]*\\W{{{random_numbers.choice([5, 500, 100000])}}}"
        yield f"(\\p{{Lu}}\\p{{Ll}}*\\s?){{{pick_repetitions()}}}"
        yield (
            "["
            + "".join(
                chr(random_numbers.randrange(0x100, 0xD000))
                for _ in range(random_numbers.choice([100, 3000]))
            )
            + "]*"
            + "é" * 300
        )
        yield "(" + "a?" * (n := random_numbers.choice([30, 1000, 20_000])) + "a" * n + ")*"
        yield "".join(f"(?:{letter()}+)+" for _ in range(random_numbers.choice([10, 1000, 8000])))
        yield "x" * random_numbers.choice([1000, 60_000])


def generate_schemas(random_numbers: random.Random) -> Iterator[object]:
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

    pick_repetitions = partial(random_numbers.choice, [1000, 100_000, 3_000_000, 10**12])
    chain = {f"a{i}": {"$ref": f"#/$defs/a{(i + 1) % 400}"} for i in range(400)}
    yield {"$ref": "#/$defs/a0", "$defs": chain}
    for reference in ("#", "http://127.0.0.1:1/x.json"):
        yield {"type": "array", "items": {"$ref": reference}, "minItems": 3}
    for _ in range(5):
        for kind in ("object", "array", "anyOf", "allOf", "not"):
            yield nested(random_numbers.choice([20, 100, 150]), kind)
        yield {"type": "string", "minLength": pick_repetitions(), "maxLength": 2 * 10**12}
        yield {"type": "string", "pattern": f"^(a{{{pick_repetitions()}}}|b)*$"}
        yield {"type": "array", "items": {"type": "integer"}, "minItems": pick_repetitions()}
        yield {
            "type": "array",
            "items": {"const": "x"},
            "minItems": pick_repetitions(),
            "uniqueItems": True,
        }
        yield {
            "type": "integer",
            "minimum": -(10 ** random_numbers.choice([10, 300])),
            "maximum": 10 ** random_numbers.choice([10, 300]),
            "multipleOf": random_numbers.choice([7, 10**9 + 7]),
        }
        yield {"type": "number", "multipleOf": 1e-300}
        yield {
            "enum": [
                "x" * random_numbers.randrange(1, 40) + str(i)
                for i in range(random_numbers.choice([10, 5000]))
            ]
        }
        yield {"const": "x" * random_numbers.choice([3000, 50_000])}
        yield {
            "type": "object",
            "properties": {
                f"p{i}": {"type": "string"} for i in range(random_numbers.choice([50, 1500]))
            },
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
                for i in range(random_numbers.choice([30, 400]))
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
            "format": random_numbers.choice(
                ["date-time", "email", "ipv6", "uri", "uuid", "nonsense"]
            ),
            "maxLength": 10**9,
        }


def generate_grammars(random_numbers: random.Random) -> Iterator[str]:
    """Yield grammars in Lark's syntax."""
    yield "start: a\na: b\nb: a"
    yield "start: A\nA: A"
    yield 'start: %json {"$ref": "#"}'
    for _ in range(5):
        n = random_numbers.choice([20, 40, 2000])
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
        yield "start: " + "(" * (d := random_numbers.choice([100, 3000, 30_000])) + '"a"' + ")" * d
        yield f'start: "a"{{{random_numbers.choice([1000, 100_000, 3_000_000])}}}'
        repeats = random_numbers.choice([1000, 100_000])
        yield f"start: x{{{repeats}}}\nx: y{{1000}}\ny: /[a-z]/{{1000}}"
        yield "start: " + " | ".join(
            f'"{i}" start' for i in range(random_numbers.choice([50, 3000]))
        )
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


def generate_broken_values(random_numbers: random.Random) -> Iterator[str]:
    """Yield what is no grammar of any kind."""
    for size in (1, 30, 2000):
        for end in ("", "(" * 20_000, "\\"):
            yield (
                "".join(random_numbers.choices(string.printable + "é\u2028\U0001f600", k=size))
                + end
            )


def build_hostile_cases(count: int, seed: int = 0) -> list[tuple[str, object]]:
    """Return (request field, value) of hostile requests, the worst known ones first."""
    random_numbers = random.Random(seed)
    kinds = {
        "guided_regex": list(generate_regexes(random_numbers)),
        "guided_json": list(generate_schemas(random_numbers)),
        "guided_grammar": list(generate_grammars(random_numbers)),
    }
    cases = [
        (field, value)
        for field, values in kinds.items()
        for value in [*values, *generate_broken_values(random_numbers)]
    ]
    first = cases[:5]
    remaining_cases = cases[5:]
    random_numbers.shuffle(remaining_cases)
    return (first + remaining_cases)[:count]


class StreamingClient(threading.Thread):
    """Client that streams one completion after the other and records the pauses between events."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url = url
        self.pauses = []
        self.is_stopped = False

    def run(self) -> None:
        body = {"prompt": "def read(", "max_tokens": 1000, "temperature": 1, "stream": True}
        while not self.is_stopped:
            before = time.monotonic()
            with httpx.stream(
                "POST", f"{self.url}/v1/completions", json=body, timeout=600
            ) as answer:
                for _ in answer.iter_lines():
                    now = time.monotonic()
                    self.pauses.append(now - before)
                    before = now
                    if self.is_stopped:
                        break

    def pop_longest_pause(self) -> float:
        """Return the longest pause since the last call."""
        pauses = self.pauses
        self.pauses = []
        return max(pauses)


def generate_without_grammar(url: str) -> str:
    """Return the server's output without a grammar."""
    body = {"prompt": "x = ", "max_tokens": GRAMMAR_ANSWER_TOKENS, "temperature": 0}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=600).json()["choices"][0]["text"]


def send_grammar_request(url: str, field: str, value: object) -> tuple[str, int, bool, float]:
    """Send a request with a grammar; return (field, status, is the answer valid, seconds)."""
    body = {"prompt": "x = ", "max_tokens": GRAMMAR_ANSWER_TOKENS, "temperature": 1, field: value}
    start_time = time.monotonic()
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=600)
    reply_json = answer.json()
    seconds = time.monotonic() - start_time
    if answer.status_code == 200:
        return (
            field,
            200,
            reply_json["usage"]["completion_tokens"] <= GRAMMAR_ANSWER_TOKENS,
            seconds,
        )
    return (
        field,
        answer.status_code,
        answer.status_code == 400 and bool(reply_json["error"]["message"]),
        seconds,
    )


def attack_server(url: str, pid: int, requests: int, quiet: float, pause: float) -> list[str]:
    """Send all requests; return the failures."""
    for field, value in (("guided_regex", "[ab]+"), ("guided_json", {"type": "object"})):
        send_grammar_request(url, field, value)
    stream_client = StreamingClient(url)
    stream_client.start()
    time.sleep(5)
    stream_client.pop_longest_pause()
    time.sleep(quiet)
    pause_alone = stream_client.pop_longest_pause()
    before = read_memory_mib(pid)
    text = generate_without_grammar(url)
    with ThreadPoolExecutor(ATTACK_CLIENTS) as clients:
        answers = list(
            clients.map(
                lambda case: send_grammar_request(url, *case),
                cases := build_hostile_cases(requests),
            )
        )
    pause_under_attack = stream_client.pop_longest_pause()
    stream_client.is_stopped = True
    stream_client.join()
    time.sleep(2)
    after = read_memory_mib(pid)
    counts = Counter((field, status) for field, status, *_ in answers)
    for (field, status), count in sorted(counts.items()):
        print(f"{field:<16}{status} {count}")
    print(f"slowest answer {max(seconds for *_, seconds in answers):.1f} s")
    print(
        f"longest wait of the stream beside: {pause_alone:.2f} s without hostile requests, "
        f"{pause_under_attack:.2f} s with them"
    )
    print(f"memory {before:.0f} MiB before, {after:.0f} MiB after")
    failures = [
        f"{case}: {answer}" for case, answer in zip(cases, answers, strict=True) if not answer[2]
    ]
    if generate_without_grammar(url) != text:
        failures.append("a text without a grammar is another one than before")
    if after - before > MAX_MEMORY_GROWTH_MIB:
        failures.append("memory has grown")
    if pause_under_attack > pause_alone + pause:
        failures.append("the stream beside waited")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--memory", type=int, default=4096, help="MiB of address space")
    parser.add_argument("--quiet", type=float, default=20.0, help="seconds of the stream alone")
    parser.add_argument("--pause", type=float, default=0.5)
    options = parser.parse_args()
    with run_server(f"server.memory_limit_mib={options.memory}", "server.model_name=small") as (
        url,
        server,
    ):
        failures = attack_server(url, server.pid, options.requests, options.quiet, options.pause)
        if server.poll() is not None:
            failures.append(f"the server ended with {server.returncode}")
    for failure in failures[:20]:
        print(failure[:500], file=sys.stderr)
    print(f"{len(failures)} faults")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
