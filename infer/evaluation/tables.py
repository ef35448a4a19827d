"""Evaluations as text: tables for a terminal, Markdown tables, and the result in a sentence."""

from collections.abc import Sequence

from infer.evaluation.published import CITATION, METHODS, Published, published
from infer.evaluation.results import Evaluation, MethodResult, SetResult, SuiteResult

Figures = Sequence[float | None]
DASH = "-"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], last: str = "---:") -> str:
    """Return a Markdown table: the first column to the left, all others to the right, the last one by `last`."""
    lines = [head, ["---", *["---:"] * (len(head) - 2), last], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def headline(evaluation: Evaluation) -> str:
    """Return the result in one or two plain sentences, good or bad."""
    best, count = evaluation.fastest, evaluation.prompts
    text = f"{best.label} commits {best.tau:.2f} tokens per round and decodes "
    if best.speedup >= 1:
        text += f"{best.speedup:.2f} times as fast as plain decoding. "
    else:
        text += f"at only {best.speedup:.2f} times the speed of plain decoding: here speculation does not pay. "
    wrong = [method.label for method in evaluation.methods if not method.identical]
    if wrong:
        return text + f"Outputs of {', '.join(wrong)} differ from plain decoding's on some of {count} prompts."
    return text + f"On all {count} prompts every method wrote exactly what plain decoding wrote."


def table(evaluation: Evaluation) -> str:
    """Return the evaluation for a terminal, one line a method."""
    if evaluation.masked is not None:
        return masked_table(evaluation)
    wide = max(11, *(len(method.name) + 1 for method in evaluation.methods))
    lines = [f"{'method':<{wide}}{'nodes':>6}{'τ':>7}{'rounds':>8}{'tokens/s':>10}{'speedup':>9}  same output as plain"]
    for method in evaluation.methods:
        lines.append(
            f"{method.name:<{wide}}{method.budget or DASH:>6}{method.tau:>7.2f}{method.rounds:>8}"
            f"{method.tokens_per_second:>10.1f}{method.speedup:>8.2f}x  {'yes' if method.identical else 'NO'}"
            + (f" ({method.ties} prompts at ties, {method.defects} by defects)" if method.ties is not None else "")
        )
    return "\n".join(lines)


def masked_table(evaluation: Evaluation) -> str:
    """Return the same for a masked model, then the limits (SSD's tables 3 and 2)."""
    details, plain = evaluation.masked, evaluation.methods[0]
    policy = "no cache" if details.cache == "none" else f"dual cache, refresh {details.refresh}"
    lines = [
        f"{evaluation.device}, {evaluation.dtype}: {evaluation.prompts} prompts, {evaluation.rows} at a time, "
        f"{evaluation.max_new_tokens} tokens each, {plain.tokens / evaluation.prompts:.1f} of them before an end",
        f"blocks of {details.block_length}, {policy}, temperature {evaluation.temperature:g}",
        "",
        "drafts  order      states  passes  step reduction  tokens/s  speedup  differ",
    ]
    for method in evaluation.methods:
        lines.append(
            f"{method.draft_length or DASH!s:<8}{method.name:<10}{method.states:>7.1f}{method.rounds:>8}"
            f"{evaluation.step_reduction(method):>16.1%}{method.tokens_per_second:>10.0f}{method.speedup:>8.2f}x"
            f"{evaluation.prompts - method.same:>8}"
        )
    lines += ["", "Limit of the step reduction when drafts are among the model's k likeliest tokens of a position:", ""]
    ranks = range(1, 1 + max(map(len, details.limits.values()), default=0))
    lines.append(f"{'drafts':<8}" + "".join(f"{f'k = {k}':>9}" for k in ranks) + f"{'all right':>11}")
    for length, limits in details.limits.items():
        bound = int(length) / (int(length) + 1)
        lines.append(f"{length:<8}" + "".join(f"{x:>9.1%}" for x in limits) + f"{bound:>11.1%}")
    lines += ["", "Nearest to a tie: {:.1e} between positions, {:.1e} between tokens".format(*details.gaps)]
    return "\n".join(lines)


def method_table(evaluation: Evaluation) -> str:
    """Return the evaluation in Markdown, one row a method."""
    rows = [
        [m.label, f"{m.tau:.2f}", f"{m.tokens_per_second:.1f}", f"{m.speedup:.2f}x", "yes" if m.identical else "no"]
        for m in evaluation.methods
    ]
    return markdown(["method", "tokens per round (τ)", "tokens/s", "speedup", "same output"], rows, last="---")


def comparison(evaluations: dict[str, Evaluation]) -> str:
    """Return several drafters' evaluations side by side, in Markdown: for each τ, tokens a second and speedup."""
    rows: dict[tuple[str, str], list[str]] = {}
    for evaluation in evaluations.values():
        for method in evaluation.methods:
            mark = "" if method.identical else " (other output)"
            name, nodes = method.tree.label, str(method.budget) if method.tree.by_budget else DASH
            cells = [f"{method.tau:.2f}", f"{method.tokens_per_second:.0f}", f"{method.speedup:.2f}x{mark}"]
            rows.setdefault((name, nodes), []).extend(cells)
    heads = [head for name in evaluations for head in (f"{name} τ", "tokens/s", "speedup")]
    return markdown(["tree", "nodes", *heads], [[*key, *cells] for key, cells in rows.items()])


def suite_table(suite: SuiteResult) -> str:
    """Return for each temperature a table in the layout of DDTree's Table 1, the published figures beside ours, and one
    of all methods, each with a row of means."""
    parts, known = [f"# {suite.suite}: {suite.target}"], False
    for temperature in dict.fromkeys(one.temperature for one in suite.sets):
        sets = [one for one in suite.sets if one.temperature == temperature]
        beside = [published(suite.target, temperature, one.set) for one in sets]
        known = known or any(beside)
        parts += [f"## Temperature {temperature:g}", best_budgets(sets, beside), every_method(sets)]
    asked, left_out = sum(one.answers for one in suite.sets), sum(one.left_out for one in suite.sets)
    notes = f"{suite.device}, {suite.dtype}, {asked} answers of at most {suite.max_new_tokens} new tokens"
    if left_out:
        notes += f"; {left_out} questions were left out: too long for the target"
    parts.append(
        f"{notes}. τ: tokens a round, bonus token included; like speedups, averaged over answers, without the prefill. "
        "Same: answers that are plain decoding's, token by token, of the method that has the fewest."
        + f" Paper: {CITATION}."
        * known
    )
    return "\n\n".join(parts)


def best_budgets(sets: list[SetResult], beside: list[Published | None]) -> str:
    """Return the paper's methods set by set, each with the budget of the highest speedup, and its figures beside
    ours."""
    rows, numbers = [], []
    for one, theirs in zip(sets, beside, strict=True):
        plain, chain, tree = (fastest_of(one.result.methods, name) for name in METHODS)
        paper = (None,) * 4 if theirs is None else theirs
        ours = chain.decoding_speedup, chain.tau_prompt_mean, tree.decoding_speedup, tree.tau_prompt_mean
        pairs = [figure for pair in zip(ours, paper, strict=True) for figure in pair]
        numbers.append([plain.tokens_per_second, *pairs])
        same = f"{min(method.same for method in one.result.methods)}/{one.answers}"
        rows.append([one.title, str(one.answers), *cells(numbers[-1], str(tree.budget)), same])
    rows.append(["**mean**", "", *cells(means(numbers), ""), ""])
    first, second, third = (method.tree.label for method in (plain, chain, tree))
    head = ["set", "answers", f"{first} tokens/s", f"{second} speedup", "paper", f"{second} τ", "paper"]
    return markdown([*head, f"{third} nodes", f"{third} speedup", "paper", f"{third} τ", "paper", "same"], rows)


def fastest_of(methods: list[MethodResult], name: str) -> MethodResult:
    """Return the fastest result of one tree method."""
    return max((method for method in methods if method.name == name), key=lambda method: method.decoding_speedup)


def cells(figures: Figures, nodes: str) -> list[str]:
    """Return the numbers of a row: tokens a second, four of the chain, the nodes, four of DDTree."""
    rate, *rest = figures
    words = [DASH if figure is None else f"{figure:.2f}" for figure in rest]
    words = [word if i % 4 > 1 or word == DASH else f"{word}x" for i, word in enumerate(words)]
    return [f"{rate:.1f}", *words[:4], nodes, *words[4:]]


def means(rows: list[Figures]) -> list[float | None]:
    """Return the mean of every column; None where a figure is missing."""
    columns = zip(*rows, strict=True)
    return [None if None in column else sum(column) / len(column) for column in columns]


def every_method(sets: list[SetResult]) -> str:
    """Return τ and speedup of every method on every set, in Markdown."""
    shown = [one.result.methods[1:] for one in sets]  # the first is plain decoding
    numbers = [[x for m in methods for x in (m.tau_prompt_mean, m.decoding_speedup)] for methods in shown]
    names = [one.title for one in sets] + ["**mean**"]
    rows = [
        [name, *(f"{tau:.2f}, {speedup:.2f}x" for tau, speedup in zip(row[::2], row[1::2], strict=True))]
        for name, row in zip(names, [*numbers, means(numbers)], strict=True)
    ]
    return markdown(["τ, speedup", *(method.label for method in shown[0])], rows)
