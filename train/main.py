"""`python train/main.py [overrides]`: Hydra in, dataclass out, one call."""

import os
import sys

from infer.entry import entry
from train.config import TrainConfig
from train.sweep import sweep


def run(config: TrainConfig) -> None:
    from train.loop import train  # torch and friends load only once the configuration is known to be good

    train(config)
    # A finished gloo process sometimes aborts in its exit handlers; all is written, so it leaves without them.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    if {"--multirun", "-m"} & set(sys.argv):
        sweep(sys.argv[1:])
    else:
        entry("train", TrainConfig, run)
