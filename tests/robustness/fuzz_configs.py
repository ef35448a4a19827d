"""Fuzzes the command line of every command: whatever is typed, a checked configuration or one sentence and exit code 2.

    python tests/robustness/fuzz_configs.py --lines 10000

In this process, through `infer.utils.entry.entry` with a command that does nothing: a configuration is refused before
anything is loaded. A plain generator over the fields of the dataclasses: what is typed wrongly is known
there, so that a line with such a part must be refused and a line without must not.

Fails (exit code 1) on any other exit, several lines of error, a value of another type than its field's, a number that
is none, a known mistake that passes, a good line that does not, and the environment's secret in a value or a message.
"""

import argparse
import io
import os
import random
import sys
import time
import types
import typing
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, fields, is_dataclass

from infer.main import COMMANDS
from infer.utils.entry import entry
from infer.utils.overrides import keys_of, options_of, values

SCHEMAS = {name: command.options_class() for name, command in COMMANDS.items() if command.conf is None}
TEXTS = {key for schema in SCHEMAS.values() for key, it in keys_of(schema).items() if it.type in (str, str | None)}
SECRET = "secret-7f3a"
GROUPS = ["target", "drafter", "data", "objective", "optim", "evaluation", "deepspeed", "decoding", "model"]

WHOLE = ["-1", "0", "-0", "1", "2", "7", "64", "4096", "2147483648", "4611686018427387904", "9" * 30, "1_000"]
REAL = ["-1.0", "0.0", "-0.0", "1e-9", "0.5", "0.9999", "1.0", "3.5", "1e30", "1e308", "1e-320"]
NO_NUMBERS = ["nan", "inf", "-inf", "NaN", ".nan", ".inf", "1e999", "-1e999"]
HOSTILE = [
    *("${oc.env:FUZZ_SECRET}", "${oc.env:FUZZ_SECRET,x}", "${oc.decode:${oc.env:FUZZ_SECRET}}", "${hydra:runtime.cwd}"),
    *("${${x}:FUZZ_SECRET}", "${nothing}", "${name}", "${", "}", "${now:%Y}", "${oc.select:name}", "${.}", "${..}"),
    *(
        "a" * 5000,
        "é" * 300,
        "\U0001f600",
        "\u202e",
        "\udcff",
        "\0",
        "a\nb",
        "\r\n",
        "\t",
        "'",
        '"',
        "\\",
        "\\'",
        "%s%n",
    ),
    *("{_target_: os.system}", "{_target_: builtins.exec, _args_: [1]}", "[", "[[[[", "{", "{a: {a: {a: 1}}}", "[1,2"),
    *("null", "~", "true", "???", "!!python/object:os.system", "&a", "*a", "choice(1,2)", "range(3)", "1,2", "glob(*)"),
    *(
        "int(x)",
        "str(1)",
        "sort(3,1)",
        "shuffle(1)",
        "extend_list(1)",
        "../../etc/passwd",
        "$(id)",
        "`id`",
        "; id",
        " ",
    ),
    "[" * 200 + "]" * 200,
    *("0x10", "1e5", "0b1", "1__0", "+1", "١", "--", "-", "=", "==", "@", "a@b", "a.b.c", ".", "..", "/", "/dev/null"),
]


def leaves(schema: type, name: str = "") -> Iterator[tuple[str, type, object]]:
    """(key, type, default) of every field that is no dataclass."""
    hints = typing.get_type_hints(schema)
    instance = schema()
    for field in fields(schema):
        key = f"{name}.{field.name}" if name else field.name
        if is_dataclass(hints[field.name]):
            yield from leaves(hints[field.name], key)
        else:
            yield key, hints[field.name], getattr(instance, field.name)


