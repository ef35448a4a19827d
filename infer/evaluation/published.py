"""Formats the results of a suite of question sets in the form of Table 1 of the DDTree paper,
beside the results of the paper. published.csv contains the paper's results.
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from infer.evaluation.results import (
    TRANSFORMERS_BASELINE_METHOD,
    MethodResult,
    SetResult,
    SuiteResult,
)
from infer.evaluation.tables import MISSING_CELL, format_markdown_table

DDTREE_PAPER_CITATION = (
    "Accelerating Speculative Decoding with Block Diffusion Draft Trees, arXiv:2604.12989, Table "
    "1: 8 H200 GPUs, bfloat16, block size 16, at most 2,048 new tokens; DDTree with the best "
    "budget of 16 to 1,024 nodes"
)
# Results of the DDTree paper for three target models with DFlash drafters
DDTREE_PAPER_RESULTS_FILE = Path(__file__).with_suffix(".csv")
# A column "paper" contains the value in the paper for the quantity in the column to its left.
PAPER_TABLE_COLUMNS = (
    "set",
    "answers",
    "plain tokens/s",
    "chain speedup",
    "paper",
    "chain τ",
    "paper",
    "DDTree nodes",
    "DDTree speedup",
    "paper",
    "DDTree τ",
    "paper",
    "same",
)
# Number formats of all columns of PAPER_TABLE_COLUMNS except the first two and the last one
PAPER_TABLE_NUMBER_FORMATS = (
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


class PublishedResult(NamedTuple):
    """The results of the DDTree paper for one target model, temperature and question set.

    A chain is a draft without branches. A value is None if the paper does not report it.
    """

    chain_speedup: float | None = None
    chain_tau: float | None = None
    ddtree_speedup: float | None = None
    ddtree_tau: float | None = None


def find_published_result(target: str, temperature: float, set_name: str) -> PublishedResult | None:
    """Return the results of the DDTree paper for a target, a temperature and a question set.

    target: hub name or folder of the target; its last part must be the model's name in the paper

    Returns None if the paper has no such results.
    """
    model = target.rstrip("/").rpartition("/")[2].lower()
    for row in csv.reader(DDTREE_PAPER_RESULTS_FILE.read_text().splitlines()):
        if row[:3] == [model, f"{temperature:g}", set_name]:
            return PublishedResult(*map(float, row[3:]))
    return None


def compute_means_of_complete_columns(rows: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Return the mean of every column of a table, or None for a column with a missing number."""
    means = []
    for column in zip(*rows, strict=True):
        numbers = [number for number in column if number is not None]
        means.append(sum(numbers) / len(numbers) if len(numbers) == len(column) else None)
    return means


def format_suite(suite: SuiteResult) -> str:
    """Return the results of a suite in Markdown, with two tables for each temperature.

    The first table has the columns of Table 1 of the DDTree paper, and the results of the paper
    where they exist. The second table has all methods.
    """
    paragraphs = [f"# {suite.suite}: {suite.target}"]
    has_published = False
    for temperature in dict.fromkeys(each.temperature for each in suite.sets):
        sets = [each for each in suite.sets if each.temperature == temperature]
        published = [find_published_result(suite.target, temperature, each.set) for each in sets]
        has_published = has_published or any(published)
        paragraphs += [
            f"## Temperature {temperature:g}",
            format_paper_table(sets, published),
            format_methods_by_set_table(sets),
        ]

    answers = sum(each.answers for each in suite.sets)
    left_out = sum(each.left_out for each in suite.sets)
    first = suite.sets[0].result
    notes = (
        f"{first.device}, {first.dtype}, {answers} answers of at most {first.max_new_tokens} new "
        "tokens"
    )
    if left_out:
        notes += f"; {left_out} questions were left out because they are too long for the target"
    for each in suite.sets:
        if each.result.time_limit_note:
            notes += f"; {each.title}: {each.result.time_limit_note}"
    notes += (
        ". τ is the number of tokens per round, including the bonus token. τ and speedups are "
        "averaged over answers and do not include the prefill. The column 'same' counts the "
        "answers that equal those of plain decoding, for the method with the lowest count."
    )
    if has_published:
        notes += f" The paper is {DDTREE_PAPER_CITATION}."
    return "\n\n".join([*paragraphs, notes])


