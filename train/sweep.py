"""The table of results that is printed at the end of a sweep: several training runs that one
command starts with Hydra's option -m."""

from pathlib import Path
from typing import TYPE_CHECKING

from hydra.experimental.callback import Callback

# column titles; τ is the acceptance length
SWEEP_COLUMNS = ("run", "step", "chain: τ", "speedup", "best tree", "τ", "speedup")

# Hydra imports this file before the options are checked. Slow imports would delay error messages.
if TYPE_CHECKING:
    from omegaconf import DictConfig

    from infer.evaluation.results import MethodResult


class SweepTable(Callback):
    """A Hydra callback that prints a table of results after the last run of a sweep.
    conf/hydra/run.yaml registers this callback for the training command."""

    def on_multirun_end(self, config: "DictConfig", **kwargs: object) -> None:
        """Print the table of results of all runs of a sweep. Hydra calls this method after the last
        run. config: the configuration, including Hydra's own options."""
        folder = Path(config.hydra.sweep.dir)
        print(
            f"\nThe runs in {folder}. Each line has the results of a run's best checkpoint on the "
            "held-out prompts of this run:\n"
        )
        print(format_sweep_table(folder), flush=True)


def format_sweep_table(folder: Path) -> str:
    """Return a Markdown table with one line for each run of a sweep.

    folder: the sweep's folder, which contains the runs' folders. The runs are sorted by their
    acceptance length when each round drafts a chain (not a tree), the largest first. Runs without
    an evaluation come last.
    """
    from infer.evaluation.results import Evaluation, read_result
    from infer.evaluation.tables import MISSING_CELL, format_markdown_table

    # for each run, a tuple: the acceptance length with drafted chains, and the cells of the line
    lines = []
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
    """Return three cells of the table for a decoding method: its label, its acceptance length and
    its speedup. If `method` is None, the cells are dashes."""
    from infer.evaluation.tables import MISSING_CELL, format_method_row

    if method is None:
        return [MISSING_CELL] * 3
    label, tau, _, speedup, _ = format_method_row(method)
    return [label, tau, speedup]
