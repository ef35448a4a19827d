"""Evaluations as text: tables for a terminal, Markdown tables, and the result in a sentence."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace

from infer.evaluation.others import OTHERS
from infer.evaluation.published import CITATION, METHODS, Published, published
from infer.evaluation.results import OTHER_DRAFTER, Evaluation, MethodResult, SetResult, SuiteResult, surest
from infer.evaluation.ruler import DISTURBED, FEWEST, figures
from infer.trees.methods import TREES

Figures = Sequence[float | None]
DASH = "-"
COLUMNS = ("method", "tokens per round (τ)", "tokens/s", "speedup", "same output")
ENGINES = "vLLM, SGLang, llama.cpp and transformers"
VAGUE = "±"
MARKS = {"undecided": "~", "impossible": "!"}  # by what a speedup shows, see MethodResult.finding
MEANINGS = {
    "~": f"not significant: the interval holds 1, or there are fewer than {FEWEST} prompts",
    VAGUE: "known to no better than 10 % either way",
    "!": "cannot be: more than τ, though every round holds a pass of the target",
}


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], last: str = "---:") -> str:
    """Return a Markdown table: the first column to the left, all others to the right, the last one by `last`."""
    lines = [head, ["---", *["---:"] * (len(head) - 2), last], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def speed(method: MethodResult, interval: bool = False) -> str:
    """Return a speedup with its mark, if asked for with its interval."""
    return f"{method.speedup:.2f}x{span(method.speedup_interval) if interval else ''}{mark(method)}"


def span(interval: list[float] | None) -> str:
    """Return an interval in brackets, with a space before; nothing where there is none."""
    return "" if interval is None or interval[0] == interval[1] else f" [{interval[0]:.2f}, {interval[1]:.2f}]"


def mark(method: MethodResult) -> str:
    """Return the mark of a speedup that is no finding, or a vague one."""
    if not method.tree.drafts:
        return ""
    return MARKS.get(method.finding, VAGUE * (method.vague and method.finding != ""))


def legend(methods: Iterable[MethodResult], cells: Iterable[str] = ()) -> list[str]:
    """Return what the marks of these methods, and those in cells of speedups, mean, a line each."""
    found = "".join([*map(mark, methods), *cells])
    return [f"{sign}  {meaning}" for sign, meaning in MEANINGS.items() if sign in found]


def headline(evaluation: Evaluation) -> str:
    """Return the result in a few plain sentences, good or bad: what a chain gains, which engines verify; what trees
    gain; what n-grams would without the drafter."""
    own, count = evaluation.of_drafter, evaluation.prompts
    over = f"plain decoding{' by transformers' * (evaluation.plain.name != 'plain')}"
    said = [
        f"A {method.label} of {method.budget}, which is what {ENGINES} verify, commits {method.tau:.2f} tokens per "
        f"round and is {gain(method, over)}."
        for method in own
        if method.name == "chain"
    ]
    joined = [method for method in own if method.tree.ngrams]
    trees = [[method for method in own if method.name != "chain" and method not in joined], joined]
    parts = [f"{best.label} commits {best.tau:.2f} and is {gain(best)}" for best in map(surest, filter(None, trees))]
    said += [f"Of our trees, {'; '.join(parts)}."] * bool(parts)
    if evaluation.ties and evaluation.fastest.finding == "faster":
        said.append(f"As fast as {evaluation.fastest.label} may be: {', '.join(m.label for m in evaluation.ties)}.")
    said += [
        f"N-grams alone, {method.budget} nodes without the drafter, commit {method.tau:.2f} and are {gain(method)}."
        for method in evaluation.drafting
        if method not in own
    ]
    every = [method for one in (evaluation, *(evaluation.beside or ())) for method in one.methods]
    wrong = dict.fromkeys(method.label for method in every if method.identical is False and method.name not in OTHERS)
    prompts = "the one prompt" if count == 1 else f"{'some of' if wrong else 'all'} {count} prompts"
    same = f"On {prompts} every method wrote exactly what plain decoding wrote."
    return " ".join(
        [*said, f"Outputs of {', '.join(wrong)} differ from plain decoding's on {prompts}." if wrong else same]
    )


def gain(method: MethodResult, over: str = "") -> str:
    """Return a speedup in words, good or bad; `over`: over whose speed, where that was not said before."""
    interval = span(method.speedup_interval).replace("[", "(95 %: ").replace("]", ")").replace(", ", " to ")
    found = f"{method.speedup:.2f} times as fast{' as' * bool(over)} {over}".rstrip() + interval
    if method.finding == "impossible":
        return f"{found}, which cannot be: it is more than τ"
    if method.finding == "undecided":
        return f"{found}, which is not significant"
    return found if method.speedup >= 1 else f"{found}: it does not pay here"


def loops(evaluation: Evaluation) -> str:
    """Return how much of what was written is repetition; nothing for an evaluation that did not look."""
    prompts = evaluation.methods[0].prompts
    if not prompts:
        return ""
    looped, tokens = [one.looped for one in prompts if one.looped], sum(one.tokens for one in prompts)
    return (
        f"{len(looped)} of {len(prompts)} texts ({len(looped) / len(prompts):.0%}) ended in loops, which are "
        f"{sum(looped) / tokens:.0%} of {tokens} tokens"
    )


def table(evaluation: Evaluation) -> str:
    """Return the evaluation for a terminal: one line a method, then other prompts and sampled texts beside."""
    rows = [["method", "nodes", "τ [95 %]", "rounds", "tokens/s", "speedup [95 %]", "", "same output as plain"]]
    for method in evaluation.methods:
        why = f" ({method.ties} prompts at ties, {method.defects} by defects)" if method.ties is not None else ""
        other = method.identical is False and method.name not in OTHERS
        same = {True: "yes", False: "NO" if other else "no", None: DASH}[method.identical]
        tau, rate = method_cells(method)[1:3]
        figures = [tau, str(method.rounds), rate, f"{method.speedup:.2f}x{span(method.speedup_interval)}", mark(method)]
        rows.append([method.name, str(method.budget or DASH), *figures, same + why])
    groups = kinds_of(evaluation)
    methods = [[m.name + (f" {m.budget}" if m.budget else ""), *cells] for m, cells in beside(evaluation, groups)]
    marked = [cell for _, *cells in methods for cell in cells if len(groups) > 1]
    lines = [*aligned(rows, left=(0, len(rows[0]) - 1)), *legend(evaluation.methods, marked)]
    if len(groups) > 1:
        lines += ["", *aligned([["τ, speedup", *groups], *methods], left=(0,))]
    return "\n".join([*lines, "", *notes(evaluation)]).rstrip()


def notes(evaluation: Evaluation) -> list[str]:
    """Return what belongs below the tables: the drafter in the target's folder, measurements that were made again, and
    how much of the texts is repetition."""
    every = [evaluation, *(evaluation.beside or ())]
    lines = []
    for one in every[1:]:
        if one.what == OTHER_DRAFTER:
            cells = "; ".join(f"{method.label}: τ {method.tau:.2f}, {speed(method)}" for method in one.of_drafter)
            lines.append(f"the drafter in the target's folder, on {one.prompts} of the prompts: {cells}")
    again = sum(method.again or 0 for one in every for method in one.methods)
    if again:
        what = "measurement" if again == 1 else "measurements"
        lines.append(f"{again} {what} took over {DISTURBED} times the method's median time a token, and were repeated")
    return lines + [f"{one.what or 'held-out prompts'}: {said}" for one in every if (said := loops(one))]


def kinds_of(evaluation: Evaluation) -> dict[str, Evaluation]:
    """Return the columns of the second table: the methods on the prompts of each kind, and on those beside."""
    kinds = dict.fromkeys(one.kind for one in evaluation.methods[0].prompts or ())
    columns = {one.what: one for one in evaluation.beside or () if one.what != OTHER_DRAFTER}
    if len(kinds) < 2:
        return columns
    methods, plain = evaluation.methods, evaluation.plain
    return {
        kind: replace(evaluation, methods=[of_kind(one, plain, kind) for one in methods]) for kind in kinds
    } | columns


def beside(evaluation: Evaluation, groups: dict[str, Evaluation]) -> Iterator[tuple[MethodResult, list[str]]]:
    """Yield every method of the evaluation with a cell a column: τ and the speedup with its mark."""
    for method in evaluation.methods:
        found = [next((one for one in group.methods if one.label == method.label), None) for group in groups.values()]
        yield method, [DASH if one is None else f"{one.tau:.2f} {speed(one)}" for one in found]


def of_kind(method: MethodResult, plain: MethodResult, kind: str) -> MethodResult:
    """Return the method with its figures over the prompts of one kind."""
    prompts, theirs = ([one for one in each.prompts if one.kind == kind] for each in (method, plain))
    return replace(method, prompts=prompts, **asdict(figures(prompts, theirs)))


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """Return rows as lines of columns, two spaces apart: those of `left` to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def method_cells(method: MethodResult) -> list[str]:
    """Return a method's row under COLUMNS."""
    return [
        method.label,
        f"{method.tau:.2f}{span(method.tau_interval)}",
        f"{method.tokens_per_second:.1f}",
        speed(method, interval=True),
        {True: "yes", False: "no", None: DASH}[method.identical],
    ]