def format_paper_table(sets: list[SetResult], published: Sequence[PublishedResult | None]) -> str:
    """Return a Markdown table with the τ (tokens per round) and the speedup of chains, which are
    drafts without branches, and of DDTree. Of the node budgets of DDTree (numbers of drafted nodes
    per round), the fastest is shown. The table has a row for each question set and a row of means.

    published: the paper's result for each set, or None. If all are None, the table has no columns
        for the paper
    """
    rows = []
    number_rows = []
    for result, paper in zip(sets, published, strict=True):
        paper = paper or PublishedResult()
        methods = result.result.methods
        chain = find_fastest_budget(methods, "chain")
        tree = find_fastest_budget(methods, "ddtree")
        numbers = [
            methods[0].tokens_per_second,
            chain.decoding_speedup,
            paper.chain_speedup,
            chain.tau_prompt_mean,
            paper.chain_tau,
            tree.budget,
            tree.decoding_speedup,
            paper.ddtree_speedup,
            tree.tau_prompt_mean,
            paper.ddtree_tau,
        ]
        number_rows.append(numbers)
        identical_outputs = min(
            method.identical_outputs or 0
            for method in methods
            if method.name != TRANSFORMERS_BASELINE_METHOD.name
        )
        same = f"{identical_outputs}/{result.answers}"
        rows.append([result.title, str(result.answers), *format_paper_table_numbers(numbers), same])

    mean_row = [
        "**mean**",
        "",
        *format_paper_table_numbers(compute_means_of_complete_columns(number_rows)),
        "",
    ]
    mean_row[PAPER_TABLE_COLUMNS.index("DDTree nodes")] = ""
    rows.append(mean_row)

    columns = range(len(PAPER_TABLE_COLUMNS))
    if not any(published):
        columns = [i for i in columns if PAPER_TABLE_COLUMNS[i] != "paper"]
    head = [PAPER_TABLE_COLUMNS[i] for i in columns]
    shown_rows = []
    for row in rows:
        shown_rows.append([row[i] for i in columns])
    return format_markdown_table(head, shown_rows)


def find_fastest_budget(methods: Sequence[MethodResult], name: str) -> MethodResult:
    """Return the result of one method with the node budget that has the highest speedup.

    name: the name of the method
    """
    candidates = [method for method in methods if method.name == name]
    return max(candidates, key=lambda method: method.decoding_speedup or 0.0)


def format_paper_table_numbers(numbers: Sequence[float | None]) -> list[str]:
    """Return the numbers in one row of `format_paper_table` as strings for the cells."""
    return [
        MISSING_CELL if number is None else number_format.format(number)
        for number_format, number in zip(PAPER_TABLE_NUMBER_FORMATS, numbers, strict=True)
    ]


def format_methods_by_set_table(sets: list[SetResult]) -> str:
    """Return a Markdown table with τ and speedup of every method on every question set.

    The last row has the means over the sets.
    """
    methods = sets[0].result.drafting_methods
    titles = [result.title for result in sets]
    number_rows = []
    for result in sets:
        numbers = []
        for method in result.result.drafting_methods:
            numbers += [method.tau_prompt_mean, method.decoding_speedup]
        number_rows.append(numbers)
    titles.append("**mean**")
    number_rows.append(compute_means_of_complete_columns(number_rows))

    rows = []
    for title, numbers in zip(titles, number_rows, strict=True):
        pairs = zip(numbers[::2], numbers[1::2], strict=True)
        rows.append([title, *(f"{tau:.2f}, {speedup:.2f}x" for tau, speedup in pairs)])
    return format_markdown_table(["τ, speedup", *(method.label for method in methods)], rows)
