"""The entry point of every command: `blockdraft COMMAND [overrides]`.

launch.sh prepares the environment and calls it. A command is an entry of the table here and a file
with its option dataclass and its function `run`. That file is imported when the command runs.
"""

import sys
from dataclasses import dataclass
from pkgutil import resolve_name

from infer.utils.errors import exit_for_missing_module, exit_quietly_on_broken_pipe, exit_with_error
from infer.utils.hydra_app import run_command
from infer.utils.installation import package_version
from infer.utils.optional import explain_missing_module, is_installed


@dataclass(frozen=True)
class Command:
    """An entry of the table of commands. Its file in conf/ has the command's name.

    help: one line that says what the command does
    options: option dataclass as "module:name"
    run: function that takes the options, as "module:name"
    """

    help: str
    options: str
    run: str

    def options_class(self) -> type:
        """Import the option dataclass and return it."""
        return resolve_name(self.options)

    def start(self, options: object) -> None:
        """Import the command's function and call it."""
        resolve_name(self.run)(options)


def cli_command(name: str, help: str) -> Command:
    """Return a command of infer/cli, whose file <name>.py has <Name>Command and run."""
    module = f"infer.cli.{name}"
    return Command(help, f"{module}:{name.capitalize()}Command", f"{module}:run")


_ALL_COMMANDS = {
    "train": Command(
        "train a drafter and evaluate it",
        "train.config:TrainConfig",
        "train.main:train_in_hydra_folder",
    ),
    "eval": cli_command("eval", "decode held-out prompts with a checkpoint"),
    "compare": cli_command("compare", "evaluate several checkpoints with every tree"),
    "data": cli_command("data", "show what would be learnt from a data set"),
    "ngram": cli_command("ngram", "count n-grams of a data set, for trees"),
    "generate": cli_command("generate", "answer or continue a text with a checkpoint"),
    "serve": cli_command("serve", "answer over HTTP as OpenAI's API does"),
    "chat": cli_command("chat", "talk to a target and its drafter, or to a server"),
    "regenerate": cli_command("regenerate", "let the target rewrite the answers of a data set"),
    "export": cli_command("export", "write a drafter for vLLM, SGLang or speculators"),
    "check": cli_command("check", "say which engines would load a drafter"),
    "doctor": cli_command("doctor", "say why a drafter's acceptance is low"),
    "features": Command(
        "store the target features that training needs",
        "train.config:FeaturesConfig",
        "train.features:store_features",
    ),
    "plan": Command(
        "estimate time and memory of a training run",
        "train.config:TrainConfig",
        "train.plan:print_plan",
    ),
    "study": Command(
        "train variants of a run and compare them",
        "train.study:StudyCommand",
        "train.study:run_study",
    ),
    "diffusion": Command(
        "train a masked diffusion model from a causal one",
        "train.masked.config:DiffusionConfig",
        "train.masked.diffusion:train_diffusion_model",
    ),
}
# Without those of optional packages that are not installed.
COMMANDS = {
    name: command for name, command in _ALL_COMMANDS.items() if is_installed(command.options)
}


@exit_quietly_on_broken_pipe()
def main(arguments: list[str] | None = None) -> None:
    """Run a command.

    arguments: the command's name, then its overrides; None: those of `sys.argv`

    A mistake in the arguments ends the process with one sentence on stderr and exit code 2.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    name, *overrides = arguments or ["help"]
    if name in ("help", "--help", "-h"):
        print_usage()
        return
    if name == "--version":
        print(f"blockdraft {package_version()}")
        return
    if name not in _ALL_COMMANDS:
        exit_with_error(f"unknown command '{name}': use one of {', '.join(COMMANDS)}")

    command = _ALL_COMMANDS[name]
    missing_package = explain_missing_module(command.options, f"command {name}")
    if missing_package is not None:
        exit_with_error(missing_package)
    try:
        options_class = command.options_class()
    except ModuleNotFoundError as error:
        exit_for_missing_module(error)
    if name == "train":  # its processes need their own way to exit
        resolve_name("train.main:main")(overrides)
        return
    run_command(name, options_class, command.start, overrides)


def print_usage() -> None:
    """Print the installed commands."""
    print("Usage: blockdraft COMMAND [KEY=VALUE ...]\n")
    for name, command in COMMANDS.items():
        print(f"  {name:<11}{command.help}")
    print("\nCOMMAND --help explains every KEY. --version prints the version.")


if __name__ == "__main__":
    main()
