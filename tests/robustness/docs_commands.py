"""Takes every command out of README and docs, and runs it as it is written.

    python tests/robustness/docs_commands.py --list
    python tests/robustness/docs_commands.py --compose
    python tests/robustness/docs_commands.py --checkpoint runs/embedded-dflash/checkpoints/best

Commands of the embedded default whose time is bounded (`RUN`) are run in a copy of the working tree, where `runs/` has
the given checkpoint. All others, which need a hub, a GPU, an engine, a person or hours, are composed: the configuration
that they stand for is made and checked, without anything being loaded. Words in <> or capitals and `...` stand for what
a reader fills in; something real takes their place here. The tests' own commands, and those of the toys of
docs/extending.md, which tests/test_extending.py runs, are listed.

Fails (exit code 1) if a command that is run ends with another code than 0, or a composed one is refused.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from data.suites import BY_NAME
from infer.main import COMMANDS
from infer.utils.entry import composed

REPO = Path(__file__).resolve().parent.parent.parent
FILES = ("README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted((REPO / "docs").glob("*.md"))))
START = re.compile(r"^(?:[A-Z_]+=\S+ )*(?:\./launch\.sh|blockdraft|python (?:train|infer)/main\.py)(?: |$)")
# What is run: the command's name, and what its line must not hold. `serve` and `chat` wait for people; training,
# pretraining and diffusion take minutes to hours.
RUN = {"help", "check", "generate", "eval", "compare", "export", "ngram", "plan"}
FOREIGN = (
    "model=",
    "target=",
    "target.path=",
    "suite=",
    "trie=",
    "hub-name",
    "/path",
    "data=jsonl",
    "runs/mine",
    "license=",
    "path=mine",
)
ONCE = ["evaluation.repeats=1", "evaluation.sampled=null"]
SHORT = ["evaluation.prompts=1", "evaluation.max_new_tokens=8", "evaluation.budgets=[4]", "evaluation.outside=0", *ONCE]
BOUNDED = {  # what keeps a run short, where the command says nothing of it
    "eval": SHORT,
    "compare": SHORT,
    "generate": ["decoding.max_new_tokens=8"],
    "ngram": ["data.limit=20"],
}


@dataclass(frozen=True)
class Found:
    """A command where it stands."""

    file: str
    line: int
    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(re.sub(r"<[^<>]*>", "...", self.text), comments=True)

    @property
    def is_pattern(self) -> bool:
        """Whether it stands for any command, or for one of a toy that tests/test_extending.py runs."""
        return bool(re.search(r"COMMAND|\[overrides\]", self.text)) or self.file == "docs/extending.md"

    @property
    def name(self) -> str:
        """The command's name; train where there is none."""
        rest = self.arguments_with_name
        return rest[0] if rest and (rest[0] in COMMANDS or rest[0] in ("help", "test")) else "train"

    @property
    def arguments_with_name(self) -> list[str]:
        words = [word for word in self.words if not re.fullmatch(r"[A-Z_]+=\S*", word)]
        return words[2:] if words[0] == "python" else words[1:]

    @property
    def arguments(self) -> list[str]:
        rest = self.arguments_with_name
        return rest[1:] if rest and rest[0] == self.name else rest


def commands() -> list[Found]:
    """Return the commands of code blocks, and of single-line code within sentences that has arguments."""
    found = []
    for file in FILES:
        fenced, variables, held = False, {}, ""
        for number, line in enumerate((REPO / file).read_text(encoding="utf-8").splitlines(), 1):
            if line.startswith("```"):
                fenced, variables = not fenced, {}
                continue
            if not fenced:
                pieces = re.findall(
                    r"`((?:[A-Z_]+=\S+ )*(?:\./launch\.sh|blockdraft|python (?:train|infer)/main\.py) [^`]+)`", line
                )
                found += [Found(file, number, piece) for piece in pieces]
                continue
            if setting := re.fullmatch(r"([A-Z])=(\S+)", line):
                variables[f"${setting[1]}"] = setting[2]
                continue
            line = held + line
            if line.endswith("\\"):
                held = line[:-1]
                continue
            held = ""
            for name, value in variables.items():
                line = line.replace(name, value)
            if START.match(line):
                found.append(Found(file, number, line))
    return found


