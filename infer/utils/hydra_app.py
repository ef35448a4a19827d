"""Run a command under Hydra, which composes the files in conf/ and the command line to a
configuration. The configuration becomes a checked dataclass of options.

Groups, sweeps, `--config-dir` and `--cfg` are features of Hydra. This module adds the schema of the
options in Hydra's config store, a help text that explains every option, the argument `--prompt`,
paths in place of a group's name (`target=/path/to/model`), and options from the training run of a
checkpoint.
"""

import gc
import os
import re
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infer.utils.checkpoint_run import load_run_options
from infer.utils.errors import exit_quietly_on_broken_pipe, report_errors_and_exit
from infer.utils.hub import go_offline_if_hub_is_unreachable
from infer.utils.interrupts import INTERRUPT_WATCHER
from infer.utils.options import (
    check_numbers,
    expand_short_arguments,
    iterate_leaf_values,
    print_help,
    resolve_text_options,
    split_prompt_argument,
)
from infer.utils.progress import HEARTBEAT
from infer.utils.renamed_options import new_name_in

CONFIG_FOLDER = Path(__file__).resolve().parent.parent.parent / "conf"
HYDRA_VERSION_BASE = "1.3"
HELP_FLAGS = {"--help", "-h"}
# Choices of a group that the user did not make: None stands for no choice, and "embedded" is the
# default target and data.
DEFAULT_HYDRA_GROUP_CHOICES = (None, "embedded")
# Number of allocated objects that starts a garbage collection. With Python's default of 700, a
# tenth of the time to start a command is spent in collections that free nothing.
GC_THRESHOLD_OBJECTS = 10_000


@dataclass
class HydraJob:
    """A command in the form of a callable, which Hydra calls with the composed configuration.

    Hydra's launchers may pickle this object and call it in another process.

    options_class: the command's dataclass of options
    function: runs the command with these options
    prompt: the text of `--prompt`, or None
    command_line: the command line as the user typed it
    """

    options_class: type
    function: Callable[[Any], None]
    prompt: str | None
    command_line: list[str]

    def __call__(self, config: Any) -> None:
        from hydra.core.hydra_config import HydraConfig

        sys.argv = self.command_line  # Reports quote the command line as the user typed it.
        hydra_config = HydraConfig.get()
        output_folder = Path(hydra_config.runtime.output_dir)
        with report_errors_and_exit():
            try:
                options = build_checked_options(
                    config, hydra_config, self.options_class, self.prompt
                )
                HEARTBEAT.start_watching()
                INTERRUPT_WATCHER.start_watching()
                go_offline_if_hub_is_unreachable(iterate_leaf_values(asdict(options)))
                self.function(options)
            finally:
                if output_folder != Path.cwd():
                    with suppress(OSError):  # the folder is kept if it is not empty
                        output_folder.rmdir()


@exit_quietly_on_broken_pipe()
def run_command(
    config_name: str,
    options_class: type,
    function: Callable[[Any], None],
    arguments: list[str] | None = None,
) -> None:
    """Compose conf/<config_name>.yaml with the command-line arguments, and call `function` with the
    resulting options.

    options_class: the command's dataclass of options
    arguments: command-line arguments; None means those in `sys.argv`

    With `-m`, `function` is called for every job of a sweep. A mistake in the arguments ends the
    process with exit code 2 before any package that is slow to import is imported. The output is
    then a message of Hydra or one sentence (`report_errors_and_exit`).
    """
    import hydra

    gc.set_threshold(GC_THRESHOLD_OBJECTS)
    command_line = sys.argv
    if arguments is None:
        arguments = sys.argv[1:]
    prompt = None
    if hasattr(options_class, "prompt"):
        arguments, prompt = split_prompt_argument(arguments)
    job = HydraJob(options_class, function, prompt, command_line)
    register_options(options_class)
    with report_errors_and_exit(), translate_hydra_errors():
        flags = {argument for argument in arguments if argument.startswith("-")}
        if flags and flags <= HELP_FLAGS:
            overrides = [argument for argument in arguments if argument not in flags]
            print_command_help(config_name, options_class, overrides)
            return
        try:
            sys.argv = [command_line[0], *expand_short_arguments(arguments)]
            decorator = hydra.main(
                version_base=HYDRA_VERSION_BASE,
                config_path=str(CONFIG_FOLDER),
                config_name=config_name,
            )
            decorator(job)()
        finally:
            sys.argv = command_line


