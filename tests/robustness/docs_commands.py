"""Takes every command out of README and docs, and runs it.

    python tests/robustness/docs_commands.py --list
    python tests/robustness/docs_commands.py --compose
    python tests/robustness/docs_commands.py [--checkpoint runs/embedded-dflash/checkpoints/best]

A command runs as it is written in a copy of the working tree, with two changes: what a reader fills in (`<>`, `...`,
paths, files) gets a stand-in made of the embedded target and a drafter for it, and what would take minutes is
bounded (`BOUNDED`). A server is started, asked, and stopped by Ctrl-C; a chat talks to one.
Commands that need a hub, a GPU or other people's files are composed: the configuration that they stand for is made and
checked, without anything being loaded. The tests' own commands, and those of the toys of docs/extending.md, which
tests/test_extending.py runs, are listed.

Fails (exit code 1) if a command that is run ends with another code than 0, or a composed one is refused.
"""

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import torch

from data.suites import BY_NAME
from infer import load_target, save_drafter
from infer.config import DrafterConfig
from infer.drafters.base import new_drafter
from infer.main import COMMANDS
from infer.utils.entry import composed

REPO = Path(__file__).resolve().parent.parent.parent
FILES = ("README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted((REPO / "docs").glob("*.md"))))
START = re.compile(r"^(?:[A-Z_]+=\S+ )*(?:\./launch\.sh|blockdraft|python (?:train|infer)/main\.py)(?: |$)")
# What needs a hub, a GPU, or somebody's files: these commands are composed only. `plan` loads nothing, and runs.
FOREIGN = (
    "target=qwen3",
    "model=qwen3",
    "GSAI-ML",
    "suite=specbench",
    "suite=ddtree",
    "NPROC",
    "train=head",
    "doctor",
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
    r"evaluation\.continuity=<[^<>]*>": "evaluation.continuity=runs/ngrams",
    r"suite\.folder=<[^<>]*>": "suite.folder=suites",
    r"\+model=hf": "+model=hf data.length=256 anchors=8",
    r" \.\.\.(?!\S)": "",
}
EVALUATION = ("prompts=1", "max_new_tokens=8", "budgets=[4]", "outside=0", "repeats=1", "sampled=null")
SHORT = [f"evaluation.{option}" for option in EVALUATION]
BOUNDED = {  # what keeps a run short, where the command says nothing of it
    "train": ["optim.steps=4", "checkpoints=1", "data.limit=40", *SHORT],
    "eval": SHORT,
    "compare": SHORT,
    "generate": ["decoding.max_new_tokens=8"],
    "ngram": ["data.limit=20"],
    "regenerate": ["data.limit=40", "decoding.max_new_tokens=8"],
    "features": ["data.limit=40"],
    "diffusion": ["steps=2"],
}
SERVER_SECONDS = 60  # until a server must answer


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


def compose(found: Found) -> str | None:
    """Compose a command's configuration; return what is refused."""
    words = [argument for argument in found.arguments if argument not in ("--cfg", "job")]
    command = COMMANDS[found.name]
    overrides = [argument for argument in words if not argument.startswith("--")]
    try:
        composed(command.conf or found.name, command.options_class(), overrides)
    except ValueError as error:
        return str(error)
    return None


def runnable(found: Found) -> bool:
    """Return whether a command is run: it needs nothing but what lies in the copy."""
    return found.name == "plan" or not any(word in f"{found.text} " for word in FOREIGN)


@dataclass
class Session:
    """Commands that run one after the other in a copy of the tree; a server lives until another command than `chat`
    comes."""

    folder: Path
    checkpoint: Path  # what stands in for the checkpoints of a reader's runs
    seconds: int  # limit of a command
    server: subprocess.Popen | None = None
    lent: list[Path] = field(default_factory=list)  # runs that are nothing but a checkpoint lent to them

    def lend(self, found: Found) -> None:
        """Lend a checkpoint to runs that a command reads from and that were never made; take it back from all before a
        training makes them."""
        if found.name == "train":
            for run in self.lent:
                shutil.rmtree(run)
            self.lent = []
        for name in re.findall(r"runs/(\w[\w-]*)/checkpoints", " ".join(found.words)):
            run = self.folder / "runs" / name
            if run.exists():
                continue
            shutil.copytree(self.checkpoint / "drafter", run / "checkpoints/best/drafter")
            if (self.checkpoint / "evaluation.json").exists():
                shutil.copy(self.checkpoint / "evaluation.json", run / "checkpoints/best")
            self.lent.append(run)

    def run(self, found: Found) -> str | None:
        """Run a command; return how it failed."""
        if found.name == "regenerate":  # what another command left is not its own
            for left in self.folder.glob("*answers.jsonl*"):
                left.unlink()
        fault = self.stop() if found.name != "chat" else None if self.server else self.start([])
        if fault:
            return f"the server before it: {fault}"
        arguments = found.arguments
        given = {argument.split("=")[0] for argument in arguments}
        arguments = arguments + [more for more in BOUNDED.get(found.name, []) if more.split("=")[0] not in given]
        if found.name == "serve":
            return self.start(arguments)
        try:
            said = "def f(x):\n" if found.name == "chat" else None
            done = subprocess.run(
                self.line(found.name, arguments),
                input=said,
                cwd=self.folder,
                env=self.environment(),
                capture_output=True,
                text=True,
                timeout=self.seconds,
            )
        except subprocess.TimeoutExpired:
            return f"took more than {self.seconds} s"
        return None if done.returncode == 0 else f"exit code {done.returncode}: {(done.stderr or done.stdout)[-300:]}"

    def line(self, name: str, arguments: list[str]) -> list[str]:
        return ["bash", str(self.folder / "launch.sh"), name, *arguments]

    def environment(self) -> dict[str, str]:
        offline = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
        return os.environ | {"PYTHONPATH": str(self.folder), "LAUNCH_PYTHON": sys.executable} | offline

    def start(self, arguments: list[str]) -> str | None:
        """Start a server, and wait until it answers; return how it failed."""
        port = next((word.split("=")[1] for word in arguments if word.startswith("server.port=")), "8000")
        with (self.folder / "server.log").open("w") as log:
            self.server = subprocess.Popen(
                self.line("serve", arguments), cwd=self.folder, env=self.environment(), stdout=log, stderr=log
            )
        for _ in range(SERVER_SECONDS):
            if self.server.poll() is not None:
                break
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    return None
            except httpx.TransportError:
                time.sleep(1)
        return f"does not answer: {(self.folder / 'server.log').read_text()[-300:]}"

    def stop(self) -> str | None:
        """Stop the server as a person does; return how it failed."""
        server, self.server = self.server, None
        if server is None:
            return None
        server.send_signal(signal.SIGINT)
        try:
            code = server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            return "does not end"
        return None if code == 0 else f"ended with {code}"


def tree_copy(folder: Path) -> Path:
    """Return a copy of what the commands read, and files of a reader."""
    copy = folder / "tree"
    copy.mkdir()
    for name in ("launch.sh", "pyproject.toml", "conf", "data", "infer", "train"):
        source = REPO / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, copy / name)
    rows = (copy / "data/embedded/answers.jsonl").read_text(encoding="utf-8").splitlines()[:200]
    (copy / "suites").mkdir()
    for suite in BY_NAME:
        (copy / "suites" / f"{suite}.jsonl").write_text(rows[0] + "\n", encoding="utf-8")
    for name in ("chats.jsonl", "corpus.jsonl", "texts.jsonl", "question.jsonl"):
        (copy / name).write_text("\n".join(rows) + "\n", encoding="utf-8")
    return copy


