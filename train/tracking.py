"""Weights & Biases, if asked for. It never stops or holds up a run: offline without a key or network, else silent."""

import os
from dataclasses import asdict
from pathlib import Path

from train.config import TrainConfig


class Tracker:
    """Logs to wandb when `tracking.wandb` is on; otherwise does nothing."""

    def __init__(self, config: TrainConfig, folder: Path, enabled: bool) -> None:
        self.run, self.config = None, config
        if not (enabled and config.tracking.wandb):
            return
        import wandb

        has_key = bool(os.environ.get("WANDB_API_KEY") or wandb.api.api_key)
        wished = os.environ.get("WANDB_MODE") or ("online" if has_key else "offline")
        for mode in dict.fromkeys((wished, "offline")):
            try:
                self.run = wandb.init(
                    project=config.tracking.project,
                    name=config.name,
                    dir=str(folder),
                    config=asdict(config),
                    mode=mode,
                    settings=wandb.Settings(init_timeout=30, silent=True),
                )
                return
            except Exception as error:  # noqa: BLE001  whatever wandb raises, training goes on
                print(f"wandb ({mode}) is not available: {error}")

    def _safely(self, action) -> None:
        if self.run is None:
            return
        try:
            action()
        except Exception as error:  # noqa: BLE001
            print(f"wandb stopped working and is left out from here on: {error}")
            self.run = None

    def log(self, line: dict, step: int) -> None:
        """One step's metrics."""
        flat = {key: value for key, value in line.items() if not isinstance(value, list)}
        flat |= {f"agreement/{i + 1}": share for i, share in enumerate(line["agreement"])}
        self._safely(lambda: self.run.log(flat, step=step))

    def summary(self, evaluation: dict) -> None:
        """An evaluation's acceptance lengths and speedups."""
        figures = figures_of(evaluation)
        self._safely(lambda: (self.run.log(figures, step=evaluation["step"]), self.run.summary.update(figures)))

    def pictures(self, folder: Path) -> None:
        """The report's pictures."""

        def upload() -> None:
            import wandb

            self.run.log({path.stem: wandb.Image(str(path)) for path in sorted(folder.glob("*.png"))})

        self._safely(upload)

    def artifact(self, drafter: Path, evaluation: dict) -> None:
        """A drafter's folder with the numbers of its evaluation, if `tracking.artifacts` is on."""
        if not self.config.tracking.artifacts:
            return

        def upload() -> None:
            import wandb

            numbers = {"step": evaluation["step"]} | figures_of(evaluation)
            artifact = wandb.Artifact(self.config.name, type="model", metadata=numbers)
            artifact.add_dir(str(drafter))
            self.run.log_artifact(artifact, aliases=["best"])

        self._safely(upload)

    def close(self) -> None:
        self._safely(lambda: self.run.finish())


def figures_of(evaluation: dict) -> dict[str, float]:
    """Acceptance length and speedup of every method."""
    figures = {}
    for method in evaluation["methods"]:
        name = f"{method['name']}{method['budget'] or ''}"
        figures |= {f"tau/{name}": method["tau"], f"speedup/{name}": method["speedup"]}
    return figures