def print_command_help(config_name: str, options_class: type, overrides: list[str]) -> None:
    """Print the help of a command.

    Hydra's own help is slower, and it does not explain the options.
    """
    from omegaconf import OmegaConf

    values: Any = OmegaConf.to_container(compose_config(config_name, options_class, overrides))
    print_help(options_class, values, CONFIG_FOLDER)


@contextmanager
def translate_hydra_errors() -> Generator[None]:
    """Convert Hydra's errors within the block to ValueError with Hydra's message.

    Without this conversion, Hydra prints the error and ends the process. If the environment has
    HYDRA_FULL_ERROR=1, the original error is raised.
    """
    from hydra.errors import HydraException

    wants_traceback = "HYDRA_FULL_ERROR" in os.environ
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    try:
        yield
    except HydraException as error:
        if wants_traceback:
            raise
        message = f"{error}\n{error.__cause__ or ''}".strip()
        raise ValueError(new_name_in(message) or message) from error
    # OmegaConf raises this if the value is a dictionary where null is expected
    except AttributeError as error:
        raise ValueError(f"a value does not have the type of its option: {error}") from error
    finally:
        if not wants_traceback:
            del os.environ["HYDRA_FULL_ERROR"]


def compose_options(config_name: str, options_class: type, arguments: Iterable[str]) -> Any:
    """Return the checked options of a command for the given command-line arguments, without running
    the command.

    Raises ValueError if an argument or an option is invalid.
    """
    from omegaconf import OmegaConf

    config = compose_config(config_name, options_class, arguments)
    options = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])
    return build_checked_options(options, config.hydra, options_class)


def compose_config(config_name: str, options_class: type, overrides: Iterable[str]) -> Any:
    """Return the composed configuration, including Hydra's own section. Its options are not checked
    yet.

    Raises ValueError if the configuration cannot be composed.
    """
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    register_options(options_class)
    # Hydra allows only one application at a time, and a command that runs under Hydra may call this
    # function.
    GlobalHydra.instance().clear()
    with (
        hydra.initialize_config_dir(str(CONFIG_FOLDER), version_base=HYDRA_VERSION_BASE),
        translate_hydra_errors(),
    ):
        return hydra.compose(
            config_name, overrides=expand_short_arguments(overrides), return_hydra_config=True
        )


def build_checked_options(
    config: Any, hydra_config: Any, options_class: type, prompt: str | None = None
) -> Any:
    """Convert a composed configuration to the command's dataclass of options, and check the
    options.

    hydra_config: Hydra's own section of the configuration
    prompt: the text of `--prompt`, which replaces the option `prompt`; None means that the argument
        was not given

    Raises ValueError if an option is invalid.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        # The configuration is merged as plain values. With +KEY=VALUE it may contain keys that the
        # dataclass does not have, and only a merge of plain values refuses such keys.
        schema = OmegaConf.structured(options_class)
        merged = OmegaConf.merge(schema, OmegaConf.to_container(config))
        run_options = load_run_options(merged, find_chosen_keys(hydra_config), options_class)
        merged = OmegaConf.merge(merged, run_options)
        options: Any = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        message = new_name_in(str(error)) or " ".join(str(error).split())
        raise ValueError(message) from error
    if prompt is not None:
        options.prompt = prompt
    resolve_text_options(options)
    check_numbers(options)
    options.check()
    return options


def find_chosen_keys(hydra_config: Any) -> set[str]:
    """Return the option names and groups that the user chose, on the command line or by a
    preset."""
    keys = set()
    for override in hydra_config.overrides.task:
        keys.add(re.sub(r"^\+*|=.*$", "", override, flags=re.DOTALL))
    for group, choice in hydra_config.runtime.choices.items():
        if choice not in DEFAULT_HYDRA_GROUP_CHOICES:
            keys.add(group)
    return keys


def register_options(options_class: type) -> None:
    """Store a command's dataclass of options in Hydra's config store under the name
    `<command>_schema`.

    The command's file in conf/ names this schema in its defaults list.
    """
    from hydra.core.config_store import ConfigStore

    command_name = options_class.__name__.removesuffix("Config").removesuffix("Command").lower()
    ConfigStore.instance().store(name=f"{command_name}_schema", node=options_class)
