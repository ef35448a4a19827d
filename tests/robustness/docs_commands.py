"""Takes every command out of README and docs, and composes and checks the configuration that it
stands for.

    python tests/robustness/docs_commands.py

What a reader fills in (`<>`, `...`, paths, files) gets a stand-in. Nothing is loaded and nothing
runs. The tests' own commands, and those of the toys of docs/extending.md, which
tests/test_extending.py runs, are listed.

Fails (exit code 1) if a command is refused.
"""

import io
import os
import re
import shlex
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from data.suites import SUITES
from infer.main import COMMANDS
from infer.utils.hydra_app import run_command

REPO = Path(__file__).resolve().parent.parent.parent
FILES = (
    "README.md",
    "CONTRIBUTING.md",
    *(f"docs/{path.name}" for path in sorted((REPO / "docs").glob("*.md"))),
)
START = re.compile(
    r"^(?:[A-Z_]+=\S+ )*(?:\./launch\.sh|blockdraft|python (?:train|infer)/main\.py)(?: |$)"
)
STAND_INS = {  # what a reader fills in -> something real, in the order in which they are looked for
    r"checkpoints=\[\.\.\.\]": "checkpoints=[runs/a/checkpoints/best,lookup]",
    r"drafter\.init=(?:\.\.\.|<[^<>]*>|hub-name)(?!\S)": "drafter.init=data/embedded/drafter",
    r" base_model=\S+": "",
    r"target\.path=<the model>": "target.path=runs/embedded-diffusion/model",
    r"(?<!\.)\b(checkpoint|checkpoints|path|run|features)=(?:\.\.\.|<[^<>]*>|/path/or/hub-name|hub-name)(?!\S)": (
        r"\1=runs/mine/checkpoints/best/drafter"
    ),
    r"target\.path=(?:/path/\S*|<[^<>]*>)": "target.path=data/embedded",
    r"start=/path/\S*": "start=data/embedded",
    r"target=\.\.\.": "target=embedded",
    r"url=<[^<>]*>": "url=http://127.0.0.1:8000",
    r"data=\.\.\.": "data=embedded",
    r"drafter=\.\.\.": "drafter=dflash-small",
    r"out=(?:\.\.\.|<[^<>]*>)": "out=runs/out",
    r"evaluation\.continuity=<[^<>]*>": "evaluation.ngrams=runs/ngrams",
    r"suite\.folder=<[^<>]*>": "suite.folder=suites",
    r"\+model=hf": "+model=hf data.length=256 anchors_per_sequence=8",
    r" \.\.\.(?!\S)": "",
}


@dataclass(frozen=True)
class Found:
    """A command where it stands."""

    file: str
    line: int
    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.filled, comments=True)

    @property
    def filled(self) -> str:
        """The command with something real where a reader fills something in."""
        text = self.text
        for pattern, value in STAND_INS.items():
            text = re.sub(pattern, value, text)
        return text

    @property
    def is_pattern(self) -> bool:
        """Whether it stands for any command, or for one of a toy that tests/test_extending.py
        runs."""
        return (
            bool(re.search(r"COMMAND|\[overrides\]", self.text)) or self.file == "docs/extending.md"
        )

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
    """Return the commands of code blocks, and of single-line code within sentences that has
    arguments."""
    found = []
    for file in FILES:
        fenced = False
        variables = {}
        held = ""
        for number, line in enumerate((REPO / file).read_text(encoding="utf-8").splitlines(), 1):
            line = line.lstrip()  # a block in a list is indented
            if line.startswith("```"):
                fenced = not fenced
                variables = {}
                continue
            if not fenced:
                pieces = re.findall(
                    r"`((?:[A-Z_]+=\S+ )*(?:\./launch\.sh|blockdraft|python (?:train|infer)/main\.py) [^`]+)`",
                    line,
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


def compose(found: Found) -> str | None:
    """Compose and check a command's configuration by its own entry point; return what is refused. A
    cluster's launcher is left out."""
    arguments = [
        argument
        for argument in found.arguments
        if not argument.startswith(("hydra/launcher", "hydra.launcher"))
    ]
    command = COMMANDS[found.name]
    printed = io.StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(printed):
            run_command(found.name, command.options_class(), lambda options: None, arguments)
    except SystemExit as end:
        if end.code:
            return printed.getvalue()
    return None


def readers_files(folder: Path) -> None:
    """Make files in the places that the documents name as a reader's."""
    for name in (
        "features/mine/manifest.json",
        "answers.jsonl",
        *(f"suites/{one.file}.jsonl" for suite in SUITES.values() for one in suite),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    for name in ("chats.jsonl", "corpus.jsonl", "texts.jsonl", "question.jsonl"):
        (folder / name).write_text('{"text": "x"}\n')
    groups = "  - override /target: support-7b\n  - override /data: tickets\n"
    own = {
        "experiment/support": f"# @package _global_\ndefaults:\n{groups}",
        "target/support-7b": "path: /models/support-7b\n",
        "data/tickets": "source: jsonl\npath: answers.jsonl\n",
    }
    for name, text in own.items():
        (folder / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "mine" / f"{name}.yaml").write_text(text)
    (folder / "runs" / "mine").mkdir(parents=True)
    (folder / "runs" / "mine" / "config.yaml").write_text("defaults: [train, _self_]\nname: mine\n")
    for name in ("data",):
        (folder / name).symlink_to(REPO / name)


def main() -> None:
    counts = {"composed": 0, "listed": 0}
    faults = 0
    with tempfile.TemporaryDirectory() as name:
        readers_files(Path(name))
        os.chdir(name)  # relative paths count from there
        for found in commands():
            way = "listed" if found.name in ("test", "help") or found.is_pattern else "composed"
            counts[way] += 1
            print(f"{way:<9}{found.file}:{found.line}  {found.text}", flush=True)
            fault = compose(found) if way == "composed" else None
            if fault:
                faults += 1
                print(f"    FAULT {fault}", flush=True)
        os.chdir(REPO)
    print(", ".join(f"{count} {way}" for way, count in counts.items()) + f"; {faults} faults")
    raise SystemExit(1 if faults else 0)


if __name__ == "__main__":
    main()
