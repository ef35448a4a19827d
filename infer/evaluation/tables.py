"""Formats the results of evaluations as tables and sentences, for terminals, Markdown and HTML.

The main table has a row for each decoding method and the columns METHOD_COLUMNS.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace

from infer.evaluation.metrics import (
    MIN_PROMPTS_FOR_CONFIDENCE_INTERVAL,
    MIN_TIME_RATIO_TO_REMEASURE,
    compute_metrics,
)
from infer.evaluation.results import (
    TRANSFORMERS_BASELINE_METHOD,
    Evaluation,
    MethodResult,
    select_best_method,
)

MISSING_CELL = "-"
METHOD_COLUMNS = ("method", "tokens per round (τ)", "tokens/s", "speedup", "same output")
REPLAY_TABLE_COLUMNS = ("replayed", "τ by marginals", "τ", "τ in the best order", "tokens/s")
ENGINES_VERIFYING_CHAINS_ONLY = "vLLM, SGLang, llama.cpp and transformers"
# The ratio is that of the verification times of 16 tokens and of one in docs/results/gpu.md.
GPU_SENTENCE_START = (
    "On a GPU a pass over 16 tokens (15 drafted ones and the newest) takes little longer than a "
    "pass over one (1.2 times as long on an H200)"
)
INSIGNIFICANT_MARK = "~"
INSIGNIFICANT_LEGEND = (
    f"{INSIGNIFICANT_MARK}  not significant: the interval holds 1, or there are fewer than "
    f"{MIN_PROMPTS_FOR_CONFIDENCE_INTERVAL} prompts"
)


def format_method_row(method: MethodResult) -> list[str]:
    """Return the table cells of a method, one for each of METHOD_COLUMNS."""
    if method.identical is None:
        same_output = MISSING_CELL
    elif method.identical:
        same_output = "yes"
    elif method.name == TRANSFORMERS_BASELINE_METHOD.name:
        same_output = "no"
    else:
        same_output = "NO"
    if method.ties is not None:
        same_output += f" ({method.ties} prompts at ties, {method.defects} by defects)"

    speedup = f"{method.speedup:.2f}x{format_interval(method.speedup_interval)}"
    return [
        method.label,
        f"{method.tau:.2f}{format_interval(method.tau_interval)}",
        f"{method.tokens_per_second:.1f}",
        speedup + significance_mark(method),
        same_output,
    ]


def format_interval(interval: Sequence[float] | None) -> str:
    """Return a confidence interval as text: a space and two numbers in brackets.

    Returns "" if there is no interval or if both ends are equal.
    """
    if interval is None or interval[0] == interval[1]:
        return ""
    return f" [{interval[0]:.2f}, {interval[1]:.2f}]"


def significance_mark(method: MethodResult) -> str:
    """Return INSIGNIFICANT_MARK if the speedup of a method is not significant, else ""."""
    is_undecided = method.tree_method.needs_drafter and method.significance == "undecided"
    return INSIGNIFICANT_MARK if is_undecided else ""


def build_significance_legend(
    methods: Iterable[MethodResult], cells: Iterable[str] = ()
) -> list[str]:
    """Return [INSIGNIFICANT_LEGEND] if a table contains INSIGNIFICANT_MARK, else an empty list.

    methods: the methods in the table; a method with an insignificant speedup has the mark
    cells: other cells of the table, which may contain the mark
    """
    texts = [*map(significance_mark, methods), *cells]
    return [INSIGNIFICANT_LEGEND] if any(INSIGNIFICANT_MARK in text for text in texts) else []


def format_markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table whose cells are padded to the width of their column.

    The first column is aligned left, and the others are aligned right.
    """
    columns = []
    for i, (name, *cells) in enumerate(zip(head, *rows, strict=True)):
        width = max(4, len(name), *map(len, cells))
        if i == 0:
            column = [name, "-" * width, *cells]
            columns.append([cell.ljust(width) for cell in column])
        else:
            column = [name, "-" * (width - 1) + ":", *cells]
            columns.append([cell.rjust(width) for cell in column])
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*columns, strict=True))


