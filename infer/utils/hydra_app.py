"""Run a command under Hydra. Hydra composes a configuration from the files in conf/ and the command
line. This module converts the configuration to a checked dataclass of options.

Groups, sweeps, `--config-dir` and `--cfg` are features of Hydra. This module adds a help text that
explains every option, the argument `--prompt`, short forms such as `target=/path/to/model`, and
default options from the training run of a checkpoint (`infer.utils.checkpoint_run`).
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
    extract_prompt_argument,
    iterate_leaf_values,
    normalise_overrides,
    print_help,
    read_text_or_file_options,
)
from infer.utils.progress import HEARTBEAT
from infer.utils.renamed_options import explain_renamed_option_error

CONFIG_FOLDER = Path(__file__).resolve().parent.parent.parent / "conf"
HYDRA_VERSION_BASE = "1.3"
HELP_FLAGS = {"--help", "-h"}
# A Hydra group with one of these values counts as not chosen by the user. None means that the group
# has no value. "embedded" is the default of the groups target and data.
UNCHOSEN_HYDRA_GROUP_VALUES = (None, "embedded")
# After this number of new objects, Python runs a garbage collection. With Python's default of 700,
# a command spends a tenth of its start-up time in collections that free nothing.
GC_THRESHOLD_OBJECTS = 10_000


@dataclass
class HydraJob:
    """A callable object that runs a command. Hydra calls it with the composed configuration.

    Hydra's launchers for sweeps may pickle this object and call it in another process.

    options_class: the command's dataclass of options
    function: runs the command; its argument is the checked dataclass of options
    prompt: the text of `--prompt`, or None
    command_line: the command line as the user typed it
    """

    options_class: type
    function: Callable[[Any], None]
    prompt: str | None
    command_line: list[str]

    def __call__(self, config: Any) -> None:
        from hydra.core.hydra_config import HydraConfig

        # `run_command` has changed sys.argv. Restore it, because reports quote the command line as
        # the user typed it.
        sys.argv = self.command_line
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
                    # Remove Hydra's output folder; `rmdir` fails if the folder is not empty.
                    with suppress(OSError):
                        output_folder.rmdir()


@exit_quietly_on_broken_pipe()
def run_command(
    config_name: str,
    options_class: type,
    function: Callable[[Any], None],
    arguments: list[str] | None = None,
) -> None:
    """Run a command: build its options from conf/<config_name>.yaml and the command-line arguments,
    and call `function` with them.

    options_class: the command's dataclass of options
    arguments: command-line arguments; None means those in `sys.argv`

    With the argument `-m`, Hydra runs a sweep and calls `function` for each of its jobs. If an
    argument is wrong, the process prints a message and ends with exit code 2. This happens before
    packages that take long to import, such as torch, are imported.
    """
    import hydra

    gc.set_threshold(GC_THRESHOLD_OBJECTS)
    command_line = sys.argv
    if arguments is None:
        arguments = sys.argv[1:]
    prompt = None
    if hasattr(options_class, "prompt"):
        arguments, prompt = extract_prompt_argument(arguments)
    job = HydraJob(options_class, function, prompt, command_line)
    register_options(options_class)
    with report_errors_and_exit(), translate_hydra_errors():
        flags = {argument for argument in arguments if argument.startswith("-")}
        if flags and flags <= HELP_FLAGS:
            overrides = [argument for argument in arguments if argument not in flags]
            print_command_help(config_name, options_class, overrides)
            return
        try:
            sys.argv = [command_line[0], *normalise_overrides(arguments)]
            decorator = hydra.main(
                version_base=HYDRA_VERSION_BASE,
                config_path=str(CONFIG_FOLDER),
                config_name=config_name,
            )
            decorator(job)()
        finally:
            sys.argv = command_line


def print_command_help(config_name: str, options_class: type, overrides: list[str]) -> None:
    """Print a command's options with their values and meanings.

    overrides: command-line arguments whose effect on the values is shown

    Hydra's own help is not used because it is slower and does not explain the options.
    """
    from omegaconf import OmegaConf

    values: Any = OmegaConf.to_container(compose_config(config_name, options_class, overrides))
    print_help(options_class, values, CONFIG_FOLDER)


@contextmanager
def translate_hydra_errors() -> Generator[None]:
    """Convert errors that Hydra raises in the block to ValueError with Hydra's message.

    By default, Hydra would print the error and end the process. If the user has set the environment
    variable HYDRA_FULL_ERROR, the original error is raised.
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
        raise ValueError(explain_renamed_option_error(message) or message) from error
    # OmegaConf raises AttributeError if a value is a dictionary where it expects null.
    except AttributeError as error:
        raise ValueError(
            f"an option was given a value of the wrong type: {error}. See --help for the types"
        ) from error
    finally:
        if not wants_traceback:
            del os.environ["HYDRA_FULL_ERROR"]


def compose_checked_options(config_name: str, options_class: type, arguments: Iterable[str]) -> Any:
    """Build the checked options of a command from command-line arguments, without running the
    command.

    Raises ValueError if an argument or an option is invalid.
    """
    from omegaconf import OmegaConf

    config = compose_config(config_name, options_class, arguments)
    options = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])
    return build_checked_options(options, config.hydra, options_class)


def compose_config(config_name: str, options_class: type, overrides: Iterable[str]) -> Any:
    """Let Hydra compose a command's configuration from conf/ and command-line arguments.

    Returns the configuration as a DictConfig, including Hydra's own section `hydra`. The options
    are not checked yet. Raises ValueError if Hydra refuses an argument.
    """
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    register_options(options_class)
    # Hydra's global state must be cleared, because this function may be called by a command that
    # itself runs under Hydra.
    GlobalHydra.instance().clear()
    with (
        hydra.initialize_config_dir(str(CONFIG_FOLDER), version_base=HYDRA_VERSION_BASE),
        translate_hydra_errors(),
    ):
        return hydra.compose(
            config_name, overrides=normalise_overrides(overrides), return_hydra_config=True
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
        # With +KEY=VALUE, the user can add keys that the dataclass does not have. The merge refuses
        # such keys only if `config` is converted to plain dictionaries first.
        schema = OmegaConf.structured(options_class)
        merged = OmegaConf.merge(schema, OmegaConf.to_container(config))
        run_options = load_run_options(merged, find_chosen_keys(hydra_config), options_class)
        merged = OmegaConf.merge(merged, run_options)
        options: Any = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        message = explain_renamed_option_error(str(error)) or " ".join(str(error).split())
        raise ValueError(message) from error
    if prompt is not None:
        options.prompt = prompt
    read_text_or_file_options(options)
    check_numbers(options)
    options.check()
    return options


def find_chosen_keys(hydra_config: Any) -> set[str]:
    """Return the names of the options and option groups that the user has set, on the command line
    or through a preset.

    hydra_config: Hydra's own section of the configuration
    """
    keys = set()
    for override in hydra_config.overrides.task:
        keys.add(re.sub(r"^\+*|=.*$", "", override, flags=re.DOTALL))
    for group, choice in hydra_config.runtime.choices.items():
        if choice not in UNCHOSEN_HYDRA_GROUP_VALUES:
            keys.add(group)
    return keys


def register_options(options_class: type) -> None:
    """Register a command's dataclass of options as a schema in Hydra's config store.

    The schema's name is `<command>_schema`, which the command's file in conf/ lists under
    `defaults`.
    """
    from hydra.core.config_store import ConfigStore

    command_name = options_class.__name__.removesuffix("Config").removesuffix("Command").lower()
    ConfigStore.instance().store(name=f"{command_name}_schema", node=options_class)
