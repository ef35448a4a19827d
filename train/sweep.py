"""The table at the end of a sweep (`-m`), with the results of all its runs."""

from pathlib import Path
from typing import TYPE_CHECKING

from hydra.experimental.callback import Callback

SWEEP_COLUMNS = ("run", "step", "chain: τ", "speedup", "best tree", "τ", "speedup")

if TYPE_CHECKING:  # Hydra imports this file before the command is checked: it must load fast
    from omegaconf import DictConfig

    from infer.evaluation.results import MethodResult


class SweepTable(Callback):
    """Hydra callback of training (conf/hydra/run.yaml) that prints a table after all jobs."""

    def on_multirun_end(self, config: "DictConfig", **kwargs: object) -> None:
        """Print the results of all runs of the sweep."""
        folder = Path(config.hydra.sweep.dir)
        print(f"\nRuns in {folder}, each by its best checkpoint, on its own held-out prompts:\n")
        print(format_sweep_table(folder), flush=True)


def format_sweep_table(folder: Path) -> str:
    """Return a Markdown table with one line per run below a sweep's folder, sorted by the chain's
    acceptance length. Runs without an evaluation come last."""
    from infer.evaluation.results import Evaluation, read_result
    from infer.evaluation.tables import MISSING_CELL, format_markdown_table

    lines = []  # (acceptance length of the chain, cells)
    for checkpoints in folder.rglob("checkpoints"):
        run = str(checkpoints.parent.relative_to(folder))
        result_file = checkpoints / "best" / "evaluation" / "evaluation.json"
        if not result_file.is_file():
            lines.append((0.0, [run, *[MISSING_CELL] * (len(SWEEP_COLUMNS) - 1)]))
            continue
        evaluation = read_result(result_file, Evaluation)
        methods = evaluation.drafter_methods
        chain = next((method for method in methods if method.name == "chain"), None)
        trees = [method for method in methods if method.name != "chain"]
        fastest_tree = max(trees, key=lambda method: method.speedup, default=None)
        cells = [
            run,
            str(evaluation.step),
            *format_method_cells(chain)[1:],
            *format_method_cells(fastest_tree),
        ]
        lines.append((chain.tau if chain else 0.0, cells))
    lines.sort(key=lambda line: (-line[0], line[1]))
    return format_markdown_table(SWEEP_COLUMNS, [cells for _, cells in lines])


def format_method_cells(method: "MethodResult | None") -> list[str]:
    """Return a method's label, acceptance length and speedup as text; dashes for None."""
    from infer.evaluation.tables import MISSING_CELL, format_method_row

    if method is None:
        return [MISSING_CELL] * 3
    label, tau, _, speedup, _ = format_method_row(method)
    return [label, tau, speedup]