def format_method_table(evaluation: Evaluation) -> str:
    """Return a Markdown table with a row of results for each method, followed by an explanation of
    the marks in it.
    """
    rows = [format_method_row(method) for method in evaluation.methods]
    table = format_markdown_table(METHOD_COLUMNS, rows)
    return "\n\n".join([table, *build_significance_legend(evaluation.methods)])


def format_evaluation(evaluation: Evaluation) -> str:
    """Return the text that a terminal shows for an evaluation.

    It has a table of methods, a table of the results on each group of prompts, a table of draft
    trees whose acceptance was computed without decoding (infer/evaluation/replay.py), and notes.
    """
    paragraphs = [format_method_table(evaluation)]

    groups = group_by_prompt_kind(evaluation)
    if len(groups) > 1:
        rows = build_group_rows(evaluation, groups)
        paragraphs.append(format_markdown_table(["τ, speedup", *groups], rows))
        paragraphs += build_significance_legend((), [cell for row in rows for cell in row[1:]])

    study = build_replay_table(evaluation)
    if study is not None:
        (head, *rows), sentence = study
        paragraphs += [format_markdown_table(head, rows), sentence]

    paragraphs.append("\n".join(list_measurement_notes(evaluation)))
    return "\n\n".join(paragraphs).rstrip()


def build_replay_table(evaluation: Evaluation) -> tuple[list[Sequence[str]], str] | None:
    """Return a table with the τ (tokens per round) of chains (drafts without branches) and draft
    trees, and a sentence that compares them. These values of τ were computed without decoding
    (infer/evaluation/replay.py).

    The first row of the table has the column names REPLAY_TABLE_COLUMNS. Returns None if
    `evaluation` has no such values.
    """
    study = evaluation.tree_study
    if study is None:
        return None
    methods = [method for method in evaluation.methods if method.name in ("chain", "ddtree")]
    taus = {
        (result.method, result.nodes, result.ranking): (
            f"{result.tau:.2f}{format_interval(result.tau_interval)}"
        )
        for result in study.results
    }
    rows: list[Sequence[str]] = [REPLAY_TABLE_COLUMNS]
    for method in methods:
        cells = [
            taus.get((method.name, method.budget, ranking), MISSING_CELL)
            for ranking in ("marginals", "drafter", "ideal")
        ]
        rows.append([method.label, *cells, f"{method.tokens_per_second:.1f}"])

    accuracies = ", ".join(
        (
            f"{each.accuracy:.2f}{format_interval(each.interval)} after {each.prefix} by the "
            f"{each.source}"
        )
        for each in study.first_choices
        if any(each.attempts)
    )
    chain, *trees = methods
    trees_over_chain = [
        replace(tree, **asdict(compute_metrics(tree.prompts or (), chain.prompts or ())))
        for tree in trees
    ]
    best = select_best_method(trees_over_chain)
    sentence = (
        f"How often the drafter's first choice is the target's token, in rounds of {study.nodes} "
        f"nodes: {accuracies}. Of the trees, {best.label} is {describe_speedup(best)}, compared "
        "with the chain."
    )
    return rows, sentence


def format_comparison(evaluations: Mapping[str, Evaluation]) -> str:
    """Return a Markdown table with τ, tokens per second and speedup of several drafters.

    evaluations: keys are names of drafters, values are their evaluations
    """
    rows: dict[str, list[str]] = {}
    for i, evaluation in enumerate(evaluations.values()):
        for method in evaluation.methods:
            label, tau, tokens_per_second, speedup, _ = format_method_row(method)
            if method.identical is False:
                speedup += " (other output)"
            row = rows.setdefault(label, [MISSING_CELL] * 3 * len(evaluations))
            row[3 * i : 3 * i + 3] = [tau, tokens_per_second, speedup]

    head = ["method"]
    for name in evaluations:
        head += [f"{name} τ", "tokens/s", "speedup"]
    table = format_markdown_table(head, [[label, *cells] for label, cells in rows.items()])
    methods = [method for evaluation in evaluations.values() for method in evaluation.methods]
    return "\n\n".join([table, *build_significance_legend(methods)])


