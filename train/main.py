"""The training command: `python train/main.py [overrides]`, directly or under torchrun. Hydra
composes the configuration from conf/train.yaml and the overrides."""

import gc
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from hydra.core.hydra_config import HydraConfig

from data.rows import refuse_self_source
from infer.utils.errors import exit_quietly_on_broken_pipe
from infer.utils.hydra_app import run_command
from train.config import TrainConfig


def train_in_hydra_folder(config: TrainConfig) -> None:
    """Train in the folder that Hydra chose: runs_dir/name, or the folder of one run of a sweep."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    if folder != Path(config.runs_dir, config.name).absolute():
        config.runs_dir = str(folder.parent)
        config.name = folder.name
    try:
        refuse_self_source(config.data)
        # torch is slow to import, so it is imported only after the configuration was checked
        from train.loop import train

        train(config)
    finally:
        gc.collect()  # frees the memory for the next run of a sweep


@contextmanager
def exit_without_handlers() -> Generator[None]:
    """End the process at the end of the `with` block, without running Python's exit handlers.

    Python's exit handlers can do harm. The communication library gloo sometimes aborts a process
    that has finished. A process that has failed can wait forever for a hanging thread.
    """
    exit_code = 0
    try:
        yield
    except SystemExit as error:
        exit_code = cast(int, error.code or 0)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


@exit_quietly_on_broken_pipe()
def main(arguments: list[str] | None = None) -> None:
    """Run the training command and end the process.

    arguments: overrides of options, for example "seed=1". None means the arguments of the command
    line.
    """
    with exit_without_handlers():
        run_command("train", TrainConfig, train_in_hydra_folder, arguments)


if __name__ == "__main__":
    main()
