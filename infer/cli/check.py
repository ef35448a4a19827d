"""`check`: which engines would load a drafter's folder."""

from dataclasses import dataclass

from infer.utils.checks import at_least


@dataclass
class CheckCommand:
    """Say which engines would load a drafter's folder, and why the others would not.

    path: a folder, a training checkpoint, or a hub id
    target_layers: how many layers the target has, for configs that do not say
    """

    path: str = "runs/embedded-dflash/checkpoints/best"
    target_layers: int | None = None

    def check(self) -> None:
        """Raise ValueError for a path or number that cannot be checked."""
        if not self.path:
            raise ValueError("path=<folder or hub id>: which drafter?")
        at_least(self, target_layers=1)


def run(config: CheckCommand) -> None:
    from infer.formats.compatibility import check_folder

    verdicts = check_folder(config.path, config.target_layers)
    print("\n".join(map(str, verdicts)))
    if all(verdict.problems for verdict in verdicts):
        raise SystemExit(1)
