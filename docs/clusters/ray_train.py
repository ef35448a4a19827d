"""Train on a Ray cluster with Ray Train.

Run `python docs/clusters/ray_train.py WORKERS KEY=VALUE ...` in the repository's folder. Ray places
the workers, one GPU each, and restarts all of them if one fails; the run then resumes from its
newest checkpoint. `runs_dir` and the cache of data sets must be on storage that all machines share.
"""

import os
import subprocess
import sys

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_in_subprocess(settings: dict) -> None:
    """Train in a new process with the worker's rank (RANK, WORLD_SIZE, MASTER_ADDR).

    A run is saved by signal handlers, which do not work in the thread that Ray runs workers in.
    Raises CalledProcessError if training fails.
    """
    # Ray's own process group uses MASTER_PORT.
    environment = os.environ | {"MASTER_PORT": str(int(os.environ["MASTER_PORT"]) + 1)}
    command = [sys.executable, "train/main.py", *settings["arguments"]]
    subprocess.run(command, cwd=settings["folder"], env=environment, check=True)


def main() -> None:
    workers, *arguments = sys.argv[1:]
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": os.getcwd()}}, ignore_reinit_error=True)
    has_gpus = ray.cluster_resources().get("GPU", 0) > 0
    TorchTrainer(
        train_in_subprocess,
        train_loop_config={"arguments": arguments, "folder": os.getcwd()},
        scaling_config=ScalingConfig(num_workers=int(workers), use_gpu=has_gpus),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    ).fit()


if __name__ == "__main__":
    main()
