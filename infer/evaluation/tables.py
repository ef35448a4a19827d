"""A suite's figures as Markdown: DDTree's Table 1 with the published figures beside ours, then every method."""

from infer.evaluation.published import CITATION, Published, published
from infer.evaluation.report import label

DASH = "-"


def suite_table(suite: dict) -> str:
    """For each temperature a table in the layout of DDTree's Table 1, and one of all methods, each with a row of means.
    `suite` is what `infer.evaluation.suite.evaluate_suite` returns."""
    parts, known = [f"# {suite['suite']}: {suite['target']}"], False
    for temperature in dict.fromkeys(one["temperature"] for one in suite["sets"]):
        sets = [one for one in suite["sets"] if one["temperature"] == temperature]
        beside = [published(suite["target"], temperature, one["set"]) for one in sets]
        known = known or any(beside)
        parts += [f"## Temperature {temperature:g}", best_budgets(sets, beside), every_method(sets)]
    asked = sum(one["answers"] for one in suite["sets"])
    left_out = sum(one["left_out"] for one in suite["sets"])
    notes = f"{suite['device']}, {suite['dtype']}, {asked} answers of at most {suite['max_new_tokens']} new tokens"
    if left_out:
        notes += f"; {left_out} questions were left out: too long for the target"
    parts.append(
        f"{notes}. τ: tokens a round, bonus token included; like speedups, averaged over answers, without the prefill. "
        "Same: answers that are plain decoding's, token by token, of the method that has the fewest."
        + f" Paper: {CITATION}."
        * known
    )
    return "\n\n".join(parts)


def best_budgets(sets: list[dict], beside: list[Published | None]) -> str:
    """The chain and the DDTree budget with the highest speedup, set by set, the paper's figures beside them."""
    head = ["set", "answers", "plain tokens/s"]
    head += ["chain speedup", "paper", "chain τ", "paper"]
    head += ["DDTree nodes", "DDTree speedup", "paper", "DDTree τ", "paper", "same"]
    rows, numbers = [], []
    for one, theirs in zip(sets, beside, strict=True):
        methods = one["result"]["methods"]
        plain, chain = (next(m for m in methods if m["name"] == name) for name in ("plain", "chain"))
        best = max((m for m in methods if m["name"] == "ddtree"), key=lambda m: m["decoding_speedup"])
        figures = [
            plain["tokens_per_second"],
            chain["decoding_speedup"],
            theirs and theirs.chain_speedup,
            chain["tau_prompt_mean"],
            theirs and theirs.chain_tau,
            best["decoding_speedup"],
            theirs and theirs.ddtree_speedup,
            best["tau_prompt_mean"],
            theirs and theirs.ddtree_tau,
        ]
        numbers.append(figures)
        same = f"{min(method['same'] for method in methods)}/{one['answers']}"
        rows.append([one["title"], str(one["answers"]), *cells(figures, str(best["budget"])), same])
    rows.append(["**mean**", "", *cells(means(numbers), ""), ""])
    return markdown(head, rows)


def cells(figures: list[float | None], nodes: str) -> list[str]:
    """The numbers of a row: tokens a second, four of the chain, the nodes, four of DDTree."""
    rate, *rest = figures
    words = [DASH if figure is None else f"{figure:.2f}" for figure in rest]
    words = [word if i % 4 > 1 or word == DASH else f"{word}x" for i, word in enumerate(words)]
    return [f"{rate:.1f}", *words[:4], nodes, *words[4:]]


def means(rows: list[list[float | None]]) -> list[float | None]:
    """Column by column; None where one is missing."""
    columns = zip(*rows, strict=True)
    return [None if None in column else sum(column) / len(column) for column in columns]


def every_method(sets: list[dict]) -> str:
    """τ and speedup of every method on every set."""
    shown = [[m for m in one["result"]["methods"] if m["name"] != "plain"] for one in sets]
    numbers = [[x for m in methods for x in (m["tau_prompt_mean"], m["decoding_speedup"])] for methods in shown]
    names = [one["title"] for one in sets] + ["**mean**"]
    rows = [
        [name, *(f"{tau:.2f}, {speedup:.2f}x" for tau, speedup in zip(row[::2], row[1::2], strict=True))]
        for name, row in zip(names, [*numbers, means(numbers)], strict=True)
    ]
    return markdown(["τ, speedup", *map(label, shown[0])], rows)


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
