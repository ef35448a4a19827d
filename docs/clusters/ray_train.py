"""Ray Train: `python docs/clusters/ray_train.py WORKERS [KEY=VALUE ...]` on a Ray cluster, from the repository's folder.

Ray places the workers, one GPU each, and starts all of them again where one fails; the run then goes on from its newest
checkpoint. `runs_dir` and the cache of rows have to lie on storage that all machines see.
"""

import sys

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_here(settings: dict) -> None:
    """Train in this worker: Ray has set RANK, WORLD_SIZE and MASTER_ADDR, which is all that `train` looks at."""
    from infer.utils.entry import composed
    from train.config import TrainConfig
    from train.loop import train

    train(composed("train", TrainConfig, settings["arguments"]))


def main() -> None:
    workers, *arguments = sys.argv[1:]
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": "."}}, ignore_reinit_error=True)
    gpus = ray.cluster_resources().get("GPU", 0) > 0
    TorchTrainer(
        train_here,
        train_loop_config={"arguments": arguments},
        scaling_config=ScalingConfig(num_workers=int(workers), use_gpu=gpus),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    ).fit()


if __name__ == "__main__":
    main()
