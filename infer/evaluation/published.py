"""The figures of papers, to show beside ours, number for number: Table 1 of DDTree's, which published.csv holds."""

import csv
from pathlib import Path
from typing import NamedTuple

CITATION = (
    "Accelerating Speculative Decoding with Block Diffusion Draft Trees, arXiv:2604.12989, Table 1: 8 H200 GPUs, "
    "bfloat16, block size 16, at most 2,048 new tokens; DDTree with the best budget of 16 to 1,024 nodes"
)
METHODS = ("plain", "chain", "ddtree")  # rows of our table of tree methods that it measured
TABLE = Path(__file__).with_suffix(".csv")  # of three models, each with its public DFlash drafter


class Published(NamedTuple):
    """One row of the paper's table for one model."""

    chain_speedup: float
    chain_tau: float
    ddtree_speedup: float
    ddtree_tau: float


def figures_of(table: Path, target: str, *keys: str) -> list[float] | None:
    """Return the figures of the row of a table that begins with a target's name (its hub id or folder ends in it) and
    these keys; None where there is none."""
    start = [target.rstrip("/").rpartition("/")[2].lower(), *keys]
    for row in csv.reader(table.read_text().splitlines()):
        if row[: len(start)] == start:
            return [float(figure) for figure in row[len(start) :]]
    return None


def published(target: str, temperature: float, name: str) -> Published | None:
    """Return the paper's figures for a target, a temperature and a set; None where the paper has none."""
    found = figures_of(TABLE, target, f"{temperature:g}", name)
    return found and Published(*found)
