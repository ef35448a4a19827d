"""Fuzz the command line of every command: the result must be a checked configuration, or an error
message and exit code 2.

    python tests/robustness/fuzz_configs.py --lines 10000

Lines run in this process through `infer.utils.hydra_app.run_command` with a command that does
nothing, since a configuration is refused before anything is loaded. They are generated from the
fields of the option dataclasses. The generator knows which overrides are wrong; a line with one of
these must be refused.

Fails (exit code 1) on any other exit code (except 3: a folder cannot be created), a traceback, a
wrong override that is accepted, and an accepted number that is not finite.
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

from infer.main import INSTALLED_COMMANDS
from infer.utils.hydra_app import CONFIG_FOLDER, run_command
from infer.utils.options import iterate_leaf_values

OPTION_CLASSES = {
    name: command.import_options_class() for name, command in INSTALLED_COMMANDS.items()
}
CONFIG_GROUPS = [
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
TYPED_NUMBERS = [
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
NON_FINITE_NUMBERS = ["nan", "inf", "-inf", "NaN", ".nan", ".inf", "1e999"]
# By the type of an option.
WRONG_VALUES_BY_TYPE = {
    int: ["abc", "1.5", "[1]", "{a: 1}", "true", *NON_FINITE_NUMBERS],
    float: ["abc", "[1]", "{a: 1}", *NON_FINITE_NUMBERS],
    bool: ["abc", "[true]", "2.5", "nan"],
    list: ["7", "{a: 1}", "abc", "true"],
}
HOSTILE_TEXTS = [
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


def list_option_fields(options_class: type, prefix: str = "") -> dict[str, Field]:
    """Return the fields of an option dataclass and of nested ones, by dotted name."""
    keys = {}
    for field in fields(options_class):
        name = prefix + field.name
        keys |= (
            list_option_fields(field.type, f"{name}.")
            if is_dataclass(field.type)
            else {name: field}
        )
    return keys


def get_plain_types(plain_type: object) -> set[type]:
    """Return the types that an option accepts besides None, without their arguments."""
    union = typing.get_origin(plain_type) in (types.UnionType, typing.Union)
    every = typing.get_args(plain_type) if union else (plain_type,)
    return {typing.get_origin(each) or each for each in every} - {type(None)}


class CommandLineGenerator:
    """Generator of command lines.

    With each override it returns an expectation: False if it is wrong, None if that depends.
    """

    def __init__(self, seed: int) -> None:
        self.random_numbers = random.Random(seed)
        self.keys = {
            name: list(list_option_fields(schema).items())
            for name, schema in OPTION_CLASSES.items()
        }

    def generate_line(self) -> tuple[str, list[str], list[bool | None]]:
        """Return a command, its overrides, and their expectations."""
        name = self.random_numbers.choice(list(OPTION_CLASSES))
        overrides = [
            self.generate_override(*self.random_numbers.choice(self.keys[name]))
            for _ in range(self.random_numbers.choice([1, 1, 1, 2, 3]))
        ]
        return name, [text for text, _ in overrides], [expectation for _, expectation in overrides]

    def generate_override(self, key: str, field) -> tuple[str, bool | None]:
        generators = (
            self.override_wrong_type,
            self.override_number,
            self.override_hostile_text,
            self.override_unknown_key,
            self.override_group,
            self.random_text,
        )
        (generate,) = self.random_numbers.choices(generators, (25, 20, 25, 8, 5, 6))
        return generate(key, get_plain_types(field.type))

    def override_wrong_type(self, key: str, kinds: set[type]) -> tuple[str, bool | None]:
        plain_type = next(iter(kinds)) if len(kinds) == 1 else None
        return (
            (f"{key}={self.random_numbers.choice(WRONG_VALUES_BY_TYPE[plain_type])}", False)
            if plain_type in WRONG_VALUES_BY_TYPE
            else (f"{key}={{a: 1}}", None)
        )

    def override_number(self, key: str, kinds: set[type]) -> tuple[str, bool | None]:
        return f"{key}={self.random_numbers.choice(TYPED_NUMBERS)}", None

    def override_hostile_text(self, key: str, kinds: set[type]) -> tuple[str, bool | None]:
        text = self.random_numbers.choice(HOSTILE_TEXTS)
        looked_up = "oc.env" in text and not kinds & {
            str,
            list,
            dict,
        }  # in texts it is a text like any other
        return (
            f"{self.random_numbers.choice(['', '', '+', '++'])}{key}={text}",
            False if looked_up else None,
        )

    def override_unknown_key(self, key: str, kinds: set[type]) -> tuple[str, bool | None]:
        choices = [
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
        prefix = self.random_numbers.choice(["", "+", "++"])
        name = self.random_numbers.choice(choices)
        value = self.random_numbers.choice(["1", "x", "null"])
        return f"{prefix}{name}={value}", False

    def override_group(self, key: str, kinds: set[type]) -> tuple[str, bool | None]:
        group = self.random_numbers.choice(CONFIG_GROUPS)
        choices = [
            *(file.stem for file in (CONFIG_FOLDER / group).glob("*.yaml")),
            "nope",
            "../train",
            "/etc/passwd",
            "",
            "null",
            "[a,b]",
            "a" * 3000,
            "${name}",
        ]
        prefix = self.random_numbers.choice(["", "+", "~", "++"])
        return f"{prefix}{group}={self.random_numbers.choice(choices)}", None

    def random_text(self, key: str, kinds: set[type]) -> tuple[str, bool | None]:
        letters = "abc=.${}[](),:+~@/\\'\" \n\té\u202e0123-_*&!%#"
        text = "".join(
            self.random_numbers.choice(letters) for _ in range(self.random_numbers.randrange(1, 40))
        )
        return text if not text.startswith("-") else f"x{text}", None


def check_line(
    name: str, line: list[str], expectations: list[bool | None]
) -> tuple[bool, list[str]]:
    """Run a line; return whether it was accepted, and the failures."""
    accepted = []
    failures = []
    stderr = io.StringIO()
    stdout = io.StringIO()
    code = 0
    try:
        with redirect_stderr(stderr), redirect_stdout(stdout):
            run_command(name, OPTION_CLASSES[name], accepted.append, line)
    except SystemExit as exit_error:
        code = exit_error.code
    except BaseException as error:
        return False, [f"{type(error).__name__}: {str(error)[:300]}"]
    message = stderr.getvalue()
    if accepted:
        for key, value in iterate_leaf_values(asdict(accepted[0])):
            if isinstance(value, float) and not abs(value) < float("inf"):
                failures.append(f"{key}={value} passes")
        last = {
            override.split("=")[0].lstrip("+~"): expectation
            for override, expectation in zip(line, expectations, strict=False)
        }
        if False in last.values():  # what stands further left is not looked at
            failures.append("a mistake passes")
    elif code not in (2, 3) or not message.startswith("error: ") or "Traceback" in message:
        failures.append(f"exit code {code}, no sentence: {message[:300]!r}")
    return bool(accepted), failures


def fuzz_lines(lines: int, seed: int) -> tuple[Counter, list[str]]:
    """Run random lines; return how many were accepted and refused, and the failures."""
    os.chdir(tempfile.mkdtemp())  # folders that a line names may be created here
    generator = CommandLineGenerator(seed)
    counts = Counter()
    failures = []
    for _ in range(lines):
        name, line, expectations = generator.generate_line()
        accepted, line_failures = check_line(name, line, expectations)
        counts["taken" if accepted else "refused"] += 1
        for failure in line_failures:
            failures.append(f"{name} {line!r:.400}: {failure}")
            print(failures[-1], flush=True)
    return counts, failures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    start_time = time.monotonic()
    counts, failures = fuzz_lines(args.lines, args.seed)
    torch = "loaded" if "torch" in sys.modules else "not loaded"
    print(
        f"{args.lines} command lines over {len(OPTION_CLASSES)} commands in "
        f"{time.monotonic() - start_time:.0f} s"
    )
    print(f"{counts['taken']} taken, {counts['refused']} refused in one sentence with exit code 2")
    print(f"{len(failures)} faults; torch was {torch}")
    raise SystemExit(1 if failures or torch == "loaded" else 0)


if __name__ == "__main__":
    main()
