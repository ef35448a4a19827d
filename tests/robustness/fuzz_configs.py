"""Fuzzes the command line of every command: whatever is typed, a checked configuration or a message
and exit code 2.

    python tests/robustness/fuzz_configs.py --lines 10000

In this process, through `infer.utils.hydra_app.run_command` with a command that does nothing: a
configuration is refused before anything is loaded. A plain generator over the fields of the
dataclasses: what is typed wrongly is known there, so that a line with such a part must be refused.

Fails (exit code 1) on any other exit (3 is a folder that cannot be made), a traceback, a known
mistake that passes, and a number that is none.
"""

import argparse
import io
import os
import random
import sys
import tempfile
import time
import types
import typing
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import Field, asdict, fields, is_dataclass

from infer.main import COMMANDS
from infer.utils.hydra_app import CONF, run_command
from infer.utils.options import leaf_values

SCHEMAS = {name: command.options_class() for name, command in COMMANDS.items()}
GROUPS = [
    "target",
    "drafter",
    "data",
    "objective",
    "optim",
    "evaluation",
    "deepspeed",
    "decoding",
    "model",
]
NUMBERS = [
    "-1",
    "0",
    "-0",
    "2",
    "64",
    "4611686018427387904",
    "9" * 30,
    "1_000",
    "-1.0",
    "1e-9",
    "0.5",
    "1e30",
    "1e308",
]
NO_NUMBERS = ["nan", "inf", "-inf", "NaN", ".nan", ".inf", "1e999"]
WRONG = {  # by what a key takes besides null
    int: ["abc", "1.5", "[1]", "{a: 1}", "true", *NO_NUMBERS],
    float: ["abc", "[1]", "{a: 1}", *NO_NUMBERS],
    bool: ["abc", "[true]", "2.5", "nan"],
    list: ["7", "{a: 1}", "abc", "true"],
}
HOSTILE = [
    *(
        "${oc.env:FUZZ_SECRET}",
        "${oc.env:FUZZ_SECRET,x}",
        "${oc.decode:${oc.env:FUZZ_SECRET}}",
        "${hydra:runtime.cwd}",
    ),
    *(
        "${${x}:FUZZ_SECRET}",
        "${nothing}",
        "${name}",
        "${",
        "}",
        "${now:%Y}",
        "${oc.select:name}",
        "${.}",
        "${..}",
    ),
    *(
        "a" * 5000,
        "é" * 300,
        "\U0001f600",
        "\u202e",
        "a\nb",
        "\r\n",
        "\t",
        "'",
        '"',
        "\\",
        "\\'",
        "%s%n",
    ),
    *(
        "{_target_: os.system}",
        "{_target_: builtins.exec, _args_: [1]}",
        "[",
        "[[[[",
        "{",
        "{a: {a: {a: 1}}}",
        "[1,2",
    ),
    *(
        "null",
        "~",
        "true",
        "!!python/object:os.system",
        "&a",
        "*a",
        "choice(1,2)",
        "range(3)",
        "1,2",
        "glob(*)",
    ),
    *(
        "../../etc/passwd",
        "$(id)",
        "`id`",
        "; id",
        " ",
        "[" * 200 + "]" * 200,
        "0x10",
        "1e5",
        "+1",
        "١",
        "--",
        "=",
    ),
    *("@", "a@b", "a.b.c", ".", "..", "/", "/dev/null"),
]


def keys_of(options_class: type, prefix: str = "") -> dict[str, Field]:
    """The keys of a dataclass of options by their dotted names, those of its parts with them."""
    keys = {}
    for field in fields(options_class):
        name = prefix + field.name
        keys |= keys_of(field.type, f"{name}.") if is_dataclass(field.type) else {name: field}
    return keys


def takes(kind: object) -> set[type]:
    """The plain types that a key takes besides null."""
    union = typing.get_origin(kind) in (types.UnionType, typing.Union)
    every = typing.get_args(kind) if union else (kind,)
    return {typing.get_origin(each) or each for each in every} - {type(None)}


