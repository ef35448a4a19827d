"""The figures of papers beside ours, number for number: Table 1 of DDTree's, which published.csv
holds, and a finished suite in its layout."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from infer.evaluation.results import GENERATE, SetResult, SuiteResult
from infer.evaluation.tables import DASH, markdown

CITATION = (
    "Accelerating Speculative Decoding with Block Diffusion Draft Trees, arXiv:2604.12989, Table 1: 8 H200 GPUs, "
    "bfloat16, block size 16, at most 2,048 new tokens; DDTree with the best budget of 16 to 1,024 nodes"
)
TABLE = Path(__file__).with_suffix(".csv")  # of three models, each with its public DFlash drafter
HEADS = (
    "set",
    "answers",
    "plain tokens/s",
    "chain speedup",
    "paper",
    "chain τ",
    "paper",
    "DDTree nodes",
)
HEADS += ("DDTree speedup", "paper", "DDTree τ", "paper", "same")
FORMATS = (
    "{:.1f}",
    "{:.2f}x",
    "{:.2f}x",
    "{:.2f}",
    "{:.2f}",
    "{:.0f}",
    "{:.2f}x",
    "{:.2f}x",
    "{:.2f}",
    "{:.2f}",
)


class Published(NamedTuple):
    """One row of the paper's table for one model."""

    chain_speedup: float | None = None
    chain_tau: float | None = None
    ddtree_speedup: float | None = None
    ddtree_tau: float | None = None


def published(target: str, temperature: float, name: str) -> Published | None:
    """Return the paper's figures for a target (its hub id or folder ends in the model's name), a
    temperature and a set; None where the paper has none."""
    keys = [target.rstrip("/").rpartition("/")[2].lower(), f"{temperature:g}", name]
    for row in csv.reader(TABLE.read_text().splitlines()):
        if row[:3] == keys:
            return Published(*map(float, row[3:]))
    return None


def means(rows: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Return the mean of every column; None where a figure is missing."""
    columns = zip(*rows, strict=True)
    return [None if None in column else sum(column) / len(column) for column in columns]


def suite_table(suite: SuiteResult) -> str:
    """Return for each temperature a table in the layout of DDTree's Table 1, the published figures
    beside ours, and one of all methods, each with a row of means."""
    parts = [f"# {suite.suite}: {suite.target}"]
    known = False
    for temperature in dict.fromkeys(one.temperature for one in suite.sets):
        sets = [one for one in suite.sets if one.temperature == temperature]
        theirs = [published(suite.target, temperature, one.set) for one in sets]
        known = known or any(theirs)
        parts += [f"## Temperature {temperature:g}", best_budgets(sets, theirs), every_method(sets)]
    asked = sum(one.answers for one in suite.sets)
    left_out = sum(one.left_out for one in suite.sets)
    first = suite.sets[0].result
    notes = f"{first.device}, {first.dtype}, {asked} answers of at most {first.max_new_tokens} new tokens"
    if left_out:
        notes += f"; {left_out} questions were left out: too long for the target"
    notes += "".join(f"; {one.title}: {one.result.cut}" for one in suite.sets if one.result.cut)
    parts.append(
        f"{notes}. τ: tokens a round, bonus token included; like speedups, averaged over answers, without the prefill. "
        "Same: answers that are plain decoding's, token by token, of the method that has the fewest."
        + f" Paper: {CITATION}."
        * known
    )
    return "\n\n".join(parts)


def best_budgets(sets: list[SetResult], theirs: list[Published | None]) -> str:
    """Return the paper's methods set by set, each with the budget of the highest speedup, and its
    figures beside ours, where it has any of these sets."""
    rows = []
    numbers = []
    for one, paper in zip(sets, theirs, strict=True):
        paper = paper or Published()
        methods = one.result.methods
        chain, tree = (
            max(
                (method for method in methods if method.name == name),
                key=lambda method: method.decoding_speedup,
            )
            for name in ("chain", "ddtree")
        )
        of_chain = (
            chain.decoding_speedup,
            paper.chain_speedup,
            chain.tau_prompt_mean,
            paper.chain_tau,
        )
        of_tree = (
            tree.decoding_speedup,
            paper.ddtree_speedup,
            tree.tau_prompt_mean,
            paper.ddtree_tau,
        )
        numbers.append([methods[0].tokens_per_second, *of_chain, tree.budget, *of_tree])
        same = f"{min(method.same for method in methods if method.name != GENERATE.name)}/{one.answers}"
        rows.append([one.title, str(one.answers), *cells(numbers[-1]), same])
    rows.append(["**mean**", "", *cells(means(numbers)), ""])
    rows[-1][HEADS.index("DDTree nodes")] = ""
    shown = [column for column, head in enumerate(HEADS) if head != "paper" or any(theirs)]
    return markdown(
        [HEADS[column] for column in shown], [[row[column] for column in shown] for row in rows]
    )


def cells(numbers: Sequence[float | None]) -> list[str]:
    """Return the numbers of a row of `best_budgets` as text."""
    return [DASH if x is None else form.format(x) for form, x in zip(FORMATS, numbers, strict=True)]


def every_method(sets: list[SetResult]) -> str:
    """Return τ and speedup of every method on every set, in Markdown."""
    shown = [one.result.drafting for one in sets]
    numbers = [
        [x for m in methods for x in (m.tau_prompt_mean, m.decoding_speedup)] for methods in shown
    ]
    names = [one.title for one in sets] + ["**mean**"]
    rows = [
        [
            name,
            *(
                f"{tau:.2f}, {speedup:.2f}x"
                for tau, speedup in zip(row[::2], row[1::2], strict=True)
            ),
        ]
        for name, row in zip(names, [*numbers, means(numbers)], strict=True)
    ]
    return markdown(["τ, speedup", *(method.label for method in shown[0])], rows)
