"""The table at the end of a sweep (`-m`): what every run of it came to."""

from pathlib import Path
from typing import TYPE_CHECKING

from hydra.experimental.callback import Callback

COLUMNS = ("run", "step", "chain: τ", "speedup", "best tree", "τ", "speedup")
DASH = "-"

if TYPE_CHECKING:  # Hydra imports this file before a command is known to be right
    from infer.evaluation.results import Evaluation


class SweepTable(Callback):
    """Hydra's callback of training, see conf/hydra/run.yaml: prints a table when all jobs have ended."""

    def on_multirun_end(self, config, **kwargs) -> None:
        folder = Path(config.hydra.sweep.dir)
        print(f"\nRuns in {folder}, each by its best checkpoint, on its own held-out prompts:\n")
        print(sweep_table(folder), flush=True)


def sweep_table(folder: Path) -> str:
    """Return a Markdown table with a row for each run below a sweep's folder, the longest τ of a chain
    first."""
    from infer.evaluation.results import Evaluation, read_result
    from infer.evaluation.tables import markdown

    rows = {}
    for checkpoints in sorted(folder.rglob("checkpoints")):
        name = str(checkpoints.parent.relative_to(folder))
        result = checkpoints / "best" / "evaluation" / "evaluation.json"
        if not result.is_file():
            rows[name, 0.0] = [name, *[DASH] * (len(COLUMNS) - 1)]
            continue
        evaluation = read_result(result, Evaluation)
        rows[name, tau_of_chain(evaluation)] = [name, str(evaluation.step), *drafting_cells(evaluation)]
    by_tau = sorted(rows, key=lambda row: (-row[1], row[0]))
    return markdown(COLUMNS, [rows[row] for row in by_tau])


def tau_of_chain(evaluation: "Evaluation") -> float:
    return max((method.tau for method in evaluation.of_drafter if method.name == "chain"), default=0.0)


def drafting_cells(evaluation: "Evaluation") -> list[str]:
    """Return τ and speedup of the chain, and label, τ and speedup of the fastest tree."""
    from infer.evaluation.tables import method_cells

    chains = [method for method in evaluation.of_drafter if method.name == "chain"]
    trees = [method for method in evaluation.of_drafter if method.name != "chain"]
    cells = []
    for method in chains[:1]:
        _, tau, _, speedup, _ = method_cells(method)
        cells += [tau, speedup]
    cells = cells or [DASH, DASH]
    if not trees:
        return [*cells, DASH, DASH, DASH]
    label, tau, _, speedup, _ = method_cells(max(trees, key=lambda method: method.speedup))
    return [*cells, label, tau, speedup]
