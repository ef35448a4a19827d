"""Evaluations as text. A method is one row of cells under COLUMNS, in a terminal, in Markdown and
in a page alike; the result is also said in a few sentences."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace

from infer.evaluation.results import GENERATE, Evaluation, MethodResult, surest
from infer.evaluation.ruler import DISTURBED, FEWEST, figures

DASH = "-"
COLUMNS = ("method", "tokens per round (τ)", "tokens/s", "speedup", "same output")
STUDY = ("replayed", "τ by marginals", "τ", "τ in the best order", "tokens/s")
ENGINES = "vLLM, SGLang, llama.cpp and transformers"
MARK = "~"
MEANING = f"{MARK}  not significant: the interval holds 1, or there are fewer than {FEWEST} prompts"


def method_cells(method: MethodResult) -> list[str]:
    """Return a method's row under COLUMNS."""
    same = {True: "yes", False: "no" if method.name == GENERATE.name else "NO", None: DASH}[
        method.identical
    ]
    if method.ties is not None:
        same += f" ({method.ties} prompts at ties, {method.defects} by defects)"
    return [
        method.label,
        f"{method.tau:.2f}{span(method.tau_interval)}",
        f"{method.tokens_per_second:.1f}",
        f"{method.speedup:.2f}x{span(method.speedup_interval)}{mark(method)}",
        same,
    ]


def span(interval: list[float] | None) -> str:
    """Return an interval in brackets, with a space before; nothing where there is none."""
    return (
        ""
        if interval is None or interval[0] == interval[1]
        else f" [{interval[0]:.2f}, {interval[1]:.2f}]"
    )


def mark(method: MethodResult) -> str:
    """Return the mark of a speedup that is no finding."""
    return MARK if method.tree.drafts and method.finding == "undecided" else ""