def format_findings(evaluation: Evaluation) -> str:
    """Return the sentences of `list_findings` as one text."""
    return " ".join(list_findings(evaluation))


def list_findings(evaluation: Evaluation) -> list[str]:
    """Return sentences that summarise an evaluation.

    They give the τ (tokens per pass of the target) of chains, which are drafts without branches,
    and of the best draft tree; the speedups that were measured on this machine; what to expect on a
    GPU and in engines that verify only chains; and whether the outputs equal those of baseline
    decoding.
    """
    sentences = []
    chains = [method for method in evaluation.drafter_methods if method.name == "chain"]
    if chains:
        sentences.append(describe_tau(chains[0], select_best_tree(evaluation)))
    speedups = describe_speedups(evaluation)
    if speedups is not None:
        sentences.append(speedups)
    if chains:
        sentences.append(
            f"{GPU_SENTENCE_START}, so the speedup there is closer to τ (not measured "
            f"here); an engine that verifies "
            f"only chains ({ENGINES_VERIFYING_CHAINS_ONLY}) can be at most {chains[0].tau:.2f} "
            "times as fast with this drafter as without."
        )
    return [*sentences, describe_outputs(evaluation)]


def describe_tau(chain: MethodResult, tree: MethodResult | None) -> str:
    """Return a sentence with the τ of a chain and of a draft tree."""
    taus = f"τ = {chain.tau:.2f} tokens on average with a chain of {chain.budget} drafted tokens"
    if tree is not None:
        taus += f" and {tree.tau:.2f} with {tree.label} (a tree of {tree.budget} drafted tokens)"
    return (
        f"A pass of the target adds {taus}; without a drafter it adds 1 token, and τ does "
        "not depend on the machine."
    )


def select_best_tree(evaluation: Evaluation) -> MethodResult | None:
    """Return the fastest method that builds draft trees from the drafter alone, without n-grams."""
    trees = [
        method
        for method in evaluation.drafter_methods
        if method.name != "chain" and not method.tree_method.needs_ngrams
    ]
    return select_best_method(trees) if trees else None


def describe_speedups(evaluation: Evaluation) -> str | None:
    """Return a sentence with the speedups that were measured on this machine.

    It gives the speedups of the chain, of the best tree without n-grams, of the best tree with
    n-grams, and of n-grams without the drafter; and how long a round with the best tree takes.
    Returns None if none of these was measured.
    """
    drafter_methods = evaluation.drafter_methods
    chains = [method for method in drafter_methods if method.name == "chain"]
    tree = select_best_tree(evaluation)
    methods = chains if tree is None else [*chains, tree]
    trees_with_ngrams = [method for method in drafter_methods if method.tree_method.needs_ngrams]
    if trees_with_ngrams:
        methods = [*methods, select_best_method(trees_with_ngrams)]
    without_drafter = [
        method for method in evaluation.drafting_methods if method not in drafter_methods
    ]
    methods = [*methods, *without_drafter]
    if not methods:
        return None

    clauses = []
    for method in methods:
        label = "the chain" if method in chains else method.label
        clauses.append(f"{label} is {describe_speedup(method)}")
    baseline = "plain decoding (without a drafter)"
    if evaluation.fastest_baseline.name != "plain":
        baseline = "plain decoding by transformers"
    clauses[0] = clauses[0].replace(" times as fast", f" times as fast as {baseline}", 1)
    sentence = f"On this machine ({evaluation.device}) {', '.join(clauses)}"
    if tree is not None:
        round_ratio = tree.tau / tree.speedup
        sentence += (
            f"; a round with {tree.label} (drafting and one pass of the target) takes "
            f"{round_ratio:.1f} times as long as a pass without a drafter, so {tree.tau:.2f} "
            f"tokens per round give a speedup of {tree.speedup:.2f}"
        )
    return sentence + "."


