"""Ray Train: `python docs/clusters/ray_train.py WORKERS KEY=VALUE ...` on a Ray cluster, from the repository's folder.

Ray places the workers, one GPU each, and starts all of them again where one fails; the run then goes on from its newest
checkpoint. `runs_dir` and the cache of rows have to lie on storage that all machines see.
"""

import os
import subprocess
import sys

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_here(settings: dict) -> None:
    """Train in a process of this worker's own, with the place that Ray gave the worker (RANK, WORLD_SIZE, MASTER_ADDR):
    signals, which save a run, reach no thread. Raises CalledProcessError where it fails."""
    place = {
        "MASTER_PORT": str(int(os.environ["MASTER_PORT"]) + 1)
    }  # Ray's own process group has the port
    command = [sys.executable, "train/main.py", *settings["arguments"]]
    subprocess.run(command, cwd=settings["folder"], env=os.environ | place, check=True)


def main() -> None:
    workers, *arguments = sys.argv[1:]
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": os.getcwd()}}, ignore_reinit_error=True)
    gpus = ray.cluster_resources().get("GPU", 0) > 0
    TorchTrainer(
        train_here,
        train_loop_config={"arguments": arguments, "folder": os.getcwd()},
        scaling_config=ScalingConfig(num_workers=int(workers), use_gpu=gpus),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    ).fit()


if __name__ == "__main__":
    main()
