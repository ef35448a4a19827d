"""The entry point of all commands: `blockdraft COMMAND [KEY=VALUE ...]`.

launch.sh prepares the Python environment and calls this module. Each command has an entry in the
table `_ALL_COMMANDS`. The entry names a file with the command's option dataclass and its function
`run`. The file is imported only when the command is called.
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
    """A command of the command line.

    The default options of a command are in conf/<command>.yaml.

    help: one line that says what the command does
    options_class_path: "module:name" of the option dataclass
    run: "module:name" of the function that runs the command; its argument is the options
    """

    help: str
    options_class_path: str
    run: str

    def import_options_class(self) -> type:
        """Import the option dataclass and return it."""
        return resolve_name(self.options_class_path)

    def import_and_run(self, options: object) -> None:
        """Import the function that runs the command, and call it with the options."""
        resolve_name(self.run)(options)


def cli_command(name: str, help: str) -> Command:
    """Return the command that the file infer/cli/<name>.py implements.

    The file must define the option dataclass <Name>Command and the function `run`.

    help: one line that says what the command does
    """
    module = f"infer.cli.{name}"
    return Command(help, f"{module}:{name.capitalize()}Command", f"{module}:run")


_ALL_COMMANDS = {
    "train": Command(
        "train a drafter and evaluate it",
        "train.config:TrainConfig",
        "train.main:train_in_hydra_folder",
    ),
    "eval": cli_command("eval", "measure a drafter's speedup on held-out prompts"),
    "compare": cli_command("compare", "evaluate several drafters with every tree method"),
    "data": cli_command("data", "show what a drafter would learn from a data set"),
    "ngram": cli_command("ngram", "count n-grams of a data set, to score draft trees"),
    "generate": cli_command("generate", "answer or continue a prompt with a drafter"),
    "serve": cli_command("serve", "serve a target and its drafter with OpenAI's HTTP API"),
    "chat": cli_command("chat", "talk to a target and its drafter, or to a server"),
    "regenerate": cli_command("regenerate", "let the target rewrite the answers of a data set"),
    "export": cli_command("export", "convert a drafter for vLLM, SGLang or another engine"),
    "check": cli_command("check", "say which engines would load a drafter"),
    "doctor": cli_command("doctor", "say why a drafter's acceptance is low"),
    "features": Command(
        "store the target's hidden states for training",
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
# The commands that can be run. Commands of optional packages that are not installed are left out.
INSTALLED_COMMANDS = {
    name: command
    for name, command in _ALL_COMMANDS.items()
    if is_installed(command.options_class_path)
}


@exit_quietly_on_broken_pipe()
def main(arguments: list[str] | None = None) -> None:
    """Run a command.

    arguments: the command's name, followed by options as KEY=VALUE; None means the arguments of
        the process (`sys.argv`)

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
        exit_with_error(f"unknown command '{name}': use one of {', '.join(INSTALLED_COMMANDS)}")

    command = _ALL_COMMANDS[name]
    missing_package = explain_missing_module(command.options_class_path, f"command {name}")
    if missing_package is not None:
        exit_with_error(missing_package)
    try:
        options_class = command.import_options_class()
    except ModuleNotFoundError as error:
        exit_for_missing_module(error)
    if name == "train":
        # Training may run in several processes. train.main ends them without running Python's exit
        # handlers, because these can abort a process whose work is done.
        resolve_name("train.main:main")(overrides)
        return
    run_command(name, options_class, command.import_and_run, overrides)


def print_usage() -> None:
    """Print how a command is called, and the list of installed commands."""
    print("Usage: blockdraft COMMAND [KEY=VALUE ...]\n")
    for name, command in INSTALLED_COMMANDS.items():
        print(f"  {name:<11}{command.help}")
    print("\nCOMMAND --help explains every KEY. --version prints the version.")


if __name__ == "__main__":
    main()
