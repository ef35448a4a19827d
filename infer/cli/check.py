"""The command `check`: says which engines, such as vLLM or SGLang, can load a drafter."""

from dataclasses import dataclass


@dataclass
class CheckCommand:
    """Print which engines can load a drafter, and why the other engines cannot.

    path: the drafter: a folder, a training checkpoint, or a Hugging Face hub id
    """

    path: str = "runs/embedded-dflash/checkpoints/best"

    def check(self) -> None:
        """Raise ValueError if the path is empty."""
        if not self.path:
            raise ValueError("path is empty: give the folder or hub id of a drafter")


def run(config: CheckCommand) -> None:
    """Print for each engine whether it can load the drafter. Exit with code 1 if no engine can."""
    from infer.formats.compatibility import check_engines

    verdicts = check_engines(config.path)
    print("\n".join(map(str, verdicts)))
    if all(verdict.problems for verdict in verdicts):
        raise SystemExit(1)