def fits(value: object, kind: type) -> bool:
    """Whether a value is of a field's type, exactly: true is no number."""
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return any(fits(value, one) for one in inside)
    if origin in (list, tuple):
        each = [one for one in inside if one is not Ellipsis]
        return isinstance(value, (list, tuple)) and all(any(fits(item, one) for one in each) for item in value)
    if origin is dict:
        return isinstance(value, dict)
    if kind is type(None):
        return value is None
    return is_dataclass(kind) or type(value) is kind


def quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'" if not text.endswith("\\") else "''"


def shown(value: object) -> str | None:
    """A default as one would type it; None for what cannot be typed briefly."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, (list, tuple)) and all(isinstance(item, (int, float, str)) for item in value):
        return "[" + ",".join(map(str, map(shown, value))) + "]"
    return None


def base(kind: type) -> set[type]:
    """The plain types that a field takes."""
    inside = typing.get_args(kind)
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return set().union(*(base(one) for one in inside))
    return {typing.get_origin(kind) or kind}


class Typist:
    """Writes command lines, and knows of each part whether it is right (True), wrong (False), or depends (None)."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.leaves = {name: list(leaves(schema)) for name, schema in SCHEMAS.items()}
        self.names = list(SCHEMAS)

    def line(self) -> tuple[str, list[str], list[bool | None]]:
        """A command, its overrides, and what is known of them."""
        name = self.dice.choice(self.names)
        parts = [self.part(name) for _ in range(self.dice.choice([1, 1, 1, 2, 3]))]
        return name, [text for text, _ in parts], [right for _, right in parts]

    def part(self, name: str) -> tuple[str, bool | None]:
        key, kind, default = self.dice.choice(self.leaves[name])
        ways = (self.default, self.wrong_type, self.number, self.hostile, self.unknown, self.group, self.noise)
        (way,) = self.dice.choices(ways, (25, 20, 20, 20, 8, 5, 6))
        return way(key, kind, default)

    def default(self, key: str, kind: type, default: object) -> tuple[str, bool | None]:
        text = shown(default)
        # a preset may need another value beside the default: only single fields of commands without presets are sure
        return (f"{key}={text}", None) if text is not None else (f"{key}=1", None)

    def wrong_type(self, key: str, kind: type, default: object) -> tuple[str, bool | None]:
        plain = base(kind)
        if plain <= {int, type(None)}:
            return f"{key}={self.dice.choice(['abc', '1.5', '[1]', '{a: 1}', 'true', *NO_NUMBERS])}", False
        if plain <= {float, type(None)}:
            return f"{key}={self.dice.choice(['abc', '[1]', '{a: 1}', *NO_NUMBERS])}", False
        if plain <= {bool, type(None)}:
            return f"{key}={self.dice.choice(['abc', '[true]', '2.5', 'nan'])}", False
        if plain <= {list, tuple}:
            return f"{key}={self.dice.choice(['7', '{a: 1}', 'abc', 'true'])}", False
        if plain <= {str, type(None)}:  # a text is taken as it is typed
            return f"{key}={self.dice.choice(['[1]', '{a: 1}', '[[a]]'])}", None
        return f"{key}={{a: 1}}", None

    def number(self, key: str, kind: type, default: object) -> tuple[str, bool | None]:
        return f"{key}={self.dice.choice(WHOLE + REAL)}", None

    def hostile(self, key: str, kind: type, default: object) -> tuple[str, bool | None]:
        text = self.dice.choice(HOSTILE)
        secret = "oc.env" in text and key not in TEXTS  # there it is a text like any other
        if self.dice.random() < 0.4:
            text = quoted(text)
        return f"{self.dice.choice(['', '', '', '+', '++'])}{key}={text}", False if secret else None

    def unknown(self, key: str, kind: type, default: object) -> tuple[str, bool | None]:
        some = ["nothing", f"{key}x", f"{key}.x", "_target_", "__class__", "a" * 3000, "é", "a.b.c.d", "optim.lrr"]
        sign = self.dice.choice(["", "+", "++"])
        return f"{sign}{self.dice.choice(some)}={self.dice.choice(['1', 'x', 'null'])}", False

    def group(self, key: str, kind: type, default: object) -> tuple[str, bool | None]:
        group = self.dice.choice(GROUPS)
        some = [*options_of(group), "nope", "../train", "/etc/passwd", "", "null", "[a,b]", "a" * 3000, "${name}"]
        return f"{self.dice.choice(['', '+', '~', '++'])}{group}={self.dice.choice(some)}", None

    def noise(self, key: str, kind: type, default: object) -> tuple[str, bool | None]:
        letters = "abc=.${}[](),:+~@/\\'\" \n\t\0é\u202e\udcff0123-_*&!%#"
        text = "".join(self.dice.choice(letters) for _ in range(self.dice.randrange(1, 40)))
        return text if not text.startswith("-") else f"x{text}", None