def describe_outputs(evaluation: Evaluation) -> str:
    """Return a sentence that says whether all outputs equal those of baseline decoding."""
    methods = [method for each in evaluation.with_others for method in each.engine_methods]
    labels = dict.fromkeys(method.label for method in methods if not method.identical)
    count = evaluation.prompts
    if count == 1:
        prompts = "the one prompt"
    elif labels:
        prompts = f"some of {count} prompts"
    else:
        prompts = f"all {count} prompts"
    if labels:
        return f"Outputs of {', '.join(labels)} differ from plain decoding's on {prompts}."
    return f"On {prompts} the output of every method equals that of plain decoding."


def describe_speedup(method: MethodResult) -> str:
    """Return the speedup of a method in words, such as "1.50 times as fast"."""
    text = f"{method.speedup:.2f} times as fast"
    if method.significance == "undecided":
        return f"{text} (not significant)"
    return f"{text} (slower)" if method.speedup < 1 else text


def list_measurement_notes(evaluation: Evaluation) -> list[str]:
    """Return the notes below the tables.

    The notes say which prompts were not decoded because of the time limit, how many prompts were
    measured again, and how many outputs were ended because they repeated themselves.
    """
    notes = []
    for each in evaluation.with_others:
        if each.time_limit_note:
            prefix = f"{each.prompt_set_name}: " if each.prompt_set_name else ""
            notes.append(prefix + each.time_limit_note)

    methods = [method for each in evaluation.with_others for method in each.methods]
    remeasured = sum(method.remeasured_prompts or 0 for method in methods)
    if remeasured:
        notes.append(
            f"measured again, as it took over {MIN_TIME_RATIO_TO_REMEASURE} times the method's "
            f"median time per token: {remeasured}"
        )

    for each in evaluation.with_others:
        prompts = each.methods[0].prompts
        if not prompts:
            continue
        loop_tokens = [result.loop_tokens for result in prompts if result.loop_tokens]
        tokens = sum(result.tokens for result in prompts)
        notes.append(
            f"{each.prompt_set_name or 'held-out prompts'}: {len(loop_tokens)} of {len(prompts)} "
            f"outputs ({len(loop_tokens) / len(prompts):.0%}) ended in repetitions, which are "
            f"{sum(loop_tokens) / tokens:.0%} of {tokens} tokens"
        )
    return notes


def group_by_prompt_kind(evaluation: Evaluation) -> dict[str, Evaluation]:
    """Return the evaluation of each group of prompts. Keys are the names of the groups.

    Each prompt set except the first one is a group. If the prompts of the first set have several
    kinds, each kind is a group, too.
    """
    groups = {}
    kinds = dict.fromkeys(result.kind for result in evaluation.methods[0].prompts or ())
    if len(kinds) > 1:
        baseline = evaluation.fastest_baseline
        for kind in kinds:
            methods = [restrict_to_kind(method, baseline, kind) for method in evaluation.methods]
            groups[kind] = replace(evaluation, methods=methods)
    for other in evaluation.other_evaluations or ():
        groups[other.prompt_set_name or ""] = other
    return groups


def restrict_to_kind(method: MethodResult, baseline: MethodResult, kind: str) -> MethodResult:
    """Return the results of a method on the prompts of one kind, such as "functions".

    baseline: the results of the fastest baseline decoder; speedups are relative to it
    """
    prompts = [result for result in method.prompts or () if result.kind == kind]
    baseline_prompts = [result for result in baseline.prompts or () if result.kind == kind]
    metrics = compute_metrics(prompts, baseline_prompts)
    return replace(method, prompts=prompts, **asdict(metrics))


def build_group_rows(evaluation: Evaluation, groups: Mapping[str, Evaluation]) -> list[list[str]]:
    """Return a table with τ and speedup of each method on each group of prompts.

    It has a row for each method, which begins with the method's label. A cell ends with
    INSIGNIFICANT_MARK if the speedup is not significant.

    groups: keys are names of groups, values are the evaluations on their prompts
    """
    rows = []
    for method in evaluation.methods:
        row = [method.label]
        for group in groups.values():
            matches = [each for each in group.methods if each.label == method.label]
            if matches:
                result = matches[0]
                mark = significance_mark(result)
                row.append(f"{result.tau:.2f} {result.speedup:.2f}x{mark}")
            else:
                row.append(MISSING_CELL)
        rows.append(row)
    return rows
