"""The table that is printed at the end of a sweep (several runs with the option -m). It has the
results of all runs of the sweep."""

from pathlib import Path
from typing import TYPE_CHECKING

from hydra.experimental.callback import Callback

# Titles of the columns. τ is the acceptance length.
SWEEP_COLUMNS = ("run", "step", "chain: τ", "speedup", "best tree", "τ", "speedup")

# Hydra imports this file before the options are checked, so the file must be imported fast.
if TYPE_CHECKING:
    from omegaconf import DictConfig

    from infer.evaluation.results import MethodResult


class SweepTable(Callback):
    """A Hydra callback that prints a table after all runs of a sweep. conf/hydra/run.yaml registers
    it for the training command."""

    def on_multirun_end(self, config: "DictConfig", **kwargs: object) -> None:
        """Print the table with the results of all runs of the sweep."""
        folder = Path(config.hydra.sweep.dir)
        print(
            f"\nThe runs in {folder}. A line has the results of the run's best checkpoint on the "
            "run's own held-out prompts:\n"
        )
        print(format_sweep_table(folder), flush=True)


def format_sweep_table(folder: Path) -> str:
    """Return a Markdown table with one line per run in a sweep's folder. The runs are sorted by
    their acceptance length with a chain, the largest first; runs without an evaluation come last.
    """
    from infer.evaluation.results import Evaluation, read_result
    from infer.evaluation.tables import MISSING_CELL, format_markdown_table

    lines = []  # for each run, the acceptance length of the chain and the cells of its line
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
    """Return three cells of the table: a method's label, acceptance length and speedup. If `method`
    is None, the cells are dashes."""
    from infer.evaluation.tables import MISSING_CELL, format_method_row

    if method is None:
        return [MISSING_CELL] * 3
    label, tau, _, speedup, _ = format_method_row(method)
    return [label, tau, speedup]
