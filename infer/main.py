"""The entry point of every command: `blockdraft COMMAND [overrides]`; launch.sh prepares the
environment and hands on to it.

What a command needs is imported when it runs. A command is a row here and a file with its options
and its `run`.
"""

import sys
from dataclasses import dataclass
from pkgutil import resolve_name

from infer.utils.errors import fail, fail_for_missing, quiet_where_unread
from infer.utils.hydra_app import run_command
from infer.utils.installation import package_version
from infer.utils.optional import explain_missing, is_installed


@dataclass(frozen=True)
class Command:
    """What a command does, in a line; its options and its function as "module:name". Its file in
    conf/ has the command's name."""

    help: str
    options: str
    run: str

    def options_class(self) -> type:
        """Import the dataclass of the options."""
        return resolve_name(self.options)

    def start(self, options: object) -> None:
        """Import the function, and call it."""
        resolve_name(self.run)(options)


def own(name: str, help: str) -> Command:
    """Return a command of infer/cli: in <name>.py are <Name>Command and run."""
    return Command(help, f"infer.cli.{name}:{name.capitalize()}Command", f"infer.cli.{name}:run")


_ROWS = {
    "train": Command(
        "train a drafter and evaluate it", "train.config:TrainConfig", "train.main:run"
    ),
    "eval": own("eval", "decode held-out prompts with a checkpoint"),
    "compare": own("compare", "evaluate several checkpoints with every tree"),
    "data": own("data", "show what would be learnt of a data set"),
    "ngram": own("ngram", "count n-grams of a data set, for trees"),
    "generate": own("generate", "answer or continue a text with a checkpoint"),
    "serve": own("serve", "answer over HTTP as OpenAI's API does"),
    "chat": own("chat", "talk to a target and its drafter, or to a server"),
    "regenerate": own("regenerate", "let the target rewrite the answers of a data set"),
    "export": own("export", "write a drafter for vLLM, SGLang or speculators"),
    "check": own("check", "say which engines would load a drafter"),
    "doctor": own("doctor", "say why a drafter's acceptance is low"),
    "features": Command(
        "store what training needs of a target",
        "train.config:FeaturesConfig",
        "train.features:store_features",
    ),
    "plan": Command(
        "estimate what a training run takes", "train.config:TrainConfig", "train.plan:print_plan"
    ),
    "study": Command(
        "train variants of a run and compare them", "train.study:StudyCommand", "train.study:study"
    ),
    "diffusion": Command(
        "train a masked diffusion model from a causal one",
        "train.masked.config:DiffusionConfig",
        "train.masked.diffusion:train",
    ),
}
COMMANDS = {name: row for name, row in _ROWS.items() if is_installed(row.options)}


@quiet_where_unread()
def main(arguments: list[str] | None = None) -> None:
    """Run the command that the arguments name, those of the process by default. What the user got
    wrong is one sentence on stderr and exit code 2."""
    name, *overrides = (sys.argv[1:] if arguments is None else arguments) or ["help"]
    if name in ("help", "--help", "-h"):
        lines = "\n".join(f"  {name:<11}{command.help}" for name, command in COMMANDS.items())
        options = "COMMAND --help explains every KEY. --version prints the version."
        return print(f"Usage: blockdraft COMMAND [KEY=VALUE ...]\n\n{lines}\n\n{options}")
    if name == "--version":
        return print(f"blockdraft {package_version()}")
    if name not in _ROWS:
        fail(f"unknown command '{name}': there is {', '.join(COMMANDS)}")
    command = _ROWS[name]
    sentence = explain_missing(command.options, f"command {name}")
    if sentence is not None:
        fail(sentence)
    try:
        options_class = command.options_class()
    except ModuleNotFoundError as error:
        fail_for_missing(error)
    if name == "train":  # it leaves the process in its own way
        return resolve_name("train.main:main")(overrides)
    run_command(name, options_class, command.start, overrides)


if __name__ == "__main__":
    main()