def judge(name: str, line: list[str], known: list[bool | None]) -> tuple[bool, list[str]]:
    """Whether the line was taken, and what is wrong with how it was met."""
    taken, faults, told, said = [], [], io.StringIO(), io.StringIO()
    code = 0
    try:
        with redirect_stderr(told), redirect_stdout(said):
            entry(name, SCHEMAS[name], taken.append, line)
    except SystemExit as left:
        code = left.code
    except BaseException as error:
        return False, [f"{type(error).__name__}: {str(error)[:300]}"]
    message = told.getvalue()
    if SECRET in message or SECRET in said.getvalue():
        faults.append("shows the environment")
    if taken:
        if code or message.strip():
            faults.append(f"taken, but says {message[:300]!r}")
        for key, value in values(asdict(taken[0])):
            if SECRET in str(value):
                faults.append(f"{key} holds the environment")
            if isinstance(value, float) and not abs(value) < float("inf"):
                faults.append(f"{key}={value} passes")
        for key, kind, _ in leaves(SCHEMAS[name]):
            value = taken[0]
            for part in key.split("."):
                value = getattr(value, part)
            if not fits(value, kind):
                faults.append(f"{key}={value!r} is no {kind}")
        last = {override.split("=")[0].lstrip("+~"): right for override, right in zip(line, known, strict=False)}
        if False in last.values():  # what stands further left is not looked at
            faults.append("a mistake passes")
    else:
        if code != 2:
            faults.append(f"exit code {code}")
        if not message.startswith("error: ") or len(message.splitlines()) != 1 or not 8 < len(message) < 700:
            faults.append(f"no sentence: {message[:300]!r}")
        if all(known):
            faults.append(f"a good line is refused: {message[:300]!r}")
    return bool(taken), faults


def fuzz(lines: int, seed: int) -> tuple[Counter, list[str]]:
    """Types so many lines; returns how many were taken and refused, and the faults."""
    os.environ["FUZZ_SECRET"] = SECRET
    typist, counts, faults = Typist(seed), Counter(), []
    for name in SCHEMAS:  # what is there must go on working
        taken, wrong = judge(name, [], [True])
        faults += [f"{name}: {fault}" for fault in wrong]
    for number in range(lines):
        if number and number % 500 == 0:
            print(f"{number} lines, {counts['taken']} taken, {len(faults)} faults", flush=True)
        name, line, known = typist.line()
        taken, wrong = judge(name, line, known)
        counts["taken" if taken else "refused"] += 1
        for fault in wrong:
            faults.append(f"{name} {line!r:.400}: {fault}")
            print(faults[-1], flush=True)
    return counts, faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    began = time.monotonic()
    counts, faults = fuzz(args.lines, args.seed)
    torch = "loaded" if "torch" in sys.modules else "not loaded"
    print(f"{args.lines} command lines over {len(SCHEMAS)} commands in {time.monotonic() - began:.0f} s")
    print(f"{counts['taken']} taken, {counts['refused']} refused in one sentence with exit code 2")
    print(f"{len(faults)} faults; torch was {torch}")
    raise SystemExit(1 if faults or torch == "loaded" else 0)


if __name__ == "__main__":
    main()