class Typist:
    """Writes command lines, and knows of each part whether it is wrong (False) or depends
    (None)."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.keys = {name: list(keys_of(schema).items()) for name, schema in SCHEMAS.items()}

    def line(self) -> tuple[str, list[str], list[bool | None]]:
        """A command, its overrides, and what is known of them."""
        name = self.dice.choice(list(SCHEMAS))
        parts = [
            self.part(*self.dice.choice(self.keys[name]))
            for _ in range(self.dice.choice([1, 1, 1, 2, 3]))
        ]
        return name, [text for text, _ in parts], [right for _, right in parts]

    def part(self, key: str, field) -> tuple[str, bool | None]:
        ways = (self.wrong_type, self.number, self.hostile, self.unknown, self.group, self.noise)
        (way,) = self.dice.choices(ways, (25, 20, 25, 8, 5, 6))
        return way(key, takes(field.type))

    def wrong_type(self, key: str, kinds: set[type]) -> tuple[str, bool | None]:
        kind = next(iter(kinds)) if len(kinds) == 1 else None
        return (
            (f"{key}={self.dice.choice(WRONG[kind])}", False)
            if kind in WRONG
            else (f"{key}={{a: 1}}", None)
        )

    def number(self, key: str, kinds: set[type]) -> tuple[str, bool | None]:
        return f"{key}={self.dice.choice(NUMBERS)}", None

    def hostile(self, key: str, kinds: set[type]) -> tuple[str, bool | None]:
        text = self.dice.choice(HOSTILE)
        looked_up = "oc.env" in text and not kinds & {
            str,
            list,
            dict,
        }  # in texts it is a text like any other
        return f"{self.dice.choice(['', '', '+', '++'])}{key}={text}", False if looked_up else None

    def unknown(self, key: str, kinds: set[type]) -> tuple[str, bool | None]:
        some = [
            "nothing",
            f"{key}x",
            f"{key}.x.y",
            "_target_",
            "__class__",
            "a" * 3000,
            "é",
            "a.b.c.d",
            "optim.lrr",
        ]
        return (
            f"{self.dice.choice(['', '+', '++'])}{self.dice.choice(some)}={self.dice.choice(['1', 'x', 'null'])}",
            False,
        )

    def group(self, key: str, kinds: set[type]) -> tuple[str, bool | None]:
        group = self.dice.choice(GROUPS)
        some = [
            *(file.stem for file in (CONF / group).glob("*.yaml")),
            "nope",
            "../train",
            "/etc/passwd",
            "",
            "null",
            "[a,b]",
            "a" * 3000,
            "${name}",
        ]
        return f"{self.dice.choice(['', '+', '~', '++'])}{group}={self.dice.choice(some)}", None

    def noise(self, key: str, kinds: set[type]) -> tuple[str, bool | None]:
        letters = "abc=.${}[](),:+~@/\\'\" \n\té\u202e0123-_*&!%#"
        text = "".join(self.dice.choice(letters) for _ in range(self.dice.randrange(1, 40)))
        return text if not text.startswith("-") else f"x{text}", None


def judge(name: str, line: list[str], known: list[bool | None]) -> tuple[bool, list[str]]:
    """Whether the line was taken, and what is wrong with how it was met."""
    taken = []
    faults = []
    told = io.StringIO()
    said = io.StringIO()
    code = 0
    try:
        with redirect_stderr(told), redirect_stdout(said):
            run_command(name, SCHEMAS[name], taken.append, line)
    except SystemExit as left:
        code = left.code
    except BaseException as error:
        return False, [f"{type(error).__name__}: {str(error)[:300]}"]
    message = told.getvalue()
    if taken:
        for key, value in leaf_values(asdict(taken[0])):
            if isinstance(value, float) and not abs(value) < float("inf"):
                faults.append(f"{key}={value} passes")
        last = {
            override.split("=")[0].lstrip("+~"): right
            for override, right in zip(line, known, strict=False)
        }
        if False in last.values():  # what stands further left is not looked at
            faults.append("a mistake passes")
    elif code not in (2, 3) or not message.startswith("error: ") or "Traceback" in message:
        faults.append(f"exit code {code}, no sentence: {message[:300]!r}")
    return bool(taken), faults


def fuzz(lines: int, seed: int) -> tuple[Counter, list[str]]:
    """Types so many lines; returns how many were taken and refused, and the faults."""
    os.chdir(tempfile.mkdtemp())  # where what is typed as a folder may be made
    typist = Typist(seed)
    counts = Counter()
    faults = []
    for _ in range(lines):
        name, line, known = typist.line()
        taken, wrong = judge(name, line, known)
        counts["taken" if taken else "refused"] += 1
        for fault in wrong:
            faults.append(f"{name} {line!r:.400}: {fault}")
            print(faults[-1], flush=True)
    return counts, faults


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    began = time.monotonic()
    counts, faults = fuzz(args.lines, args.seed)
    torch = "loaded" if "torch" in sys.modules else "not loaded"
    print(
        f"{args.lines} command lines over {len(SCHEMAS)} commands in {time.monotonic() - began:.0f} s"
    )
    print(f"{counts['taken']} taken, {counts['refused']} refused in one sentence with exit code 2")
    print(f"{len(faults)} faults; torch was {torch}")
    raise SystemExit(1 if faults or torch == "loaded" else 0)


if __name__ == "__main__":
    main()