def filled(argument: str, stand_in: Path) -> str:
    """Return an argument with something real where a reader fills something in."""
    key, _, value = argument.partition("=")
    if key == "suite.folder" and not value.endswith(".jsonl"):
        return f"{key}={stand_in.parent}"
    if key in ("data.path", "path") or key in ("suite.folder", "features", "run", "trie"):
        return f"{key}={stand_in}"
    if value in ("...", "[...]") and key.startswith("checkpoint"):
        return f"{key}=" + (f"[{stand_in}]" if value == "[...]" else str(stand_in))
    if value == "...":
        return f"{key}=" + {"target": "qwen3-4b", "data": "stdlib", "drafter": "dflash"}.get(key, str(stand_in))
    return argument


def compose(found: Found, stand_in: Path) -> str | None:
    """Compose a command's configuration; return what is refused."""
    arguments = [filled(argument, stand_in) for argument in found.arguments if argument not in ("...", "--cfg", "job")]
    command = COMMANDS[found.name]
    if {"--multirun", "-m"} & set(arguments):
        from train.run.sweep import combinations

        runs = combinations(arguments)
    else:
        runs = [[argument for argument in arguments if not argument.startswith("--")]]
    try:
        for run in runs:
            composed(command.conf or found.name, command.options_class(), run)
    except ValueError as error:
        return str(error)
    return None


def runnable(found: Found) -> bool:
    """Return whether a command is run: it needs nothing but the embedded default, and little time."""
    rest = " ".join(found.arguments)
    placeholder = "..." in rest or "<" in rest or rest.endswith("=")
    return (
        found.name in RUN
        and not placeholder
        and not any(word in rest for word in FOREIGN)
        and "NPROC" not in found.text
    )


def run(found: Found, folder: Path, seconds: int) -> str | None:
    """Run a command in a copy of the tree; return how it failed."""
    arguments = [*found.arguments]
    given = {argument.split("=")[0] for argument in arguments}
    arguments += [more for more in BOUNDED.get(found.name, []) if more.split("=")[0] not in given]
    environment = os.environ | {"PYTHONPATH": str(folder), "LAUNCH_PYTHON": sys.executable, "HF_HUB_OFFLINE": "1"}
    line = ["bash", str(folder / "launch.sh"), found.name, *arguments]
    try:
        done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"took more than {seconds} s"
    return None if done.returncode == 0 else f"exit code {done.returncode}: {(done.stderr or done.stdout)[-300:]}"


def tree_copy(folder: Path, checkpoint: Path) -> Path:
    """Return a copy of what the commands read, with the checkpoint where the default runs leave theirs."""
    copy = folder / "tree"
    copy.mkdir()
    for name in ("launch.sh", "pyproject.toml", "conf", "data", "infer", "train"):
        source = REPO / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, copy / name)
    for run in ("embedded-dflash", "embedded-dart", "a", "b"):
        shutil.copytree(checkpoint.resolve(), copy / "runs" / run / "checkpoints" / "best")
    return copy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the commands, and what would be done with each")
    parser.add_argument("--compose", action="store_true", help="compose all, run none")
    parser.add_argument("--checkpoint", type=Path, default=REPO / "runs/embedded-dflash/checkpoints/best")
    parser.add_argument("--seconds", type=int, default=300, help="limit of a command that is run")
    args = parser.parse_args()
    counts, faults = {"run": 0, "composed": 0, "listed": 0}, []
    with tempfile.TemporaryDirectory() as name:
        stand_in = Path(name) / "rows.jsonl"
        stand_in.write_text('{"prompt": "def f(x):", "response": " return x"}\n')
        (Path(name) / "manifest.json").write_text("{}")
        for suite in BY_NAME:
            shutil.copy(stand_in, Path(name) / f"{suite}.jsonl")
        copy = None
        for found in commands():
            if found.name in ("test", "help") or found.is_pattern:
                way = "listed"
            else:
                way = "run" if runnable(found) and not args.compose else "composed"
            counts[way] += 1
            print(f"{way:<9}{found.file}:{found.line}  {found.text}", flush=True)
            if args.list or way == "listed":
                continue
            if way == "run":
                copy = copy or tree_copy(Path(name), args.checkpoint)
                fault = run(found, copy, args.seconds)
            else:
                fault = compose(found, Path(name) if "features=" in found.text else stand_in)
            if fault:
                faults.append(f"{found.file}:{found.line}  {found.text}\n    {fault}")
                print(f"    FAULT {fault}", flush=True)
    print(", ".join(f"{count} {way}" for way, count in counts.items()) + f"; {len(faults)} faults")
    raise SystemExit(1 if faults else 0)


if __name__ == "__main__":
    main()
