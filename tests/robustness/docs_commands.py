"""Compose and check the configuration of every command in README and docs.

    python tests/robustness/docs_commands.py

What a reader has to fill in (`<>`, `...`, paths, files) is replaced. Nothing is loaded or run. The
commands of tests, and those of docs/extending.md (which tests/test_extending.py runs), are only
listed.

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

from data.suites import QUESTION_SUITES
from infer.main import INSTALLED_COMMANDS
from infer.utils.hydra_app import run_command

DOCS_REPOSITORY = Path(__file__).resolve().parent.parent.parent
DOCUMENT_FILES = (
    "README.md",
    "CONTRIBUTING.md",
    *(f"docs/{path.name}" for path in sorted((DOCS_REPOSITORY / "docs").glob("*.md"))),
)
COMMAND_START = re.compile(
    r"^(?:[A-Z_]+=\S+ )*(?:\./launch\.sh|blockdraft|python (?:train|infer)/main\.py)(?: |$)"
)
# Pattern of what a reader has to fill in -> a real value. They are replaced in this order.
STAND_INS = {
    r"checkpoints=\[\.\.\.\]": "checkpoints=[runs/a/checkpoints/best,lookup]",
    r"drafter\.init=(?:\.\.\.|<[^<>]*>|hub-name)(?!\S)": "drafter.init=data/embedded/drafter",
    r" base_model=\S+": "",
    r"target\.path=<the model>": "target.path=runs/embedded-diffusion/model",
    (
        r"(?<!\.)\b(checkpoint|checkpoints|path|run|features)="
        r"(?:\.\.\.|<[^<>]*>|/path/or/hub-name|hub-name)(?!\S)"
    ): r"\1=runs/mine/checkpoints/best/drafter",
    r"target\.path=(?:/path/\S*|<[^<>]*>)": "target.path=data/embedded",
    r"(?<!\.)\binit=/path/\S*": "init=data/embedded",
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
class DocumentedCommand:
    """A command in a document, and where it is."""

    file: str
    line: int
    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.filled, comments=True)

    @property
    def filled(self) -> str:
        """The command with real values for what a reader has to fill in."""
        text = self.text
        for pattern, value in STAND_INS.items():
            text = re.sub(pattern, value, text)
        return text

    @property
    def is_pattern(self) -> bool:
        """Whether it is a pattern of commands, or a command that tests/test_extending.py runs."""
        return (
            bool(re.search(r"COMMAND|\[overrides\]", self.text)) or self.file == "docs/extending.md"
        )

    @property
    def name(self) -> str:
        """The command's name; "train" if none is given."""
        rest = self.arguments_with_name
        return (
            rest[0]
            if rest and (rest[0] in INSTALLED_COMMANDS or rest[0] in ("help", "test"))
            else "train"
        )

    @property
    def arguments_with_name(self) -> list[str]:
        words = [word for word in self.words if not re.fullmatch(r"[A-Z_]+=\S*", word)]
        return words[2:] if words[0] == "python" else words[1:]

    @property
    def arguments(self) -> list[str]:
        rest = self.arguments_with_name
        return rest[1:] if rest and rest[0] == self.name else rest


def find_commands() -> list[DocumentedCommand]:
    """Return the commands of code blocks, and those with arguments of inline code."""
    commands = []
    for file in DOCUMENT_FILES:
        fenced = False
        variables = {}
        unfinished_line = ""
        for number, line in enumerate(
            (DOCS_REPOSITORY / file).read_text(encoding="utf-8").splitlines(), 1
        ):
            line = line.lstrip()  # a block in a list is indented
            if line.startswith("```"):
                fenced = not fenced
                variables = {}
                continue
            if not fenced:
                pieces = re.findall(
                    r"`((?:[A-Z_]+=\S+ )*"
                    r"(?:\./launch\.sh|blockdraft|python (?:train|infer)/main\.py) [^`]+)`",
                    line,
                )
                commands += [DocumentedCommand(file, number, piece) for piece in pieces]
                continue
            if setting := re.fullmatch(r"([A-Z])=(\S+)", line):
                variables[f"${setting[1]}"] = setting[2]
                continue
            line = unfinished_line + line
            if line.endswith("\\"):
                unfinished_line = line[:-1]
                continue
            unfinished_line = ""
            for name, value in variables.items():
                line = line.replace(name, value)
            if COMMAND_START.match(line):
                commands.append(DocumentedCommand(file, number, line))
    return commands


def compose_command(documented: DocumentedCommand) -> str | None:
    """Compose and check a command's configuration; return the error message, if any.

    Overrides of a cluster's launcher are removed.
    """
    arguments = [
        argument
        for argument in documented.arguments
        if not argument.startswith(("hydra/launcher", "hydra.launcher"))
    ]
    command = INSTALLED_COMMANDS[documented.name]
    printed = io.StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(printed):
            run_command(
                documented.name, command.import_options_class(), lambda options: None, arguments
            )
    except SystemExit as end:
        if end.code:
            return printed.getvalue()
    return None


def make_user_files(folder: Path) -> None:
    """Create the files that the documents assume a reader has."""
    for name in (
        "features/mine/manifest.json",
        "answers.jsonl",
        *(
            f"suites/{question_set.local_file_stem}.jsonl"
            for suite in QUESTION_SUITES.values()
            for question_set in suite
        ),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    for name in ("chats.jsonl", "corpus.jsonl", "texts.jsonl", "question.jsonl"):
        (folder / name).write_text('{"text": "x"}\n')
    groups = "  - override /target: support-7b\n  - override /data: tickets\n"
    user_files = {
        "experiment/support": f"# @package _global_\ndefaults:\n{groups}",
        "target/support-7b": "path: /models/support-7b\n",
        "data/tickets": "source: jsonl\npath: answers.jsonl\n",
    }
    for name, text in user_files.items():
        (folder / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "mine" / f"{name}.yaml").write_text(text)
    (folder / "runs" / "mine").mkdir(parents=True)
    (folder / "runs" / "mine" / "config.yaml").write_text("defaults: [train, _self_]\nname: mine\n")
    for name in ("data",):
        (folder / name).symlink_to(DOCS_REPOSITORY / name)


def main() -> None:
    counts = {"composed": 0, "listed": 0}
    failures = 0
    with tempfile.TemporaryDirectory() as name:
        make_user_files(Path(name))
        os.chdir(name)  # relative paths start here
        for command in find_commands():
            outcome = (
                "listed" if command.name in ("test", "help") or command.is_pattern else "composed"
            )
            counts[outcome] += 1
            print(f"{outcome:<9}{command.file}:{command.line}  {command.text}", flush=True)
            failure = compose_command(command) if outcome == "composed" else None
            if failure:
                failures += 1
                print(f"    FAULT {failure}", flush=True)
        os.chdir(DOCS_REPOSITORY)
    print(
        ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        + f"; {failures} faults"
    )
    raise SystemExit(1 if failures else 0)


if __name__ == "__main__":
    main()
