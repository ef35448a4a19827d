"""The door to every command: `blockdraft COMMAND [overrides]`; launch.sh prepares the environment and hands on to it.

What a command needs is imported when it runs. A command is a row here and a file with its options and its `run`.
"""

import sys
from dataclasses import dataclass
from importlib import import_module

from infer.utils.entry import entry, fail


@dataclass(frozen=True)
class Command:
    """Where a command's options and its function are ("module:name"), and what it does, in a line.

    conf: its file in conf/ without the ending, where that is not its name
    """

    options: str
    run: str
    help: str
    conf: str | None = None

    def options_class(self) -> type:
        """Import the dataclass of the options."""
        return find(self.options)


COMMANDS = {
    "train": Command("train.config:TrainConfig", "train.main:run_alone", "train a drafter and evaluate it"),
    "eval": Command("infer.cli.eval:EvalCommand", "infer.cli.eval:run", "decode held-out prompts with a checkpoint"),
    "compare": Command(
        "infer.cli.compare:CompareCommand", "infer.cli.compare:run", "evaluate several checkpoints with every tree"
    ),
    "ngram": Command("infer.cli.ngram:NgramCommand", "infer.cli.ngram:run", "count n-grams of a data set, for trees"),
    "generate": Command(
        "infer.cli.generate:GenerateCommand", "infer.cli.generate:run", "continue a text with a checkpoint"
    ),
    "serve": Command("infer.cli.serve:ServeCommand", "infer.cli.serve:run", "answer over HTTP as OpenAI's API does"),
    "chat": Command("infer.cli.chat:ChatCommand", "infer.cli.chat:run", "talk to such a server"),
    "regenerate": Command(
        "infer.cli.regenerate:RegenerateCommand",
        "infer.cli.regenerate:run",
        "let the target rewrite the answers of a data set",
    ),
    "export": Command(
        "infer.cli.export:ExportCommand", "infer.cli.export:run", "write a drafter for vLLM, SGLang or speculators"
    ),
    "check": Command("infer.cli.check:CheckCommand", "infer.cli.check:run", "say which engines would load a drafter"),
    "features": Command(
        "train.config:FeaturesConfig",
        "train.features:store_features",
        "store the target's features, to train without it",
    ),
    "replay": Command(
        "train.config:ReplayConfig", "train.safety.replay:print_replay", "compute a skipped training step again"
    ),
    "plan": Command(
        "train.config:TrainConfig", "train.plan:print_plan", "estimate what a training run takes", conf="train"
    ),
    "pretrain": Command("train.config:PretrainConfig", "train.pretrain:pretrain", "make the embedded target anew"),
    "diffusion": Command(
        "train.masked.config:DiffusionConfig",
        "train.masked.diffusion:train",
        "train a masked diffusion model from a causal one",
    ),
}

# modules that an installation without extras lacks, and the extra of pyproject.toml that brings them
EXTRAS = dict.fromkeys(("datasets", "deepspeed", "pyarrow", "wandb"), "train")
EXTRAS |= dict.fromkeys(("fastapi", "h11", "httpx", "prometheus_client", "pydantic", "starlette", "uvicorn"), "serve")


def find(place: str) -> object:
    """Import what "module:name" says."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def usage() -> str:
    """The help text: every command with its line."""
    lines = "\n".join(f"  {name:<11}{command.help}" for name, command in COMMANDS.items())
    return (
        f"Usage: blockdraft COMMAND [KEY=VALUE ...]\n\n{lines}\n\n"
        'KEY=VALUE are Hydra overrides (checkpoint=runs/mine); "--cfg job" prints the whole configuration.'
    )


def main(arguments: list[str] | None = None) -> None:
    """Run the command that the arguments name, those of the process by default. What the user got wrong is one sentence
    on stderr and exit code 2, a missing extra of the installation among it."""
    name, *overrides = (sys.argv[1:] if arguments is None else arguments) or ["help"]
    if name in ("help", "--help", "-h"):
        print(usage())
        return
    if name not in COMMANDS:
        fail(f"unknown command '{name}': there is {', '.join(COMMANDS)}")
    command = COMMANDS[name]
    sys.argv[1:] = overrides  # Hydra's own flags are read there
    try:
        if name == "train" and {"--multirun", "-m"} & set(overrides):
            find("train.run.sweep:sweep")(overrides)
        else:
            entry(command.conf or name, command.options_class(), lambda options: find(command.run)(options), overrides)
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in EXTRAS:
            raise
        fail(f"{name} needs {package}, which is not installed: pip install 'blockdraft[{EXTRAS[package]}]'")


if __name__ == "__main__":
    main()
