"""Why a drafter's acceptance is low: what its card says, what we reach with it, what an engine
reaches, and which of the known causes (`infer.doctor.causes`) explains the difference.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from infer.doctor.causes import (
    CAUSES,
    MORE,
    SHORT,
    Case,
    Cause,
    Served,
    Variation,
    difference,
    falls_short,
    taps_of,
)
from infer.doctor.replay import chains, compute
from infer.drafters.base import Drafter
from infer.evaluation.results import Acceptance, Reference
from infer.targets.target import Target

EXPLAINS = 0.5  # share of a difference from which on a trial is called its cause
EXACTLY = 0.8  # the same where acceptance is not low: what is read otherwise and costs little
APART = 0.01  # of the rounds and accepted drafts, from which on it is tried what is read otherwise


class Tried(NamedTuple):
    """A trial and what it gave, text by text."""

    cause: Cause
    trial: Variation
    found: list[Acceptance]


@dataclass(frozen=True)
class Diagnosis:
    """What was found. evidence: what was measured or tried, and its acceptance; cause: None for a
    healthy pair, or where no known cause explains it."""

    healthy: bool
    verdict: str
    evidence: list[tuple[str, Acceptance]]
    cause: Cause | None = None
    mend: str | None = None


def examine(
    target: Target,
    drafter: Drafter,
    reference: Reference,
    served: Served | None = None,
    carded: bool = True,
    checkpoint: str = "<drafter>",
) -> Diagnosis:
    """Compare what a card says (`carded`: the reference is one; else it was measured just now, with
    this drafter), what the drafter reaches here, and what an engine reaches."""
    trials = [(cause, trial) for cause in CAUSES for trial in cause.trials(target, drafter)]
    taps = dict.fromkeys([*taps_of(drafter), *(tap for _, trial in trials for tap in trial.taps)])
    prompts = [text.prompt for text in reference.texts]
    answers = [text.ids for text in reference.texts]
    material = compute(target, prompts, answers, list(taps))
    margin = reference.block_size - 1
    ours = chains(target, drafter, material, taps_of(drafter), margin)
    here = Acceptance.of_all(ours)
    names = {"checkpoint": checkpoint, "target": target.name}
    cases = {}
    rows = [("here, as the folder says", here)]

    @cache
    def tried() -> list[Tried]:
        return [
            Tried(cause, trial, chains(target, trial.drafter, material, trial.taps, margin))
            for cause, trial in trials
        ]

    if carded:
        rows.insert(0, ("its card", reference.acceptance))
        cases["its card"] = Case(target, drafter, reference, material, ours, reference.by_text)
    if served is not None:
        rows.append((served.engine, Acceptance.of_all(served.by_text)))
        cases[served.engine] = Case(
            target, drafter, reference, material, ours, served.by_text, served
        )
    for case in cases.values():
        if found := diagnose(case, tried, rows, names):
            return found
    if not carded:
        best = max(tried(), key=lambda one: Acceptance.of_all(one.found).mean)
        most = Acceptance.of_all(best.found)
        if most.mean > MORE * here.mean and falls_short(here, most):
            verdict = f"{best.trial.label} gives {1 + most.mean:.2f} tokens a round, {1 + here.mean:.2f} as it is"
            return named(
                best.cause,
                verdict,
                rows + rows_of(tried()),
                best.cause.mend[0].format(best.trial.label),
            )
    others = " and ".join(cases) or "no card, and no engine"
    healthy = f"Healthy: {here.mean + 1:.2f} tokens a round here, compared with {others}."
    if served is not None and served.drafting:
        healthy += (
            f" Of {served.engine} the prompts and the answers were compared, not the acceptance: it has "
            f"{served.drafting}, {served.drafted:.1f} drafts a round here. To compare that too, start it with "
            f"decoding.method=chain decoding.budget={margin}."
        )
    if seen := SHORT.shows(Case(target, drafter, reference, material, ours, ours)):
        return Diagnosis(True, f"{healthy} But {SHORT.name}: {seen}.", rows, SHORT, SHORT.mend[0])
    return Diagnosis(True, healthy, rows)


def diagnose(
    case: Case,
    tried: Callable[[], list[Tried]],
    rows: list[tuple[str, Acceptance]],
    names: dict[str, str],
) -> Diagnosis | None:
    """Return what is wrong in a comparison, None where nothing is."""
    low = case.low
    side = 0 if case.served is None else 1
    here = 1 + Acceptance.of_all(case.ours).mean
    there = 1 + Acceptance.of_all(case.goal).mean
    short = f"{here:.2f} tokens a round here, {there:.2f} by its card"
    if case.served is not None:
        short = f"{there:.2f} tokens a round at {case.served.engine}, {here:.2f} here"
    for cause in CAUSES:
        if seen := cause.shows(case):
            return named(cause, f"{seen} ({short})", rows, cause.mend[side].format("", **names))
    if not low and case.apart < APART:
        return None
    away = max(1, difference(case.ours, case.goal))
    best = min(tried(), key=lambda one: difference(one.found, case.goal))
    score = 1 - difference(best.found, case.goal) / away
    rows = rows + rows_of(tried())
    if score >= (EXPLAINS if low else EXACTLY):
        verdict = f"{best.trial.label} explains {100 * score:.0f} % of {short}"
        return named(
            best.cause, verdict, rows, best.cause.mend[side].format(best.trial.label, **names)
        )
    return Diagnosis(False, f"Low, and no known cause explains it: {short}.", rows) if low else None


def rows_of(tried: list[Tried]) -> list[tuple[str, Acceptance]]:
    """Return trials as evidence."""
    return [(f"{one.cause.name}: {one.trial.label}", Acceptance.of_all(one.found)) for one in tried]


def named(cause: Cause, verdict: str, rows: list[tuple[str, Acceptance]], mend: str) -> Diagnosis:
    """Return the diagnosis of a known cause."""
    return Diagnosis(False, f"{cause.name.capitalize()}: {verdict}.", rows, cause, mend)


def report(diagnosis: Diagnosis) -> str:
    """Return the verdict, the evidence, and what to do, as text."""
    lines = [
        diagnosis.verdict,
        "",
        f"{'acceptance by position':<58}rounds  τ     1    2    3    4    5    6    7 ...",
    ]
    for what, acceptance in diagnosis.evidence:
        shares = " ".join(f"{100 * share:3.0f}%" for share in acceptance.shares)
        lines.append(f"{what[:57]:<58}{acceptance.rounds:6d}  {1 + acceptance.mean:4.2f} {shares}")
    return "\n".join(lines + (["", f"What to do: {diagnosis.mend}"] if diagnosis.mend else []))
