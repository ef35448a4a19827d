"""The table at the end of a sweep (`-m`): what every run of it came to."""

from pathlib import Path
from typing import TYPE_CHECKING

from hydra.experimental.callback import Callback

SWEEP_COLUMNS = ("run", "step", "chain: τ", "speedup", "best tree", "τ", "speedup")

if TYPE_CHECKING:  # Hydra imports this file before a command is known to be right
    from infer.evaluation.results import MethodResult


class SweepTable(Callback):
    """Hydra's callback of training, see conf/hydra/run.yaml: prints a table when all jobs have
    ended."""

    def on_multirun_end(self, config, **kwargs) -> None:
        folder = Path(config.hydra.sweep.dir)
        print(f"\nRuns in {folder}, each by its best checkpoint, on its own held-out prompts:\n")
        print(sweep_table(folder), flush=True)


def sweep_table(folder: Path) -> str:
    """Return a Markdown table with a row for each run below a sweep's folder, the longest τ of a
    chain first; a run without an evaluation comes last."""
    from infer.evaluation.results import Evaluation, read_result
    from infer.evaluation.tables import DASH, markdown

    rows = []
    for checkpoints in folder.rglob("checkpoints"):
        run = str(checkpoints.parent.relative_to(folder))
        result = checkpoints / "best" / "evaluation" / "evaluation.json"
        if result.is_file():
            evaluation = read_result(result, Evaluation)
            chain = next(
                (method for method in evaluation.of_drafter if method.name == "chain"), None
            )
            trees = [method for method in evaluation.of_drafter if method.name != "chain"]
            fastest_tree = max(trees, key=lambda method: method.speedup, default=None)
            cells = [
                run,
                str(evaluation.step),
                *method_columns(chain)[1:],
                *method_columns(fastest_tree),
            ]
            rows.append((chain.tau if chain else 0.0, cells))
        else:
            rows.append((0.0, [run, *[DASH] * (len(SWEEP_COLUMNS) - 1)]))
    rows.sort(key=lambda row: (-row[0], row[1]))
    return markdown(SWEEP_COLUMNS, [cells for _, cells in rows])


def method_columns(method: "MethodResult | None") -> list[str]:
    """Return a method's label, τ and speedup; dashes for None."""
    from infer.evaluation.tables import DASH, method_cells

    if method is None:
        return [DASH] * 3
    label, tau, _, speedup, _ = method_cells(method)
    return [label, tau, speedup]
