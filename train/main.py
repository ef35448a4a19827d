"""`python train/main.py [overrides]`, alone or under torchrun: Hydra in, dataclass out, one
call."""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra.core.hydra_config import HydraConfig

from data.rows import refuse_unwritten
from infer.utils.errors import quiet_where_unread
from infer.utils.hydra_app import run_command
from train.config import TrainConfig


def run(config: TrainConfig) -> None:
    """Train in the folder that Hydra gives the job: runs_dir/name, or one of a sweep."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    if folder != Path(config.runs_dir, config.name).absolute():
        config.runs_dir = str(folder.parent)
        config.name = folder.name
    try:
        refuse_unwritten(config.data)
        from train.loop import (
            train,
        )  # torch and friends load only once the configuration is known to be good

        train(config)
    finally:
        gc.collect()  # a sweep's next job needs the memory


@contextmanager
def leave_process() -> Iterator[None]:
    """Leave the process after the block without its exit handlers: a finished gloo process
    sometimes aborts there, and one that failed may wait there for a hanging thread."""
    code = 0
    try:
        yield
    except SystemExit as error:
        code = error.code or 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@quiet_where_unread()
def main(arguments: list[str] | None = None) -> None:
    """Run the command, and leave the process."""
    with leave_process():
        run_command("train", TrainConfig, run, arguments)


if __name__ == "__main__":
    main()
