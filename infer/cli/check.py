"""`check`: which engines would load a drafter's folder."""

from dataclasses import dataclass


@dataclass
class CheckCommand:
    """Print which engines can load a drafter's folder, and why the others cannot.

    path: a folder, a training checkpoint, or a hub id
    """

    path: str = "runs/embedded-dflash/checkpoints/best"

    def check(self) -> None:
        """Raise ValueError where there is no path."""
        if not self.path:
            raise ValueError("path=<folder or hub id>: which drafter?")


def run(config: CheckCommand) -> None:
    from infer.formats.compatibility import check_folder

    verdicts = check_folder(config.path)
    print("\n".join(map(str, verdicts)))
    if all(verdict.problems for verdict in verdicts):
        raise SystemExit(1)
