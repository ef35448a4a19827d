"""The command `check`: which engines would load a drafter's folder."""

from dataclasses import dataclass


@dataclass
class CheckCommand:
    """Print which engines can load a drafter's folder, and why the others cannot.

    path: a folder, a training checkpoint, or a hub id
    """

    path: str = "runs/embedded-dflash/checkpoints/best"

    def check(self) -> None:
        """Raise ValueError if the path is empty."""
        if not self.path:
            raise ValueError("path is empty: give the folder or hub id of a drafter")


def run(config: CheckCommand) -> None:
    """Print a verdict for each engine. Exit with code 1 if none would load the folder."""
    from infer.formats.compatibility import check_engines

    verdicts = check_engines(config.path)
    print("\n".join(map(str, verdicts)))
    if all(verdict.problems for verdict in verdicts):
        raise SystemExit(1)
