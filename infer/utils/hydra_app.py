"""Run a command under Hydra: conf/ and the command line become a checked dataclass of options.

Groups, sweeps, `--config-dir`, `--cfg` and the rest are Hydra's. Ours are: the schema of the
options in Hydra's config store, a help that explains every key, `--prompt`, paths in place of a
group's option, and that a checkpoint brings the target and data of its own run.
"""

import gc
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infer.utils.checkpoint_run import options_of_run
from infer.utils.errors import errors_in_one_sentence, quiet_where_unread
from infer.utils.hub import refrain_from_silent_hub
from infer.utils.interrupts import INTERRUPTS
from infer.utils.options import (
    check_numbers,
    leaf_values,
    print_help,
    read_text_files,
    rewrite_groups,
    take_prompt,
)
from infer.utils.progress import HEARTBEAT
from infer.utils.renamed_options import new_name_in

CONF = Path(__file__).resolve().parent.parent.parent / "conf"
HYDRA_VERSION_BASE = "1.3"
GC_THRESHOLD = 10_000  # objects; with Python's 700 a tenth of a command's start goes into collections that find nothing


@dataclass
class Job:
    """What Hydra runs: a command with its composed configuration. Launchers may send it to another
    process."""

    options_class: type
    function: Callable[[Any], None]
    prompt: str | None
    command_line: list[str]

    def __call__(self, config) -> None:
        from hydra.core.hydra_config import HydraConfig

        sys.argv = self.command_line  # for reports
        output_dir = Path(HydraConfig.get().runtime.output_dir)
        with errors_in_one_sentence():
            try:
                options = checked_options(
                    config, HydraConfig.get(), self.options_class, self.prompt
                )
                HEARTBEAT.begin()
                INTERRUPTS.begin()
                refrain_from_silent_hub(leaf_values(asdict(options)))
                self.function(options)
            finally:
                if output_dir != Path.cwd():
                    with suppress(OSError):  # something lies there
                        output_dir.rmdir()


@quiet_where_unread()
def run_command(
    config_name: str,
    options_class: type,
    function: Callable[[Any], None],
    arguments: list[str] | None = None,
) -> None:
    """Compose conf/<config_name>.yaml with the arguments (`sys.argv`'s by default) and call
    `function(options)`, once or, with `-m`, for every job of a sweep.

    What the user got wrong ends the process before anything heavy is imported, with exit code 2:
    what Hydra refuses with Hydra's message, the rest with one sentence (`errors_in_one_sentence`).
    """
    import hydra
    from omegaconf import OmegaConf

    gc.set_threshold(GC_THRESHOLD)
    command_line = sys.argv
    arguments = sys.argv[1:] if arguments is None else arguments
    prompt = None
    if hasattr(options_class, "prompt"):
        arguments, prompt = take_prompt(arguments)
    job = Job(options_class, function, prompt, command_line)
    register_options(options_class)
    with errors_in_one_sentence(), translate_hydra_errors():
        flags = {argument for argument in arguments if argument.startswith("-")}
        if flags and flags <= {
            "--help",
            "-h",
        }:  # Hydra's own help takes longer, and knows no meanings
            overrides = [argument for argument in arguments if argument not in flags]
            values = OmegaConf.to_container(compose(config_name, options_class, overrides))
            return print_help(options_class, values, CONF)
        try:
            sys.argv = [command_line[0], *rewrite_groups(arguments)]
            hydra.main(
                version_base=HYDRA_VERSION_BASE, config_path=str(CONF), config_name=config_name
            )(job)()
        finally:
            sys.argv = command_line


@contextmanager
def translate_hydra_errors() -> Iterator[None]:
    """Raise Hydra's errors within the block, which it would print, as ValueError with Hydra's
    message; with HYDRA_FULL_ERROR=1 in the environment raise the error itself."""
    from hydra.errors import HydraException

    asks_for_tracebacks = "HYDRA_FULL_ERROR" in os.environ
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    try:
        yield
    except HydraException as error:
        if asks_for_tracebacks:
            raise
        message = f"{error}\n{error.__cause__ or ''}".strip()
        raise ValueError(new_name_in(message) or message) from error
    except AttributeError as error:  # of OmegaConf, for a dictionary in place of null
        raise ValueError(f"a value has another type than its key takes: {error}") from error
    finally:
        if not asks_for_tracebacks:
            del os.environ["HYDRA_FULL_ERROR"]


def compose_options(config_name: str, options_class: type, arguments: Iterable[str]) -> Any:
    """Return the checked options that arguments stand for, outside of a command. Raises
    ValueError."""
    from omegaconf import OmegaConf

    config = compose(config_name, options_class, arguments)
    options = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])
    return checked_options(options, config.hydra, options_class)


def compose(config_name: str, options_class: type, overrides: Iterable[str]):
    """Return the configuration that overrides stand for, with Hydra's own part, not yet checked.
    Raises ValueError."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    register_options(options_class)
    GlobalHydra.instance().clear()  # Hydra allows one application at a time, and a command may ask this one
    with (
        hydra.initialize_config_dir(str(CONF), version_base=HYDRA_VERSION_BASE),
        translate_hydra_errors(),
    ):
        return hydra.compose(config_name, rewrite_groups(overrides), return_hydra_config=True)


def checked_options(config, hydra_config, options_class: type, prompt: str | None = None) -> Any:
    """Return a composed configuration as a dataclass, after its `check()`. Raises ValueError."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        # as plain values, since +KEY=VALUE adds keys to a typed configuration that its class does
        # not have
        merged = OmegaConf.merge(
            OmegaConf.structured(options_class), OmegaConf.to_container(config)
        )
        merged = OmegaConf.merge(
            merged, options_of_run(merged, chosen_keys(hydra_config), options_class)
        )
        options = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ValueError(new_name_in(str(error)) or " ".join(str(error).split())) from error
    if prompt is not None:
        options.prompt = prompt
    read_text_files(options)
    check_numbers(options)
    options.check()
    return options


def chosen_keys(hydra_config) -> set[str]:
    """Return the keys and groups that the command line or a preset chose."""
    chosen = {
        re.sub(r"^\+*|=.*$", "", override, flags=re.DOTALL)
        for override in hydra_config.overrides.task
    }
    defaults = (None, "embedded")
    return chosen | {
        group for group, option in hydra_config.runtime.choices.items() if option not in defaults
    }


def register_options(options_class: type) -> None:
    """Store a command's options as the schema that its file in conf/ names first,
    `<command>_schema`."""
    from hydra.core.config_store import ConfigStore

    name = options_class.__name__.removesuffix("Config").removesuffix("Command").lower()
    ConfigStore.instance().store(name=f"{name}_schema", node=options_class)