def untrained(folder: Path) -> Path:
    """Return a checkpoint with a new drafter of the embedded target, as the default run makes one."""
    target = load_target("embedded")
    drafter = new_drafter(DrafterConfig(), target)
    drafter.initialize(target, torch.Generator().manual_seed(0), warm=True)
    save_drafter(drafter.config, drafter.state_dict(), folder / "drafter")
    return folder


def earlier_results(folder: Path) -> None:
    """Leave in the copy what commands that are composed only would have made: stored features, answers."""
    (folder / "features/mine").mkdir(parents=True)
    (folder / "features/mine/manifest.json").write_text("{}")
    shutil.copy(folder / "chats.jsonl", folder / "answers.jsonl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the commands, and what would be done with each")
    parser.add_argument("--compose", action="store_true", help="compose all, run none")
    parser.add_argument("--only", default="", help="commands of files whose name holds this")
    parser.add_argument("--checkpoint", type=Path, help="of a reader's run; without one, an untrained drafter")
    parser.add_argument("--seconds", type=int, default=300, help="limit of a command that is run")
    args = parser.parse_args()
    counts, faults = {"run": 0, "composed": 0, "listed": 0}, []
    with tempfile.TemporaryDirectory() as name:
        checkpoint = args.checkpoint or untrained(Path(name) / "untrained")
        session = Session(tree_copy(Path(name)), checkpoint.resolve(), args.seconds)
        os.chdir(session.folder)  # relative paths count from there
        if args.compose:
            earlier_results(session.folder)
        for found in (one for one in commands() if args.only in one.file):
            if found.name == "test" or found.is_pattern:
                way = "listed"
            else:
                way = "run" if runnable(found) and not args.compose else "composed"
            counts[way] += 1
            print(f"{way:<9}{found.file}:{found.line}  {found.text}", flush=True)
            if args.list or way == "listed" or (found.name == "help" and way == "composed"):
                continue
            session.lend(found)
            fault = session.run(found) if way == "run" else compose(found)
            if fault:
                faults.append(found)
                print(f"    FAULT {fault}", flush=True)
        if fault := session.stop():
            faults.append(fault)
            print(f"    FAULT the last server: {fault}")
        os.chdir(REPO)
    print(", ".join(f"{count} {way}" for way, count in counts.items()) + f"; {len(faults)} faults")
    raise SystemExit(1 if faults else 0)


if __name__ == "__main__":
    main()