def legend(methods: Iterable[MethodResult], cells: Iterable[str] = ()) -> list[str]:
    """Return what the mark of these methods, or in cells of speedups, means; nothing where none has
    it."""
    return [MEANING] if MARK in "".join([*map(mark, methods), *cells]) else []


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, as wide as it needs in a terminal: the first column to the left, the
    others to the right."""
    columns = []
    for i, (name, *cells) in enumerate(zip(head, *rows, strict=True)):
        width = max(4, len(name), *map(len, cells))
        rule = f"{'-' * (width - 1)}{':' if i else '-'}"
        columns.append(
            [cell.rjust(width) if i else cell.ljust(width) for cell in (name, rule, *cells)]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*columns, strict=True))


def method_table(evaluation: Evaluation) -> str:
    """Return the evaluation in Markdown, one row a method, and what the mark in it means."""
    return "\n\n".join(
        [
            markdown(COLUMNS, list(map(method_cells, evaluation.methods))),
            *legend(evaluation.methods),
        ]
    )


def table(evaluation: Evaluation) -> str:
    """Return the evaluation for a terminal: one line a method, then other prompts and sampled texts
    beside."""
    groups = kinds_of(evaluation)
    parts = [method_table(evaluation)]
    if len(groups) > 1:
        rows = beside(evaluation, groups)
        parts += [
            markdown(["τ, speedup", *groups], rows),
            *legend((), [cell for row in rows for cell in row[1:]]),
        ]
    if study := study_table(evaluation):
        parts += [markdown(study[0][0], study[0][1:]), study[1]]
    return "\n\n".join([*parts, "\n".join(notes_of(evaluation))]).rstrip()


def study_table(evaluation: Evaluation) -> tuple[list[Sequence[str]], str] | None:
    """Return what was replayed of the chain and DDTrees, STUDY and a row each, and what it says of
    trees, in words; None where nothing was."""
    trees = evaluation.trees
    rows = [STUDY]
    own = [one for one in evaluation.methods if one.name in ("chain", "ddtree")]
    if trees is None:
        return None
    found = {
        (one.method, one.nodes, one.by): f"{one.tau:.2f}{span(one.tau_interval)}"
        for one in trees.orders
    }
    for method in own:
        cells = [
            found.get((method.name, method.budget, by), DASH)
            for by in ("marginals", "drafter", "ideal")
        ]
        rows.append([method.label, *cells, f"{method.tokens_per_second:.1f}"])
    asked = [one for one in trees.choices if any(one.asked)]
    shares = ", ".join(
        f"{one.share:.2f}{span(one.interval)} behind {one.behind} by the {one.by}" for one in asked
    )
    chain, *larger = own
    best = surest([replace(one, **asdict(figures(one.prompts, chain.prompts))) for one in larger])
    said = f"How often the drafter's first choice is the target's token, in rounds of {trees.nodes} nodes: {shares}."
    return (
        rows,
        f"{said} Of the trees, {best.label} is {speedup_in_words(best)}, compared with the chain.",
    )


def comparison(evaluations: dict[str, Evaluation]) -> str:
    """Return several drafters' evaluations side by side, in Markdown: for each τ, tokens a second
    and speedup."""
    rows: dict[str, list[str]] = {}
    for i, evaluation in enumerate(evaluations.values()):
        for method in evaluation.methods:
            label, tau, rate, speedup, _ = method_cells(method)
            other = " (other output)" * (method.identical is False)
            rows.setdefault(label, [DASH] * 3 * len(evaluations))[3 * i : 3 * i + 3] = [
                tau,
                rate,
                speedup + other,
            ]
    heads = [head for name in evaluations for head in (f"{name} τ", "tokens/s", "speedup")]
    text = markdown(["method", *heads], [[label, *cells] for label, cells in rows.items()])
    return "\n\n".join(
        [text, *legend(method for one in evaluations.values() for method in one.methods)]
    )


def headline(evaluation: Evaluation) -> str:
    """Return the result in a few plain sentences, good or bad, see `findings`."""
    return " ".join(findings(evaluation))


def findings(evaluation: Evaluation) -> list[str]:
    """Return the result, one sentence each: τ of the chain, which engines verify; what that means
    for them; what was measured on this machine; whether the outputs are right."""
    chains = [method for method in evaluation.of_drafter if method.name == "chain"]
    sentences = []
    for chain in chains:
        sentences += [
            f"A chain of {chain.budget} drafts, which is what {ENGINES} verify, commits τ = {chain.tau:.2f} tokens per "
            "pass of the target.",
            f"τ does not depend on the machine: such an engine is at most {chain.tau:.2f} times as fast with this "
            f"drafter, nearly that where a pass over {chain.budget + 1} tokens costs about as much as a pass over "
            "one (on a GPU with few requests), and less where it costs more (on a CPU).",
        ]
    sentences += [
        sentence
        for sentence in (describe_speedups(evaluation), describe_outputs(evaluation))
        if sentence
    ]
    return sentences


def describe_speedups(evaluation: Evaluation) -> str | None:
    """Return a sentence with the speedups of the chain, the best trees and n-grams alone on this
    machine, None where nothing drafted."""
    own = evaluation.of_drafter
    chains = [method for method in own if method.name == "chain"]
    trees = [method for method in own if method.name != "chain" and not method.tree.ngrams]
    joined = [method for method in own if method.tree.ngrams]
    others = [method for method in evaluation.drafting if method not in own]
    shown = [*chains, *(surest(methods) for methods in (trees, joined) if methods), *others]
    if not shown:
        return None
    baseline = f"plain decoding{' by transformers' * (evaluation.plain.name != 'plain')}"
    labels = ["the chain" if method in chains else method.label for method in shown]
    first, *rest = (
        f"{label} is {speedup_in_words(method)}"
        for label, method in zip(labels, shown, strict=True)
    )
    first = first.replace(" times as fast", f" times as fast as {baseline}", 1)
    return f"On this machine ({evaluation.device}) {', '.join([first, *rest])}."


def describe_outputs(evaluation: Evaluation) -> str:
    """Return a sentence that says whether every method wrote what plain decoding wrote."""
    every = [method for one in (evaluation, *(evaluation.beside or ())) for method in one.ours]
    wrong = ", ".join(dict.fromkeys(method.label for method in every if not method.identical))
    count = evaluation.prompts
    prompts = "the one prompt" if count == 1 else f"{'some of' if wrong else 'all'} {count} prompts"
    if wrong:
        return f"Outputs of {wrong} differ from plain decoding's on {prompts}."
    return f"On {prompts} every method wrote exactly what plain decoding wrote."


def speedup_in_words(method: MethodResult) -> str:
    """Return a speedup in words, good or bad."""
    if method.finding == "undecided":
        return f"{method.speedup:.2f} times as fast (not significant)"
    return f"{method.speedup:.2f} times as fast{' (slower)' * (method.speedup < 1)}"


def notes_of(evaluation: Evaluation) -> list[str]:
    """Return what belongs below the tables: what there was no time for, what was measured again,
    and how much of the texts is repetition."""
    every = evaluation, *(evaluation.beside or ())
    lines = [f"{one.what}: {one.cut}" if one.what else one.cut for one in every if one.cut]
    if again := sum(method.again or 0 for one in every for method in one.methods):
        lines.append(
            f"measured again, as it took over {DISTURBED} times the method's median time a token: {again}"
        )
    for one in every:
        if prompts := one.methods[0].prompts:
            looped = [p.looped for p in prompts if p.looped]
            tokens = sum(p.tokens for p in prompts)
            lines.append(
                f"{one.what or 'held-out prompts'}: {len(looped)} of {len(prompts)} texts "
                f"({len(looped) / len(prompts):.0%}) ended in loops, which are {sum(looped) / tokens:.0%} of {tokens} "
                "tokens"
            )
    return lines


def kinds_of(evaluation: Evaluation) -> dict[str, Evaluation]:
    """Return the columns of the second table: the methods on the prompts of each kind, and on those
    beside."""
    kinds = list(dict.fromkeys(one.kind for one in evaluation.methods[0].prompts or ()))
    groups = {}
    for kind in kinds if len(kinds) > 1 else ():
        methods = [of_kind(method, evaluation.plain, kind) for method in evaluation.methods]
        groups[kind] = replace(evaluation, methods=methods)
    return groups | {one.what: one for one in evaluation.beside or ()}


def of_kind(method: MethodResult, plain: MethodResult, kind: str) -> MethodResult:
    """Return the method with its figures over the prompts of one kind."""
    prompts, theirs = (
        [one for one in each.prompts if one.kind == kind] for each in (method, plain)
    )
    return replace(method, prompts=prompts, **asdict(figures(prompts, theirs)))


def beside(evaluation: Evaluation, groups: dict[str, Evaluation]) -> list[list[str]]:
    """Return a row for every method of the evaluation: its label, and for each group τ and the
    speedup with its mark."""
    rows = []
    for method in evaluation.methods:
        found = [
            next((one for one in group.methods if one.label == method.label), None)
            for group in groups.values()
        ]
        cells = [
            DASH if one is None else f"{one.tau:.2f} {one.speedup:.2f}x{mark(one)}" for one in found
        ]
        rows.append([method.label, *cells])
    return rows