def method_table(evaluation: Evaluation) -> str:
    """Return the evaluation in Markdown, one row a method, and what the marks in it mean."""
    text = markdown(COLUMNS, list(map(method_cells, evaluation.methods)), last="---")
    return "\n\n".join([text, *legend(evaluation.methods)])


def comparison(evaluations: dict[str, Evaluation]) -> str:
    """Return several drafters' evaluations side by side, in Markdown: for each τ, tokens a second and speedup."""
    rows: dict[tuple[str, str], list[str]] = {}
    for i, evaluation in enumerate(evaluations.values()):
        for method in evaluation.methods:
            other = " (other output)" * (method.identical is False)
            name, nodes = method.tree.label, str(method.budget) if method.tree.by_budget else DASH
            _, tau, rate, faster, _ = method_cells(method)
            row = rows.setdefault((name, nodes), [DASH] * 3 * len(evaluations))
            row[3 * i : 3 * i + 3] = [tau, rate, faster + other]
    heads = [head for name in evaluations for head in (f"{name} τ", "tokens/s", "speedup")]
    text = markdown(["tree", "nodes", *heads], [[*key, *cells] for key, cells in rows.items()])
    return "\n\n".join([text, *legend(method for one in evaluations.values() for method in one.methods)])


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
        same = f"{min(method.same for method in one.result.methods if method.name not in OTHERS)}/{one.answers}"
        rows.append([one.title, str(one.answers), *cells(numbers[-1], str(tree.budget)), same])
    rows.append(["**mean**", "", *cells(means(numbers), ""), ""])
    first, second, third = (method.tree.label for method in (plain, chain, tree))
    head = ["set", "answers", f"{first} tokens/s", f"{second} speedup", "paper", f"{second} τ", "paper"]
    return markdown([*head, f"{third} nodes", f"{third} speedup", "paper", f"{third} τ", "paper", "same"], rows)


def fastest_of(methods: list[MethodResult], name: str) -> MethodResult:
    """Return the fastest result of one tree method, or of that which took its place for a drafter with n-grams."""
    own = [method for method in methods if method.name == name]
    own = own or [method for method in methods if method.name == TREES[name].with_ngrams]
    return max(own, key=lambda method: method.decoding_speedup)


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
    shown = [one.result.drafting for one in sets]
    numbers = [[x for m in methods for x in (m.tau_prompt_mean, m.decoding_speedup)] for methods in shown]
    names = [one.title for one in sets] + ["**mean**"]
    rows = [
        [name, *(f"{tau:.2f}, {speedup:.2f}x" for tau, speedup in zip(row[::2], row[1::2], strict=True))]
        for name, row in zip(names, [*numbers, means(numbers)], strict=True)
    ]
    return markdown(["τ, speedup", *(method.label for method in shown[0])], rows)
