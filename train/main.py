"""`python train/main.py [overrides]`, alone or under torchrun: Hydra in, dataclass out, one call."""

import os
import sys
import traceback
from dataclasses import replace

from infer.utils.entry import STOPPED, Stopped, entry
from infer.utils.redact import redact_text
from train.config import TrainConfig


def run(config: TrainConfig) -> None:
    from train.run.reachable import check_reachable

    check_reachable(config)
    from train.loop import train  # torch and friends load only once the configuration is known to be good

    code = 0
    try:
        train(on_own_gpu(config))
    except Stopped as error:
        print(f"error: {redact_text(str(error))}", file=sys.stderr)
        code = STOPPED
    except SystemExit as error:  # saved after Ctrl-C
        code = error.code
    except (ValueError, FileNotFoundError, ModuleNotFoundError):
        raise  # the caller reports it in one sentence
    except Exception:  # noqa: BLE001
        print(redact_text(traceback.format_exc()), file=sys.stderr)
        code = 1
    # A finished gloo process sometimes aborts in its exit handlers, and one that failed may wait there for a hanging
    # thread; all is written, so it leaves without them.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def on_own_gpu(config: TrainConfig) -> TrainConfig:
    """Where target.device names one GPU, cuda:1, show this process that one only: DeepSpeed counts its GPUs by ranks.
    Raises ValueError for a GPU that there is not, and for several processes, which would all ask for the same one."""
    kind, _, number = config.target.device.partition(":")
    if kind != "cuda" or not number:
        return config
    import torch

    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError(
            f"target.device={config.target.device}: several processes take a GPU each; leave it away, or start one, "
            "NPROC=1 ./launch.sh ..."
        )
    count = torch.cuda.device_count()  # reads no more than a list: CUDA itself is not initialised yet
    if int(number) >= count > 0:
        raise ValueError(f"target.device={config.target.device}: there are {count} GPUs, counted from 0")
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = seen.split(",")[int(number)] if seen and count else number
    return replace(config, target=replace(config.target, device="cuda"))


def run_alone(config: TrainConfig) -> None:
    """Train in this one process, and say so where GPUs stay idle: launch.sh starts a process for each."""
    import torch

    if torch.cuda.device_count() > 1 and ":" not in config.target.device:
        print(
            f"training on one of {torch.cuda.device_count()} GPUs: ./launch.sh train starts a process for each",
            file=sys.stderr,
        )
    run(config)


if __name__ == "__main__":
    entry("train", TrainConfig, run)
