"""Several processes that run one command together (`target.tp_plan`): each computes its part of every pass of the
target, and the first alone speaks and writes. What they do must not depend on the clock: `agreed`."""

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def join(device: "torch.device") -> "torch.device":
    """Join the processes that torchrun started, silence all but the first, and return this one's device. Raises
    ValueError where torchrun did not start it."""
    import torch
    import torch.distributed as dist

    if "RANK" not in os.environ:
        raise ValueError(
            "target.tp_plan=auto spreads the target over processes: start them with "
            "torchrun --nproc-per-node=2 -m infer.main COMMAND target.tp_plan=auto ..."
        )
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if not is_first():
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    return device


def is_first() -> bool:
    """Return whether this process speaks and writes: the only one does."""
    return os.environ.get("RANK", "0") == "0"


def agreed(value: object) -> object:
    """Return the first process's value, in every process."""
    import torch.distributed as dist

    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def own_place(path: str, together: bool) -> str:
    """Return where this process writes: `path`, and in all but the first of several a copy of what is there."""
    if not together:
        return path
    place = Path(path)
    if not is_first():
        place = Path(tempfile.mkdtemp(prefix="beside-")) / place.name
        for end in ("", ".failed", ".settings.json"):  # of a folder, and of the files of `regenerate`
            if (found := Path(f"{path}{end}")).exists():
                copy = shutil.copytree if found.is_dir() else shutil.copy
                copy(found, f"{place}{end}")
    agreed(None)  # nobody writes before all have read
    return str(place)
